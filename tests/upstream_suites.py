"""Other projects' tests of their loaders, run twice: with their loader, and with this one in its place.

    python -m tests.upstream_suites /path/to/test_dataloader.py /path/to/test_state_dict.py ...

The files are not part of this project; ``tests/README.md`` says which they are, where they are to be had, and why each
of the differences that this prints is there. Ids of tests behind ``--only`` limit it to these.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def swap_torch() -> None:
    import torch.utils.data

    import proxyloader

    torch.utils.data.DataLoader = proxyloader.DataLoader  # type: ignore[misc, assignment]


def swap_torchdata() -> None:
    import torchdata.stateful_dataloader

    import proxyloader

    class Swapped(proxyloader.DataLoader):
        def __init__(self, *args: object, snapshot_every_n_steps: int = 1, **arguments: object) -> None:
            super().__init__(*args, **arguments)  # type: ignore[arg-type]

    torchdata.stateful_dataloader.StatefulDataLoader = Swapped


def swap_dali() -> None:
    from nvidia.dali.plugin.pytorch.experimental import proxy

    import proxyloader

    def loader(server: object, dataset: object, *args: object, **arguments: object) -> object:
        return proxyloader.DataLoader(dataset, *args, server=server, **arguments)  # type: ignore[arg-type]

    proxy.DALIServer, proxy.DataLoader = proxyloader.ProxyServer, loader


SWAPS = {"nvidia.dali": swap_dali, "torchdata": swap_torchdata, "torch.utils.data": swap_torch}
"""By what the file imports; the first that it names counts."""


def pytest_generate_tests(metafunc: Any) -> None:
    """DALI's tests are written for nose2, whose decorator leaves their parameters in an attribute."""
    given = getattr(metafunc.function, "paramList", None)
    if given is not None:
        parameters = inspect.signature(metafunc.function).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        metafunc.parametrize(names, [each if isinstance(each, tuple) else (each,) for each in given])


def outcomes(suite: Path, swapped: bool, only: list[str], timeout_s: int) -> dict[str, str]:
    """What became of each test: "passed", "skipped", or the line that says why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(ROOT), str(suite.parent)]
        if swapped:
            swap = next(swap for name, swap in SWAPS.items() if name in suite.read_text())
            # Also in the processes that a test starts, which import the file anew.
            site = f"from tests.upstream_suites import {swap.__name__}\n{swap.__name__}()\n"
            (Path(folder) / "sitecustomize.py").write_text(site)
            paths.insert(0, folder)
        report = Path(folder) / "report.xml"
        tests = [f"{suite}::{name}" for name in only] or [str(suite)]
        options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "tests.upstream_suites"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--timeout={timeout_s}", f"--junitxml={report}", *tests],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=suite.parent,
            check=False,
        )
        found: dict[str, str] = {}
        for case in xml.parse(report).getroot().iter("testcase"):
            name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            unmet = [part for part in case if part.tag in ("failure", "error")]
            if unmet:
                found[name] = (unmet[0].get("message") or "failed").splitlines()[0]
            elif found.get(name, "passed") == "passed":  # of a test's parts the worst counts
                found[name] = "skipped" if case.find("skipped") is not None else "passed"
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="CLASS::TEST")
    parser.add_argument("--timeout", type=int, default=300, help="of one test, in seconds")
    options = parser.parse_args()
    differences = 0
    for suite in options.suites:
        theirs, ours = (outcomes(suite.resolve(), swapped, options.only, options.timeout) for swapped in (False, True))
        print(f"\n{suite.name}: {len(theirs)} tests; stock {count(theirs)}; proxyloader {count(ours)}")
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                differences += 1
                print(f"  {name}\n    stock:       {theirs.get(name)}\n    proxyloader: {ours.get(name)}")
    return min(differences, 1)


def count(found: dict[str, str]) -> str:
    names = ("passed", "skipped")
    numbers = [sum(each == name for each in found.values()) for name in names]
    return f"{numbers[0]} passed, {numbers[1]} skipped, {len(found) - sum(numbers)} failed"


if __name__ == "__main__":
    sys.exit(main())
