"""Engines: who decodes is seen by a picture; where they do not, they are left alone, and the batches are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, pipeline_def, types
from torchvision.transforms import PILToTensor

from proxyloader import PipelineError, _dali, engines
from proxyloader.pipeline import PipelineOptions, build_pipeline
from proxyloader.transforms.registry import plan_for

DECODED = plan_for(PILToTensor())


def test_the_picture_is_told_from_what_another_decoder_makes_of_it() -> None:
    assert engines._levels_off(None) == 0
    _, wanted = engines._picture()
    assert np.abs(np.roll(wanted, 1, axis=0) - wanted).mean() > 10  # another picture would be seen


def test_a_pipeline_on_a_cpu_has_none() -> None:
    assert not engines._fail_for(build_pipeline(DECODED, PipelineOptions(1)))


@pytest.mark.parametrize(
    ("free", "own", "crowded"),
    [(130, 8, False), (130, 0, True), (20, 119, False), (20, 60, True), (0, 140, True)],
)
def test_a_gpu_is_crowded_where_others_hold_much_of_it_or_little_is_left(free: int, own: int, crowded: bool) -> None:
    assert engines._is_crowded(free << 30, 140 << 30, own << 30) == crowded


def decoder_of(given: dict[str, Any], operator: str = "image", **inputs: Any) -> Pipeline:
    @pipeline_def(batch_size=1, num_threads=1, device_id=0)  # type: ignore[untyped-decorator,unused-ignore]
    def graph() -> Any:
        encoded, number = fn.external_source(name="images"), fn.random.uniform(range=[0, 1])
        nodes = dict.fromkeys(inputs, number)
        how = {"device": "mixed", "output_type": types.RGB, "preallocate_width_hint": 300, **nodes, **given}
        return fn.resize(getattr(fn.decoders, operator)(encoded, **how), size=[8, 8])

    pipeline = graph()
    pipeline._build_graph()
    return pipeline


@pytest.mark.parametrize(
    ("given", "uses"), [({}, True), ({"hw_decoder_load": 0.5}, True), ({"hw_decoder_load": 0}, False)]
)
def test_a_pipeline_tells_whether_it_uses_them(given: dict[str, Any], uses: bool) -> None:
    assert _dali.uses_engines(decoder_of(given)) == uses


def words_of(pipeline: Pipeline) -> list[str]:
    """All that is said to its operators, but from which lines of code."""
    lines = [line.strip() for operator in pipeline._ops for line in str(operator.spec).splitlines()]
    return [line for line in lines if not line.startswith(("_origin_stack", "preserve_name")) and line]


@pytest.mark.parametrize(
    ("given", "operator", "inputs"),
    [
        ({}, "image", {}),
        ({"hw_decoder_load": 0.5}, "image", {}),
        ({"hw_decoder_load": 1.0, "random_area": [0.1, 0.9], "seed": 7}, "image_random_crop", {}),
        ({"crop": [20, 20]}, "image_crop", {"crop_pos_x": 1}),
    ],
    ids=str,
)
def test_its_decoders_are_told_to_leave_them_alone_and_nothing_else(
    given: dict[str, Any], operator: str, inputs: dict[str, Any]
) -> None:
    pipeline = decoder_of(given, operator, **inputs)
    before = words_of(pipeline)
    assert _dali.leave_engines_alone(pipeline) and not _dali.uses_engines(pipeline)
    after = words_of(pipeline)
    assert [line for line in after if line not in before] == ["hw_decoder_load: 0.000000"]
    assert [line for line in after if "hw_" not in line] == [line for line in before if "hw_" not in line]


def test_a_decoder_that_cannot_be_told_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_failing", {0})
    pipeline = decoder_of({"crop": [20, 20], "hw_decoder_load": 0.5}, "image_crop", crop_pos_x=1)
    with pytest.raises(PipelineError, match=r"engines of GPU 0, .*pictures might be wrong. Give its decoders hw_dec"):
        engines.build(pipeline)
    assert _dali.uses_engines(pipeline)


def test_a_pipeline_that_was_deserialized_may_use_them_and_cannot_be_told() -> None:
    pipeline = Pipeline.deserialize(build_pipeline(DECODED, PipelineOptions(1)).serialize())
    assert not _dali.leave_engines_alone(pipeline)
    pipeline.build()
    assert _dali.uses_engines(pipeline) and not _dali.leave_engines_alone(pipeline)


def test_a_pipeline_without_them_stays_as_it_is() -> None:
    pipeline = build_pipeline(DECODED, PipelineOptions(1))
    executor = pipeline._pipe
    assert _dali.leave_engines_alone(pipeline) and pipeline._pipe is executor is not None
