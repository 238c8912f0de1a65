"""DataLoader's face: torch's arguments and attributes, and what it adds."""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import multiprocessing.util
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali import Pipeline
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from ..integration.roads import Mapped
from ..limits import WAIT_S

TRANSFORM = transforms.Compose([transforms.Resize((24, 32)), transforms.ToTensor()])


@pytest.fixture
def dataset(folder: ImageFolder) -> ImageFolder:
    folder.transform = TRANSFORM
    return folder


def test_the_arguments_are_torchs_in_torchs_order_and_then_ours_by_keyword() -> None:
    torchs = inspect.signature(StockLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    shared = list(ours)[: len(torchs)]
    assert shared == list(torchs)
    for name in shared[1:]:
        assert (ours[name].default, ours[name].kind) == (torchs[name].default, torchs[name].kind), name
    *own, others = list(ours.values())[len(torchs) :]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in own)
    assert others.kind is others.VAR_KEYWORD
    assert issubclass(DataLoader, StockLoader) and DataLoader[int] is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_an_argument_of_a_later_torch_is_passed_on(
    dataset: ImageFolder, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, given = StockLoader.__init__, []

    def later_init(self: Any, *arguments: Any, worker_method: str = "", **named: Any) -> None:
        given.append((type(self), worker_method))
        init(self, *arguments, **named)

    with pytest.raises(TypeError, match=r"DataLoader.__init__\(\) got an unexpected keyword argument 'worker_method'"):
        DataLoader(dataset, worker_method="thread")
    monkeypatch.setattr(StockLoader, "__init__", later_init)
    loader = DataLoader(dataset, 12, num_workers=workers, worker_method="thread", device="cpu")
    assert len(list(loader)) == 4 and [method for _, method in given] == ["thread"] * 2


def test_options_that_are_set_later_are_checked_then_and_hold_from_the_next_epoch(dataset: ImageFolder) -> None:
    loader = DataLoader(dataset, 8, device="cpu", prefetch=3)
    for name, wrong in (("prefetch", 0), ("on_error", "no"), ("device", "meta")):
        before = getattr(loader, name)
        with pytest.raises(ValueError, match=name):
            setattr(loader, name, wrong)
        assert getattr(loader, name) == before
    batches = iter(loader)
    loader.dtype, loader.translate = torch.float16, False
    assert next(batches)[0].dtype == torch.float32
    for each in (loader, pickle.loads(pickle.dumps(loader))):
        assert next(iter(each))[0].dtype == torch.float16 and each.backend == "torch: translate=False"
        assert each.prefetch == 3


both_loaders = pytest.mark.parametrize("loader_class", [StockLoader, DataLoader])


@both_loaders
@pytest.mark.parametrize("is_left", [False, True], ids=["to its end", "left early"])
def test_an_iterator_has_torchs_list_of_its_workers_who_end_with_it(
    dataset: ImageFolder, loader_class: Any, is_left: bool
) -> None:
    batches = iter(loader_class(dataset, 8, num_workers=2))
    workers = batches._workers
    assert [worker.is_alive() for worker in workers] == [True, True]
    for _ in batches:
        if is_left:
            break
    assert batches._workers == workers
    del batches, _
    for worker in workers:
        worker.join(WAIT_S)
    assert is_left or [worker.exitcode for worker in workers] == [0, 0]
    assert not any(worker.is_alive() for worker in workers)


@both_loaders
def test_workers_that_have_given_all_may_finish_what_they_do_at_their_end(
    dataset: ImageFolder, tmp_path: Path, loader_class: Any
) -> None:
    init = functools.partial(write_at_the_end, tmp_path / "note")
    assert len(list(loader_class(dataset, 8, num_workers=1, worker_init_fn=init))) == 6
    assert (tmp_path / "note").read_text() == "written"


def write_at_the_end(path: Path, worker_id: int) -> None:
    def write() -> None:
        time.sleep(1)  # as a profiler that writes what it has
        path.write_text("written")

    multiprocessing.util.Finalize(None, write, exitpriority=0)


@both_loaders
@pytest.mark.parametrize("is_told_to_stop", [False, True], ids=["forgotten", "told to stop and forgotten"])
def test_persistent_workers_end_where_a_trainer_resets_the_loaders_iterator(
    dataset: ImageFolder, loader_class: Any, is_told_to_stop: bool
) -> None:
    loader = loader_class(dataset, 8, num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    expected = [labels.tolist() for _, labels in loader]
    (worker,) = loader._iterator._workers
    assert worker.is_alive()
    if is_told_to_stop:
        loader._iterator._shutdown_workers()
        assert not worker.is_alive()
    loader._iterator = None
    worker.join(WAIT_S)
    assert not worker.is_alive()
    assert [labels.tolist() for _, labels in loader] == expected
    loader._iterator = None


def test_persistent_workers_keep_the_transform_they_started_with_as_torchs_do(dataset: ImageFolder) -> None:
    loader = DataLoader(dataset, 16, num_workers=1, persistent_workers=True, device="cpu")
    list(loader)
    dataset.transform = transforms.Compose([transforms.Resize((10, 11)), transforms.ToTensor()])
    assert {tuple(images.shape[2:]) for images, _ in loader} == {(24, 32)}


def in_memory(kind: type) -> int:
    return sum(isinstance(each, kind) for each in gc.get_objects())


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.usefixtures("no_collector")
def test_pipelines_of_transforms_that_do_not_come_back_are_dropped(
    folder: ImageFolder, workers: int, persistent: bool
) -> None:
    current, before = torch.zeros(1, dtype=torch.int64).share_memory_(), in_memory(Pipeline)

    def sample(index: int) -> Any:
        image, label = folder[index]
        transform = transforms.Compose([transforms.RandomCrop(20 + int(current)), transforms.ToTensor()])
        return transform(image), label

    dataset = Mapped(sample, range(len(folder)))
    loader = DataLoader(dataset, 16, num_workers=workers, persistent_workers=persistent, device="cpu")
    for epoch in (*range(6), 0):
        current.fill_(epoch)
        assert {images.shape[2] for images, _ in loader} == {20 + epoch}
        assert 1 <= in_memory(Pipeline) - before <= 2  # those of this epoch, and of the last one
    assert not loader._recorder.images[2]


@pytest.mark.usefixtures("no_collector")
def test_a_transform_that_is_not_translated_keeps_no_pipeline_alive(folder: ImageFolder) -> None:
    loader, before = DataLoader(folder, 16, device="cpu"), in_memory(Pipeline)
    for size in range(20, 26):
        folder.transform = transforms.Compose([transforms.RandomCrop(size), transforms.ToTensor(), torch.square])
        assert {images.shape[2] for images, _ in loader} == {size}
        assert 1 <= in_memory(Pipeline) - before <= 2


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ({"num_workers": 1}, 1),
        ({"num_workers": 1, "persistent_workers": True}, 0),
        ({"num_workers": 0}, 0),
        ({"num_workers": 1, "translate": False}, 0),
    ],
)
def test_who_starts_new_workers_for_short_epochs_is_told_once(
    dataset: ImageFolder, how: dict[str, Any], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(dataset, 16, device="cpu", **how)
    list(loader)
    assert "starts new workers" not in caplog.text
    for _ in range(2):
        list(loader)
    assert caplog.text.count("set persistent_workers=True") == times


def test_arguments_of_the_sampler_cannot_be_changed(photos: Path) -> None:
    loader = DataLoader(ImageFolder(str(photos), TRANSFORM), num_shards="auto")
    for name in ("num_shards", "last_batch_policy", "batch_size"):
        with pytest.raises(ValueError, match=name):
            setattr(loader, name, 1)


def test_an_option_that_is_changed_applies_to_the_next_epoch(folder: ImageFolder) -> None:
    folder.transform = transforms.Compose([transforms.RandomCrop(64), transforms.ToTensor()])
    loader = DataLoader(folder, 16, device="cpu")
    for loader.num_threads in (1, 3, 3):
        list(loader)
        (server,) = loader._servers.queues.values()
        assert server.pipeline.num_threads == loader.num_threads
