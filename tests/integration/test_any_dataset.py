"""Scripts and datasets that know nothing of this loader, with the import changed: the stock loader's batches.

``BY_DALI`` has those that DALI decodes, and ``IN_WORKERS`` those that the workers make, which the log then says.
"""

from __future__ import annotations

import functools
import io
import logging
import mmap
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader as StockLoader, Dataset, IterableDataset
from torchvision import datasets as torchvisions, transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, read_image
from torchvision.transforms import functional as F, v2

import proxyloader

from ..side_by_side import assert_as_torch, by_dali
from ..tiers import by_default
from .roads import Stream

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # as WebDataset leaves them
]

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
TO_TENSOR, TO_FLOAT = v1.ToTensor(), v2.ToDtype(torch.float32, scale=True)
TRAIN_V2 = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage(), TO_FLOAT])
NORMALIZE = v1.Normalize([0.5] * 3, [0.25] * 3)
CROP = v1.RandomCrop(40)


def opened(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


class Photographs(Dataset[Any]):
    def __init__(self, root: Path, get: Callable[[Path, int], Any]) -> None:
        self.paths, self.get = sorted(root.glob("*/*.jpg"))[:24], get

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.get(self.paths[index], index)


class Photo(Photographs):
    """A dataset with a transform under a name of its own."""

    def __init__(self, root: Path, **transforms: Any) -> None:
        super().__init__(root, self.taken)
        vars(self).update(transforms)

    def taken(self, path: Path, index: int) -> Any:
        (name,) = vars(self).keys() - {"paths", "get"}
        return getattr(self, name)(opened(path)), index


# --- functions that a dataset calls with the path and the index of a sample


def one_by_one(path: Path, index: int) -> Any:
    image = v1.RandomResizedCrop(32)(opened(path))
    image = v1.ColorJitter(0.2)(image) if image.width > 40 else image
    return NORMALIZE(v1.ToTensor()(image)), image.size[0]


def two_views(path: Path, index: int) -> Any:
    """And an image of another sample."""
    image, other = opened(path), opened(max(path.parent.iterdir()))
    return {"views": [TRAIN(image), TRAIN(image)], "other": TRAIN_V2(other), "path": path.name}


def with_arithmetic(path: Path, index: int) -> Any:
    image = TRAIN(opened(path)) * 2 - 1
    image[:, 8:16, 8:16] = 0
    return image, image.shape[-1], torch.stack([image, image.flip(-1)])


def with_all_generators(path: Path, index: int) -> Any:
    image = CROP(opened(path)) if random.random() < 0.5 else opened(path)
    return TRAIN(image) * float(np.random.rand()) + torch.rand(3, 1, 1), index


def looked_at_now_and_then(path: Path, index: int) -> Any:
    image = TRAIN(opened(path))
    return image / max(float(image.max()), 0.1) if index % 8 == 0 else image, index


def read_by_torchvision(path: Path, index: int) -> Any:
    transform = v1.Compose([v1.RandomResizedCrop(32, antialias=True), v1.ConvertImageDtype(torch.float32), NORMALIZE])
    return transform(read_image(str(path))), index


def decoded_by_torchvision(path: Path, index: int) -> Any:
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return TRAIN_V2(decode_image(data, ImageReadMode.RGB)), index


def of_kornia(path: Path, index: int) -> Any:
    flip = pytest.importorskip("kornia.augmentation").RandomHorizontalFlip(p=0.5)
    return flip(TRAIN(opened(path)))[0], index


def of_albumentations(path: Path, index: int) -> Any:
    a = pytest.importorskip("albumentations")
    made = a.Compose([a.Resize(32, 32), a.Normalize()])(image=np.asarray(opened(path)))["image"]
    return torch.from_numpy(made.transpose(2, 0, 1)), index


def of_opencv(path: Path, index: int) -> Any:
    cv2 = pytest.importorskip("cv2")
    image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    return v1.Compose([v1.ToPILImage(), *TRAIN.transforms])(image), index


def mapped(path: Path, index: int) -> Any:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return TRAIN(Image.open(memory).convert("RGB")), index


class FromTheStart(io.BytesIO):
    """As of a client of remote storage: it can only seek from the start."""

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence:
            raise io.UnsupportedOperation
        return super().seek(offset)


def read_from_the_start(path: Path, index: int) -> Any:
    return TRAIN(Image.open(FromTheStart(path.read_bytes())).convert("RGB")), index


class Tilted(v1.RandomResizedCrop):
    def forward(self, img: Any) -> Any:
        return super().forward(img).rotate(10)


TILT = v1.Lambda(lambda image: image.rotate(10))


# --- datasets


class Around(Photographs):
    """As a wrapper of a library: transforms are called in the dataset inside, and again outside."""

    def __init__(self, root: Path) -> None:
        inner = ImageFolder(str(root), v1.Compose([v1.Resize(60), v1.RandomCrop(50)]))
        super().__init__(root, lambda path, index: (NORMALIZE(TO_TENSOR(CROP(inner[index][0]))), index))


class Zipped(Photographs):
    """All files in one, which each process opens by itself."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, self.taken)
        self.path = root.parent / "archive.zip"
        with zipfile.ZipFile(self.path, "w") as archive:
            for index, path in enumerate(self.paths):
                archive.write(path, f"{index}.jpg")

    @functools.cached_property
    def archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    def taken(self, path: Path, index: int) -> Any:
        with self.archive.open(f"{index}.jpg") as file:
            return TRAIN(Image.open(file).convert("RGB")), index


def hugging_face(root: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    paths = sorted(root.glob("*/*.jpg"))[:24]
    columns = {"image": [str(path) for path in paths], "label": list(range(len(paths)))}
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def transformed_rows(rows: dict[str, list[Any]]) -> dict[str, Any]:
    return {"pixel_values": [TRAIN(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}


def web_dataset(root: Path) -> Any:
    web = pytest.importorskip("webdataset")
    path = root.parent / "photos.tar"
    with web.TarWriter(str(path)) as tar:
        for index, photo in enumerate(sorted(root.glob("*/*.jpg"))[:24]):
            tar.write({"__key__": f"{index:05d}", "jpg": photo.read_bytes(), "cls": index})
    read = web.WebDataset(str(path), shardshuffle=False, empty_check=False).decode("pil").to_tuple("jpg", "cls")
    return read.map_tuple(TRAIN, lambda label: label)


def of_timm(root: Path) -> Any:
    transform = pytest.importorskip("timm.data").create_transform(32, True, color_jitter=None, interpolation="bilinear")
    return Photo(root, train_transform=transform)


def pets(root: Path) -> Any:
    images, annotations = (root.parent / "oxford-iiit-pet" / name for name in ("images", "annotations"))
    for folder in (images, annotations):
        folder.mkdir(parents=True, exist_ok=True)
    for k, path in enumerate(sorted(root.glob("*/*.jpg"))[:20]):
        shutil.copy(path, images / f"a_{k}.jpg")
    (annotations / "trainval.txt").write_text("\n".join(f"a_{k} {k % 2 + 1} 1 1" for k in range(20)))
    return torchvisions.OxfordIIITPet(str(root.parent), transform=TRAIN)


Make = Callable[[Path], Any]


def of(get: Callable[[Path, int], Any]) -> Make:
    return functools.partial(Photographs, get=get)


def with_each(*transforms: Any) -> Make:
    """One object, made anew for each sample."""
    return of(lambda path, index: (v1.Compose([*transforms])(opened(path)), index))


BY_DALI: dict[str, Make] = {
    "ImageFolder": lambda root: ImageFolder(str(root), TRAIN),
    "OxfordIIITPet": pets,
    "an attribute .transform": lambda root: Photo(root, transform=TRAIN),
    "an attribute .tf": lambda root: Photo(root, tf=TRAIN),
    "v2 with a label": of(lambda path, index: TRAIN_V2(opened(path), index)),
    "made in __getitem__": with_each(v1.Resize((48, 48)), v1.RandomCrop(64, pad_if_needed=True), TO_TENSOR, NORMALIZE),
    "one by one": of(one_by_one),
    "two views and a dict": of(two_views),
    "all generators": of(with_all_generators),
    "as opened": of(lambda path, index: (TRAIN(Image.open(path)), index)),
    "turned upright": of(lambda path, index: (TRAIN(ImageOps.exif_transpose(Image.open(path)).convert("RGB")), index)),
    "arithmetic": of(with_arithmetic),
    "a Lambda on tensors": with_each(*TRAIN.transforms, v1.Lambda(lambda image: image.clamp(0.1, 0.9))),
    "Lambdas around transforms": with_each(v1.Lambda(lambda image: CROP(image)), v1.Lambda(lambda x: 1 - TO_TENSOR(x))),
    "read_image": of(read_by_torchvision),
    "decode_image": of(decoded_by_torchvision),
    "read_image and arithmetic": of(lambda path, index: (read_image(str(path))[:, :90, :90].float() / 255, index)),
    "kornia behind": of(of_kornia),
    "timm's transform": of_timm,
    "a dataset around another": Around,
    "a stream": lambda root: Stream(sorted(root.glob("*/*.jpg"))[:24], TRAIN, opened),
    "zip": Zipped,
    "mmap": of(mapped),
    "datasets, with_transform": lambda root: hugging_face(root).with_transform(transformed_rows),
    "datasets, set_transform": lambda root: (data := hugging_face(root), data.set_transform(transformed_rows))[0],
    "datasets, streaming": lambda root: (
        hugging_face(root)
        .to_iterable_dataset(num_shards=4)
        .map(lambda row: {"pixel_values": TRAIN(row["image"].convert("RGB"))}, remove_columns=["image"])
    ),
    "WebDataset": web_dataset,
}

IN_WORKERS: dict[str, Make] = {
    "looked at now and then": of(looked_at_now_and_then),
    "albumentations": of(of_albumentations),
    "OpenCV and ToPILImage": of(of_opencv),
    "Pillow's own operations": of(lambda path, index: (TO_TENSOR(opened(path).resize((32, 32)).rotate(10)), index)),
    "a Lambda on PIL images": with_each(v1.RandomResizedCrop(32), TILT, TO_TENSOR),
    "seek from the start only": of(read_from_the_start),
    "NumPy": of(lambda path, index: (TRAIN(opened(path)).numpy(), index)),
    "torchvision's functions": of(lambda path, index: (F.to_tensor(F.resize(opened(path), [32, 32])), index)),
    "a subclass of a transform": with_each(Tilted(32), TO_TENSOR),
}


def loaded_from(make: Make, root: Path, workers: int, persistent: bool = False, **ours: Any) -> Any:
    """What ``assert_as_torch`` builds; ``ours`` are arguments of this loader alone."""

    def build(kind: Any) -> Any:
        dataset = make(root)
        how: dict[str, Any] = ours if kind is not StockLoader else {}
        how = how | ({} if isinstance(dataset, IterableDataset) else {"shuffle": True})
        return kind(dataset, 8, num_workers=workers, persistent_workers=persistent, **how)

    return build


def tensors_in(value: Any) -> list[torch.Tensor]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [value] if isinstance(value, torch.Tensor) else [each for part in parts for each in tensors_in(part)]


def by_dali_on_its_device(loader: Any) -> Any:
    seen = by_dali(loader)
    if isinstance(loader, proxyloader.DataLoader):
        images = [each for epoch in seen["epochs"] for each in tensors_in(epoch["batches"]) if each.ndim > 1]
        assert {each.device.type for each in images} == {loader.device}
    return seen


def images_by(text: str) -> tuple[int, ...]:
    """What the log says: how many images DALI decoded, how many Pillow, and how many were produced in the workers."""
    number = r"([\d,]+)"
    said = f"by DALI: {number}; .*, then transformed by DALI: {number}; processed in the workers: {number}"
    found = re.search(said, text)
    return tuple(int(number.replace(",", "")) for number in found.groups()) if found else (0, 0, 0)


@pytest.fixture
def root(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """Of photographs, in a folder to write to. All of the log is kept."""
    caplog.set_level(logging.INFO, "proxyloader")
    (tmp_path / "photos").symlink_to(photos, target_is_directory=True)
    return tmp_path / "photos"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", BY_DALI)
def test_dali_decodes_it_and_the_batches_are_the_stock_loaders(
    name: str, workers: int, root: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_as_torch(loaded_from(BY_DALI[name], root, workers), by_dali_on_its_device, device=device)
    decoded, by_pillow, in_workers = images_by(caplog.text)
    assert decoded >= 20 and by_pillow == in_workers == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", IN_WORKERS)
def test_what_the_workers_make_is_the_stock_loaders_and_the_log_says_so(
    name: str, workers: int, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_as_torch(loaded_from(IN_WORKERS[name], root, workers))
    _, by_pillow, in_workers = images_by(caplog.text)
    assert by_pillow + in_workers > 0 and "Only images that DALI decodes load faster" in caplog.text


@pytest.mark.parametrize("start", by_default({"spawn": "spawn", "forkserver": "forkserver"}, "spawn"))
@pytest.mark.parametrize("name", ["an attribute .tf", "one by one", "read_image"])
def test_workers_may_be_started_in_any_way(name: str, start: str, photos: Path, device: str) -> None:
    build = loaded_from(BY_DALI[name], photos, 1, persistent=True, multiprocessing_context=start)
    assert_as_torch(build, by_dali, device=device)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["ImageFolder", "one by one", "OpenCV and ToPILImage"])
def test_a_dataset_may_be_left_to_torch(name: str, workers: int, photos: Path, device: str) -> None:
    make, batches = (BY_DALI | IN_WORKERS)[name], []

    def kept(loader: Any) -> Any:
        batches.append(list(loader))
        assert not isinstance(loader, proxyloader.DataLoader) or loader.backend == "torch: translate=False"
        return batches[-1]

    assert_as_torch(loaded_from(make, photos, workers, translate=False), kept, device=device)
    assert all(torch.equal(theirs.cpu(), ours.cpu()) for theirs, ours in zip(*map(tensors_in, batches), strict=True))
    assert {each.device.type for each in tensors_in(batches[1]) if each.ndim > 1} == {device}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [".png", ".jpg"])
def test_who_makes_an_image_does_not_depend_on_the_first_of_its_batch(
    first: str, workers: int, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Photographs(root, read_by_torchvision)
    for index in range(4, 8):
        png = tmp_path / f"{index}.png"
        Image.open(dataset.paths[index]).save(png)
        dataset.paths[index] = png
    dataset.paths = sorted(dataset.paths[:8], key=lambda path: path.suffix != first)
    assert_as_torch(lambda kind: kind(dataset, 8, num_workers=workers))
    assert images_by(caplog.text) == (4, 0, 4)
