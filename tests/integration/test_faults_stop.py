"""How workers start, and how all of it ends: at once, by itself, and without a trace."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from proxyloader import DataLoader, ProxyServer

from ..faults import Misstep, Spelled, assert_gone, hang, training
from ..limits import STOP_S, WAIT_S
from .roads import (
    BATCH,
    ROADS,
    Heavy,
    Road,
    assert_batches_match,
    assert_pictures_match,
    on_roads,
    on_servers,
    picture_folder,
    take,
    wait_until_read,
)


def test_persistent_workers_of_every_start_method_give_every_picture_and_go_with_their_loader_at_once(
    road: Road, start_method: str, no_collector: None
) -> None:
    held = [road.loader(num_workers=1, persistent_workers=True, multiprocessing_context=start_method)]
    for _ in range(2):
        assert_batches_match(held[0])
    assert_ends_at_once(held, road)


@pytest.mark.parametrize(
    "moment", ["before anything", "after an epoch", "in mid-epoch", "with an exception in mid-epoch"]
)
@on_servers
def test_a_server_is_left_at_once(road: Road, moment: str) -> None:
    assert road.server is not None
    loader = road.loader(num_workers=1, prefetch_factor=8)
    batches: Iterator[Any] = iter(())
    start_s = 0.0
    with contextlib.suppress(LookupError), road.server:
        if moment == "after an epoch":
            assert_batches_match(loader)
        elif "mid-epoch" in moment:
            batches = iter(loader)
            take(batches, 1)
        start_s = time.perf_counter()
        if "exception" in moment:
            raise LookupError
    assert time.perf_counter() - start_s < STOP_S
    del batches
    assert_batches_match(loader)


SCRIPT = """
    import multiprocessing
    from tests.integration.roads import ROADS, Road

    multiprocessing.set_forkserver_preload(["tests.integration.roads"])
    roads = [Road(name, Path(root)) for name in ROADS]
    loaders = [road.loader(num_workers=1, persistent_workers=True, multiprocessing_context=method) for road in roads]
    kept = zip(*loaders)
    next(kept)
    print("ready")
    if ending == "exception":
        raise LookupError("of the loop")
"""


@pytest.mark.parametrize("ending", ["end", "exception"])
def test_a_script_that_closes_nothing_ends_by_itself(
    ending: str, start_method: str, spelled_root: Path, tmp_path: Path
) -> None:
    body = f"method, ending = {start_method!r}, {ending!r}\n" + textwrap.dedent(SCRIPT)
    # Both pipes are at their end when the last worker, too, has let go of them.
    with training(tmp_path, spelled_root, body) as process:
        output, errors = process.communicate(timeout=WAIT_S)
    assert output == "ready\n", errors
    if ending == "end":
        assert (process.returncode, errors) == (0, "")
    else:
        assert process.returncode == 1
        assert errors.count("Traceback") == 1 and errors.endswith("LookupError: of the loop\n")


def assert_ends_at_once(held: list[Any], road: Road) -> None:
    """What is held, a loader or its iterator, takes its one worker along without a collector of garbage."""
    workers = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    assert len(workers) == 1
    start_s = time.perf_counter()
    held.clear()
    # A stock loader's worker gets five seconds from torch before it is ended.
    assert time.perf_counter() - start_s < (WAIT_S if road.name == "produced" else STOP_S)
    assert_gone(workers, STOP_S)


def test_a_loader_dropped_in_mid_epoch_after_its_server_was_left_lets_full_and_hanging_workers_go(
    road: Road, start_method: str, tmp_path: Path, no_collector: None
) -> None:
    log, misstep = tmp_path / "read", Misstep(3 * BATCH, hang, tmp_path)
    for dataset in (road.dataset(Heavy, log=str(log)), road.dataset(Spelled, misstep=misstep)):
        loader = road.loader(
            dataset, num_workers=1, prefetch_factor=6, persistent_workers=True, multiprocessing_context=start_method
        )
        held = [loader, iter(loader)]
        del loader
        assert_pictures_match(*next(held[-1])[:2])
        if isinstance(dataset, Heavy):
            wait_until_read(log, 6 * BATCH)
        else:
            misstep.await_s()
        start_s = time.perf_counter()
        if road.server is not None:
            road.server.stop_thread()
        assert time.perf_counter() - start_s < STOP_S
        assert_ends_at_once(held, road)


def pipeline_of(**inputs: Any) -> Any:
    """Of one external source for each name, with its arguments; without any, of none."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph() -> Any:
        sources = [fn.external_source(name=name, **arguments) for name, arguments in inputs.items()]
        return tuple(sources) or fn.random.coin_flip()

    return graph


def deserialized() -> Any:
    from nvidia.dali import Pipeline

    return Pipeline.deserialize(pipeline_of(x={})().serialize())


def served(**inputs: Any) -> ProxyServer:
    return ProxyServer(pipeline_of(**inputs)())


NO_INPUTS = (
    r"the pipeline has no inputs for the dataset to feed.*fn.external_source\(name=.*pipelines.training\(source="
)
A_SOURCE = "input 'x' of the pipeline must not have a source.* Omit source="
REPEATED = "input 'x' of the pipeline must not have repeat_last=True; omit it"
DESERIALIZED = "the pipeline was deserialized"
SERVER_FIRST = r"DataLoader\(dataset, ..., server=server\)"
WRONG: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no pipeline": (lambda root: ProxyServer("a pipeline"), TypeError, "DALI pipeline, got str$"),  # type: ignore[arg-type]
    "a function": (lambda root: ProxyServer(pipeline_of(x={})), TypeError, "DALI pipeline, got function; call the"),
    "no inputs": (lambda root: served(), RuntimeError, NO_INPUTS),
    "a source": (lambda root: served(x={"source": lambda: [b"x"]}), ValueError, A_SOURCE),
    "repeat_last": (lambda root: served(x={"repeat_last": True}), ValueError, REPEATED),
    "deserialized": (lambda root: ProxyServer(deserialized()), RuntimeError, DESERIALIZED),
    "no server": (lambda root: DataLoader(picture_folder(root), server="a server"), TypeError, "ProxyServer"),
    "server first": (lambda root: DataLoader(served(x={}), picture_folder(root)), TypeError, SERVER_FIRST),
    "no workers": (lambda root: DataLoader(picture_folder(root), num_workers=-1), ValueError, "num_workers"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_constructor_that_fails_raises_its_error_and_nothing_else(what: str, spelled_root: Path) -> None:
    construct, error, message = WRONG[what]
    with pytest.raises(error, match=message) as caught:
        construct(spelled_root)
    caught.value.__traceback__ = None  # which holds the half-made object
    del caught
    gc.collect()  # an exception that is ignored here fails the test


def collect_garbage(_: int) -> None:
    gc.enable()
    gc.collect()


def leave_as_garbage(road: Road, workers: int) -> None:
    """A loader, its iterator in mid-epoch and its pipeline, in a cycle that only the collector finds."""
    loader = road.loader(num_workers=workers)
    batches = iter(loader)
    assert_pictures_match(*next(batches))
    cycle: list[Any] = [road, loader, batches]
    cycle.append(cycle)


@on_roads(*ROADS, "server, old executor", "produced, old executor")
def test_garbage_that_is_collected_in_a_forked_worker_does_no_harm(road: Road, no_collector: None) -> None:
    for workers in (0, 0 if road.name == "produced" else 1, 0):  # a stock loader's would be waited for in the worker
        leave_as_garbage(road.another(), workers)
        loader = road.loader(
            num_workers=2, worker_init_fn=collect_garbage, multiprocessing_context="fork", timeout=WAIT_S
        )
        assert_batches_match(loader)
    gc.collect()
    assert_batches_match(loader)
