"""Shared by the integration tests: the roads that pictures take, and an end for workers that hang."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
from collections.abc import Iterator

import pytest

from ..limits import STOP_S
from .roads import road as road
from .roads import start_method as start_method


@pytest.fixture(autouse=True)
def a_worker_that_stays_fails_its_own_test_alone() -> Iterator[None]:
    yield
    if multiprocessing.active_children():
        gc.collect()  # a caught exception holds the frames it came through, and with them the loader
    for child in multiprocessing.active_children():
        child.join(STOP_S)
    stayed = multiprocessing.active_children()
    for child in stayed:
        with contextlib.suppress(RuntimeError):  # by which torch says that a worker was killed
            child.kill()
            child.join()
    assert not stayed, f"had to be killed: {stayed}"


@pytest.fixture
def no_accelerator_is_left() -> Iterator[None]:
    """Accelerate's objects share their state, and another test's may be for another device."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.GradientState._reset_state()
        state.AcceleratorState._reset_state(reset_partial_state=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spawned workers take seconds to start, so the produced road has none; the server road's get the same."""

    def is_twice(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        values = [str(value).partition(",")[0] for value in callspec.params.values()] if callspec is not None else []
        return {"produced", "spawn"} <= set(values)

    twice = [item for item in items if is_twice(item)]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if not is_twice(item)]
