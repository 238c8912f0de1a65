"""Workers and trainers that are killed, hang, or are forgotten: nothing waits for ever, and nothing stays behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

TRANSFORM = transforms.Compose([transforms.Resize((48, 64)), transforms.ToTensor()])

SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may inherit it ignored
from torchvision import transforms
from torchvision.datasets import ImageFolder
from proxyloader import DataLoader, ProxyServer

def loader(workers=2, **arguments):
    transform = transforms.Compose([transforms.Resize((48, 64)), transforms.ToTensor()])
    return DataLoader(ImageFolder(sys.argv[1], transform), 4, num_workers=workers, device="cpu", **arguments)

def server():
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, exec_dynamic=True)
    def graph():
        return fn.decoders.image(fn.external_source(name="images", no_copy=True))

    return ProxyServer(graph())

if __name__ == "__main__":
"""


def start(photos: Path, body: str) -> subprocess.Popen[str]:
    code = SCRIPT + textwrap.indent(textwrap.dedent(body), "    ")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(photos)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


FORGETFUL = {
    "a break, and the iterator kept": "batches = iter(loader()); next(batches)",
    "persistent workers, after an epoch": "kept = loader(persistent_workers=True); print(len(list(kept)))",
    "persistent workers, in the middle": "kept = loader(persistent_workers=True); batches = iter(kept); next(batches)",
    "in the calling thread": "kept = loader(0); batches = iter(kept); next(batches)",
    "a server that was started": "kept = server(); kept.start_thread()",
    "two loaders at once": "a, b = loader(), loader(); pairs = zip(a, b); next(pairs)",
}


@pytest.mark.parametrize("body", FORGETFUL.values(), ids=FORGETFUL.keys())
def test_a_script_that_closes_nothing_ends_by_itself(photos: Path, body: str) -> None:
    process = start(photos, body)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_an_exception_in_the_loop_ends_the_script_with_that_exception(photos: Path) -> None:
    process = start(photos, "for batch in loader(persistent_workers=True): raise LookupError('mine')")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "LookupError: mine" in errors


def test_control_c_ends_the_script_and_its_workers(photos: Path) -> None:
    process = start(photos, "for batch in loader(persistent_workers=True): print('ready'); time.sleep(60)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_trainer_leaves_no_worker_behind(photos: Path, method: str) -> None:
    # The messages are made large, so that workers stand blocked in a full pipe when their trainer dies.
    body = f"""
        def collate(samples):
            return samples
        kept = loader(prefetch_factor=4, multiprocessing_context="{method}")
        kept.dataset.target_transform = Large()
        for batch in kept:
            print("ready")
            time.sleep(60)
    """
    code = SCRIPT.replace(
        "def server", "class Large:\n    def __call__(self, target): return 'x' * 100_000\n\ndef server"
    )
    code += textwrap.indent(textwrap.dedent(body), "    ")
    process = start_file(photos, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


def start_file(photos: Path, code: str) -> subprocess.Popen[str]:
    """As ``start``, from a file, which forkserver and spawn can import."""
    path = photos.parent / "script.py"
    path.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(path), str(photos)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


class SlowFolder(ImageFolder):
    """Takes its time from the sixth batch of four on."""

    def __getitem__(self, index: int) -> Any:
        if index == 24:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_a_killed_worker_is_an_error_and_the_next_epoch_is_whole(folder: ImageFolder, persistent: bool) -> None:
    folder.transform = TRANSFORM
    whole = [labels for _, labels in StockLoader(folder, 4)]
    loader = DataLoader(folder, 4, num_workers=2, persistent_workers=persistent, device="cpu")
    batches = iter(loader)
    next(batches)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(RuntimeError, match="DataLoader worker .* exited unexpectedly|killed by signal"):
        for _ in batches:
            time.sleep(0.05)
    del batches
    labels = [labels for _, labels in loader]
    assert len(labels) == len(whole) and all(map(torch.equal, labels, whole))


def test_timeout_means_what_it_means_to_torch(folder: ImageFolder) -> None:
    dataset = SlowFolder(folder.root, TRANSFORM)
    batches = iter(DataLoader(dataset, 4, num_workers=1, timeout=1, device="cpu"))
    start_s = time.perf_counter()
    with pytest.raises(RuntimeError, match="timed out after 1 second"):
        for _ in batches:
            pass
    assert time.perf_counter() - start_s < 10


def test_dropping_a_loader_lets_its_workers_go_without_the_garbage_collector(folder: ImageFolder) -> None:
    import gc

    folder.transform = TRANSFORM
    gc.disable()
    try:
        loader = DataLoader(folder, 4, num_workers=2, persistent_workers=True, device="cpu")
        batches = iter(loader)
        next(batches)
        children = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
        assert len(children) == 2
        start_s = time.perf_counter()
        del batches, loader
        assert time.perf_counter() - start_s < 2
        assert not psutil.wait_procs(children, timeout=2)[1]
    finally:
        gc.enable()


def held_bytes() -> int:
    """Memory of this process alone, without what malloc keeps of freed batches for the next."""
    ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_full_info()
    return int(memory.uss)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_breaks_leave_no_memory_behind(folder: ImageFolder, workers: int, persistent: bool, device: str) -> None:
    if persistent and not workers:
        pytest.skip("persistent workers need workers")
    folder.transform = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    loader = DataLoader(folder, 16, num_workers=workers, persistent_workers=persistent, device=device)

    def epochs(count: int) -> None:
        for _ in range(count):
            for _ in loader:
                break

    epochs(10)
    host, gpu = held_bytes(), gpu_bytes(device)
    epochs(50)
    # A batch is 9.6 MB, and DALI's pool may yet grow by those few that can be under way at once.
    assert held_bytes() - host < 6 * 9_600_000
    assert gpu_bytes(device) - gpu < 6 * 9_600_000


def gpu_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_pipeline_inherited_by_a_fork_does_no_harm(folder: ImageFolder) -> None:
    import gc

    folder.transform = TRANSFORM
    loader = DataLoader(folder, 4, num_workers=0, device="cpu")
    batches = iter(loader)
    next(batches)

    def child() -> None:
        nonlocal loader, batches
        del loader, batches
        gc.collect()

    assert in_fork(child) == 0
    assert len(list(batches)) == 11


def in_fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1
