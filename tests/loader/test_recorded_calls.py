"""Datasets that call Pillow by hand: whole batches, from workers' records to emulated kernels behind DALI's decoder."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as TF
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.functional import to_tensor
from torchvision.transforms.v2 import functional as F2
from torchvision.transforms.v2.functional import to_image

from proxyloader import DataLoader
from proxyloader.loader.options import LoaderOptions

from ..kernels.emulation import emulated_gpu
from .test_kernels_road import END, assert_same_batches

__all__ = ["emulated_gpu"]

pytestmark = [
    pytest.mark.usefixtures("emulated_gpu"),
    pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 decodes at once"),
]


def by_functionals(image: Any) -> Any:
    box = v1.RandomResizedCrop.get_params(image, [0.1, 1.0], [0.75, 1.33])
    image = TF.resized_crop(image, *box, [48, 48])
    image = TF.hflip(image) if random.random() < 0.5 else image
    return TF.normalize(to_tensor(TF.adjust_hue(image, random.uniform(-0.1, 0.1))), [0.5] * 3, [0.25] * 3)


def by_pillow(image: Any) -> Any:
    image = ImageOps.fit(image, (48, 48), centering=(random.random(), random.random()))
    for _ in range(random.randrange(4)):
        image = random.choice([ImageOps.mirror, ImageOps.equalize, ImageOps.invert, lambda i: i.rotate(9)])(image)
    for enhancer in random.sample([ImageEnhance.Contrast, ImageEnhance.Color, ImageEnhance.Sharpness], 2):
        image = enhancer(image).enhance(random.uniform(0.5, 1.5))
    gamma = random.uniform(0.7, 1.4)
    return to_tensor(image.point([round(255 * (level / 255) ** gamma) for level in range(256)] * 3))


class Blur:
    def __call__(self, image: Any) -> Any:
        radius = random.uniform(0.1, 2.0)
        return image.filter(ImageFilter.GaussianBlur(radius)) if random.random() < 0.5 else image


SIMCLR = v1.Compose([v1.RandomResizedCrop(48), v1.ColorJitter(0.8, 0.8, 0.8, 0.2), v1.RandomGrayscale(), Blur(), *END])


def letterboxed(image: Any) -> Any:
    scale = 64 / max(image.size)
    image = image.resize([round(side * scale) for side in image.size])
    canvas = Image.new("RGB", (64, 64), (114, 114, 114))
    canvas.paste(image, ((64 - image.width) // 2, (64 - image.height) // 2))
    return to_tensor(canvas)


def by_functionals_of_tensors(image: Any) -> Any:
    image = to_image(image)
    image = F2.resized_crop(image, *v1.RandomResizedCrop.get_params(image, [0.1, 1.0], [0.75, 1.33]), [48, 48])
    image = F2.rotate(image, random.choice([0, 90, 180]))
    image = F2.to_dtype(F2.adjust_brightness(image, random.uniform(0.5, 1.5)), torch.float32, scale=True)
    return F2.normalize(image, [0.5] * 3, [0.25] * 3, inplace=True)


def by_functionals_of_tensors_of_v1(image: Any) -> Any:
    image = TF.crop(TF.pad(TF.pil_to_tensor(image), [8]), random.randrange(60), random.randrange(60), 48, 48)
    image = TF.vflip(image) if random.random() < 0.5 else TF.solarize(image, random.randrange(256))
    return TF.normalize(TF.convert_image_dtype(image), [0.5] * 3, [0.25] * 3)


WITHOUT_RULES = v2.Compose(
    [
        *(v2.ToImage(), v2.Lambda(F2.vflip), v2.RandomPhotometricDistort(), v2.Pad(3, padding_mode="edge")),
        *(v2.RandomCrop(48), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)),
        v2.ToPureTensor(),
    ]
)


class ByHand(Dataset[Any]):
    def __init__(self, folder: ImageFolder, change: Callable[[Any], Any]) -> None:
        self.folder, self.change = folder, change

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Any:
        path, label = self.folder.samples[index]
        return self.change(Image.open(path).convert("RGB")), label


CHANGES: list[Any] = [by_functionals, by_pillow, SIMCLR, letterboxed, by_functionals_of_tensors]
CHANGES += [by_functionals_of_tensors_of_v1, WITHOUT_RULES]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_batches_are_the_stock_loaders(folder: ImageFolder, change: Any, workers: int) -> None:
    loader = assert_same_batches(ByHand(folder, change), num_workers=workers, persistent_workers=workers > 0)
    assert list(loader._servers.queues) == ["kernels"]
    assert loader.stats().images_by_dali == 2 * len(folder)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [SIMCLR, letterboxed])
def test_transform_of_a_folder_is_recorded(
    folder: ImageFolder, transform: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is not translated. On a GPU, the loader leaves it in its place."""
    monkeypatch.setattr(LoaderOptions, "on_gpu", True)
    folder.transform = transform
    assert_same_batches(folder, num_workers=workers)


class WithMask(ByHand):
    """As in a reference for segmentation: the mask is an image of Pillow's own."""

    def __getitem__(self, index: int) -> Any:
        image, label = Image.open(self.folder.samples[index][0]).convert("RGB"), index
        mask = Image.fromarray((np.asarray(image.size).sum() + np.arange(120 * 160).reshape(120, 160)).astype(np.uint8))
        size = random.randint(60, 90)
        image, mask = TF.resize(image, [size, size]), TF.resize(mask, [size, size], TF.InterpolationMode.NEAREST)
        if random.random() < 0.5:
            image, mask = TF.hflip(image), TF.hflip(mask)
        box = v1.RandomCrop.get_params(image, (48, 48))
        image, mask = TF.crop(image, *box), TF.crop(mask, *box)
        return TF.pil_to_tensor(image), torch.as_tensor(np.array(mask), dtype=torch.int64) + label


def test_image_and_mask(folder: ImageFolder) -> None:
    assert_same_batches(WithMask(folder, to_tensor), num_workers=2)


DECODERS = "cv2", "simplejpeg", "torchcodec.decoders"


class FromFiles(ByHand):
    """Decoded by simplejpeg, OpenCV and torchcodec in turn."""

    def __getitem__(self, index: int) -> Any:
        cv2, simplejpeg, decoders = (sys.modules[name] for name in DECODERS)
        path = self.folder.samples[index][0]
        content = Path(path).read_bytes()
        if index % 3 == 0:
            return self.change(Image.fromarray(simplejpeg.decode_jpeg(content))), index
        if index % 3 == 1:
            return self.change(Image.fromarray(cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB))), index
        return self.change(TF.to_pil_image(decoders.decode_image(content))), index


@pytest.mark.parametrize("workers", [0, 2])
def test_other_decoders(folder: ImageFolder, workers: int) -> None:
    for name in DECODERS:
        pytest.importorskip(name)
    assert_same_batches(FromFiles(folder, by_pillow), num_workers=workers)


def test_pixels_that_are_used_come_from_pillow(folder: ImageFolder) -> None:
    def change(image: Any) -> Any:
        crops = [image.crop((k, k, 40 + k, 40 + k)) for k in range(3)]
        return to_tensor(crops[int(np.asarray(crops[0]).mean()) % 3])

    dataset = ByHand(folder, change)
    for (theirs, _), (ours, _) in zip(StockLoader(dataset, 16), DataLoader(dataset, 16), strict=True):
        assert torch.equal(ours, theirs)
