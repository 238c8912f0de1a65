"""Which tests the default run leaves to ``pytest -m exhaustive``.

Many tests are run for each device, each way to start workers, each kind of loader and each kind of data. The default
run takes a part of these products:

- With workers that are not forked: in each file the first test for each other way to start them. Of the files of faults
  whose workers are spawned: none but ``test_faults_stop.py``, as those of a fork server are given the same in the same
  way, and other files spawn theirs.
- Of two parameters or more of the tests in ``integration/`` and ``loader/``, most of which start workers and
  pipelines: as few tests as have each value. Of three or more of others: as few as have each pair of values.
- Of scripts that each need a process of their own: those that ``by_default`` is given the names of. The others repeat
  an ending, a signal or a backend that one of these or another file has.
- What has the marker ``exhaustive`` in its file is left out: other backends, measurements of a whole benchmark, and
  what follows from another test that is named beside the marker.

On a GPU building a pipeline takes most of a test's time, and CUDA builds one at a time, over all processes. So there
the default run takes less:

- Of the files in ``NONE_ON_A_GPU``: none. They are about transforms, and ``kernels/`` has the pixels of all steps;
  about what datasets hold and call, the order of samples, states, and the words of errors, which the device does not
  change; or about the benchmark, which is run there for its records.
- Of the files in ``EACH_ON_A_GPU``, and of those in ``gpu/``: as few tests of each function as have each value of a
  parameter, without the values that a single test has.
- Of all others: one test of each function, each time with other values.

Tests that need a GPU are collected where there is one, or where ``PROXYLOADER_REQUIRE_GPU=1`` says that there must be.
A test that is named on the command line is run, whatever it belongs to.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

NOT_FORKED = {"spawn", "forkserver"}

NONE_ON_A_GPU = {
    *("transforms/test_augment.py", "transforms/test_color.py", "transforms/test_container.py"),
    *("transforms/test_geometry.py", "transforms/test_resize.py", "transforms/test_type_conversion.py"),
    *("transforms/test_timm.py", "transforms/test_any_transform.py"),
    *("integration/test_any_dataset.py", "integration/test_called_transforms.py"),
    *("integration/test_reproduction.py", "integration/test_sharded_loader.py"),
    *("integration/test_torch_contract_samples.py", "integration/test_random_programs.py"),
    *("loader/test_backend.py", "tools/test_bench.py", "tools/test_bench_tasks.py", "tools/test_explain.py"),
}
EACH_ON_A_GPU = {"integration/test_hostile_jpegs.py"}
"""Both below ``tests/``."""

WITH_PIPELINES = {"integration", "loader"}

SPAWNED_ELSEWHERE = {f"test_faults_{name}.py" for name in ("epochs", "input", "structure")}


def has_gpu() -> bool:
    """There is a GPU, or there must be one."""
    return torch.cuda.is_available() or os.environ.get("PROXYLOADER_REQUIRE_GPU") == "1"


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is exhaustive, and take out of ``items`` what is not asked for."""
    for item in exhaustive(items):
        item.add_marker("exhaustive")
    named = any("::" in argument for argument in config.args)
    out = set()
    if not named and "exhaustive" not in config.option.markexpr:
        out |= {item for item in items if item.get_closest_marker("exhaustive")}
    if not has_gpu():
        out |= {item for item in items if item.get_closest_marker("gpu")}
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def exhaustive(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those of the products that the default run leaves out."""
    later, seen, products = set(), set(), defaultdict(list)
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        started = {"gpu" if item.get_closest_marker("gpu") else "", *NOT_FORKED & set(map(str, _values(item).values()))}
        if "gpu" in started and file in NONE_ON_A_GPU:
            later.add(item)
        elif not NOT_FORKED & started:
            function = item.getparent(pytest.Class), item.originalname  # type: ignore[attr-defined]
            products[file, function, "gpu" in started].append(item)
        elif (file, *sorted(started)) in seen or ("spawn" in started and item.path.name in SPAWNED_ELSEWHERE):
            later.add(item)
        seen.add((file, *sorted(started)))
    for number, ((file, _, is_on_gpu), product) in enumerate(products.items()):
        folder = file.partition("/")[0]
        if not is_on_gpu:
            chosen = _with_each(1 if folder in WITH_PIPELINES else 2, product)
        elif file in EACH_ON_A_GPU or folder == "gpu":
            chosen = _with_each(1, product, shared=True)
        else:
            chosen = [product[number % len(product)]]
        later |= set(product) - set(chosen)
    return later


def by_default(cases: Mapping[str, Any], *names: str) -> list[Any]:
    """Parameters, of which the default run takes those with these names."""
    assert set(names) <= cases.keys()
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=() if name in names else pytest.mark.exhaustive,
        )
        for name, case in cases.items()
    ]


def _values(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _with_each(together: int, product: list[pytest.Item], shared: bool = False) -> list[pytest.Item]:
    """Some of the tests of one function, so that each value of a parameter, or each pair of two, is in one of them.

    If ``shared``, a parameter with another value in each test does not count.
    """
    values = [{name: id(value) for name, value in _values(item).items()} for item in product]
    different = {name: len({each.get(name) for each in values}) for name in values[0]}
    varied = [name for name, count in different.items() if 1 < count < len(product) + (not shared)]
    if len(varied) <= (0 if shared else together):
        return product
    found = [set(itertools.combinations([(name, each.get(name, 0)) for name in varied], together)) for each in values]
    missing, chosen = set().union(*found), []
    while missing:
        best = max(range(len(product)), key=lambda k: len(found[k] & missing))
        missing -= found[best]
        chosen.append(product[best])
    return chosen
