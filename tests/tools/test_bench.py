"""``proxyloader bench``: cases in processes of their own, a record of what came out, and a comparison of records."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from proxyloader import make_dataset as dataset
from proxyloader.tools import cli, files
from proxyloader.tools.bench import photographs, process
from proxyloader.tools.bench.case_process import Failure, RoundResult, Trial, _Measured
from proxyloader.tools.bench.cases import BY_DEFAULT, CASES, Ranges, case_of, cases_for, loops_of, peers_for
from proxyloader.tools.bench.command import setting_of
from proxyloader.tools.bench.config import BenchConfig, Tuning
from proxyloader.tools.bench.datasets import DATASETS
from proxyloader.tools.bench.report import check_cases, check_settings, last_of, record_of, worse_than
from proxyloader.tools.bench.runner import Outcome, run, run_first_epochs
from proxyloader.tools.bench.sweep import Sweep, first_tunings, for_trials, second_tunings, sweep, values_of
from proxyloader.tools.bench.system_info import warnings_for
from proxyloader.tools.bench.tables import as_markdown, as_tables, rows_of
from proxyloader.tools.cli import main

from ..faults import children_of
from ..limits import STOP_S, WAIT_S
from ..tiers import has_gpu

SMALL = ["--batch-size", "16", "--workers", "1", "--threads", "1", "--hw-decoder-load", "1", "--passes", "2"]
ON_CPU = ["--device", "cpu"]
SHORT = ["--rounds", "1", "--seconds", "0.1"]


def setting(root: Any, **changed: Any) -> BenchConfig:
    given: dict[str, Any] = {"root": str(root), "images": 48, "passes": 1, "batch_size": 16, "device": "cpu"}
    return BenchConfig(**given | {"tuning": Tuning(workers=1, threads=1)} | changed)


ONE = Ranges((1,), (1,), (1.0,))


def measured(root: Any, names: list[str], rounds: int = 1, tell: Any = print) -> dict[str, Outcome]:
    return run(dict.fromkeys(names, setting(root)), rounds, 0.1, tell)


def recorded(root: Any, outcomes: dict[str, Outcome], sweeps: Any = None, **changed: Any) -> Any:
    return record_of(setting(root, **changed), ONE, outcomes, sweeps or {}, "proxyloader bench")


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = set(children_of())
    yield
    assert not set(children_of()) - before


@pytest.fixture
def warm_start(monkeypatch: pytest.MonkeyPatch, warm_forkserver: None) -> None:
    """The process of each case begins with torch imported, where it may: a process that was forked can use no GPU that
    the one before it has used, and the first batch on a GPU is to be that of a user's new process."""
    if not has_gpu():
        how: Any = SimpleNamespace(
            get_context=lambda _: multiprocessing.get_context("forkserver"),
            get_start_method=multiprocessing.get_start_method,
        )
        monkeypatch.setattr(process, "multiprocessing", how)


WARM = pytest.mark.usefixtures("warm_start")


@WARM
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_it_measures_writes_and_compares(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    out = tmp_path / "new" / "bench.jsonl"
    options = ["bench", "--data", str(photos), *SMALL, *SHORT, "--device", device, "--out", str(out)]
    names = cases_for(setting(photos, device=device))
    if device == "cpu":
        few = ["torch", "upstream-proxy", "proxyloader", "FileReaderLoader", "decode-only"]
        names = [name for name in names if name.removesuffix(BY_DEFAULT) in few]
    assert main([*options, "--only", *names]) == 0
    record = last_of(out)
    assert sorted(record["cases"]) == sorted(names) and not record["left_out"]
    assert record["machine"]["cores"] >= 1 and record["batch_size"] == 16 and "root" not in record
    for case in record["cases"].values():
        assert "failure" not in case, case
        assert case["images_per_s"] > 0 and case["first_batch_s"] > 0
        assert case["cpu_ms_per_image"] > 0 and case["loop_cpu_ms_per_image"] > 0
        assert case["wait_ms"]["max"] >= case["wait_ms"]["p99"] >= case["wait_ms"]["p50"] > 0
        assert case["wait_ms"]["max"] >= case["pause_ms"] > 0
        assert case["host_mb"] > 50 and ("gpu_mb" in case) == (device == "cuda")
    assert out.with_suffix(".md").read_text().count("\n") == 2 + len(names)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert re.search(rf"\d+ cores \(.*\), python .*, torch {re.escape(torch.__version__)},", said.replace("\n", " "))

    record["cases"]["proxyloader"]["images_per_s"] *= 10
    better = tmp_path / "better.jsonl"
    better.write_text(json.dumps(record) + "\n")
    assert main([*options, "--only", "torch", "proxyloader", "--augment", "AugMix", "--check", str(better)]) == 1
    assert "proxyloader is at" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    tuned = ["torch", "proxyloader", "torch + AugMix", "proxyloader + AugMix"]
    assert list(last_of(out)["cases"]) == [*tuned, "proxyloader, by default", "proxyloader + AugMix, by default"]
    assert all(case["images_per_s"] > 0 for case in last_of(out)["cases"].values())


@pytest.mark.parametrize(
    "name",
    [
        *("torch", "nvidia-example", "iterator", "proxyloader", "FileReaderLoader"),
        "proxyloader, Image.open",
        *("decode-only", "decode-only, two pipelines"),
    ],
)
def test_every_case_loads_each_image_in_each_pass(photos: Path, name: str) -> None:
    loops = CASES[name].loops(setting(photos, batch_size=20, passes=5))
    for _ in range(2):
        assert sum(len(images) for images, *_ in next(loops)) == 5 * 48


@pytest.mark.exhaustive
def test_a_model_is_trained_beside_synthetic_batches(photos: Path) -> None:
    trains = setting(photos, model="resnet18", batch_size=4, images=8)
    assert "synthetic" in cases_for(trains) and "decode-only" not in cases_for(trains)
    (outcome,) = run({"synthetic": trains}, 1, 0.1, print).values()
    assert not outcome.failure and outcome.rounds[0].images_per_s > 0


def test_cases_that_need_a_gpu_are_left_out_without_one(photos: Path) -> None:
    names = cases_for(setting(photos))
    assert "torch-gpu" not in names and "synthetic" not in names
    tuned = [name for name in names if not name.endswith(BY_DEFAULT)]
    assert tuned == [name for name in CASES if name in names]
    on_gpu = cases_for(setting(photos, device="cuda"))
    assert {name for name in on_gpu if not name.endswith(BY_DEFAULT)} == {*CASES} - {"synthetic", "replay"}


def test_peers_are_measured_tuned_and_by_default_and_ceilings_tuned(photos: Path) -> None:
    names = cases_for(setting(photos, device="cuda"))
    with_defaults = {name for name in names if name + BY_DEFAULT in names}
    assert with_defaults == {*peers_for(setting(photos, device="cuda"))} - {"torch", "torch-gpu"}
    for name in ("torch", "torch-gpu"):  # their only setting is the number of workers, which their users have to say
        assert not case_of(name).takes and case_of(name).needs == ("workers",)


@WARM
def test_a_case_that_fails_says_why_and_the_others_go_on(photos: Path, tmp_path: Path) -> None:
    outcomes = measured(tmp_path / "nowhere", ["torch", "proxyloader"])
    for outcome in outcomes.values():
        assert "FileNotFoundError" in outcome.failure and not outcome.is_missing and not outcome.rounds
    assert all(row[1].startswith("failed: ") for row in rows_of(recorded(photos, outcomes)))


def test_a_loop_of_few_batches_is_warned_of(photos: Path) -> None:
    few, enough = (setting(photos, images=images, batch_size=16) for images in (48, 64))
    assert any("A loop has 3 batches" in warning for warning in warnings_for(few))
    assert not any("A loop has" in warning for warning in warnings_for(enough))


def test_where_no_package_is_there_nothing_is_in_the_tables(photos: Path) -> None:
    outcomes = {"iterator": Outcome(setting(photos), failure="No module named 'nvidia'", is_missing=True)}
    record = recorded(photos, outcomes)
    assert record["left_out"] == {"iterator": "No module named 'nvidia'"}
    assert as_tables(record) == [] and as_markdown(record)


@pytest.mark.exhaustive
def test_where_all_cases_fail_the_status_says_so(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    for number in range(16):
        (tmp_path / "data" / "a" / f"{number}.jpg").write_text("no image")
    options = ["bench", "--data", str(tmp_path / "data"), *SMALL, *ON_CPU, *SHORT, "--out", str(tmp_path / "a.jsonl")]
    assert main([*options, "--only", "FileReaderLoader"]) == 1
    assert "no image format" in last_of(tmp_path / "a.jsonl")["cases"]["FileReaderLoader"]["failure"]


def test_a_case_that_hangs_is_ended(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HUNG_S", 0.01)
    (outcome,) = measured(photos, ["torch"]).values()
    assert outcome.failure == "hung for 0 s"


# --- tuning ----------------------------------------------------------------------------------------------------------


@WARM
def test_the_fastest_tuning_is_kept_and_each_is_recorded(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyloader.tools.bench.sweep.AT_LEAST_S", 0.0)  # only the order of the speeds is looked at
    told: list[str] = []
    ranges = Ranges((1, 2), (1, 2), (0.65, 1.0))
    found = sweep(setting(photos), ["torch", "iterator", "proxyloader", "decode-only"], ranges, told.append)
    tried = {name: [tuning for tuning, _ in each.trials] for name, each in found.items()}
    assert tried["torch"] == [Tuning(2), Tuning(1)]
    assert tried["iterator"] == tried["decode-only"] == [Tuning(None, 1), Tuning(None, 2)]  # no engines on a CPU
    assert tried["proxyloader"][:2] == [Tuning(2, 1), Tuning(2, 2)] and len(tried["proxyloader"]) == 3
    for each in found.values():
        speeds = {tuning: trial.images_per_s for tuning, trial in each.trials if isinstance(trial, Trial)}
        assert len(speeds) == len(each.trials) and speeds[each.best] == max(speeds.values()) > 0
    assert len(told) == 9 and told[0].startswith("trial of torch (2 workers): ")
    record = recorded(photos, {"torch": outcome(9)}, found)
    assert record["cases"]["torch"]["trials"][1]["workers"] == 1


def test_shares_of_the_engines_are_tried_with_each_number_of_threads_on_a_gpu(photos: Path) -> None:
    values = values_of("upstream-proxy", setting(photos, device="cuda"), Ranges((4, 8, 16), (4, 8), (0.65, 1.0)))
    first = first_tunings(values)
    assert first == [Tuning(8, 4, 0.65), Tuning(8, 4, 1.0), Tuning(8, 8, 0.65), Tuning(8, 8, 1.0)]
    assert second_tunings(values, first[1]) == [Tuning(4, 4, 1.0), Tuning(16, 4, 1.0)]


def test_where_there_is_nothing_to_choose_nothing_is_tried(photos: Path) -> None:
    assert sweep(setting(photos), ["torch"], ONE, print) == {"torch": Sweep(Tuning(1))}


@pytest.mark.parametrize(
    ("images", "batch_size", "passes", "trial_passes"), [(8192, 256, 6, 2), (8192, 256, 1, 1), (512, 64, 12, 8)]
)
def test_loops_of_trials_have_some_batches_for_each_worker(
    images: int, batch_size: int, passes: int, trial_passes: int, photos: Path
) -> None:
    of_rounds = setting(photos, images=images, batch_size=batch_size, passes=passes)
    assert for_trials(of_rounds, Ranges((8, 16), (4,), (1.0,))) == replace(of_rounds, passes=trial_passes)


@pytest.mark.exhaustive
def test_a_tuning_that_fails_keeps_none_of_the_others_from_being_tried(photos: Path) -> None:
    found = sweep(setting(photos), ["torch"], Ranges((-1, 1, 2), (1,), (1.0,)), print)["torch"]
    failures = [(tuning.workers, isinstance(trial, Failure)) for tuning, trial in found.trials]
    assert failures == [(1, False), (-1, True), (2, False)] and found.best.workers in (1, 2)
    assert "num_workers" in found.in_record()[1]["reason"]


@WARM
def test_a_slow_tuning_is_cut_short_and_judged_by_what_it_did(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyloader.tools.bench.sweep.AT_MOST_S", 0.0)
    found = sweep(setting(photos), ["torch"], Ranges((1, 2), (1,), (1.0,)), print)["torch"]
    assert all(isinstance(trial, Trial) and trial.was_cut and trial.images_per_s > 0 for _, trial in found.trials)


@pytest.mark.parametrize("name", DATASETS)
def test_other_datasets_have_the_same_images(name: str, photos: Path) -> None:
    if name == "HuggingFace":
        pytest.importorskip("datasets")
    found = {}
    for case in ("torch", "proxyloader"):
        assert f"{case} + {name}" in cases_for(setting(photos, datasets=(name,)))
        for added in ("", f" + {name}"):
            torch.manual_seed(3)
            batches = list(next(loops_of(case + added, setting(photos))))
            found[case + added] = torch.cat([images for images, _ in batches])
            assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted([0, 1, 2, 3] * 12)
    for case, images in found.items():
        assert (images - found["torch"]).abs().mean() < 0.05, case


def test_by_default_nothing_is_said_that_has_a_default(photos: Path) -> None:
    loaders = {}
    for name in ("torch", "proxyloader", "iterator"):
        loops: Any = loops_of(name, setting(photos, by_default=True, persistent_workers=False, tuning=Tuning(1)))
        next(loops)
        loaders[name] = loops.gi_frame.f_locals.get("loader") or loops.gi_frame.f_locals["batches"]
        loops.close()
    for name in ("torch", "proxyloader"):
        assert not loaders[name].persistent_workers and not loaders[name].pin_memory
    assert loaders["proxyloader"].num_threads == loaders["proxyloader"].hw_decoder_load == "auto"
    assert loaders["iterator"]._pipes[0].prefetch_queue_depth == 2


# --- first epochs ----------------------------------------------------------------------------------------------------


@WARM
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_first_epochs_are_measured_of_all_that_a_user_may_start_with(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    out = tmp_path / "first_epochs.jsonl"
    options = ["bench", "--data", str(photos), *SMALL, "--rounds", "1", "--device", device, "--out", str(out)]
    assert main([*options, "--first-epochs"]) == 0
    record = last_of(out)
    names = peers_for(setting(photos, device=device))
    assert list(record["cases"]) == names and record["page_cache"] == "warm" and record["passes"] == 1
    for case in record["cases"].values():
        assert "failure" not in case and len(case["epochs"]) == 3
        for epoch in case["epochs"]:
            assert epoch["images_per_s"] > 0 and epoch["images_per_s_after_first_batch"] > 0
            assert epoch["first_batch_s"] < 48 / epoch["images_per_s"]
        assert case["epochs"][0]["first_batch_s"] > 0  # that of a later one may lie ready in DALI
    assert out.with_suffix(".md").read_text().count("\n") == 2 + len(names)
    assert "round 1 of torch: " in capsys.readouterr().out
    assert main([*options, "--first-epochs", "--check", str(out)]) != 0
    assert "--check compares whole measurements" in capsys.readouterr().err


def test_each_first_epoch_is_of_a_new_process_with_an_empty_cache(photos: Path, tmp_path: Path) -> None:
    folders = iter(range(2))
    by_default = setting(photos, by_default=True, persistent_workers=False)

    def cache() -> str:
        path = tmp_path / str(next(folders))
        path.mkdir()
        return str(path)

    settings = {"torch": by_default, "iterator": setting(tmp_path / "nowhere")}
    outcomes = run_first_epochs(settings, 1, 2, cache, print)
    assert len(outcomes["torch"].epochs) == 1 and len(outcomes["torch"].epochs[0]) == 2
    assert outcomes["iterator"].failure and not outcomes["iterator"].epochs


@pytest.mark.parametrize("name", ["torch", "proxyloader"])
def test_other_loaders_start_with_the_queues_that_cuda_gives_them_and_all_with_an_empty_cache(
    photos: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    by_default = setting(photos, by_default=True, tuning=Tuning(0))
    epochs = _Measured(name, SimpleNamespace(value=0)).first_epochs(by_default, 1, "/empty")
    assert len(epochs) == 1 and os.environ["XDG_CACHE_HOME"] == "/empty"
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == {"torch": None, "proxyloader": "32"}[name]


def test_what_is_not_there_is_said_in_one_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--only", "tensorflow"]) != 0
    assert "there is no case 'tensorflow' here; there is 'torch', 'upstream-proxy'," in capsys.readouterr().err
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--augment", "Blur"]) != 0
    assert "there is no augmentation Blur here; there is ColorJitter, RandAugment," in capsys.readouterr().err
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--datasets", "CIFAR10"]) != 0
    assert "there is no dataset CIFAR10 here; there is OwnDataset, HuggingFace, Food101" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").touch()
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--check", str(tmp_path / "empty.jsonl")]) != 0
    assert "its last line is no record of proxyloader bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "0"], "--rounds is a whole number, 1 or more; got 0"),
        (["--images", "0"], "--images is a whole number, 1 or more; got 0"),
        (["--passes", "0"], "--passes is a whole number, 1 or more; got 0"),
        (["--workers", "-1"], "--workers is a whole number, 0 or more; got -1"),
        (["--threads", "0"], "--threads is a whole number, 1 or more; got 0"),
        (["--threads", "5000"], "--threads is at most 1024; got 5000"),
        (["--seconds", "nan"], "--seconds is a number of seconds, 0 or more; got nan"),
        (["--hw-decoder-load", "7"], "--hw-decoder-load is a share from 0 to 1; got 7.0"),
        (["--model", "foo"], "--model is none, or a classifier of torchvision such as resnet50; got 'foo'"),
        (["--batch-size", "49"], "has 48 images, and --batch-size 49: not one batch"),
        (["--images", "5"], "--images and --size say what to make, and --data gives a folder that has them"),
        (["--size", "web"], "--images and --size say what to make, and --data gives a folder that has them"),
        (["--out", "results.md"], "--out results.md is where records go, as JSON lines"),
        (["--only", "replay"], "there is no case 'replay' here (depends on --model); there is 'torch',"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(
    photos: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "bench.jsonl"
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--out", str(out), *options]) != 0
    assert said in capsys.readouterr().err
    assert not out.parent.exists()


def test_photographs_of_a_size_are_made_as_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(photographs.SIZES, "web", replace(photographs.SIZES["web"], size=(64, 48)))
    args = cli._parser().parse_args(["bench", "--size", "web", "--images", "40", "--batch-size", "8", *ON_CPU])
    found = setting_of(args)
    photographs.make(found.size, found.images)
    files = [path.read_bytes() for path in Path(found.root).rglob("*.jpg")]
    assert found.images == len(files) == 40 and found.in_record()["size"] == "web"
    assert 2 <= sum("progressive" in Image.open(io.BytesIO(file)).info for file in files) <= 14


def test_the_command_line_names_all_sizes() -> None:
    assert tuple(photographs.SIZES) == cli.SIZES


def test_large_photographs_come_in_small_batches_and_fewer() -> None:
    found = setting_of(cli._parser().parse_args(["bench", "--size", "camera", *ON_CPU]))
    assert (found.images, found.batch_size) == (128, 64)


def test_photographs_of_an_earlier_format_are_made_anew_where_no_folder_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = cli._parser().parse_args(["bench", "--images", "16", "--batch-size", "16", *ON_CPU])
    with monkeypatch.context() as earlier:
        earlier.setattr(dataset, "FORMAT", 1)
        earlier.setattr(files, "FORMAT", 1)
        before = dataset.make_dataset(setting_of(args).root, images=16, size=(16, 16))
    after = dataset.make_dataset(setting_of(args).root, images=16, size=(16, 16))
    assert before.parent == after.parent == tmp_path / "proxyloader" and before != after


def test_results_that_cannot_be_written_are_known_before_anything_runs(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--out", str(tmp_path)]) != 0
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CASES)


# --- records ---------------------------------------------------------------------------------------------------------


def outcome(*speeds: float, failure: str = "", is_missing: bool = False) -> Outcome:
    found = [RoundResult(speed, 1.0, 0.5, (1.0, 2.0, 3.0 + speed), 5.0, 100.0, 50.0, 90.0, None) for speed in speeds]
    start = 0.5 if speeds else None
    return Outcome(setting(""), start, found, failure=failure, is_missing=is_missing)


def test_a_record_has_medians_and_of_the_longest_wait_the_longest(photos: Path) -> None:
    outcomes = {"torch": outcome(10, 30, 20), "torch-gpu": outcome(failure="no such module", is_missing=True)}
    record = recorded(photos, outcomes)
    case = record["cases"]["torch"]
    assert case["images_per_s"] == 20 and case["images_per_s_rounds"] == [10, 30, 20]
    assert case["wait_ms"] == {"p50": 1.0, "p99": 2.0, "max": 33.0}
    assert case["gpu_mb"] == 50 and case["gpu_percent"] == 90 and "jpeg_percent" not in case
    assert record["left_out"] == {"torch-gpu": "no such module"} and "torch-gpu" not in record["cases"]
    assert "| torch | 1 worker, 1 thread | 20 | 10 - 30 |" in as_markdown(record)


def test_records_are_compared_by_shares_of_their_own_run(photos: Path) -> None:
    def record(torch: float, ours: float) -> Any:
        return recorded(photos, {"torch": outcome(torch), "proxyloader": outcome(ours)})

    assert worse_than(record(100, 200), record(50, 100)) == []
    assert worse_than(record(100, 200), record(100, 150)) == ["proxyloader is at 1.50 of torch, and was at 2.00"]
    failed = recorded(photos, {"torch": outcome(9), "proxyloader": outcome(failure="ValueError: x")})
    assert worse_than(record(100, 200), failed) == ["proxyloader failed: ValueError: x"]


def test_a_comparison_with_nothing_is_refused(photos: Path) -> None:
    cases = {"torch": outcome(9), "proxyloader": outcome(9), "iterator": outcome(failure="interrupted")}
    record = recorded(photos, cases)
    check_cases(record, ["torch", "proxyloader"])
    with pytest.raises(ValueError, match="proxyloader is what is compared: name it in --only, too"):
        check_cases(record, ["torch"])
    for names in (["proxyloader", "proxyloader, by default"], ["proxyloader", "iterator"]):
        with pytest.raises(ValueError, match="the two runs have none in common"):
            check_cases(record, names)
    del record["cases"]["proxyloader"]["images_per_s"]
    with pytest.raises(ValueError, match="has no speed of proxyloader"):
        check_cases(record, ["torch", "proxyloader"])


def test_results_go_into_no_file_that_holds_something_else(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for out, said in ((notes, "no record of proxyloader bench"), (photos / "b.jsonl", "in the folder of the images")):
        assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--out", str(out)]) != 0
        assert said in capsys.readouterr().err
    assert notes.read_text() == "mine" and not (photos / "b.jsonl").exists()


class Impatient:
    """Whoever is told of so many runs presses Ctrl-C."""

    def __init__(self, runs: int) -> None:
        self.runs = runs

    def __call__(self, line: str) -> None:
        self.runs -= 1
        if self.runs == 0:
            raise KeyboardInterrupt


@WARM
def test_ctrl_c_leaves_the_rounds_until_then(photos: Path) -> None:
    outcome = measured(photos, ["iterator"], 1000, Impatient(4))["iterator"]  # the first loop is one
    assert outcome.failure == "interrupted" and len(outcome.rounds) == 3
    with pytest.raises(KeyboardInterrupt):
        measured(photos, ["iterator"], 1000, Impatient(1))


def test_ctrl_c_while_a_process_is_started_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    child = process.CaseProcess("iterator")
    monkeypatch.setattr(child._process, "start", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        child.start()


@pytest.mark.exhaustive
def test_ctrl_c_in_a_first_loop_ends_it_with_all_its_processes(photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "proxyloader", "bench", "--data", str(photos), *SMALL, *ON_CPU]
    command += ["--rounds", "1000", "--out", str(tmp_path / "b.jsonl")]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        started = time.monotonic()
        children: list[psutil.Process] = []
        while not children and time.monotonic() < started + WAIT_S:
            time.sleep(2)  # a case imports torch and DALI, or loops; those that look at the machine are soon gone
            children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(WAIT_S) == 130
        _, left = psutil.wait_procs(children, STOP_S)
        assert not left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)


def test_records_of_other_settings_are_not_compared(photos: Path) -> None:
    record = recorded(photos, {})
    check_settings(json.loads(json.dumps(record)), record)
    check_settings(record, recorded(photos, {}, augmentations=("AugMix",)))
    with pytest.raises(ValueError, match="of other settings: batch_size 16, now 8; dtype float32, now float16. Give"):
        check_settings(record, recorded(photos, {}, batch_size=8, dtype="float16"))


def test_records_of_another_method_are_not_compared(photos: Path) -> None:
    record = recorded(photos, {})
    earlier = {name: value for name, value in record.items() if name != "method"}
    with pytest.raises(ValueError, match=rf"in another way \(method 1, now {record['method']}\)"):
        check_settings(earlier, record)
