"""What is left to torch, and said to be: datasets with nothing for DALI after some samples."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader as StockLoader, Dataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from proxyloader import DataLoader
from proxyloader.data.deferral import MAX_UNUSED_SAMPLES

from ..side_by_side import assert_as_torch, assert_same
from .roads import Stream

TRANSFORM = transforms.Compose([transforms.RandomCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
SAMPLES = 2 * MAX_UNUSED_SAMPLES + 24
HERE = Path(__file__).name


class Photos(Dataset[Any]):
    """Opens each photograph several times in an epoch, as there are few of them."""

    def __init__(self, root: Path, of: Callable[[Any], Any] | None = None) -> None:
        self.paths, self.transform, self.of = sorted(root.rglob("*.jpg")), TRANSFORM, of

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index % len(self.paths)]).convert("RGB")
        return (self.of or self.transform)(image), index


def as_numpy(image: Any) -> Any:
    return TRANSFORM(image).numpy() + 1


def with_mean(image: Any) -> Any:
    made = TRANSFORM(image)
    return made, float(made.mean())


def of_arrays(image: Any) -> Any:
    return TRANSFORM(Image.fromarray(np.asarray(image)[:80, :80].copy()))


class Folder(ImageFolder):
    """Counts its samples in an attribute that ``__getitem__`` sets."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        image, _ = super().__getitem__(index)
        return image.numpy(), self.count


def folder(root: Path) -> Any:
    dataset = Folder(str(root), TRANSFORM)
    dataset.samples = [dataset.samples[k % len(dataset.samples)] for k in range(SAMPLES)]
    return dataset


def blur(image: Any) -> Any:
    return TRANSFORM(image.filter(ImageFilter.GaussianBlur(1)))


USING_PIXELS = {
    **dict.fromkeys((as_numpy, with_mean, folder), "pixels are used at "),
    blur: "call at ",
}


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return f"text {index}", {"label": torch.rand(1), "index": index}


class Grey(Texts):
    transform = transforms.ToTensor()

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.fromarray(np.full((28, 28), index % 256, np.uint8))), index


class Turned(Grey):
    transform = transforms.Compose([transforms.RandomRotation(30), transforms.ToTensor()])

    def __len__(self) -> int:
        return 3 * SAMPLES


def rows() -> Stream:
    return Stream(range(2 * SAMPLES), lambda index: torch.full((3,), float(index)), int)


WITHOUT_PHOTOGRAPHS = [
    *(Texts, Grey, rows, lambda: Subset(Texts(), range(100)), lambda: [*range(SAMPLES)]),
    lambda: TensorDataset(torch.randn(SAMPLES, 5), torch.arange(SAMPLES)),
]


def loaded(loader: Any, epochs: int = 2) -> list[Any]:
    return [batch for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("make", [*USING_PIXELS, of_arrays, *WITHOUT_PHOTOGRAPHS])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["", "2", "persistent"])
def test_batches_and_draws_are_torchs_and_the_line_that_uses_pixels_is_named_once(
    make: Callable[..., Any], workers: int, persistent: bool, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if make in WITHOUT_PHOTOGRAPHS:
        dataset = make()
    else:
        dataset = folder(photos) if make is folder else Photos(photos, make)
    how = dict(num_workers=workers, persistent_workers=persistent, shuffle=not isinstance(dataset, Stream))

    def epochs(kind: Any) -> list[Any]:
        torch.manual_seed(3)
        given = make(photos) if make is folder else dataset  # as it keeps a count
        loader = kind(given, 8, **how)
        batches = loaded(loader)
        if kind is DataLoader and make in USING_PIXELS:
            assert loader.backend.startswith(f"torch: {USING_PIXELS[make]}") and HERE in loader.backend
        return [*batches, torch.rand(1)]

    assert_same(epochs(DataLoader), epochs(StockLoader))
    if make in USING_PIXELS:
        (said,) = [record for record in caplog.records if USING_PIXELS[make] in record.getMessage()]
        assert said.levelno == logging.WARNING and HERE in said.getMessage()


@pytest.mark.parametrize("make", WITHOUT_PHOTOGRAPHS)
def test_without_photographs_the_iterator_is_torchs_from_the_second_epoch_on(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(make(), 8, device="cpu")
    loaded(loader)
    assert loader.backend.startswith("torch: ")
    assert loader._pool is not None and loader._pool.worker_dataset is None
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    stats, again = loader.stats(), loaded(loader)
    samples = sum(len(batch[0]) if len(batch) < 3 else len(batch) for batch in again)
    assert stats.images == stats.images_by_workers == samples and stats.batches == len(again)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_in_mid_epoch_are_kept_where_torchs_loader_gives_the_batches(num_workers: int) -> None:
    def build() -> Any:
        torch.manual_seed(1)
        return DataLoader(Texts(), 8, shuffle=True, device="cpu", num_workers=num_workers)

    loader = build()
    loaded(loader)
    batches = iter(loader)
    next(batches), next(batches)
    assert loader._pool is not None and loader._pool.worker_dataset is None
    state = loader.state_dict()
    rest = [batch[1]["index"].tolist() for batch in batches]
    for resumed in (build(), loader):
        resumed.load_state_dict(state)
        assert [batch[1]["index"].tolist() for batch in resumed] == rest and len(rest) == SAMPLES // 8 - 2


@pytest.mark.parametrize(
    ("make", "taken"), [(Texts, (None, 3, None, 5, 2, None)), (Turned, (SAMPLES // 4, None, None))]
)
def test_persistent_workers_undo_what_they_drew_for_loops_that_were_left(
    make: Any, taken: tuple[int | None, ...]
) -> None:
    def epochs(kind: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = kind(make(), 8, shuffle=True, num_workers=2, persistent_workers=True)
        found: list[Any] = []
        for batches in taken:
            found += itertools.islice(iter(loader), batches)
        return [*found, torch.rand(1)]

    assert_same(epochs(DataLoader), epochs(StockLoader))


def test_a_stream_that_torchs_loader_reads_resumes_in_the_same_loader() -> None:
    loader = DataLoader(rows(), 8, num_workers=2, persistent_workers=True, translate=False, device="cpu")
    batches, state = iter(loader), {}
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    rest = [indices.tolist() for _, indices in batches]
    loader.load_state_dict(state)
    assert [indices.tolist() for _, indices in loader] == rest


class Failing(Texts):
    def __getitem__(self, index: int) -> Any:
        if index == 20:
            raise ValueError("not this one")
        return super().__getitem__(index)


def test_a_resumed_epoch_goes_on_behind_a_batch_that_failed() -> None:
    loader = DataLoader(Failing(), 8, device="cpu")
    for epoch in range(2):  # the second one is torch's
        batches, failures = iter(loader), 0
        for _ in range(5):
            try:
                next(batches)
            except ValueError:
                failures += 1
        resumed = DataLoader(Failing(), 8, device="cpu")
        resumed.load_state_dict(loader.state_dict())
        assert failures == 1 and next(iter(resumed))[1]["index"][0] == 40, epoch
        del batches
        with contextlib.suppress(ValueError):
            loaded(loader, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_transform_is_looked_at(workers: int, photos: Path) -> None:
    dataset = Photos(photos)
    dataset.transform = transforms.Compose([TRANSFORM, lambda image: torch.from_numpy(image.numpy())])
    loader = DataLoader(dataset, 8, num_workers=workers, device="cpu")
    loaded(loader)
    assert loader.backend.startswith("torch: ")
    dataset.transform = TRANSFORM
    loaded(loader, 1)
    assert loader.backend.startswith("DALI on cpu")


def test_few_images_for_dali_are_enough(photos: Path) -> None:
    few_of = MAX_UNUSED_SAMPLES - 8
    numbers = itertools.count()
    few = Photos(photos, lambda image: TRANSFORM(image) if next(numbers) % few_of == 0 else torch.zeros(3, 64, 64))
    loader = DataLoader(few, 8, device="cpu")
    loaded(loader, 1)
    assert loader.backend.startswith("DALI on cpu")


def test_the_hooks_are_gone_when_no_loader_defers(photos: Path) -> None:
    def calls() -> list[Any]:
        return [vars(kind).get("__call__") for kind in (transforms.ToTensor, v2.RandomCrop, transforms.Compose)]

    gc.collect()  # another test's loader may be in a cycle, with its error
    before, opener = calls(), Image.OPEN["JPEG"]
    deferring, gives_up = (
        DataLoader(make(photos), 8, device="cpu") for make in (Photos, functools.partial(Photos, of=as_numpy))
    )
    loaded(gives_up, 1)
    assert calls() == before
    batches = iter(deferring)
    next(batches)
    assert calls() != before
    loaded(gives_up, 1)
    assert calls() != before and next(batches)[0].shape == (8, 3, 64, 64)
    del batches, deferring
    assert calls() == before and Image.OPEN["JPEG"] == opener


def test_a_loader_that_fails_for_a_gpu_decides_nothing_for_others(photos: Path) -> None:
    """A warp is torchvision's on a CPU, and would be DALI's on a GPU."""

    turn = transforms.RandomRotation(30, interpolation=transforms.InterpolationMode.BILINEAR)
    rotated = Photos(photos, lambda image: TRANSFORM(turn(image)))

    def build(kind: Any) -> Any:
        loader, other = kind(rotated, 8), DataLoader(rotated, 8)
        other.device = "cuda:63"  # which is nowhere
        with pytest.raises(ValueError, match="cuda:63"):
            next(iter(other))
        return loader

    assert_as_torch(build, device="cpu")
