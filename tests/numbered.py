"""Images that show their number, so that a test sees which image of the data set it got."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

BLOCKS = 4
"""Blocks to a side; each is black or white, so 4 x 4 of them spell numbers below 65,536."""

SIDE_PX = 64


def numbered_image(number: int, side_px: int = SIDE_PX) -> Image.Image:
    """An RGB picture of ``side_px`` x ``side_px``, whose blocks, row by row, are the bits of ``number``."""
    bits = np.array([number >> bit & 1 for bit in range(BLOCKS**2)], np.uint8).reshape(BLOCKS, BLOCKS)
    block = np.ones((side_px // BLOCKS, side_px // BLOCKS), np.uint8)
    return Image.fromarray(np.kron(255 * bits, block)).convert("RGB")


def spell_dataset(root: str | os.PathLike[str], images: int, classes: int = 4, side_px: int = SIDE_PX) -> Path:
    """Write ``root/class_<c>/<number>.jpg`` for each number, in an order that ``ImageFolder`` lists as 0, 1, 2, ...

    Returns:
        ``root``.
    """
    root = Path(root)
    for number in range(images):
        folder = root / f"class_{number * classes // images:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        numbered_image(number, side_px).save(folder / f"{number:05d}.jpg", quality=90)
    return root


def read_numbers(images: torch.Tensor, white: float) -> list[int]:
    """Read the pictures of a batch.

    Args:
        images: (N, 3, H, W), upright and uncropped, of any size from 4 x 4 on and any dtype, black being 0.
        white: the value of a white pixel.
    """
    blocks = torch.nn.functional.adaptive_avg_pool2d(images.float().mean(1, keepdim=True), BLOCKS)
    bits = (blocks.flatten(1) > white / 2).long().cpu()
    return [int(number) for number in (bits << torch.arange(BLOCKS**2)).sum(1)]
