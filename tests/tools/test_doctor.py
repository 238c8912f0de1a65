"""``proxyloader doctor`` on machines and in environments that are sound, and on such as are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from proxyloader.tools.doctor import decoders, machine, packages
from proxyloader.tools.doctor.child import Answer, ask
from proxyloader.tools.doctor.command import Check, doctor, examine, worst
from proxyloader.tools.doctor.finding import Finding
from proxyloader.tools.doctor.questions import QUESTIONS
from proxyloader.tools.doctor.subject import Subject

from .. import scripts
from ..faults import await_true
from ..installations import environment, stand_in, with_own_dali, without
from ..limits import STOP_S, WAIT_S
from ..scripts import in_own_namespace

ALL_FORMATS = "JPEG, JPEG 4:4:4, grey JPEG, progressive JPEG, PNG, BMP, TIFF, WebP"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Also where there is one."""


def run(*options: str, under: Sequence[str] = (), site: bool = True, env: Mapping[str, str] = NO_GPU) -> Any:
    """The command in a process of its own.

    Args:
        under: a command that runs it.
        site: also what is installed is found, not only what is on the ``PYTHONPATH`` of ``env``.
        env: in addition to ``environment()``.
    """
    command = [*under, sys.executable, *([] if site else ["-S"]), "-m", "proxyloader", "doctor", *options]
    everything = {**environment(), **env}
    if site:  # and what was found on the way here
        everything["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=2 * WAIT_S)


def report(**how: Any) -> tuple[int, dict[str, Finding]]:
    """Its exit status, and its findings by their names."""
    done = run("--json", **how)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    findings = [Finding(**each) for each in told["findings"]]
    assert told["status"] == worst(findings)
    assert [each for each in findings if (each.status == "ok") == bool(each.remedy)] == []  # a remedy for each fault
    return done.returncode, {each.name: each for each in findings}


def failing(findings: Mapping[str, Finding]) -> set[str]:
    return {name for name, each in findings.items() if each.status == "fail"}


def only(check: Check, subject: Subject) -> Finding:
    (finding,) = examine(subject, [check])
    return finding


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sound_machine_without_a_gpu() -> None:
    status, findings = report()
    assert (status, failing(findings)) == (0, set())
    assert findings["GPU"].status == "warn" and "decoded on the CPU" in findings["GPU"].found
    assert findings["decoding on the CPU"] == Finding("decoding on the CPU", "ok", f"pixels are right: {ALL_FORMATS}")
    assert findings["DALI"].status == findings["nvImageCodec"].status == findings["torchvision"].status == "ok"
    names = {"Python", "driver", "torch", "torchvision", "DALI", "nvImageCodec", "requirements", "GPU", "/dev/shm"}
    assert names | {"open files", "locked memory", "cores", "NUMA", "CUDA_DEVICE_MAX_CONNECTIONS"} <= findings.keys()


@pytest.mark.slow
def test_without_dali_it_says_what_to_install(tmp_path: Path) -> None:
    folder = without(tmp_path / "site", "dali")
    status, findings = report(site=False, env=environment(folder, **NO_GPU))
    assert (status, failing(findings)) == (1, {"DALI"})
    assert findings["DALI"].found.startswith("no nvidia-dali-... is installed, and it cannot be imported")
    assert "ModuleNotFoundError: No module named 'nvidia.dali'" in findings["DALI"].found
    assert "pip install nvidia-dali-cuda120" in findings["DALI"].remedy


def test_without_torch_it_says_so_and_looks_at_the_rest(tmp_path: Path) -> None:
    folder = without(tmp_path / "site", "torch")
    status, findings = report(site=False, env=environment(folder, **NO_GPU))
    assert (status, failing(findings)) == (1, {"torch", "torchvision", "DALI"})
    assert "ModuleNotFoundError: No module named 'torch'" in findings["torch"].found
    assert findings["DALI"].remedy.startswith("Repair torch first")
    assert findings["open files"].name and "GPU" not in findings


@pytest.mark.slow
def test_a_wrong_build_of_dali_is_named_with_what_its_loader_misses(tmp_path: Path) -> None:
    folder = without(tmp_path / "site", "dali")
    missing = "libcudart.so.13: cannot open shared object file: No such file or directory"
    wrong = stand_in(tmp_path / "wrong", "nvidia-dali-cuda130", "2.4.0", f"raise ImportError({missing!r})")
    status, findings = report(site=False, env=environment(wrong, folder, **NO_GPU))
    assert (status, failing(findings)) == (1, {"DALI"})
    assert "nvidia-dali-cuda130 2.4.0 is installed, and it cannot be imported" in findings["DALI"].found
    assert findings["DALI"].found.endswith(f"ImportError: {missing}")
    assert "pip uninstall each nvidia-dali-" in findings["DALI"].remedy


@pytest.mark.slow
@pytest.mark.exhaustive
def test_without_nvimagecodec_it_is_named_and_no_picture_is_decoded(tmp_path: Path) -> None:
    try:
        folder = with_own_dali(without(tmp_path / "site", "nvimgcodec"))
    except OSError as error:
        pytest.skip(f"the temporary folder cannot share files with the installed DALI: {error}")
    status, findings = report(site=False, env=environment(folder, **NO_GPU))
    assert (status, failing(findings)) == (1, {"nvImageCodec", "decoding on the CPU"})
    assert "DALI finds none" in findings["nvImageCodec"].found
    assert findings["decoding on the CPU"].found.startswith(
        f"{ALL_FORMATS}: DALI cannot decode: dlopen libnvimgcodec.so failed!"
    )
    assert "asks for nvidia-nvimgcodec" in findings["requirements"].found


WRONG_DECODER = """
from nvidia.dali import fn, types

right = fn.decoders.image
fn.decoders.image = lambda *files, **how: fn.cast(right(*files, **how) ^ 1, dtype=types.UINT8)
"""
"""Each pixel is one level off: too much for the CPU, where all are to be equal."""


@pytest.mark.slow
def test_a_decoder_that_gives_wrong_pixels_fails(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_DECODER)
    status, findings = report(env=environment(tmp_path, **NO_GPU))
    assert (status, failing(findings)) == (1, {"decoding on the CPU"})
    found = findings["decoding on the CPU"].found
    assert found.startswith("wrong pixels") and "JPEG by 1 (allowed: 0)" in found and "WebP by 1 (allowed: 0)" in found
    assert "translate=False" in findings["decoding on the CPU"].remedy


SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
FEW_FILES = "ulimit -n 64"


def test_a_small_dev_shm_is_a_warning(may_mount: None) -> None:
    asked = """
from proxyloader.tools.doctor import machine
from proxyloader.tools.doctor.subject import Subject

print(*machine.shared_memory(Subject(5)))
"""
    done = scripts.run(asked, timeout_s=WAIT_S, under=in_own_namespace(SMALL_SHM))
    assert "status='warn'" in done.stdout and "64 MB free of 64" in done.stdout, done.stderr
    assert "--shm-size=8g" in done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_table_shows_a_small_dev_shm_and_few_open_files(may_mount: None) -> None:
    done = run(under=in_own_namespace(SMALL_SHM, FEW_FILES), env={**NO_GPU, "COLUMNS": "200"})
    lines = done.stdout.splitlines()
    (shm,) = [number for number, line in enumerate(lines) if line.split()[1:2] == ["/dev/shm"]]
    assert lines[shm].split()[:7] == ["warn", "/dev/shm", "64", "MB", "free", "of", "64"]
    assert lines[shm + 1].strip().startswith("-> Start a container with --shm-size=8g or --ipc=host")
    (files,) = [number for number, line in enumerate(lines) if "open files  " in line]
    assert lines[files].split()[0] in ("warn", "fail") and "at most 64;" in lines[files]
    assert "nofile=65536" in lines[files + 1]
    (decoding,) = [line for line in lines if "decoding on the CPU" in line]
    assert decoding.startswith("ok")
    assert done.returncode == (1 if "fail" in lines[files] else 0)
    assert lines[-1].endswith(f"{done.returncode} failed")


def test_a_limit_that_is_none_is_refused() -> None:
    done = run("--limit", "0")
    assert (done.returncode, done.stderr) == (1, "proxyloader: error: limit=0: it is a number of seconds above 0\n")
    with pytest.raises(ValueError, match="limit=nan"):
        doctor(as_json=True, limit_s=float("nan"))


def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on() -> None:
    def broken(subject: Subject) -> list[Finding]:
        raise KeyError("bug")

    first, second = examine(Subject(WAIT_S), [broken, packages.python])
    assert first.name == "broken" and first.status == "warn" and "KeyError: 'bug'" in first.found
    assert second.name == "Python" and second.status == "ok"


# --- children --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import time; time.sleep(1000)", "it took more than 2 s, and was ended"),
        ("import os; os.write(2, b'no such engine'); os.abort()", "it crashed (SIGABRT): no such engine"),
        ("import os; os._exit(3)", "it failed (exit status 3)"),
        ("raise OSError('this one')", "OSError: this one"),
    ],
    ids=["hangs", "crashes", "exits", "raises"],
)
def test_a_dali_that_cannot_be_imported_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, failure: str
) -> None:
    """Whatever it does to its process. Here ``nvidia.dali`` is what comes first on the path."""
    hook = f"""
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "nvidia.dali":
                    exec({code!r})
        sys.meta_path.insert(0, Finder())
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(hook))
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    subject = Subject(2.0 if "sleep" in code else WAIT_S)
    subject.torch = Answer([{"version": "2.14.1", "cuda": None, "gpus": 0, "error": ""}])
    finding = only(packages.dali, subject)
    assert finding.status == "fail" and failure in finding.found and finding.remedy
    assert list(examine(subject, [packages.codec, decoders.on_cpu, decoders.on_gpus])) == []  # they need DALI


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "failure", "limit_s"),
    [
        ("os.kill(os.getpid(), 11)", "it crashed (SIGSEGV)", WAIT_S),
        ("time.sleep(1000)", "it took more than", WAIT_S / 3),
    ],
    ids=["crashes", "hangs"],
)
def test_a_decoder_that_dies_is_told_apart_from_what_it_decoded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, failure: str, limit_s: float
) -> None:
    code = f"""
        import os, time
        from PIL import Image
        save = Image.Image.save
        def until_png(image, file, format, **options):
            if format == "PNG":
                {end}
            save(image, file, format, **options)
        Image.Image.save = until_png
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    subject = Subject(limit_s)
    subject.dali = Answer([{"version": "2.4.0", "cuda": 12, "codec": "0.9.0"}])
    right, died = decoders.on_cpu(subject)
    assert right.found == "pixels are right: JPEG, JPEG 4:4:4, grey JPEG, progressive JPEG"
    assert died.status == "fail" and died.found.startswith(f"PNG: {failure}")


@pytest.mark.slow
def test_ctrl_c_waits_for_no_child_that_hangs(tmp_path: Path) -> None:
    hang = f"""import os, signal, sys, time
if "dali" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.mkdir(os.path.join({str(tmp_path)!r}, str(os.getpid())))
    time.sleep(1000)
"""
    code = f"""
        from proxyloader.tools.doctor import child
        child.CHILD = {hang!r} + child.CHILD
        from proxyloader.tools.cli import main
        main(["doctor"])
    """
    process = scripts.start(textwrap.dedent(code), environment=NO_GPU, afresh=True)
    try:
        await_true(lambda: any(tmp_path.iterdir()))
        (pid,) = tmp_path.iterdir()
        hanging = psutil.Process(int(pid.name))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_S)
        assert not hanging.is_running()
    finally:
        scripts.end(process)


def test_an_answer_that_was_not_finished_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = """
        import os, sys
        from proxyloader.tools.doctor import questions
        def half():
            yield {"a": 1}
            with open(sys.argv[2], "a") as answers:
                answers.write('{"b"')
            os._exit(1)
        questions.QUESTIONS["half"] = half
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    assert ask("half", limit_s=WAIT_S).told == [{"a": 1}]


def test_every_question_is_asked_by_its_name() -> None:
    assert set(QUESTIONS) == {"driver", "torch", "torchvision", "dali", "pictures"}


# --- whether versions fit --------------------------------------------------------------------------------------------

GPU = {"uuid": "GPU-1", "name": "NVIDIA H200", "has_engines": True, "numa_node": 1}
SEEN = {**GPU, "uuid": "1", "capability": [9, 0], "total_bytes": 140 << 30, "free_bytes": 130 << 30, "error": ""}


def subject_of(
    *, driver: list[int] | None = None, torch: str | None = "2.14.1", cuda: list[int] | None = None, gpus: int = 0
) -> Subject:
    """A machine of which the driver and torch tell this. Each GPU of the driver is seen by torch, or none is."""
    subject = Subject(WAIT_S)
    subject.driver = Answer([{"version": "580.82", "cuda": driver}, GPU] if driver else [{"error": ""}])
    told = {"version": torch, "cuda": cuda, "gpus": gpus, "error": "no CUDA-capable device" * (not gpus)}
    subject.torch = Answer([told, *[SEEN] * gpus] if torch else [], "" if torch else "it failed: ImportError: x")
    subject.dali = Answer([{"version": "2.4.0", "cuda": 12, "codec": "0.9.0"}])
    return subject


@pytest.mark.parametrize(
    ("facts", "status", "found", "remedy"),
    [
        ({"driver": [13, 0], "cuda": [13, 0], "gpus": 1}, "ok", "it sees 1 GPU(s)", ""),
        ({"cuda": [13, 0]}, "ok", "2.14.1, built for CUDA 13.0", ""),
        ({"driver": [12, 4], "cuda": [13, 0]}, "fail", "the driver runs CUDA up to 12.4", "torch for CUDA 12"),
        ({"driver": [13, 0]}, "fail", "a build without CUDA, beside a GPU", "Install a build of torch with CUDA"),
        ({"driver": [13, 0], "cuda": [12, 8]}, "fail", "it sees no GPU: no CUDA-capable device", "--gpus all"),
        ({"torch": "2.5.1"}, "fail", "2.5.1", "pip install 'torch>=2.6'"),
        ({"torch": "2.6.0a0+nv", "driver": [12, 8], "cuda": [12, 8], "gpus": 1}, "ok", "2.6.0a0+nv", ""),
        ({"torch": None}, "fail", "it cannot be imported: it failed: ImportError: x", "reinstall torch"),
    ],
    ids=["fits", "no GPU", "CUDA too new", "CPU build", "no access", "too old", "NVIDIA's own", "no import"],
)
def test_whether_torch_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], status: str, found: str, remedy: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = only(packages.torch, subject_of(**facts))
    assert finding.status == status and found in finding.found and remedy in finding.remedy


def test_gpus_that_the_environment_hides_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = only(packages.torch, subject_of(driver=[13, 0], cuda=[13, 0]))
    assert finding.status == "warn" and "CUDA_VISIBLE_DEVICES='' hides all GPUs" in finding.found


def test_a_dali_for_a_newer_cuda_than_the_drivers_does_not_fit() -> None:
    subject = subject_of(driver=[12, 4])
    subject.dali = Answer([{"version": "2.4.0", "cuda": 13, "codec": "0.9.0"}])
    finding = only(packages.dali, subject)
    assert finding.status == "fail" and finding.found.endswith("built for CUDA 13; the driver runs CUDA up to 12.4")
    assert "pip install nvidia-dali-cuda120" in finding.remedy


def test_an_old_dali_and_an_old_driver_do_not_fit() -> None:
    subject = subject_of(driver=[11, 8])
    subject.dali = Answer([{"version": "1.40.0", "cuda": 11, "codec": None}])
    assert only(packages.dali, subject).status == only(packages.driver, subject).status == "fail"


def test_a_driver_that_does_not_answer_is_told_from_none() -> None:
    subject = Subject(WAIT_S)
    subject.driver = Answer([{"version": None, "error": "Driver/library version mismatch"}])
    assert only(packages.driver, subject).status == "fail"
    subject.driver = Answer([], "it failed (exit status 1): ModuleNotFoundError: No module named 'pynvml'")
    assert "pip install nvidia-ml-py" in only(packages.driver, subject).remedy
    subject.driver = Answer([{"version": None, "error": ""}])
    assert only(packages.driver, subject).status == "ok"


def test_two_builds_of_dali_are_a_known_bad_combination() -> None:
    subject = subject_of()
    subject.dali_builds = {"nvidia-dali-cuda120": "2.4.0", "nvidia-dali-cuda130": "2.4.0"}
    finding = only(packages.combinations, subject)
    assert finding.status == "fail" and "they install the same files" in finding.found


def test_an_nvimagecodec_of_another_cuda_does_not_fit() -> None:
    subject = subject_of()
    subject.codec_builds = {"nvidia-nvimgcodec-cu13": "0.9.0.20"}
    finding = only(packages.codec, subject)
    assert finding.status == "fail" and "nvidia-nvimgcodec-cu12[all]" in finding.remedy
    subject.codec_builds = {"nvidia-nvimgcodec-cu12": "0.9.0.20", "nvidia-nvimgcodec-cu13": "0.9.0.20"}
    assert only(packages.codec, subject).status == "ok"


def test_an_environment_that_slows_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")
    first, second = packages.combinations(subject_of(driver=[13, 0], cuda=[13, 0], gpus=1))
    assert (first.name, second.name) == ("CUDA_LAUNCH_BLOCKING", "NVIDIA_DRIVER_CAPABILITIES")
    assert "compute,utility,video" in second.remedy


# --- GPUs, as far as it can be told without one ----------------------------------------------------------------------


def test_a_gpu_that_torch_has_no_code_for_fails_and_is_not_decoded_on() -> None:
    subject = subject_of(driver=[13, 0], cuda=[13, 0], gpus=1)
    subject.torch.told[1] = {**SEEN, "free_bytes": None, "error": "no kernel image is available"}
    assert only(decoders.gpus, subject).status == "fail"
    assert list(decoders.on_gpus(subject)) == []


def test_a_gpu_is_shown_with_its_engines_and_its_memory() -> None:
    subject = subject_of(driver=[13, 0], cuda=[13, 0], gpus=1)
    finding = only(decoders.gpus, subject)
    assert finding.found == "NVIDIA H200, compute capability 9.0, JPEG engines, 130.0 of 140.0 GB free"
    subject.torch.told[1] = {**SEEN, "free_bytes": 100 << 20}
    assert only(decoders.gpus, subject).status == "warn"


class Decoded(Subject):
    """A machine whose GPU has decoded with these differences from Pillow, in levels."""

    def __init__(self, levels_off: int, by_engines: bool, has_engines: bool) -> None:
        super().__init__(WAIT_S)
        self.driver = Answer([{"version": "580.82", "cuda": [13, 0]}, {**GPU, "has_engines": has_engines}])
        told = {"version": "2.14.1", "cuda": [13, 0], "gpus": 1, "error": ""}
        self.torch = Answer([told, {**SEEN, "has_engines": has_engines}])
        self.dali = Answer([{"version": "2.4.0", "cuda": 12, "codec": "0.9.0"}])
        self.picture = {"format": "JPEG", "bound": 3, "error": "", "levels_off": levels_off, "by_engines": by_engines}

    def ask(self, question: str, *arguments: str) -> Answer:
        assert (question, arguments) in (("pictures", ("engines", "0")), ("pictures", ("cuda", "0")))
        return Answer([self.picture], said="no room")


@pytest.mark.parametrize(
    ("facts", "engines", "cuda"),
    [((1, True, True), "ok", "ok"), ((3, False, True), "warn", "ok"), ((3, False, False), "ok", "ok")]
    + [((200, False, True), "fail", "fail")],
    ids=["engines decode", "CUDA in their place", "a GPU without engines", "wrong pixels"],
)
def test_what_the_engines_decode_is_judged_by_the_pixels(
    facts: tuple[int, bool, bool], engines: str, cuda: str
) -> None:
    by_engines, by_cuda = decoders.on_gpus(Decoded(*facts))
    assert (by_engines.status, by_cuda.status) == (engines, cuda)
    assert (by_engines.name, by_cuda.name) == ("decoding by the engines of GPU 0", "decoding by CUDA of GPU 0")
    assert ("CUDA decodes in their place" in by_engines.found) == (facts[0] == 3)
    assert by_engines.found.endswith("DALI has said: no room") == (engines == "warn")


# --- the machine -----------------------------------------------------------------------------------------------------


def files(root: Path, contents: Mapping[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
QUOTAS: dict[str, tuple[dict[str, str], float | None]] = {
    "version 2": ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": "150000 100000\n"}, 1.5),
    "of the group above": (
        {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/cpu.max": "50000 100000\n", f"{V2}/a/b/cpu.max": "max 100000\n"},
        0.5,
    ),
    "without one": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None),
    "version 1": (
        {
            "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/docker/1\n",
            f"{V1}/cpu.cfs_quota_us": "200000\n",  # in a container the group is the top
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        2.0,
    ),
    "version 1 without one": (
        {"proc/self/cgroup": "1:cpu:/\n", f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"},
        None,
    ),
    "no cgroups": ({}, None),
}


@pytest.mark.parametrize(("contents", "quota"), QUOTAS.values(), ids=QUOTAS)
def test_the_quota_is_read_as_the_kernel_writes_it(
    tmp_path: Path, contents: dict[str, str], quota: float | None
) -> None:
    assert machine.cpu_quota(files(tmp_path, contents)) == quota


def test_a_quota_below_the_cores_is_a_warning(tmp_path: Path) -> None:
    files(tmp_path, {"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "50000 100000\n"})
    finding = only(machine.cores, Subject(WAIT_S, tmp_path))
    assert finding.status == "warn" and "a cgroup quota of 0.5" in finding.found and "num_workers=1" in finding.remedy
    files(tmp_path, {f"{V2}/cpu.max": "100000000 100000\n"})
    assert only(machine.cores, Subject(WAIT_S, tmp_path)).status == "ok"


def test_a_process_far_from_its_gpu_is_a_warning(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    far = max(os.sched_getaffinity(0)) + 1
    files(tmp_path, {f"{nodes}/node0/cpulist": f"0-{far - 1}\n", f"{nodes}/node1/cpulist": f"{far}-{far + 3},900\n"})
    subject = subject_of(driver=[13, 0], cuda=[13, 0], gpus=1)
    subject.root = tmp_path
    finding = only(machine.numa, subject)
    assert finding.status == "warn" and "2 nodes, of which this process may use 1; GPU 0 is at node 1" in finding.found
    assert finding.remedy.endswith("numactl --cpunodebind=1")
    files(tmp_path, {f"{nodes}/node1/cpulist": f"0,{far}\n"})
    assert only(machine.numa, subject).status == "ok"


def test_a_list_of_cores_is_read_as_the_kernel_writes_it() -> None:
    assert machine.cores_of_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert machine.cores_of_list("\n") == set()


def test_a_dev_shm_that_is_not_there_fails(tmp_path: Path) -> None:
    assert only(machine.shared_memory, Subject(WAIT_S, tmp_path)).status == "fail"


@pytest.mark.parametrize(
    ("value", "status"), [(None, "ok"), ("32", "ok"), ("8", "ok"), ("1", "warn"), ("many", "warn")]
)
def test_few_hardware_queues_are_a_warning(monkeypatch: pytest.MonkeyPatch, value: str | None, status: str) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert only(machine.queues, Subject(WAIT_S)).status == status


LIMITED = """
import resource, sys
from proxyloader.tools.doctor import machine
from tests.tools.test_doctor import subject_of
subject = subject_of(driver=[13, 0], cuda=[13, 0], gpus=int(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), 4096))
found = list(machine.limits(subject))
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
for finding in found:
    print(finding.status, finding.remedy)
"""


@pytest.mark.parametrize(
    ("most_files", "gpus", "files_are", "memory_is"),
    [(8, 1, "fail ulimit -n 65536", "ok"), (1000, 2, "warn ulimit -n 65536", "warn ulimit -l"), (1024, 0, "ok", "ok")],
)
def test_limits_of_files_and_locked_memory(most_files: int, gpus: int, files_are: str, memory_is: str) -> None:
    done = scripts.run(LIMITED, most_files, gpus, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(files_are) and second.startswith(memory_is)


OPENED = """
import os, sys
from torchvision import transforms
from torchvision.datasets import ImageFolder
from proxyloader import DataLoader
dataset = ImageFolder(sys.argv[1], transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()]))
most = 0
for _ in DataLoader(dataset, 4, num_workers=int(sys.argv[2]), device="cpu"):
    most = max(most, len(os.listdir("/proc/self/fd")))
print(most)
"""


def test_a_loader_opens_no_more_files_than_the_doctor_counts(photos: Path) -> None:
    done = scripts.run(OPENED, photos, 4, timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= machine.FILES + 4 * machine.FILES_OF_WORKER
