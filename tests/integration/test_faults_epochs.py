"""Epochs that begin, break off and begin again: no picture of one turns up in another, and nothing piles up.

Rows 0 to 2, 6, 12 and 16 of the table of faults.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import PipelineError, wrap
from proxyloader.dali.run_queue import MAX_UNREAD, PipelineRun

from ..outcomes import outcomes
from .roads import (
    BATCH,
    PICTURES,
    ROADS,
    Road,
    assert_batches_match,
    assert_pictures_match,
    on_roads,
    on_servers,
    resized,
    take,
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
    for count in (1, 2, 3, 4):
        take(loader, count)
        after = alive()
        assert after[0] == batches and after[1] <= runs + MAX_UNREAD  # a GPU may not have read the outputs of the last
    for _ in range(3):
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


BREAKS = {
    "fork": [(1, 4, 6), (2, 8, 6), (1, 1, 1), (2, 4, 1), (4, 2, 1)],
    "forkserver": [(1, 4, 6), (2, 8, 6)],
    "spawn": [(1, 4, 1)],
}
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
    for count in (1, 3, 2, 1, 4, 1, 2):
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


def test_train_and_validation_side_by_side_keep_their_pictures(road: Road, start_method: str) -> None:
    train, val = halves(road, multiprocessing_context=start_method, persistent_workers=True)
    for _ in range(2):
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


@on_roads(*ROADS, "server, deterministic", "produced, deterministic")
def test_epochs_in_turn_keep_their_pictures(road: Road) -> None:
    train, val = halves(road, persistent_workers=True)
    for _ in range(3):
        assert_batches_match(train, TRAINED)
        assert_batches_match(val, VALIDATED)


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
