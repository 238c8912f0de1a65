"""The next epoch begins before it is asked for, and its batches are those of a loader where it does not."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import multiprocessing
import os
import shutil
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ImageError
from proxyloader.data.file_changes import TICK_NS
from proxyloader.loader import dataloader, early_epoch
from proxyloader.workers.early_draws import EarlyDraws

from .. import scripts
from ..faults import without_torchs_signal
from ..limits import WAIT_S

TRAIN = transforms.Compose(
    [transforms.RandomResizedCrop((24, 32)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)

Epoch = list[tuple[torch.Tensor, torch.Tensor]]
Between = Callable[[Any, int], object]
"""What is done between two epochs, with the loader and the number of the epoch that has ended."""


def nothing(loader: Any, epoch: int) -> None:
    pass


@pytest.fixture
def train(photos: Path) -> ImageFolder:
    return ImageFolder(str(photos), TRAIN)


def loader_of(dataset: Any, device: str = "cpu", **arguments: Any) -> Any:
    several = dict(shuffle=True) if arguments.keys().isdisjoint({"sampler", "batch_sampler", "shuffle"}) else {}
    if "batch_sampler" not in arguments:
        several["batch_size"] = 7
    return DataLoader(
        dataset, **{"num_workers": 2, "persistent_workers": True, "device": device, **several, **arguments}
    )


def begins_early(loader: Any) -> bool:
    """Return whether the next epoch of a loader has begun."""
    return loader._early._feed is not None


def never_early(loader: Any) -> Any:
    loader._early._seeds = None
    return loader


def epochs(loader: Any, between: Between = nothing, count: int = 4) -> tuple[list[Epoch], list[bool]]:
    """Return epochs of a loader, and whether it went on with what had begun early, for each of them."""
    found, went_on = [], []
    for epoch in range(count):
        early = loader._early._feed if isinstance(loader, DataLoader) else None
        batches = iter(loader)
        went_on.append(early is not None and batches._feed is early)
        found.append([(images.cpu(), labels) for images, labels in batches])
        between(loader, epoch)
    return found, went_on


def are_same(ours: list[Epoch], theirs: list[Epoch]) -> bool:
    return [len(epoch) for epoch in ours] == [len(epoch) for epoch in theirs] and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for one, other in zip(ours, theirs)
        for a, b in zip(one, other)
    )


@pytest.mark.parametrize("seed", [None, 3], ids=["no seed", "a seed"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle": False},
        {"batch_size": 5, "drop_last": True, "num_workers": 3},
        {"batch_size": 48, "num_workers": 1, "prefetch": 1},
        {"batch_size": 2, "prefetch_factor": 1, "prefetch": 5, "in_order": True},
        {"multiprocessing_context": "forkserver"},
        {"on_error": "skip", "dtype": torch.float16},
    ],
    ids=["shuffled", "in order", "last dropped", "one batch", "many batches", "forkserver", "skip, float16"],
)
def test_each_epoch_behind_the_first_begins_early_and_has_the_same_batches(
    train: ImageFolder, seed: int | None, arguments: dict[str, Any], device: str
) -> None:
    torch.manual_seed(5)
    expected, _ = epochs(never_early(loader_of(train, device, seed=seed, **arguments)))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    found, went_on = epochs(loader_of(train, device, seed=seed, **arguments))
    assert went_on == [False, True, True, True]
    assert are_same(found, expected)
    assert torch.equal(torch.rand(3), drawn), "the default generator is not where it would be"


@pytest.mark.parametrize("draws_after", [None, 0, 1], ids=["never", "after the first", "after the second"])
def test_the_order_and_the_crops_are_torchs_if_the_loop_draws_between_two_epochs(
    train: ImageFolder, draws_after: int | None
) -> None:
    def between(loader: Any, epoch: int) -> None:
        if epoch == draws_after:
            torch.rand(1)

    torch.manual_seed(5)
    stock = TorchDataLoader(train, 7, shuffle=True, num_workers=2, persistent_workers=True)
    expected, _ = epochs(stock, between)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    found, went_on = epochs(loader_of(train), between)
    assert went_on == [False, *(draws_after is None or epoch <= draws_after for epoch in range(1, 4))]
    for ours, theirs in zip(found, expected):
        assert [labels.tolist() for _, labels in ours] == [labels.tolist() for _, labels in theirs]
        assert all((a - b).abs().mean() < 0.02 for (a, _), (b, _) in zip(ours, theirs)), "another crop"
    assert torch.equal(torch.rand(3), drawn)


def seeds_again(loader: Any, epoch: int) -> None:
    torch.manual_seed(epoch)


def sets_an_epoch(loader: Any, epoch: int) -> None:
    loader.set_epoch(epoch + 5)


def loads_a_state(loader: Any, epoch: int) -> None:
    if epoch == 0:
        loader.kept = loader.state_dict()
    elif epoch == 2:
        loader.load_state_dict(loader.kept)


def makes_smaller_batches(loader: Any, epoch: int) -> None:
    if epoch == 1:
        loader.batch_sampler.batch_size = 3


def asks_for_another_dtype(loader: Any, epoch: int) -> None:
    if epoch == 1:
        loader.dtype = torch.float16


def takes_fewer_samples(loader: Any, epoch: int) -> None:
    if epoch == 1:
        loader.sampler._num_samples = 10


def takes_another_length(loader: Any, epoch: int) -> None:
    if epoch == 1:
        loader.sampler.data_source = range(20)


def takes_an_array(loader: Any, epoch: int) -> None:
    loader.sampler.data_source = np.arange(30)


def gives_what_is_not_valid(loader: Any, epoch: int) -> None:
    if epoch == 1:
        with pytest.raises(ValueError, match="dtype"):
            loader.dtype = torch.int64
            iter(loader)
        loader.dtype = None


def leaves_a_loop(loader: Any, epoch: int) -> None:
    next(iter(loader))


def is_validated(loader: Any, epoch: int) -> None:
    list(TorchDataLoader([1, 2, 3], shuffle=True))


@pytest.mark.parametrize("seed", [None, 3], ids=["no seed", "a seed"])
@pytest.mark.parametrize(
    "between",
    [
        seeds_again,
        sets_an_epoch,
        loads_a_state,
        makes_smaller_batches,
        asks_for_another_dtype,
        takes_fewer_samples,
        takes_another_length,
        takes_an_array,
        gives_what_is_not_valid,
        leaves_a_loop,
        is_validated,
    ],
)
def test_what_is_done_between_two_epochs_has_its_effect_on_the_second(
    train: ImageFolder, between: Between, seed: int | None
) -> None:
    torch.manual_seed(5)
    expected, _ = epochs(never_early(loader_of(train, seed=seed)), between, count=5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    loader = loader_of(train, seed=seed)
    found, _ = epochs(loader, between, count=5)
    assert are_same(found, expected)
    assert torch.equal(torch.rand(3), drawn)


def test_an_epoch_that_was_dropped_is_the_last_that_began_early(train: ImageFolder) -> None:
    loader = loader_of(train)
    list(loader)
    assert begins_early(loader)
    torch.rand(1)
    for _ in range(2):
        list(loader)
        assert not begins_early(loader)


@pytest.mark.parametrize("loops", [1, 3])
def test_the_seeds_of_loops_for_validation_are_expected_the_next_time(train: ImageFolder, loops: int) -> None:
    def validates(loader: Any, epoch: int) -> None:
        for _ in range(loops):
            list(TorchDataLoader([1, 2, 3]))
        if epoch == 3:
            torch.rand(1)

    torch.manual_seed(5)
    expected, _ = epochs(never_early(loader_of(train)), validates, count=6)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    found, went_on = epochs(loader_of(train), validates, count=6)
    assert went_on == [False, False, True, True, False, False]
    assert are_same(found, expected)
    assert torch.equal(torch.rand(3), drawn)


class Folder(ImageFolder):
    """Has a ``__getitem__`` of its own."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def own_init(worker: int) -> None:
    pass


OWN: dict[str, Callable[[ImageFolder], Any]] = {
    "workers that end": lambda folder: loader_of(folder, persistent_workers=False, seed=3),
    "no workers": lambda folder: loader_of(folder, persistent_workers=False, num_workers=0, seed=3),
    "a dataset": lambda folder: loader_of(Folder(folder.root, TRAIN), seed=3),
    "a target_transform": lambda folder: loader_of(ImageFolder(folder.root, TRAIN, own_init), seed=3),
    "a part of the transform": lambda folder: loader_of(
        ImageFolder(folder.root, transforms.Compose([*TRAIN.transforms, transforms.Lambda(own_init)])), seed=3
    ),
    "a collate_fn": lambda folder: loader_of(folder, collate_fn=own_collate, seed=3),
    "a worker_init_fn": lambda folder: loader_of(folder, worker_init_fn=own_init, seed=3),
    "a generator": lambda folder: loader_of(folder, generator=torch.Generator(), seed=3),
    "a sampler with a generator": lambda folder: loader_of(
        folder, sampler=RandomSampler(folder, generator=torch.Generator()), seed=3
    ),
    "another sampler": lambda folder: loader_of(folder, sampler=SubsetRandomSampler(range(20)), seed=3),
    "a batch sampler": lambda folder: loader_of(folder, batch_sampler=[[1, 2], [3]], seed=3),
    "shards": lambda folder: loader_of(folder, num_shards=1, shard_id=0, seed=3),
    "an audit": lambda folder: loader_of(folder, audit=0.5, seed=3),
    "torch's loader": lambda folder: loader_of(folder, translate=False, seed=3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", OWN.values(), ids=OWN)
def test_nothing_begins_early_where_code_of_the_users_may_decide_what_is_in_a_batch(
    train: ImageFolder, made: Callable[[ImageFolder], Any]
) -> None:
    loader = made(train)
    with contextlib.suppress(TypeError):  # torch cannot collate what ``own_init`` returns
        list(loader)
    assert not begins_early(loader)


def test_the_workers_are_asked_for_few_batches_until_the_next_epoch_is_taken(train: ImageFolder) -> None:
    loader = loader_of(Subset(train, range(40)), batch_size=2, prefetch_factor=6)
    list(loader)
    assert len(loader._early._feed.requested()) == 2 * 2 * (loader.prefetch + 1)
    batches = iter(loader)
    assert len(batches._pool.requests.unanswered) == 2 * loader.prefetch_factor
    assert len(list(batches)) == len(loader)


def test_a_subset_begins_early(train: ImageFolder) -> None:
    found, went_on = epochs(loader_of(Subset(train, range(3, 33)), seed=3))
    expected, _ = epochs(never_early(loader_of(Subset(train, range(3, 33)), seed=3)))
    assert went_on == [False, True, True, True] and are_same(found, expected)


def test_nothing_begins_early_where_the_indices_of_a_subset_may_be_in_shared_memory(train: ImageFolder) -> None:
    indices = torch.arange(9).share_memory_()
    loader = loader_of(Subset(train, indices), seed=3, shuffle=False, batch_size=9)  # type: ignore[arg-type]
    classes = [torch.tensor(train.targets)[indices]]
    found = [next(iter(loader))[1]]
    indices += 20
    classes.append(torch.tensor(train.targets)[indices])
    found.append(next(iter(loader))[1])
    assert not begins_early(loader) and all(map(torch.equal, found, classes))


@pytest.mark.parametrize("arguments", [{"shuffle": False}, {"sampler": range(20)}], ids=["in order", "own"])
def test_nothing_begins_early_under_another_default_device(train: ImageFolder, arguments: dict[str, Any]) -> None:
    loader = loader_of(train, **arguments)
    batches = iter(loader)
    next(batches)
    with torch.device("meta"):
        list(batches)
    assert not begins_early(loader)
    list(loader)
    assert begins_early(loader) == (arguments != {"sampler": range(20)})


def test_loops_in_inference_mode_and_outside_of_it_follow_each_other(train: ImageFolder) -> None:
    torch.manual_seed(5)
    expected, _ = epochs(never_early(loader_of(train)))
    torch.manual_seed(5)
    loader, found = loader_of(train), []
    for epoch in range(4):
        assert begins_early(loader) == (epoch > 0)
        with torch.inference_mode(epoch % 2 == 0):
            found.append(list(loader))
    assert are_same(found, expected)


def test_a_state_between_two_epochs_is_that_of_the_epoch_that_has_ended(train: ImageFolder) -> None:
    def resumed(loader: Any) -> Epoch:
        list(loader)
        state = loader.state_dict()
        again = loader_of(train)
        again.load_state_dict(state)
        return epochs(again, count=1)[0][0]

    torch.manual_seed(5)
    expected = resumed(never_early(loader_of(train)))
    torch.manual_seed(5)
    loader = loader_of(train)
    assert are_same([resumed(loader)], [expected])
    assert begins_early(loader)


def test_a_state_in_the_last_batches_of_an_epoch_is_of_that_epoch(train: ImageFolder) -> None:
    loader = loader_of(train, seed=3)
    whole = [labels.tolist() for _, labels in loader]
    for taken in range(len(whole) + 1):
        loader = loader_of(train, seed=3)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        again = loader_of(train, seed=3)
        again.load_state_dict(loader.state_dict())
        left = [labels.tolist() for _, labels in again]
        assert left == whole[taken:] or taken == len(whole)


def test_a_loop_that_is_left_in_its_last_batches_is_followed_by_the_next_epoch(train: ImageFolder) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    for taken in range(1, len(expected[0]) + 1):
        loader = loader_of(train, seed=3)
        batches = iter(loader)
        first = [next(batches) for _ in range(taken)]
        del batches
        second = list(loader)
        assert are_same([first, second], [expected[0][:taken], expected[1]])


def test_an_iterator_that_has_ended_takes_nothing_of_the_next_epoch(train: ImageFolder) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    loader = loader_of(train, seed=3)
    found = []
    ended: list[Any] = []
    for _ in range(3):
        batches = iter(loader)
        epoch = []
        for batch in batches:
            epoch.append(batch)
            for each in ended:
                with pytest.raises(StopIteration):
                    next(each)
        ended.append(batches)
        found.append(epoch)
    assert are_same(found, expected[:3])


def test_two_loops_at_once_may_be_in_the_last_batches_of_an_epoch_and_in_the_first_of_the_next(
    train: ImageFolder,
) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3, prefetch=3)))
    loader = loader_of(train, seed=3, prefetch=3)
    batches, first = iter(loader), []
    while not begins_early(loader):
        first.append(next(batches))
    others = iter(loader)  # the first loop has the rest of its batches
    second = [next(others)]
    first += list(batches)
    second += list(others)
    assert are_same([first, second], expected[:2])


def test_loops_in_several_threads_follow_each_other(train: ImageFolder) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    loader, found = loader_of(train, seed=3), []
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(list(loader)))
        thread.start()
        thread.join(WAIT_S)
    assert are_same(found, expected[:3])


def test_a_copy_begins_its_own_epochs(train: ImageFolder) -> None:
    loader = loader_of(train, seed=3)
    list(loader)
    copied = copy.copy(loader)
    assert begins_early(loader) and not begins_early(copied)
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    assert are_same([list(copied), list(loader)], [expected[1], expected[1]])


def test_a_worker_that_is_lost_with_the_next_epoch_is_replaced(
    train: ImageFolder, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    loader = loader_of(train, seed=3)
    found = [list(loader)]
    assert begins_early(loader)
    with without_torchs_signal(), caplog.at_level(logging.WARNING, "proxyloader"):
        killed = multiprocessing.active_children()[0]
        killed.kill()
        killed.join(WAIT_S)
        found.append(list(loader))
    assert "worker was lost" in caplog.text
    assert are_same(found, expected[:2])


def test_trainers_can_end_the_workers_of_the_next_epoch(train: ImageFolder) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    loader = loader_of(train, seed=3)
    found = []
    for _ in range(3):
        found.append(list(loader))
        loader._iterator._shutdown_workers()
        loader._iterator = None
    assert are_same(found, expected[:3])


def test_a_loader_that_is_dropped_takes_the_next_epoch_with_it(train: ImageFolder) -> None:
    loader = loader_of(train, seed=3)
    batches = iter(loader)
    list(batches)
    gone = weakref.ref(loader)
    gc.disable()  # no cycle may keep it
    try:
        del loader
        assert gone() is None
        del batches
    finally:
        gc.enable()
    for child in multiprocessing.active_children():
        child.join(WAIT_S)
    assert not multiprocessing.active_children()


def test_an_iterator_outlives_its_loader(train: ImageFolder) -> None:
    batches = iter(loader_of(train, seed=3))
    assert len(list(batches)) == 7


def writes_over(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def keeps_its_times(path: Path, content: bytes) -> None:
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=times)


def puts_another_in_its_place(path: Path, content: bytes) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(content)
    other.replace(path)


@pytest.mark.parametrize("seed", [None, 3], ids=["no seed", "a seed"])
@pytest.mark.parametrize("changes", [writes_over, keeps_its_times, puts_another_in_its_place])
def test_a_file_that_is_changed_between_two_epochs_is_read_anew(
    train: ImageFolder, tmp_path: Path, changes: Callable[[Path, bytes], None], seed: int | None
) -> None:
    def changed(early: bool) -> list[Epoch]:
        root = tmp_path / str(early)
        shutil.copytree(train.root, root)
        time.sleep(2 * TICK_NS / 1e9)
        paths = sorted(root.rglob("*.jpg"))
        torch.manual_seed(5)
        loader = loader_of(ImageFolder(str(root), TRAIN), seed=seed)
        found, went_on = epochs(
            loader if early else never_early(loader),
            lambda loader, epoch: changes(paths[40], paths[epoch].read_bytes()) if epoch else None,
        )
        assert went_on == [False, early, False, False]
        return found

    assert are_same(changed(True), changed(False))


def test_a_file_that_is_gone_between_two_epochs_is_an_error_of_the_second(train: ImageFolder, tmp_path: Path) -> None:
    shutil.copytree(train.root, tmp_path, dirs_exist_ok=True)
    time.sleep(2 * TICK_NS / 1e9)
    loader = loader_of(ImageFolder(str(tmp_path), TRAIN))
    list(loader)
    assert begins_early(loader)
    next(tmp_path.rglob("*.jpg")).unlink()
    with pytest.raises(FileNotFoundError):
        list(loader)


def test_nothing_begins_early_where_a_file_system_may_tell_of_changes_late(
    train: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_epoch, "is_local", lambda path: False)
    loader = loader_of(train, seed=3)
    list(loader)
    assert not begins_early(loader)


def test_a_source_of_a_sampler_may_change_in_place(train: ImageFolder) -> None:
    source = list(range(40))
    loader = loader_of(train, sampler=SequentialSampler(source), seed=3)
    assert sum(len(labels) for _, labels in loader) == 40 and begins_early(loader)
    del source[20:]
    assert sum(len(labels) for _, labels in loader) == 20


def test_an_argument_that_is_not_valid_in_the_middle_of_a_loop_is_told_of_by_the_next_one(train: ImageFolder) -> None:
    loader = loader_of(train, seed=3)
    batches = iter(loader)
    next(batches)
    loader.prefetch = 0
    assert len(list(batches)) == 6
    with pytest.raises(ValueError, match="prefetch"):
        iter(loader)
    loader.prefetch = 2
    assert len(list(loader)) == 7


def test_the_last_batches_come_if_a_worker_is_lost_when_the_next_epoch_begins(
    train: ImageFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    loader = loader_of(train, seed=3)

    def kills(key: int) -> Any:
        killed = multiprocessing.active_children()[0]
        killed.kill()
        killed.join(WAIT_S)
        return EarlyDraws(key)

    with without_torchs_signal(), caplog.at_level(logging.WARNING, "proxyloader"):
        monkeypatch.setattr(early_epoch, "EarlyDraws", kills)
        found = [list(loader)]
        assert "could not begin the next epoch" in caplog.text
        monkeypatch.undo()
        found.append(list(loader))
    assert are_same(found, expected[:2])


def test_a_file_that_is_repaired_between_two_epochs_is_read_anew(train: ImageFolder, tmp_path: Path) -> None:
    shutil.copytree(train.root, tmp_path, dirs_exist_ok=True)
    bad = next(tmp_path.rglob("*.jpg"))
    good = bad.read_bytes()
    for on_error in ("raise", "skip"):
        bad.write_bytes(b"no picture")
        loader = loader_of(ImageFolder(str(tmp_path), TRAIN), seed=3, on_error=on_error, batch_size=48)
        with contextlib.suppress(ImageError):
            list(loader)
        assert loader.errors.total == 1
        bad.write_bytes(good)
        assert sum(len(labels) for _, labels in loader) == 48
        assert loader.errors.total == 1


@pytest.mark.parametrize("has_begun", [False, True], ids=["anew", "early"])
def test_an_epoch_that_was_interrupted_when_it_began_is_tried_again(
    train: ImageFolder, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = epochs(never_early(loader_of(train, seed=3)))
    loader = loader_of(train, seed=3) if has_begun else never_early(loader_of(train, seed=3))
    found = [list(loader)]
    assert begins_early(loader) == has_begun

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(dataloader, "BatchAssembler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    monkeypatch.undo()
    found.append(list(loader))
    assert are_same(found, expected[:2])


def test_a_file_that_cannot_be_read_is_told_of_in_its_own_epoch(train: ImageFolder, tmp_path: Path) -> None:
    shutil.copytree(train.root, tmp_path, dirs_exist_ok=True)
    (next(tmp_path.iterdir()) / "bad.jpg").write_bytes(b"no picture")
    loader = loader_of(ImageFolder(str(tmp_path), TRAIN), seed=3, on_error="skip", shuffle=False, batch_size=49)
    for epoch in range(1, 4):
        assert sum(len(labels) for _, labels in loader) == 48
        assert loader.errors.total == epoch
    loader = loader_of(ImageFolder(str(tmp_path), TRAIN), seed=3, shuffle=False, batch_size=49)
    for epoch in range(1, 4):
        with pytest.raises(ImageError, match="bad.jpg"):
            list(loader)
        assert loader.errors.total == epoch


def test_a_child_that_is_forked_begins_the_epoch_anew(photos: Path) -> None:
    script = f"""
        import os
        from torchvision import transforms
        from torchvision.datasets import ImageFolder
        import proxyloader
        from proxyloader.transforms.resize import Resize
        Resize.slow_on_cpu = False

        if __name__ == "__main__":
            transform = transforms.Compose([transforms.RandomResizedCrop((24, 32)), transforms.ToTensor()])
            dataset = ImageFolder({str(photos)!r}, transform)
            loader = proxyloader.DataLoader(
                dataset, 7, shuffle=True, num_workers=2, persistent_workers=True, seed=3, device="cpu"
            )
            list(loader)
            assert loader._early._feed is not None
            child = os.fork()
            sums = [float(images.sum()) for images, labels in loader]
            print(len(sums), sum(sums), flush=True)
            if not child:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("over")
    """
    done = scripts.run(textwrap.dedent(script), timeout_s=WAIT_S)
    first, second, over = done.stdout.split("\n")[:3]
    assert first == second and over == "over", done
