"""How many cores there are for a process. ``tests/dali/test_build.py`` has the shares of torchrun's processes."""

from __future__ import annotations

import os

import pytest

from proxyloader._cores import cores_of_process


def test_a_process_alone_has_the_cores_of_its_affinity_and_all_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cores_of_process() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores_of_process() == os.cpu_count()
