"""Slots are lent and come back once, batches are packed into them unchanged, files are read directly into them.

Their way to another process is that of test_scan_checks.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, InputError
from proxyloader.data.batch_memory import ALIGNMENT_BYTES, batch_memory
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.placeholders import ProxyInputs, ProxySample
from proxyloader.workers.arena import Arena
from proxyloader.workers.fetch import Fetcher
from proxyloader.workers.packing import ContentUnpickler, Packer
from proxyloader.workers.request_sampler import BatchRequest
from proxyloader.workers.worker import PackedDataset

from ..faults import in_thread
from ..undecoded import opened_late


class Reads:
    """A reader that finishes when told to, or, unless it was abandoned, when waited for."""

    def __init__(self, is_abandoned: bool = False) -> None:
        self.finished, self.is_abandoned = False, is_abandoned

    def inputs_released(self) -> bool:
        return self.finished

    def wait_until_read(self) -> None:
        self.finished = not self.is_abandoned


def test_every_slot_is_lent_once_and_has_a_byte() -> None:
    arena = Arena(3)
    assert sorted(filter(lambda slot: slot is not None, (arena.acquire() for _ in range(3)))) == [0, 1, 2]
    assert arena.acquire() is None
    arena.release(1)
    assert (arena.acquire(), arena.acquire()) == (1, None)
    arena = Arena(1_000)
    arena.mark_ready(999)
    assert arena.is_ready(999) and not arena.is_ready(998)


def test_slots_share_no_bytes_and_keep_what_was_written() -> None:
    arena = Arena(2)
    arena.memory(0)[[0, -1]] = 1
    arena.memory(1)[[0, -1]] = 2
    assert [arena.memory(slot)[[0, -1]].tolist() for slot in range(2)] == [[1, 1], [2, 2]]
    for size_bytes in (10, 70_000, 300_000, 5_000_000, 20):
        before = bytes(arena.memory(1)[:10])
        memory = arena.memory_to_write(1, size_bytes)
        assert len(memory) >= size_bytes and bytes(memory[:10]) == before
        memory[:size_bytes] = size_bytes % 251
        assert (arena.memory(1)[:size_bytes] == size_bytes % 251).all()


def test_a_slot_that_is_still_read_is_lent_when_no_other_is_free_and_its_reader_was_waited_for() -> None:
    arena, readers = Arena(2), [Reads(), Reads()]
    arena.release(arena.acquire(), readers[:1])
    assert arena.acquire() == 1 and not readers[0].finished
    arena.release(1, readers[1:])
    assert arena.acquire() == 0
    assert [reader.finished for reader in readers] == [True, False]
    readers[1].finished = True
    assert arena.acquire() == 1
    arena = Arena(1)
    arena.release(arena.acquire(), [Reads(is_abandoned=True)])
    assert arena.acquire() is None


def test_ready_is_per_loan() -> None:
    arena = Arena(2)
    slot = arena.acquire()
    assert slot is not None and not arena.is_ready(slot)
    arena.mark_ready(slot)
    assert arena.is_ready(slot)
    arena.release(slot)
    lent = [arena.acquire(), arena.acquire()]
    assert not any(arena.is_ready(slot) for slot in lent if slot is not None)


# --- packing ---------------------------------------------------------------------------------------------------------

arrays = st.lists(
    hnp.arrays(
        st.sampled_from(["uint8", "float32", "int64"]).map(np.dtype), st.tuples(st.integers(0, 40), st.integers(1, 3))
    ),
    min_size=1,
    max_size=6,
)


@given(arrays=arrays, has_slot=st.booleans())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_are_preserved_in_a_slot_and_without_one(arrays: list[Any], has_slot: bool) -> None:
    arrays = [array for array in arrays if array.dtype == arrays[0].dtype]
    arena = Arena(1) if has_slot else None
    rows = [np.float32([k, -k]) for k in range(len(arrays))]
    calls = [ProxyInputs("s", (np.ascontiguousarray(array), row)) for array, row in zip(arrays, rows)]
    samples = [(ProxySample(call, 0), k) for k, call in enumerate(calls)]
    request = BatchRequest(0, 0, [0], True, arena.acquire() if arena is not None else None)
    batch: Any = pickle.loads(pickle.dumps(Packer(default_collate, arena, 256)(samples, request)))
    content = ContentUnpickler(batch.content, lambda place: place, False, batch.objects, torch.device("cpu")).load()
    assert content[0] == (0, 0) and content[1].tolist() == list(range(len(arrays)))
    found, found_rows = map(list, batch.read(batch.runs[0], arena)[0])
    for ours, theirs in zip(found, arrays):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    assert np.array_equal(found_rows, rows)


def test_mixed_kinds_of_input_in_a_batch_are_refused() -> None:
    calls = [ProxyInputs("s", (np.zeros(1), array), names=("a", "b")) for array in (np.uint8([1]), np.float32([1]))]
    with pytest.raises(
        InputError, match="input 'b' must have one dtype .* per batch, got float32 with 1 .*, uint8 with"
    ):
        Packer(default_collate, None, 4)(list(map(ProxySample, calls)))


# --- files that are read into a slot ---------------------------------------------------------------------------------

SLOT_BYTES = 1 << 20


@pytest.fixture
def memory() -> Iterator[np.ndarray]:
    memory = np.zeros(SLOT_BYTES, np.uint8)
    batch_memory.begin(memory)
    yield memory
    batch_memory.end()


@pytest.fixture
def path(photos: Path) -> Path:
    return min(photos.rglob("*.jpg"))


def test_a_file_is_read_into_the_batch_memory(memory: np.ndarray, path: Path) -> None:
    image = EncodedImage.open(str(path))
    assert not isinstance(image.buffer, bytes) and image.buffer == path.read_bytes()
    array = np.frombuffer(image.buffer, np.uint8)
    assert batch_memory.find_offset(array) == 0 and np.shares_memory(array, memory)
    other = np.frombuffer(EncodedImage.open(str(path)).buffer, np.uint8)
    offset = batch_memory.find_offset(other)
    assert offset is not None and offset > path.stat().st_size and offset % ALIGNMENT_BYTES == 0
    assert batch_memory.find_offset(np.zeros(8, np.uint8)) is None


def test_only_kept_images_are_copied_when_the_batch_is_sent(
    memory: np.ndarray, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, detach_data = [], EncodedImage.detach_data
    monkeypatch.setattr(EncodedImage, "detach_data", lambda image: (copied.append(image), detach_data(image)))
    kept, of_pillow = EncodedImage.open(str(path)), Image.open(path)
    for _ in range(3):
        EncodedImage.open(str(path))
    batch_memory.end()
    memory[:] = 0
    assert copied == [kept] and copied[0] is kept and kept.buffer == kept.data == path.read_bytes()
    assert np.array_equal(np.asarray(kept.decoded()), np.asarray(of_pillow.convert("RGB")))


def test_an_image_in_batch_memory_behaves_like_any_other(memory: np.ndarray, path: Path) -> None:
    image, same = EncodedImage.open(str(path)), EncodedImage.from_bytes(path.read_bytes(), str(path))
    for other in (copy.copy(image), copy.deepcopy(image), pickle.loads(pickle.dumps(image)), image):
        assert other.data == same.data and repr(other) == repr(same)
        assert isinstance(other.data, bytes)
    with pytest.raises(AttributeError, match="pixels"):
        image.pixels  # noqa: B018


def test_files_are_read_elsewhere_if_it_is_full_or_inactive_and_in_other_threads(path: Path) -> None:
    size = path.stat().st_size
    batch_memory.begin(np.zeros(2 * size, np.uint8))
    images = [in_thread(lambda: EncodedImage.open(str(path)))]
    images += [EncodedImage.open(str(path)) for _ in range(3)]
    assert [isinstance(image.buffer, bytes) for image in images] == [True, False, True, True]
    batch_memory.end()
    images.append(EncodedImage.open(str(path)))
    assert all(image.data == path.read_bytes() for image in images) and isinstance(images[-1].buffer, bytes)


@pytest.mark.parametrize("kind", ["several sizes", "one size", "read five times"])
def test_a_batch_arrives_unchanged_and_takes_little_space(photos: Path, tmp_path: Path, kind: str) -> None:
    files = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))[:8]]
    if kind == "one size":
        sizes = [8 + max(map(len, files)) - len(data) for data in files]  # of comments in the files
        comments = [b"\xff\xfe" + (size - 2).to_bytes(2, "big") + bytes(size - 4) for size in sizes]
        files = [data[:2] + comment + data[2:] for data, comment in zip(files, comments)]
    arena = Arena(2)
    (tmp_path / "0").mkdir()
    for number, data in enumerate(files):
        (tmp_path / "0" / f"{number:03d}.jpg").write_bytes(data)
    dataset = ImageFolder(tmp_path, transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()]))
    if kind == "read five times":
        reads = dataset.loader
        dataset.loader = lambda path: [reads(path) for _ in range(5)][-1]
    packed = PackedDataset(Fetcher(dataset), Packer(default_collate, arena, 8), arena, {})
    for slot in (0, 1, 0, 1):
        with opened_late():
            batch = packed.__getitems__(BatchRequest(slot, 0, list(range(8)), batched=True, slot=slot))
        assert batch.failure is None
        assert batch.size_bytes < 2.5 * sum(map(len, files))
        (run,) = batch.runs
        assert [part.tobytes() for part in batch.read(run, arena)[0][0]] == files


class ReadThere(ImageFolder):
    """Images with whether their file was read into the memory of the batch."""

    def __getitem__(self, index: int) -> Any:
        image = self.transform(Image.open(self.samples[index][0]).convert("RGB"))
        return image, batch_memory.used_bytes > 0


def test_a_worker_reads_all_batches_but_the_first_into_its_slot(photos: Path) -> None:
    dataset = ReadThere(str(photos), transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()]))
    loader = DataLoader(dataset, len(dataset) - 1, num_workers=1, device="cpu")
    assert [bool(is_there.all()) for _, is_there in loader] == [False, True]  # at first it knows no size
