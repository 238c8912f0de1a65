"""Pictures are found wherever a sample or a batch holds them, whoever made it, and whatever was left out of it.

One loader gives batches of many structures, one after the other: so a structure that goes wrong must also leave the
batches around it alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader as StockLoader, Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader

from proxyloader import DataLoader, InputError, ProxyServer

from ..limits import WAIT_S
from ..outcomes import outcomes
from .roads import (
    BATCH,
    BATCHES,
    PICTURES,
    TRANSFORM,
    Batches,
    Road,
    Stream,
    assert_batches_match,
    assert_pictures_match,
    on_roads,
    on_servers,
    picture_folder,
    picture_pipeline,
    read_bytes,
    resized,
)
from .test_torch_contract_samples import Frozen, Pair, Record, Slotted


@dataclass(frozen=True)
class Sample:
    """What a sample is made of: its picture and the next one, and more of them on request."""

    image: Any
    number: int
    other: Any
    transformed: Callable[[int], Any]

    def after_a_failure(self) -> Any:
        try:
            self.transformed((self.number + 5) % PICTURES)
            raise OSError("this picture will not do")
        except OSError:
            return self.image

    def with_one_unused(self) -> Any:
        self.transformed((self.number + 7) % PICTURES)
        return self.image


def following(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers + 1) % PICTURES


Pairs = list[tuple[Any, Any]]


def pair(batch: Any) -> Pairs:
    return [(batch[0], batch[1])]


# How a sample is put together, and which (images, numbers) its batch must then hold.
SAMPLES: dict[str, tuple[Callable[[Sample], Any], Callable[[Any], Pairs]]] = {
    "tuple": (lambda s: (s.image, s.number), pair),
    "dict": (lambda s: {"image": s.image, "number": s.number}, lambda b: [(b["image"], b["number"])]),
    "nested": (
        lambda s: {"pair": [(s.image,), {"number": s.number}]},
        lambda b: [(b["pair"][0][0], b["pair"][1]["number"])],
    ),
    "named tuple": (lambda s: Pair(s.image, s.number), lambda b: [(b.image, b.number)]),
    "strings": (lambda s: (s.image, str(s.number)), lambda b: [(b[0], list(map(int, b[1])))]),
    "list": (lambda s: [s.number, s.image], lambda b: [(b[1], b[0])]),
    "two views": (lambda s: (s.image, s.number, s.other), lambda b: [(b[0], b[1]), (b[2], following(b[1]))]),
    "one view twice": (lambda s: (s.image, s.number, s.image), lambda b: [(b[0], b[1]), (b[2], b[1])]),
    "an unused result": (lambda s: (s.with_one_unused(), s.number), pair),
    "another attempt": (lambda s: (s.after_a_failure(), s.number), pair),
    "views in another order": (
        lambda s: {"second": s.other, "first": s.image, "number": s.number},
        lambda b: [(b["first"], b["number"]), (b["second"], following(b["number"]))],
    ),
    "a tuple again": (lambda s: (s.image, s.number), pair),
}


class Shaped(ImageFolder):
    """Each batch of four in the next way of ``SAMPLES``."""

    def __getitem__(self, index: int) -> Any:
        image, number = super().__getitem__(index)
        sample = Sample(image, number, self.transformed((number + 1) % PICTURES), self.transformed)
        return list(SAMPLES.values())[index // BATCH][0](sample)

    def transformed(self, index: int) -> Any:
        return self.transform(self.loader(self.samples[index][0]))


ALL = slice(None)


def stacked(pairs: Any) -> tuple[Any, Any]:
    pairs = list(pairs)
    return torch.stack([image for image, _ in pairs]), [number for _, number in pairs]


# What a collate_fn may make of samples, which (images, numbers) the batch must then hold, and of which samples.
COLLATES: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], Pairs], slice]] = {
    "list": (list, lambda b: [stacked(b)], ALL),
    "zip": (lambda samples: list(zip(*samples)), lambda b: [stacked(zip(*b))], ALL),
    "last sample dropped": (lambda samples: default_collate(samples[:-1]), pair, slice(None, -1)),
    "first sample dropped": (lambda samples: default_collate(samples[1:]), pair, slice(1, None)),
    "samples reversed": (lambda samples: default_collate(samples[::-1]), pair, slice(None, None, -1)),
    "torch.stack": (stacked, pair, ALL),
    "object": (lambda samples: Record(*default_collate(samples)), lambda b: [(b.image, b.number)], ALL),
    "slots": (lambda samples: Slotted(*default_collate(samples)), lambda b: [(b.image, b.number)], ALL),
    "deque": (deque, lambda b: [stacked(b)], ALL),
    "frozen dataclasses": (
        lambda samples: [Frozen(*sample) for sample in samples],
        lambda b: [stacked((each.image, each.number) for each in b)],
        ALL,
    ),
    "many lists": (
        lambda samples: [[list(range(1000)) for _ in range(256)], default_collate(samples)],
        lambda b: pair(b[1]),
        ALL,
    ),
    "one sample": (lambda samples: samples[0], lambda b: [(b[0][None], [b[1]])], slice(0, 1)),
}


def collate_in_turn(samples: list[Any]) -> Any:
    return list(COLLATES.values())[samples[0][1] // BATCH][0](samples)


def assert_held(at: int, way: str, batch: Any, pairs_in: Callable[[Any], Pairs], kept: slice = ALL) -> None:
    assert not isinstance(batch, Exception), (way, batch)
    pairs = pairs_in(batch)
    assert list(pairs[0][1]) == list(range(BATCH * at, BATCH * (at + 1)))[kept], way
    for images, numbers in pairs:
        assert_pictures_match(images, numbers)


def test_pictures_are_found_in_samples_of_any_structure(road: Road, start_method: str) -> None:
    loader = road.loader(road.dataset(Shaped), num_workers=1, multiprocessing_context=start_method, timeout=WAIT_S)
    for at, (batch, (way, (_, pairs_in))) in enumerate(zip(outcomes(loader), SAMPLES.items(), strict=True)):
        assert_held(at, way, batch, pairs_in)


def test_pictures_are_found_in_what_any_collate_fn_makes_of_samples(road: Road, start_method: str) -> None:
    loader = road.loader(
        collate_fn=collate_in_turn, num_workers=1, multiprocessing_context=start_method, timeout=WAIT_S
    )
    for at, (batch, (way, (_, pairs_in, kept))) in enumerate(zip(outcomes(loader), COLLATES.items(), strict=True)):
        if (way, road.name) == ("torch.stack", "produced"):
            # A stock loader collates in its workers, where no picture is decoded yet: an error of that batch.
            assert isinstance(batch, TypeError) and "in all samples of a batch, or in none" in str(batch)
        else:
            assert_held(at, way, batch, pairs_in, kept)


def test_without_batches_every_picture_comes_by_itself(road: Road, start_method: str) -> None:
    loader = road.loader(batch_size=None, num_workers=1, multiprocessing_context=start_method, timeout=WAIT_S)
    assert_batches_match((image[None], torch.tensor([number])) for image, number in loader)


class Chain:
    def __init__(self, rest: Any) -> None:
        self.rest = rest


def chained(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    if samples[0][1] // BATCH == 3:
        for _ in range(3000):
            batch = Chain(batch)
    return batch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_chain_of_three_thousand_objects_disturbs_no_other_batch(road: Road, workers: int) -> None:
    if road.name == "produced" and workers:
        road.name = "server"  # torch's own queue loses what it cannot pickle, whatever it is
    found = outcomes(road.loader(collate_fn=chained, num_workers=workers))
    chain = found.pop(3)
    if not isinstance(chain, RecursionError):
        while isinstance(chain, Chain):
            chain = chain.rest
        assert_batches_match([chain], range(12, 16))
    assert_batches_match(found, [*range(12), *range(16, PICTURES)])


def test_subsets_concatenations_and_repeated_indices_are_right(road: Road, start_method: str) -> None:
    whole = road.dataset()
    dataset = ConcatDataset([Subset(whole, range(0, 20, 2)), Subset(Subset(whole, range(20, 48)), range(0, 28, 3))])
    numbers = [*range(0, 20, 2), *range(20, 48, 3)]
    batches = [[0, 0, 0, 0], [3, 12, 3, 12], [19, 5], [7], [9, 10, 11, 8]]
    loader = road.loader(
        dataset, 1, batch_sampler=Batches(batches), num_workers=1, multiprocessing_context=start_method
    )
    assert_batches_match(loader, [numbers[index] for batch in batches for index in batch])


class Pooled(ImageFolder):
    """Reads a batch in several threads."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.__getitem__, indices))


def test_threads_in_getitems_and_batches_out_of_order_give_every_picture_once(road: Road, start_method: str) -> None:
    workers = 1 if start_method == "spawn" else 2
    batches = list(
        road.loader(road.dataset(Pooled), num_workers=workers, in_order=False, multiprocessing_context=start_method)
    )
    assert_batches_match(sorted(batches, key=lambda batch: int(batch[1][0])))


def test_an_iterable_dataset_gives_what_it_gives_under_torch_in_each_epoch(road: Road, start_method: str) -> None:
    paths = [path for path, _ in road.dataset().samples][:27]
    transform, read = (TRANSFORM, pil_loader) if road.server is None else (road.server.proxy, read_bytes)
    of_workers = dict(num_workers=2, persistent_workers=True, multiprocessing_context=start_method)
    for size, arguments in itertools.product((BATCH, None), ({}, of_workers)):
        loader = road.loader(Stream(paths, transform, read), size, **arguments)
        as_under_torch = list(StockLoader(Stream(paths, lambda _: 0, str), size, num_workers=len(arguments) and 2))
        for _ in range(2):
            for (images, numbers), (_, expected) in zip(loader, as_under_torch, strict=True):
                assert torch.equal(torch.as_tensor(numbers), torch.as_tensor(expected))
                if size is None:
                    assert_pictures_match(images[None], [numbers])
                else:
                    assert_pictures_match(images, numbers)


class Doubled(ImageFolder):
    """Two pictures go into each sample, this one and the next."""

    def __getitem__(self, index: int) -> Any:
        a, b = (self.loader(self.samples[place % len(self)][0]) for place in (index, index + 1))
        return {"outputs": self.transform(a=a, b=b), "number": index}


@on_servers
def test_two_inputs_and_two_outputs_of_a_sample_stay_together(road: Road, start_method: str) -> None:
    from nvidia.dali import fn, types

    from .test_proxy_server import pipeline_of

    def decoded(*encoded: Any) -> Any:
        kind = "mixed" if road.device == "cuda" else "cpu"
        images = [fn.decoders.image(each, device=kind, output_type=types.RGB) for each in encoded]
        chosen: dict[str, Any] = dict(dtype=types.FLOAT, output_layout="CHW", mean=[0.0], std=[255.0])
        return tuple(fn.crop_mirror_normalize(each, **chosen) for each in images)

    road.server = ProxyServer(pipeline_of("ab", decoded, BATCH, road.device, exec_dynamic=True))
    for batch in road.loader(road.dataset(Doubled), num_workers=1, multiprocessing_context=start_method):
        first, second = batch["outputs"]
        assert_pictures_match(first, batch["number"])
        assert_pictures_match(second, following(batch["number"]))


def turned(images: Any) -> Any:
    from nvidia.dali import fn

    return fn.flip(resized(images), horizontal=0, vertical=1)


UPSIDE_DOWN = transforms.Compose(
    [transforms.Resize((32, 32)), transforms.RandomVerticalFlip(1.0), transforms.ToTensor()]
)


class Both(ImageFolder):
    """Each picture twice, through the proxies of two servers."""

    upside_down: Any

    def __getitem__(self, index: int) -> Any:
        image, number = super().__getitem__(index)
        return image, number, self.upside_down(self.loader(self.samples[index][0]))


@pytest.fixture
def servers(device: str) -> Iterator[tuple[ProxyServer, ProxyServer]]:
    """One that gives pictures as they are, and one that gives them upside down."""
    with ProxyServer(picture_pipeline(device)) as upright, ProxyServer(picture_pipeline(device, then=turned)) as other:
        yield upright, other


Servers = tuple[ProxyServer, ProxyServer]


def test_a_sample_may_use_two_servers(servers: Servers, start_method: str, spelled_root: Path) -> None:
    a, b = servers
    dataset = picture_folder(spelled_root, a.proxy, read_bytes, Both)
    dataset.upside_down = b.proxy
    loader = StockLoader(dataset, BATCH, num_workers=1, multiprocessing_context=start_method)
    batches = [b.produce_data(a.produce_data(batch)) for batch in loader]
    assert_batches_match((upright, numbers) for upright, numbers, _ in batches)
    assert_batches_match((reversed_.flip(2), numbers) for _, numbers, reversed_ in batches)


MIXED = [[0, 50, 3, 60], [49, 1, 95, 47], [10, 11, 12, 13], [58, 59], [48, 0]]
"""Batches of a concatenation of 48 pictures and the same 48 upside down: most hold both kinds."""


@pytest.mark.parametrize("met", ["two transforms", "a transform and a server"])
def test_two_ways_may_meet_in_one_batch(
    met: str, servers: Servers, start_method: str, spelled_root: Path, device: str
) -> None:
    _, server = servers
    upright = picture_folder(spelled_root)
    upside_down = picture_folder(
        spelled_root, *((UPSIDE_DOWN,) if met == "two transforms" else (server.proxy, read_bytes))
    )
    arguments: dict[str, Any] = dict(num_workers=1, multiprocessing_context=start_method)
    dataset, sampler = ConcatDataset([upright, upside_down]), Batches(MIXED)
    used = None if met == "two transforms" else server
    batches = list(DataLoader(dataset, batch_sampler=sampler, device=device, server=used, **arguments))
    for (images, numbers), indices in zip(batches, MIXED, strict=True):
        assert numbers.tolist() == [index % PICTURES for index in indices]
        turned_back = [image.flip(1) if index >= PICTURES else image for image, index in zip(images, indices)]
        assert_pictures_match(torch.stack(turned_back), numbers)


def test_a_picture_of_another_server_than_the_loaders_is_named_as_such(servers: Servers, spelled_root: Path) -> None:
    dataset = ConcatDataset([picture_folder(spelled_root, server.proxy, read_bytes) for server in servers])
    found = outcomes(DataLoader(dataset, BATCH, num_workers=1, server=servers[0]))
    assert_batches_match(found[:BATCHES])
    assert len(found) == 2 * BATCHES
    assert all(isinstance(error, InputError) and error.code == "foreign-server" for error in found[BATCHES:])


@pytest.mark.parametrize("workers", [0, 1])
@on_roads("produced")
def test_produce_data_may_be_asked_twice_for_the_same_pictures(road: Road, workers: int) -> None:
    assert road.server is not None
    for batch in road.loader(num_workers=workers).loader:
        references = tuple(batch)
        for _ in range(2):
            images, numbers = road.server.produce_data(references)
            assert_pictures_match(images, numbers)
        again = road.server.produce_data([images, numbers])
        assert again[0] is images


def test_with_pin_memory_every_picture_is_right(road: Road, start_method: str) -> None:
    loader = road.loader(num_workers=1, pin_memory=True, multiprocessing_context=start_method)
    batches = list(loader)
    assert_batches_match(batches)
    for images, numbers in batches:
        assert images.device.type == road.device
        assert numbers.is_pinned() == torch.cuda.is_available()
    with_lists = list(road.loader(num_workers=0, pin_memory=True, collate_fn=list))
    assert_batches_match((images, torch.tensor(numbers)) for images, numbers in map(stacked, with_lists))
