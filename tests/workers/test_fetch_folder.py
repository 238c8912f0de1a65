"""A batch of an ImageFolder that is read at once is the batch that is fetched sample by sample."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import transforms
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import v2

from proxyloader import DataLoader, EncodedImage, ImageError, wrap
from proxyloader._random_state import states_now
from proxyloader.data.dataset import collect_plans
from proxyloader.data.placeholders import ProxySample
from proxyloader.workers.fetch import Fetcher
from proxyloader.workers.fetch_folder import FolderFetcher
from proxyloader.workers.request_sampler import BatchRequest
from proxyloader.workers.scan_checks import PassedSamples

from ..outcomes import outcomes, raises
from ..undecoded import image_calls_in

TRAIN = transforms.Compose([transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
JITTER = transforms.Compose([transforms.RandomCrop(40), transforms.ColorJitter(0.4), transforms.ToTensor()])
INDICES = [5, 0, 7, 7, -1, 3]


class Own(ImageFolder):
    """A folder whose samples are fetched one by one."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def by_sample(folder: ImageFolder) -> Own:
    dataset = copy.copy(folder)
    dataset.__class__ = Own
    return dataset  # type: ignore[return-value]


def mixed(samples: list[Any]) -> Any:
    """A collate_fn that draws, and uses the images."""
    images, labels = default_collate(samples)
    return images * torch.rand(1) + images.flip(0), labels


def states() -> list[Any]:
    """Of torch's, NumPy's and Python's generators."""
    of_torch, (_, keys, *rest), of_python = states_now(beside_torch=True)
    return [of_torch.tolist(), keys.tolist(), rest, of_python]


def inputs_of(samples: list[Any]) -> list[tuple[bytes, list[float], Any]]:
    """The file, the drawn numbers and the class of each sample."""
    calls = [image_calls_in([sample])[0] for sample in samples]
    return [(call.inputs[0].tobytes(), call.inputs[1].tolist(), label) for call, (_, label) in zip(calls, samples)]


@pytest.mark.parametrize("transform", [TRAIN, JITTER])
@pytest.mark.parametrize(("seed", "is_in_worker"), [(None, False), (None, True), (3, True)])
@pytest.mark.parametrize("is_for_torch", [True, False])
@pytest.mark.parametrize("indices", [INDICES, list(np.array(INDICES)), list(torch.tensor(INDICES))], ids=str)
@pytest.mark.parametrize(
    "part_of", [lambda each: each, lambda each: Subset(Subset(each, list(range(20, 2, -1))), range(1, 11))]
)
def test_samples_are_those_that_are_fetched_one_by_one(
    folder: ImageFolder,
    transform: Any,
    seed: int | None,
    is_in_worker: bool,
    is_for_torch: bool,
    indices: list[Any],
    part_of: Callable[[Any], Any],
) -> None:
    folder.transform = transform
    dataset = wrap(part_of(folder))
    request = BatchRequest(0, 2, indices, True, None)
    torch.manual_seed(1)
    wanted, wanted_states = inputs_of(Fetcher(dataset, seed=seed)(request).samples), states()
    torch.manual_seed(1)
    folders = FolderFetcher(collect_plans(dataset) if is_for_torch else (), None, is_in_worker)
    assert folders(dataset, indices) is not None, "samples are fetched one by one, and nothing is gained"
    torch.manual_seed(1)
    fetched = Fetcher(dataset, seed=seed, folders=folders)(request)
    assert inputs_of(fetched.samples) == wanted and fetched.indices == indices
    assert {isinstance(image, ProxySample) for image, _ in fetched.samples} == {is_for_torch}
    assert states() == wanted_states


def assert_alike(folder: ImageFolder, part_of: Callable[[Any], Any] = lambda each: each, **options: Any) -> list[Any]:
    """Two epochs are those of samples that are fetched one by one, with their errors and draws.

    Returns:
        Their batches and errors.
    """

    def epochs(dataset: Any) -> tuple[list[Any], list[int], Any]:
        torch.manual_seed(6)
        loader = DataLoader(part_of(dataset), **{"device": "cpu"} | options)
        found = [each for _ in range(2) for each in outcomes(loader)]
        return found, [each.index for each in loader.errors], torch.rand(1)

    (ours, *more), (theirs, *their_more) = epochs(folder), epochs(by_sample(folder))
    assert more == their_more
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Exception):
            assert str(a).splitlines()[-1] == str(b).splitlines()[-1]
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    return [*ours, more[0]]


FIVE = v2.Compose([v2.FiveCrop(48), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


@pytest.mark.parametrize(
    ("transform", "more"),
    [(TRAIN, {}), (JITTER, {}), (FIVE, {}), (TRAIN, {"collate_fn": mixed}), (TRAIN, {"translate": "all"})],
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 4])
def test_batches_are_those_that_are_fetched_sample_by_sample(
    folder: ImageFolder, transform: Any, num_workers: int, seed: int | None, more: dict[str, Any]
) -> None:
    folder.transform = transform
    found = assert_alike(folder, batch_size=7, shuffle=True, num_workers=num_workers, seed=seed, **more)
    assert len(found) == 2 * 7 + 1 and not any(isinstance(each, Exception) for each in found)


class AtOnce(ImageFolder):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class FetchesAhead(ImageFolder):
    def fetch_ahead(self, indices: Any) -> None: ...


class Looked(list[Any]):
    """Samples of a user's own, which may draw or raise where they are looked at."""


def with_samples(root: str, kind: Callable[[Any], Any]) -> ImageFolder:
    dataset = ImageFolder(root, TRAIN)
    dataset.samples = kind(dataset.samples)
    return dataset


def opened(path: str) -> EncodedImage:
    return EncodedImage.open(path)


def changed(root: str) -> ImageFolder:
    """A dataset whose transform was changed after it was translated."""
    dataset = wrap(ImageFolder(root, copy.deepcopy(TRAIN)))
    dataset.transform.original.transforms[1].p = 0.9
    return dataset


@pytest.mark.parametrize(
    "dataset_of",
    [
        lambda root: wrap(Own(root, TRAIN)),
        lambda root: wrap(AtOnce(root, TRAIN)),
        lambda root: wrap(ConcatDataset([ImageFolder(root, TRAIN)])),
        lambda root: wrap(DatasetFolder(root, opened, (".jpg",), TRAIN)),
        lambda root: wrap(ImageFolder(root, TRAIN, target_transform=str)),
        lambda root: wrap(FetchesAhead(root, TRAIN)),
        lambda root: wrap(with_samples(root, Looked)),
        lambda root: ImageFolder(root, TRAIN),
        lambda root: TensorDataset(torch.zeros(48)),
        changed,
    ],
)
def test_another_dataset_is_fetched_sample_by_sample(photos: Path, dataset_of: Callable[[str], Any]) -> None:
    dataset = dataset_of(str(photos))
    plans = {} if isinstance(dataset, TensorDataset) else collect_plans(dataset)
    assert FolderFetcher(plans, None)(dataset, INDICES) is None


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> ImageFolder:
    """``photos``, of which number 3 is cut in the middle, and number 7 is not there."""
    root = Path(shutil.copytree(photos, tmp_path / "set"))
    dataset = ImageFolder(str(root), JITTER)
    cut, missing = (Path(dataset.samples[number][0]) for number in (3, 7))
    cut.write_bytes(cut.read_bytes()[:2000])
    missing.unlink()
    return dataset


@pytest.mark.parametrize("bad", [3, 7])
def test_a_file_that_is_not_sound_is_met_where_it_is_met_without_us(damaged: ImageFolder, bad: int) -> None:
    dataset, passed = wrap(damaged), PassedSamples(48)
    before = states()
    assert FolderFetcher(collect_plans(dataset), passed)(dataset, [0, 1, bad, 2]) is None
    assert states() == before
    left = []
    for folders in (None, FolderFetcher(collect_plans(dataset), passed)):
        torch.manual_seed(2)
        with raises(ImageError, index=bad, path=dataset.samples[bad][0]):
            Fetcher(dataset, passed=passed, folders=folders)(BatchRequest(0, 0, [0, 1, bad, 2], True, None))
        left.append(states())
    assert left[0] == left[1]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@WORKERS
def test_batches_without_bad_files_are_the_same_too(damaged: ImageFolder, on_error: Any, num_workers: int) -> None:
    *_, errors = assert_alike(damaged, batch_size=5, num_workers=num_workers, on_error=on_error)
    assert {*errors} == {3, 7}


@WORKERS
def test_a_transform_that_fails_fails_as_without_us(folder: ImageFolder, num_workers: int) -> None:
    # It draws, ahead in a worker, and then takes more from the sides than some images have.
    pad = transforms.Pad(-60)
    folder.transform = transforms.Compose([transforms.RandomHorizontalFlip(), pad, transforms.ToTensor()])
    found = assert_alike(folder, batch_size=1, num_workers=num_workers, translate="all")
    assert {type(each) for each in found} > {list}


@pytest.mark.parametrize("part_of", [lambda each: each, lambda each: Subset(each, range(40))])
@WORKERS
def test_an_index_that_is_out_of_range_is_met_behind_the_draws_of_those_before(
    folder: ImageFolder, num_workers: int, part_of: Callable[[Any], Any]
) -> None:
    folder.transform = JITTER
    error, *_ = assert_alike(folder, part_of, batch_sampler=[[0, 1, 500], [3, 4]], num_workers=num_workers)
    assert type(error) is IndexError


def test_what_is_sound_is_known_later_and_several_sizes_are_refused_as_without_us(folder: ImageFolder) -> None:
    folder.transform = TRAIN
    dataset, passed = wrap(folder), PassedSamples(48)
    folders = FolderFetcher(collect_plans(dataset), passed)
    assert folders(dataset, INDICES) is not None and passed.has_all(INDICES) and not passed.has_all([1])
    folder.transform = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    dataset = wrap(folder)
    folders, before = FolderFetcher(collect_plans(dataset), None), states()
    assert folders(dataset, [0]) is not None
    after = states()
    assert folders(dataset, list(range(48))) is None and states() == after != before
    with pytest.raises(RuntimeError, match="images in a batch must have the same shape to be stacked"):
        list(DataLoader(folder, 48, translate="all", device="cpu"))


@pytest.mark.parametrize("kind", [tuple, torch.Tensor])
def test_a_function_of_the_users_for_samples_or_tensors_gets_them(
    folder: ImageFolder, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collated(samples: Any, *, collate_fn_map: Any = None) -> Any:
        return default_collate(list(samples))

    monkeypatch.setitem(default_collate_fn_map, kind, collated)
    folder.transform = TRAIN
    dataset = wrap(folder)
    samples = FolderFetcher(collect_plans(dataset), None)(dataset, INDICES)
    assert samples is not None and all(isinstance(image, torch.Tensor) for image, _ in samples)


def test_a_damaged_file_that_pillow_decodes_is_read_with_the_others(photos: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(photos, tmp_path / "set"))
    dataset = ImageFolder(str(root), JITTER)
    path = Path(dataset.samples[3][0])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(512) + data[len(data) // 2 + 512 :])
    wrapped, passed = wrap(dataset), PassedSamples(48)
    samples = FolderFetcher(collect_plans(wrapped), passed)(wrapped, [2, 3, 4])
    assert samples is not None
    torch.manual_seed(2)
    one_by_one = Fetcher(wrapped, passed=PassedSamples(48))
    wanted = inputs_of(one_by_one(BatchRequest(0, 0, [2, 3, 4], True, None)).samples)
    torch.manual_seed(2)
    assert inputs_of(FolderFetcher(collect_plans(wrapped), passed)(wrapped, [2, 3, 4]) or []) == wanted
    assert wanted[1][0].startswith(b"P6") and not passed.has_all([3])


@WORKERS
def test_what_is_drawn_with_in_inference_mode_draws_outside_of_it_too(folder: ImageFolder, num_workers: int) -> None:
    folder.transform = TRAIN
    with torch.inference_mode():
        list(DataLoader(folder, 8, device="cpu"))
    assert len(list(DataLoader(folder, 8, seed=1, num_workers=num_workers, device="cpu"))) == 6
