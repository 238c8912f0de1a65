"""Pictures that spell their number, which half of the tests lean on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from .numbered import numbered_image, read_numbers, spell_dataset


@pytest.mark.parametrize("size", [8, 32, 64, 100])
def test_a_number_survives_jpeg_and_resizing(size: int, tmp_path: Path) -> None:
    root = spell_dataset(tmp_path, images=200, classes=3)
    dataset = ImageFolder(str(root), transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()]))
    images = torch.stack([image for image, _ in dataset])
    assert read_numbers(images, white=1.0) == list(range(200))
    assert read_numbers((255 * images).to(torch.uint8), white=255) == list(range(200))
    assert dataset.targets == sorted(dataset.targets) and len(dataset.classes) == 3


def test_only_numbers_that_fit_are_spelled() -> None:
    assert read_numbers(transforms.ToTensor()(numbered_image(65535))[None], white=1.0) == [65535]
    for number in (-1, 65536):
        with pytest.raises(ValueError, match="from 0 to 65535"):
            numbered_image(number)
