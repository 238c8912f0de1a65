"""How workers start, and how all of it ends: at once, by itself, and without a trace."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchvision import transforms

from proxyloader import DataLoader, ProxyServer, UnsupportedTransformError

from .. import scripts
from ..limits import STOP_S, WAIT_S
from .observed import Heavy, wait_until_read
from .roads import BATCH, Road, assert_batches_match, assert_pictures_match, picture_folder, picture_pipeline


def test_every_start_method_gives_every_picture_in_two_epochs(road: Road, start_method: str) -> None:
    workers = 1 if start_method == "spawn" else 2
    loader = road.loader(num_workers=workers, persistent_workers=True, multiprocessing_context=start_method)
    for _ in range(2):
        assert_batches_match(loader)


@pytest.fixture
def server(device: str) -> ProxyServer:
    return ProxyServer(picture_pipeline(device))


MOMENTS = ["before anything", "after an epoch", "in mid-epoch", "with an exception in mid-epoch"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["server", "produced"])
def test_a_server_is_left_at_once(name: str, moment: str, spelled_root: Path, device: str) -> None:
    with Road(name, spelled_root, device) as road:
        assert road.server is not None
        loader = road.loader(num_workers=1, prefetch_factor=8)
        batches: Iterator[Any] = iter(())
        start_s = 0.0
        try:
            with road.server:
                if moment == "after an epoch":
                    assert_batches_match(loader)
                elif "mid-epoch" in moment:
                    batches = iter(loader)
                    assert_pictures_match(*next(batches))
                start_s = time.perf_counter()
                if "exception" in moment:
                    raise LookupError
        except LookupError:
            assert "exception" in moment
        assert time.perf_counter() - start_s < STOP_S
        del batches
        assert_batches_match(loader)


SCRIPT = """
import multiprocessing, sys
from pathlib import Path
from tests.integration.roads import ROADS, Road

if __name__ == "__main__":
    root, start_method, ending = sys.argv[1:]
    multiprocessing.set_forkserver_preload(["tests.integration.roads"])
    roads = [Road(name, Path(root)) for name in ROADS]
    loaders = [
        road.loader(num_workers=1, persistent_workers=True, multiprocessing_context=start_method) for road in roads
    ]
    kept = zip(*loaders)
    next(kept)
    print("ready")
    if ending == "exception":
        raise LookupError("of the loop")
"""


@pytest.mark.parametrize("ending", ["end", "exception"])
def test_a_script_that_closes_nothing_ends_by_itself_on_every_road(
    ending: str, start_method: str, spelled_root: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Both pipes are at their end when the last worker, too, has let go of them.
    done = scripts.run(script, spelled_root, start_method, ending, timeout_s=WAIT_S)
    assert done.stdout == "ready\n", done.stderr
    if ending == "end":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 1
        assert done.stderr.count("Traceback") == 1 and done.stderr.endswith("LookupError: of the loop\n")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without Python's cyclic garbage collector, for the time of a test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def worker_processes() -> list[psutil.Process]:
    return [psutil.Process(child.pid) for child in multiprocessing.active_children()]


def test_a_loader_dropped_in_mid_epoch_after_its_server_was_left_lets_full_workers_go(
    road: Road, start_method: str, tmp_path: Path, no_collector: None
) -> None:
    dataset = road.dataset(Heavy)
    dataset.log = str(tmp_path / "read")
    loader = road.loader(
        dataset,
        num_workers=1,
        prefetch_factor=6,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    batches = iter(loader)
    assert_pictures_match(*next(batches)[:2])
    wait_until_read(tmp_path / "read", 6 * BATCH)
    if road.server is not None:
        road.server.stop_thread()
    workers = worker_processes()
    assert len(workers) == 1
    start_s = time.perf_counter()
    del batches, loader
    # A stock loader's worker gets five seconds from torch before it is ended.
    assert time.perf_counter() - start_s < (WAIT_S if road.name == "produced" else STOP_S)
    assert not psutil.wait_procs(workers, timeout=STOP_S)[1]


def test_persistent_workers_go_with_their_loader_and_not_with_the_garbage_collector(
    road: Road, start_method: str, no_collector: None
) -> None:
    loader = road.loader(num_workers=1, persistent_workers=True, multiprocessing_context=start_method)
    assert_batches_match(loader)
    workers = worker_processes()
    assert len(workers) == 1
    start_s = time.perf_counter()
    del loader
    assert time.perf_counter() - start_s < (WAIT_S if road.name == "produced" else STOP_S)
    assert not psutil.wait_procs(workers, timeout=STOP_S)[1]


def wrong_constructions(root: Path) -> dict[str, Any]:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def no_inputs() -> Any:
        return fn.random.coin_flip()

    elastic = transforms.Compose([transforms.ElasticTransform(), transforms.ToTensor()])
    return {
        "no pipeline": (lambda: ProxyServer("a pipeline"), TypeError, "DALI pipeline"),  # type: ignore[arg-type]
        "no inputs": (
            lambda: ProxyServer(no_inputs()),
            RuntimeError,
            "the pipeline has no inputs, so a dataset can give it nothing",
        ),
        "no server": (lambda: DataLoader(picture_folder(root), server="a server"), TypeError, "ProxyServer"),
        "no transform": (
            lambda: DataLoader(picture_folder(root, elastic), translate="all"),
            UnsupportedTransformError,
            "ElasticTransform",
        ),
        "no workers": (lambda: DataLoader(picture_folder(root), num_workers=-1), ValueError, "num_workers"),
    }


@pytest.mark.parametrize("what", ["no pipeline", "no inputs", "no server", "no transform", "no workers"])
def test_a_constructor_that_fails_raises_its_error_and_nothing_else(
    what: str, spelled_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: ignored.append(repr(raised.exc_value)))
    construct, error, message = wrong_constructions(spelled_root)[what]
    with pytest.raises(error, match=message) as caught:
        construct()
    caught.value.__traceback__ = None  # which holds the half-made object
    del caught
    gc.collect()
    assert ignored == []


def collect_garbage(_: int) -> None:
    gc.enable()
    gc.collect()


def leave_as_garbage(road: Road) -> None:
    """A loader, its iterator in mid-epoch and its pipeline, in a cycle that only the collector finds."""
    loader = road.loader(num_workers=0)
    batches = iter(loader)
    assert_pictures_match(*next(batches))
    cycle: list[Any] = [road, loader, batches]
    cycle.append(cycle)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compiled", {}),
        ("server", {}),
        ("produced", {}),
        ("server", {"exec_dynamic": False}),
        ("produced", {"exec_dynamic": False}),
    ],
    ids=["compiled", "server", "produced", "server, old executor", "produced, old executor"],
)
def test_garbage_that_is_collected_in_a_forked_worker_does_no_harm(
    name: str, arguments: dict[str, Any], spelled_root: Path, device: str, no_collector: None
) -> None:
    with Road(name, spelled_root, device, **arguments) as road:
        for _ in range(3):
            leave_as_garbage(Road(name, spelled_root, device, **arguments))
            loader = road.loader(
                num_workers=2, worker_init_fn=collect_garbage, multiprocessing_context="fork", timeout=15
            )
            assert_batches_match(loader)
        gc.collect()
        assert_batches_match(loader)
