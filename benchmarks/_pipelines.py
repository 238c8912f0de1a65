"""Datasets and transforms as people write them: a custom class, direct calls of functions, several views, boxes."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F, v2

from proxyloader.tools.bench import AUGMENTATIONS
from proxyloader.tools.bench.config import CROP_PX, MEAN, STD, make_transform

BICUBIC = transforms.InterpolationMode.BICUBIC
TO_TENSOR = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]


class CustomDataset(Dataset[Any]):
    """A class that opens files with Pillow and calls a function or a transform on each image."""

    def __init__(self, root: str, change: Callable[[Any], Any]) -> None:
        self.samples, self.change = ImageFolder(root).samples, change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return self.change(Image.open(file).convert("RGB")), label


def functional_transform(image: Any) -> torch.Tensor:
    box = transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    image = F.resized_crop(image, *box, [CROP_PX, CROP_PX])
    if random.random() < 0.5:
        image = F.hflip(image)
    return F.normalize(F.to_tensor(image), MEAN, STD)


def pillow_transform(image: Any) -> torch.Tensor:
    scale = random.uniform(0.3, 1.0)
    width, height = (int(scale * side) for side in image.size)
    left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
    box = left, top, left + width, top + height
    image = image.resize((CROP_PX, CROP_PX), Image.Resampling.BILINEAR, box=box)
    return F.to_tensor(ImageOps.mirror(image) if random.random() < 0.5 else image)


def flip_boxes(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Flip a whole image and the box of an object."""
    width, height = image.size
    boxes = torch.tensor([[0.0, 0.0, width / 2, height / 2]])
    if random.random() < 0.5:
        image = F.hflip(image)
        boxes = torch.tensor([width, 0.0, width, 0.0]) + boxes[:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1])
    return F.normalize(F.to_tensor(image), MEAN, STD), boxes


class Views:
    """Several transforms of the same image."""

    def __init__(self, *views: Any) -> None:
        self.views = views

    def __call__(self, image: Any) -> list[torch.Tensor]:
        return [view(image) for view in self.views]


class PillowBlur:
    """Random blur as in DINO's code."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        if random.random() > self.p:
            return image
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


def simclr() -> Views:
    """Return two views with the augmentation of SimCLR (arXiv:2002.05709)."""
    view = transforms.Compose(
        [
            transforms.RandomResizedCrop(CROP_PX),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
            transforms.RandomGrayscale(0.2),
            transforms.RandomApply([transforms.GaussianBlur(23, (0.1, 2.0))], 0.5),
            *TO_TENSOR,
        ]
    )
    return Views(view, view)


def dino(local_crops: int = 0) -> Views:
    """Return the two global crops of DINO (arXiv:2104.14294), and smaller local ones."""

    def view(size: int, scale: tuple[float, float], *blur: Any) -> Any:
        crop = transforms.RandomResizedCrop(size, scale, interpolation=BICUBIC)
        jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8)
        colors = [transforms.RandomHorizontalFlip(), jitter, transforms.RandomGrayscale(0.2)]
        return transforms.Compose([crop, *colors, *blur, *TO_TENSOR])

    large = functools.partial(view, CROP_PX, (0.4, 1.0))
    first, second = large(PillowBlur(1.0)), large(PillowBlur(0.1), transforms.RandomSolarize(128, 0.2))
    return Views(first, second, *[view(96, (0.05, 0.4), PillowBlur(0.5))] * local_crops)


def timm(policy: str | None, erasing: float, **more: Any) -> Any:
    factory = importlib.import_module("timm.data.transforms_factory")
    return factory.create_transform(
        CROP_PX, is_training=True, auto_augment=policy, re_prob=erasing, re_mode="pixel", color_jitter=None, **more
    )


def photometric() -> Any:
    return v2.Compose([v2.RandomResizedCrop(CROP_PX), v2.RandomPhotometricDistort(), *TO_TENSOR])


def augmented_folder(root: str, augmentation: str) -> Any:
    return ImageFolder(root, make_transform(augmentation))


def collate_lists(samples: list[Any]) -> tuple[list[Any], ...]:
    return tuple(map(list, zip(*samples)))


PIPELINES: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    "ImageFolder": (lambda root: ImageFolder(root, make_transform()), {}),
    "custom class, same Compose": (lambda root: CustomDataset(root, make_transform()), {}),
    "direct functional calls": (lambda root: CustomDataset(root, functional_transform), {}),
    "direct Pillow calls": (lambda root: CustomDataset(root, pillow_transform), {}),
    **{name: (functools.partial(augmented_folder, augmentation=name), {}) for name in AUGMENTATIONS},
    "photometric distortion": (lambda root: ImageFolder(root, photometric()), {}),
    "SimCLR, two views": (lambda root: CustomDataset(root, simclr()), {}),
    "DINO, two global crops": (lambda root: CustomDataset(root, dino()), {"batch_size": 128}),
    "DINO, ten crops": (lambda root: CustomDataset(root, dino(8)), {"batch_size": 64}),
    "timm, no policy": (lambda root: ImageFolder(root, timm(None, 0.0)), {}),
    "timm, rand-m9 and erasing": (lambda root: ImageFolder(root, timm("rand-m9-mstd0.5-inc1", 0.25)), {}),
    "timm, rand-m7, bicubic": (
        lambda root: ImageFolder(root, timm("rand-m7-mstd0.5", 0.0, interpolation="bicubic")),
        {},
    ),
    "detection, lists": (lambda root: CustomDataset(root, flip_boxes), {"batch_size": 16, "collate_fn": collate_lists}),
}
"""Functions that make a dataset from the root of an ImageFolder, and arguments of its loader."""
