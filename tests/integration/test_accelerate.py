"""Loaders that Hugging Face's Accelerate has prepared are this library's, and give what torch's give there."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader as StockLoader, RandomSampler, SequentialSampler, Subset
from torchvision import transforms

import proxyloader
from proxyloader.loader import accelerate as ours_in_accelerate
from proxyloader.loader.options import LoaderOptions

from .. import scripts
from ..limits import WAIT_S
from ..side_by_side import assert_same, tried
from ..tiers import by_default
from .one_rank import Numbered
from .roads import Streamed

data_loader = pytest.importorskip("accelerate.data_loader")
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
SAMPLES, BATCH = 45, 4

KINDS = {"torch": StockLoader, "ours": functools.partial(proxyloader.DataLoader, device="cpu")}


def samples(root: str) -> Any:
    return Subset(Numbered(root, TRANSFORM), range(SAMPLES))


@dataclass
class Case:
    """A way to use Accelerate, and what its loader is made with.

    Attributes:
        config: of Accelerate's loaders.
        arguments: of the loader; its dataset is that of ``samples``, or a stream of it.
        skip: number of batches of the first epoch that are skipped.
        by_batch: returns a batch sampler for a number of samples, in the place of ``batch_size`` and ``shuffle``.
    """

    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    skip: int = 0
    by_batch: Callable[[int], Any] | None = None
    streams: bool = False

    def loader(self, kind: str, root: str) -> Any:
        dataset = samples(root)
        if self.by_batch is not None:
            return KINDS[kind](dataset, batch_sampler=self.by_batch(len(dataset)), **self.arguments)
        if self.streams:
            return KINDS[kind](Streamed(dataset), BATCH, **self.arguments)
        return KINDS[kind](dataset, BATCH, **{"shuffle": True} | self.arguments)

    @property
    def dispatches(self) -> bool:
        """Whether one process reads for all."""
        return bool(self.config.get("dispatch_batches", self.streams))

    def accelerator(self) -> Accelerator:
        return Accelerator(
            gradient_accumulation_steps=2, cpu=True, dataloader_config=DataLoaderConfiguration(**self.config)
        )


CASES = {
    "plain": Case(),
    "workers": Case(arguments={"num_workers": 1}),
    "split": Case({"split_batches": True}),
    "dispatched": Case({"dispatch_batches": True}),
    "dispatched and split": Case({"dispatch_batches": True, "split_batches": True}, {"num_workers": 1}),
    "uneven": Case({"even_batches": False}),
    "uneven and split": Case({"even_batches": False, "split_batches": True}),
    "seedable": Case({"use_seedable_sampler": True, "data_seed": 5}),
    "full batches": Case(arguments={"drop_last": True, "shuffle": False}),
    "own batches": Case(by_batch=lambda count: BatchSampler(RandomSampler(range(count)), BATCH, False)),
    "own class of batches": Case(by_batch=lambda count: Pairs(SequentialSampler(range(count)), 2, False)),
    "skipping": Case(skip=2),
    "skipping and dispatched": Case({"dispatch_batches": True}, skip=2),
    "skipping and seedable": Case({"use_seedable_sampler": True}, {"num_workers": 1}, skip=3),
    "stream": Case(streams=True),
    "stream, each its own": Case({"dispatch_batches": False}, {"num_workers": 1}, streams=True),
    "skipping in a stream": Case(skip=1, streams=True),
}
if find_spec("torchdata"):
    CASES["stateful"] = Case({"use_stateful_dataloader": True})
    CASES["dispatched and stateful"] = Case({"dispatch_batches": True, "use_stateful_dataloader": True})


class Pairs(BatchSampler):
    """A user's own class, with batches in another order."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch[::-1] for batch in super().__iter__()])


def shown(kind: str, case: Case, root: str) -> dict[str, Any]:
    """What a training loop sees of a loader that Accelerate has prepared."""
    accelerator = case.accelerator()
    torch.manual_seed(21)
    given = case.loader(kind, root)
    loader = accelerator.prepare(given)
    epochs = [_epoch(accelerator, accelerator.skip_first_batches(loader, case.skip)) if case.skip else None]
    epochs += [_epoch(accelerator, loader) for _ in range(2)]
    if kind == "ours":
        assert_ours(loader, given, reads=accelerator.is_main_process or not case.dispatches)
    return {"length": tried(len, loader), "epochs": epochs}


def assert_ours(loader: Any, given: Any, reads: bool = True) -> None:
    """Accelerate's loader is made of one of ours, set as the one that it was given, and its images come from DALI.

    ``reads`` is False for a process that only receives batches of another.
    """
    inner = loader.base_dataloader
    assert isinstance(loader, proxyloader.DataLoader) and isinstance(inner, proxyloader.DataLoader)
    assert LoaderOptions.from_loader(inner) == LoaderOptions.from_loader(given)
    assert (inner._recorder.images[0] > 0) == reads and not inner._recorder.images[2]


def _epoch(accelerator: Accelerator, loader: Any) -> list[Any]:
    steps = []
    for images, numbers in loader:
        state = accelerator.gradient_state
        with accelerator.accumulate():
            steps.append(
                {
                    "images": images,
                    "numbers": numbers.tolist(),
                    "is last": state.end_of_dataloader,
                    "remainder": state.remainder,
                    "steps now": accelerator.sync_gradients,
                    "gathered": accelerator.gather_for_metrics(numbers).tolist() if accelerator.even_batches else None,
                }
            )
    return steps


def resumed(kind: str, case: Case, root: str) -> Any:
    """What is left after two batches of the second epoch, in the loop that goes on and in one that resumes."""

    def prepared() -> Any:
        torch.manual_seed(21)
        return case.accelerator().prepare(case.loader(kind, root))

    loader, left, state = prepared(), [], {}
    for _ in range(2):
        left = []
        for step, (images, numbers) in enumerate(loader):
            left.append((images, numbers.tolist()))
            state = copy.deepcopy(loader.state_dict()) if step == 1 else state
    again = prepared()
    again.load_state_dict(state)
    return left[2:], [(images, numbers.tolist()) for images, numbers in again]


def refused(root: str) -> str:
    """What is said of a loader that divides its samples itself."""
    loader = proxyloader.DataLoader(samples(root), BATCH, num_shards="auto", device="cpu")
    try:
        Accelerator(cpu=True).prepare(loader)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    """As a script it compares both in the processes of one group, and prints one line of JSON for each of them."""
    meet, root, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    distributed.init_process_group("gloo", f"file://{meet}", timeout=timedelta(seconds=2 * WAIT_S), **ranks)
    told: dict[str, Any] = {"rank": distributed.get_rank(), "cases": {}, "refused": refused(root)}
    for name in names:
        theirs, ours = (shown(kind, CASES[name], root) for kind in KINDS)
        assert_same(ours, theirs, name)
        told["cases"][name] = [[step["numbers"] for step in epoch or []] for epoch in ours["epochs"]]
    for name, by_epoch in {"seedable": True, "plain": False}.items():
        case = Case({"use_stateful_dataloader": True, "use_seedable_sampler": by_epoch})
        left, again = ([numbers for _, numbers in part] for part in resumed("ours", case, root))
        told["left " + name], told["resumed " + name] = left, again
    print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


FULL = -(-SAMPLES // BATCH)

torchdata_warns = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


pytestmark = pytest.mark.usefixtures("no_accelerator_is_left")


def numbers_of(loader: Any) -> list[list[int]]:
    return [numbers.tolist() for _, numbers in loader]


def given_and_prepared(photos: Path, case: Case, kind: str = "ours") -> tuple[Any, Any]:
    given = case.loader(kind, str(photos))
    return given, case.accelerator().prepare(given)


@torchdata_warns
@pytest.mark.parametrize("case", by_default(CASES, "dispatched", "seedable", "own batches", "skipping", "stream"))
def test_a_prepared_loader_gives_what_torchs_gives(photos: Path, case: Case) -> None:
    theirs, ours = (shown(kind, case, str(photos)) for kind in ("torch", "ours"))
    assert_same(ours, theirs)
    _, *epochs = ours["epochs"]
    for epoch in epochs:
        seen = sorted(number for step in epoch for number in step["numbers"])
        assert seen == list(range(44 if case.arguments.get("drop_last") else 45))
        assert [step["is last"] for step in epoch] == [False] * (len(epoch) - 1) + [True]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["workers", "dispatched", "uneven", "skipping", "stream"], id="some"),
        pytest.param([*CASES], id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_get_what_torchs_loader_gives_them(photos: Path, tmp_path: Path, names: list[str]) -> None:
    script, given = "from tests.integration.test_accelerate import main; main()", (tmp_path / "meet", photos)
    environment = {"OMP_NUM_THREADS": "1"}
    done = scripts.run_ranks(script, *given, json.dumps(names), ranks=2, timeout_s=4 * WAIT_S, environment=environment)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    told = [json.loads(line) for each in done for line in each.stdout.splitlines() if line.startswith("{")]
    assert [each["rank"] for each in told] == [0, 1]
    assert all("num_shards=2" in each["refused"] and "without num_shards" in each["refused"] for each in told)
    for name in names:
        case = CASES[name]
        parts = [each["cases"][name] for each in told]
        for epoch in (1, 2):
            seen = [number for part in parts for batch in part[epoch] for number in batch]
            even = case.config.get("even_batches", True)
            assert set(seen) == set(range(40 if case.arguments.get("drop_last") else 45)), name
            assert len(seen) == (45 if not even else len(seen)) and len(seen) < 45 + 2 * BATCH, name
            assert len(parts[0][epoch]) - len(parts[1][epoch]) in ((0,) if even else (0, 1)), name
    for name in ("plain", "seedable"):
        assert all(each[f"resumed {name}"] == each[f"left {name}"] != [] for each in told)
        assert told[0][f"left {name}"] != told[1][f"left {name}"]


@torchdata_warns
@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}], ids=["plain", "dispatched"])
def test_without_a_state_it_says_what_a_state_needs(photos: Path, config: dict[str, Any]) -> None:
    (_, loader), (_, stock) = (given_and_prepared(photos, Case(config), kind) for kind in ("ours", "torch"))
    next(iter(loader))
    with pytest.raises(AttributeError):
        stock.state_dict()
    with pytest.raises(AttributeError, match="state_dict"):
        loader.state_dict()
    assert numbers_of(loader) and not hasattr(loader.base_dataloader, "state_dict")


def test_save_state_and_load_state_keep_the_loaders_place(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    case = Case({"use_stateful_dataloader": True}, {"seed": 3, "num_workers": 1})

    def begun() -> Any:
        accelerator = case.accelerator()
        return accelerator, accelerator.prepare(case.loader("ours", str(photos)))

    accelerator, loader = begun()
    whole = []
    for epoch in range(3):
        for step, (images, numbers) in enumerate(loader):
            whole.append((images, numbers.tolist()))
            if (epoch, step) == (1, 3):
                accelerator.save_state(str(tmp_path))
    again, resumed_loader = begun()
    again.load_state(str(tmp_path))
    rest = [(images, numbers.tolist()) for _ in range(2) for images, numbers in resumed_loader]
    assert_same(rest, whole[FULL + 4 :])


def test_with_a_seed_the_epoch_is_the_one_that_accelerate_is_told(photos: Path) -> None:
    case = Case(arguments={"seed": 3})
    (_, loader), (_, again) = (given_and_prepared(photos, case) for _ in range(2))
    whole = [list(loader) for _ in range(3)]
    again.set_epoch(1)
    left = data_loader.skip_first_batches(again, 5)
    assert_same(list(left), whole[1][5:])
    again.set_epoch(2)
    assert_same(list(again), whole[2])
    assert whole[0][0][1].tolist() != whole[1][0][1].tolist()


def test_a_state_that_was_loaded_before_is_kept(photos: Path) -> None:
    case = Case(arguments={"seed": 3})
    loader = case.loader("ours", str(photos))
    list(loader)
    batches = iter(loader)
    first = next(batches)
    again = case.loader("ours", str(photos))
    again.load_state_dict(loader.state_dict())
    prepared = case.accelerator().prepare(again)
    rest = list(batches)
    assert_same(list(prepared), rest)
    assert len(rest) == FULL - 1 and first[1].tolist() != rest[0][1].tolist()
    assert numbers_of(prepared) == numbers_of(loader)


def test_options_are_kept(photos: Path) -> None:
    options = {"dtype": torch.float16, "memory_format": torch.channels_last, "seed": 7, "on_error": "skip"}
    options |= {"prefetch": 3, "num_threads": 2, "check_scans": False}
    given, prepared = given_and_prepared(photos, Case(arguments=options))
    images, _ = next(iter(data_loader.skip_first_batches(prepared, 1)))
    assert images.dtype == torch.float16 and images.is_contiguous(memory_format=torch.channels_last)
    list(prepared)
    assert_ours(prepared, given)


@pytest.mark.parametrize("config", [{}, {"use_stateful_dataloader": True}], ids=["plain", "stateful"])
def test_batches_may_come_in_any_order(photos: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]) -> None:
    if config:
        pytest.importorskip("torchdata")
    given, prepared = given_and_prepared(photos, Case(config, {"in_order": False, "num_workers": 2}))
    assert sorted(chain(*numbers_of(prepared))) == list(range(SAMPLES))
    assert_ours(prepared, given)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [("in_order=True" in each and "Accelerate" in each) for each in warned] == [True] * len(config)


@pytest.mark.parametrize("streams", [False, True], ids=["samples", "a stream"])
def test_a_loader_may_be_prepared_without_an_accelerator(photos: Path, streams: bool) -> None:
    """Accelerate's dataset has ``__len__`` also around a stream that has not."""
    case = Case(arguments={} if streams else {"shuffle": False}, streams=streams)
    given = {kind: case.loader(kind, str(photos)) for kind in KINDS}
    part = {"num_processes": 2, "process_index": 1}
    prepared = {kind: data_loader.prepare_data_loader(loader, **part) for kind, loader in given.items()}
    assert numbers_of(prepared["ours"]) == numbers_of(prepared["torch"]) != []
    assert_ours(prepared["ours"], given["ours"])


def test_batches_are_skipped_of_a_loader_that_is_not_prepared(photos: Path) -> None:
    given = Case(arguments={"shuffle": False}).loader("ours", str(photos))
    loader = data_loader.skip_first_batches(given, 2)
    assert isinstance(loader, proxyloader.DataLoader)
    assert numbers_of(loader) == numbers_of(given)[2:] and loader.stats().images_by_dali
    stream = Case(streams=True).loader("ours", str(photos))
    assert numbers_of(data_loader.skip_first_batches(stream, 2)) == numbers_of(stream)[2:]


def test_a_prepared_loader_counts_for_itself_and_is_a_copy_after_pickle(photos: Path) -> None:
    given, prepared = given_and_prepared(photos, Case(arguments={"seed": 3}))
    copied = pickle.loads(pickle.dumps(prepared.base_dataloader))
    assert_same(list(copied), list(prepared))
    stats = prepared.stats()
    assert (stats.batches, stats.images, stats.images_by_dali) == (FULL, SAMPLES, SAMPLES)
    assert given.stats().batches == 0


def test_torchs_loader_beside_this_one_stays_torchs(photos: Path) -> None:
    accelerator = Case().accelerator()
    ours, theirs = (Case(arguments={"shuffle": False}).loader(kind, str(photos)) for kind in ("ours", "torch"))
    prepared = accelerator.prepare(ours, theirs)
    for given, loader in ((theirs, prepared[1]), (theirs, data_loader.skip_first_batches(theirs, 0))):
        assert not isinstance(loader, proxyloader.DataLoader)
        assert numbers_of(loader) == numbers_of(given)


def test_another_accelerate_gives_torchs_loader_and_one_warning(
    photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours_in_accelerate.patch_accelerate()
    monkeypatch.setattr(data_loader, "_PYTORCH_DATALOADER_KWARGS", copy.copy(data_loader._PYTORCH_DATALOADER_KWARGS))
    del data_loader._PYTORCH_DATALOADER_KWARGS[ours_in_accelerate.BUILD]
    monkeypatch.delattr(data_loader, "DataLoaderAdapter")
    ours_in_accelerate.warn_loader_replaced.cache_clear()
    accelerator = Case().accelerator()
    for _ in range(2):
        prepared = accelerator.prepare(Case().loader("ours", str(photos)))
        assert not isinstance(prepared, proxyloader.DataLoader)
        assert sorted(chain(*numbers_of(prepared))) == list(range(SAMPLES))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("Accelerate 1.") and "num_shards='auto'" in warning
