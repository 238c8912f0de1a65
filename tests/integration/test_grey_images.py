"""JPEGs in mode L, grey themselves or converted, behind any transform: the stock loader's batches, or its error.

On a GPU kernels make them, without one torchvision.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import proxyloader

from ..side_by_side import Failed, assert_as_torch, one_epoch
from .test_any_dataset import Photographs

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning", "ignore::DeprecationWarning")

MEAN_LEVELS = 0.5
"""Largest mean difference of a batch, in levels of 255."""

TO_TENSOR = [v1.ToTensor(), v1.Normalize((0.5,), (0.5,))]
CROP = v1.RandomResizedCrop(48)
ONE_V2 = [v2.RandomResizedCrop(48)]
TO_TENSOR_V2 = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,), (0.5,))]


def then(*transforms: Any) -> v1.Compose:
    return v1.Compose([CROP, *transforms, *TO_TENSOR])


def then_v2(*transforms: Any) -> v2.Compose:
    return v2.Compose([*ONE_V2, *transforms, *TO_TENSOR_V2])


BY_KERNELS: dict[str, Any] = {
    "crop": then(),
    "crop, v2": then_v2(),
    "bicubic": then_v2(v2.Resize((40, 50), v2.InterpolationMode.BICUBIC)),
    "nearest": then(v1.Resize((40, 50), v1.InterpolationMode.NEAREST)),
    "pad": then(v1.Pad(3, fill=77), v1.RandomCrop(48, padding=2, fill=20)),
    "FiveCrop": then_v2(v2.ToImage(), v2.FiveCrop(32)),
    "rotation": then(v1.RandomRotation(30, v1.InterpolationMode.BILINEAR, fill=9)),
    "perspective": then_v2(v2.RandomPerspective(0.4, 1, fill=(7,))),
    "Grayscale(1)": then(v1.Grayscale(1)),
    "Grayscale(3)": then(v1.Grayscale(3)),
    "RandomGrayscale": then(v1.RandomGrayscale(0.5)),
    "RGB": then_v2(v2.RGB()),
    "colour jitter": then(v1.ColorJitter(0.4, 0.4, 0.4, 0.2)),
    "colour jitter, v2": then_v2(v2.ColorJitter(0.4, 0.4, 0.4, 0.2)),
    "hue of a tensor": v2.Compose([*ONE_V2, v2.ToImage(), v2.ColorJitter(0.2, 0.2, 0.4, 0.2), *TO_TENSOR_V2[1:]]),
    "RandomApply": then(v1.RandomApply([v1.ColorJitter(0.4), v1.Grayscale(1)], 0.5)),
    "AutoAugment": then(v1.AutoAugment()),
    "RandAugment": then_v2(v2.RandAugment()),
    "AugMix": then_v2(v2.AugMix()),
    "blur": then(v1.GaussianBlur(3)),
    "erasing with noise": v1.Compose([CROP, *TO_TENSOR, v1.RandomErasing(1, value="random")]),
}
"""Each kind of step. ``tests/transforms`` has all on grey images, and ``kernels/test_pillow_calls.py`` on files."""

IN_WORKERS: dict[str, Any] = {
    "crop": then(),
    "RandAugment": then_v2(v2.RandAugment()),
    "noise": v2.Compose([*ONE_V2, *TO_TENSOR_V2, v2.GaussianNoise()]),
    "a Lambda": v1.Compose([v1.Lambda(lambda image: image.rotate(10)), CROP, *TO_TENSOR]),
    "reflected": then(v1.Pad(3, padding_mode="reflect")),
    "channels in another order": then_v2(v2.RandomPhotometricDistort(p=1)),
}

ERRORS: dict[str, Any] = {
    "a mean of three channels": v1.Compose([CROP, v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)]),
    "a fill of three channels": then(v1.Pad(3, fill=(1, 2, 3))),
}


class Grey(Photographs):
    """Eight photographs in mode L, for a transform in an attribute."""

    def __init__(self, root: Path, mode: str | None, **transforms: Any) -> None:
        super().__init__(root, self.taken)
        self.paths, self.mode = self.paths[:8], mode
        vars(self).update(transforms)

    def taken(self, path: Path, index: int) -> Any:
        image = Image.open(path)
        image = image if self.mode is None else image.convert(self.mode)
        assert image.mode == image.copy().mode == "L" and image.getbands() == ("L",)
        return (self.transform if hasattr(self, "transform") else self.tf)(image), index


@pytest.fixture(scope="module")
def grey_photos(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grey")
    (root / "a").mkdir()
    for index, path in enumerate(sorted(photos.glob("*/*.jpg"))[:8]):
        Image.open(path).convert("L").save(root / "a" / f"{index}.jpg", quality=95)
    return root


Make = Callable[..., Grey]


@pytest.fixture(params=["grey itself", "converted"])
def make(request: pytest.FixtureRequest, photos: Path, grey_photos: Path) -> Make:
    is_grey = request.param == "grey itself"
    return functools.partial(Grey, grey_photos if is_grey else photos, None if is_grey else "L")


def assert_made(make: Callable[[], Any], device: str, *, dali: int, workers: int, num_workers: int = 0) -> None:
    """The batch is the stock loader's, and as many images were made by DALI, or by torchvision in the workers."""
    found = []
    for kind, more in ((StockLoader, {}), (proxyloader.DataLoader, {"device": device})):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        loader = kind(make(), 8, True, num_workers=num_workers, **more)
        (images, labels), *others = loader
        assert not others
        found.append([*(images if isinstance(images, (list, tuple)) else [images]), labels])
    stats, ((*theirs, their_labels), (*ours, labels)) = loader.stats(), found
    assert (stats.images_by_dali, stats.images_by_pillow, stats.images_by_workers) == (dali, 0, workers)
    assert torch.equal(labels, their_labels)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, device)
        assert 255 * (one.cpu() - other).abs().mean() < MEAN_LEVELS


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("name", BY_KERNELS)
def test_kernels_make_it(name: str, make: Make, device: str) -> None:
    assert_made(lambda: make(tf=BY_KERNELS[name]), device, dali=8, workers=0)


@pytest.mark.parametrize("name", IN_WORKERS)
def test_torchvision_makes_it(name: str, make: Make) -> None:
    assert_made(lambda: make(tf=IN_WORKERS[name]), "cpu", dali=0, workers=8)


@pytest.mark.parametrize("attribute", ["transform", "tf"])
def test_workers_do_so_too(attribute: str, make: Make, device: str) -> None:
    made_by = dict(dali=8, workers=0) if device == "cuda" else dict(dali=0, workers=8)
    assert_made(lambda: make(**{attribute: then()}), device, **made_by, num_workers=2)


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_torchvisions_error(name: str, make: Make) -> None:
    seen = assert_as_torch(lambda kind: kind(make(tf=ERRORS[name]), 8), one_epoch)
    assert isinstance(seen["epochs"][0]["batches"][0], Failed)


def test_grey_and_colour_in_one_folder(photos: Path, grey_photos: Path, tmp_path: Path, device: str) -> None:
    """Of images that are opened as they are."""
    (tmp_path / "a").mkdir()
    for index, path in enumerate([*sorted(grey_photos.glob("*/*.jpg"))[:4], *sorted(photos.glob("*/*.jpg"))[:4]]):
        (tmp_path / "a" / f"{index}.jpg").symlink_to(path)

    def folder(*transforms: Any) -> Any:
        transform = v1.Compose([v1.Resize((48, 48)), *transforms, v1.ToTensor()])
        return ImageFolder(str(tmp_path), transform, loader=Image.open)

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(StockLoader(folder(), 8))
    with pytest.raises(RuntimeError, match=r"\(1, 48, 48\), \(3, 48, 48\). Convert them to the same mode"):
        list(proxyloader.DataLoader(folder(), 8, device=device))
    for channels in (1, 3):
        assert_as_torch(lambda kind: kind(folder(v1.Grayscale(channels)), 8, True), device=device)  # noqa: B023
