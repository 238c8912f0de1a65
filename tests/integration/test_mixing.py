"""MixUp, CutMix and collate functions built on default_collate: unchanged, in a collate_fn and in the loop."""

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

import proxyloader

from .test_same_batches import TRAIN, TRAIN_V2, assert_same

CLASSES = 4
SEED = 5
MIXERS = {
    "MixUp": v2.MixUp(num_classes=CLASSES),
    "CutMix": v2.CutMix(num_classes=CLASSES),
    "one of both": v2.RandomChoice([v2.CutMix(num_classes=CLASSES), v2.MixUp(alpha=0.2, num_classes=CLASSES)]),
    "often neither": v2.RandomApply([v2.MixUp(num_classes=CLASSES)], p=0.5),
}

each_mixer = pytest.mark.parametrize("mix", MIXERS.values(), ids=MIXERS)
each_number_of_workers = pytest.mark.parametrize("workers", [0, 2])

Mix = Callable[[Any, Any], Any]


def epoch(loader_class: Any, dataset: Any, *, workers: int, **arguments: Any) -> Any:
    """An iterator over an epoch whose order and crops come from the same seed in both loaders."""
    torch.manual_seed(17)
    return iter(loader_class(dataset, batch_size=10, shuffle=True, num_workers=workers, **arguments))


def on_the_cpu(batches: Any) -> list[Any]:
    return [(images.cpu(), labels.cpu()) for images, labels in batches]


def mixed_in_the_loop(batches: Any, mix: Mix) -> list[Any]:
    """As a training loop does that mixes each batch it is given; each step draws from a seed of its own."""
    found = []
    for step, (images, labels) in enumerate(batches):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            found.append(mix(images, labels))
    return on_the_cpu(found)


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
def test_in_the_loop(folder: ImageFolder, mix: Mix, workers: int, device: str) -> None:
    folder.transform = TRAIN
    theirs = mixed_in_the_loop(epoch(StockLoader, folder, workers=workers), mix)
    ours = mixed_in_the_loop(epoch(proxyloader.DataLoader, folder, workers=workers, device=device), mix)
    assert theirs[0][1].shape in [(10, CLASSES), (10,)]
    assert_same(ours, theirs)


@each_mixer
@each_number_of_workers
def test_in_a_collate_fn_the_numbers_are_drawn_where_torch_draws_them(
    folder: ImageFolder, mix: Mix, workers: int, device: str
) -> None:
    folder.transform = TRAIN_V2
    arguments: dict[str, Any] = dict(workers=workers, collate_fn=functools.partial(mixing_collate, mix=mix))
    theirs = on_the_cpu(epoch(StockLoader, folder, **arguments))
    ours = on_the_cpu(epoch(proxyloader.DataLoader, folder, device=device, **arguments))
    assert_same(ours, theirs)


@each_mixer
@each_number_of_workers
def test_in_a_collate_fn_that_draws_the_same_in_any_process(
    folder: ImageFolder, mix: Mix, workers: int, device: str
) -> None:
    folder.transform = TRAIN
    arguments: dict[str, Any] = dict(workers=workers, collate_fn=functools.partial(mixing_by_label_collate, mix=mix))
    theirs = on_the_cpu(epoch(StockLoader, folder, **arguments))
    plain = on_the_cpu(epoch(StockLoader, folder, workers=workers))
    assert any(not torch.equal(mixed, image) for (mixed, _), (image, _) in zip(theirs, plain)), "nothing was mixed"
    assert_same(on_the_cpu(epoch(proxyloader.DataLoader, folder, device=device, **arguments)), theirs)


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
    return labels, [images[0::2], images[1::2]], {"brightest": images.amax((1, 2, 3))}


def no_more_than_seven(samples: list[Any]) -> Any:
    return default_collate(samples[:7])


@each_number_of_workers
class TestBuiltOnDefaultCollate:
    def both(self, folder: ImageFolder, collate_fn: Any, workers: int, device: str) -> list[tuple[Any, Any]]:
        folder.transform = TRAIN
        ours = list(epoch(proxyloader.DataLoader, folder, workers=workers, device=device, collate_fn=collate_fn))
        theirs = list(epoch(StockLoader, folder, workers=workers, collate_fn=collate_fn))
        assert len(ours) == len(theirs) == 5
        return list(zip(ours, theirs))

    def test_dictionaries_of_mixed_images_and_numbers(self, folder: ImageFolder, workers: int, device: str) -> None:
        for ours, theirs in self.both(folder, WithWeights(), workers, device):
            assert list(ours) == list(theirs) == ["images", "labels", "weights", "count"]
            assert ours["count"] == theirs["count"] and torch.equal(ours["weights"], theirs["weights"])
            assert ours["labels"].shape == (ours["count"], CLASSES)
            assert_same(*(on_the_cpu([(batch["images"], batch["labels"])]) for batch in (ours, theirs)))

    def test_other_orders_and_parts_of_a_batch(self, folder: ImageFolder, workers: int, device: str) -> None:
        for ours, theirs in self.both(folder, labels_first, workers, device):
            assert torch.equal(ours[0], theirs[0])
            for a, b in zip(ours[1], theirs[1]):
                assert_same(on_the_cpu([(a, ours[0])]), on_the_cpu([(b, theirs[0])]))
            torch.testing.assert_close(ours[2]["brightest"].cpu(), theirs[2]["brightest"], rtol=0, atol=0.1)

    def test_fewer_samples(self, folder: ImageFolder, workers: int, device: str) -> None:
        pairs = self.both(folder, no_more_than_seven, workers, device)
        assert [len(ours[1]) for ours, _ in pairs] == [7] * 5
        for ours, theirs in pairs:
            assert_same(on_the_cpu([ours]), on_the_cpu([theirs]))

    def test_with_a_rule_for_a_type_of_ones_own(self, folder: ImageFolder, workers: int, device: str) -> None:
        folder.target_transform = Score
        for ours, theirs in self.both(folder, collate_with_scores, workers, device):
            assert theirs[1].tolist() == sorted(theirs[1].tolist())
            assert_same(on_the_cpu([ours]), on_the_cpu([theirs]))
