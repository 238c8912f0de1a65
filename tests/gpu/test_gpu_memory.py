"""A GPU without memory, graphs that are captured beside the loader, processes that fork: right batches, or errors."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import transforms

from proxyloader import DataLoader

from ..faults import Spelled
from ..limits import WAIT_S
from ..numbered import numbered_image, read_numbers, spell_dataset

pytestmark = pytest.mark.alone  # as they take all memory, or measure how much is used

IMAGES, BATCH = 512, 32
LARGE = transforms.Compose([transforms.Resize((512, 512)), transforms.ToTensor()])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Spelled:
    """512 pictures that spell their index; a batch of 32 is 100 MB on the GPU."""
    return Spelled(spell_dataset(tmp_path_factory.mktemp("spelled") / "set", IMAGES), transform=LARGE)


def right(batch: Any) -> int:
    """How many pictures of a batch are those that travel with their index."""
    images, indices = batch[0], batch[-1]
    assert read_numbers(images, white=1.0) == indices.tolist()
    return len(indices)


def take_all_memory(leave_bytes: int) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hogs, size = [], 1 << 36
    while size > 1 << 20:
        free = torch.cuda.mem_get_info()[0]
        if free - size < leave_bytes:
            size //= 2
            continue
        try:
            hogs.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return hogs


def walk(batches: Iterator[Any], most: int = IMAGES) -> tuple[int, int]:
    """Take at most so many batches. Return how many pictures there were, and how many batches lacked memory."""
    seen = errors = 0
    for _ in range(most):
        try:
            seen += right(next(batches))
        except torch.OutOfMemoryError:
            errors += 1
        except StopIteration:
            break
    return seen, errors


@pytest.mark.parametrize("begun", [False, True], ids=["before the first batch", "in the middle"])
@pytest.mark.parametrize("leave_bytes", [0, 64 << 20], ids=["nothing left", "64 MB left"])
def test_without_memory_the_error_is_torchs_and_with_memory_the_loop_goes_on(
    dataset: Spelled, begun: bool, leave_bytes: int
) -> None:
    loader = DataLoader(dataset, BATCH, num_workers=2)
    batches = iter(loader)
    seen = right(next(batches)) if begun else 0
    hogs = take_all_memory(leave_bytes)
    try:
        without = walk(batches, 4)
    finally:
        hogs.clear()
    torch.cuda.empty_cache()
    ahead = walk(batches, 8)  # which may have run before there was memory again
    left = sum(map(right, batches))
    assert seen + without[0] + ahead[0] + left + BATCH * (without[1] + ahead[1]) == IMAGES
    assert without[1] or leave_bytes
    assert sum(map(right, loader)) == IMAGES


@pytest.mark.parametrize("leave_mb", [0, 32, 96, 200, 400])
def test_where_pictures_grow_and_memory_is_short_they_are_right_or_the_error_is_torchs(
    leave_mb: int, tmp_path: Path
) -> None:
    """A decoder needs more memory then, and one that finds none gives pictures away (``jpeg_engines.py``)."""
    for number in range(256):
        path = tmp_path / f"{number // 64}" / f"{number:05d}.jpg"
        path.parent.mkdir(exist_ok=True)
        numbered_image(number, side_px=64 + 16 * (number // 4)).save(path, quality=90)
    loader = DataLoader(Spelled(str(tmp_path), transform=LARGE), BATCH, num_workers=2)
    batches = iter(loader)
    first = right(next(batches))
    hogs = take_all_memory(leave_mb << 20)
    try:
        seen, errors = walk(batches)
    finally:
        hogs.clear()
    torch.cuda.empty_cache()
    assert first + seen + BATCH * errors == 256
    assert sum(map(right, loader)) == 256


def test_without_memory_for_a_pipeline_the_error_is_torchs_and_the_next_loop_is_right(dataset: Spelled) -> None:
    loader = DataLoader(dataset, BATCH, num_workers=2)
    hogs = take_all_memory(0)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="DALI ran out of memory for a "):
            next(iter(loader))
    finally:
        hogs.clear()
    torch.cuda.empty_cache()
    assert sum(map(right, loader)) == IMAGES


def test_a_pipeline_takes_the_room_that_torch_keeps_for_later(dataset: Spelled) -> None:
    take_all_memory(0).clear()
    assert torch.cuda.mem_get_info()[0] < 64 << 20
    for _ in range(2):  # where it was built all the same, pictures of two batches were mixed up
        assert sum(map(right, DataLoader(dataset, BATCH, num_workers=2))) == IMAGES


def test_a_model_without_memory_takes_nothing_from_the_loader(dataset: Spelled) -> None:
    loader, errors, seen = DataLoader(dataset, BATCH, num_workers=2), 0, 0
    for at, batch in enumerate(loader):
        if at % 4 == 1:
            try:
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                errors += 1
        seen += right(batch)
    assert (errors, seen) == (4, IMAGES)


def test_memory_is_returned_with_the_loader(dataset: Spelled) -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def epoch() -> None:
        loader = DataLoader(dataset, BATCH, num_workers=2)
        assert sum(map(right, loader)) == IMAGES

    for _ in range(3):
        epoch()
    before = used()
    for _ in range(6):
        epoch()
    assert used() - before < 200 << 20  # DALI keeps a pool; two batches


def test_graphs_are_captured_beside_the_loader_where_each_thread_answers_for_itself(dataset: Spelled) -> None:
    model = torch.nn.Conv2d(3, 4, 3, stride=4).cuda().requires_grad_(False)
    static = torch.empty(BATCH, 3, 512, 512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(static)
    torch.cuda.current_stream().wait_stream(side)
    seen = 0
    for batch in DataLoader(dataset, BATCH, num_workers=2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = model(static)
            time.sleep(0.01)  # DALI works on the next batches meanwhile
        static.copy_(batch[0])
        graph.replay()
        torch.testing.assert_close(output, model(batch[0]), rtol=1e-3, atol=1e-3)
        seen += right(batch)
    assert seen == IMAGES


def test_workers_and_children_are_forked_after_cuda_was_started(dataset: Spelled) -> None:
    torch.ones(1, device="cuda")
    loader = DataLoader(dataset, BATCH, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    seen = right(next(batches))
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    assert seen + sum(map(right, batches)) == IMAGES
