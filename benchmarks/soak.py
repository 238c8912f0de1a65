"""Does the loader give the right picture, and give back what it took, through hours of breaks, faults and settings?

    python benchmarks/soak.py --minutes 60                      # on a GPU where there is one
    python benchmarks/soak.py --minutes 5 --device cpu          # a short one
    python benchmarks/soak.py --seed 7 --only-episode 123       # what failed, again (with --minutes 5: for so long)

An episode draws settings for one to three loaders and runs epochs of them, alone, zipped, nested or in another thread;
into most epochs a fault is put, into the files, the workers or the loop. Every picture spells its number, so each one
of every batch is compared with its label; where crops are random, each batch with that of a loader without workers and
of the same seed. A wrong picture, an unexpected error or 60 s without a batch ends the run with a status that is not 0,
and with the line that replays the episode. Processes meet at other moments in each run, so it may need turns.

Appends one JSON line to benchmarks/results/soak.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    get_worker_info,
)
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import InterpolationMode
from tqdm import tqdm

import proxyloader
from proxyloader.loader.feed import LONG_STEP_S
from proxyloader.tools.bench.system_info import machine
from tests.numbered import numbered_image, read_numbers

HANG_S = 60
ERROR_WITHIN_S = 2.0
SIDES_PX = (32, 64, 100, 180, 400)
SAMPLE_ERRORS = (OSError, LookupError, proxyloader.PipelineError)
LOST_WORKER = re.compile("exited unexpectedly|killed by signal")


class Wrong(AssertionError):
    """The loader did what it must not do."""


# --- pictures and data sets ------------------------------------------------------------------------------------------


def make_pictures(root: Path, count: int) -> list[Path]:
    """Pictures 0, 1, 2, ... of several sizes and formats, most of them baseline JPEGs."""
    paths = []
    for number in tqdm(range(count), desc="pictures", disable=None):
        picture = numbered_image(number, SIDES_PX[number % len(SIDES_PX)])
        path = root / f"class_{number % 4}" / f"{number:05d}.{'png' if number % 17 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {} if path.suffix == ".png" else {"quality": 90, "progressive": number % 13 == 0}
        (picture.convert("L") if number % 11 == 0 else picture).save(path, **options)
        paths.append(path)
    return paths


class Pictures(ImageFolder):
    """An ImageFolder of some of the pictures, whose labels are their numbers.

    Attributes:
        refused: numbers that it raises a LookupError for.
    """

    def __init__(self, paths: Sequence[Path], numbers: Sequence[int], transform: Any, loader: Any) -> None:
        super().__init__(str(paths[0].parents[1]), transform, loader=loader)
        self.samples = [(str(paths[number]), number) for number in numbers]
        self.refused: set[int] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.samples[index][1] in self.refused:
            raise LookupError(f"dataset[{index}] is refused")
        return super().__getitem__(index)


@dataclass
class Opened(Dataset[Any]):
    """A data set that opens its files itself."""

    paths: Sequence[Path]
    numbers: Sequence[int]
    transform: Any

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        number = self.numbers[index]
        return self.transform(proxyloader.EncodedImage.open(self.paths[number])), number


@dataclass
class Stream(IterableDataset[Any]):
    """The same without indices: each worker reads its share."""

    paths: Sequence[Path]
    numbers: Sequence[int]
    transform: Any

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for number in self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]:
            yield self.transform(proxyloader.EncodedImage.open(self.paths[number])), number


class Noted(Sampler[int]):
    """A sampler of the user's own, which keeps the order it gave."""

    def __init__(self, size: int) -> None:
        self.order: list[int] = []
        self._sampler = RandomSampler(range(size))

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self.order = []
        for index in self._sampler:
            self.order.append(index)
            yield index


def read_bytes(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def open_with_pillow(path: str) -> Any:
    return pil_loader(path)


def as_dict(samples: list[Any]) -> Any:
    return {"images": torch.stack([image for image, _ in samples]), "numbers": [number for _, number in samples]}


def as_list(samples: list[Any]) -> Any:
    return samples


# --- what is drawn for a loader --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Of one loader; ``repr`` says all that is needed to build it by hand."""

    kind: str
    size: int
    order: str
    transform: str
    side_px: int
    batch_size: int | None
    num_workers: int
    start: str
    persistent_workers: bool
    prefetch_factor: int
    prefetch: int
    num_threads: int | Literal["auto"]
    hw_decoder_load: float | Literal["auto"]
    drop_last: bool
    in_order: bool
    pin_memory: bool
    on_error: str
    seed: int | None
    collate: str
    own_generator: bool
    timeout: float

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        start = rng.choices(["fork", "forkserver", "spawn"], [94, 4, 2])[0]
        workers = rng.choice([0, 1, 2, 2, 3, 4]) if start == "fork" else rng.choice([1, 2])
        kind = rng.choices(
            ["folder", "subset", "concat", "opened", "pillow", "server", "stream"], [6, 2, 2, 2, 1, 3, 2]
        )
        order = rng.choice(["as it is", "shuffle", "list", "noted", "distributed", "batches"])
        crops = rng.random() < 0.3 and kind[0] not in ("server", "stream") and order != "noted"
        stream = kind[0] == "stream"
        batch_size = rng.choice([1, 2, 5, 8, 16, 16, 32, 64]) if rng.random() > 0.06 or stream else None
        if stream or (batch_size is None and order == "batches"):
            order = "as it is"
        size = rng.randint(20, 60 if batch_size in (None, 1) else 240)
        return cls(
            kind=kind[0],
            size=size,
            order=order,
            transform="crops" if crops else rng.choice(["floats", "bytes", "bicubic", "normalised"]),
            side_px=rng.choice([32, 48, 64]),
            batch_size=batch_size,
            num_workers=workers,
            start=start,
            persistent_workers=workers > 0 and rng.random() < 0.5,
            prefetch_factor=rng.randint(1, 4),
            prefetch=rng.randint(1, 4),
            num_threads=rng.choice(["auto", 1, 2, 3]),
            hw_decoder_load=rng.choice([0.0, 0.65, 1.0, "auto"]),
            drop_last=batch_size is not None and order != "batches" and rng.random() < 0.3,
            in_order=rng.random() < 0.75,
            pin_memory=rng.random() < 0.3,
            on_error="raise" if stream else rng.choice(["raise", "skip", "replace"]),
            seed=rng.randrange(1000) if crops or (rng.random() < 0.4 and not stream) else None,
            collate=rng.choice(["torch's", "torch's", "as_dict", "as_list"]) if batch_size else "torch's",
            own_generator=not crops and rng.random() < 0.2,
            timeout=rng.choice([0, 0, 30]),
        )

    @property
    def disorderly(self) -> bool:
        return not self.in_order and self.num_workers > 1


def transform_of(settings: Settings, interpolation: InterpolationMode = InterpolationMode.BILINEAR) -> Any:
    if settings.transform == "bicubic":
        interpolation = InterpolationMode.BICUBIC
    side = settings.side_px
    if settings.transform == "crops":
        geometry = [transforms.RandomResizedCrop(side, interpolation=interpolation), transforms.RandomHorizontalFlip()]
    else:
        geometry = [transforms.Resize((side, side), interpolation)]
    end: list[Any] = [transforms.PILToTensor() if settings.transform == "bytes" else transforms.ToTensor()]
    if settings.transform == "normalised":
        end.append(transforms.Normalize([0.5] * 3, [0.5] * 3))
    return transforms.Compose([*geometry, *end])


# --- a loader, and loops over it -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What the run has seen so far."""

    episodes: int = 0
    loops: int = 0
    batches: int = 0
    images: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    stop_s: list[float] = field(default_factory=list)
    close_s: list[float] = field(default_factory=list)
    error_s: list[float] = field(default_factory=list)
    notes: list[dict[str, float]] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    unraisable: list[str] = field(default_factory=list)
    bar: Any = None

    def note_unraisable(self, unraisable: Any) -> None:
        """What Python cannot raise, in a ``__del__`` say. Torch's signal handler may do that for what is killed."""
        found = LOST_WORKER.search(str(unraisable.exc_value))
        pid = re.search(r"pid\(?s?\)? (\d+)", str(unraisable.exc_value))
        if not (found and pid and int(pid[1]) in self.killed):
            trace = traceback.format_exception(unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
            self.unraisable.append(f"in {unraisable.object!r}: {''.join(trace)}")

    def beat(self) -> None:
        """Something went on; put off the watchdogs. The second one needs no Python, but cannot name the episode."""
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        faulthandler.dump_traceback_later(HANG_S + 15, exit=True)


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start_s)


class Stand:
    """One loader of an episode with its own pictures, which no other loader of the episode has."""

    def __init__(
        self,
        settings: Settings,
        paths: list[Path],
        numbers: list[int],
        server: Any,
        device: str,
        rng: random.Random,
        tally: Tally,
    ) -> None:
        self.settings, self.paths, self.server, self.device = settings, paths, server, device
        self.rng, self.tally = rng, tally
        self.numbers = numbers[: settings.size]
        self._more = numbers
        self._listed = rng.choices(range(settings.size), k=rng.randint(10, settings.size))
        cuts = sorted(rng.sample(range(1, len(self._listed)), min(6, len(self._listed) - 1)))
        self._batches = [self._listed[a:b] for a, b in zip([0, *cuts], [*cuts, len(self._listed)])]
        self._rank, self._order_seed = rng.randrange(2), rng.randrange(100)
        self.folders: list[Pictures] = []
        self.dataset = self._dataset()
        self.build()

    def _dataset(self) -> Any:
        settings, numbers, paths = self.settings, self.numbers, self.paths
        transform = transform_of(settings)
        if settings.kind == "stream":
            return Stream(paths, numbers, transform)
        if settings.kind == "opened":
            return Opened(paths, numbers, transform)
        if settings.kind == "concat":
            half = settings.size // 2
            parts = numbers[:half], numbers[half:]
            other = transform_of(settings, InterpolationMode.BICUBIC)
            self.folders = [Pictures(paths, part, t, pil_loader) for part, t in zip(parts, (transform, other))]
            return ConcatDataset(self.folders)
        if settings.kind == "subset":
            self.folders = [Pictures(paths, self._more, transform, pil_loader)]
            return Subset(self.folders[0], [self._more.index(number) for number in numbers])
        loader = {"pillow": open_with_pillow, "server": read_bytes}.get(settings.kind, pil_loader)
        transform = self.server.proxy if settings.kind == "server" else transform
        self.folders = [Pictures(paths, numbers, transform, loader)]
        return self.folders[0]

    def build(self, **changed: Any) -> None:
        """A new loader, in its first epoch."""
        settings = replace(self.settings, **changed)
        order = self.order(settings)
        self.sampler = order.get("sampler")
        self.loader: Any = self.new_loader(settings, order)
        self.epoch = 0
        self.pids: list[int] = []

    def new_loader(self, settings: Settings, order: dict[str, Any]) -> Any:
        has_workers = settings.num_workers > 0
        return proxyloader.DataLoader(
            self.dataset,
            **order,
            num_workers=settings.num_workers,
            multiprocessing_context=settings.start if has_workers else None,
            persistent_workers=settings.persistent_workers and has_workers,
            prefetch_factor=settings.prefetch_factor if has_workers else None,
            collate_fn={"as_dict": as_dict, "as_list": as_list}.get(settings.collate),
            pin_memory=settings.pin_memory,
            in_order=settings.in_order,
            timeout=settings.timeout if has_workers else 0,
            generator=torch.Generator().manual_seed(self._order_seed) if settings.own_generator else None,
            device=self.device,
            server=self.server if settings.kind == "server" else None,
            seed=settings.seed,
            on_error=settings.on_error,
            prefetch=settings.prefetch,
            num_threads=settings.num_threads,
            hw_decoder_load=settings.hw_decoder_load,
        )

    def order(self, settings: Settings) -> dict[str, Any]:
        """The loader's arguments about order, with a new sampler."""
        if settings.order == "batches":
            return {"batch_sampler": self._batches}
        common: dict[str, Any] = {"batch_size": settings.batch_size, "drop_last": settings.drop_last}
        if settings.order == "shuffle":
            return common | {"shuffle": True}
        if settings.order == "list":
            return common | {"sampler": self._listed}
        if settings.order == "noted":
            return common | {"sampler": Noted(settings.size)}
        if settings.order == "distributed":
            shards = DistributedSampler(self.dataset, num_replicas=2, rank=self._rank, seed=self._order_seed)
            return common | {"sampler": shards}
        return common

    def batches_of_indices(self) -> list[list[int]] | None:
        """In the order of this epoch, as far as it can be known from outside."""
        settings = self.settings
        if settings.kind == "stream" or settings.order == "shuffle":
            return None
        if settings.order == "batches":
            return self._batches
        if isinstance(self.sampler, Noted):
            order = self.sampler.order
        else:
            order = list(range(settings.size) if self.sampler is None else self.sampler)
        size = settings.batch_size or 1
        found = [order[at : at + size] for at in range(0, len(order), size)]
        return found[:-1] if settings.drop_last and found and len(found[-1]) < size else found

    def iterator(self) -> Any:
        """Begin the next epoch; notes which processes are this loader's."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epoch)
        before = {child.pid for child in multiprocessing.active_children()}
        batches = iter(self.loader)
        self.epoch += 1
        started = [child.pid for child in multiprocessing.active_children() if child.pid not in before]
        self.pids = started or self.pids
        return batches

    def close(self) -> None:
        with timed(self.tally.close_s):
            self.loader = None


Event = tuple[str, Any]
"""("batch", its numbers), or ("failed", index of the sample), or ("failed", None) where no index is promised."""


class Loop:
    """One epoch of one loader.

    Args:
        stand: the loader.
        fault: to commit at a batch, by its name in ``FAULTS``.
        damage: done to files before the epoch and undone after it, by its name in ``DAMAGES``.
    """

    def __init__(self, stand: Stand, fault: str | None, damage: str | None) -> None:
        self.stand, self.settings, self.tally, self.rng = stand, stand.settings, stand.tally, stand.rng
        self.fault, self.damage = fault, damage
        self.events: list[Event] = []
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=3)
        self.bad: set[int] = set()
        self.batches: Any = None
        self.twin: dict[tuple[int, ...], torch.Tensor] = {}
        self.twin_events: list[Event] | None = None
        self.indices: list[list[int]] | None = None
        self.over = self.whole = False
        self.step_s = stand.rng.choice([0.0, 0.0, 2 * LONG_STEP_S])  # in long ones runs are started by a thread
        size = self.settings.size if self.settings.order != "distributed" else self.settings.size // 2
        self.fault_at = stand.rng.randint(1, max(1, size // (self.settings.batch_size or 1)))

    def __enter__(self) -> Loop:
        self.tally.beat()
        self.restore: Callable[[], None] = lambda: None
        if self.damage is not None:
            self.tally.injected[self.damage] += 1
            self.restore = self._do_damage(self.damage)
        try:
            if self.stand.loader is None:
                self.stand.build()
            if self.settings.transform == "crops":
                self._load_twin()
            self.batches = self.stand.iterator()
        except BaseException:
            self.restore()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self.batches is not None:
                self.stop()
        finally:
            self.restore()
        if kind is None:
            self.finish()
        self.tally.loops += 1

    def stop(self) -> None:
        """Drop the iterator."""
        self.over = True
        self.indices = self.stand.batches_of_indices()  # now: a sampler tells of its latest epoch
        with timed(self.tally.stop_s):
            self.batches = None

    def step(self) -> bool:
        """Take a batch, and commit the fault if it is time for it. False at the end."""
        if self.fault is not None and len(self.events) >= self.fault_at and not self.over:
            name, self.fault = self.fault, None
            if FAULTS[name](self) is not False:
                self.tally.injected[name] += 1
        return not self.over and self.take()

    def take(self) -> bool:
        """Take a batch and check it. False at the end of the epoch."""
        self.tally.beat()
        try:
            batch = next(self.batches)
        except StopIteration:
            self.over = self.whole = True
            return False
        except SAMPLE_ERRORS as error:
            self.events.append(("failed", self._index_in(error)))
            return True
        images, numbers = self.parts(batch)
        for name, check in CHECKS.items():
            complaint = check(self, images, numbers)
            if complaint:
                raise Wrong(f"{name}: {complaint} (batch {len(self.events)} of the epoch)")
        self.events.append(("batch", tuple(numbers)))
        self.tally.batches += 1
        self.tally.images += len(numbers)
        time.sleep(self.step_s)
        return True

    def parts(self, batch: Any) -> tuple[torch.Tensor, list[int]]:
        """(N, 3, H, W) and the N numbers, of any collate_fn's batch."""
        if self.settings.collate == "as_dict":
            return batch["images"], list(batch["numbers"])
        if self.settings.collate == "as_list":
            return torch.stack([image for image, _ in batch]), [number for _, number in batch]
        images, numbers = batch
        return (
            (images[None], [int(numbers)])
            if self.settings.batch_size is None and images.ndim == 3
            else (
                images,
                [int(number) for number in numbers],
            )
        )

    def readable(self, images: torch.Tensor) -> list[int]:
        if self.settings.kind != "server" and self.settings.transform == "normalised":
            images = images * 0.5 + 0.5
        return read_numbers(images, white=255 if images.dtype == torch.uint8 else 1)

    # --- damage, and what is expected of it ---

    def _do_damage(self, name: str) -> Callable[[], None]:
        """To one to three of the loader's pictures; returns what undoes it."""
        numbers, paths = self.stand.numbers, self.stand.paths
        self.bad = set(self.rng.sample([i for i, n in enumerate(numbers) if n % 17], self.rng.randint(1, 3)))
        if name == "sample refused":
            for folder in self.stand.folders:
                folder.refused = {numbers[index] for index in self.bad}
            self.stand.build()  # workers that live have the data set as it was

            def accept() -> None:
                for folder in self.stand.folders:
                    folder.refused = set()
                self.stand.close()

            return accept
        before = {paths[numbers[index]]: paths[numbers[index]].read_bytes() for index in self.bad}
        for path, content in before.items():
            DAMAGES[name](path, content)
        return lambda: [path.write_bytes(content) for path, content in before.items()] and None

    def _index_in(self, error: Exception) -> Any:
        """Which sample the error names; one that should not have come is raised again."""
        index = None
        if not self.bad or (self.settings.on_error != "raise" and self.damage != "sample refused"):
            raise error
        if self.damage == "sample refused":
            index = int(re.search(r"dataset\[(\d+)\] is refused", str(error))[1])  # type: ignore[index]
            return self._outer_index(index)
        if isinstance(error, proxyloader.PipelineError):
            if self.settings.kind != "server" or not self.bad & set(error.indices or ()):
                raise Wrong(f"{error!r} names another batch than that of {sorted(self.bad)}") from error
        elif self.settings.kind not in ("pillow", "server"):
            files = {str(self.stand.paths[self.stand.numbers[index]]): index for index in self.bad}
            if not isinstance(error, proxyloader.ImageError) or error.path not in files:
                raise Wrong(f"{error!r} names another file than one of {files}") from error
            index = None if self.unnamed else error.index
            if not self.unnamed and index != files[error.path]:
                raise Wrong(f"{error!r} names dataset[{index}], and the file is of {files[error.path]}") from error
        return index

    @property
    def unnamed(self) -> bool:
        """Errors need not name an index: the dataset's own, and those of DALI where a batch is of two pipelines."""
        by_dali = self.settings.kind == "concat" and self.damage == "broken tables"
        return by_dali or self.settings.kind in ("pillow", "server")

    def _outer_index(self, index: int) -> Any:
        """A refusing folder inside of another data set names its own index."""
        return index if self.settings.kind == "folder" else None

    def expected(self, batch: list[int]) -> Event | None:
        """What comes for a batch of indices; None: nothing."""
        numbers, refused = self.stand.numbers, self.damage == "sample refused"
        hit = [index for index in batch if index in self.bad]
        if hit and (refused or self.settings.on_error == "raise"):
            named = self._outer_index(hit[0]) if refused else hit[0]
            return "failed", None if self.unnamed else named
        if self.settings.on_error == "skip":
            batch = [index for index in batch if index not in self.bad]
        for _ in self.bad:
            batch = [(index + 1) % len(numbers) if index in self.bad else index for index in batch]
        return ("batch", tuple(numbers[index] for index in batch)) if batch else None

    def _load_twin(self) -> None:
        """The same epoch from a loader that has no workers."""
        settings = replace(self.settings, num_workers=0, prefetch=1)
        order = self.stand.order(settings)
        if isinstance(order.get("sampler"), DistributedSampler):
            order["sampler"].set_epoch(self.stand.epoch)
        twin = self.stand.new_loader(settings, order)
        twin.set_epoch(self.stand.epoch)
        self.twin_events, batches = [], iter(twin)
        while True:
            try:
                images, numbers = self.parts(next(batches))
            except StopIteration:
                return
            except SAMPLE_ERRORS as error:
                self.twin_events.append(("failed", self._index_in(error)))
                continue
            self.twin[tuple(numbers)] = images
            self.twin_events.append(("batch", tuple(numbers)))

    def finish(self) -> None:
        """All that was expected has come, in its order, and nothing else."""
        for images, copied in self.kept:
            if not torch.equal(images, copied):
                raise Wrong("a batch that the loop kept has changed")
        expected = self.twin_events
        if self.indices is not None:
            known = [event for event in map(self.expected, self.indices) if event is not None]
            if expected is not None and known != expected:
                raise Wrong(f"a loader without workers gave {expected}, and expected was {known}")
            expected = known
        if expected is None:
            self._compare_as_sets()
        elif self.settings.disorderly:
            more = Counter(self.events) - Counter(expected)
            if more or (self.whole and len(self.events) != len(expected)):
                raise Wrong(f"came and was not expected: {more}; missing: {Counter(expected) - Counter(self.events)}")
        elif self.events != (expected if self.whole else expected[: len(self.events)]):
            raise Wrong(f"came: {self.events}\nexpected: {expected}")

    def _compare_as_sets(self) -> None:
        size, batch_size = self.settings.size, self.settings.batch_size or 1
        singles = [self.expected([index]) for index in range(size)]
        pool = Counter(number for event in singles if event and event[0] == "batch" for number in event[1])
        came = Counter(number for event in self.events if event[0] == "batch" for number in event[1])
        failed = sum(event[0] == "failed" for event in self.events)
        if came - pool:
            raise Wrong(f"came and was not expected, or more than once: {came - pool}")
        parts = max(1, self.settings.num_workers) if self.settings.kind == "stream" else 1
        dropped = parts * (batch_size - 1) if self.settings.drop_last else 0
        if self.whole and came.total() < pool.total() - dropped - failed * batch_size:
            raise Wrong(f"missing at the end of the epoch: {pool - came}, with {failed} failed batches")


# --- the table of checks: a complaint about a batch, or None ---------------------------------------------------------


def numbers_are_spelled(loop: Loop, images: torch.Tensor, numbers: list[int]) -> str | None:
    if len(images) != len(numbers):
        return f"{len(images)} images and {len(numbers)} labels"
    if loop.settings.transform == "crops" and loop.settings.kind != "server":
        return None
    seen = loop.readable(images)
    return None if seen == numbers else f"the pixels say {seen}, the labels {numbers}"


def numbers_are_of_this_loader(loop: Loop, images: torch.Tensor, numbers: list[int]) -> str | None:
    others = set(numbers) - set(loop.stand.numbers)
    return f"another loader's: {sorted(others)}" if others else None


def equal_without_workers(loop: Loop, images: torch.Tensor, numbers: list[int]) -> str | None:
    if loop.settings.transform != "crops":
        return None
    if tuple(numbers) not in loop.twin:
        return f"a loader without workers has no batch of {numbers}"
    # The GPU's JPEG engine and its CUDA decoder, which share the files of a run, are within 3 levels of each other;
    # bicubic interpolation can enlarge that.
    difference = float((images - loop.twin[tuple(numbers)]).abs().max())
    limit = 6 / 255 if images.is_cuda else 0
    return f"pixels of {numbers} differ by {255 * difference:.1f} levels" if difference > limit else None


def arrives_as_promised(loop: Loop, images: torch.Tensor, numbers: list[int]) -> str | None:
    by_hand = loop.settings.kind == "server"
    side_px = SERVER_SIDE_PX if by_hand else loop.settings.side_px
    dtype = torch.uint8 if not by_hand and loop.settings.transform == "bytes" else torch.float32
    found = images.device.type, images.dtype, tuple(images.shape[1:])
    promised = loop.stand.device, dtype, (3, side_px, side_px)
    return None if found == promised else f"{found} instead of {promised}"


def kept_batches_stay(loop: Loop, images: torch.Tensor, numbers: list[int]) -> str | None:
    """The loop may keep a batch: neither DALI nor a worker writes into it again."""
    if len(loop.kept) == loop.kept.maxlen and not torch.equal(*loop.kept[0]):
        return "a batch that the loop kept has changed"
    loop.kept.append((images, images.clone()))
    return None


CHECKS: dict[str, Callable[[Loop, torch.Tensor, list[int]], str | None]] = {
    "numbers are spelled": numbers_are_spelled,
    "numbers are of this loader": numbers_are_of_this_loader,
    "equal without workers": equal_without_workers,
    "arrives as promised": arrives_as_promised,
    "kept batches stay": kept_batches_stay,
}


# --- the table of faults: what happens to a loop at some batch; False: not with these settings -----------------------


class BodyError(Exception):
    """Raised by the loop's body."""


def break_(loop: Loop) -> None:
    loop.stop()


def body_raises(loop: Loop) -> None:
    try:
        for _ in loop.batches:
            raise BodyError
    except BodyError:
        loop.stop()
    except SAMPLE_ERRORS as error:
        loop._index_in(error)
        loop.stop()
    else:
        loop.stop()


def kill_worker(loop: Loop) -> bool:
    alive = [pid for pid in loop.stand.pids if psutil.pid_exists(pid)]
    if not alive:
        return False
    pid = loop.rng.choice(alive)
    loop.tally.killed.add(pid)
    start_s = time.perf_counter()
    try:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # a forkserver's child is not ours
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # so that the signal comes here and not later
        while loop.take():
            pass
        return True  # the others, or it itself, had done all that was left
    except RuntimeError as error:
        if not LOST_WORKER.search(str(error)):
            raise
    took_s = time.perf_counter() - start_s
    loop.tally.error_s.append(took_s)
    loop.stop()
    if took_s > ERROR_WITHIN_S:
        raise Wrong(f"the error came {took_s:.1f} s after a worker was killed")
    return True


def drop_loader(loop: Loop) -> None:
    """The iterator goes on without it."""
    loop.stand.close()


def collect_garbage(loop: Loop) -> None:
    gc.collect()


def pause(loop: Loop) -> None:
    time.sleep(loop.rng.uniform(0.05, 0.5))


def fork_and_exit(loop: Loop) -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def second_iterator(loop: Loop) -> bool:
    if loop.settings.persistent_workers or loop.settings.order != "as it is":
        return False
    try:
        images, numbers = loop.parts(next(loop.stand.iterator()))
    except SAMPLE_ERRORS as error:
        loop._index_in(error)
        return True
    except StopIteration:
        return True
    complaint = numbers_are_spelled(loop, images, numbers)
    if complaint:
        raise Wrong(f"second iterator: {complaint}")
    return True


def resume(loop: Loop) -> bool:
    """From a checkpoint, in a new loader with another number of workers."""
    stand, settings = loop.stand, loop.settings
    if settings.disorderly or stand.loader is None:
        return False
    state = pickle.loads(pickle.dumps(stand.loader.state_dict()))
    loop.stop()
    stand.close()
    workers = settings.num_workers if settings.kind == "stream" else loop.rng.choice([0, 1, 2, 3])
    epoch = stand.epoch
    stand.build(num_workers=workers, in_order=True)
    stand.loader.load_state_dict(state)
    stand.epoch = epoch - 1
    loop.batches = stand.iterator()
    loop.over = False
    return True


FAULTS: dict[str, Callable[[Loop], bool | None]] = {
    "break": break_,
    "exception in the body": body_raises,
    "worker killed": kill_worker,
    "loader dropped": drop_loader,
    "garbage collection": collect_garbage,
    "pause": pause,
    "fork": fork_and_exit,
    "second iterator": second_iterator,
    "resumed": resume,
}


def break_tables(path: Path, content: bytes) -> None:
    """Give the first Huffman table more codes than there can be; the header stays whole."""
    at = content.index(b"\xff\xc4") + 5
    path.write_bytes(content[:at] + b"\xff" * 16 + content[at + 16 :])


DAMAGES: dict[str, Callable[[Path, bytes], Any]] = {
    "file missing": lambda path, content: path.unlink(),
    "file empty": lambda path, content: path.write_bytes(b""),
    "file cut": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "file of text": lambda path, content: path.write_text("no picture\n" * 20),
    "broken tables": break_tables,
    "sample refused": lambda path, content: None,
}


def damages_for(settings: Settings, device: str) -> list[str]:
    names = list(DAMAGES)
    if settings.kind == "stream":  # its first error ends it, as with torch
        return []
    if settings.kind == "opened":
        names.remove("sample refused")
    if settings.kind == "server":
        # What becomes of these depends on the pipeline, and on a GPU on its decoder. And DALI's CPU decoder itself ends
        # the process with a segmentation fault when a file of text is in a batch of good ones (DALI 2.4).
        unclear = {"file empty", "file cut", "file of text"} | ({"broken tables"} if device == "cuda" else set())
        names = [name for name in names if name not in unclear]
    return names


# --- an episode ------------------------------------------------------------------------------------------------------

SERVER_SIDE_PX = 64


def server_by_hand(batch_size: int, device: str, depth: int) -> Any:
    from proxyloader.dali.api import fn, pipeline_def, types

    cpu = device == "cpu"

    @pipeline_def(
        batch_size=batch_size,
        num_threads=2,
        device_id=None if cpu else 0,
        exec_dynamic=True,
        prefetch_queue_depth=depth,
    )
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        images = fn.decoders.image(encoded, device="cpu" if cpu else "mixed", output_type=types.RGB)
        images = fn.resize(images, size=[SERVER_SIDE_PX, SERVER_SIDE_PX], antialias=True)
        return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", std=[255.0] * 3)

    return proxyloader.ProxyServer(graph())


class Episode:
    """One to three loaders and what happens to them, all of it from the seed and the number."""

    def __init__(self, seed: int, number: int, paths: list[Path], device: str, tally: Tally) -> None:
        self.rng = rng = random.Random(f"{seed}/{number}")
        self.tally = tally
        self.torch_seed = rng.randrange(1 << 31)
        self.settings = [Settings.draw(rng) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
        if any(settings.start != "fork" for settings in self.settings):
            self.settings = self.settings[:1]  # such workers take seconds to start
        self.mode = rng.choice(["in turn", "in a thread", "zip", "nested"])
        self.epochs = rng.randint(1, 4 if self.settings[0].start == "fork" else 2)
        self.depth = rng.randint(1, 4)
        self._paths, self._device = paths, device

    def __str__(self) -> str:
        lines = [f"{self.mode}, {self.epochs} epochs, torch.manual_seed({self.torch_seed})", *map(repr, self.settings)]
        return "\n".join(lines)

    def run(self) -> None:
        torch.manual_seed(self.torch_seed)
        needed = [s.batch_size or 1 if s.order != "batches" else 256 for s in self.settings if s.kind == "server"]
        server = server_by_hand(max(needed), self._device, self.depth) if needed else None
        numbers = self.rng.sample(range(len(self._paths)), len(self._paths))
        each = len(numbers) // len(self.settings)
        stands = [
            Stand(
                settings, self._paths, numbers[at * each : (at + 1) * each], server, self._device, self.rng, self.tally
            )
            for at, settings in enumerate(self.settings)
        ]
        before = Counter(self.tally.injected)
        for _ in range(self.epochs):
            MODES[self.mode](stands)
        for stand in stands:
            stand.close()
        self.tally.survived += self.tally.injected - before
        self.tally.episodes += 1
        nothing_is_left()
        if self.tally.unraisable:
            raise Wrong("ignored by Python, as nobody could have caught it:\n" + "\n".join(self.tally.unraisable))


def loop_over(stand: Stand) -> Loop:
    """An epoch with the faults that are drawn for it."""
    rng, damages = stand.rng, damages_for(stand.settings, stand.device)
    fault = rng.choice([*FAULTS, None, None])
    return Loop(stand, fault, rng.choice(damages) if damages and rng.random() < 0.3 else None)


def in_turn(stands: list[Stand]) -> None:
    for stand in stands:
        with loop_over(stand) as loop:
            while loop.step():
                pass


def in_a_thread(stands: list[Stand]) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def body() -> None:
        try:
            in_turn(stands)
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=body)
    thread.start()
    # Not by join(): torch's signal handler tells the main thread of killed workers as well, and Python (3.11) takes a
    # thread for finished when a signal handler raises in its join().
    while not done.is_set():
        try:
            time.sleep(0.01)
        except RuntimeError as error:
            if not LOST_WORKER.search(str(error)):
                raise
    thread.join()
    if errors:
        raise errors[0]


def zipped(stands: list[Stand]) -> None:
    with contextlib.ExitStack() as stack:
        going = [stack.enter_context(loop_over(stand)) for stand in stands]
        while going:
            going = [loop for loop in going if loop.step()]


def nested(stands: list[Stand]) -> None:
    first, *others = stands
    with loop_over(first) as loop:
        at = first.rng.randrange(4)
        while loop.step():
            at -= 1
            if not at:
                in_turn(others)


MODES: dict[str, Callable[[list[Stand]], None]] = {
    "in turn": in_turn,
    "in a thread": in_a_thread,
    "zip": zipped,
    "nested": nested,
}


def nothing_is_left() -> None:
    """No worker and no memory between processes outlives an episode."""
    gc.collect()
    deadline_s = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if multiprocessing.active_children():
        raise Wrong(f"left behind: {multiprocessing.active_children()}")
    gc.collect()  # a process that was not reaped yet held its arguments
    arenas = [link for link in open_files() if "memfd:proxyloader" in link]
    if arenas:
        raise Wrong(f"left behind: {arenas}")


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of listdir itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


# --- the run ---------------------------------------------------------------------------------------------------------


def note(minutes: float, device: str) -> dict[str, float]:
    """What the process and its children hold, between episodes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    tree = [process]
    with contextlib.suppress(psutil.Error):
        tree += process.children(recursive=True)
    memory = []
    for each in tree:
        with contextlib.suppress(psutil.Error):
            memory.append(each.memory_full_info())
    found = {
        "minutes": round(minutes, 2),
        "rss_mb": round(sum(each.rss for each in memory) / 1e6, 1),
        "uss_mb": round(sum(each.uss for each in memory) / 1e6, 1),
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(tree) - 1,
    }
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found["gpu_mb"] = round((total - free) / 1e6, 1)
    return found


def trend(notes: list[dict[str, float]]) -> dict[str, Any]:
    """Of each number: at the start, at the end, at most, and its slope by a linear fit."""
    hours = np.array([each["minutes"] for each in notes]) / 60
    return {
        name: {
            "start": notes[0][name],
            "end": notes[-1][name],
            "max": max(each[name] for each in notes),
            "slope_per_hour": round(float(np.polyfit(hours, [each[name] for each in notes], 1)[0]), 2)
            if len(set(hours)) > 2
            else None,
        }
        for name in notes[0]
        if name != "minutes"
    }


def spread(seconds: list[float]) -> dict[str, Any] | None:
    if not seconds:
        return None
    return {"count": len(seconds), "median": round(statistics.median(seconds), 4), "max": round(max(seconds), 3)}


def soak(args: argparse.Namespace, paths: list[Path], tally: Tally, start_s: float) -> None:
    """Episodes until the time is over."""
    end_s, every_s = start_s + 60 * args.minutes, min(30.0, 3 * args.minutes)
    next_note_s, number = start_s, 0 if args.only_episode is None else args.only_episode
    while True:
        episode = Episode(args.seed, number, paths, args.device, tally)
        # Read by nobody but a person, after a crash that lets Python say nothing.
        (args.data / "episode.txt").write_text(f"{replay(args, number)}\n{episode}\n")

        def give_up(*_: Any, number: int = number, episode: Episode = episode) -> None:
            print(f"\nno batch for {HANG_S} s\n{replay(args, number)}\n{episode}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
            os._exit(3)

        signal.signal(signal.SIGALRM, give_up)
        tally.beat()
        try:
            episode.run()
        except BaseException as error:
            traceback.print_exc()
            print(f"\n{type(error).__name__}\n{replay(args, number)}\n{episode}", file=sys.stderr, flush=True)
            args.clean_up()
            os._exit(1)  # an end in good order could wait for what has gone wrong
        number += args.only_episode is None
        now_s = time.perf_counter()
        tally.bar.n = min(now_s - start_s, 60 * args.minutes)
        tally.bar.set_postfix(
            episodes=tally.episodes, batches=tally.batches, images=tally.images, faults=tally.injected.total()
        )
        warm = now_s - start_s > 6 * args.minutes and (tally.episodes >= 20 or now_s - start_s > 30 * args.minutes)
        if (warm and now_s > next_note_s) or now_s > end_s:
            tally.notes.append(note((now_s - start_s) / 60, args.device))
            next_note_s = now_s + every_s
        if now_s > end_s:
            return


def replay(args: argparse.Namespace, number: int) -> str:
    device = f"--device {args.device} --pictures {args.pictures}"
    return f"python benchmarks/soak.py --seed {args.seed} --only-episode {number} {device} --minutes 1"


def as_table(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['minutes']} minutes, {record['machine']['gpu'] or 'CPU'}", show_header=False)
    for name in ("episodes", "loops", "batches", "images", "wrong"):
        table.add_row(name, f"{record[name]:,}")
    for name, count in record["injected"].items():
        table.add_row(name, f"{count:,} times, {record['survived'].get(name, 0):,} survived")
    for name in ("stop_s", "close_s", "error_s"):
        if record[name]:
            table.add_row(f"{name}, median and max", f"{record[name]['median']:.3f}   {record[name]['max']:.3f}")
    for name, each in record["held"].items():
        table.add_row(f"{name}: start, end, max, per hour", "   ".join(map(str, each.values())))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="default: 60; with --only-episode: it runs once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument("--only-episode", type=int, metavar="N", help="run this one, again and again, and no record")
    parser.add_argument("--data", type=Path, help="a folder to make the pictures in (default: a temporary one)")
    parser.add_argument("--pictures", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "soak.jsonl", type=Path)
    args = parser.parse_args()
    if args.pictures < 720:
        parser.error("three loaders of up to 240 pictures need --pictures 720")
    if args.minutes is None:
        args.minutes = 60.0 if args.only_episode is None else 0.0
    warnings.filterwarnings("ignore")  # of more workers than cores, and of forks beside threads
    logging.getLogger("proxyloader").setLevel(logging.ERROR)  # every sample that is left out
    faulthandler.enable()
    tally = Tally()
    sys.unraisablehook = tally.note_unraisable
    with tempfile.TemporaryDirectory() as temporary:
        args.clean_up = (lambda: None) if args.data else lambda: shutil.rmtree(temporary, ignore_errors=True)
        args.data = args.data or Path(temporary)
        paths = make_pictures(args.data / "pictures", args.pictures)
        torch.set_num_threads(1)  # the checks' tensors are small
        gc.freeze()  # modules, which no collection between episodes need look at
        start_s = time.perf_counter()
        with tqdm(total=round(60 * args.minutes), unit="s", disable=None) as tally.bar:
            soak(args, paths, tally, start_s)
    gc.unfreeze()
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    record = {
        "date": datetime.date.today().isoformat(),
        "benchmark": "soak",
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "device": args.device,
        "seed": args.seed,
        "minutes": round((time.perf_counter() - start_s) / 60, 2),
        "episodes": tally.episodes,
        "loops": tally.loops,
        "batches": tally.batches,
        "images": tally.images,
        "wrong": 0,  # a run that sees one ends without a record
        "injected": dict(sorted(tally.injected.items())),
        "survived": dict(sorted(tally.survived.items())),
        "stop_s": spread(tally.stop_s),
        "close_s": spread(tally.close_s),
        "error_s": spread(tally.error_s),
        "held": trend(tally.notes),
    }
    if args.only_episode is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    Console().print(as_table(record))


if __name__ == "__main__":
    main()
