"""Damaged scans are noticed when a sample is opened for the first time, and remembered."""

from __future__ import annotations

import dataclasses
import io
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
from proxyloader.fetch import Fetcher
from proxyloader.packing import Packer
from proxyloader.photograph import photograph
from proxyloader.sampling import RequestSampler
from proxyloader.scans import KnownScans, Scan, is_whole, opening

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


def test_a_damaged_image_is_decoded_by_pillow_where_it_is_looked_at_or_known() -> None:
    data, damaged = jpeg(), cut(jpeg())
    pixels = np.asarray(Image.open(io.BytesIO(damaged)).convert("RGB"))
    for known, found in ((Scan.UNKNOWN, True), (Scan.DAMAGED, False)):
        with opening(known) as watch:
            image = EncodedImage.from_bytes(damaged)
        assert watch.found_damage is found
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.data))), pixels)
    for known in (Scan.UNKNOWN, Scan.SOUND):
        with opening(known) as watch:
            assert EncodedImage.from_bytes(data).data is data
        assert not watch.found_damage
    assert EncodedImage.from_bytes(damaged).data is damaged  # nobody asked


def test_a_progressive_image_is_decoded_by_pillow_and_not_taken_for_damaged() -> None:
    data = jpeg(progressive=True)
    for known in Scan:
        with opening(known) as watch:
            image = EncodedImage.from_bytes(data)
        assert image.data.startswith(b"P6") == (known is not Scan.UNCHECKED)
        assert not watch.found_damage
        pixels = np.asarray(Image.open(io.BytesIO(image.data)).convert("RGB"))
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_a_limit_on_pixels_that_was_raised_holds_for_a_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="max_pixels"):
        EncodedImage.from_bytes(jpeg(progressive=True))
    image = EncodedImage.from_bytes(jpeg(progressive=True), max_pixels=10_000)
    transform = dataclasses.replace(compile_transforms(TRANSFORM), max_pixels=10_000)
    batch = Packer(default_collate, None, 8, check_scans=True)([transform(image)])
    assert bytes(batch.runs[0].inputs[0].views(batch.memory(None))[0][:2]) == b"P6"


def test_a_file_that_was_sound_is_looked_at_again_where_it_does_not_end_as_a_jpeg() -> None:
    data = jpeg()
    with opening(Scan.SOUND):
        with pytest.raises(ImageError, match="Pillow cannot decode it"):
            EncodedImage.from_bytes(data[: len(data) // 2])
        assert EncodedImage.from_bytes(data + b"more").data.endswith(b"more")


def test_scans_that_make_no_sense_are_damage_that_is_remembered() -> None:
    data = jpeg(progressive=True)
    without_the_last = data[: data.rindex(b"\xff\xda")] + b"\xff\xd9"
    for known, found in ((Scan.UNKNOWN, True), (Scan.DAMAGED, False), (Scan.UNCHECKED, False)):
        with opening(known) as watch:
            assert EncodedImage.from_bytes(without_the_last).data.startswith(b"P6")
        assert watch.found_damage is found


def test_what_is_known_is_kept_by_index() -> None:
    known = KnownScans(10)
    assert known.of([3, 4]) == bytes([Scan.UNKNOWN, Scan.UNKNOWN])
    known.note([3, 4, 5], damaged=[4])
    requests = RequestSampler([[0, 1, 2]], True, scans=(of_some := KnownScans(3)))
    (request,) = requests
    requests.note_scans(request, unreadable=[1], damaged=[2])
    assert of_some.of([0, 1, 2]) == bytes([Scan.SOUND, Scan.UNKNOWN, Scan.DAMAGED]), "who could read number 1?"
    assert known.of([3, 5]) is None
    assert known.of([3, np.int64(4), torch.tensor(6)]) == bytes([Scan.SOUND, Scan.DAMAGED, Scan.UNKNOWN])
    assert known.of([]) is None
    for indices in (["a", "b"], [(1, 2), (3, 4)], [10, 11], [1.5, 2.5], [True, False]):
        known.note(indices, damaged=[])
        assert known.of(indices) == bytes([Scan.UNKNOWN, Scan.UNKNOWN])


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
    fetcher, known = Fetcher(wrap(damaged_folder)), KnownScans(48)
    for epoch in range(3):
        requests = RequestSampler([list(range(k, k + 8)) for k in range(0, 48, 8)], True, scans=known)
        for request in requests:
            assert (request.scans is None) == (epoch > 0 and request.indices[0] not in (0, 16))
            fetched = fetcher(request)
            assert fetched.damaged == ([i for i in request.indices if i in (5, 20)] if epoch == 0 else [])
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


def test_a_dataset_that_reads_lists_goes_on_doing_so_but_for_batches_with_damage(damaged_folder: ImageFolder) -> None:
    dataset = wrap(Lists(damaged_folder.root, TRANSFORM))
    fetcher, known = Fetcher(dataset), KnownScans(48)
    for epoch, reads in enumerate((6, 4)):  # two batches have damage; the first time they are read to find that out
        dataset.read = 0
        requests = RequestSampler([list(range(k, k + 8)) for k in range(0, 48, 8)], True, scans=known)
        for request in requests:
            fetched = fetcher(request)
            assert fetched.damaged == ([i for i in request.indices if i in (5, 20)] if epoch == 0 else [])
            requests.answered(request.number)
            requests.note_scans(request, (), fetched.damaged)
        assert dataset.read == reads


@pytest.mark.parametrize("check_scans", [True, False])
def test_replacements_are_looked_at_only_where_that_was_asked_for(
    damaged_folder: ImageFolder, check_scans: bool
) -> None:
    fetcher = Fetcher(wrap(damaged_folder), "replace", check_scans=check_scans)
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
    batch = Packer(default_collate, None, 8, check_scans=True)([dataset[k] for k in range(4, 8)])
    images = batch.runs[0].inputs[0].views(batch.memory(None))
    assert [bytes(image[:2]) == b"P6" for image in images] == [False, True, True, False]
