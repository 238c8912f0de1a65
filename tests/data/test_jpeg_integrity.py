"""Damaged scans are noticed when a sample is opened for the first time, and remembered."""

from __future__ import annotations

import dataclasses
import io
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
from proxyloader.data.jpeg_integrity import IntegrityTable, ScanStatus, is_whole, leave_to_pillow
from proxyloader.data.placeholders import Proxy
from proxyloader.tools.synthetic.photograph import photograph
from proxyloader.workers.dataset_state import StatefulStream
from proxyloader.workers.fetch import Fetcher
from proxyloader.workers.packing import Packer
from proxyloader.workers.request_sampler import BatchRequest, RequestSampler
from proxyloader.workers.worker import PackStream

from ..integration.test_bad_input import broken_tables
from ..limits import WAIT_S
from ..outcomes import raises

TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])


def jpeg(**options: Any) -> bytes:
    buffer = io.BytesIO()
    photograph(0, size=(90, 61)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def cut(data: bytes) -> bytes:
    """The scan ends in the middle of the picture, and the file as it should."""
    return data[: len(data) // 2] + b"\xff\xd9"


@pytest.mark.parametrize("options", [{}, {"subsampling": "4:4:4"}, {"restart_marker_blocks": 3}], ids=str)
def test_a_whole_scan_is_told_from_a_damaged_one(options: dict[str, Any]) -> None:
    data = jpeg(**options)
    assert is_whole(data) and not is_whole(cut(data))


def looked_at(data: bytes, known: ScanStatus, max_pixels: int | None = None) -> tuple[bytes, bool]:
    """What a worker makes of a file, and whether it found damage."""
    transform = dataclasses.replace(compile_transforms(TRANSFORM), max_pixels=max_pixels)
    sample = transform(EncodedImage.from_bytes(data, max_pixels=max_pixels)), 0
    found = leave_to_pillow(sample, known)
    return bytes(sample[0].call.inputs[0]), found


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


def test_a_progressive_image_is_decoded_by_pillow_and_not_taken_for_damaged() -> None:
    data = jpeg(progressive=True)
    for known in ScanStatus:
        image, found = looked_at(data, known)
        assert image.startswith(b"P6") == (known is not ScanStatus.UNCHECKED) and not found
        assert np.array_equal(pixels_of(image), pixels_of(data))


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
    assert not leave_to_pillow([sample, compile_transforms(TRANSFORM)(Image.new("RGB", (9, 9)))], ScanStatus.DAMAGED)
    assert np.array_equal(sample.call.inputs[0], encoded)


def test_what_is_known_is_kept_by_index() -> None:
    known = IntegrityTable(10)
    assert known.of([3, 4]) == bytes([ScanStatus.UNKNOWN, ScanStatus.UNKNOWN])
    known.note([3, 4, 5], damaged=[4])
    requests = RequestSampler([[0, 1, 2]], True, scans=(of_some := IntegrityTable(3)))
    (request,) = requests
    requests.note_scans(request, unreadable=[1], damaged=[2])
    assert of_some.of([0, 1, 2]) == bytes([ScanStatus.SOUND, ScanStatus.UNKNOWN, ScanStatus.DAMAGED]), (
        "who could read number 1?"
    )
    assert known.of([3, 5]) is None
    assert known.of([3, np.int64(4), torch.tensor(6)]) == bytes(
        [ScanStatus.SOUND, ScanStatus.DAMAGED, ScanStatus.UNKNOWN]
    )
    assert known.of([]) is None
    for indices in (["a", "b"], [(1, 2), (3, 4)], [10, 11], [1.5, 2.5], [True, False]):
        known.note(indices, damaged=[])
        assert known.of(indices) == bytes([ScanStatus.UNKNOWN, ScanStatus.UNKNOWN])


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


def test_each_sample_is_looked_at_in_its_first_epoch_and_damaged_ones_are_known_then(
    damaged_folder: ImageFolder,
) -> None:
    fetcher, known = Fetcher(wrap(damaged_folder)), IntegrityTable(48)
    for epoch in range(3):
        requests = RequestSampler([list(range(k, k + 8)) for k in range(0, 48, 8)], True, scans=known)
        for request in requests:
            assert (request.scans is None) == (epoch > 0 and request.indices[0] not in (0, 16))
            fetched = fetcher(request)
            assert fetched.damaged == [i for i in request.indices if i in (5, 20)]
            by_pillow = [
                index
                for index, (image, _) in zip(fetched.indices, fetched.samples)
                if bytes(image.call.inputs[0][:2]) == b"P6"
            ]
            assert by_pillow == [i for i in request.indices if i in (5, 20)]
            requests.answered(request.number)
            requests.note_scans(request, (), fetched.damaged)


class Lists(ImageFolder):
    """Reads a batch at once, and counts how often."""

    read = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.read += 1
        return [self[index] for index in indices]


def is_by_pillow(sample: Any) -> bool:
    return bytes(sample[0].call.inputs[0][:2]) == b"P6"


def test_a_dataset_that_reads_lists_goes_on_doing_so_whatever_is_damaged(damaged_folder: ImageFolder) -> None:
    dataset = wrap(Lists(damaged_folder.root, TRANSFORM))
    fetcher, known = Fetcher(dataset, otherwise=ScanStatus.SOUND), IntegrityTable(48)
    for _ in range(2):
        dataset.read = 0
        requests = RequestSampler([list(range(k, k + 8)) for k in range(0, 48, 8)], True, scans=known)
        for request in requests:
            fetched = fetcher(request)
            assert fetched.damaged == [i for i in request.indices if i in (5, 20)]
            assert [i for i, sample in zip(request.indices, fetched.samples) if is_by_pillow(sample)] == fetched.damaged
            requests.answered(request.number)
            requests.note_scans(request, (), fetched.damaged)
        assert dataset.read == 6


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
    fetcher, known = (
        Fetcher(wrap(Threads(damaged_folder.root, TRANSFORM)), otherwise=ScanStatus.SOUND),
        IntegrityTable(48),
    )
    requests = RequestSampler([list(range(k, k + 8)) for k in range(0, 48, 8)], True, scans=known)
    for request in requests:
        fetched = fetcher(request)
        assert fetched.damaged == [i for i in request.indices if i in (5, 20)]
        assert [i for i, sample in zip(request.indices, fetched.samples) if is_by_pillow(sample)] == fetched.damaged


def test_in_a_batch_of_the_datasets_own_making_all_are_looked_at(damaged_folder: ImageFolder) -> None:
    fetcher, known = (
        Fetcher(wrap(Whole(damaged_folder.root, TRANSFORM)), otherwise=ScanStatus.SOUND),
        IntegrityTable(48),
    )
    for _ in range(2):
        requests = RequestSampler([list(range(k, k + 8)) for k in range(0, 48, 8)], True, scans=known)
        for request in requests:
            images, _ = fetcher(request).samples
            by_pillow = [bytes(call.inputs[0][:2]) == b"P6" for call in images.run.calls]
            assert by_pillow == [index in (5, 20) for index in request.indices]
            requests.answered(request.number)
            requests.note_scans(request, (), fetcher(request).damaged)


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

    dataset = wrap(Meet(damaged_folder.root, TRANSFORM))
    indices = list(range(8))
    unknown, sound = bytes([ScanStatus.UNKNOWN] * 8), None
    for scans in ((unknown, sound), (sound, unknown), (unknown, unknown)):
        requests = [BatchRequest(k, 0, indices, True, None, scans=each) for k, each in enumerate(scans)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(Fetcher(dataset, otherwise=ScanStatus.SOUND), requests))
        for fetched, each in zip(found, scans):
            assert fetched.damaged == ([5] if each else [])
            assert [is_by_pillow(sample) for sample in fetched.samples] == [
                index in fetched.damaged for index in indices
            ]


@pytest.mark.parametrize("check_scans", [True, False])
def test_replacements_are_looked_at_only_where_that_was_asked_for(
    damaged_folder: ImageFolder, check_scans: bool
) -> None:
    otherwise = ScanStatus.SOUND if check_scans else ScanStatus.UNCHECKED
    fetcher = Fetcher(wrap(damaged_folder), "replace", otherwise=otherwise)
    index, (image, _) = fetcher.next_readable(4, 0, [])
    assert index == 5 and (bytes(image.call.inputs[0][:2]) == b"P6") is check_scans


def test_only_images_that_dali_decodes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loader = DataLoader(list(range(8)), 4)
    iter(loader)
    assert loader._scans is None


def test_damaged_scans_show_what_pillow_makes_of_them_in_every_epoch(
    damaged_folder: ImageFolder, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stock = torch.stack([image for image, _ in damaged_folder])
    for workers in (0, 2):
        loader = DataLoader(damaged_folder, 8, num_workers=workers, device=device)
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
    Path(dataset.paths[6]).write_bytes(jpeg(progressive=True))
    samples = [dataset[k] for k in range(4, 8)]
    packer = Packer(default_collate, None, 8)
    batch = PackStream(
        Fetcher(dataset, otherwise=ScanStatus.UNKNOWN), packer, StatefulStream(dataset, {}, None), batched=True
    )(samples)
    images = batch.runs[0].inputs[0].views(batch.memory(None))
    assert [bytes(image[:2]) == b"P6" for image in images] == [False, True, True, False]


def test_a_streams_images_that_pillow_cannot_decode_either_are_left_out_alone(damaged_folder: ImageFolder) -> None:
    dataset = wrap(Opens(damaged_folder))
    broken_tables(Path(dataset.paths[6]))
    for on_error in ("raise", "skip"):
        fetcher = Fetcher(dataset, on_error, otherwise=ScanStatus.UNKNOWN)
        pack = PackStream(
            fetcher, Packer(default_collate, None, 8), StatefulStream(fetcher.dataset, {}, None), batched=True
        )
        if on_error == "raise":
            with pytest.raises(ImageError, match=dataset.paths[6]):
                pack([dataset[k] for k in range(4, 8)])
            continue
        batch = pack([dataset[k] for k in range(4, 8)])
        assert len(batch.runs[0]) == 3 and [each.path for each in batch.unreadable] == [dataset.paths[6]]
        assert pack([dataset[6]]).is_empty
