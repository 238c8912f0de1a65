"""Which tests the default run leaves to ``pytest -m exhaustive``.

Many tests are run for each device, each way to start workers, each kind of loader and each kind of data. The default
run takes a part of these products:

- With workers that are not forked: in each file the first test for each other way to start them. Of the files of faults
  whose workers are spawned: none but ``test_faults_stop.py``, as those of a fork server are given the same in the same
  way, and other files spawn theirs.
- Of two parameters or more of the tests in ``integration/``, ``loader/`` and ``reader/``, most of which start workers
  and pipelines: as few tests as have each value. Of three or more of others: as few as have each pair of values.
- Of scripts that each need a process of their own: those that ``by_default`` is given the names of. The others repeat
  an ending, a signal or a backend that one of these or another file has.
- What has the marker ``exhaustive`` in its file is left out: other backends, measurements of a whole benchmark, and
  what follows from another test that is named beside the marker.

On a GPU building a pipeline takes most of a test's time. So there the default run takes less:

- Of two parameters or more: as few tests as have each value. Of v1 and v2: one, as both compile to plans of the same
  steps, which the tests on the CPU hold to torchvision for both.
- Of the files in ``NONE_ON_A_GPU``: none. They are about transforms, drawn programs of them among these, and
  ``test_closeness.py`` has the pixels of all steps; or about the benchmark, which is run there for its records.
- Of the files in ``ONE_OF_EACH_ON_A_GPU``: one test of each function, each time with other values. They are about the
  order of samples, states, the structure of batches and the words of errors, which the device does not change; about
  which datasets and images DALI takes; or about the layout of batches. In full stay those about the graph, streams,
  memory, JPEG engines, stopping and recovery.
- Of random orders of steps: every third.

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
    *("transforms/test_augment.py", "transforms/test_auto_augment.py", "transforms/test_color.py"),
    *("transforms/test_container.py", "transforms/test_geometry.py", "transforms/test_multi_crop.py"),
    *("transforms/test_resize.py", "transforms/test_type_conversion.py", "transforms/test_warp.py"),
    *("transforms/test_timm.py", "transforms/test_timm_auto_augment.py", "transforms/test_any_transform.py"),
    *("integration/test_random_programs.py", "tools/test_bench.py"),
}
ONE_OF_EACH_ON_A_GPU = {
    *("integration/test_any_dataset.py", "integration/test_called_transforms.py", "integration/test_grey_images.py"),
    *("integration/test_bad_input.py", "integration/test_batch_format.py", "integration/test_faults_epochs.py"),
    *("integration/test_faults_input.py", "integration/test_faults_order.py", "integration/test_faults_structure.py"),
    *("integration/test_feeding.py", "integration/test_hidden_transforms.py", "integration/test_kept_images.py"),
    *("integration/test_live_datasets.py", "integration/test_mixing.py", "integration/test_pil_datasets.py"),
    *("integration/test_proxy_server.py", "integration/test_reference_presets.py", "integration/test_reproduction.py"),
    *("integration/test_same_batches.py", "integration/test_several_images.py", "integration/test_sharded_loader.py"),
    *("integration/test_torch_contract.py", "integration/test_torch_contract_samples.py"),
    *("integration/test_torch_contract_streams.py", "integration/test_unreadable.py"),
    *("loader/test_backend.py", "loader/test_dataloader.py", "reader/test_loader.py", "reader/test_pipelines.py"),
    "tools/test_explain.py",
}
"""Both below ``tests/``."""

WITH_PIPELINES = {"integration", "loader", "reader"}

SPAWNED_ELSEWHERE = {f"test_faults_{name}.py" for name in ("epochs", "input", "limits", "loss", "order", "structure")}

THIRDS = {"test_any_order_of_steps_is_right"}


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
        started = {"gpu" if item.get_closest_marker("gpu") else "", *NOT_FORKED & set(map(str, _values(item).values()))}
        if not NOT_FORKED & started:
            function = item.getparent(pytest.Class), item.originalname  # type: ignore[attr-defined]
            products[item.path, function, "gpu" in started].append(item)
        elif (item.path, *sorted(started)) in seen or ("spawn" in started and item.path.name in SPAWNED_ELSEWHERE):
            later.add(item)
        seen.add((item.path, *sorted(started)))
    for number, ((path, (_, name), is_on_gpu), product) in enumerate(products.items()):
        file = path.relative_to(Path(__file__).parent).as_posix()
        if not is_on_gpu:
            chosen = _with_each(1 if path.parent.name in WITH_PIPELINES else 2, product)
        elif file in NONE_ON_A_GPU:
            chosen = []
        elif file in ONE_OF_EACH_ON_A_GPU:
            chosen = [product[number % len(product)]]
        else:
            chosen = _with_each(1, _of_one_version(product))[:: 3 if name in THIRDS else 1]
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


def _of_one_version(product: list[pytest.Item]) -> list[pytest.Item]:
    """Those of torchvision's v1, where it is a parameter."""
    versions = [_values(item).get("version") for item in product]
    return [item for item, version in zip(product, versions) if version is versions[0]]


def _with_each(together: int, product: list[pytest.Item]) -> list[pytest.Item]:
    """Some of the tests of one function, so that each value of a parameter, or each pair of two, is in one of them."""
    values = [{name: id(value) for name, value in _values(item).items()} for item in product]
    varied = [name for name in values[0] if len({each.get(name) for each in values}) > 1]
    if len(varied) <= together:
        return product
    found = [set(itertools.combinations([(name, each.get(name, 0)) for name in varied], together)) for each in values]
    missing, chosen = set().union(*found), []
    while missing:
        best = max(range(len(product)), key=lambda k: len(found[k] & missing))
        missing -= found[best]
        chosen.append(product[best])
    return chosen
