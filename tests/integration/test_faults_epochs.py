"""Epochs that begin, break off and begin again: no picture of one turns up in another, and nothing piles up.

Rows 0 to 2 of the table of faults.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from proxyloader import PipelineError, wrap

from ..outcomes import outcomes
from .roads import BATCH, Road, assert_batches_match, assert_pictures_match


def take(loader: Any, count: int) -> None:
    """Look at the first ``count`` batches of an epoch, and leave it."""
    for at, (images, numbers) in enumerate(itertools.islice(loader, count)):
        assert_pictures_match(images, numbers)
        assert numbers.tolist() == list(range(BATCH * at, BATCH * (at + 1)))


def alive() -> tuple[int, int]:
    """Batches of decoded pictures, and runs of DALI, that somebody holds."""
    kinds = [type(thing) for thing in gc.get_objects() if type(thing) is not torch.Tensor or is_decoded(thing)]
    return kinds.count(torch.Tensor), sum(kind.__name__ == "Ticket" for kind in kinds)


def is_decoded(tensor: torch.Tensor) -> bool:
    return tensor.shape[1:] == (3, 32, 32)


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


def test_without_workers_every_epoch_is_whole(road: Road) -> None:
    loader = road.loader(num_workers=0)
    assert_batches_match(loader)
    take(loader, 3)
    for _ in range(2):
        assert_batches_match(loader)


def test_without_workers_a_broken_epoch_leaves_nothing(road: Road) -> None:
    before = alive()
    loader = road.loader(num_workers=0)
    for count in (1, 2, 3, 4):
        take(loader, count)
        assert alive() == before
    assert_batches_match(loader)


def test_a_sample_looked_at_before_the_loop_changes_nothing(road: Road, start_method: str) -> None:
    dataset = road.dataset()
    looked_at = [dataset[5], wrap(dataset)[7]]
    loader = road.loader(dataset, num_workers=1, multiprocessing_context=start_method)
    assert_batches_match(loader)
    if road.server is not None:
        for image, number in road.server.produce_data(looked_at):
            assert_pictures_match(image[None], [number])


def test_a_batch_made_before_the_loop_appears_in_no_epoch(road: Road, start_method: str) -> None:
    dataset = road.dataset()
    encoded = wrap(dataset)
    made = default_collate([encoded[number] for number in (40, 41, 42, 43)])
    loader = road.loader(
        dataset, num_workers=2, multiprocessing_context=start_method, persistent_workers=start_method == "spawn"
    )
    for _ in range(3):
        assert_batches_match(loader)
    if road.server is not None:
        assert_pictures_match(*road.server.produce_data(made))


SETTINGS = {"fork": [(1, 1), (2, 4), (4, 2)], "forkserver": [(1, 4), (2, 1)], "spawn": [(1, 4)]}
"""Workers and batches that each fetches ahead."""


def test_the_epoch_after_a_break_holds_its_own_pictures(road: Road, start_method: str) -> None:
    for workers, ahead in SETTINGS[start_method]:
        loader = road.loader(num_workers=workers, prefetch_factor=ahead, multiprocessing_context=start_method)
        take(loader, 3)
        assert_batches_match(loader)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
@pytest.mark.parametrize(("workers", "ahead"), [(1, 4), (2, 8)], ids=["1 worker, 4 ahead", "2 workers, 8 ahead"])
def test_one_break_harms_none_of_the_six_epochs_after_it(
    road: Road, start_method: str, workers: int, ahead: int
) -> None:
    loader = road.loader(num_workers=workers, prefetch_factor=ahead, multiprocessing_context=start_method)
    take(loader, 2)
    for _ in range(6):
        assert_batches_match(loader)


def test_breaks_with_persistent_workers_pile_nothing_up(road: Road, start_method: str) -> None:
    before = alive()
    loader = road.loader(
        num_workers=1, prefetch_factor=4, persistent_workers=True, multiprocessing_context=start_method
    )
    for count in (1, 3, 2, 1, 4, 1, 2):
        take(loader, count)
        decoded, runs = alive()
        assert decoded == before[0]
        assert runs - before[1] <= 4  # what DALI was working on at the break
    assert_batches_match(loader)
    decoded, runs = alive()
    assert decoded == before[0]
    assert runs - before[1] <= (0 if road.device == "cpu" else 2)  # whose memory the GPU was reading when last asked


@pytest.mark.parametrize("name", ["server", "produced"])
def test_a_deterministic_server_gives_whole_epochs_after_breaks(
    name: str, spelled_root: Path, device: str, start_method: str
) -> None:
    with Road(name, spelled_root, device, deterministic=True) as road:
        loader = road.loader(num_workers=1, persistent_workers=True, multiprocessing_context=start_method)
        for count in (3, 1):
            take(loader, count)
        assert_batches_match(loader)


@pytest.mark.parametrize("road", ["server", "produced"], indirect=True)
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
            assert_pictures_match(*server.produce_data(default_collate([road.dataset()[k] for k in (44, 45)])))
        del batches
    for _ in range(2):
        with server:
            assert_batches_match(loader)


def test_an_iterator_that_outlives_its_open_server_loses_only_what_was_under_way(
    spelled_root: Path, device: str
) -> None:
    with Road("server", spelled_root, device) as road:
        assert road.server is not None
        batches = iter(road.loader(num_workers=1, prefetch_factor=4))
        with road.server:
            take(batches, 1)
        found = outcomes(batches)
        lost = [batch for batch in found if isinstance(batch, Exception)]
        assert all(isinstance(error, PipelineError) and error.code == "stopped" for error in lost), lost
        assert len(found) == 11 and len(lost) <= 3
        for images, numbers in found[len(lost) :]:
            assert_pictures_match(images, numbers)


@pytest.mark.parametrize("road", ["server", "produced"], indirect=True)
def test_a_loader_that_is_dropped_does_not_stop_the_server_of_another(road: Road) -> None:
    first, second = road.loader(num_workers=1), road.loader(num_workers=1)
    batches, other = iter(second), iter(first)
    take(batches, 1)
    take(other, 2)
    del other, first
    gc.collect()
    assert_batches_match(batches, range(BATCH, 48))
    assert_batches_match(second)
