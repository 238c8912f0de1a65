"""Scripts and datasets that know nothing of this loader, with the import changed: the stock loader's batches.

``BY_DALI`` has those that DALI decodes, and ``IN_WORKERS`` those that the workers make, which the log then says.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import random
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate, get_worker_info
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import MNIST, FashionMNIST, ImageFolder
from torchvision.io import ImageReadMode, decode_image, read_image
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import proxyloader

pytestmark = [
    pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 decodes at once"),
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # as WebDataset leaves them
]

MEAN_LEVELS = 0.5
"""Largest mean difference of a batch, in levels of 255."""

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
TRAIN_V2 = v2.Compose(
    [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
)
NORMALIZE = v1.Normalize([0.5] * 3, [0.25] * 3)


def installed(name: str) -> Any:
    """A library of the extra "test", which a machine with a GPU may lack."""
    return pytest.importorskip(name)


def opened(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


class Photographs(Dataset[Any]):
    """Calls a function with the path and the index of each photograph."""

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


def by_a_global(path: Path, index: int) -> Any:
    return TRAIN(opened(path)), index


def with_v2(path: Path, index: int) -> Any:
    return TRAIN_V2(opened(path), index)


def made_for_each(path: Path, index: int) -> Any:
    return v1.Compose([v1.RandomCrop(64, pad_if_needed=True), v1.ToTensor()])(opened(path)), index


def one_by_one(path: Path, index: int) -> Any:
    image = v1.RandomResizedCrop(32)(opened(path))
    image = v1.ColorJitter(0.2)(image) if image.width > 40 else image
    return NORMALIZE(v1.ToTensor()(image)), image.size[0]


def two_views(path: Path, index: int) -> Any:
    image = opened(path)
    return TRAIN(image), TRAIN(image)


def five_crops(path: Path, index: int) -> Any:
    to_float = v2.ToDtype(torch.float32, scale=True)
    transform = v2.Compose([v2.ToImage(), v2.FiveCrop(48), to_float, v2.Normalize([0.5], [0.25])])
    return transform(opened(path)), index


def as_a_dict(path: Path, index: int) -> Any:
    return {"pixel_values": TRAIN(opened(path)), "labels": index, "path": path.name}


def in_a_block(path: Path, index: int) -> Any:
    with path.open("rb") as file, Image.open(file) as image:
        return TRAIN(image.convert("RGB")), index


def upright(path: Path, index: int) -> Any:
    return TRAIN(ImageOps.exif_transpose(Image.open(path)).convert("RGB")), index


def with_arithmetic(path: Path, index: int) -> Any:
    image = TRAIN(opened(path)) * 2 - 1
    image[:, 8:16, 8:16] = 0
    return image, image.shape[-1], torch.stack([image, image.flip(-1)])


def in_a_lambda(path: Path, index: int) -> Any:
    return v1.Compose([*TRAIN.transforms, v1.Lambda(lambda image: image.clamp(0.1, 0.9))])(opened(path)), index


def with_noise(path: Path, index: int) -> Any:
    image = TRAIN(opened(path))
    return image + 0.1 * torch.randn_like(image), index


def looked_at_now_and_then(path: Path, index: int) -> Any:
    image = TRAIN(opened(path))
    return image / max(float(image.max()), 0.1) if index % 8 == 0 else image, index


def read_by_torchvision(path: Path, index: int) -> Any:
    transform = v1.Compose([v1.RandomResizedCrop(32, antialias=True), v1.ConvertImageDtype(torch.float32), NORMALIZE])
    return transform(read_image(str(path))), index


def decoded_by_torchvision(path: Path, index: int) -> Any:
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return TRAIN_V2(decode_image(data, ImageReadMode.RGB)), index


def divided(path: Path, index: int) -> Any:
    return read_image(str(path))[:, :90, :90].float() / 255, index


def of_kornia(path: Path, index: int) -> Any:
    flip = installed("kornia.augmentation").RandomHorizontalFlip(p=0.5)
    return flip(TRAIN(opened(path)))[0], index


def of_albumentations(path: Path, index: int) -> Any:
    a = installed("albumentations")
    made = a.Compose([a.Resize(32, 32), a.Normalize()])(image=np.asarray(opened(path)))["image"]
    return torch.from_numpy(made.transpose(2, 0, 1)), index


def of_opencv(path: Path, index: int) -> Any:
    cv2 = installed("cv2")
    image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    return v1.Compose([v1.ToPILImage(), *TRAIN.transforms])(image), index


def of_opencv_as_a_tensor(path: Path, index: int) -> Any:
    image = v1.ToTensor()(installed("cv2").imread(str(path)))
    return v1.Resize((32, 32), antialias=True)(image), index


def in_grey(path: Path, index: int) -> Any:
    return TRAIN(Image.open(path).convert("L")), index


def with_a_mask(path: Path, index: int) -> Any:
    image = opened(path)
    return TRAIN_V2(image, tv_tensors.Mask(np.zeros((image.height, image.width), np.uint8)))


def by_pillow(path: Path, index: int) -> Any:
    return v1.ToTensor()(opened(path).resize((32, 32)).rotate(10)), index


def with_a_function_of_pillows(path: Path, index: int) -> Any:
    transform = v1.Compose([v1.RandomResizedCrop(32), v1.Lambda(lambda image: image.rotate(10)), v1.ToTensor()])
    return transform(opened(path)), index


def as_an_array(path: Path, index: int) -> Any:
    return TRAIN(opened(path)).numpy(), index


def by_functions(path: Path, index: int) -> Any:
    return F.to_tensor(F.resize(opened(path), [32, 32])), index


class Tilted(v1.RandomResizedCrop):
    def forward(self, img: Any) -> Any:
        return super().forward(img).rotate(10)


def with_a_subclass(path: Path, index: int) -> Any:
    return v1.Compose([Tilted(32), v1.ToTensor()])(opened(path)), index


# --- datasets


class Cached(Photographs):
    def __init__(self, root: Path) -> None:
        super().__init__(root, self.taken)
        self.images: dict[int, Image.Image] = {}

    def taken(self, path: Path, index: int) -> Any:
        if index not in self.images:
            self.images[index] = opened(path)
        return TRAIN(self.images[index]), index


class Stream(IterableDataset[Any]):
    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))[:24]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(first, len(self.paths), step):
            yield by_a_global(self.paths[index], index)


class Arrays(Dataset[Any]):
    """As MNIST and CIFAR keep their images."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, (24, *shape), np.uint8)
        self.transform = v1.Compose([v1.RandomCrop(shape[0], padding=2), v1.ToTensor()])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.fromarray(self.data[index])), index


class Pngs(ImageFolder):
    def __init__(self, root: Path, transform: Any) -> None:
        (root.parent / "pngs" / "a").mkdir(parents=True, exist_ok=True)
        for index, path in enumerate(sorted(root.glob("*/*.jpg"))[:24]):
            Image.open(path).save(root.parent / "pngs" / "a" / f"{index:02d}.png", compress_level=1)
        super().__init__(str(root.parent / "pngs"), transform)


class Zipped(Photographs):
    def __init__(self, root: Path) -> None:
        super().__init__(root, self.taken)
        self.path = root.parent / "photos.zip"
        self.archive: Any = None
        with zipfile.ZipFile(self.path, "w") as archive:
            for index, path in enumerate(self.paths):
                archive.write(path, f"{index}.jpg")

    def taken(self, path: Path, index: int) -> Any:
        self.archive = self.archive or zipfile.ZipFile(self.path)
        with self.archive.open(f"{index}.jpg") as file:
            return TRAIN(Image.open(file).convert("RGB")), index


class InLmdb(Photographs):
    def __init__(self, root: Path) -> None:
        super().__init__(root, self.taken)
        self.path = str(root.parent / f"lmdb{random.random()}")
        self.database: Any = None
        with installed("lmdb").open(self.path, map_size=1 << 26) as database, database.begin(write=True) as writes:
            for index, path in enumerate(self.paths):
                writes.put(b"%d" % index, path.read_bytes())

    def taken(self, path: Path, index: int) -> Any:
        if self.database is None:
            self.database = importlib.import_module("lmdb").open(self.path, readonly=True, lock=False)
        with self.database.begin() as reads:
            return TRAIN(Image.open(io.BytesIO(reads.get(b"%d" % index))).convert("RGB")), index


class InHdf5(Photographs):
    def __init__(self, root: Path) -> None:
        super().__init__(root, self.taken)
        h5py = installed("h5py")
        self.path = root.parent / f"photos{random.random()}.h5"
        self.files: Any = None
        with h5py.File(self.path, "w") as file:
            files = file.create_dataset("files", len(self.paths), h5py.vlen_dtype(np.uint8))
            for index, path in enumerate(self.paths):
                files[index] = np.fromfile(path, np.uint8)

    def taken(self, path: Path, index: int) -> Any:
        if self.files is None:
            self.files = importlib.import_module("h5py").File(self.path)["files"]
        return TRAIN(Image.open(io.BytesIO(self.files[index].tobytes())).convert("RGB")), index


def hugging_face(root: Path) -> Any:
    datasets = installed("datasets")
    paths = sorted(root.glob("*/*.jpg"))[:24]
    columns = {"image": [str(path) for path in paths], "label": list(range(len(paths)))}
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def transformed_rows(rows: dict[str, list[Any]]) -> dict[str, Any]:
    return {"pixel_values": [TRAIN(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}


def transformed_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"pixel_values": TRAIN(row["image"].convert("RGB")), "label": row["label"]}


def web_dataset(root: Path) -> Any:
    web = installed("webdataset")
    path = root.parent / "photos.tar"
    with web.TarWriter(str(path)) as tar:
        for index, photo in enumerate(sorted(root.glob("*/*.jpg"))[:24]):
            tar.write({"__key__": f"{index:05d}", "jpg": photo.read_bytes(), "cls": index})
    read = web.WebDataset(str(path), shardshuffle=False, empty_check=False).decode("pil").to_tuple("jpg", "cls")
    return read.map_tuple(TRAIN, lambda label: label)


def of_timm(root: Path) -> Any:
    transform = installed("timm.data").create_transform(32, is_training=True, re_prob=0.5, color_jitter=None)
    return Photo(root, train_transform=transform)


Make = Callable[[Path], Any]


def of(get: Callable[[Path, int], Any]) -> Make:
    return functools.partial(Photographs, get=get)


BY_DALI: dict[str, Make] = {
    "ImageFolder": lambda root: ImageFolder(str(root), TRAIN),
    "ImageFolder with a Lambda on tensors": lambda root: ImageFolder(
        str(root), v1.Compose([*TRAIN.transforms, v1.Lambda(lambda image: image * 2)])
    ),
    "an attribute .transform": lambda root: Photo(root, transform=TRAIN),
    "an attribute .tf": lambda root: Photo(root, tf=TRAIN),
    "an attribute .train_transform": lambda root: Photo(root, train_transform=TRAIN_V2),
    "a global": of(by_a_global),
    "v2 with a label": of(with_v2),
    "made in __getitem__": of(made_for_each),
    "one by one": of(one_by_one),
    "two views": of(two_views),
    "five crops": of(five_crops),
    "a dict": of(as_a_dict),
    "opened in a block": of(in_a_block),
    "turned upright": of(upright),
    "arithmetic": of(with_arithmetic),
    "a Lambda on tensors": of(in_a_lambda),
    "noise": of(with_noise),
    "read_image": of(read_by_torchvision),
    "decode_image": of(decoded_by_torchvision),
    "read_image and arithmetic": of(divided),
    "kornia behind": of(of_kornia),
    "timm's transform": of_timm,
    "a cache of images": Cached,
    "a stream": Stream,
    "zip": Zipped,
    "LMDB": InLmdb,
    "HDF5": InHdf5,
    "datasets, with_transform": lambda root: hugging_face(root).with_transform(transformed_rows),
    "datasets, set_transform": lambda root: (data := hugging_face(root), data.set_transform(transformed_rows))[0],
    "datasets, streaming": lambda root: (
        hugging_face(root).to_iterable_dataset(num_shards=4).map(transformed_row, remove_columns=["image"])
    ),
    "WebDataset": web_dataset,
}

IN_WORKERS: dict[str, Make] = {
    "looked at now and then": of(looked_at_now_and_then),
    "albumentations": of(of_albumentations),
    "OpenCV and ToPILImage": of(of_opencv),
    "OpenCV and ToTensor": of(of_opencv_as_a_tensor),
    "grey": of(in_grey),
    "a mask": of(with_a_mask),
    "Pillow's own operations": of(by_pillow),
    "a Lambda on PIL images": of(with_a_function_of_pillows),
    "PNGs and a Lambda on PIL images": lambda root: Pngs(
        root, v1.Compose([v1.Lambda(lambda image: image.rotate(10)), *TRAIN.transforms])
    ),
    "NumPy": of(as_an_array),
    "torchvision's functions": of(by_functions),
    "a subclass of a transform": of(with_a_subclass),
    "MNIST": lambda root: Arrays((28, 28)),
    "CIFAR": lambda root: Arrays((32, 32, 3)),
}


def loaded(kind: Any, dataset: Any, num_workers: int, **options: Any) -> tuple[list[Any], Any]:
    """All batches of an epoch under a seed, and the loader."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    is_stream = isinstance(dataset, IterableDataset)
    loader = kind(dataset, batch_size=8, shuffle=None if is_stream else True, num_workers=num_workers, **options)
    return list(loader), loader


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return leaves([item for pair in value.items() for item in pair])
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, (list, tuple)) else [value]


def assert_same(ours: list[Any], stock: list[Any], device: str | None = None) -> None:
    found, wanted = leaves(ours), leaves(stock)
    assert len(found) == len(wanted) and len(ours) == len(stock)
    for one, other in zip(found, wanted):
        if not isinstance(other, torch.Tensor):
            assert one == other
        elif other.is_floating_point() or other.ndim > 1:
            assert (one.shape, one.dtype, type(one)) == (other.shape, other.dtype, torch.Tensor)
            assert device is None or one.device.type == device
            levels = (
                255 * (one.cpu().double() - other.double()).abs().mean() / (1 if other.is_floating_point() else 255)
            )
            assert levels < MEAN_LEVELS
        else:
            assert torch.equal(one.cpu(), other)


def images_by(text: str) -> tuple[int, ...]:
    """What the log says: how many images DALI decoded, how many Pillow, and how many were made in the workers."""
    number = r"([\d,]+)"
    said = f"DALI decoded {number} images, and transformed {number} that .*; {number} were made in the workers"
    found = re.search(said, text)
    return tuple(int(number.replace(",", "")) for number in found.groups()) if found else (0, 0, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", BY_DALI)
def test_dali_decodes_it_and_the_batches_are_the_stock_loaders(
    name: str, num_workers: int, photos: Path, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "photos"
    root.symlink_to(photos, target_is_directory=True)
    caplog.set_level(logging.INFO, "proxyloader")
    stock, _ = loaded(StockLoader, BY_DALI[name](root), num_workers)
    ours, loader = loaded(proxyloader.DataLoader, BY_DALI[name](root), num_workers, device=device)
    assert_same(ours, stock, device)
    by_dali, by_pillow, in_workers = images_by(caplog.text)
    assert by_dali >= 24 and by_pillow == in_workers == 0
    assert loader.backend.startswith(f"DALI on {device}: ")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", IN_WORKERS)
def test_what_the_workers_make_is_the_stock_loaders_and_the_log_says_so(
    name: str, num_workers: int, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "photos"
    root.symlink_to(photos, target_is_directory=True)
    caplog.set_level(logging.INFO, "proxyloader")
    stock, _ = loaded(StockLoader, IN_WORKERS[name](root), num_workers)
    ours, _ = loaded(proxyloader.DataLoader, IN_WORKERS[name](root), num_workers, device="cpu")
    assert_same(ours, stock)
    _, by_pillow, in_workers = images_by(caplog.text)
    assert by_pillow + in_workers > 0
    assert ("That is torch's speed" in caplog.text) == (name != "CIFAR")  # of an array nothing is decoded


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("name", ["an attribute .tf", "one by one", "read_image", "MNIST"])
def test_workers_may_be_started_in_any_way(name: str, start: str, photos: Path, device: str) -> None:
    make = (BY_DALI | IN_WORKERS)[name]
    stock, _ = loaded(StockLoader, make(photos), 1)
    ours, _ = loaded(proxyloader.DataLoader, make(photos), 1, device=device, multiprocessing_context=start)
    assert_same(ours, stock)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mix", [v2.MixUp, v2.CutMix])
def test_mixing_in_a_collate_fn_draws_what_the_stock_loader_draws(
    mix: Any, num_workers: int, photos: Path, device: str
) -> None:
    def collate(samples: Any) -> Any:
        images, labels = default_collate(samples)
        return mix(num_classes=24)(images, labels)

    dataset = of(by_a_global)(photos)
    stock, _ = loaded(StockLoader, dataset, num_workers, collate_fn=collate)
    ours, _ = loaded(proxyloader.DataLoader, dataset, num_workers, collate_fn=collate, device=device)
    assert_same(ours, stock)
    for (_, labels), (_, wanted) in zip(ours, stock):
        assert torch.equal(labels.cpu(), wanted)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["ImageFolder", "one by one", "OpenCV and ToPILImage"])
def test_a_dataset_may_be_left_to_torch(name: str, num_workers: int, photos: Path, device: str) -> None:
    make = (BY_DALI | IN_WORKERS)[name]
    stock, _ = loaded(StockLoader, make(photos), num_workers)
    ours, loader = loaded(proxyloader.DataLoader, make(photos), num_workers, device=device, translate=False)
    assert_same(ours, stock, device)
    assert all(torch.equal(one[0].cpu(), other[0]) for one, other in zip(ours, stock))
    assert loader.backend == "torch: translate=False"


@pytest.mark.parametrize("make", [MNIST, FashionMNIST, "a part", "both"])
def test_grey_arrays_of_torchvisions_datasets_are_left_to_torch(make: Any, tmp_path: Path, device: str) -> None:
    for cls in (MNIST, FashionMNIST):
        raw = tmp_path / cls.__name__ / "raw"
        raw.mkdir(parents=True)
        for kind in ("train", "t10k"):
            images = np.random.default_rng(0).integers(0, 256, (24, 28, 28), np.uint8)
            (raw / f"{kind}-images-idx3-ubyte").write_bytes(
                struct.pack(">IIII", 2051, *images.shape) + images.tobytes()
            )
            (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 24) + bytes(range(24)))
    transform = v1.Compose([v1.RandomCrop(28, padding=2), v1.ToTensor(), v1.Normalize((0.13,), (0.31,))])
    one, other = (cls(str(tmp_path), transform=transform) for cls in (MNIST, FashionMNIST))
    dataset = {"a part": Subset(one, range(16)), "both": ConcatDataset([one, other])}.get(make)
    dataset = dataset or make(str(tmp_path), transform=transform)
    stock, _ = loaded(StockLoader, dataset, 2)
    ours, loader = loaded(proxyloader.DataLoader, dataset, 2, device=device)
    assert_same(ours, stock, device)
    left = "torch: its images are grey arrays, which DALI does not take"
    assert (loader.backend == left) is (device == "cpu")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_torchvision_cannot_decode_may_be_left_out(num_workers: int, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for index, path in enumerate(sorted(photos.glob("*/*.jpg"))[:8]):
        data = path.read_bytes()
        (tmp_path / "a" / f"{index}.jpg").write_bytes(data[: len(data) // 2] if index == 5 else data)
    dataset = of(read_by_torchvision)(tmp_path)
    loader = proxyloader.DataLoader(dataset, 4, num_workers=num_workers, device="cpu", on_error="skip")
    assert [labels.tolist() for _, labels in loader] == [[0, 1, 2, 3], [4, 6, 7]]
    assert [sample.index for sample in loader.errors] == [5]
    with pytest.raises(RuntimeError, match="incomplete or truncated"):
        list(proxyloader.DataLoader(dataset, 4, num_workers=num_workers, device="cpu"))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("first", [".png", ".jpg"])
def test_who_makes_an_image_does_not_depend_on_the_first_of_its_batch(
    first: str, num_workers: int, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxyloader")
    paths = sorted(photos.glob("*/*.jpg"))[:8]
    for index, path in enumerate(paths[4:]):
        paths[4 + index] = tmp_path / f"{index}.png"
        Image.open(path).save(paths[4 + index])
    dataset = of(read_by_torchvision)(photos)
    dataset.paths = sorted(paths, key=lambda path: path.suffix != first)
    torch.manual_seed(3)
    ours = list(proxyloader.DataLoader(dataset, 8, num_workers=num_workers, device="cpu"))
    torch.manual_seed(3)
    assert_same(ours, list(StockLoader(dataset, 8, num_workers=num_workers)))
    assert images_by(caplog.text) == (4, 0, 4)
