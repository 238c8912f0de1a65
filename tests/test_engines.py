"""Engines: who decodes is seen by a picture; where they do not, they are left alone, and the batches are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, pipeline_def, types
from torchvision.transforms import PILToTensor

from proxyloader import _dali, engines
from proxyloader.pipeline import PipelineOptions, build_pipeline
from proxyloader.transforms.registry import plan_for

DECODED = plan_for(PILToTensor())


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
    ("free", "own", "crowded"),
    [(130, 8, False), (130, 0, True), (20, 119, False), (20, 60, True), (0, 140, True)],
)
def test_a_gpu_is_crowded_where_others_hold_much_of_it_or_little_is_left(free: int, own: int, crowded: bool) -> None:
    assert engines._is_crowded(free << 30, 140 << 30, own << 30) == crowded


def test_a_pipeline_that_was_deserialized_may_use_them() -> None:
    pipeline = Pipeline.deserialize(build_pipeline(DECODED, PipelineOptions(1)).serialize())
    pipeline.build()
    assert _dali.uses_engines(pipeline)


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
