"""Files are read straight into a batch's slot, and whoever keeps what was read has it for ever."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, EncodedImage
from proxyloader.arena import Arena
from proxyloader.batch_memory import BatchMemory
from proxyloader.spelled import numbers_in, spell_dataset

PICTURES, BATCH = 48, 4
TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])


@pytest.fixture(autouse=True)
def as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchMemory, "receives_files", True)


@pytest.fixture(scope="module")
def spelled_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled"), PICTURES)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{size}.jpg" for size in (20, 300, 20, 90)]
    for path in paths:
        Image.effect_noise((int(path.stem), 40), 90).convert("RGB").save(path)
    return paths


def in_slot(arena: Arena, slot: int, offset: int, size_bytes: int) -> bytes:
    return arena.memory(slot, offset + size_bytes)[offset : offset + size_bytes].tobytes()


# --- the memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [1, 1 << 20])
def test_files_lie_in_the_slot_before_anybody_packs_them(files: list[Path], slot_bytes: int) -> None:
    arena = Arena(2, slot_bytes)
    memory = BatchMemory(arena, 1)
    with memory.open_for_files():
        images = [EncodedImage.open(path) for path in files]
    taken = memory.size_bytes
    for image, path in zip(images, files):
        array = np.frombuffer(image.content, np.uint8)
        offset = memory.add(array)
        assert in_slot(arena, 1, offset, len(array)) == path.read_bytes() == image.data
        assert memory.add(array) == offset, "it is written once, however often it is used"
    assert memory.size_bytes == taken
    numbers = np.arange(100)
    assert in_slot(arena, 1, memory.add(numbers), numbers.nbytes) == numbers.tobytes()


def test_what_is_not_read_into_the_slot_is_copied_there(files: list[Path]) -> None:
    arena, before = Arena(1, 1), EncodedImage.open(files[0])
    memory = BatchMemory(arena, 0)
    with memory.open_for_files():
        image = EncodedImage.open(files[1])
        part = np.frombuffer(image.content, np.uint8)[::2]
    for array in (np.frombuffer(before.content, np.uint8), part):
        assert in_slot(arena, 0, memory.add(array), array.nbytes) == array.tobytes()


def test_what_pillow_decodes_leaves_its_place_to_the_next(files: list[Path], tmp_path: Path) -> None:
    Image.effect_noise((300, 300), 90).convert("RGB").save(tmp_path / "a.png")
    memory = BatchMemory(Arena(1, 1 << 20), 0)
    with memory.open_for_files():
        image = EncodedImage.open(tmp_path / "a.png")
        assert memory.size_bytes == 0 and image.data.startswith(b"P6")
        assert EncodedImage.open(files[0]).data == files[0].read_bytes()


def test_only_the_thread_and_the_process_that_fetch_read_into_the_slot(files: list[Path]) -> None:
    memory = BatchMemory(Arena(1, 1 << 20), 0)
    assert BatchMemory.receiver() is None
    with memory.open_for_files(), ThreadPoolExecutor(1) as pool:
        assert BatchMemory.receiver() is memory
        assert pool.submit(BatchMemory.receiver).result() is None
        assert pool.submit(EncodedImage.open, files[0]).result().data == files[0].read_bytes()
        child = os.fork()
        if not child:
            os._exit(int(BatchMemory.receiver() is not None))
        assert os.waitpid(child, 0)[1] == 0
    assert BatchMemory.receiver() is None and memory.size_bytes == 0


def test_a_file_that_has_another_size_than_it_says_is_read_as_ever(files: list[Path], tmp_path: Path) -> None:
    memory = BatchMemory(Arena(1, 1 << 20), 0)
    content = files[0].read_bytes()
    os.mkfifo(tmp_path / "fifo.jpg")
    threading.Thread(target=(tmp_path / "fifo.jpg").write_bytes, args=(content,), daemon=True).start()
    with memory.open_for_files():
        assert EncodedImage.open(tmp_path / "fifo.jpg").data == content
        with files[0].open("rb") as file:
            assert memory.read(file.fileno(), len(content) - 1) is None, "it has grown"
            assert memory.read(file.fileno(), len(content) + 1) is None, "it was cut"
    assert memory.size_bytes == 0


# --- who keeps what was read -----------------------------------------------------------------------------------------


def overwritten(arena: Arena, slot: int) -> None:
    arena.memory(slot, 1)[:] = 255


KEPT = {
    "image": lambda image: image,
    "content": lambda image: image.content,
    "array": lambda image: np.frombuffer(image.content, np.uint8),
    "part of it": lambda image: np.frombuffer(image.content, np.uint8)[1:],
    "tensor": lambda image: torch.from_numpy(np.frombuffer(image.content, np.uint8)),
    "copied image": lambda image: [copy.copy(image), image][1],
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("slot_bytes", [1, 1 << 20])
def test_what_is_kept_stays_as_it_was_when_the_slot_is_another_batchs(
    files: list[Path], kind: str, slot_bytes: int
) -> None:
    arena, contents = Arena(1, slot_bytes), [path.read_bytes() for path in files]
    memory = BatchMemory(arena, 0)
    with memory.open_for_files():
        kept = [KEPT[kind](EncodedImage.open(path)) for path in files]
    offsets = [memory.add(np.frombuffer(content, np.uint8)) for content in contents]
    memory.close()
    for offset, content in zip(offsets, contents):
        assert in_slot(arena, 0, offset, len(content)) == content, "those who read the slot see it as before"
    overwritten(arena, 0)
    gc.collect()
    for each, content in zip(kept, contents):
        found = each.data if isinstance(each, EncodedImage) else bytes(each)
        assert found == content[len(content) - len(found) :] and len(found) >= len(content) - 1
    assert not BatchMemory.receives_files, "and this process does not do it again"
    again = BatchMemory(arena, 0)
    with again.open_for_files():
        assert isinstance(EncodedImage.open(files[0]).content, bytes)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda image: pickle.loads(pickle.dumps(image))])
def test_a_copy_of_an_image_has_bytes_of_its_own(files: list[Path], made: Any) -> None:
    arena = Arena(1, 1 << 20)
    memory = BatchMemory(arena, 0)
    with memory.open_for_files():
        image = EncodedImage.open(files[0])
        copied = made(image)
    assert copied == image and hash(copied) == hash(image) and isinstance(copied.content, bytes)
    del image
    memory.close()
    assert BatchMemory.receives_files, "nobody keeps anything of the slot"
    overwritten(arena, 0)
    assert copied.data == files[0].read_bytes()


def test_an_image_cannot_be_written_to(files: list[Path]) -> None:
    memory = BatchMemory(Arena(1, 1 << 20), 0)
    with memory.open_for_files():
        content = EncodedImage.open(files[0]).content
    with pytest.raises(TypeError, match="cannot modify read-only memory"):
        content[0] = 0  # type: ignore[index]
    assert not np.frombuffer(content, np.uint8).flags.writeable


# --- datasets that keep what they opened -----------------------------------------------------------------------------


class Spelled(ImageFolder):
    """Labels are the pictures' numbers."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), transform=TRANSFORM)

    def __getitem__(self, index: int) -> Any:
        return self.transformed(self.samples[index][0]), index

    def transformed(self, path: str) -> Any:
        assert self.transform is not None
        return self.transform(self.loader(path))


class KeepsImages(Spelled):
    """Opens each file once."""

    @functools.cached_property
    def opened(self) -> Any:
        return functools.cache(self.loader)

    def transformed(self, path: str) -> Any:
        assert self.transform is not None
        return self.transform(self.opened(path))


class KeepsSamples(Spelled):
    """Asks its transform once for each file."""

    @functools.cached_property
    def made(self) -> Any:
        return functools.cache(super().transformed)

    def transformed(self, path: str) -> Any:
        return self.made(path)


class KeepsBytes(Spelled):
    """Keeps what travels, and hands it to the transform."""

    @functools.cached_property
    def read(self) -> Any:
        return functools.cache(lambda path: self.loader(path).data)

    def transformed(self, path: str) -> Any:
        assert self.transform is not None
        return self.transform(self.read(path))


class KeepsTheLast(Spelled):
    """Gives each picture with the one that was opened before."""

    last: Any = None

    def __getitem__(self, index: int) -> Any:
        assert self.transform is not None
        before, self.last = self.last, (self.loader(self.samples[index][0]), index)
        image, number = before or self.last
        return self.transform(image), number


class ReadsAhead(Spelled):
    """A thread opens the next picture while this one is transformed."""

    @functools.cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2)

    def __getitem__(self, index: int) -> Any:
        assert self.transform is not None
        ahead = self.pool.submit(self._slowly, self.samples[(index + 1) % len(self)][0])
        image = self.loader(self.samples[index][0])
        time.sleep(0.001)
        self.ahead = ahead
        return self.transform(image), index

    def _slowly(self, path: str) -> Any:
        time.sleep(0.002)
        return self.loader(path)


class ReadsTwice(Spelled):
    """Opens another picture before each one, and lets go of it."""

    def transformed(self, path: str) -> Any:
        self.loader(self.samples[0][0])
        return super().transformed(path)


def batches_of(dataset: Any, epochs: int = 3, **arguments: Any) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True, **arguments
    )
    for _ in range(epochs):
        yield from loader


@pytest.mark.parametrize("kind", [KeepsImages, KeepsSamples, KeepsBytes, KeepsTheLast, ReadsAhead, ReadsTwice])
def test_a_dataset_may_keep_what_it_opened(kind: type[Spelled], spelled_root: Path, device: str) -> None:
    seen = 0
    for images, numbers in batches_of(kind(spelled_root), device=device):
        assert numbers_in(images, white=1.0) == numbers.tolist()
        seen += len(numbers)
    assert seen == 3 * PICTURES
