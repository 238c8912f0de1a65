"""Files are read directly into the slot of their batch; images that are kept get bytes of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader
from proxyloader.data.batch_memory import ALIGNMENT_BYTES, batch_memory
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.workers.arena import Arena
from proxyloader.workers.fetch import Fetcher
from proxyloader.workers.packing import Packer
from proxyloader.workers.request_sampler import BatchRequest
from proxyloader.workers.worker import PackedDataset

from ..faults import in_thread
from ..undecoded import opened_late

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


def folder_of(root: Path, files: list[bytes]) -> ImageFolder:
    (root / "0").mkdir(parents=True)
    for number, data in enumerate(files):
        (root / "0" / f"{number:03d}.jpg").write_bytes(data)
    return ImageFolder(root, transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()]))


def with_comment(data: bytes, size: int) -> bytes:
    """A JPEG with a comment that makes it longer by ``size`` bytes."""
    return data[:2] + b"\xff\xfe" + (size - 2).to_bytes(2, "big") + bytes(size - 4) + data[2:]


@pytest.mark.parametrize("one_size", [True, False])
@pytest.mark.parametrize("slot_bytes", [4096, SLOT_BYTES])
def test_a_batch_arrives_unchanged(photos: Path, tmp_path: Path, one_size: bool, slot_bytes: int) -> None:
    files = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))[:8]]
    if one_size:
        files = [with_comment(data, 8 + max(map(len, files)) - len(data)) for data in files]
    arena = Arena(2, slot_bytes)
    dataset = folder_of(tmp_path, files)
    packed = PackedDataset(Fetcher(dataset), Packer(default_collate, arena, 8), arena, {}, False)
    for slot in (0, 1, 0, 1):
        with opened_late():
            batch = packed.__getitems__(BatchRequest(slot, 0, list(range(8)), batched=True, slot=slot)).batch
        assert batch is not None and batch.failure is None
        (run,) = batch.runs
        assert [part.tobytes() for part in batch.read(run, arena)[0][0]] == files


def test_files_that_are_not_sent_take_little_space_in_a_slot(photos: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))[:8]]
    arena, dataset = Arena(1, SLOT_BYTES), folder_of(tmp_path, files)
    reads = dataset.loader
    dataset.loader = lambda path: [reads(path) for _ in range(5)][-1]
    packed = PackedDataset(Fetcher(dataset), Packer(default_collate, arena, 8), arena, {}, False)
    for number in range(4):
        with opened_late():
            batch = packed.__getitems__(BatchRequest(number, 0, list(range(8)), batched=True, slot=0)).batch
        assert batch is not None and batch.failure is None
        assert batch.size_bytes < 2.5 * sum(map(len, files))
        assert [part.tobytes() for part in batch.read(batch.runs[0], arena)[0][0]] == files


class ReadThere(ImageFolder):
    """Images with whether their file was read into the memory of the batch."""

    def __getitem__(self, index: int) -> Any:
        image = self.transform(Image.open(self.samples[index][0]).convert("RGB"))
        return image, batch_memory.used_bytes > 0


def test_a_worker_reads_all_batches_but_the_first_into_its_slot(photos: Path) -> None:
    dataset = ReadThere(str(photos), transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()]))
    loader = DataLoader(dataset, len(dataset) - 1, num_workers=1, device="cpu")
    assert [bool(is_there.all()) for _, is_there in loader] == [False, True]  # at first it knows no size
