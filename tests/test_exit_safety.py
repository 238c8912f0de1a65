"""A script that closes nothing ends as with torch's loader: its own status, its own last words, nothing left."""

from __future__ import annotations

import signal
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from . import scripts
from .faults import HEADER, assert_gone, children_of, training
from .limits import ERROR_S, WAIT_S
from .numbered import spell_dataset
from .tiers import by_default

IMAGES = 48

KEPT = """
import atexit, ctypes, sys


@atexit.register  # first, so it is called last
def keep_all_modules():  # as extension modules do, of pandas and others: then Python clears them one by one
    for module in list(sys.modules.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


{early}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", IMAGES)


def ended(folder: Path, root: Path, body: str, early: str = "", afresh: bool = False) -> tuple[int, str, str]:
    """The status, output and errors of a script that has ended, and left no process.

    Args:
        early: stands before all imports.
        afresh: as of ``training``.
    """
    children: set[psutil.Process] = set()
    header = KEPT.format(early=textwrap.dedent(early)) + HEADER + "    notes = Path(sys.argv[0]).parent\n"
    with training(folder, root, body, header=header, afresh=afresh) as process:
        deadline_s = time.monotonic() + WAIT_S
        while process.poll() is None:
            assert time.monotonic() < deadline_s, "it does not end"
            try:
                children.update(children_of(process.pid))
            except psutil.Error:
                continue
            time.sleep(0.02)
        output, errors = process.communicate(timeout=WAIT_S)
        assert_gone(list(children), ERROR_S)
        return process.returncode, output, errors


LEFT_OPEN = {
    "an iterator": "batches = iter(loader_of(root)); next(batches)",
    "an iterator in a dict": "kept = {'batches': iter(loader_of(root))}; next(kept['batches'])",
    "an iterator in a cycle": "kept = [loader_of(root)]; kept += [iter(kept[0]), kept]; next(kept[1]); del kept",
    "an iterator without workers": "batches = iter(loader_of(root, workers=0)); next(batches)",
    "several loaders": """
        kept = [iter(loader_of(root)), iter(loader_of(root, persistent_workers=True)), iter(loader_of(root, workers=0))]
        [next(batches) for batches in kept]
    """,
    "persistent workers": "loader = loader_of(root, persistent_workers=True); all_numbers(loader)",
    "spawned workers": "batches = iter(loader_of(root, workers=1, multiprocessing_context='spawn')); next(batches)",
    "workers that ignore SIGTERM": """
        from tests.integration.test_stopping import deaf
        batches = iter(loader_of(root, worker_init_fn=deaf)); next(batches)
    """,
    "a dataset without images": """
        from torchvision.datasets import FakeData
        from torchvision.transforms import PILToTensor
        batches = iter(DataLoader(FakeData(32, transform=PILToTensor()), 4, num_workers=2)); next(batches)
    """,
    "a server's loader": """
        from tests.integration.test_stopping import numbers_of_bytes, read, server_of
        server = server_of("cpu")
        dataset = Spelled(root, transform=server.proxy, loader=read)
        batches = iter(DataLoader(dataset, 4, num_workers=2, server=server)); next(batches)
    """,
    "a server under a stock loader": """
        from tests.integration.roads import Road
        road = Road("produced", root)
        batches = iter(road.loader(num_workers=2)); next(batches)
    """,
    "an iterator of DALI": """
        from nvidia.dali.plugin.pytorch import DALIClassificationIterator
        from proxyloader import pipelines
        pipeline = pipelines.validation(file_root=root, size=32, batch_size=4, num_threads=1, device_id=None)
        batches = DALIClassificationIterator(pipeline, reader_name="Reader"); next(batches)
    """,
    "cells of a notebook": """
        cells = ["from tests.faults import *", "batches = iter(loader_of(root))", "_ = next(batches)", "Out = {3: _}"]
        user = {"root": root}
        for cell in cells: exec(compile(cell, "<cell>", "exec"), user)
    """,
}


@pytest.mark.parametrize(
    "body",
    by_default(
        LEFT_OPEN,
        "an iterator in a cycle",
        "several loaders",
        "a server under a stock loader",
        "an iterator of DALI",
    ),
)
def test_a_script_that_leaves_it_open_ends_without_a_word(
    root: Path, tmp_path: Path, body: str, request: pytest.FixtureRequest
) -> None:
    # One of them from its first import on; of the others torch's exit handlers are older than any of the script's.
    assert ended(tmp_path, root, body, afresh="several loaders" in request.node.name) == (0, "", "")


def test_what_is_called_when_an_object_is_gone_is_called_once_and_not_at_exit() -> None:
    script = """
from proxyloader._exit_safety import when_gone

class Thing: ...

gone, stays = Thing(), Thing()
when_gone(gone, print, "gone")
when_gone(stays, print, "stays")
del gone
print("ends")
"""
    assert scripts.run(script, timeout_s=WAIT_S).stdout.split() == ["gone", "ends"]


GOING_ON = {
    "with workers": "while True: all_numbers(loader_of(root))",
    "in DALI": "while True: all_numbers(loader)",
    "that build pipelines": "while True: all_numbers(loader_of(root, workers=0))",
}


@pytest.mark.parametrize("body", by_default(GOING_ON, "with workers"))
def test_threads_that_go_on_end_without_a_word(root: Path, tmp_path: Path, body: str) -> None:
    script = f"""
        def train(loader):
            {body}
        for _ in range(3):
            threading.Thread(target=train, args=(loader_of(root, workers=0),), daemon=True).start()
        time.sleep(2)
    """
    status, output, errors = ended(tmp_path, root, script)
    # Python before 3.14 ends a thread wherever it is. In torch's code that aborts the process; so it does with torch's
    # own loader, where it is the rule.
    if status == -signal.SIGABRT:
        errors = errors.removeprefix("terminate called without an active exception\n")
    assert (output, errors) == ("", "") and status in (0, -signal.SIGABRT)


ENDINGS = {
    "an exception": ("raise LookupError('mine')", 1, "LookupError: mine"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "sys.exit with a message": ("sys.exit('enough')", 1, "enough"),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -2, "KeyboardInterrupt"),
    "an exception in a thread": (
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        0,
        "ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize(
    "kind", ["DataLoader", pytest.param("torch.utils.data.DataLoader", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("ending", "status", "last"), by_default(ENDINGS, "an exception", "Ctrl-C"))
def test_a_script_ends_as_it_was_told(
    root: Path, tmp_path: Path, kind: str, ending: str, status: int, last: str
) -> None:
    """The stock loader's case shows that the status and the words are Python's."""
    body = f"""
        import torch
        for batch in {kind}(Spelled(root), 4, num_workers=2):
            {ending}
            break
    """
    if kind != "DataLoader":
        body = body.replace("Spelled(root)", "ImageFolder(root, transforms.ToTensor())")
    found, output, errors = ended(tmp_path, root, body)
    assert (found, output, errors.count("Traceback")) == (status, "", last.count(":") or last.count("Keyboard"))
    assert errors.endswith(last + "\n" if last else "")


LOADS_AT_THE_END = """
    batches = iter(loader_of(root, workers={workers}))
    seen = all_numbers([next(batches)])

    {register}
    def load():
        print(seen + all_numbers(batches) == list(range(48)))
        print(all_numbers(loader_of(root, workers={workers})) == list(range(48)))
"""


@pytest.mark.parametrize("workers", by_default({"0": 0, "2": 2}, "2"))
def test_an_exit_handler_may_still_load_batches(root: Path, tmp_path: Path, workers: int) -> None:
    body = LOADS_AT_THE_END.format(workers=workers, register="@atexit.register")
    assert ended(tmp_path, root, body) == (0, "True\nTrue\n", "")


@pytest.mark.parametrize("moment", ["before torch is imported", "before DALI is"])
def test_an_exit_handler_may_load_batches_whenever_it_was_registered(root: Path, tmp_path: Path, moment: str) -> None:
    early = """
        @atexit.register
        def load_in_the_end():
            load()
    """
    body = LOADS_AT_THE_END.format(workers=0, register="")
    if moment == "before torch is imported":
        assert ended(tmp_path, root, body, early, afresh=True) == (0, "True\nTrue\n", "")
    else:
        assert ended(tmp_path, root, "    atexit.register(lambda: load())" + body) == (0, "True\nTrue\n", "")


FORKED = {
    "with copies": "pass",
    "with an iterator of its own": "batches = iter(loader_of(root, workers=0)); next(batches)",
}


@pytest.mark.parametrize("body", by_default(FORKED, "with an iterator of its own"))
def test_a_forked_child_ends_without_a_word(root: Path, tmp_path: Path, body: str) -> None:
    script = f"""
        from tests.integration.roads import picture_pipeline
        batches = iter(loader_of(root, workers=0)); next(batches)
        pipeline = picture_pipeline("cpu"); pipeline.build()
        cycle = [picture_pipeline("cpu")]; cycle[0].build(); cycle.append(cycle); del cycle
        pid = os.fork()
        if pid == 0:
            {body}
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        next(batches)
    """
    assert ended(tmp_path, root, script) == (0, "3\n", "")
