"""What ``loader.backend``, the log and errors say of images that DALI does not make, and where they are in the code."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, default_collate
from torchvision import transforms
from torchvision.datasets import CIFAR10, ImageFolder

import proxyloader

from ..integration.roads import Mapped
from ..limits import WAIT_S

TRAIN = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])


def files(root: Path, look: Callable[[Any], Any]) -> Mapped:
    paths = sorted(root.rglob("*.jpg"))
    return Mapped(lambda index: (look(Image.open(paths[index])), index), range(len(paths)))


class Brighter:
    def __call__(self, image: Any) -> Any:
        return np.asarray(image.copy()) + np.asarray(image)  # two uses of a file count as one


def as_an_array(image: Any) -> Any:
    return TRAIN(Image.fromarray(np.asarray(image)))


def with_its_maximum(image: Any) -> Any:
    tensor = TRAIN(image)
    return tensor / float(tensor.max())


def by_an_object(image: Any) -> Any:
    return torch.from_numpy(Brighter()(image)[:32, :32].copy())


def in_a_thumbnail(image: Any) -> Any:
    image.thumbnail((40, 40))
    return TRAIN(image)


def unused(image: Any) -> Any:
    return TRAIN(image)


LINES = {
    as_an_array: ("np.asarray", as_an_array),
    with_its_maximum: ("tensor.max()", with_its_maximum),
    by_an_object: ("np.asarray", Brighter),
    in_a_thumbnail: ("image.thumbnail", in_a_thumbnail),
}


def line_of(text: str, owner: Any) -> str:
    lines, first = inspect.getsourcelines(owner)
    (number,) = [first + k for k, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(owner)}:{number}"


workers = pytest.mark.parametrize("num_workers", [0, 1])


def loaded(dataset: Any, num_workers: int = 0, device: str = "cpu", **options: Any) -> proxyloader.DataLoader[Any]:
    """A loader that was iterated once."""
    loader = proxyloader.DataLoader(dataset, 12, num_workers=num_workers, device=device, **options)
    list(loader)
    return loader


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxyloader")


@workers
@pytest.mark.parametrize("look", LINES)
def test_the_line_that_used_pixels_is_named(
    look: Any, num_workers: int, photos: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loaded(files(photos, look), num_workers, device)
    line = line_of(*LINES[look])
    assert f"The first image processed in a worker: pixels are used at {line}" in caplog.text
    assert loader.stats().images_by_workers <= 48
    assert loader.backend.endswith(f"; first reason: pixels are used at {line}")


@workers
def test_no_line_is_named_where_no_pixels_are_used_nor_that_of_another_loader(
    num_workers: int, photos: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    for look in (with_its_maximum, unused):
        caplog.clear()
        loader = loaded(files(photos, look), num_workers, device)
    assert "first epoch" in caplog.text and "pixels are used at" not in caplog.text
    assert loader.backend.endswith("JPEGs are sent encoded")


NO_KERNELS = "requires CUDA kernels"


@workers
@pytest.mark.parametrize(
    ("dtype", "mode", "first", "why"),
    [
        (torch.float32, "RGB", [transforms.ColorJitter(0.3)], f"ColorJitter: {NO_KERNELS}"),
        (torch.float32, "L", [], f"RandomResizedCrop of a grayscale image: {NO_KERNELS}"),
        (torch.float64, "RGB", [], "torch's default dtype is torch.float64, but images are float32"),
    ],
    ids=["a transform", "grey", "float64"],
)
def test_another_reason_is_named_and_no_line_of_the_users(
    dtype: torch.dtype, mode: str, first: Any, why: str, num_workers: int, photos: Path, caplog: Any
) -> None:
    transform = transforms.Compose([*first, TRAIN])
    try:
        torch.set_default_dtype(dtype)
        loader = loaded(files(photos, lambda image: transform(image.convert(mode))), num_workers)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loader.backend == f"torch: the workers have produced all images loaded so far; first reason: {why}"
    assert f"The first image processed in a worker: {why}" in caplog.text


def test_what_a_failed_batch_of_another_loader_used_is_not_counted(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(image: Any) -> Any:
        raise KeyError(np.asarray(image).sum())

    clean = proxyloader.DataLoader(files(photos, unused), 12, device="cpu")
    iterator = iter(clean)
    next(iterator)
    with pytest.raises(KeyError):
        loaded(files(photos, failing))
    list(iterator)
    assert clean.backend.endswith("JPEGs are sent encoded") and "processed in the workers: 0" in caplog.text


def test_an_epoch_left_early_is_not_counted_in_the_first(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = proxyloader.DataLoader(files(photos, unused), 12, device="cpu")
    next(iter(loader))
    with caplog.at_level(logging.INFO):
        assert len(list(loader)) == 4
    assert "first epoch: images decoded by DALI: 48" in caplog.text


def with_means(samples: Any) -> Any:
    images, labels = default_collate(samples)
    return images - float(images.mean()), labels


@workers
def test_the_line_of_a_collate_fn_is_named(num_workers: int, photos: Path, device: str) -> None:
    loader = loaded(files(photos, unused), num_workers, device, collate_fn=with_means)
    assert loader.backend.endswith(line_of("images.mean()", with_means))


def of_arrays(count: int = 12) -> CIFAR10:
    dataset = CIFAR10.__new__(CIFAR10)
    dataset.data, dataset.targets = np.full((count, 32, 32, 3), 7, np.uint8), [0] * count
    dataset.transform, dataset.target_transform = TRAIN, None
    return dataset


@pytest.mark.parametrize(
    "made_of", [of_arrays, lambda: Subset(of_arrays(), [3, 5]), lambda: ConcatDataset([of_arrays()])]
)
def test_arrays_that_nobody_decodes_are_no_reason_for_a_warning(
    made_of: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert loaded(made_of(), device=device).backend.endswith("decoded images are sent as pixels")
    (record,) = [each for each in caplog.records if "first epoch" in each.getMessage()]
    assert record.levelno == logging.INFO and "slower" not in record.getMessage()


def test_decoded_images_are_a_reason_for_a_warning(
    photos: Path, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "class").mkdir()
    with Image.open(next(photos.rglob("*.jpg"))) as image:
        image.save(tmp_path / "class" / "a.png")
    loaded(ImageFolder(str(tmp_path), TRAIN), device=device)
    said = "Only images that DALI decodes load faster than with torch"
    assert "transformed by DALI: 1" in caplog.text and said in caplog.text


SCRIPT = """
import sys, proxyloader
assert "torch" not in sys.modules
proxyloader.DataLoader, proxyloader.wrap
assert not any(name.startswith("nvidia.dali") for name in sys.modules)
import torch
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from proxyloader import DataLoader

for side_px in (127, 128):
    crop = transforms.RandomResizedCrop(side_px)
    folder = ImageFolder(sys.argv[1], transforms.Compose([crop, transforms.ToTensor()]))
    loader = DataLoader(Subset(folder, [*range(24)] * 4), 4, device="cpu")
    print(loader.backend)
    list(loader)
    print(loader.backend)
assert not torch.cuda.is_initialized()
"""


def test_importing_loads_no_torch_or_dali_and_on_a_cpu_crops_that_torchvision_makes_faster_are_its_own(
    photos: Path,
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(photos)]
    # Without the tests' own sitecustomize.py, which has DALI make small images, too.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment, check=True)
    small, small_in_use, large, large_in_use = done.stdout.splitlines()
    assert small == small_in_use == f"torch: RandomResizedCrop: {NO_KERNELS} for this size or filter"
    assert large == large_in_use and large.startswith("DALI on cpu")
