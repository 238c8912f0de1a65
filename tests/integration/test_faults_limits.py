"""Batches larger, smaller and more uneven than a pipeline expects; how much waits decoded; how bytes travel.

Rows 7, 10, 11 and 12c of the table of faults.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torchvision import transforms

from ..limits import WAIT_S
from ..numbered import numbered_image, spell_dataset
from ..outcomes import outcomes
from .roads import (
    BATCH,
    PICTURES,
    ROADS,
    Batches,
    Counted,
    Gated,
    Road,
    assert_batches_match,
    assert_pictures_match,
    grown,
    on_roads,
    runs_under_way,
    take,
    wait_until_read,
)


def loader_over(road: Road, batches: list[list[int]], **arguments: Any) -> Any:
    return road.loader(batch_size=1, batch_sampler=Batches(batches), **arguments)


def test_a_batch_larger_than_the_pipelines_is_run_in_parts_and_the_next_is_right(road: Road, start_method: str) -> None:
    batches = [list(range(10)), [10, 11, 12, 13], list(range(14, 31)), [31]]
    for arguments in ({}, {"num_workers": 1, "multiprocessing_context": start_method}):
        found = outcomes(loader_over(road, batches, **arguments))
        for batch, numbers in zip(found, batches, strict=True):
            assert_batches_match([batch], numbers)


def uneven_batches() -> list[list[int]]:
    """The numbers in their order, in batches of 1 to 4."""
    draw, numbers, batches = random.Random(5), list(range(PICTURES)), []
    while numbers:
        size = draw.randint(1, BATCH)
        batches.append(numbers[:size])
        numbers = numbers[size:]
    assert {len(batch) for batch in batches} == {1, 2, 3, 4}
    return batches


@on_roads(*ROADS, "server, old executor", "produced, old executor")
def test_batches_of_any_size_up_to_the_pipelines_are_right(road: Road, start_method: str) -> None:
    workers = 2 if start_method == "fork" else 1
    assert_batches_match(loader_over(road, uneven_batches(), num_workers=workers, multiprocessing_context=start_method))
    assert_batches_match(road.loader(batch_size=BATCH - 1, num_workers=1))


@pytest.fixture(scope="module")
def uneven_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 pictures: in the first eight no two neighbours are of one size, in the others all are."""
    root = spell_dataset(tmp_path_factory.mktemp("uneven") / "set", 16, side_px=40)
    for number, path in enumerate(sorted(root.glob("*/*.jpg"))[:8]):
        numbered_image(number, (32, 64, 48)[number % 3]).save(path, quality=90)
    return root


@pytest.mark.parametrize("name", ROADS)
def test_pictures_of_several_sizes_come_as_a_list_where_one_is_taken_and_else_are_an_error_of_their_batch(
    name: str, uneven_root: Path, device: str
) -> None:
    as_they_are: dict[str, Any] = dict(transform=transforms.ToTensor(), then=lambda images: images)
    with Road(name, uneven_root, device, **as_they_are) as road:
        for _ in range(2):
            found = outcomes(road.loader(num_workers=1))
            assert len(found) == 4
            assert_batches_match(found[2:], range(8, 16))
            for at, batch in enumerate(found[:2]):
                if name == "produced":
                    images, numbers = batch
                    assert isinstance(images, list) and numbers.tolist() == list(range(4 * at, 4 * at + 4))
                    for image, number in zip(images, numbers.tolist()):
                        assert_pictures_match(image[None], [number])
                else:
                    assert type(batch) is RuntimeError and "the same shape" in str(batch)  # as under torch
                    assert ("Add a Resize" if name == "compiled" else "in the pipeline, with fn.resize(") in str(batch)
        samples = [sample for batch in road.loader(num_workers=1, collate_fn=list) for sample in batch]
        assert [number for _, number in samples] == list(range(16))
        assert len({image.shape for image, _ in samples}) > 1
        for image, number in samples:
            assert_pictures_match(image[None], [number])


OLD: dict[str, Any] = {"exec_dynamic": False}
QUEUES: dict[str, dict[str, Any]] = {
    "old executor, a dict": OLD | {"prefetch_queue_depth": {"cpu_size": 3, "gpu_size": 2}},
    "old executor, 1": OLD | {"prefetch_queue_depth": 1},
    "old executor, 8": OLD | {"prefetch_queue_depth": 8},
    "1": {"prefetch_queue_depth": 1},
    "8": {"prefetch_queue_depth": 8},
    "in the calling thread": {"exec_async": False},
    "in the calling thread, 1": {"exec_async": False, "prefetch_queue_depth": 1},
    "in the calling thread, old executor": OLD | {"exec_async": False},
    "in the calling thread, not pipelined": OLD | {"exec_async": False, "exec_pipelined": False},
}


@pytest.mark.parametrize("name", ["server", "produced"])
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_any_prefetch_queue_depth_will_do(name: str, queue: dict[str, Any], spelled_root: Path, device: str) -> None:
    with Road(name, spelled_root, "cpu" if "exec_async" in queue else device, **queue) as road:
        # More runs are asked for at once than most of these pipelines hold.
        more = {"prefetch": 6} if name == "server" else {}
        loader = road.loader(num_workers=1, prefetch_factor=8, persistent_workers=True, **more)
        for _ in range(2):
            assert_batches_match(loader)
        pairs = list(zip(road.loader(**more), road.loader(**more)))
        for side in (0, 1):
            assert_batches_match(pair[side] for pair in pairs)


def held_bytes() -> int:
    """Memory of this process without files and what it shares, and without what malloc keeps of freed batches.

    Not ``uss``, which grows as Python writes on pages that a forked worker has a copy of: a garbage collection does.
    (Of the memory of batches that is shared with workers the end of each test tells whether it was given back.)
    """
    ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def gpu_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.alone
def test_breaks_of_persistent_workers_hold_no_batch(road: Road, start_method: str) -> None:
    # Batches of 590 KB, of which eight would be left behind by each break.
    batches = Batches([list(range(PICTURES))] * 10)
    batches.batch_size = PICTURES
    with road.another(batch_size=PICTURES) as large:
        arguments: dict[str, Any] = dict(num_workers=1, prefetch_factor=8, persistent_workers=True)
        loader = large.loader(batch_size=1, batch_sampler=batches, multiprocessing_context=start_method, **arguments)

        def breaks(count: int) -> None:
            for _ in range(count):
                assert_batches_match(itertools.islice(loader, 1))

        breaks(5)
        host, gpu = held_bytes(), gpu_bytes(road.device)
        breaks(60)  # so many that the few batches under way at either moment are less than half of one of each break
        assert held_bytes() - host < 60 * 590_000 // 2
        assert gpu_bytes(road.device) - gpu < 60 * 590_000 // 2
        assert_batches_match(loader, list(range(PICTURES)) * 10)


@on_roads(*ROADS, "server, deterministic")
def test_a_slow_loop_finds_as_many_batches_as_it_asked_for(road: Road, start_method: str, tmp_path: Path) -> None:
    dataset = road.dataset(Counted, log=str(tmp_path / "read"))
    prefetch = {"prefetch": 3} if road.name != "produced" else {}
    loader = road.loader(dataset, num_workers=1, prefetch_factor=8, multiprocessing_context=start_method, **prefetch)
    under_way = []
    for at, (images, numbers) in enumerate(loader):
        assert_pictures_match(images, numbers)
        under_way.append(runs_under_way(road, loader))
        wait_until_read(tmp_path / "read", min(BATCH * (at + 8), PICTURES))  # all that torch has asked the worker for
    # While the loop was slow there were seven or more batches to decode. After the first, all but the last three find
    # three more batches under way; or none, where each is started when it is asked for.
    is_asked_for = road.name == "produced" or "deterministic" in road.kind
    assert max(under_way) == (0 if is_asked_for else 3)
    assert under_way[1:] == ([0] * 11 if is_asked_for else [3] * 8 + [2, 1, 0])


@pytest.fixture(scope="module")
def large_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pictures of 200 KB each; 8 to 11 are of 1.5 MB, and together larger than the memory lent to a batch."""
    root = spell_dataset(tmp_path_factory.mktemp("large") / "set", 24)
    for number, path in enumerate(sorted(root.glob("*/*.jpg"))):
        path.write_bytes(grown(path.read_bytes(), 1_500_000 if 8 <= number < 12 else 200_000))
    return root


def test_the_bytes_of_pictures_do_not_pass_through_the_pipe(road: Road, start_method: str, large_root: Path) -> None:
    loader = road.loader(
        road.dataset(root=large_root), num_workers=1, persistent_workers=True, multiprocessing_context=start_method
    )
    assert_batches_match(loader, range(24))
    (worker,) = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    written = worker.io_counters().write_chars
    assert_batches_match(loader, range(24))
    assert worker.io_counters().write_chars - written < 50_000  # of 9.6 MB


def test_a_batch_that_is_there_is_handed_out_while_the_workers_are_busy_with_the_next(
    road: Road, start_method: str, large_root: Path, tmp_path: Path
) -> None:
    dataset = road.dataset(Gated, large_root, gate=str(tmp_path / "gate"))
    os.mkfifo(dataset.gate)
    arguments: dict[str, Any] = {"prefetch": 4} if road.name != "produced" else {}
    arguments |= dict(prefetch_factor=6, timeout=WAIT_S, multiprocessing_context=start_method)
    batches = iter(road.loader(dataset, num_workers=1, **arguments))
    take(batches, 4)  # the worker waits in the fifth
    with open(dataset.gate, "wb"):
        pass
    assert_batches_match(batches, range(16, 24))
