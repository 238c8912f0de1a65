"""``proxyloader bench``: cases in processes of their own, a record of what came out, and a comparison of records."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from proxyloader.bench import rounds
from proxyloader.bench.cases import CASES, cases_for
from proxyloader.bench.child import Round, Start
from proxyloader.bench.report import as_markdown, check_cases, check_settings, last_of, record_of, rows_of, worse_than
from proxyloader.bench.rounds import Outcome, run
from proxyloader.bench.setting import Setting
from proxyloader.cli import main

SMALL = ["--batch-size", "16", "--workers", "1", "--stock-workers", "1", "--passes", "2"]
ON_CPU = ["--device", "cpu"]
SHORT = ["--rounds", "1", "--seconds", "0.1"]


def setting(root: Any, **changed: Any) -> Setting:
    given: dict[str, Any] = {"root": str(root), "images": 48, "passes": 1, "batch_size": 16, "device": "cpu"}
    return Setting(**given | {"workers": 1, "stock_workers": 1, "threads": 1} | changed)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not [each for each in left if "resource_tracker" not in " ".join(each.cmdline())]


@pytest.mark.timeout(300)
def test_it_measures_writes_and_compares(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    out = tmp_path / "new" / "bench.jsonl"
    options = ["bench", "--data", str(photos), *SMALL, *SHORT, "--device", device, "--out", str(out)]
    names = ["torch", "upstream-proxy", "iterator", "proxyloader", "FileReaderLoader", "decode-only"]
    names += ["decode-only, two pipelines"]
    if device == "cuda":
        names = cases_for(setting(photos, device="cuda"))
    assert main([*options, "--only", *names]) == 0
    record = last_of(out)
    assert list(record["cases"]) == names and not record["left_out"]
    assert record["machine"]["cores"] >= 1 and record["batch_size"] == 16 and "root" not in record
    for case in record["cases"].values():
        assert "failure" not in case, case
        assert case["images_per_s"] > 0 and case["cpu_ms_per_image"] > 0 and case["first_batch_s"] > 0
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
    assert list(last_of(out)["cases"]) == ["torch", "proxyloader", "torch + AugMix", "proxyloader + AugMix"]
    assert all(case["images_per_s"] > 0 for case in last_of(out)["cases"].values())


@pytest.mark.parametrize(
    "name", ["torch", "iterator", "proxyloader", "FileReaderLoader", "decode-only", "decode-only, two pipelines"]
)
def test_every_case_loads_each_image_in_each_pass(photos: Path, name: str) -> None:
    loops = CASES[name].loops(setting(photos, batch_size=20, passes=5))
    for _ in range(2):
        assert sum(len(images) for images, *_ in next(loops)) == 5 * 48


def test_a_model_is_trained_beside_synthetic_batches(photos: Path) -> None:
    trains = setting(photos, model="resnet18", batch_size=4, images=8)
    assert "synthetic" in cases_for(trains) and "decode-only" not in cases_for(trains)
    (outcome,) = run(trains, ["synthetic"], 1, 0.1).values()
    assert not outcome.failure and outcome.rounds[0].images_per_s > 0


def test_cases_that_need_a_gpu_are_left_out_without_one(photos: Path) -> None:
    names = cases_for(setting(photos))
    assert "torch-gpu" not in names and "synthetic" not in names
    assert names == [name for name in CASES if name in names]
    assert set(cases_for(setting(photos, device="cuda"))) == {*CASES} - {"synthetic", "replay"}


def test_a_case_that_fails_says_why_and_the_others_go_on(photos: Path, tmp_path: Path) -> None:
    outcomes = run(setting(tmp_path / "nowhere"), ["torch", "proxyloader"], 1, 0.1)
    for outcome in outcomes.values():
        assert "FileNotFoundError" in outcome.failure and not outcome.is_missing and not outcome.rounds
    record = record_of(setting(photos), outcomes, "")
    assert all(row[1].startswith("failed: ") for row in rows_of(record))


def test_where_all_cases_fail_the_status_says_so(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    for number in range(16):
        (tmp_path / "data" / "a" / f"{number}.jpg").write_text("no image")
    options = ["bench", "--data", str(tmp_path / "data"), *SMALL, *ON_CPU, *SHORT, "--out", str(tmp_path / "a.jsonl")]
    assert main([*options, "--only", "FileReaderLoader"]) == 1
    assert "no image format" in last_of(tmp_path / "a.jsonl")["cases"]["FileReaderLoader"]["failure"]


def test_a_case_that_hangs_is_ended(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "START_LIMIT_S", 0.01)
    (outcome,) = run(setting(photos), ["torch"], 1, 0.1).values()
    assert outcome.failure == "hung for 0 s"


def test_what_is_not_there_is_said_in_one_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--only", "tensorflow"]) != 0
    assert "there is no case 'tensorflow' here; there is 'torch', 'upstream-proxy'," in capsys.readouterr().err
    assert main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--augment", "Blur"]) != 0
    assert "there is no augmentation Blur here; there is ColorJitter, RandAugment," in capsys.readouterr().err
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
        (["--stock-workers", "-1"], "--stock-workers is a whole number, 0 or more; got -1"),
        (["--threads", "0"], "--threads is a whole number, 1 or more; got 0"),
        (["--threads", "5000"], "--threads is at most 1024; got 5000"),
        (["--seconds", "nan"], "--seconds is a number of seconds, 0 or more; got nan"),
        (["--hw-decoder-load", "7"], "--hw-decoder-load is a share from 0 to 1; got 7.0"),
        (["--model", "foo"], "--model is none, or a classifier of torchvision such as resnet50; got 'foo'"),
        (["--batch-size", "49"], "has 48 images, and --batch-size 49: not one batch"),
        (["--images", "5"], "--images says how many to make, and --data gives a folder that has them"),
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
    found = [Round(speed, 1.0, (1.0, 2.0, 3.0 + speed), 5.0, 100.0, 50.0, 90.0, None) for speed in speeds]
    return Outcome(Start(0.5) if speeds else None, found, failure, is_missing)


def test_a_record_has_medians_and_of_the_longest_wait_the_longest(photos: Path) -> None:
    outcomes = {"torch": outcome(10, 30, 20), "torch-gpu": outcome(failure="no such module", is_missing=True)}
    record = record_of(setting(photos), outcomes, "proxyloader bench")
    case = record["cases"]["torch"]
    assert case["images_per_s"] == 20 and case["images_per_s_rounds"] == [10, 30, 20]
    assert case["wait_ms"] == {"p50": 1.0, "p99": 2.0, "max": 33.0}
    assert case["gpu_mb"] == 50 and case["gpu_percent"] == 90 and "jpeg_percent" not in case
    assert record["left_out"] == {"torch-gpu": "no such module"} and "torch-gpu" not in record["cases"]
    assert "| torch | 20 | 10 - 30 |" in as_markdown(record)


def test_records_are_compared_by_shares_of_their_own_run(photos: Path) -> None:
    def record(torch: float, ours: float) -> Any:
        return record_of(setting(photos), {"torch": outcome(torch), "proxyloader": outcome(ours)}, "")

    assert worse_than(record(100, 200), record(50, 100)) == []
    assert worse_than(record(100, 200), record(100, 150)) == ["proxyloader is at 1.50 of torch, and was at 2.00"]
    failed = record_of(setting(photos), {"torch": outcome(9), "proxyloader": outcome(failure="ValueError: x")}, "")
    assert worse_than(record(100, 200), failed) == ["proxyloader failed: ValueError: x"]


def test_a_comparison_with_nothing_is_refused(photos: Path) -> None:
    cases = {"torch": outcome(9), "proxyloader": outcome(9), "iterator": outcome(failure="interrupted")}
    record = record_of(setting(photos), cases, "")
    check_cases(record, ["torch", "proxyloader"])
    with pytest.raises(ValueError, match="proxyloader is what is compared: name it in --only, too"):
        check_cases(record, ["torch"])
    for names in (["proxyloader"], ["proxyloader", "iterator"]):
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


class Impatient(rounds.ProgressBar):
    """Whoever looks at it presses Ctrl-C after so many runs."""

    runs = 0

    def update(self, n: float | None = 1) -> bool | None:
        type(self).runs -= 1
        if self.runs == 0:
            raise KeyboardInterrupt
        return super().update(n)


def test_ctrl_c_leaves_the_rounds_until_then(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ProgressBar", Impatient)
    monkeypatch.setattr(Impatient, "runs", 4)  # the first loop is one
    outcome = run(setting(photos), ["iterator"], 1000, 0.1)["iterator"]
    assert outcome.failure == "interrupted" and len(outcome.rounds) == 3
    monkeypatch.setattr(Impatient, "runs", 1)
    with pytest.raises(KeyboardInterrupt):
        run(setting(photos), ["iterator"], 1000, 0.1)


def test_ctrl_c_while_a_process_is_started_is_not_lost(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = rounds._Child("iterator", setting(photos))
    monkeypatch.setattr(child._process, "start", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        child.start()


def test_ctrl_c_in_a_first_loop_ends_it_with_all_its_processes(photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "proxyloader", "bench", "--data", str(photos), *SMALL, *ON_CPU]
    command += ["--rounds", "1000", "--out", str(tmp_path / "b.jsonl")]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        started = time.monotonic()
        children: list[psutil.Process] = []
        while not children and time.monotonic() < started + 60:
            time.sleep(2)  # a case imports torch and DALI, or loops; those that look at the machine are soon gone
            children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 130
        _, left = psutil.wait_procs(children, 10)
        assert not left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_records_of_other_settings_are_not_compared(photos: Path) -> None:
    record = record_of(setting(photos), {}, "")
    check_settings(json.loads(json.dumps(record)), record)
    check_settings(record, record_of(setting(photos, augmentations=("AugMix",)), {}, ""))
    with pytest.raises(ValueError, match="of other settings: batch_size 16, now 8; dtype float32, now float16. Give"):
        check_settings(record, record_of(setting(photos, batch_size=8, dtype="float16"), {}, ""))
