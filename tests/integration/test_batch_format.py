"""dtype and memory_format: the batches of a loader without them, converted in the loop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali import fn, pipeline_def, types
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.autoaugment import RandAugment

from proxyloader import DataLoader, ProxyServer
from proxyloader.dali.output_format import OutputFormat

from .roads import read_bytes
from .test_any_dataset import Photographs, opened

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
                is_converted = dtype is not None and before.is_floating_point()
                before = before.to(dtype=dtype if is_converted else before.dtype, memory_format=memory_format)
                assert image.stride() == before.stride()
                assert image.is_contiguous(memory_format=memory_format)
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


def test_images_of_several_sizes(photos: Path, device: str) -> None:
    dataset = ImageFolder(str(photos), v1.Compose([v1.Resize(40), v1.ToTensor()]))
    arguments: dict[str, Any] = {"collate_fn": lambda samples: [*map(list, zip(*samples))]}
    plain = list(DataLoader(dataset, 8, device=device, **arguments))
    for dtype, memory_format in itertools.product(FLOAT_TYPES, FORMATS):
        found = list(DataLoader(dataset, 8, device=device, dtype=dtype, memory_format=memory_format, **arguments))
        for (images, _), (wanted, _) in zip(found, plain, strict=True):
            for image, before in zip(images, wanted, strict=True):
                assert torch.equal(image, before.to(dtype or before.dtype))


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


def last(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return images.to(memory_format=torch.channels_last), labels


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_a_collate_fn_may_choose_the_memory_format(photos: Path, dtype: Any, device: str) -> None:
    loader = DataLoader(ImageFolder(str(photos), TRAINING), 8, dtype=dtype, collate_fn=last, device=device)
    images, _ = next(iter(loader))
    assert images.is_contiguous(memory_format=torch.channels_last) and images.dtype == (dtype or torch.float32)
