"""``proxyloader doctor`` on sound machines and environments, and on broken ones."""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import proxyloader
from proxyloader.tools.doctor import Answer, ask, run_checks

from .. import scripts
from ..faults import await_true
from ..installations import SITE, environment, stand_in, without
from ..limits import GIVEN_UP_S, STOP_S, WAIT_S
from .command import SCRIPT, main

ALL_FORMATS = "JPEG, JPEG 4:4:4, grayscale JPEG, progressive JPEG, PNG, BMP, TIFF, WebP"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ON_CPU, ENGINES = "decoding on the CPU", "decoding by the engines of GPU 0"
CUDA = "decoding by CUDA of GPU 0"


def report(site: bool = True, env: Mapping[str, str] = NO_GPU) -> tuple[int, dict[str, Any]]:
    """Run the command in a process of its own, with or without what is installed here. Return the exit status and the
    findings by name."""
    command = [sys.executable, *([] if site else ["-S"]), "-m", "proxyloader", "doctor", "--json"]
    everything = {**environment(), **env}
    if site:
        everything["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=4 * WAIT_S)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    findings = {each["name"]: each for each in told["findings"]}
    assert all((each["status"] == "ok") == (not each["remedy"]) for each in findings.values())
    statuses = {each["status"] for each in findings.values()}
    assert told["status"] == next(status for status in ("fail", "warn", "ok") if status in statuses)
    return done.returncode, findings


def failing(findings: Mapping[str, Any]) -> set[str]:
    return {name for name, each in findings.items() if each["status"] == "fail"}


@pytest.mark.slow
def test_a_sound_machine_without_a_gpu() -> None:
    status, findings = report()
    assert (status, failing(findings)) == (0, set())
    assert findings["GPU"]["status"] == "warn" and "--gpus all" in findings["GPU"]["remedy"]
    assert findings[ON_CPU]["found"] == f"correct pixels: {ALL_FORMATS}"
    names = {"Python", "driver", "torch", "torchvision", "DALI", "nvImageCodec", "/dev/shm", "open files", "cores"}
    assert names | {"CUDA_DEVICE_MAX_CONNECTIONS"} <= findings.keys()


@pytest.mark.slow
def test_a_machine_without_torch(tmp_path: Path) -> None:
    status, findings = report(site=False, env=environment(without(tmp_path / "site", "torch"), **NO_GPU))
    assert (status, failing(findings)) == (1, {"torch", "torchvision", "DALI"})
    assert "No module named 'torch'" in findings["torch"]["found"]
    assert "'torch>=2.6'" in findings["torch"]["remedy"] and "'torch>=2.6'" in findings["DALI"]["remedy"]


MISSING = "libcudart.so.13: cannot open shared object file"
FAILED = f"exit status 1: ImportError: {MISSING}"


@pytest.mark.parametrize(
    ("is_wrong", "found", "remedy"),
    [
        (False, "ModuleNotFoundError: No module named 'nvidia.dali'", "nvidia-dali-cuda120"),
        (True, f"nvidia-dali-cuda130 2.4.0; cannot be imported: {FAILED}", "uninstall"),
    ],
    ids=["without DALI", "wrong build of DALI"],
)
def test_dali_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool, found: str, remedy: str
) -> None:
    folders = [without(tmp_path / "site", "dali"), Path(proxyloader.__file__).parents[1]]
    if is_wrong:
        code = f"raise ImportError({MISSING!r})"
        folders.insert(0, stand_in(tmp_path / "wrong", "nvidia-dali-cuda130", "2.4.0", code))
    standard = [path for path in sys.path if not path.startswith(str(SITE))]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *standard])
    findings = found_on(asked={"DALI": ask("DALI", WAIT_S)})
    assert {name for name, each in findings.items() if each.status == "fail"} == {"DALI"}
    assert found in findings["DALI"].found and remedy in findings["DALI"].remedy


WRONG_DECODER = """
from nvidia.dali import fn, types
right = fn.decoders.image
fn.decoders.image = lambda *files, **how: fn.cast(right(*files, **how) ^ 1, dtype=types.UINT8)
"""


@pytest.fixture
def customized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has children run this code when they start."""

    def customize(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])

    return customize


def test_a_decoder_with_wrong_pixels_fails(customized: Callable[[str], None]) -> None:
    customized(WRONG_DECODER)
    finding = found_on(asked={"pictures cpu 0": ask("pictures cpu 0", WAIT_S)})[ON_CPU]
    assert finding.status == "fail" and finding.found.startswith("JPEG: wrong pixels, off by 1 levels; ")
    assert "translate=False" in finding.remedy


HOOK = """
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "nvidia.dali":
            {}
sys.meta_path.insert(0, Finder())
"""
CRASHES_AT_PNG = """
import os
from PIL import Image
save = Image.Image.save
def until_png(image, file, format, **options):
    if format == "PNG":
        os.kill(os.getpid(), 11)
    save(image, file, format, **options)
Image.Image.save = until_png
"""


@pytest.mark.parametrize(
    ("question", "code", "limit_s", "answers", "failure"),
    [
        ("DALI", HOOK.format("time.sleep(1000)"), GIVEN_UP_S, 0, "timed out after {:g} s"),
        ("DALI", HOOK.format("os.write(2, b'bad'); os.abort()"), WAIT_S, 0, "crashed with SIGABRT: bad"),
        ("DALI", HOOK.format("os._exit(3)"), WAIT_S, 0, "exit status 3"),
        ("DALI", "import os; os.write(1, b'{}\\n{'); os._exit(3)", WAIT_S, 1, "exit status 3"),
        ("pictures cpu 0", CRASHES_AT_PNG, WAIT_S, 4, "crashed with SIGSEGV"),
        ("DALI", "import os, time; os.write(1, b'{}\\n'); time.sleep(1000)", GIVEN_UP_S, 1, "timed out after {:g} s"),
    ],
    ids=["import hangs", "import crashes", "import exits", "half an answer", "decoder crashes", "hangs after one"],
)
def test_a_child_that_crashes_or_hangs_keeps_its_answers(
    customized: Callable[[str], None], question: str, code: str, limit_s: float, answers: int, failure: str
) -> None:
    customized(code)
    told, failed = ask(question, limit_s)
    assert len(told) == answers and failed.startswith(failure.format(limit_s))


@pytest.mark.slow
def test_ctrl_c_waits_for_no_child_that_hangs(tmp_path: Path) -> None:
    hang = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    hang += f"os.mkdir(os.path.join({str(tmp_path / 'pids')!r}, str(os.getpid()))); time.sleep(1000)"
    (tmp_path / "pids").mkdir()
    (tmp_path / "sitecustomize.py").write_text(HOOK.replace("nvidia.dali", "pynvml").format(hang))
    process = scripts.start(SCRIPT, "doctor", environment=environment(tmp_path, **NO_GPU))
    try:
        await_true(lambda: any((tmp_path / "pids").iterdir()))
        children = [psutil.Process(int(path.name)) for path in (tmp_path / "pids").iterdir()]
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_S)
        assert not any(child.is_running() for child in children)
    finally:
        scripts.end(process)


# --- machines that are not here: what the child processes would answer ------------------------------------------------

SEEN = {"name": "NVIDIA H200", "error": ""}
PICTURE = {"format": "JPEG", "bound": 3, "error": "", "levels_off": 1, "by_engines": True}
BY_CUDA = {**PICTURE, "levels_off": 3, "by_engines": False}
NO_WEBP = {**PICTURE, "format": "WebP", "error": "y"}


def found_on(
    *, driver: Any = 13.0, torch: str = "2.14.1", cuda: Any = 13.0, dali: Any = ("2.4.0", 12), codec: int = 9000,
    gpu: Any = SEEN, pictures: Any = PICTURE, root: str = "/",
    driver_failure: str = "", decoder_failure: str = "", asked: Mapping[str, Answer] = {},
) -> dict[str, Any]:  # fmt: skip
    """Return the findings of a machine with one GPU, by name. Those that were ``asked`` have given these answers."""
    told = [{"version": "580.82", "cuda": driver, "gpus": 1} if driver else {"cuda": None, "gpus": 0}]
    seen = [gpu] if gpu and driver else []
    answers: dict[str, Any] = {
        "driver": ([] if driver_failure else told, driver_failure),
        "torch": ([{"version": torch, "cuda": cuda, "error": "no CUDA-capable device"}, *seen], ""),
        "torchvision": ([{"version": "0.29"}], ""),
        "DALI": ([{"version": dali[0], "cuda": dali[1], "codec": codec}], ""),
        **{f"pictures {engine} 0": ([pictures], decoder_failure) for engine in ("cpu", "engines", "cuda")},
        **asked,
    }
    return {each.name: each for each in run_checks(answers.__getitem__, Path(root))}


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
ENOUGH: dict[str, Any] = dict(env={}, cores=8, quota="max 100000", files=1024, shm_mb=(8192, 8192), build="")
"""The environment and the limits of a machine that is not limited, and no build of DALI beside the one that is here."""

ROWS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "all fits": ({}, "torch", "ok", "2.14.1; built for CUDA 13.0", ""),
    "NVIDIA's own torch": ({"torch": "2.6.0a0+nv"}, "torch", "ok", "2.6.0a0+nv", ""),
    "old torch": ({"torch": "2.5.1"}, "torch", "fail", "2.6 is required", "torch>=2.6"),
    "torch for a newer CUDA": ({"driver": 12.4}, "torch", "fail", "the driver supports CUDA 12.4", "driver's CUDA"),
    "torch for the CPU": ({"cuda": None, "gpu": None}, "GPU", "fail", "torch cannot use it", "driver's CUDA"),
    "no driver": ({"driver": None}, "GPU", "warn", "none; images are decoded on the CPU", "nvidia-smi"),
    "old driver": ({"driver": 11.8}, "driver", "fail", "for CUDA 11.8", "525.60"),
    "a decoder that crashed": ({"decoder_failure": "crashed"}, ON_CPU, "fail", "; JPEG 4:4:4: crashed", "pip check"),
    "a driver that fails": ({"driver_failure": "mismatch"}, "driver", "warn", "mismatch", "nvidia-smi"),
    "DALI for a newer CUDA": ({"driver": 12.4, "dali": ("2.4.0", 13)}, "DALI", "fail", "supports CUDA 12.4", "cuda120"),
    "old DALI": ({"dali": ("1.40.0", 12)}, "DALI", "fail", "1.53 is required", "cuda120"),
    "two builds": ({"build": "nvidia-dali-weekly-cuda120"}, "DALI", "fail", "built for CUDA 12; these packages", "all"),
    "no nvImageCodec": ({"codec": 0}, "nvImageCodec", "fail", "DALI cannot load it", "nvidia-nvimgcodec-cu12[all]"),
    "a GPU": ({}, "GPU 0", "ok", "H200", ""),
    "a GPU without kernels": ({"gpu": {**SEEN, "error": "no image"}}, "GPU 0", "fail", "no image", "torch"),
    "engines": ({}, ENGINES, "ok", "correct pixels: JPEG", ""),
    "CUDA for engines": ({"pictures": BY_CUDA}, ENGINES, "warn", "CUDA decodes instead", "video"),
    "wrong on a GPU": ({"pictures": {**PICTURE, "levels_off": 200}}, CUDA, "fail", "200", "cpu"),
    "no decoder": ({"pictures": NO_WEBP}, ON_CPU, "warn", "WebP: y", "Pillow"),
    "a hidden GPU": ({"env": {"CUDA_VISIBLE_DEVICES": ""}, "gpu": None}, "GPU", "warn",
                     "hidden by CUDA_VISIBLE_DEVICES=''", ""),
    **{f"{queues} queues": ({"env": {QUEUES: queues}}, QUEUES, "warn", f"{queues}: the decoder and the model wait", "")
       for queues in ("7", "many")},
    "8 queues": ({"env": {QUEUES: "8"}}, QUEUES, "ok", "8", ""),
    "a quota": ({"quota": "50000 100000"}, "cores", "warn", "cgroup quota of 0.5", "num_workers=1"),
    "no quota": ({"quota": "max 100000"}, "cores", "ok", "usable", ""),
    "a large quota": ({"quota": "100000000 100000"}, "cores", "ok", "usable", ""),
    "few cores": ({"cores": 7}, "cores", "warn", "7 of", "at least 8 cores per GPU"),
    "few cores without a GPU": ({"cores": 1, "driver": None}, "cores", "ok", "1 of", ""),
    "few open files": ({"files": 1023}, "open files", "warn", "at most 1023", "nofile=65536"),
    "enough open files": ({"files": 1024}, "open files", "ok", "at most 1024", ""),
    "any number of open files": ({"files": resource.RLIM_INFINITY}, "open files", "ok", "unlimited", ""),
    "a small /dev/shm": ({"shm_mb": (2047, 2047)}, "/dev/shm", "warn", "2,047 of 2,047 MB free", "--shm-size"),
    "a full /dev/shm": ({"shm_mb": (8192, 2047)}, "/dev/shm", "warn", "2,047 of 8,192 MB free", "delete"),
    "enough of /dev/shm": ({"shm_mb": (2048, 2048)}, "/dev/shm", "ok", "2,048 of 2,048 MB free", ""),
    "no /dev/shm": ({"root": "/nowhere"}, "/dev/shm", "warn", "0 of 0 MB free", "--shm-size"),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "name", "status", "found", "remedy"), ROWS.values(), ids=ROWS)
def test_what_does_not_fit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: Any, name: str, status: str, found: str, remedy: str
) -> None:
    facts = {"root": str(tmp_path)} | ENOUGH | facts
    environment, cores, quota, files, (size_mb, free_mb), build = (facts.pop(name) for name in ENOUGH)
    if build:
        monkeypatch.syspath_prepend(stand_in(tmp_path / "site", build, "2.4", ""))
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    told = SimpleNamespace(f_frsize=1 << 20, f_blocks=size_mb, f_bavail=free_mb, f_bfree=free_mb)
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cores)})
    monkeypatch.setattr(resource, "getrlimit", lambda limit: {resource.RLIMIT_NOFILE: (files, files)}[limit])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    findings = found_on(**facts)
    finding = findings[name]
    assert finding.status == status and found in finding.found and remedy in finding.remedy
    assert build in finding.found
    is_usable = "GPU 0" in findings and findings["GPU 0"].status != "fail"
    assert {ENGINES, CUDA} & findings.keys() == ({ENGINES, CUDA} if is_usable else set())
    others = {"cores", "open files", "/dev/shm"} - {name}
    assert not any(findings[each].remedy for each in others)


def test_the_report_is_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["doctor"]) == 1
    first, *lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    found_at = first.index(platform.python_version())
    assert first.startswith("ok    Python  ")
    torch = lines.index(f"{'fail  torch':<{found_at}}cannot be imported: exit status 3")
    assert lines[torch + 1].startswith(" " * found_at + "-> pip install -U 'torch>=2.6'")
    counts = Counter(line.split()[0] for line in [first, *lines[:-2]])
    assert lines[-1] == "{ok} ok, {warn} with warnings, {fail} failed".format(**counts)
