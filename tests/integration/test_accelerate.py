"""Loaders that Hugging Face's Accelerate has prepared are this library's, and give what torch's give there."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import proxyloader
from proxyloader.loader import accelerate as ours_in_accelerate

from .. import scripts
from ..limits import WAIT_S
from ..side_by_side import assert_same
from ..tiers import by_default

data_loader = pytest.importorskip("accelerate.data_loader")
from .accelerated import BATCH, CASES, KINDS, SAMPLES, Case, assert_ours, resumed, shown  # noqa: E402

FULL = -(-SAMPLES // BATCH)

torchdata_warns = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


pytestmark = pytest.mark.usefixtures("no_accelerator_is_left")


def numbers_of(loader: Any) -> list[list[int]]:
    return [numbers.tolist() for _, numbers in loader]


def given_and_prepared(photos: Path, case: Case, kind: str = "ours") -> tuple[Any, Any]:
    given = case.loader(kind, str(photos))
    return given, case.accelerator().prepare(given)


BY_DEFAULT = ("dispatched", "seedable", "own batches", "skipping", "stream")


@torchdata_warns
@pytest.mark.parametrize("case", by_default(CASES, *BY_DEFAULT))
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
        pytest.param(["workers", "split", "dispatched", "uneven", "seedable", "skipping", "stream"], id="some"),
        pytest.param([*CASES], id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_get_what_torchs_loader_gives_them(photos: Path, tmp_path: Path, names: list[str]) -> None:
    script, given = "from tests.integration.accelerated import main; main()", (tmp_path / "meet", photos)
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
@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True}], ids=["plain", "seedable"])
def test_a_state_of_mid_epoch_brings_back_what_was_left(photos: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("torchdata")
    case = Case(config | {"use_stateful_dataloader": True})
    left, again = resumed("ours", case, str(photos))
    theirs, _ = resumed("torch", case, str(photos))
    assert [numbers for _, numbers in again] == [numbers for _, numbers in left]
    assert_same(left, theirs)


@torchdata_warns
@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}], ids=["plain", "dispatched"])
def test_without_a_state_it_says_what_a_state_needs(photos: Path, config: dict[str, Any]) -> None:
    (_, loader), (_, stock) = (given_and_prepared(photos, Case(config), kind) for kind in ("ours", "torch"))
    next(iter(loader))
    with pytest.raises(AttributeError):
        stock.state_dict()
    with pytest.raises(AttributeError, match="use_stateful_dataloader=True"):
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
    assert [("in_order=False" in each and "Accelerate" in each) for each in warned] == [True] * len(config)


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
