"""Compiled transforms that no attribute of the dataset holds: the loader learns of them from the batches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from proxyloader import DataLoader, EncodedImage, compile_transforms

from ..side_by_side import assert_as_torch
from .test_bad_input import broken_tables, text
from .test_unreadable import unchecked

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
COMPILED = compile_transforms(TRANSFORM)
SMALLER = compile_transforms(transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()]))


class Hides(Dataset[Any]):
    """Calls a global in its methods; with ``is_stock``, the transform that it was made from."""

    def __init__(self, folder: ImageFolder, is_stock: bool = False) -> None:
        self.paths, self.is_stock = [path for path, _ in folder.samples], is_stock
        self.opened: Any = EncodedImage.open

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        if self.is_stock:
            return TRANSFORM(default_loader(self.paths[index])), index
        return COMPILED(self.opened(self.paths[index])), index


class HidesTwo(Hides):
    """The second half of its samples has a picture more, from another transform."""

    def __getitem__(self, index: int) -> Any:
        image, index = super().__getitem__(index)
        return (image, index) if index < 24 else (image, index, SMALLER(EncodedImage.open(self.paths[index])))


@pytest.mark.parametrize(
    "arguments",
    [
        dict(num_workers=0),
        dict(num_workers=2),
        dict(num_workers=2, persistent_workers=True),
        pytest.param(dict(num_workers=1, context="spawn", persistent_workers=True), marks=pytest.mark.slow),
        dict(num_workers=1, pin_memory=True, collate_fn=lambda samples: default_collate(samples)),
    ],
    ids=["no workers", "workers", "persistent", "spawn", "own collate_fn"],
)
def test_a_transform_in_a_global_gives_torchs_batches(
    folder: ImageFolder, arguments: dict[str, Any], device: str
) -> None:
    def build(kind: Any) -> Any:
        how = {name: value for name, value in arguments.items() if name != "context"}
        if kind is not StockLoader:
            how["multiprocessing_context"] = arguments.get("context")
        return kind(Hides(folder, is_stock=kind is StockLoader), 8, shuffle=True, **how)

    assert_as_torch(build, device=device)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_transform_may_come_in_mid_epoch(folder: ImageFolder, workers: int, device: str) -> None:
    batches = list(DataLoader(HidesTwo(folder), 8, num_workers=workers, device=device))
    assert [[tuple(part.shape) for part in batch] for batch in batches] == [
        *[[(8, 3, 32, 32), (8,)]] * 3,
        *[[(8, 3, 32, 32), (8,), (8, 3, 16, 16)]] * 3,
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("how", "opened"), [(text, EncodedImage.open), (broken_tables, unchecked)], ids=["by Pillow", "by DALI"]
)
def test_bad_files_are_left_out(
    folder: ImageFolder, tmp_path: Path, how: Any, opened: Any, workers: int, device: str
) -> None:
    dataset = Hides(folder)
    dataset.opened = opened
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(Path(dataset.paths[3]).read_bytes())
    how(bad)
    dataset.paths[3] = str(bad)
    loader = DataLoader(dataset, 8, num_workers=workers, on_error="skip", device=device)
    for _ in range(2):
        assert next(iter(loader))[1].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert {error.index for error in loader.errors} == {3}


class NotPickled(Dataset[Any]):
    """Samples that cannot travel, and need not without workers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return lambda: index


def test_a_dataset_without_images_is_not_touched(folder: ImageFolder, caplog: pytest.LogCaptureFixture) -> None:
    next(iter(DataLoader(Hides(folder), 8, device="cpu")))
    with caplog.at_level(logging.WARNING):
        found = [sample() for samples in DataLoader(NotPickled(), 2, collate_fn=list) for sample in samples]
    assert found == [0, 1, 2, 3]


def test_a_format_that_the_transform_does_not_give_is_refused_at_its_batch(folder: ImageFolder) -> None:
    with pytest.raises(ValueError, match="uint8"):
        next(iter(DataLoader(Hides(folder), 8, dtype=torch.uint8, device="cpu")))


@pytest.mark.parametrize("workers", [0, 1])
def test_under_the_stock_loader_the_images_are_torchvisions(folder: ImageFolder, workers: int) -> None:
    found = []
    for is_stock in (False, True):
        torch.manual_seed(5)
        found.append(list(StockLoader(Hides(folder, is_stock), 8, shuffle=True, num_workers=workers)))
    for (images, indices), (stock, stock_indices) in zip(*found, strict=True):
        assert torch.equal(indices, stock_indices)
        assert images.numpy().tobytes() == stock.numpy().tobytes()
        assert torch.equal(1 - images.to("cpu"), 1 - stock)
