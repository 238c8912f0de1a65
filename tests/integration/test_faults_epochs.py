"""Epochs that begin, break off and begin again: no picture of one turns up in another, and nothing piles up.

And batches larger, smaller and more uneven than a pipeline expects. Rows 0 to 2, 6, 7, 10 to 12 and 16 of the table of
faults.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import PipelineError, wrap
from proxyloader.dali.run_queue import MAX_UNREAD, PipelineRun

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
    on_servers,
    resized,
    runs_under_way,
    take,
    wait_until_read,
)


def alive() -> tuple[int, int]:
    """Batches of decoded pictures, and runs of DALI, that somebody holds."""
    things = gc.get_objects()
    decoded = [each for each in things if type(each) is torch.Tensor and each.shape[1:] == (3, 32, 32)]
    return len(decoded), sum(type(each) is PipelineRun for each in things)


@pytest.fixture
def torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch's own module for NVTX becomes where torch is built without CUDA."""
    monkeypatch.delattr("torch._C._nvtx", raising=False)
    monkeypatch.delitem(sys.modules, "torch._C._nvtx", raising=False)
    importlib.reload(torch.cuda.nvtx)
    yield
    monkeypatch.undo()
    importlib.reload(torch.cuda.nvtx)


@pytest.mark.parametrize("workers", [0, 1], ids=["no workers", "one worker"])
@pytest.mark.usefixtures("torch_without_cuda")
def test_a_torch_without_nvtx_is_enough(road: Road, workers: int) -> None:
    with pytest.raises(RuntimeError, match="NVTX functions not installed"):
        torch.cuda.nvtx.range_push("as torch says it")
    assert_batches_match(road.loader(num_workers=workers))


def test_without_workers_a_broken_epoch_leaves_nothing_and_every_other_is_whole(road: Road) -> None:
    batches, runs = alive()
    loader = road.loader(num_workers=0)
    for count in (1, 2, 4):
        take(loader, count)
        after = alive()
        assert after[0] == batches and after[1] <= runs + MAX_UNREAD  # a GPU may not have read the outputs of the last
    for _ in range(2):
        assert_batches_match(loader)


def test_what_was_made_before_the_loop_changes_nothing_and_appears_in_no_epoch(road: Road, start_method: str) -> None:
    dataset = road.dataset()
    encoded = wrap(dataset)
    looked_at = [dataset[5], encoded[7]]
    made = default_collate([encoded[number] for number in (40, 41, 42, 43)])
    loader = road.loader(
        dataset, num_workers=2, multiprocessing_context=start_method, persistent_workers=start_method == "spawn"
    )
    for _ in range(3):
        assert_batches_match(loader)
    if road.server is not None:
        assert_batches_match([road.server.produce_data(made)], [40, 41, 42, 43])
        for (image, number), expected in zip(road.server.produce_data(looked_at), (5, 7)):
            assert_pictures_match(image[None], [expected])
            assert number == expected


BREAKS = {"fork": [(2, 8, 6), (1, 4, 1), (1, 1, 1), (4, 2, 1)], "forkserver": [(2, 8, 6)], "spawn": [(1, 4, 1)]}
"""Workers, batches that each fetches ahead, and epochs after one that was left."""


def test_one_break_harms_none_of_the_epochs_after_it(road: Road, start_method: str) -> None:
    for workers, ahead, epochs in BREAKS[start_method]:
        loader = road.loader(num_workers=workers, prefetch_factor=ahead, multiprocessing_context=start_method)
        take(loader, 3)
        for _ in range(epochs):
            assert_batches_match(loader)


@on_roads(*ROADS, "server, deterministic", "produced, deterministic")
def test_breaks_with_persistent_workers_pile_nothing_up(road: Road, start_method: str) -> None:
    before = alive()
    loader = road.loader(
        num_workers=1, prefetch_factor=4, persistent_workers=True, multiprocessing_context=start_method
    )
    for count in (1, 3, 1, 4, 2):
        take(loader, count)
        decoded, runs = alive()
        assert decoded == before[0]
        assert runs - before[1] <= 4  # what DALI was working on at the break
    assert_batches_match(loader)
    decoded, runs = alive()
    assert decoded == before[0]
    assert runs - before[1] <= (0 if road.device == "cpu" else 2)  # whose memory the GPU was reading when last asked


@on_servers
def test_what_was_under_way_when_its_server_stopped_appears_nowhere(road: Road, start_method: str) -> None:
    server = road.server
    assert server is not None
    loader = road.loader(
        num_workers=1, prefetch_factor=4, persistent_workers=True, multiprocessing_context=start_method
    )
    for count in (1, 3):
        with server:
            batches = iter(loader)
            take(batches, count)
        # Still under way here: the iterator lives, and nobody has taken what it asked for.
        with server:
            made = server.produce_data(default_collate([road.dataset()[number] for number in (44, 45)]))
            assert_batches_match([made], [44, 45])
        del batches
    for _ in range(2):
        with server:
            assert_batches_match(loader)


@on_roads("server")
def test_an_iterator_that_outlives_its_open_server_loses_only_what_was_under_way(road: Road) -> None:
    assert road.server is not None
    batches = iter(road.loader(num_workers=1, prefetch_factor=4))
    with road.server:
        take(batches, 1)
    found = outcomes(batches)
    lost = [batch for batch in found if isinstance(batch, Exception)]
    assert all(isinstance(error, PipelineError) and error.code == "stopped" for error in lost), lost
    assert len(found) == 11 and len(lost) <= 3
    assert_batches_match(found[len(lost) :], range(BATCH * (1 + len(lost)), PICTURES))


@on_servers
def test_a_loader_that_is_dropped_does_not_stop_the_server_of_another(road: Road) -> None:
    first, second = road.loader(num_workers=1), road.loader(num_workers=1)
    batches, other = iter(second), iter(first)
    take(batches, 1)
    take(other, 2)
    del other, first
    gc.collect()
    assert_batches_match(batches, range(BATCH, PICTURES))
    assert_batches_match(second)


# --- loaders that share a server --------------------------------------------------------------------------------------

TRAINED, VALIDATED = range(PICTURES // 2), range(PICTURES // 2, PICTURES)


def halves(road: Road, **arguments: Any) -> list[Any]:
    """Loaders of pictures to train with and of pictures to validate with, on one server."""
    dataset = road.dataset()
    return [road.loader(Subset(dataset, half), num_workers=1, **arguments) for half in (TRAINED, VALIDATED)]


@on_roads(*ROADS, "server, deterministic", "produced, deterministic")
def test_train_and_validation_in_turn_and_side_by_side_keep_their_pictures(road: Road, start_method: str) -> None:
    train, val = halves(road, multiprocessing_context=start_method, persistent_workers=True)
    for _ in range(2):
        assert_batches_match(train, TRAINED)
        assert_batches_match(val, VALIDATED)
        pairs = list(zip(train, val))
        assert_batches_match((batch for batch, _ in pairs), TRAINED)
        assert_batches_match((batch for _, batch in pairs), VALIDATED)


def test_validation_in_the_midst_of_training_keeps_their_pictures_apart(road: Road, start_method: str) -> None:
    for persistent in (True, False):
        arguments: dict[str, Any] = dict(prefetch_factor=4, multiprocessing_context=start_method)
        train, val = halves(road, persistent_workers=persistent, **arguments)
        trained = []
        for at, batch in enumerate(train):
            trained.append(batch)
            if at % 2 == 0:
                assert_batches_match(val, VALIDATED)
            else:  # a look at the first batches, and away
                assert_batches_match(itertools.islice(val, 2), VALIDATED[: 2 * BATCH])
        assert_batches_match(trained, TRAINED)


# --- random augmentation, and batches that are kept -------------------------------------------------------------------

FLIPPED = transforms.Compose([transforms.Resize((32, 32)), transforms.RandomVerticalFlip(), transforms.ToTensor()])


def dimmed(images: Any) -> Any:
    """Makes each picture darker by a random factor that leaves it legible."""
    from nvidia.dali import fn

    return resized(images) * fn.random.uniform(range=[0.7, 1.0])


class Jittered(ImageFolder):
    """Takes a different time for each picture, so that workers overtake each other."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(index * 37 % 5 / 1000)
        return super().__getitem__(index)


def augmented(kind: str, root: Path, device: str, folder: type[ImageFolder], **arguments: Any) -> list[torch.Tensor]:
    """Two epochs of randomly augmented pictures, each checked, from a pipeline and a seed that are new."""
    with Road(kind, root, device, transform=FLIPPED, then=dimmed, seed=11) as road:
        torch.manual_seed(23)
        loader, found = road.loader(road.dataset(folder), **arguments), []
        for _ in range(2):
            batches = list(loader)
            assert torch.cat([numbers for _, numbers in batches]).tolist() == list(range(PICTURES))
            if kind != "compiled":
                assert_batches_match(batches)
            found += [images.cpu() for images, _ in batches]
        return found


@functools.cache
def expected(name: str, root: Path, device: str) -> list[torch.Tensor]:
    """Without workers; or, where workers draw and so their number counts, with forked ones that do not overtake."""
    workers = dict(num_workers=2, persistent_workers=True) if name == "compiled" else {}
    return augmented(name, root, device, ImageFolder, **workers)


@on_roads(*ROADS, "server, deterministic", "produced, deterministic")
def test_random_augmentation_repeats_itself_whatever_workers_do(road: Road, start_method: str) -> None:
    workers: dict[str, Any] = dict(num_workers=2, persistent_workers=True, multiprocessing_context=start_method)
    found = augmented(road.kind, road.root, road.device, Jittered, **workers)
    first = expected(road.name, road.root, road.device)
    assert len(first) == len(found) and all(map(torch.equal, first, found))
    epochs = torch.cat(found[: len(found) // 2]), torch.cat(found[len(found) // 2 :])
    assert not torch.equal(*epochs), "nothing random happened"


@on_roads(*ROADS, "server, old executor", "produced, old executor")
def test_batches_kept_to_the_end_of_a_run_stay_what_they_were(road: Road) -> None:
    loader = road.loader(num_workers=2, persistent_workers=True)
    kept = [batch for _ in range(4) for batch in loader]
    assert_batches_match(kept, list(range(PICTURES)) * 4)


# --- batches of other sizes; how much waits decoded; how bytes travel ------------------------------------------------


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
                    assert "Add a Resize" in str(batch)
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
        breaks(30)  # so many that the few batches under way at either moment are less than half of one of each break
        assert held_bytes() - host < 30 * 590_000 // 2
        assert gpu_bytes(road.device) - gpu < 30 * 590_000 // 2
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
    if road.name == "compiled" and road.device == "cuda":  # where a run decodes several batches
        assert 1 <= max(under_way) <= 3 and under_way[-1] == 0
        return
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
