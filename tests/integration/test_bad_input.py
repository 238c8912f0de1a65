"""Bad input is a named error at the batch it belongs to; the batches around it are right, and the loader goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from ..outcomes import outcomes

TRANSFORM = transforms.Compose([transforms.Resize((48, 64)), transforms.ToTensor()])
BATCH, BAD = 4, 9  # the bad sample is in the third batch


def missing(path: Path) -> None:
    path.unlink()


def a_device_without_end(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("These are not the pixels you are looking for.\n" * 50)


def cut_in_the_scan(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: 2 * len(data) // 3])


def with_bytes(path: Path, marker: bytes, at: int, values: bytes) -> None:
    """Put them so far behind a marker of the file."""
    data = bytearray(path.read_bytes())
    start = data.find(marker) + at
    data[start : start + len(values)] = values
    path.write_bytes(data)


def too_many_pixels(path: Path) -> None:
    with_bytes(path, b"\xff\xc0", 5, b"\xea\x60\xea\x60")  # 60,000 x 60,000


def broken_tables(path: Path) -> None:
    with_bytes(path, b"\xff\xc4", 5, b"\xff" * 16)  # counts of Huffman codes that cannot be


class OpensItself(ImageFolder):
    """Reads with Pillow, as many datasets do."""

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.transform(Image.open(path).convert("RGB")), label, index


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # as the names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def a_pipe(path: Path) -> None:
    """A pipe that a picture is written to each time that it is opened."""
    data = next(each for each in path.parent.iterdir() if each.is_file()).read_bytes()
    os.mkfifo(path)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            path.write_bytes(data)

    threading.Thread(target=write, daemon=True).start()


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": a_pipe,
    "a socket": a_socket,
    "a directory": Path.mkdir,
    "a device without end": link_to("/dev/zero"),
    "a device of random bytes": link_to("/dev/urandom"),
    "an empty device": link_to("/dev/null"),
    "a file of the system": link_to("/proc/self/status"),
    "memory": link_to("/proc/self/mem"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a file as a directory": lambda path: path.symlink_to(f"{__file__}/a.jpg"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Pillow leaves files open
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [ImageFolder, OpensItself])
@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_ends_as_under_torch(name: str, kind: Any, workers: int, photos: Path, tmp_path: Path) -> None:
    dataset = kind(shutil.copytree(photos, tmp_path / "set"), TRANSFORM)
    path, seen = Path(dataset.samples[BAD][0]), []
    for loader in (StockLoader, DataLoader):
        path.rmdir() if path.is_dir() else path.unlink()
        NO_FILES[name](path)
        seen.append(outcomes(loader(dataset, BATCH, num_workers=workers)))
    for theirs, ours in zip(*seen, strict=True):
        assert isinstance(ours, type(theirs)), (ours, theirs)
        if isinstance(theirs, Exception):
            assert workers or ours.errno == theirs.errno, (ours, theirs)
    assert isinstance(seen[0][BAD // BATCH], Exception) == (name != "a pipe")


def test_a_file_without_permission_is_named(photos: Path, tmp_path: Path) -> None:
    dataset = ImageFolder(shutil.copytree(photos, tmp_path / "set"), TRANSFORM)
    path = Path(dataset.samples[BAD][0])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    found = outcomes(DataLoader(dataset, BATCH, num_workers=1, device="cpu"))
    assert found[BAD // BATCH].errno == errno.EACCES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prefetch=0), "prefetch must be an integer >= 1, got 0"),
        (dict(prefetch=1.5), "prefetch must be an integer"),
        (dict(num_threads=0), "num_threads must be an integer >= 1, or 'auto', got 0"),
        (dict(num_threads=5000), "num_threads must be at most 1024, or 'auto', got 5000"),
        (dict(on_error="ignore"), "on_error must be one of 'raise', 'skip', 'replace', got 'ignore'"),
        *((dict(seed=seed), f"seed must be an integer >= 0, got {seed!r}") for seed in (-1, 1.5, "x")),
        (dict(translate="gpu"), "translate must be True or False, got 'gpu'"),
        (dict(check_scans="no"), "check_scans must be True or False, got 'no'"),
        (dict(hw_decoder_load=2), r"hw_decoder_load must be in \[0, 1\] or 'auto', got 2"),
        (dict(device="meta"), "device must be a CUDA device .* or 'cpu', got 'meta'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_told_what_is_allowed(folder: ImageFolder, arguments: dict[str, Any], message: str) -> None:
    folder.transform = TRANSFORM
    with pytest.raises(ValueError, match=message):
        DataLoader(folder, **arguments)


@pytest.mark.parametrize(
    "device", ["cuda:63", 63, torch.device("cuda", 63), *([] if torch.cuda.is_available() else ["cuda"])]
)
@pytest.mark.parametrize("translate", [True, False])
def test_a_gpu_that_is_not_there_is_refused_at_once(folder: ImageFolder, device: Any, translate: bool) -> None:
    folder.transform = TRANSFORM
    message = rf"device='{torch.device(device)}', but torch sees .* CUDA device\(s\). Omit device to use a GPU"
    for dataset in (folder, [torch.zeros(3)]):
        with pytest.raises(ValueError, match=message):
            DataLoader(dataset, device=device, translate=translate)
        loader = DataLoader(dataset, device="cpu", translate=translate)
        loader.device = device
        with pytest.raises(ValueError, match=message):
            iter(loader)
