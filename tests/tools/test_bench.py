"""``proxyloader bench``: cases in processes of their own, a record of what came out, and a comparison of records."""

from __future__ import annotations

import contextlib
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from proxyloader.tools.bench import SIZES, command, runner
from proxyloader.tools.bench.cases import CASES, DATASETS
from proxyloader.tools.bench.config import BenchConfig, Tuning
from proxyloader.tools.bench.runner import CaseError, start_processes, tune

from ..faults import children_of
from ..limits import STOP_S, WAIT_S
from ..tiers import has_gpu
from .command import main

SMALL = ["--batch-size", "16", "--workers", "1", "--threads", "1", "--hw-decoder-load", "1", "--passes", "2"]
ON_CPU = ["--device", "cpu"]
SHORT = ["--rounds", "1", "--seconds", "0.1"]
NAMES = ["torch", "upstream-proxy", "nvidia-example", "iterator", "proxyloader"]


def setting(root: Any, **changed: Any) -> BenchConfig:
    given: dict[str, Any] = {"root": str(root), "images": 48, "passes": 1, "batch_size": 16, "device": "cpu"}
    return BenchConfig(**given | {"tuning": Tuning(workers=1, threads=1)} | changed)


def read_last(out: Path) -> Any:
    return json.loads(out.read_text().splitlines()[-1])


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
            set_start_method=multiprocessing.set_start_method,
        )
        monkeypatch.setattr(runner, "multiprocessing", how)


WARM = pytest.mark.usefixtures("warm_start")


@WARM
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_it_measures_plots_and_appends_records(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = tmp_path / "new" / "bench.jsonl"
    options = ["bench", "--data", str(photos), *SMALL, *SHORT, "--device", device, "--out", str(out)]
    names = [name for name in NAMES if device == "cuda" or name not in ("upstream-proxy", "nvidia-example")]
    assert main([*options, "--only", *names]) == 0
    record = read_last(out)
    assert list(record["cases"]) == [*names, *(f"{name}, by default" for name in names[1:])]
    assert record["machine"]["cores"] >= 1 and record["batch_size"] == 16 and "root" not in record
    for case in record["cases"].values():
        assert "failure" not in case, case
        assert case["images_per_s"] > 0 and case["first_batch_s"] > 0
        assert case["cpu_ms_per_image"] > 0 and case["loop_cpu_ms_per_image"] > 0
        assert case["wait_ms_max"] >= case["wait_ms_p99"] >= case["wait_ms_p50"] > 0
        assert case["wait_ms_max"] >= case["pause_ms"] > 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    out_lines = capsys.readouterr().out.splitlines()
    assert any("torch (workers 1): " in line for line in out_lines)
    (row,) = [line for line in out_lines if line.startswith("  proxyloader, by default  ")]
    assert row.rstrip().endswith(" workers 1")  # not cut where the output is no terminal

    once = record["cases"]["proxyloader"]
    monkeypatch.setattr(command, "run", lambda configs, *_: {config.name: once for config in configs})
    assert main([*options, "--only", "torch", "proxyloader", "--augment", "AugMix", "--passes", "1"]) == 0
    assert "! A loop has only 3 batches." in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    tuned = ["torch", "proxyloader", "torch + AugMix", "proxyloader + AugMix"]
    assert list(read_last(out)["cases"]) == [*tuned, "proxyloader, by default", "proxyloader + AugMix, by default"]


@pytest.mark.parametrize("name", ["torch", "nvidia-example", "iterator", "proxyloader"])
def test_every_case_loads_each_image_in_each_pass(photos: Path, name: str) -> None:
    loops = CASES[name].loops(setting(photos, batch_size=20, passes=2, case=name))
    for _ in range(2):
        batches = list(next(loops))
        assert sum(len(images) for images, _ in batches) == 2 * 48
        assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted(2 * 12 * [0, 1, 2, 3])


@pytest.mark.exhaustive
def test_a_model_is_trained_beside_synthetic_batches(photos: Path) -> None:
    trains = setting(photos, model="resnet18", batch_size=4, images=8, case="synthetic")
    (outcome,) = runner.run([trains], 1, 0.1).values()
    assert "failure" not in outcome and outcome["images_per_s"] > 0


@WARM
def test_a_case_that_fails_says_why_and_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    for number in range(16):
        (tmp_path / "data" / "a" / f"{number}.jpg").write_text("no image")
    options = ["bench", "--data", str(tmp_path / "data"), *SMALL, *ON_CPU, *SHORT, "--out", str(tmp_path / "a.jsonl")]
    assert main([*options, "--only", "torch", "iterator"]) == 1
    cases = read_last(tmp_path / "a.jsonl")["cases"]
    assert "UnidentifiedImageError: " in cases["torch"]["failure"]
    assert "RuntimeError: " in cases["iterator"]["failure"] and "RuntimeError: " in capsys.readouterr().out


@WARM
def test_a_case_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_processes(["a", "b"]) as processes:
        monkeypatch.setattr(runner, "TIMEOUT_S", 0.1)
        with pytest.raises(CaseError, match="no answer in 0.1 s"):
            processes["a"].ask(time.sleep, 10 * WAIT_S)
        monkeypatch.undo()
        assert processes["b"].ask(abs, -3) == 3
        with pytest.raises(CaseError, match="ValueError: math domain error"):
            processes["b"].ask(math.sqrt, -1)


# --- tuning ----------------------------------------------------------------------------------------------------------


@WARM
def test_the_fastest_tuning_is_kept_and_each_is_recorded(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "MIN_TRIAL_S", 0.0)  # only the order of the speeds is looked at
    ranges = {"workers": [0, 1], "threads": [1], "hw_decoder_load": [0.65, 1.0]}
    best, trials = tune(setting(photos), ranges)
    assert [trial["workers"] for trial in trials] == [1, 0]
    assert all(trial["images_per_s"] > 0 for trial in trials)
    assert best.workers == max(trials, key=lambda trial: trial["images_per_s"])["workers"]
    assert " s  trial of torch (workers 1)\n" in capsys.readouterr().out


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    """What is tried. The speeds are made up, as there may be no GPU."""
    found: list[BenchConfig] = []

    def run(configs: Sequence[BenchConfig], rounds: int, seconds: float) -> dict[str, Any]:
        (config,) = configs
        found.append(config)
        workers, threads, load = config.tuning
        speed: dict[str, Any] = {"images_per_s": 8 * load - workers}  # type: ignore[operator]
        return {"": {"failure": ""} if threads == 8 else speed}

    monkeypatch.setattr(runner, "run", run)
    return found


def test_shares_of_the_engines_are_tried_with_each_number_of_threads_on_a_gpu(tried: list[BenchConfig]) -> None:
    ranges = {"workers": [4, 8, 16], "threads": [4, 8], "hw_decoder_load": [0.65, 1.0]}
    best, trials = tune(setting("", device="cuda", case="upstream-proxy"), ranges)
    told = [Tuning(trial["workers"], trial["threads"], trial["hw_decoder_load"]) for trial in trials]
    assert told == [each.tuning for each in tried]
    assert told[:4] == [Tuning(8, 4, 0.65), Tuning(8, 4, 1.0), Tuning(8, 8, 0.65), Tuning(8, 8, 1.0)]
    assert told[4:] == [Tuning(4, 4, 1.0), Tuning(16, 4, 1.0)] and best == Tuning(4, 4, 1.0)


@pytest.mark.parametrize("name", [*DATASETS, "AugMix"])
def test_other_datasets_have_the_same_images_and_augmentations_add_the_same(name: str, photos: Path) -> None:
    if name == "HuggingFace":
        pytest.importorskip("datasets")
    found = {}
    for case in ("torch", "proxyloader"):
        for added in ("", name):
            torch.manual_seed(3)
            batches = list(next(CASES[case].loops(setting(photos, case=case, added=added))))
            found[case + added] = torch.cat([images for images, _ in batches])
            assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted([0, 1, 2, 3] * 12)
    for case, images in found.items():
        stock = found["torch" if name in DATASETS else case.replace("proxyloader", "torch")]
        assert (images - stock).abs().mean() < 0.05, case


def test_by_default_nothing_is_said_that_has_a_default(photos: Path) -> None:
    loaders = {}
    for name in ("torch", "proxyloader", "iterator"):
        by_default = setting(photos, case=name, use_defaults=True, persistent_workers=False, tuning=Tuning(1))
        loops: Any = CASES[name].loops(by_default)
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
    record = read_last(out)
    assert list(record["cases"]) == NAMES
    assert record["page_cache"] == "warm" and record["passes"] == 1
    for case in record["cases"].values():
        assert "failure" not in case and len(case["epochs"]) == 3
        for epoch in case["epochs"]:
            assert epoch["images_per_s"] > 0 and epoch["images_per_s_after_first_batch"] > 0
            assert epoch["first_batch_s"] < 48 / epoch["images_per_s"]
        assert case["epochs"][0]["first_batch_s"] > 0  # that of a later one may lie ready in DALI
    assert "images/s in epochs 1 to 3" in capsys.readouterr().out


@WARM
@pytest.mark.parametrize("name", ["torch", "proxyloader"])
def test_other_loaders_start_with_the_queues_that_cuda_gives_them(photos: Path, name: str) -> None:
    with start_processes([name]) as processes:
        ask = processes[name].ask
        ask(exec, "import os; os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] = '32'")
        found = ask(runner.begin, setting(photos, case=name, use_defaults=True, tuning=Tuning(0)))
        assert found["images_per_s"] > 0
        assert ask(os.getenv, "CUDA_DEVICE_MAX_CONNECTIONS") == {"torch": None, "proxyloader": "32"}[name]


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "-1"], "--workers: must be an integer >= 0, got '-1'"),
        (["--augment", "Blur"], "--augment: invalid choice: 'Blur'"),
        (["--datasets", "CIFAR10"], "--datasets: invalid choice: 'CIFAR10'"),
        (["--batch-size", "49"], "--batch-size 49 is larger than the number of images, 48"),
        (["--images", "5"], "--images and --size cannot be used with --data"),
        (["--size", "web"], "--images and --size cannot be used with --data"),
        (["--only", "synthetic"], "no case 'synthetic' with these options, only 'torch', 'upstream-proxy',"),
        (["--out", "notes.txt"], "--out must be a .jsonl file, got notes.txt"),
        (["--out", "{tmp}/set.jsonl"], "Is a directory"),
        (["--task", "detection", "--model", "resnet18"], "--model, --dtype, --channels-last, --augment and --datasets"),
        (["--task", "clips", "--dtype", "float16"], "require --task classification"),
        (["--task", "clips", "--only", "hflip"], "no case 'hflip' with these options, only 'torch + clips', "),
        (["--only", "kornia"], "no case 'kornia' with these options, only 'torch', 'upstream-proxy', "),
        (["--task", "keypoints"], "--task: invalid choice: 'keypoints'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(
    photos: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.jsonl").mkdir()
    options = [option.format(tmp=tmp_path) for option in options]
    out = tmp_path / "new" / "bench.jsonl"
    status = main(["bench", "--data", str(photos), *SMALL, *ON_CPU, "--out", str(out), *options])
    assert status != 0 and said in capsys.readouterr().err
    assert not out.parent.exists()


@WARM
def test_photographs_of_a_size_are_made_as_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SIZES, "web", SIZES["web"] | {"size": (64, 48)})
    out, settings = tmp_path / "a.jsonl", ["--batch-size", "8", "--workers", "0", "--threads", "1"]
    options = ["bench", "--size", "web", "--images", "40", *settings, *ON_CPU, *SHORT, "--out", str(out)]
    main([*options, "--only", "torch"])
    files = [path.read_bytes() for path in tmp_path.rglob("*.jpg")]
    assert len(files) == 40 and read_last(out)["size"] == "web"
    assert 2 <= sum("progressive" in Image.open(io.BytesIO(file)).info for file in files) <= 14


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CASES)


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_have_medians() -> None:
    rounds = [{"images_per_s": float(speed), "wait_ms_max": 3.0 + speed} for speed in (10, 30, 20)]
    found = runner.medians(rounds)
    assert found == {"images_per_s": 20, "images_per_s_rounds": [10, 30, 20], "wait_ms_max": 33}


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


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
