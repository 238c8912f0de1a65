"""What leaves a dataset is what leaves it under torch's loader: several images, PIL images, ``tv_tensors.Image``."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, pipeline_def, types
from PIL import Image, ImageOps
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import ConcatDataset, DataLoader as StockLoader, default_collate
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1, v2
from torchvision.transforms.autoaugment import RandAugment

from proxyloader import DataLoader, ProxyServer
from proxyloader.dali.output_format import OutputFormat

from ..outcomes import outcomes
from ..side_by_side import assert_as_torch
from .roads import read_bytes
from .test_any_dataset import Photographs, opened

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
SMALL = v1.Compose([v1.RandomResizedCrop(16, (0.05, 0.4)), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])
FIVE = v2.Compose([v2.Resize(48), v2.FiveCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


class TwoCrops:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __call__(self, image: Any) -> Any:
        return [self.first(image), self.second(image)]


class Named(TwoCrops):
    def __call__(self, image: Any) -> Any:
        return {"query": self.first(image), "keys": (self.second(image), self.second(image)), "mode": image.mode}


def stacked(samples: list[Any]) -> Any:
    """All crops of all images in one batch, as tests with FiveCrop have it."""
    crops = torch.stack([torch.stack(crops) for crops, _ in samples])
    return crops.flatten(0, 1), torch.tensor([label for _, label in samples])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("transform", "collate_fn"),
    [(TwoCrops(TRAIN, TRAIN), None), (TwoCrops(TRAIN, SMALL), None), (Named(TRAIN, SMALL), None)]
    + [(FIVE, None), (FIVE, stacked)],
    ids=["one transform twice", "two transforms", "named", "FiveCrop", "FiveCrop, stacked"],
)
def test_one_gives_several(folder: ImageFolder, transform: Any, collate_fn: Any, workers: int, device: str) -> None:
    folder.transform = transform
    assert_as_torch(lambda kind: kind(folder, 10, True, num_workers=workers, collate_fn=collate_fn), device=device)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_twice_makes_two_batches(folder: ImageFolder, workers: int, device: str) -> None:
    folder.transform = lambda image: [SMALL(image)] * 2
    for (one, other), _ in DataLoader(folder, 10, num_workers=workers, device=device):
        assert torch.equal(one, other)
        assert not torch.equal(one.add_(1), other)


# --- images of any class ----------------------------------------------------------------------------------------------

PIL: dict[str, Callable[[Any], Any]] = {
    "as opened": lambda path: Image.open(path),
    "converted": lambda path: Image.open(path).convert("RGB"),
    "grey": lambda path: Image.open(path).convert("L"),
    "a copy": lambda path: Image.open(path).copy(),
    "upright": lambda path: ImageOps.exif_transpose(Image.open(path)),
    "flipped": lambda path: v1.RandomHorizontalFlip(1)(v1.Resize(40)(Image.open(path))),
    "pickled": lambda path: pickle.loads(pickle.dumps(Image.open(path).convert("RGB"))),
}

TO_IMAGE = v2.Compose([v2.Resize((40, 48)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def with_used_values(image: Any) -> Any:
    made = TO_IMAGE(image)
    float(made.mean())
    return made


TV: dict[str, Callable[[Any], Any]] = {
    "DALI's": lambda image: TO_IMAGE(image),
    "with arithmetic": lambda image: tv_tensors.wrap(TO_IMAGE(image) * 2, like=TO_IMAGE(image)),
    "whose values were used": with_used_values,
    "with a mask": lambda image: TO_IMAGE(image, tv_tensors.Mask(torch.ones(1, 90, 90))),
}


def opened_by(use: Callable[[Any], Any], photos: Path) -> Photographs:
    return Photographs(photos, lambda path, index: (use(path), index))


def each(loader: Any, dataset: Any, **arguments: Any) -> list[Any]:
    return [sample for batch in loader(dataset, 3, collate_fn=list, **arguments) for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIL)
def test_a_pil_image_leaves_it(photos: Path, name: str, workers: int) -> None:
    dataset = opened_by(PIL[name], photos)
    ours, theirs = (each(kind, dataset, num_workers=workers) for kind in (DataLoader, StockLoader))
    for (mine, label), (other, right) in zip(ours, theirs, strict=True):
        assert (label, mine.mode, mine.size, mine.info) == (right, other.mode, other.size, other.info)
        assert np.array_equal(np.asarray(mine), np.asarray(other))
        assert workers == 0 or type(mine) is type(other)


def test_an_image_in_a_cache_needs_no_proxyloader(photos: Path) -> None:
    pickled = opened_by(lambda path: pickle.dumps([Image.open(path), Image.open(path).convert("RGB")]), photos)
    for data, _ in each(DataLoader, pickled, device="cpu"):
        assert b"proxyloader" not in data
        assert [type(image).__name__ for image in pickle.loads(data)] == ["JpegImageFile", "Image"]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_batch_of_pil_images_is_refused_in_torchs_words(photos: Path) -> None:
    for kind in ("as opened", "converted"):
        ours, theirs = (outcomes(each(opened_by(PIL[kind], photos), 12)) for each in (DataLoader, StockLoader))
        assert [type(each) for each in ours] == [type(each) for each in theirs] == [TypeError, TypeError]
        assert all(str(right) in str(each) for each, right in zip(ours, theirs)), ours


def assert_alike(ours: Any, theirs: Any) -> None:
    """In structure and classes; and images are as close as decoders are."""
    (found, structure), (wanted, wanted_structure) = map(tree_flatten, (ours, theirs))
    assert structure == wanted_structure and list(map(type, found)) == list(map(type, wanted))
    for each, right in zip(found, wanted):
        if isinstance(right, torch.Tensor):
            assert each.shape == right.shape and (each.cpu() - right).abs().float().mean() < 1 / 255


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", TV)
def test_an_image_of_torchvisions_leaves_it(photos: Path, name: str, workers: int, device: str) -> None:
    def sample(path: Path, index: int) -> Any:
        return {"depth": torch.ones(40, 48), "image": TV[name](opened(path)), "label": index}

    dataset = Photographs(photos, sample)
    for arguments in (dict(batch_size=None), dict(batch_size=3, collate_fn=list), dict(batch_size=3)):
        ours = list(DataLoader(dataset, num_workers=workers, device=device, **arguments))
        assert_alike(ours, list(StockLoader(dataset, num_workers=workers, **arguments)))
        if name != "DALI's" or arguments["batch_size"] is not None:
            continue
        for image in (batch["image"] for batch in ours):
            assert image.device.type == device
            flipped = v2.RandomHorizontalFlip(1)({"depth": torch.eye(40, 48), "image": image})
            assert torch.equal(flipped["image"], image.flip(-1)) and torch.equal(flipped["depth"], torch.eye(40, 48))


# --- dtype and memory_format: the batches of a loader without them, converted in the loop ----------------------------


NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
TRAINING = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE])
FLOATS = {
    "the usual": TRAINING,
    "without Normalize": v1.Compose([v1.CenterCrop((40, 32)), v1.ToTensor()]),
    "grey": v1.Compose([v1.Grayscale(), v1.RandomCrop(24), v1.ToTensor()]),
    "with noise": v2.Compose(
        [v2.ToImage(), v2.RandomCrop(24), v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise()]
    ),
    "five": v2.Compose([v2.FiveCrop(20), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
    "left to torchvision on a CPU": v1.Compose([v1.RandomResizedCrop(32), RandAugment(), v1.ToTensor()]),
}
RESIZED = v1.Compose([v1.Resize((32, 32)), v1.ToTensor()])
WHOLE = v1.Compose([v1.RandomCrop((20, 30)), v1.PILToTensor()])
FORMATS = [torch.contiguous_format, torch.channels_last]
FLOAT_TYPES = [None, torch.float16, torch.bfloat16, torch.float32]

in_each_memory_format = pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])


def batches_of(dataset: Any, device: str, **arguments: Any) -> list[list[Any]]:
    torch.manual_seed(7)
    loader = DataLoader(dataset, 8, shuffle=True, device=device, **arguments)
    return [list(batch) for batch in loader]


def assert_as_converted(dataset: Any, device: str, dtype: Any, memory_format: Any, **arguments: Any) -> None:
    plain = batches_of(dataset, device, **arguments)
    found = batches_of(dataset, device, dtype=dtype, memory_format=memory_format, **arguments)
    for batch, wanted in zip(found, plain, strict=True):
        for image, before in zip(tree_leaves(batch), tree_leaves(wanted), strict=True):
            if image.ndim == 4:
                before = before.to(memory_format=memory_format)
                assert image.stride() == before.stride()
            if image.ndim > 2 and before.is_floating_point():
                before = before.to(dtype or before.dtype)
            assert image.dtype == before.dtype and image.device == before.device
            assert torch.equal(image, before)


@in_each_memory_format
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("transform", FLOATS.values(), ids=FLOATS)
def test_floats(photos: Path, transform: Any, dtype: Any, memory_format: Any, device: str) -> None:
    assert_as_converted(ImageFolder(str(photos), transform), device, dtype, memory_format)


@in_each_memory_format
def test_whole_levels(photos: Path, memory_format: Any, device: str) -> None:
    for dtype in (None, torch.uint8):
        assert_as_converted(ImageFolder(str(photos), WHOLE), device, dtype, memory_format, num_workers=2)


def collated(samples: list[Any]) -> Any:
    return default_collate(samples)


def test_two_plans_a_collate_fn_and_samples_that_are_left_out(photos: Path, tmp_path: Path, device: str) -> None:
    folder, other = (ImageFolder(str(photos), transform) for transform in (TRAINING, RESIZED))
    how = device, torch.float16, torch.channels_last
    for workers in (0, 2):
        assert_as_converted(ConcatDataset([folder, other]), *how, num_workers=workers)
    assert_as_converted(folder, *how, collate_fn=collated)
    (tmp_path / "bad.jpg").write_bytes(Path(folder.samples[3][0]).read_bytes()[:700])
    folder.samples[3] = str(tmp_path / "bad.jpg"), 0
    assert_as_converted(folder, *how, on_error="skip")


def views(image: Any) -> Any:
    levels, floats = v1.PILToTensor()(image), v1.ToTensor()(image)
    return levels, levels / 3, floats, floats * 2 - 1, (floats * 255).to(torch.uint8)


@pytest.mark.parametrize("size", [(40, 50), 40], ids=["stacked", "in lists"])
@pytest.mark.parametrize("fixture", ["device", "emulated_gpu"])
def test_what_a_dataset_computes(photos: Path, size: Any, fixture: str, device: str, request: Any) -> None:
    request.getfixturevalue(fixture)
    dataset = ImageFolder(str(photos), v1.Compose([v1.Resize(size), views]), torch.tensor)
    for how in itertools.product(["cpu" if fixture == "emulated_gpu" else device], FLOAT_TYPES, FORMATS):
        assert_as_converted(dataset, *how, collate_fn=list if size == 40 else None)


REFUSED = {
    r"dtype=torch.uint8, but the transform returns floats.*PILToTensor": (TRAINING, {"dtype": torch.uint8}),
    r"dtype=torch.float16, but the transform returns uint8.*defines the scale": (WHOLE, {"dtype": torch.float16}),
    r"dtype must be one of torch.uint8, torch.float16, .*, got torch.int32": (None, {"dtype": torch.int32}),
    r"memory_format must be .*, got torch.channels_last_3d": (None, {"memory_format": torch.channels_last_3d}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_images_are_not_handed_out_in_is_refused(photos: Path, message: str) -> None:
    transform, arguments = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        DataLoader([1] if transform is None else ImageFolder(str(photos), transform), **arguments)


def test_batches_of_any_structure_keep_it() -> None:
    images, masks = torch.rand(2, 3, 4, 5), torch.ones(2, 4, 5)
    batch = OutputFormat(torch.float16, torch.channels_last).convert_batch({"a": [images, "b"], "c": (masks, 3)})
    assert torch.equal(batch["a"][0], images.half()) and batch["a"][0].is_contiguous(memory_format=torch.channels_last)
    assert batch["a"][1] == "b" and batch["c"][0] is masks and batch["c"][1] == 3


def by_hand(device: str) -> Any:
    """Images as floats and as whole levels, and their means; it fails on a batch in which an image is damaged."""

    @pipeline_def(batch_size=8, num_threads=2, device_id=0 if device == "cuda" else None, exec_dynamic=True)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        images = fn.decoders.image(encoded, device="mixed" if device == "cuda" else "cpu", output_type=types.RGB)
        levels = fn.transpose(fn.resize(images, size=[20, 30]), perm=[2, 0, 1])
        floats = fn.cast(levels, dtype=types.FLOAT) / 3
        return floats, levels, fn.reductions.mean(floats, axes=[1, 2])

    return graph()


class Floats(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        (floats, _, _), label = super().__getitem__(index)
        return floats, label


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, collated], ids=["", "a collate_fn"])
def test_a_hand_written_pipeline(photos: Path, workers: int, collate_fn: Any, device: str) -> None:
    with ProxyServer(by_hand(device)) as server:
        dataset = ImageFolder(str(photos), server.proxy, loader=read_bytes)
        arguments: dict[str, Any] = {"server": server, "num_workers": workers, "collate_fn": collate_fn}
        for dtype, memory_format in itertools.product(FLOAT_TYPES, FORMATS):
            assert_as_converted(dataset, device, dtype, memory_format, **arguments)


def test_a_hand_written_pipeline_beside_a_transform_and_floats_that_become_no_whole_levels(
    photos: Path, device: str
) -> None:
    with ProxyServer(by_hand(device)) as server:
        theirs = Floats(str(photos), server.proxy, loader=read_bytes)
        ours = ImageFolder(str(photos), v1.Compose([v1.Resize((20, 30)), v1.ToTensor()]))
        how: dict[str, Any] = {"server": server}
        assert_as_converted(ConcatDataset([ours, theirs]), device, torch.float16, torch.channels_last, **how)
        with pytest.raises(ValueError, match=r"dtype=torch.uint8, but the batch has torch.float32 \[8, 3, 20, 30\]"):
            next(iter(DataLoader(theirs, 8, dtype=torch.uint8, **how)))


def test_a_hand_written_pipeline_that_fails_on_an_image(photos: Path, tmp_path: Path, device: str) -> None:
    folder = ImageFolder(str(photos), loader=read_bytes)
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8 no image" * 50)
    folder.samples[3] = str(tmp_path / "bad.jpg"), 0
    with ProxyServer(by_hand(device)) as server:
        folder.transform = server.proxy
        how = {"server": server, "on_error": "replace"}
        for more in ({}, {"on_error": "skip"}):
            assert_as_converted(folder, device, torch.float16, torch.channels_last, **how | more)
        one_by_one = DataLoader(folder, None, dtype=torch.float16, num_workers=1, device=device, **how)
        assert {images.dtype for (images, _, _), _ in one_by_one} == {torch.float16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "dtype=torch.uint8, but the transform returns floats. Omit steps"),
        ({"translate": False}, r"dtype=torch.uint8, but the batch has torch.float32 \[8, 3, 32, 32\]"),
    ],
    ids=["met", "not translated"],
)
def test_floats_never_become_whole_levels(photos: Path, arguments: Any, message: str, device: str) -> None:
    dataset = Photographs(photos, lambda path, index: (TRAINING(opened(path)), index))  # which nobody looks for
    loader = DataLoader(dataset, 8, dtype=torch.uint8, device=device, **arguments)
    with pytest.raises(ValueError, match=message):
        next(iter(loader))
