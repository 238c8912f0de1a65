"""The ways to a diagnosis: a function, a loop of one's own, and the verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import check_can_be_written
from .diagnosis import Diagnosis
from .loop import DiagnosedLoop, check_seconds


def diagnose(loader: Any, step: Callable[[Any], Any], *, seconds: float = 60.0) -> Diagnosis:
    """Measure what bounds a training, and what this loader brings to it.

    It measures the training as it is, its step alone with one batch again and again, the loader alone, the other kind
    of loader over the same samples (torch's for one of ours, and ours for one of torch's), and other arguments.
    ``step`` is called with some hundred batches, so the model goes on training. It needs Linux, and psutil: ``pip
    install 'proxyloader[bench]'``.

    Args:
        loader: a ``torch.utils.data.DataLoader`` or a ``proxyloader.DataLoader``.
        step: a function of a batch that does what the training loop does.
        seconds: about how long all of it takes.

    Returns:
        The verdict, its reasons and the figures. ``print()`` shows them.

    Raises:
        TypeError: the loader is neither of the two.
        ValueError: ``seconds`` is not above 0, the loader gives no batch, or this is one of several processes of
            torch.distributed.
    """
    with DiagnosedLoop(loader, seconds) as loop:
        for batch in loop:
            step(batch)
    return loop.result


def diagnosis(loader: Any, *, seconds: float = 60.0) -> DiagnosedLoop:
    """Measure a training loop of your own, as ``diagnose`` does.

    ::

        with proxyloader.diagnosis(loader) as batches:
            for images, labels in batches:
                ...  # the step
        print(batches.result)

    The loop ends by itself when all is measured, also after several epochs of the loader. ``batches.result`` is the
    ``Diagnosis``. Arguments and errors are those of ``diagnose``.

    Raises:
        RuntimeError: ``result`` is asked for, and the loop was left early.
    """
    return DiagnosedLoop(loader, seconds)


def diagnose_script(
    script: Path, arguments: Sequence[str], seconds: float, json_file: Path | None, html_file: Path | None
) -> None:
    """Run a script until its training loop is diagnosed, print the report, and write it to files.

    Raises:
        ValueError: ``seconds`` is not above 0.
        ValueError, FileNotFoundError, SystemExit: as ``diagnosed_script`` does.
        OSError: a file cannot be written.
    """
    from rich.console import Console

    from ..bench.system_info import machine
    from .script import diagnosed_script

    if html_file is not None:
        from .page import html_of  # which needs matplotlib
    check_seconds(seconds)
    for file in (json_file, html_file):
        if file is not None:
            check_can_be_written(file)
    found = diagnosed_script(script, arguments, seconds)
    console = Console()
    console.print()
    console.print(found, highlight=False)
    title = " ".join([script.name, *arguments])
    if json_file is not None:
        json_file.write_text(json.dumps({"script": title, "machine": machine(), **found.as_dict()}, indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(html_of(found, title))
