"""Pictures that spell their number, which half of the tests lean on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader.tools.synthetic.numbered import numbers_in, spell_dataset, spelled_picture


@pytest.mark.parametrize("size", [8, 32, 64, 100])
def test_a_number_survives_jpeg_and_resizing(size: int, tmp_path: Path) -> None:
    root = spell_dataset(tmp_path, images=200, classes=3)
    dataset = ImageFolder(str(root), transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()]))
    images = torch.stack([image for image, _ in dataset])
    assert numbers_in(images, white=1.0) == list(range(200))
    assert numbers_in((255 * images).to(torch.uint8), white=255) == list(range(200))
    assert dataset.targets == sorted(dataset.targets) and len(dataset.classes) == 3


def test_only_numbers_that_fit_are_spelled() -> None:
    assert numbers_in(transforms.ToTensor()(spelled_picture(65535))[None], white=1.0) == [65535]
    for number in (-1, 65536):
        with pytest.raises(ValueError, match="from 0 to 65535"):
            spelled_picture(number)
