"""Machines that are short of something: a clear message or a slower road, never a wrong batch, never a hang."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxyloader import ImageError

from ..faults import Misstep, all_numbers, loader_of, numbers_of, output_of, training
from ..installations import environment, with_own_dali, without
from ..limits import WAIT_S
from ..numbered import spell_dataset
from ..outcomes import outcomes, raises
from ..scripts import WITH_THE_PROJECT, in_own_namespace
from ..tiers import by_default
from .roads import grown

ALL = list(range(48))
WHOLE = "assert all_numbers(loader) == list(range(48))"


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """48 spelled pictures of 6 MB each, so that a batch of four is 24 MB."""
    root = spell_dataset(tmp_path_factory.mktemp("large") / "set", 48)
    for path in root.glob("*/*.jpg"):
        path.write_bytes(grown(path.read_bytes(), 6_000_000))
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("megabytes", by_default({"one": 1, "64": 64}, "one"))  # torch's queues need it for semaphores
def test_a_small_dev_shm_is_enough_for_large_batches(large_root: Path, tmp_path: Path, megabytes: int) -> None:
    mount = in_own_namespace(f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm")
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount; the tests beside this one need no mount")
    body = f"""
        assert os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize == {megabytes} << 20
        # 12 batches of 24 MB are under way in the workers alone.
        for in_order in (True, False):
            assert sorted(all_numbers(loader_of(root, prefetch_factor=6, in_order=in_order))) == list(range(48))
    """
    output_of(tmp_path, large_root, body, under=mount)


LIMITS = {
    "64 KB of locked memory": "resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))",
    "2 GB of address space beyond what imports took": """
        import random, torch

        class Draws(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield random.random()

        drawn = list(DataLoader(Draws(), num_workers=1, seed=0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30),) * 2)
        assert list(DataLoader(Draws(), num_workers=1, seed=0)) == drawn
    """,
    "files of at most 1 MB": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",
    "a stack of 1 MB": "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))",
    "one core": "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])",
}


@pytest.mark.parametrize(
    "limit", by_default(LIMITS, "64 KB of locked memory", "2 GB of address space beyond what imports took")
)
def test_an_epoch_is_right_under_a_limit(spelled_root: Path, tmp_path: Path, limit: str, device: str) -> None:
    body = textwrap.dedent(limit) + textwrap.dedent(f"""
        for workers in (0, 1):
            for batch_size in (4, 256):
                loader = DataLoader(Spelled(root), batch_size, num_workers=workers, pin_memory=True, device={device!r})
                {WHOLE}
    """)
    if device == "cuda" and "RLIMIT_AS" in limit:
        pytest.skip("CUDA itself addresses more than there is")
    slower = "cannot allocate shared memory for batches"
    with training(tmp_path, spelled_root, body) as process:
        _, errors = process.communicate(timeout=2 * WAIT_S)  # four pipelines are built
        complaints = [line for line in errors.splitlines() if slower not in line]
        assert (process.returncode, complaints) == (0, []), errors
    is_slower = "RLIMIT_FSIZE" in limit or "RLIMIT_AS" in limit
    assert errors.count(slower) == 2 * is_slower  # once for each loader with a worker


# --- descriptors -----------------------------------------------------------------------------------------------------


def test_two_descriptors_more_than_the_stock_loader_takes_are_enough(
    spelled_root: Path, large_root: Path, tmp_path: Path
) -> None:
    body = f"""
        import logging
        from torch.utils.data import DataLoader as StockLoader

        logging.getLogger("proxyloader").setLevel("ERROR")  # it warns of short epochs with new workers

        def most_while(loader):
            most = 0
            for k, _ in enumerate(loader):
                until_s = time.monotonic() + (0.05 if k else 2.0)  # so that the workers get as far ahead as they may
                while time.monotonic() < until_s:
                    most = max(most, len(os.listdir("/proc/self/fd")))
                    time.sleep(0.01)
            return most

        needed = most_while(StockLoader(Spelled(root), 4, num_workers=2))
        import nvidia.dali  # a library is opened once, and takes a descriptor for as long as that
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed + 2, needed + 2))
        for arguments in (dict(), dict(persistent_workers=True), dict(prefetch_factor=8), dict(workers=0)):
            for each in (root, {str(large_root)!r}):
                loader = loader_of(each, **arguments)
                for _ in range(2):
                    assert all_numbers(loader) == list(range(48))
    """
    output_of(tmp_path, spelled_root, body)


_taken: list[int] = []


def take_all_descriptors() -> None:
    import resource

    few = 64 + max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            _taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass


def give_them_back() -> None:
    while _taken:
        os.close(_taken.pop())


def two(folder: Path, *steps: tuple[int, Callable[[], Any]]) -> Callable[[int], None]:
    """Two missteps."""
    missteps = []
    for name, (at, do) in zip("ab", steps):
        (folder / name).mkdir()
        missteps.append(Misstep(at, do, folder / name))
    return lambda index: [misstep(index) for misstep in missteps]  # type: ignore[return-value]


def test_a_worker_without_descriptors_says_so_and_does_not_blame_the_file(spelled_root: Path, tmp_path: Path) -> None:
    loader = loader_of(spelled_root, two(tmp_path, (13, take_all_descriptors), (20, give_them_back)), workers=1)
    batches = iter(loader)
    numbers = all_numbers(next(batches) for _ in range(3))
    for _ in range(2):
        with pytest.raises(OSError, match="Too many open files") as caught:
            next(batches)
        assert "Replace the file" not in str(caught.value)
    del caught
    assert numbers + all_numbers(batches) == [*range(12), *range(20, 48)]


def test_a_trainer_without_descriptors_says_so_and_recovers(spelled_root: Path, tmp_path: Path) -> None:
    body = """
        from tests.integration.test_machines import give_them_back, take_all_descriptors
        assert all_numbers(loader_of(root)) == list(range(48))
        take_all_descriptors()
        for arguments in (dict(), dict(persistent_workers=True)):
            try:
                all_numbers(loader_of(root, **arguments))
                raise AssertionError("there is no descriptor for a queue")
            except OSError as error:
                assert "Too many open files" in str(error), error
        give_them_back()
        assert all_numbers(loader_of(root)) == list(range(48))
    """
    output_of(tmp_path, spelled_root, body)


# --- places that cannot be written to --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", by_default({each: each for each in ("fork", "forkserver", "spawn")}, "fork"))
def test_no_writable_folder_is_needed(spelled_root: Path, tmp_path: Path, method: str) -> None:
    output_of(
        tmp_path,
        spelled_root,
        f"loader = loader_of(root, multiprocessing_context={method!r})\n{WHOLE}",
        cwd="/proc",
        environment={"TMPDIR": "/proc", "HOME": "/proc", "XDG_CACHE_HOME": "/proc", "PYTHONDONTWRITEBYTECODE": "1"},
        afresh=True,
    )


FILE_LIMIT = ["sh", "-c", 'ulimit -f 8 && exec "$0" "$@"']  # in blocks of 512 bytes, or of 1024


@pytest.mark.parametrize("processes", ["1", "2"])
def test_make_dataset_where_files_may_not_grow_says_so_in_one_line_and_goes_on_from_there(
    tmp_path: Path, processes: str
) -> None:
    sizes = ["--images", "8", "--size", "160x120", "--processes", processes]
    command = [sys.executable, "-m", "proxyloader", "make-dataset", *sizes, str(tmp_path / "set")]
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": WITH_THE_PROJECT, "timeout": WAIT_S}
    done = subprocess.run([*FILE_LIMIT, *command], **how)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith("proxyloader: error: ") and "File too large" in line
    # What is there under its name is whole; the set is completed when there is room.
    assert all(path.read_bytes().endswith(b"\xff\xd9") for path in (tmp_path / "set").glob("class_*/*.jpg"))
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "set").glob("class_*/*"))) == 8
    assert not list((tmp_path / "set").rglob("*.part"))


# --- disks that are slow, vanish, or change --------------------------------------------------------------------------


def path_of(root: Path, number: int) -> Path:
    (path,) = root.glob(f"*/{number:05d}.jpg")
    return path


@pytest.mark.parametrize("workers", [0, 1], ids=["no workers", "a worker"])
def test_a_folder_that_vanishes_costs_batches_until_it_is_back(
    root: Path, tmp_path: Path, workers: int, device: str
) -> None:
    away = tmp_path / "away"
    goes, comes = (functools.partial(os.rename, *each) for each in ((root, away), (away, root)))
    loader = loader_of(root, two(tmp_path, (16, goes), (32, comes)), workers=workers, device=device)
    batches = iter(loader)
    assert all_numbers(itertools.islice(batches, 4)) == ALL[:16]
    for k in range(4, 8):
        with raises(ImageError, code="unreadable", index=4 * k, errno=errno.ENOENT):
            next(batches)
    assert all_numbers(batches) == ALL[32:]
    assert all_numbers(loader) == ALL


def test_files_that_change_all_the_time_are_whole_or_named(spelled_root: Path, root: Path, tmp_path: Path) -> None:
    whole = {number: path_of(spelled_root, number).read_bytes() for number in range(0, 48, 3)}
    paths = {number: path_of(root, number) for number in whole}
    done = threading.Event()

    def spoil() -> None:
        draw = random.Random(0)
        while not done.is_set():
            number = draw.choice(list(whole))
            kept = draw.randrange(len(whole[number]))
            with open(paths[number], "r+b") as file:  # in place, under the eyes of whoever reads
                file.truncate(kept)
                file.seek(kept)
                file.write(whole[number][kept:])

    writer = threading.Thread(target=spoil, daemon=True)
    loader, right, named = loader_of(root, persistent_workers=True), 0, 0
    batches = iter(loader)  # the workers are forked before there is another thread
    writer.start()
    try:
        for _ in range(15):
            for batch in outcomes(batches):
                if isinstance(batch, ImageError):
                    assert str(root) in str(batch)
                    named += 1
                else:
                    numbers_of(batch)
                    right += 1
            batches = iter(loader)
    finally:
        done.set()
        writer.join()
    assert right + named == 15 * 12 and right > 15
    del batches  # which may have been read while the files were spoilt
    assert all_numbers(loader) == ALL


# --- installations without DALI, or a part of it ---------------------------------------------------------------------


SCRIPT = """
import sys
from torchvision import datasets, transforms
from proxyloader import DataLoader, MissingDaliError, PipelineError
try:
    for first in (transforms.RandomPerspective(), transforms.RandomHorizontalFlip()):
        transform = transforms.Compose([first, transforms.RandomCrop(8), transforms.ToTensor()])
        loader = DataLoader(datasets.ImageFolder(sys.argv[1], transform), 24, device="cpu")
        print([tuple(images.shape) for _ in range(2) for images, _ in loader], loader.backend)
    from proxyloader import ProxyServer
except (MissingDaliError, PipelineError) as error:
    print(error.code, str(error).splitlines()[0])
"""


def said(photos: Path, folder: Path) -> tuple[list[str], str]:
    """What the script prints, and the log, where only what is in this folder is installed."""
    command = [sys.executable, "-S", "-c", SCRIPT, str(photos)]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_without_dali_loaders_are_torchs_own_and_the_log_of_each_and_the_error_name_the_doctor(
    photos: Path, tmp_path: Path
) -> None:
    (*loaders, error), log = said(photos, without(tmp_path / "site", "dali"))
    assert loaders == [f"{[(24, 3, 8, 8)] * 4} torch: NVIDIA DALI is not installed"] * 2
    why = "NVIDIA DALI is not installed: torch loads the data, without a speedup. Run `proxyloader doctor` for advice"
    assert log.count(f"ImageFolder, 48 samples: {why}") == 2
    assert error.startswith("missing-dali NVIDIA DALI cannot be imported (No module named 'nvidia.dali')")
    assert error.endswith("`proxyloader doctor` shows what is wrong")


def test_without_nvimagecodec_the_error_says_so_and_names_the_doctor(photos: Path, tmp_path: Path) -> None:
    try:
        folder = with_own_dali(without(tmp_path / "site", "nvimgcodec"))
    except OSError as error:
        pytest.skip(f"the temporary folder cannot share files with the installed DALI: {error}")
    (*_, error), _ = said(photos, folder)
    assert error.startswith("no-decoder DALI cannot load nvImageCodec, its image decoding library")
    assert "`proxyloader doctor` shows the installed one" in error
