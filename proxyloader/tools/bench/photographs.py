"""The photographs that a comparison makes, by the name of their size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...make_dataset import make_dataset
from ..files import photographs_of


@dataclass(frozen=True)
class Photographs:
    """What photographs of a kind are like.

    Attributes:
        size: (width, height) of most of them, in pixels.
        progressive: share of progressive JPEGs, 0 to 1.
        batch_size: number in a batch, if the user gives none.
        fewer: their number is divided by this, if the user gives none.
    """

    size: tuple[int, int]
    progressive: float = 0.0
    batch_size: int = 256
    fewer: int = 1


SIZES = {
    "thumbnails": Photographs((96, 96)),
    "imagenet": Photographs((500, 375)),
    "web": Photographs((500, 375), progressive=0.2),
    "camera": Photographs((3000, 2000), batch_size=64, fewer=8),
}


def root_of(size: str, images: int) -> Path:
    """Return the folder of photographs of a size, which ``make`` fills."""
    return photographs_of("bench" if size == "imagenet" else f"bench-{size}", images)


def make(size: str, images: int) -> None:
    """Make the photographs of a size, unless they are there."""
    kind = SIZES[size]
    make_dataset(root_of(size, images), images=images, size=kind.size, progressive=kind.progressive)
