"""Questions that are answered by a child process, as whatever answers them may crash or hang.

The child appends each answer to a file as a line of JSON, so that those before a crash or a hang are known.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from proxyloader.tools.doctor import questions; questions.answer(*sys.argv[2:])"
)

SHOWN_CHARACTERS = 300
"""Length of what is shown of an error."""


@dataclass(frozen=True)
class Answer:
    """What a child has told.

    Attributes:
        told: its answers, in order.
        failure: how it failed, with the end of its output; "" if it did not.
        said: the end of its output, as of libraries that print what goes wrong and go on.
    """

    told: list[Mapping[str, Any]] = field(default_factory=list)
    failure: str = ""
    said: str = ""


def ask(question: str, *arguments: str, limit_s: float) -> Answer:
    """Ask a question of ``questions.QUESTIONS`` in a child process, and kill the child after ``limit_s`` seconds."""
    (answer,) = ask_at_once([(question, *arguments)], limit_s)
    return answer


def ask_at_once(questions: Sequence[Sequence[str]], limit_s: float) -> list[Answer]:
    """Ask several questions, each with its arguments, in as many child processes at the same time."""
    with tempfile.TemporaryDirectory(prefix="proxyloader-doctor-") as folder, contextlib.ExitStack() as stack:
        files = [Path(folder, str(number)) for number in range(len(questions))]
        children = [stack.enter_context(_child(*question, file=file)) for question, file in zip(questions, files)]
        end_s = time.monotonic() + limit_s
        return [_answer_of(child, file, end_s, limit_s) for child, file in zip(children, files)]


@contextlib.contextmanager
def _child(*question: str, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    file.touch()
    # The child gets this process's sys.path, to find what this one would find.
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), str(file), *question]
    with _output_of(file).open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _output_of(file: Path) -> Path:
    return file.with_suffix(".output")


def _answer_of(child: subprocess.Popen[bytes], file: Path, end_s: float, limit_s: float) -> Answer:
    try:
        failure = _end_of(child.wait(max(0.0, end_s - time.monotonic())))
    except subprocess.TimeoutExpired:
        failure = f"it took more than {limit_s:g} s, and was ended (--limit S gives it more)"
        child.kill()
        child.wait()
    lines = file.read_text().splitlines(keepends=True)
    told = [json.loads(line) for line in lines if line.endswith("\n")]  # a line that was not finished is none
    said = _end_of_text(_output_of(file).read_text(errors="replace"))
    return Answer(told, f"{failure}: {said}" if failure and said else failure, said)


def _end_of(status: int) -> str:
    if status < 0:
        return f"it crashed ({signal.Signals(-status).name})"
    return f"it failed (exit status {status})" if status else ""


def _end_of_text(text: str) -> str:
    """Return the last lines of an output; of a traceback the last one alone, which is the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "Traceback (most recent call last):" in text:
        lines = lines[-1:]
    return shortened(" / ".join(lines[-3:]))


def shortened(text: str) -> str:
    """Return a text, or its beginning where it is long."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
