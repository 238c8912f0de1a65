"""MixUp, CutMix and other collate functions built on default_collate, unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from ..side_by_side import assert_as_torch, used
from .test_same_batches import TRAIN, TRAIN_V2

CLASSES = 4
MIXERS = {
    "MixUp": v2.MixUp(num_classes=CLASSES),
    "CutMix": v2.CutMix(num_classes=CLASSES),
    "one of both": v2.RandomChoice([v2.CutMix(num_classes=CLASSES), v2.MixUp(alpha=0.2, num_classes=CLASSES)]),
    "often neither": v2.RandomApply([v2.MixUp(num_classes=CLASSES)], p=0.5),
}

each_mixer = pytest.mark.parametrize("mix", MIXERS.values(), ids=MIXERS)
each_number_of_workers = pytest.mark.parametrize("workers", [0, 2])

Mix = Callable[[Any, Any], Any]


def mixing_collate(samples: list[Any], mix: Mix) -> Any:
    """As torchvision's documentation has it."""
    return mix(*default_collate(samples))


def mixing_by_label_collate(samples: list[Any], mix: Mix) -> Any:
    """Draws numbers that follow from the labels alone, and leaves the generator of its process as it was."""
    images, labels = default_collate(samples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int((labels * torch.arange(1, len(labels) + 1)).sum()))
        return mix(images, labels)


@each_mixer
@each_number_of_workers
def test_in_a_collate_fn(folder: ImageFolder, mix: Mix, workers: int, device: str) -> None:
    def build(kind: Any, **arguments: Any) -> Any:
        return kind(folder, 10, True, num_workers=workers, **arguments)

    for unwrap_batch_sampler, folder.transform in ((mixing_collate, TRAIN_V2), (mixing_by_label_collate, TRAIN)):
        with_collate = functools.partial(build, collate_fn=functools.partial(unwrap_batch_sampler, mix=mix))
        theirs = assert_as_torch(with_collate, device=device)["epochs"][0]["batches"]
        plain = used(StockLoader, build, list)["result"]
        assert any(not torch.equal(mixed, image) for (mixed, _), (image, _) in zip(theirs, plain)), "nothing was mixed"


class WithWeights:
    """A collate_fn with a state, whose batches are dictionaries."""

    def __init__(self) -> None:
        self.mix = v2.MixUp(num_classes=CLASSES, labels_getter=lambda batch: batch["labels"])

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        images, labels = default_collate(samples)
        batch = {"images": images, "labels": labels, "weights": 1.0 + labels, "count": len(samples)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(samples))
            mixed: dict[str, Any] = self.mix(batch)
        return mixed


class Score(float):
    """A target for which default_collate is told what to do."""


def collate_scores(batch: list[Score], *, collate_fn_map: Any = None) -> Any:
    return torch.tensor(sorted(batch))


def collate_with_scores(samples: list[Any]) -> Any:
    return collate(samples, collate_fn_map={**default_collate_fn_map, Score: collate_scores})


def labels_first(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return labels, [images[0::2], images[1::2]], {"flipped": images.flip(-1)}


@each_number_of_workers
@pytest.mark.parametrize("collate_fn", [WithWeights(), labels_first, collate_with_scores])
def test_built_on_default_collate(folder: ImageFolder, collate_fn: Any, workers: int, device: str) -> None:
    folder.transform = TRAIN
    folder.target_transform = Score if collate_fn is collate_with_scores else None

    def build(kind: Any) -> Any:
        return kind(folder, 10, True, num_workers=workers, collate_fn=collate_fn)

    batches = assert_as_torch(build, list, device=device)
    assert len(batches) == 5
    if isinstance(collate_fn, WithWeights):
        assert list(batches[0]) == ["images", "labels", "weights", "count"]
        assert batches[0]["labels"].shape == (10, CLASSES)
    if collate_fn is collate_with_scores:
        assert all(labels.tolist() == sorted(labels.tolist()) for _, labels in batches)
