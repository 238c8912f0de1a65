"""The command line: its messages and exit statuses. The modules of the verbs have tests of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import proxyloader
from proxyloader import ImageError
from proxyloader.tools import explain

from .. import scripts
from ..faults import await_true
from ..limits import WAIT_S
from .command import SCRIPT, main

VERBS = ("demo", "diagnose", "bench", "doctor", "verify", "make-dataset", "explain")
NO_SIZE = "argument --size: must be a size such as 500x375, got {!r}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(proxyloader.__file__).parent.parent)}


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the verb `explain` end with this error."""

    def fail(name: str) -> int:
        raise error

    monkeypatch.setattr(explain, "explain_named", fail)


def exits(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """The status with which it ends, and both outputs."""
    return main(argv), *capsys.readouterr()


class TestHelp:
    def test_it_lists_the_verbs_and_says_where_to_start_and_which_version(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, text, _ = exits(capsys, "--help")
        assert status == 0
        assert "from proxyloader import DataLoader" in text
        assert "start here:\n  proxyloader demo" in text
        assert all(f"\n    {verb}" in text for verb in VERBS)
        assert exits(capsys, "--version") == (0, f"proxyloader {proxyloader.__version__}\n", "")

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_verb_says_what_it_does_by_examples_that_parse_with_its_defaults(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        status, text, _ = exits(capsys, verb, "--help")
        assert status == 0
        assert f"example:\n  proxyloader {verb}" in text
        assert "default: None" not in text
        assert max(map(len, text.partition("\n\n")[2].splitlines())) <= 84
        lines = [line.split() for line in text.splitlines() if line.startswith("  proxyloader ")]
        assert lines
        for line in lines:  # in which all but an option of ours is known
            status, _, said = exits(capsys, verb, "--unknown", *line[2:])
            assert status == 2 and said.endswith("error: unrecognized arguments: --unknown\n")

    def test_help_and_usage_errors_do_not_import_torch(self) -> None:
        code = (
            f"import sys\ntry: {SCRIPT}\n"
            "except SystemExit: print(sorted({'torch', 'numpy', 'rich', 'nvidia.dali'} & set(sys.modules)))"
        )
        for argv in (["demo", "--help"], ["demo", "--images", "many"]):
            done = scripts.run(code, *argv, timeout_s=WAIT_S, afresh=True)
            assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"


class TestUsageErrors:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ((), "the following arguments are required: COMMAND"),
            (("demo", "--images", "many"), "argument --images: must be an integer >= 1, got 'many'"),
            (("demo", "--workers", "-1"), "argument --workers: must be an integer >= 0, got '-1'"),
            (("doctor", "--limit", "0"), "argument --limit: must be an integer >= 1, got '0'"),
            *[
                (("make-dataset", "/nowhere/set", f"--size={text}"), NO_SIZE.format(text))
                for text in ("500", "500x", "500x375x3", "-500x375", "5e2x375")
            ],
        ],
        ids=str,
    )
    def test_an_invalid_option_or_verb(
        self, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
    ) -> None:
        status, _, said = exits(capsys, *argv)
        assert status == 2 and said.endswith(f"error: {message}\n")

    def test_an_unknown_verb_lists_the_verbs_and_an_unknown_option_shows_the_usage(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, _, said = exits(capsys, "train")
        assert status == 2 and all(verb in said.splitlines()[-1] for verb in ("'train'", *VERBS))
        status, _, said = exits(capsys, "demo", "--foo")
        assert status == 2 and said.startswith("usage: proxyloader")
        assert "error: unrecognized arguments: --foo" in said


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (ImageError("dataset[3] (a.jpg): cut off"), "dataset[3] (a.jpg): cut off"),
            (ValueError("images must be >= 1, got 0"), "images must be >= 1, got 0"),
            (FileExistsError("x: holds\n  something else"), "x: holds something else"),
            (FileNotFoundError(2, "No such file or directory", "/x/y"), "/x/y: No such file or directory"),
            (
                OSError(
                    "Caught OSError in worker process 0.\nOriginal Traceback (most recent call last):\n  a\nOSError: b"
                ),
                "OSError: b",
            ),
            (ValueError(), "ValueError"),
        ],
        ids=["an error of ours", "an argument", "several lines", "an OSError", "from a worker", "without a message"],
    )
    def test_one_line_on_stderr_and_exit_status_1(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
    ) -> None:
        fail_with(monkeypatch, error)
        assert main(["explain", "resnet50"]) == 1
        assert capsys.readouterr() == ("", f"proxyloader: error: {line}\n")

    @pytest.mark.parametrize(("error", "options"), [(ValueError("this"), ["--debug"]), (KeyError("bug"), [])])
    def test_with_debug_an_error_and_always_a_bug_keeps_its_traceback(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, options: list[str]
    ) -> None:
        fail_with(monkeypatch, error)
        with pytest.raises(type(error), match=error.args[0]):
            main(["explain", "resnet50", *options])


class TestMakeDataset:
    SMALL = ("--images", "6", "--size", "48x36", "--classes", "3", "--processes", "1")

    def test_it_makes_what_is_asked_for(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root = tmp_path / "a [red] set"  # rich takes some brackets for markup
        assert main(["make-dataset", str(root), *self.SMALL, "--seed", "4"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"{root}: 6 images, 0.") and out.endswith(" MB\n") and err == ""
        assert {"images": 6, "classes": 3, "seed": 4}.items() <= json.loads((root / "dataset.json").read_text()).items()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--images", "0"), "images must be an integer >= 1, got 0"),
            (("--size", "7x100"), "size must be (width, height) with sides >= 8, got (7, 100)"),
            (("--progressive", "2"), "progressive must be in [0, 1], got 2.0"),
            (("--processes", "0"), "processes must be an integer >= 1, or None, got 0"),
        ],
        ids=lambda value: value[0] if isinstance(value, tuple) else "",
    )
    def test_an_option_out_of_range(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
    ) -> None:
        assert main(["make-dataset", str(tmp_path / "set"), *options]) == 1
        assert capsys.readouterr() == ("", f"proxyloader: error: {message}\n")
        assert not (tmp_path / "set").exists()


class TestAsAProcess:
    def test_ctrl_c_ends_it_and_its_children_silently(self, tmp_path: Path) -> None:
        argv = ("make-dataset", str(tmp_path), "--images", "100000", "--size", "48x36", "--processes", "2")
        command, pipe = [sys.executable, "-m", "proxyloader", *argv], subprocess.PIPE
        how: dict[str, Any] = dict(env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        process = subprocess.Popen(command, **how)
        # By then both children are at work: one that is interrupted while it imports says so.
        await_true(lambda: len(list(tmp_path.glob("*/*.jpg"))) >= 1000)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out, err) == (130, "", "")
        await_true(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
