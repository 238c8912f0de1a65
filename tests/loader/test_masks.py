"""``masks_on_device`` and ``targets_on_device``: targets arrive with the images, as they are in the stock loader."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as StockLoader, Dataset, Subset, default_collate
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, functional as F, v2

from proxyloader import DataLoader

from ..integration.test_torch_contract import seeded
from ..integration.test_unreadable import broken_tables
from ..undecoded import unchecked

BINARY = [torch.bool, torch.uint8, torch.int64]
ON_CPU = "boxes", "score", "id"


class Segmented(Dataset[Any]):
    """Images with masks of many kinds, and with what is none."""

    def __init__(self, folder: ImageFolder | None = None, length: int = 0) -> None:
        self.folder = folder
        self.length = length or (24 if folder else 160)  # enough for workers to fall back to torch's loading

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        random = seeded(index)
        masks = {str(dtype): torch.randint(2, (3, 37, 41), generator=random).to(dtype) for dtype in BINARY}
        masks |= {"levels": torch.randint(256, (64, 50), generator=random).mT, "empty": torch.zeros(0, 64, 64).byte()}
        masks |= {"negative": torch.randint(-1, 2, (64, 64), generator=random)}
        masks |= {"wrapped": tv_tensors.Mask(masks["torch.bool"])}
        masks = masks if index >= 5 else {"empty": masks["empty"]}  # alone in the first batch
        others = {"boxes": torch.arange(8).reshape(2, 4), "score": torch.rand(64, 64, generator=random), "id": index}
        others |= {"size": others["boxes"].shape}
        if self.folder is None:
            return masks | others
        return F.to_tensor(self.folder.loader(self.folder.samples[index][0]).crop((0, 0, 60, 40))), masks | others


def check(dataset: Segmented, device: str, **options: Any) -> None:
    for collate_fn in (None, lambda samples: samples):
        stock = list(StockLoader(dataset, 5, collate_fn=collate_fn, pin_memory=options.get("pin_memory", False)))
        loader = DataLoader(dataset, 5, collate_fn=collate_fn, device=device, **options)
        for _ in range(2):
            for theirs, ours in zip(stock, loader, strict=True):
                compare(theirs, ours, device, () if options.get("targets_on_device") else ON_CPU)


def compare(theirs: Any, ours: Any, device: str, on_cpu: tuple[str, ...] = ON_CPU) -> None:
    if isinstance(theirs, torch.Size):
        assert type(ours) is torch.Size and ours == theirs
    elif isinstance(theirs, (list, tuple)):
        for pair in zip(theirs, ours, strict=True):
            compare(*pair, device, on_cpu)
    elif isinstance(theirs, dict):
        assert theirs.keys() == ours.keys()
        for name in theirs:
            compare(theirs[name], ours[name], device, on_cpu)
            if isinstance(ours[name], torch.Tensor):
                assert ours[name].device.type == ("cpu" if name in on_cpu else device), name
    elif isinstance(theirs, Own):
        compare(vars(theirs), vars(ours), device)
    elif isinstance(theirs, torch.Tensor):
        assert type(theirs) is type(ours) and theirs.dtype == ours.dtype and vars(theirs) == vars(ours)
        if not theirs.is_floating_point() or device == "cpu":
            assert torch.equal(theirs, ours.cpu())
    else:
        assert theirs == ours


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("has_images", [True, False])
@pytest.mark.parametrize("option", ["masks_on_device", "targets_on_device"])
@pytest.mark.usefixtures("emulated_gpu")
def test_targets_are_the_stock_loaders(folder: ImageFolder, has_images: bool, workers: int, option: str) -> None:
    layout = {} if has_images else {"memory_format": torch.channels_last}
    check(Segmented(folder if has_images else None), "cpu", num_workers=workers, **layout, **{option: True})


def resize(mask: Any, draw: Random) -> Any:
    return v2.functional.resize(mask, sides(draw), draw.choice([*InterpolationMode][:3]))


def pad(mask: Any, draw: Random) -> Any:
    mode = draw.choice(["constant", "constant", "reflect"])
    return v2.functional.pad(mask, [2, 0, 9, 1], draw.choice([None, 1, 1, 255]), mode)


def select(mask: Any, draw: Random) -> Any:
    flags = torch.tensor([True] + [draw.random() < 0.7 for _ in mask[1:]])
    return tv_tensors.wrap(mask[flags], like=mask)


def change(mask: Any, draw: Random) -> Any:
    return mask.logical_not_() if mask.dtype == torch.bool else mask.add_(draw.randint(1, 9))


def change_part(mask: Any, draw: Random) -> Any:
    part = v2.functional.crop(mask, 3, 3, *[side - 6 for side in mask.shape[-2:]])
    _ = (part if draw.random() < 0.5 else part.as_subclass(torch.Tensor)).zero_()
    return mask


CALLS: list[Callable[[Any, Random], Any]] = [
    *(pad, pad, pad, select, change, change_part, resize),
    lambda mask, draw: v2.functional.resize(mask, draw.choice([mask.shape[-2:], sides(draw)[:1]])),
    lambda mask, draw: v2.functional.crop(mask, draw.randint(-9, 20), draw.randint(-9, 20), *sides(draw)),
    lambda mask, draw: v2.functional.crop(mask, 1, 2, mask.shape[-2] - 2, mask.shape[-1] - 3),
    lambda mask, draw: v2.functional.center_crop(mask, sides(draw)),
    lambda mask, draw: v2.functional.resized_crop(mask, 1, 2, 30, mask.shape[-1] - 5, sides(draw)),
    lambda mask, draw: v2.functional.horizontal_flip(mask),
    lambda mask, draw: v2.functional.vertical_flip(mask),
    lambda mask, draw: v2.functional.rotate(mask, 30),
    lambda mask, draw: mask.to(draw.choice([torch.uint8, torch.int16, torch.int64, torch.int64])),
]


def sides(draw: Random) -> list[int]:
    return [draw.randint(40, 200), draw.randint(40, 200)]


class Programs(Segmented):
    """Masks that random programs of torchvision's functions, and of code that uses values, make of one."""

    def __getitem__(self, index: int) -> Any:
        dtype = [torch.bool, torch.uint8, torch.uint8, torch.int64, torch.int16][index % 5]
        pixels = torch.randint(2 if index % 2 else 256, (1 + index % 3, 64, 50 + index), generator=seeded(index))
        draw, masks = Random(index), [tv_tensors.Mask(pixels.to(dtype))]
        for number in range(draw.randint(2, 6)):
            call = resize if number == 0 and index % 4 else draw.choice(CALLS)
            masks.append(call(masks[-1], draw))
            if draw.random() < 0.3:
                change(masks[-2], draw)
            masks = masks[-draw.randint(1, 2) :]
        last = masks[-1].as_subclass(torch.Tensor)
        if index % 7 == 0:
            last[..., 9:, 9:] = 0
        image, _ = super().__getitem__(0)
        return image, {"kept": masks, "last": last}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.usefixtures("emulated_gpu")
def test_transformed_masks_are_the_stock_loaders(folder: ImageFolder, on_device: bool, workers: int) -> None:
    dataset = Programs(folder, length=300)
    stock = StockLoader(dataset, 8, collate_fn=list)
    ours = DataLoader(dataset, 8, collate_fn=list, masks_on_device=on_device, num_workers=workers, device="cpu")
    for expected, actual in zip(stock, ours, strict=True):
        compare(expected, actual, "cpu")


def by_threads(mask: Any) -> list[Any]:
    parts = [v2.functional.crop(mask, 1, 1, 40, 50 + number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda part: part.sum(), [*parts, mask, mask]))


def with_attribute(mask: Any) -> Any:
    mask.label = "a label"
    return mask, mask.sum(), mask.label


def in_inference_mode(mask: Any) -> Any:
    with torch.inference_mode():
        _ = mask.sum()
    mask[..., :3] = 0
    return mask


def as_line(mask: Any) -> list[Any]:
    lines = [v2.functional.resize(mask, size) for size in ([1, mask.shape[-1]], [mask.shape[-2], 1])]
    for line in lines:
        line.fill_(0)
    return [mask, *lines]


class Own:
    def __init__(self, mask: Any) -> None:
        self.mask, self.kind = mask, type(mask.sum())


USES: dict[str, Callable[[Any], Any]] = {
    "threads": by_threads,
    "attribute": with_attribute,
    "inference mode": in_inference_mode,
    "a line": as_line,
    "class of another": lambda mask: tv_tensors.wrap(torch.zeros(64, 64), like=mask),
    "type": lambda mask: type(mask)(torch.ones(3, 3)),
    "objects": lambda mask: [Own(v2.functional.vertical_flip(mask))],
    "none": lambda mask: v2.functional.crop(mask[torch.zeros(len(mask), dtype=torch.bool)], 0, 0, 9, 9),
    "NumPy": lambda mask: (np.asarray(mask).sum(), np.from_dlpack(mask).tolist()),
    "copies": lambda mask: (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), repr(mask)),
    "sums": lambda mask: mask.sum((-2, -1)).tolist(),
}


class Used(Segmented):
    def __init__(self, folder: ImageFolder | None, use: Callable[[Any], Any]) -> None:
        super().__init__(folder)
        self.use = use

    def __getitem__(self, index: int) -> Any:
        pixels = torch.randint(2, (2, 64, 70), generator=seeded(index), dtype=torch.uint8)
        used = self.use(v2.functional.resize(tv_tensors.Mask(pixels), [80, 70]))
        return (super().__getitem__(0)[0], used) if self.folder else used


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("has_images", [True, False])
@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("emulated_gpu")
def test_uses_of_a_mask_are_the_stock_loaders(folder: ImageFolder, use: str, has_images: bool, workers: int) -> None:
    dataset = Used(folder if has_images else None, USES[use])
    stock = list(StockLoader(dataset, 8, collate_fn=list, num_workers=workers))
    for on_device in (True, False):
        ours = DataLoader(dataset, 8, collate_fn=list, masks_on_device=on_device, num_workers=workers, device="cpu")
        for expected, actual in zip(stock, ours, strict=True):
            compare(expected, actual, "cpu")


@pytest.mark.usefixtures("emulated_gpu")
def test_resizes_are_recorded(folder: ImageFolder) -> None:
    dataset = Used(folder, lambda mask: type(mask) is tv_tensors.Mask)
    found = [has_values for batch in DataLoader(dataset, 8, collate_fn=list) for _, has_values in batch]
    assert len(found) == len(dataset) and not any(found)


CASTS: dict[str, Callable[[Any], Any]] = {
    "long": lambda mask: mask.long(),
    "int": lambda mask: mask.int(),
    "twice": lambda mask: mask.to(torch.int16).long(),
    "a byte": lambda mask: mask.long().to(torch.uint8),
    "to": lambda mask: mask.to(torch.int64),
    "keyword": lambda mask: mask.to(dtype=torch.int32),
    "copy": lambda mask: mask.to(torch.int64, copy=True),
    "type": lambda mask: mask.type(torch.int64),
    "name": lambda mask: mask.type("torch.LongTensor"),
    "bool": lambda mask: mask.long().bool(),
    "float": lambda mask: mask.to(torch.float32),
    "ToDtype": v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None}),
    "pure": v2.Compose([v2.ToDtype({tv_tensors.Mask: torch.int64}), v2.ToPureTensor()]),
    "cropped": lambda mask: v2.functional.pad(v2.functional.crop(mask.to(torch.int64), 5, 6, 40, 45), [1], 1),
    "no cast": lambda mask: mask,
}


class Cast(Segmented):
    """Masks of one shape after a resize, or sometimes without one, in another dtype."""

    def __getitem__(self, index: int) -> Any:
        assert self.folder is not None
        image = F.to_tensor(self.folder.loader(self.folder.samples[index][0]).crop((0, 0, 60, 40)))
        shape, masks = (64 + index % 3, 70) if index < 20 else (50, 60), {}
        for name, cast in CASTS.items():
            for dtype in (torch.uint8, torch.bool):
                pixels = torch.randint(2 if index % 4 == 1 else 256, shape, generator=seeded(index)).to(dtype)
                mask = v2.functional.resize(tv_tensors.Mask(pixels), [50 if index < 12 else 80, 60])
                mask = mask.clone() if index == 7 else mask  # which has values
                masks[f"{name} {dtype}"] = cast(v2.functional.pad(mask, [3], 1))
        return image, masks


def stack(samples: Any) -> Any:
    images, targets = zip(*samples)
    masks = {name: torch.stack([each[name] for each in targets]).to(torch.int64) for name in targets[0]}
    return list(images), masks, torch.stack([each["no cast torch.uint8"] for each in targets], dim=1)


def check_batches(expected: Any, actual: Any) -> None:
    for theirs, ours in zip(expected, actual, strict=True):
        compare(theirs, ours, "cpu")
        assert all(each.is_contiguous() for each in ours[1].values())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("collate_fn", [None, stack])
@pytest.mark.parametrize("keeps_class", [True, False])
@pytest.mark.usefixtures("emulated_gpu")
def test_batches_of_cast_masks_are_the_stock_loaders(
    folder: ImageFolder, workers: int, on_device: bool, collate_fn: Any, keeps_class: bool
) -> None:
    options: Any = {"num_workers": workers, "collate_fn": collate_fn, "pin_memory": on_device}
    with tv_tensors.set_return_type("TVTensor" if keeps_class else "Tensor"):
        stock = StockLoader(Cast(folder), 4, **options)
        check_batches(stock, DataLoader(Cast(folder), 4, masks_on_device=on_device, device="cpu", **options))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.usefixtures("emulated_gpu")
def test_masks_of_a_damaged_image_leave_the_stack(photos: Path, tmp_path: Path, workers: int, on_error: Any) -> None:
    folder, bad = ImageFolder(str(shutil.copytree(photos, tmp_path / "set")), loader=unchecked), 5
    samples = [Cast(folder)[index] for index in range(24)]
    broken_tables(Path(folder.samples[bad][0]))
    loader = DataLoader(Cast(folder), 4, masks_on_device=True, device="cpu", num_workers=workers, on_error=on_error)
    batches = [samples[start : start + 4] for start in range(0, 24, 4)]
    batches[1][1:2] = samples[6:7] if on_error == "replace" else []
    check_batches(map(default_collate, batches), loader)
    assert [each.index for each in loader.errors] == [bad]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("emulated_gpu")
def test_stacks_of_different_shapes_fail_as_in_torch(folder: ImageFolder, workers: int) -> None:
    dataset = Used(folder, lambda mask: v2.functional.crop(mask, 0, 0, 50, Random(int(mask.sum())).randint(40, 70)))
    for kind in (StockLoader, DataLoader):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            list(kind(dataset, 8, num_workers=workers))


@pytest.mark.usefixtures("emulated_gpu")
def test_casts_and_stacks_are_recorded(folder: ImageFolder) -> None:
    recorded = ["long", "int", "twice", "a byte", "to", "keyword", "type", "ToDtype", "pure", "cropped", "no cast"]
    collated = []

    def collate(samples: Any) -> Any:
        batch = default_collate(samples)
        collated.append({name for name, mask in batch[1].items() if type(mask) is not torch.Tensor})
        return batch

    for _ in DataLoader(Subset(Cast(folder), range(8, 20)), 2, collate_fn=collate):
        assert collated.pop() == {f"{name} {dtype}" for name in recorded for dtype in ("torch.uint8", "torch.bool")}


class Copied(list[torch.Tensor]):
    """Its pickle has copies of its masks, each of which exists only meanwhile."""

    def __reduce__(self) -> Any:
        return list, (), None, (mask.clone() for mask in self)


@pytest.mark.usefixtures("emulated_gpu")
def test_masks_that_exist_only_while_they_are_pickled_are_not_mixed_up(folder: ImageFolder) -> None:
    folder.transform = F.to_tensor
    masks = [torch.arange(4096).reshape(64, 64) % (number + 2) == 0 for number in range(8)]

    def collate(samples: Any) -> Any:
        return [image for image, _ in samples], Copied(masks)

    for _, found in DataLoader(folder, 16, num_workers=1, collate_fn=collate, masks_on_device=True):
        assert all(map(torch.equal, found, masks)) and len(found) == len(masks)


@pytest.mark.gpu
@pytest.mark.parametrize("has_images", [True, False])
@pytest.mark.parametrize("option", ["masks_on_device", "targets_on_device"])
def test_targets_are_on_the_gpu(folder: ImageFolder, has_images: bool, option: str) -> None:
    pinned = {} if has_images else {"pin_memory": True, "memory_format": torch.channels_last}
    check(Segmented(folder if has_images else None), "cuda", num_workers=2, **pinned, **{option: True})


@pytest.mark.gpu
def test_masks_are_transformed_on_the_gpu(folder: ImageFolder) -> None:
    dataset = Programs(folder, length=300)
    ours = DataLoader(dataset, 8, collate_fn=list, masks_on_device=True, num_workers=2)
    for expected, actual in zip(StockLoader(dataset, 8, collate_fn=list), ours, strict=True):
        compare(expected, actual, "cuda")
