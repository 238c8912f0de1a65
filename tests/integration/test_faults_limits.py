"""Batches larger, smaller and more uneven than a pipeline expects; how much waits decoded; how bytes travel."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms

from proxyloader import DataLoader, ProxyServer

from ..limits import WAIT_S
from ..numbered import numbered_image
from ..outcomes import outcomes
from .observed import Batches, Counted, Gated, runs_under_way, wait_until_read
from .roads import (
    BATCH,
    PICTURES,
    Produced,
    Road,
    assert_batches_match,
    assert_pictures_match,
    picture_folder,
    read_bytes,
)
from .test_processes import gpu_bytes, held_bytes


def loader_over(road: Road, batches: list[list[int]], **arguments: Any) -> Any:
    return road.loader(batch_size=1, batch_sampler=Batches(batches), **arguments)


def test_a_batch_larger_than_the_pipelines_is_run_in_parts_and_the_next_is_right(road: Road, start_method: str) -> None:
    batches = [list(range(10)), [10, 11, 12, 13], list(range(14, 31)), [31]]
    found = outcomes(loader_over(road, batches, num_workers=1, multiprocessing_context=start_method))
    assert len(found) == len(batches)
    for batch, numbers in zip(found, batches):
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


def test_batches_of_any_size_up_to_the_pipelines_are_right(road: Road, start_method: str) -> None:
    arguments: dict[str, Any] = dict(num_workers=2 if start_method == "fork" else 1)
    assert_batches_match(loader_over(road, uneven_batches(), multiprocessing_context=start_method, **arguments))


@pytest.mark.parametrize("name", ["server", "produced"])
def test_batches_of_any_size_are_right_with_the_old_executor(name: str, spelled_root: Path, device: str) -> None:
    with Road(name, spelled_root, device, exec_dynamic=False) as road:
        assert_batches_match(loader_over(road, uneven_batches(), num_workers=2))
        assert_batches_match(road.loader(batch_size=BATCH - 1, num_workers=1))


@pytest.fixture(scope="module")
def uneven_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 pictures: in the first eight no two neighbours are of one size, in the others all are."""
    root = tmp_path_factory.mktemp("uneven")
    (root / "set" / "class").mkdir(parents=True)
    for number in range(16):
        side_px = (32, 64, 48)[number % 3] if number < 8 else 40
        numbered_image(number, side_px).save(root / "set" / "class" / f"{number:05d}.jpg", quality=90)
    return root / "set"


@pytest.fixture(params=["compiled", "server", "produced"])
def as_they_are(request: pytest.FixtureRequest, uneven_root: Path, device: str) -> Iterator[Any]:
    """For each road a function that makes a loader of ``uneven_root``, decoded and not resized."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=0 if device == "cuda" else None, exec_dynamic=True)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        images = fn.decoders.image(encoded, device="mixed" if device == "cuda" else "cpu", output_type=types.RGB)
        return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=[0.0], std=[255.0])

    if request.param == "compiled":
        folder = picture_folder(uneven_root, transforms.Compose([transforms.ToTensor()]))
        yield request.param, lambda **arguments: DataLoader(folder, BATCH, device=device, **arguments)
        return
    with ProxyServer(graph()) as server:
        through = picture_folder(uneven_root, server.proxy, read_bytes)
        if request.param == "server":
            yield request.param, lambda **arguments: DataLoader(through, BATCH, server=server, **arguments)
        else:
            yield request.param, lambda **arguments: Produced(StockLoader(through, BATCH, **arguments), server)


def test_pictures_of_several_sizes_come_as_a_list_where_one_is_taken_and_else_are_an_error_of_their_batch(
    as_they_are: tuple[str, Callable[..., Any]],
) -> None:
    name, loader = as_they_are
    for _ in range(2):
        found = outcomes(loader(num_workers=1))
        assert len(found) == 4
        assert_batches_match(found[2:], range(8, 16))
        for at, batch in enumerate(found[:2]):
            if name == "produced":
                images, numbers = batch
                assert isinstance(images, list) and numbers.tolist() == list(range(4 * at, 4 * at + 4))
                for image, number in zip(images, numbers.tolist()):
                    assert_pictures_match(image[None], [number])
            else:
                assert isinstance(batch, RuntimeError) and "one size" in str(batch)
    samples = [sample for batch in loader(num_workers=1, collate_fn=list) for sample in batch]
    assert [number for _, number in samples] == list(range(16))
    assert len({image.shape for image, _ in samples}) > 1
    for image, number in samples:
        assert_pictures_match(image[None], [number])


@pytest.mark.parametrize("name", ["server", "produced"])
@pytest.mark.parametrize(
    ("exec_dynamic", "depth"),
    [
        (False, {"cpu_size": 3, "gpu_size": 2}),
        (False, 1),
        (False, 8),
        (True, 1),
        (True, 8),
    ],
    ids=["old executor, a dict", "old executor, 1", "old executor, 8", "1", "8"],
)
def test_any_prefetch_queue_depth_of_a_pipeline_will_do(
    name: str, exec_dynamic: bool, depth: Any, spelled_root: Path, device: str
) -> None:
    with Road(name, spelled_root, device, exec_dynamic=exec_dynamic, prefetch_queue_depth=depth) as road:
        # More runs are asked for at once than most of these pipelines hold.
        more = {"prefetch": 6} if name == "server" else {}
        loader = road.loader(num_workers=1, prefetch_factor=8, persistent_workers=True, **more)
        for _ in range(2):
            assert_batches_match(loader)


@pytest.mark.alone
def test_breaks_of_persistent_workers_hold_no_batch(road: Road, start_method: str) -> None:
    # Batches of 590 KB, of which eight would be left behind by each break.
    batches = [list(range(PICTURES))] * 10
    with Road(road.name, road.root, road.device, batch_size=PICTURES) as large:
        arguments: dict[str, Any] = dict(num_workers=1, prefetch_factor=8, persistent_workers=True)
        loader = large.loader(
            batch_size=1, batch_sampler=LargeBatches(batches), multiprocessing_context=start_method, **arguments
        )

        def breaks(count: int) -> None:
            for _ in range(count):
                for images, numbers in loader:
                    assert_pictures_match(images, numbers)
                    break

        breaks(5)
        host, gpu = held_bytes(), gpu_bytes(road.device)
        breaks(60)  # so many that the few batches under way at either moment are less than half of one of each break
        assert held_bytes() - host < 60 * 590_000 // 2
        assert gpu_bytes(road.device) - gpu < 60 * 590_000 // 2
        assert_batches_match(loader, list(range(PICTURES)) * 10)


class LargeBatches(Batches):
    batch_size = PICTURES


def test_a_slow_loop_finds_no_more_batches_decoded_than_it_asked_for(
    road: Road, start_method: str, tmp_path: Path
) -> None:
    dataset = road.dataset(Counted)
    log = tmp_path / "read"
    dataset.log = str(log)
    prefetch = {"prefetch": 3} if road.name != "produced" else {}
    loader = road.loader(dataset, num_workers=1, prefetch_factor=8, multiprocessing_context=start_method, **prefetch)
    seen: list[int] = []
    for at, (images, numbers) in enumerate(loader):
        assert_pictures_match(images, numbers)
        seen.append(runs_under_way(road, loader))
        wait_until_read(log, min(BATCH * (at + 8), PICTURES))  # all that torch has asked the worker for
    # While the loop was slow there were seven or more batches to decode.
    assert max(seen) == (0 if road.name == "produced" else 3)


def large_jpeg(number: int, size_bytes: int) -> bytes:
    """A picture in a file of more than ``size_bytes``: the JPEG standard allows any number of comments."""
    buffer = io.BytesIO()
    numbered_image(number).save(buffer, "JPEG", quality=90)
    data = buffer.getvalue()
    comment = b"\xff\xfe" + (60_002).to_bytes(2, "big") + os.urandom(60_000).replace(b"\xff", b"\x00")
    return data[:2] + comment * (size_bytes // 60_000 + 1) + data[2:]


@pytest.fixture(scope="module")
def large_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pictures of 180 KB each; 8 to 11 are of 1.5 MB, and together larger than the memory lent to a batch."""
    root = tmp_path_factory.mktemp("large")
    (root / "set" / "class").mkdir(parents=True)
    for number in range(24):
        size_bytes = 1_500_000 if number in range(8, 12) else 150_000
        (root / "set" / "class" / f"{number:05d}.jpg").write_bytes(large_jpeg(number, size_bytes))
    return root / "set"


def test_the_bytes_of_pictures_do_not_pass_through_the_workers_pipe(
    road: Road, start_method: str, large_root: Path
) -> None:
    loader = road.loader(
        road.dataset(root=large_root), num_workers=1, persistent_workers=True, multiprocessing_context=start_method
    )
    assert_batches_match(loader, range(24))
    workers = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    assert len(workers) == 1
    written = workers[0].io_counters().write_chars
    assert_batches_match(loader, range(24))
    assert workers[0].io_counters().write_chars - written < 50_000  # of 9.6 MB


def test_a_batch_that_is_there_is_handed_out_while_the_workers_are_busy_with_the_next(
    road: Road, start_method: str, large_root: Path, tmp_path: Path
) -> None:
    dataset = road.dataset(Gated, large_root)
    dataset.gate = str(tmp_path / "gate")
    os.mkfifo(dataset.gate)
    prefetch = {"prefetch": 4} if road.name != "produced" else {}
    batches = iter(
        road.loader(
            dataset,
            num_workers=1,
            prefetch_factor=6,
            timeout=WAIT_S,
            multiprocessing_context=start_method,
            **prefetch,
        )
    )
    assert_batches_match(itertools.islice(batches, 4), range(16))  # the worker waits in the fifth
    with open(dataset.gate, "wb"):
        pass
    assert_batches_match(batches, range(16, 24))
