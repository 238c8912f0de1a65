"""Shared by the integration tests: the roads that pictures take."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .roads import road as road, root as root, start_method as start_method


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
