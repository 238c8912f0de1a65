"""Which images are made again, and that making them leaves nothing behind."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from proxyloader import EncodedImage, compile_transforms
from proxyloader.data.lazy_tensor import real
from proxyloader.data.transformed import pixel_uses
from proxyloader.workers.messages import PackedBatch
from proxyloader.workers.packing import Packer
from proxyloader.workers.request_sampler import BatchRequest

DRAWS = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ColorJitter(0.5), transforms.ToTensor()])
DRAWS_NOTHING = transforms.Compose([transforms.CenterCrop(32), transforms.PILToTensor()])


def samples_of(photos: Path, transform: Any, count: int = 48) -> list[Any]:
    folder = ImageFolder(str(photos), compile_transforms(transform), loader=EncodedImage.open)  # type: ignore[arg-type]
    return [folder[index] for index in range(count)]


def packed(samples: list[Any], share: float = 1.0, epoch: int = 0) -> PackedBatch:
    request = BatchRequest(0, epoch, list(range(len(samples))), batched=True, slot=None)
    return Packer(default_collate, None, 16, audit_share=share)(samples, request, len(samples))


def rows(batch: PackedBatch) -> set[tuple[int, int]]:
    return {(each.run, each.row) for each in batch.stock_images}


def test_they_are_the_stock_loaders_and_know_their_place(photos: Path) -> None:
    torch.manual_seed(2)
    theirs = [image for image, _ in ImageFolder(str(photos), DRAWS)]
    torch.manual_seed(2)
    found = packed(samples_of(photos, DRAWS)).stock_images
    assert [(each.run, each.row, each.sample) for each in found] == [(k // 16, k % 16, k) for k in range(48)]
    assert [each.path for each in found] == [path for path, _ in ImageFolder(str(photos)).samples]
    assert all(np.array_equal(each.outputs[0], stock.numpy()) for each, stock in zip(found, theirs))


def test_without_a_share_there_are_none(photos: Path) -> None:
    assert packed(samples_of(photos, DRAWS, 16), share=0.0).stock_images == ()


@pytest.mark.parametrize("transform", [DRAWS, DRAWS_NOTHING], ids=["random", "not random"])
def test_a_share_is_another_one_in_each_epoch(photos: Path, transform: Any) -> None:
    def chosen_in(epoch: int, share: float) -> Any:
        torch.manual_seed(2)
        return rows(packed(samples_of(photos, transform), share, epoch))  # new ones, as what was made is sent as it is

    chosen = [chosen_in(epoch, 0.25) for epoch in range(12)]
    assert len(set(map(frozenset, chosen))) == 12
    assert 0.15 < sum(map(len, chosen)) / (12 * 48) < 0.35
    assert chosen_in(3, 0.25) == chosen[3]
    assert chosen[3] < chosen_in(3, 0.75)


def test_generators_and_counts_of_used_pixels_stay(photos: Path) -> None:
    samples = samples_of(photos, DRAWS, 16)
    before = torch.get_rng_state(), np.random.get_state()[2], random.getstate(), pixel_uses.count
    batch = packed(samples)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[2], random.getstate(), pixel_uses.count) == before[1:]
    assert (batch.images_by, batch.decoded_why) == ((16, 0, 0), "")


def test_images_that_dali_does_not_decode_are_left_out(photos: Path) -> None:
    path = ImageFolder(str(photos)).samples[0][0]
    encoded = EncodedImage.open(path)
    truncated = dataclasses.replace(encoded, data=encoded.data[:-2000])
    images = [encoded, default_loader(path), Image.new("RGB", (40, 40)), truncated]
    transform = compile_transforms(DRAWS)
    used = transform(encoded)
    real(used)
    batch = packed([used, *map(transform, images)])
    assert [(each.sample, each.path) for each in batch.stock_images] == [(1, path)]
