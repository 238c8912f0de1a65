"""Random programs on images and tensors, in a dataset and in a collate_fn: the stock loader's batches and draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image, ImageOps
from torch.utils.data import DataLoader as StockLoader, default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

import proxyloader

from .roads import Mapped

SIDE = 24
MEAN_LEVELS = 1.0

Operation = Callable[[Any], Any]


def erased(image: torch.Tensor) -> torch.Tensor:
    image[..., 3:9, 4:12] = 0.5
    return image


ON_IMAGES: dict[str, Operation] = {
    "RGB": lambda image: image.convert("RGB"),
    "copy": lambda image: image.copy(),
    "load": lambda image: (image.load(), image)[1],
    "upright": ImageOps.exif_transpose,
    "flip": v1.RandomHorizontalFlip(),
    "v2 flip": v2.RandomVerticalFlip(),
    "crop": v1.RandomCrop(40, pad_if_needed=True),
    "v2 crop": v2.RandomResizedCrop(48),
    "pad": v1.Pad(3),
    "grey": v1.Grayscale(3),
    "apply": v1.RandomApply([v1.RandomHorizontalFlip(1.0), lambda image: image.transpose(1)]),
    "Pillow's crop": lambda image: image.crop((1, 2, 45, 47)),
    "Pillow's resize": lambda image: image.resize((50, 44)),
    "Pillow's turn": lambda image: image.rotate(90),
}

ON_TENSORS: dict[str, Operation] = {
    "times": lambda image: image * 2 - 0.5,
    "minus": lambda image: 1 - image,
    "normalize": v1.Normalize([0.5] * 3, [0.3] * 3),
    "flip": lambda image: image.flip(-1),
    "roll": lambda image: image.roll(3, -1),
    "channels": lambda image: image[..., [2, 0, 1], :, :],
    "erased": erased,
    "in place": lambda image: image.mul_(0.5).add_(0.25),
    "through a view": lambda image: (image[0].mul_(0.5), image)[1],
    "clamp": lambda image: image.clamp(0.2, 0.8),
    "noise": lambda image: image + 0.01 * torch.randn_like(image),
    "a random number": lambda image: image * (1 + 0.1 * torch.rand(())),
    "its mean": lambda image: image - image.mean(),
    "its maximum as a number": lambda image: image / max(image.max().item(), 1.0),
    "half and back": lambda image: image.to(torch.float64).float(),
    "contiguous": lambda image: image.contiguous(),
    "where": lambda image: torch.where(image > 2.0, image, image * 0.5),
}

ON_BATCHES: dict[str, Operation] = {
    name: ON_TENSORS[name] for name in ("times", "flip", "erased", "in place", "its mean")
}
ON_BATCHES["permuted"] = lambda images: images[torch.randperm(len(images))]
ON_BATCHES["mixed"] = lambda images: images.lerp(images.roll(1, 0), torch.rand(()).item())


def program(paths: Sequence[Path], on_images: list[str], to_tensor: str, on_tensors: list[str]) -> Mapped:
    last = [v1.Resize((SIDE, SIDE)), v1.ToTensor()]
    if to_tensor == "v2":
        last = [v2.Resize((SIDE, SIDE)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    operations = [*map(ON_IMAGES.__getitem__, on_images), v1.Compose(last), *map(ON_TENSORS.__getitem__, on_tensors)]

    def sample(index: int) -> Any:
        image: Any = Image.open(paths[index])
        for operation in operations:
            image = operation(image)
        return image, index

    return Mapped(sample, range(len(paths)))


def collated(names: list[str]) -> Callable[[Any], Any]:
    def collate(samples: Any) -> Any:
        images, indices = default_collate(samples)
        for name in names:
            images = ON_BATCHES[name](images)
        return images, indices

    return collate


def seen(kind: Any, dataset: Any, num_workers: int = 0, **options: Any) -> tuple[list[Any], torch.Tensor]:
    torch.manual_seed(1)
    random.seed(1)
    batches = list(kind(dataset, batch_size=4, shuffle=True, num_workers=num_workers, **options))
    return batches, torch.get_rng_state()


@given(
    st.lists(st.sampled_from(sorted(ON_IMAGES)), max_size=4),
    st.sampled_from(["v1", "v2"]),
    st.lists(st.sampled_from(sorted(ON_TENSORS)), max_size=5),
    st.lists(st.sampled_from(sorted(ON_BATCHES)), max_size=2),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program_gives_what_it_gives_with_the_stock_loader(
    photos: Path, device: str, on_images: list[str], to_tensor: str, on_tensors: list[str], on_batches: list[str]
) -> None:
    paths = sorted(photos.glob("*/*.jpg"))[:8]
    dataset, collate = program(paths, on_images, to_tensor, on_tensors), collated(on_batches)
    stock, stock_state = seen(StockLoader, dataset, collate_fn=collate)
    ours, our_state = seen(proxyloader.DataLoader, dataset, collate_fn=collate, device=device)
    assert torch.equal(our_state, stock_state)
    for (images, indices), (wanted, wanted_indices) in zip(ours, stock, strict=True):
        assert torch.equal(indices, wanted_indices)
        assert (images.shape, images.dtype, images.device.type) == (wanted.shape, wanted.dtype, device)
        assert (images.cpu() - wanted).abs().mean() < MEAN_LEVELS / 255 * 2 ** on_tensors.count("times") * 4
