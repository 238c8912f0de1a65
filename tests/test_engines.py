"""Engines: who decodes is seen by a picture; where they do not, they are left alone, and the batches are right."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from torchvision.transforms import PILToTensor

from proxyloader import _dali, engines, pipelines
from proxyloader.pipeline import PipelineOptions, build_pipeline
from proxyloader.server import ProxyServer
from proxyloader.spelled import spell_dataset
from proxyloader.transforms.registry import plan_for

DECODED = plan_for(PILToTensor())

HELD = 96
"""Decoders at a time, of which some find no engines left."""

EXHAUSTED = """
import logging, sys
from torchvision import transforms
from proxyloader import DataLoader, engines
from proxyloader.pipeline import PipelineOptions, build_pipeline
from proxyloader.spelled import numbers_in
from proxyloader.transforms.registry import plan_for
from tests.faults import Spelled
logging.basicConfig()
dataset = Spelled(sys.argv[1], transform=transforms.PILToTensor())
held = []
while len(held) < int(sys.argv[2]) and engines.share(1.0, 0):
    held.append(build_pipeline(plan_for(transforms.PILToTensor()), PipelineOptions(8, device_id=0, num_threads=1)))
print(len(held), engines.share(1.0, 0))
for _ in range(6):
    for images, indices in DataLoader(dataset, 8, device="cuda"):
        assert numbers_in(images, white=255) == indices.tolist()
print("right")
"""


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_failing", {0, None})


def test_the_picture_is_told_from_what_another_decoder_makes_of_it() -> None:
    assert engines._levels_off(None) == 0
    _, wanted = engines._picture()
    assert np.abs(np.roll(wanted, 1, axis=0) - wanted).mean() > 10  # another picture would be seen


def test_a_pipeline_on_a_cpu_has_none() -> None:
    assert not engines.fail_for(build_pipeline(DECODED, PipelineOptions(1)))


def test_what_is_asked_for_is_given_where_they_work_and_nothing_where_not(left_alone: None) -> None:
    assert engines.share(0.65, 0) == 0
    assert engines.share(0.65, 1) == 0.65


@pytest.mark.parametrize(
    ("given", "uses"), [({}, True), ({"hw_decoder_load": 0.5}, True), ({"hw_decoder_load": 0}, False)]
)
def test_a_pipeline_tells_whether_it_uses_them(given: dict[str, Any], uses: bool) -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=0)  # type: ignore[untyped-decorator,unused-ignore]
    def graph() -> Any:
        return fn.decoders.image(fn.external_source(name="images"), device="mixed", output_type=types.RGB, **given)

    pipeline = graph()
    pipeline._build_graph()
    assert _dali.uses_engines(pipeline) == uses


@pytest.mark.gpu
def test_who_decoded_is_seen_on_a_gpu_with_engines() -> None:
    assert engines._levels_off(0, 1.0) < engines.MOST_LEVELS / 2
    assert engines._levels_off(0, 0.0) > engines.MOST_LEVELS * 2


@pytest.mark.gpu
def test_ready_graphs_leave_them_alone(left_alone: None) -> None:
    pipeline = pipelines.validation("proxy", batch_size=1, num_threads=1, device_id=0)
    assert not _dali.uses_engines(pipeline)
    assert not _dali.uses_engines(build_pipeline(DECODED, PipelineOptions(1, device_id=0)))


@pytest.mark.gpu
def test_a_pipeline_by_hand_that_counts_on_them_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = pipelines.validation("proxy", batch_size=1, num_threads=1, device_id=0)
    monkeypatch.setattr(engines, "_failing", set())
    monkeypatch.setattr(engines, "_levels_off", lambda device_id: 1.0)
    with caplog.at_level(logging.WARNING, "proxyloader"):
        ProxyServer(pipeline)
    assert "GPU 0 has no JPEG engines, or too many decoders use them" in caplog.text


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_where_too_many_decoders_use_them_the_pictures_are_right(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXHAUSTED, str(spell_dataset(tmp_path / "set", 64)), str(HELD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "right", done.stderr[-2000:]
