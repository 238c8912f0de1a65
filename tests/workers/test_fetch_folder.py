"""Reading the files of an ImageFolder batch together gives the same batch as fetching its samples one by one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import transforms
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import v2

from proxyloader import DataLoader, ImageError
from proxyloader._random_state import get_rng_states
from proxyloader.data.dataset import find_plans
from proxyloader.data.deferral import Deferral
from proxyloader.workers.fetch import _NOT_BATCHED, Fetcher, PassedSamples
from proxyloader.workers.request_sampler import BatchRequest

from ..outcomes import outcomes

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
    """A collate_fn that draws random numbers and computes with the images."""
    images, labels = default_collate(samples)
    return images * torch.rand(1) + images.flip(0), labels


def assert_alike(folder: ImageFolder, part_of: Callable[[Any], Any] = lambda each: each, **options: Any) -> list[Any]:
    """Two epochs equal those with samples fetched one by one, including errors and random numbers.

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


def part_of_a_part(folder: ImageFolder) -> Any:
    return Subset(Subset(folder, list(range(20, 2, -1))), range(1, 16))


SHUFFLED = {"batch_size": 7, "shuffle": True}


@pytest.mark.parametrize(
    ("transform", "options"),
    [
        *((transform, SHUFFLED) for transform in (TRAIN, JITTER, FIVE)),
        (TRAIN, SHUFFLED | {"collate_fn": mixed}),
        (JITTER, SHUFFLED | {"part_of": part_of_a_part}),
        (JITTER, {"batch_sampler": [np.array(INDICES)]}),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 4])
def test_batches_equal_those_fetched_sample_by_sample(
    folder: ImageFolder, transform: Any, num_workers: int, seed: int | None, options: dict[str, Any]
) -> None:
    folder.transform = transform
    found = assert_alike(folder, num_workers=num_workers, seed=seed, **options)
    batches = 1 if "batch_sampler" in options else 3 if "part_of" in options else 7
    assert len(found) == 2 * batches + 1 and not any(isinstance(each, Exception) for each in found)


class AtOnce(ImageFolder):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Repeated(Subset[Any]):
    def __len__(self) -> int:
        return 3 * len(self.indices)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index % len(self.indices)] for index in indices]


class WithProperty(ImageFolder):
    reads = 0

    @property
    def transform(self) -> Any:
        self.reads += 1
        return TRAIN

    @transform.setter
    def transform(self, value: Any) -> None: ...


class FetchesAhead(ImageFolder):
    def fetch_ahead(self, indices: Any) -> None: ...


class Looked(list[Any]):
    """A user's own sequence of samples, whose items may draw random numbers or raise."""


def with_samples(root: str, kind: Callable[[Any], Any]) -> ImageFolder:
    dataset = ImageFolder(root, TRAIN)
    dataset.samples = kind(dataset.samples)
    return dataset


def fetched(dataset: Any, indices: Any = INDICES, passed: PassedSamples | None = None) -> Any:
    """Samples that are fetched together, in a worker; None: they are to be fetched one by one."""
    deferral = Deferral(on_gpu=False, find_obstacle=lambda plan: "")
    plans, _ = find_plans(dataset, deferral.find_obstacle)
    fetcher = Fetcher(dataset, passed=passed, deferral=deferral, plans=plans)
    found = fetcher._fetch_folder(BatchRequest(0, 0, indices, True, None), indices)
    return None if found is _NOT_BATCHED else found


@pytest.mark.parametrize(
    "dataset_of",
    [
        lambda root: Own(root, TRAIN),
        lambda root: AtOnce(root, TRAIN),
        lambda root: ConcatDataset([ImageFolder(root, TRAIN)]),
        lambda root: DatasetFolder(root, lambda path: Image.open(path).convert("RGB"), (".jpg",), TRAIN),
        lambda root: ImageFolder(root, TRAIN, target_transform=str),
        lambda root: ImageFolder(root, transforms.Compose([*TRAIN.transforms, transforms.Lambda(torch.sum)])),
        lambda root: FetchesAhead(root, TRAIN),
        lambda root: WithProperty(root, TRAIN),
        lambda root: Repeated(ImageFolder(root, TRAIN), range(30)),
        lambda root: with_samples(root, Looked),
        lambda root: TensorDataset(torch.zeros(48)),
    ],
)
def test_other_datasets_are_fetched_sample_by_sample(photos: Path, dataset_of: Callable[[str], Any]) -> None:
    assert fetched(dataset_of(str(photos))) is None


def test_a_property_is_read_as_often_as_by_the_dataset(photos: Path) -> None:
    dataset = WithProperty(str(photos))
    list(DataLoader(dataset, 4, device="cpu"))
    assert dataset.reads == 2 * len(dataset)


def test_a_class_of_subsets_has_its_own_indices(folder: ImageFolder) -> None:
    folder.transform = TRAIN
    dataset = Repeated(folder, [0, 40, 1, 41, 2])
    labels = [label for _, labels in DataLoader(dataset, 4, device="cpu") for label in labels.tolist()]
    assert labels == 3 * [folder.targets[index] for index in dataset.indices]


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> ImageFolder:
    """``photos``, of which number 3 is cut in the middle, number 5 has lost a block, and number 7 is not there."""
    root = Path(shutil.copytree(photos, tmp_path / "set"))
    dataset = ImageFolder(str(root), JITTER)
    cut, zeroed, missing = (Path(dataset.samples[number][0]) for number in (3, 5, 7))
    cut.write_bytes(cut.read_bytes()[:2000])
    data = zeroed.read_bytes()
    zeroed.write_bytes(data[: len(data) // 2] + bytes(512) + data[len(data) // 2 + 512 :])
    missing.unlink()
    return dataset


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@WORKERS
def test_damaged_files_give_the_same_batches_and_errors(damaged: ImageFolder, on_error: Any, num_workers: int) -> None:
    *found, errors = assert_alike(damaged, batch_size=2, num_workers=num_workers, on_error=on_error)
    assert {*errors} == {3, 7}
    assert sum(isinstance(each, ImageError) for each in found) == (4 if on_error == "raise" else 0)


@WORKERS
def test_a_failing_transform_gives_the_same_errors(folder: ImageFolder, num_workers: int) -> None:
    # It draws, ahead in a worker, and then takes more from the sides than some images have.
    pad = transforms.Pad(-60)
    folder.transform = transforms.Compose([transforms.RandomHorizontalFlip(), pad, transforms.ToTensor()])
    found = assert_alike(folder, batch_size=1, num_workers=num_workers)
    assert {type(each) for each in found} > {list}


@pytest.mark.parametrize("part_of", [lambda each: each, lambda each: Subset(each, range(40))])
@WORKERS
def test_an_index_out_of_range_is_raised_after_the_draws_of_earlier_samples(
    folder: ImageFolder, num_workers: int, part_of: Callable[[Any], Any]
) -> None:
    folder.transform = JITTER
    error, *_ = assert_alike(folder, part_of, batch_sampler=[[0, 1, 500], [3, 4]], num_workers=num_workers)
    assert type(error) is IndexError


def test_samples_are_read_together_unless_their_sizes_differ(folder: ImageFolder) -> None:
    folder.transform = TRAIN
    passed = PassedSamples(48)
    for indices in (INDICES, list(np.array(INDICES)), list(torch.tensor(INDICES))):
        assert fetched(folder, indices, passed) is not None, "samples are fetched one by one, and nothing is gained"
    assert passed.has_all(INDICES) and not passed.has_all([1])
    folder.transform = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    assert fetched(folder, [0]) is not None
    before = get_rng_states()
    assert fetched(folder, list(range(48))) is None
    assert str(get_rng_states()) == str(before)
    with pytest.raises(RuntimeError, match="images in a batch must have the same shape to be stacked"):
        list(DataLoader(folder, 48, device="cpu"))


@pytest.mark.parametrize("kind", [tuple, torch.Tensor])
def test_samples_for_a_custom_collate_function_of_a_type_are_fetched_one_by_one(
    folder: ImageFolder, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, lambda samples, *, collate_fn_map: default_collate([*samples]))
    folder.transform = TRAIN
    assert fetched(folder) is None


@WORKERS
def test_generators_used_in_inference_mode_work_outside_of_it(folder: ImageFolder, num_workers: int) -> None:
    folder.transform = TRAIN
    with torch.inference_mode():
        list(DataLoader(folder, 8, device="cpu"))
    assert len(list(DataLoader(folder, 8, seed=1, num_workers=num_workers, device="cpu"))) == 6
