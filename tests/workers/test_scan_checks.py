"""Samples whose JPEGs passed the checks are remembered; damaged ones are checked again and decoded by Pillow."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, wrap
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import checks
from proxyloader.workers.fetch import Fetcher, PassedSamples, checking
from proxyloader.workers.request_sampler import BatchRequest

from ..compare import picture
from ..hostile_jpegs import HUFFMAN, with_bytes
from ..integration.test_faults_structure import Pooled
from ..limits import WAIT_S
from ..odd_formats import encoded
from ..tiers import by_default
from ..undecoded import image_calls_in, in_worker
from .test_fetch_folder import AtOnce, Own

TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
DAMAGED = (5, 20)
BATCHES = [BatchRequest(k, 0, list(range(k, k + 8)), True, None) for k in range(0, 48, 8)]


def lose_a_block(dataset: ImageFolder, index: int) -> None:
    path = Path(dataset.samples[index][0])
    data = path.read_bytes()
    middle, size = len(data) // 2, len(data) // 4
    path.write_bytes(data[:middle] + bytes(size) + data[middle + size :])


@pytest.fixture
def damaged_folder(photos: Path, tmp_path: Path) -> ImageFolder:
    """48 photographs, in two of which a block is lost."""
    dataset = ImageFolder(shutil.copytree(photos, tmp_path / "set"), TRANSFORM)
    for index in DAMAGED:
        lose_a_block(dataset, index)
    return dataset


def is_by_pillow(sample: Any) -> bool:
    (call,) = image_calls_in(sample)
    return bytes(call.inputs[0][:2]) == b"P6"


def by_pillow(loader: Any) -> int:
    """How many images Pillow decodes in an epoch."""
    before = loader.stats().images_by_pillow
    list(loader)
    return int(loader.stats().images_by_pillow - before)


def test_passed_samples_are_kept_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = PassedSamples(10)
    for index in (3, np.int64(4), torch.tensor(5), 9):
        passed.add([index])
    assert passed.has_all([np.int32(3), 4, 5, torch.tensor(9)])
    for other in ("a", (1, 2), 10, 1.5, None, slice(None), [6, 7]):
        passed.add([other])
        assert not passed.has_all([other])
    assert not passed.has_all([6]) and not passed.has_all([3, 6]) and not PassedSamples(0).has_all([0])

    def refuse(*_: Any) -> int:
        raise OSError("no memory")

    monkeypatch.setattr("os.memfd_create", refuse)
    passed = PassedSamples(3)
    passed.add([1])
    assert not passed.has_all([1])


def add_2(passed: PassedSamples) -> None:
    assert passed.has_all([1]) and not passed.has_all([2])
    passed.add([2])


@pytest.mark.parametrize(
    "method", by_default({each: each for each in ("fork", "forkserver", "spawn")}, "fork", "forkserver")
)
def test_all_processes_know_what_a_worker_has_checked(method: Any) -> None:
    passed = PassedSamples(3)
    passed.add([1])
    process = multiprocessing.get_context(method).Process(target=add_2, args=(passed,))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert passed.has_all([1, 2]) and not passed.has_all([0])


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize(("kind", "checked_again"), [(Own, 2), (ImageFolder, 16), (AtOnce, 16), (Pooled, 48)])
def test_sound_samples_are_checked_only_in_the_first_epoch(
    kind: type[ImageFolder], checked_again: int, damaged_folder: ImageFolder
) -> None:
    """Of a batch that is read at once all are checked again; and of threads of its own nothing is remembered."""
    loader: Any = DataLoader(kind(damaged_folder.root, TRANSFORM), 8, num_workers=1, device="cpu")
    assert [by_pillow(loader) for _ in range(2)] == [len(DAMAGED)] * 2
    for index in range(48):  # so a block is lost in all that are checked
        lose_a_block(loader.dataset, index)
    assert by_pillow(loader) == checked_again


@pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
def test_a_different_file_at_a_passed_index_is_still_checked_for_errors_of_pillow(progressive: bool) -> None:
    sound = encoded(picture(1, (64, 48)), "JPEG", progressive=progressive)
    bad = with_bytes(HUFFMAN, slice(1, 17), b"\xff" * 16)(sound)  # counts of Huffman codes that cannot be
    passed = PassedSamples(1)
    passed.add([0])
    with checking(passed, [0]):
        assert EncodedImage.from_jpeg(sound) is not None
        assert EncodedImage.from_jpeg(bad) is None and EncodedImage.from_jpeg(sound[:-40]) is None


@pytest.mark.usefixtures("emulated_gpu")
def test_custom_batches_replacements_and_images_outside_a_loader_are_checked(damaged_folder: ImageFolder) -> None:
    class Whole(AtOnce):
        def __getitems__(self, indices: list[int]) -> Any:
            return default_collate(super().__getitems__(indices))

    whole = DataLoader(Whole(damaged_folder.root, TRANSFORM), 8, collate_fn=lambda batch: batch, device="cpu")
    assert by_pillow(whole) == 2
    Path(damaged_folder.samples[4][0]).unlink()  # so number 5 also comes in its place
    for check_scans, found in ((True, 3), (False, 0)):
        loader = DataLoader(damaged_folder, 8, on_error="replace", check_scans=check_scans, device="cpu")
        assert by_pillow(loader) == found
    assert [wrap(damaged_folder)[index][0].encoded[:2] for index in (5, 6)] == [b"P6", b"\xff\xd8"]


def test_two_loading_threads_do_not_mix_up_their_images(damaged_folder: ImageFolder) -> None:
    at_once = threading.Barrier(2)

    class Meet(ImageFolder):
        """Both threads are between opening one image and the next at the same time."""

        def __getitem__(self, index: int) -> Any:
            at_once.wait(WAIT_S)
            sample = super().__getitem__(index)
            at_once.wait(WAIT_S)
            return sample

    dataset, request = Meet(damaged_folder.root, TRANSFORM), BATCHES[0]
    for unknown in ((True, False), (False, True), (True, True)):
        tables = [PassedSamples(48) for _ in unknown]
        for passed in [table for table, each in zip(tables, unknown) if not each]:
            passed.add(request.indices)
        fetchers = [Fetcher(dataset, passed=passed) for passed in tables]
        with in_worker(), ThreadPoolExecutor(2) as pool:
            found = list(pool.map(Fetcher.__call__, fetchers, [request] * 2))
        for (samples, *_), each in zip(found, unknown):
            assert [is_by_pillow(sample) for sample in samples] == [k == 5 and each for k in request.indices]


def test_the_mode_of_checking_is_reset_after_the_dataset() -> None:
    passed = PassedSamples(1)
    passed.add([0])
    for table, how in ((passed, (True, True)), (None, (False, False)), (PassedSamples(1), (False, True))):
        with pytest.raises(ZeroDivisionError), checking(table, [0]):
            assert (checks.already_passed, checks.find_zeros) == how
            _ = 1 / 0
        assert (checks.already_passed, checks.find_zeros) == (False, True)
        assert table is None or table.has_all([0]) == (table is passed)


@pytest.mark.parametrize("check_scans", [True, False])
def test_zeros_are_searched_for_if_a_gpu_decodes(request: pytest.FixtureRequest, check_scans: bool) -> None:
    loader = DataLoader(list(range(8)), 4, check_scans=check_scans, device="cpu")
    iter(loader)
    assert loader._passed_samples is None
    request.getfixturevalue("with_kernels")
    iter(loader)
    assert (loader._passed_samples is not None) is check_scans
    before = loader._passed_samples
    iter(loader)
    assert loader._passed_samples is before


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_scans_are_decoded_as_by_pillow_in_every_epoch(
    damaged_folder: ImageFolder, device: str, workers: int
) -> None:
    stock = torch.stack([image for image, _ in damaged_folder])
    loader = DataLoader(damaged_folder, 8, num_workers=workers, device=device)
    for _ in range(2):
        ours = torch.cat([images.cpu() for images, _ in loader])
        assert (ours - stock).abs().mean() <= 0.5 / 255 and (ours - stock).abs().max() <= 16 / 255
