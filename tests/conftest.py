"""Shared by all tests: small real data sets, a device to run on, and the check that nothing survives a test."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pkgutil
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image, ImageFile
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

import proxyloader
from proxyloader.dali import jpeg_engines
from proxyloader.dali.build import PipelineOptions, build_pipeline
from proxyloader.dali.run_queue import RunQueue
from proxyloader.loader.options import LoaderOptions
from proxyloader.make_dataset import make_dataset
from proxyloader.transforms.resize import Resize

from . import forks, scripts, tiers
from .integration.roads import spelled_root as spelled_root, warm_forkserver as warm_forkserver
from .kernels.emulation import emulated_gpu as emulated_gpu, grids_round_each_product as grids_round_each_product
from .limits import STOP_S
from .plans import plan_for

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("nightly", print_blob=True, deadline=None)
settings.load_profile("same")  # unless it is asked for others: --hypothesis-profile=nightly


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what -m does not ask for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.choose(config, items)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores for each two of them, as tests also wait."""
    cores = len(os.sched_getaffinity(0))
    return cores + cores // 2


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hypothesis also draws numbers that stand in modules of ours that are loaded: all are, whichever tests are run."""
    if any(item.get_closest_marker("hypothesis") for item in session.items):
        for module in pkgutil.walk_packages(proxyloader.__path__, "proxyloader."):
            if module.name != "proxyloader.__main__":
                importlib.import_module(module.name)
    forks.keep_what_is_there()


class FailuresAtOnce:
    """Prints each failure when it comes, and when it came: a run that something else ends prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.started_s = config, time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            after_s = time.monotonic() - self.started_s
            terminal.write_line(f"\n{report.nodeid}, {report.when}, after {after_s:.0f} s:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    else:  # xdist sees the end of a process in a pipe, which a forked child that hangs would keep open
        xdist = next(each for each in config.pluginmanager.get_plugins() if hasattr(each, "channel"))
        pipe, nowhere = xdist.channel.gateway._io.outfile.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, pipe))
    """Ctrl-C counts also where the tests were started with a shell's ``&``, which has them ignore it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forks.use_one_arena()
    # Threads of OpenMP wait for work by looking for it, which takes the cores from other processes' tests.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = [scripts.QUICK_START, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without Python's cyclic garbage collector, for the time of a test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_seeds_for_devices_that_are_not_there() -> Iterator[None]:
    """``torch.manual_seed`` keeps the seed of an absent CUDA or XPU device together with the call stack as text. That
    takes most of a millisecond, of a call that takes microseconds otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_images_go_to_dali() -> Iterator[None]:
    """Small images are quick to test with. On a CPU a loader leaves them to torchvision, which is faster at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Resize, "needs_kernels", False)
        yield


@pytest.fixture(params=["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if tiers.has_gpu() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Runs the test on the CPU, and on a GPU where there is one."""
    if request.param == "cuda":
        request.getfixturevalue("loaded_decoder")
    return str(request.param)


@pytest.fixture(scope="session")
def loaded_decoder(photos: Path) -> Iterator[None]:
    """DALI loads its decoders with the first pipeline that has one, which takes most of its start on a GPU, and lets
    them go with the last. So one stays, which has decoded and holds what decoders share of the JPEG engines. And a GPU
    on which other tests run is not taken for a crowded one, on which each pipeline is tried before it is used."""
    if not torch.cuda.is_available():
        if os.environ.get("PROXYLOADER_REQUIRE_GPU") == "1":
            pytest.fail("PROXYLOADER_REQUIRE_GPU=1, and torch sees no CUDA device")
        pytest.skip("no CUDA device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg_engines, "CROWDED_BYTES", torch.cuda.mem_get_info()[1])
        server = RunQueue(build_pipeline(plan_for(PILToTensor()), PipelineOptions(1, device_id=0, num_threads=1)))
        server.collect(server.submit([[np.fromfile(next(photos.rglob("*.jpg")), np.uint8)]]))
        yield


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders take their images to be on a GPU, with kernels."""
    monkeypatch.setattr(LoaderOptions, "on_gpu", True)
    monkeypatch.setattr(LoaderOptions, "has_kernels", True)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 JPEG photographs of several shapes near 160 x 120, in 4 classes."""
    return make_dataset(
        tmp_path_factory.mktemp("photos") / "set", images=48, size=(160, 120), classes=4, processes=1, progress=False
    )


@pytest.fixture
def folder(photos: Path) -> ImageFolder:
    """``photos`` without a transform; give it one: ``folder.transform = ...`` changes nothing for other tests."""
    return ImageFolder(str(photos))


@pytest.fixture(autouse=True)
def restored_random_state() -> object:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.fixture
def pillows_settings() -> Iterator[None]:
    """For a test that sets Pillow's limit of pixels, or whether it reads truncated files, as a user does."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    yield
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


@pytest.fixture(autouse=True)
def nothing_survives() -> object:
    """No thread of Python's, no child process and no file of ours outlives its test."""
    threads, arenas = set(threading.enumerate()), _arenas()
    yield
    if multiprocessing.active_children() or set(threading.enumerate()) - threads or _arenas() > arenas:
        gc.collect()  # a caught exception holds the frames it came through, and with them the loader
    for child in multiprocessing.active_children():
        child.join(STOP_S)
    stayed = multiprocessing.active_children()
    for child in stayed:
        with contextlib.suppress(RuntimeError):  # by which torch says that a worker was killed
            child.kill()
            child.join()
    assert not stayed, f"child processes outlived the test, and had to be killed: {stayed}"
    new = {thread for thread in set(threading.enumerate()) - threads if not thread.name.startswith("QueueFeeder")}
    for thread in new:
        thread.join(STOP_S)
    left = {thread for thread in new if thread.is_alive()}
    assert not left, f"threads outlived the test: {left}"
    assert _arenas() <= arenas, "an arena outlived the test"
    forks.give_memory_back()


def _arenas() -> int:
    """How many have not closed their file. DALI's old executor keeps the memory of its last batch."""
    return sum(each.func is os.close for each in weakref.finalize._registry.values())  # type: ignore[attr-defined]
