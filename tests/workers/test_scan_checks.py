"""Damaged scans are noticed when a sample is read for the first time, and remembered."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, EncodedImage, ImageError, compile_transforms, wrap
from proxyloader.data.image_calls import image_calls_in
from proxyloader.data.jpeg_integrity import ScanChecker, damage_of
from proxyloader.data.placeholders import Proxy
from proxyloader.make_dataset import photograph
from proxyloader.workers.dataset_state import StatefulStream
from proxyloader.workers.fetch import Fetcher
from proxyloader.workers.packing import Packer
from proxyloader.workers.request_sampler import BatchRequest
from proxyloader.workers.scan_checks import IntegrityTable, ScanStatus, leave_to_pillow
from proxyloader.workers.worker import PackStream

from ..integration.test_bad_input import broken_tables
from ..limits import WAIT_S
from ..outcomes import raises

TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Strict checks of these files would be known from earlier tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def jpeg(**options: Any) -> bytes:
    buffer = io.BytesIO()
    photograph(0, size=(90, 61)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def cut(data: bytes) -> bytes:
    """The scan ends in the middle of the picture, and the file as it should."""
    return data[: len(data) // 2] + b"\xff\xd9"


def looked_at(
    data: bytes, known: ScanStatus, max_pixels: int | None = None, is_strict: bool = True
) -> tuple[bytes, bool]:
    """What a worker makes of a file, and whether it found damage."""
    transform = dataclasses.replace(compile_transforms(TRANSFORM), max_pixels=max_pixels)
    sample = transform(EncodedImage.from_bytes(data, max_pixels=max_pixels)), 0
    found = leave_to_pillow(sample, known, None if known is ScanStatus.UNCHECKED else ScanChecker(is_strict))
    (call,) = image_calls_in(sample)
    return bytes(call.inputs[0]), found


def pixels_of(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_a_damaged_image_is_decoded_by_pillow_where_it_is_looked_at_or_known() -> None:
    data, damaged = jpeg(), cut(jpeg())
    for known in (ScanStatus.UNKNOWN, ScanStatus.DAMAGED):
        image, found = looked_at(damaged, known)
        assert found and image.startswith(b"P6") and np.array_equal(pixels_of(image), pixels_of(damaged))
    for known in (ScanStatus.UNKNOWN, ScanStatus.SOUND, ScanStatus.UNCHECKED):
        assert looked_at(data, known) == (data, False)
    assert looked_at(damaged, ScanStatus.UNCHECKED) == (damaged, False), "nobody asked"


def test_the_strict_check_leaves_a_progressive_image_to_pillow_and_does_not_take_it_for_damaged() -> None:
    data = jpeg(progressive=True)
    for known in ScanStatus:
        image, found = looked_at(data, known)
        assert image.startswith(b"P6") == (known is not ScanStatus.UNCHECKED) and not found
        assert np.array_equal(pixels_of(image), pixels_of(data))


def test_the_default_check_takes_progressive_images_for_what_they_are() -> None:
    data = jpeg(progressive=True)
    for known in (ScanStatus.UNKNOWN, ScanStatus.SOUND):
        assert looked_at(data, known, is_strict=False) == (data, False)
    scan = data.rindex(b"\xff\xda")
    damaged = {
        "no last scan": data[:scan] + b"\xff\xd9",
        "a lost block": data[: scan + 40] + bytes(64) + data[scan + 104 :],
        "broken tables": data.replace(b"\xff\xc4\x00", b"\xff\xc4\x40", 1),
    }
    for name, file in damaged.items():
        try:
            image, _ = looked_at(file, ScanStatus.UNKNOWN, is_strict=False)
        except ImageError:
            continue
        assert image.startswith(b"P6") and np.array_equal(pixels_of(image), pixels_of(file)), name


def test_a_limit_on_pixels_that_was_raised_holds_where_pillow_decodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for data in (jpeg(progressive=True), cut(jpeg())):
        with raises(ImageError, code="too-large"):
            EncodedImage.from_bytes(data)
        assert looked_at(data, ScanStatus.UNKNOWN, max_pixels=10_000)[0].startswith(b"P6")


def test_a_file_that_was_sound_is_looked_at_again_where_it_does_not_end_as_a_jpeg() -> None:
    data = jpeg()
    with raises(ImageError, code="undecodable"):
        looked_at(data[: len(data) // 2], ScanStatus.SOUND)
    assert looked_at(data + b"more", ScanStatus.SOUND) == (data, False)


def test_scans_that_make_no_sense_are_left_to_pillow_whoever_looks_and_remembered() -> None:
    data = jpeg()
    middle = data.index(b"\xff\x00", len(data) // 2)
    stray = data[:middle] + b"\xff\xd3" + data[middle:]
    for known in (ScanStatus.UNKNOWN, ScanStatus.DAMAGED, ScanStatus.UNCHECKED):
        image, found = looked_at(stray, known)
        assert found and image.startswith(b"P6") and np.array_equal(pixels_of(image), pixels_of(stray))
    progressive = jpeg(progressive=True)
    without_the_last = progressive[: progressive.rindex(b"\xff\xda")] + b"\xff\xd9"
    assert all(looked_at(without_the_last, known)[0].startswith(b"P6") for known in ScanStatus)


def test_what_a_pipeline_by_hand_is_given_is_not_looked_at() -> None:
    encoded = np.frombuffer(cut(jpeg()), np.uint8)
    sample = Proxy("server", ("images",), 1)(encoded)
    assert not leave_to_pillow(
        [sample, compile_transforms(TRANSFORM)(Image.new("RGB", (9, 9)))], ScanStatus.DAMAGED, None
    )
    assert np.array_equal(sample.call.inputs[0], encoded)


def test_what_is_known_is_kept_by_index() -> None:
    known = IntegrityTable(10)
    assert known.of(3) is ScanStatus.UNKNOWN
    for index in (3, np.int64(4), torch.tensor(5), 9):
        known.note(index, is_damaged=index == 4)
    assert [known.of(index) for index in (np.int32(3), 4, 5, 6, torch.tensor(9))] == [
        ScanStatus.SOUND,
        ScanStatus.DAMAGED,
        ScanStatus.SOUND,
        ScanStatus.UNKNOWN,
        ScanStatus.SOUND,
    ]
    for other in ("a", (1, 2), 10, 1.5, None, slice(None), [6, 7]):
        known.note(other, is_damaged=True)
        assert known.of(other) is ScanStatus.UNKNOWN
    assert known.of(6) is IntegrityTable(0).of(0) is ScanStatus.UNKNOWN


def note(known: IntegrityTable) -> None:
    assert known.of(1) is ScanStatus.SOUND
    known.note(2, is_damaged=True)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_what_a_worker_finds_is_known_to_all(method: Any) -> None:
    known = IntegrityTable(3)
    known.note(1, is_damaged=False)
    process = multiprocessing.get_context(method).Process(target=note, args=(known,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [known.of(index) for index in range(3)] == [ScanStatus.UNKNOWN, ScanStatus.SOUND, ScanStatus.DAMAGED]


def test_without_memory_to_share_each_process_knows_what_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("no memory")

    monkeypatch.setattr("os.memfd_create", refuse)
    known = IntegrityTable(3)
    known.note(1, is_damaged=True)
    assert [known.of(index) for index in range(3)] == [ScanStatus.UNKNOWN, ScanStatus.DAMAGED, ScanStatus.UNKNOWN]


@pytest.fixture
def damaged_folder(photos: Path, tmp_path: Path) -> ImageFolder:
    """48 photographs, of which number 5 and 20 end too early."""
    for path in photos.rglob("*.jpg"):
        copy = tmp_path / path.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    dataset = ImageFolder(str(tmp_path), TRANSFORM)
    for index in (5, 20):
        path = Path(dataset.samples[index][0])
        path.write_bytes(cut(path.read_bytes()))
    return dataset


DAMAGED = (5, 20)
BATCHES = [BatchRequest(k, 0, list(range(k, k + 8)), True, None) for k in range(0, 48, 8)]


def is_by_pillow(sample: Any) -> bool:
    (call,) = image_calls_in(sample)
    return bytes(call.inputs[0][:2]) == b"P6"


class Looks:
    """Counts the JPEGs whose scans are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("proxyloader.data.jpeg_integrity.damage_of", self)

    def __call__(self, data: bytes) -> str:
        self.count += 1
        return damage_of(data)


def test_each_sample_is_looked_at_in_its_first_epoch_and_damaged_ones_are_known_then(
    damaged_folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher, looks = Fetcher(wrap(damaged_folder), scans=IntegrityTable(48, is_strict=True)), Looks(monkeypatch)
    for _ in range(3):
        for request in BATCHES:
            fetched = fetcher(request)
            by_pillow = [index for index, each in zip(fetched.indices, fetched.samples) if is_by_pillow(each)]
            assert by_pillow == [i for i in request.indices if i in DAMAGED]
        assert looks.count == 48


def test_what_cannot_be_read_is_not_taken_for_sound(damaged_folder: ImageFolder) -> None:
    known = IntegrityTable(48, is_strict=True)
    Path(damaged_folder.samples[1][0]).write_bytes(b"")
    fetched = Fetcher(wrap(damaged_folder), "skip", scans=known)(BATCHES[0])
    assert [each.index for each in fetched.unreadable] == [1]
    assert [known.of(k) for k in range(3)] == [ScanStatus.SOUND, ScanStatus.UNKNOWN, ScanStatus.SOUND]


class Lists(ImageFolder):
    """Reads a batch at once, and counts how often."""

    read = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.read += 1
        return [self[index] for index in indices]


def test_a_dataset_that_reads_lists_goes_on_doing_so_whatever_is_damaged(
    damaged_folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, looks = wrap(Lists(damaged_folder.root, TRANSFORM)), Looks(monkeypatch)
    fetcher = Fetcher(dataset, scans=IntegrityTable(48, is_strict=True))
    for _ in range(2):
        dataset.read = 0
        for request in BATCHES:
            by_pillow = [i for i, sample in zip(request.indices, fetcher(request).samples) if is_by_pillow(sample)]
            assert by_pillow == [i for i in request.indices if i in DAMAGED]
        assert dataset.read == 6 and looks.count == 48


class Threads(Lists):
    """Reads a batch at once, with threads of its own."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.__getitem__, indices))


class Whole(Lists):
    """Gives batches, not lists of samples."""

    def __getitems__(self, indices: list[int]) -> Any:
        return default_collate([self[index] for index in indices])


def test_images_that_a_datasets_own_threads_open_are_looked_at_too(damaged_folder: ImageFolder) -> None:
    fetcher = Fetcher(wrap(Threads(damaged_folder.root, TRANSFORM)), scans=IntegrityTable(48, is_strict=True))
    for request in BATCHES:
        by_pillow = [i for i, sample in zip(request.indices, fetcher(request).samples) if is_by_pillow(sample)]
        assert by_pillow == [i for i in request.indices if i in DAMAGED]


def test_in_a_batch_of_the_datasets_own_making_all_are_looked_at(
    damaged_folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = Fetcher(wrap(Whole(damaged_folder.root, TRANSFORM)), scans=IntegrityTable(48, is_strict=True))
    looks = Looks(monkeypatch)
    for _ in range(2):
        for request in BATCHES:
            images, _ = fetcher(request).samples
            by_pillow = [bytes(call.inputs[0][:2]) == b"P6" for call in image_calls_in(images)]
            assert by_pillow == [index in DAMAGED for index in request.indices]
        assert looks.count == 48


def test_two_threads_that_load_do_not_mistake_each_others_images(damaged_folder: ImageFolder) -> None:
    """One reads what is known to be sound, the other what nobody has looked at yet."""
    at_once = threading.Barrier(2)

    class Meet(ImageFolder):
        """Both threads are between opening one image and the next at the same time."""

        def __getitem__(self, index: int) -> Any:
            at_once.wait(WAIT_S)
            sample = super().__getitem__(index)
            at_once.wait(WAIT_S)
            return sample

    dataset, request = wrap(Meet(damaged_folder.root, TRANSFORM)), BATCHES[0]
    for unknown in ((True, False), (False, True), (True, True)):
        fetchers = []
        for each in unknown:
            known = IntegrityTable(48, is_strict=True)
            for index in () if each else request.indices:
                known.note(index, is_damaged=False)
            fetchers.append(Fetcher(dataset, scans=known))
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(Fetcher.__call__, fetchers, [request] * 2))
        for fetched, each in zip(found, unknown):
            assert [is_by_pillow(sample) for sample in fetched.samples] == [
                index == 5 and each for index in request.indices
            ]


@pytest.mark.parametrize("check_scans", [True, False])
def test_replacements_are_looked_at_only_where_that_was_asked_for(
    damaged_folder: ImageFolder, check_scans: bool
) -> None:
    fetcher = Fetcher(
        wrap(damaged_folder), "replace", scans=IntegrityTable(48, is_strict=True) if check_scans else None
    )
    index, sample = fetcher.next_readable(4, 0, [])
    assert index == 5 and is_by_pillow(sample) is check_scans


def test_a_table_is_kept_as_long_as_the_check_is_the_same() -> None:
    first = IntegrityTable.for_dataset([0] * 5, False, None)
    first.note(4, is_damaged=True)
    assert IntegrityTable.for_dataset([0] * 5, False, first) is first
    strict = IntegrityTable.for_dataset([0] * 5, True, first)
    assert strict.checker.is_strict and strict.of(4) is ScanStatus.UNKNOWN
    assert IntegrityTable.for_dataset(iter([0]), False, None).of(0) is ScanStatus.UNKNOWN


@pytest.mark.parametrize("check_scans, is_strict", [(True, False), ("strict", True), (False, None)])
def test_scans_are_checked_where_a_gpu_decodes(
    monkeypatch: pytest.MonkeyPatch, check_scans: Any, is_strict: bool | None
) -> None:
    loader = DataLoader(list(range(8)), 4, check_scans=check_scans, device="cpu")
    iter(loader)
    assert loader._scans is None
    monkeypatch.setattr(type(loader._options), "on_gpu", True)
    iter(loader)
    assert (None if loader._scans is None else loader._scans.checker.is_strict) is is_strict


def test_damaged_scans_show_what_pillow_makes_of_them_in_every_epoch(
    damaged_folder: ImageFolder, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stock = torch.stack([image for image, _ in damaged_folder])
    for workers in (0, 2):
        loader = DataLoader(damaged_folder, 8, num_workers=workers, device=device, check_scans="strict")
        for _ in range(2):
            ours = torch.cat([images.cpu() for images, _ in loader])
            assert (ours - stock).abs().mean() <= 0.5 / 255 and (ours - stock).abs().max() <= 16 / 255


class Opens(Dataset[Any]):
    def __init__(self, folder: ImageFolder) -> None:
        self.paths, self.transform = [path for path, _ in folder.samples], TRANSFORM

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.transform(EncodedImage.open(self.paths[index]))


def test_a_streams_images_are_looked_at_each_time(damaged_folder: ImageFolder) -> None:
    dataset = wrap(Opens(damaged_folder))
    Path(dataset.paths[6]).write_bytes(jpeg(progressive=True))  # which the strict check leaves to Pillow
    samples = [dataset[k] for k in range(4, 8)]
    packer = Packer(default_collate, None, 8)
    batch = PackStream(
        Fetcher(dataset, scans=IntegrityTable(0, is_strict=True)),
        packer,
        StatefulStream(dataset, {}, None),
        batched=True,
    )(samples).opened
    assert batch is not None
    images = batch.runs[0].inputs[0].views(batch.memory(None))
    assert [bytes(image[:2]) == b"P6" for image in images] == [False, True, True, False]


def test_a_streams_images_that_pillow_cannot_decode_either_are_left_out_alone(damaged_folder: ImageFolder) -> None:
    dataset = wrap(Opens(damaged_folder))
    broken_tables(Path(dataset.paths[6]))
    for on_error in ("raise", "skip"):
        fetcher = Fetcher(dataset, on_error, scans=IntegrityTable(0, is_strict=True))
        pack = PackStream(
            fetcher, Packer(default_collate, None, 8), StatefulStream(fetcher.dataset, {}, None), batched=True
        )
        if on_error == "raise":
            with pytest.raises(ImageError, match=dataset.paths[6]):
                pack([dataset[k] for k in range(4, 8)])
            continue
        batch = pack([dataset[k] for k in range(4, 8)]).opened
        assert batch is not None and len(batch.runs[0]) == 3
        assert [each.path for each in batch.unreadable] == [dataset.paths[6]]
        assert pack([dataset[6]]).open(None, None).is_empty
