"""Engines: who decodes is seen by a picture; where they do not, they are left alone, and the batches are right."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from torchvision.transforms import PILToTensor

from proxyloader import PipelineError
from proxyloader.dali import executor as _executor, interrupts, jpeg_engines
from proxyloader.dali.build import PipelineOptions, build_pipeline

from ..outcomes import raises
from ..plans import plan_for

on_gpu: Any = pipeline_def(batch_size=1, num_threads=1, device_id=0)


def test_the_picture_is_told_from_what_another_decoder_makes_of_it() -> None:
    assert jpeg_engines._measure_error(None) == 0
    _, wanted = jpeg_engines.make_test_image(quality=90)
    assert np.abs(np.roll(wanted, 1, axis=0) - wanted).mean() > 10  # another picture would be seen


@pytest.mark.parametrize("is_torchs", [True, False])
def test_a_worker_that_ends_during_the_trial_is_torchs_error(is_torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(pipeline: Pipeline) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed." if is_torchs else "no room")

    monkeypatch.setattr(Pipeline, "_run_once", run)
    with pytest.raises(RuntimeError, match="pid 7") if is_torchs else contextlib.nullcontext():
        assert jpeg_engines._measure_error(None) == math.inf


@pytest.mark.parametrize(
    ("free", "own", "crowded", "tried"),
    [
        *((130, 8, False, False), (130, 0, True, True), (20, 119, False, False), (20, 60, True, True)),
        *((0, 140, True, False), (0, 138, True, False), (0, 100, True, True)),
    ],
)
def test_a_gpu_is_crowded_where_others_hold_much_of_it_or_little_is_left_which_in_a_loop_a_model_may_have_taken(
    free: int, own: int, crowded: bool, tried: bool, gpu: Gpu
) -> None:
    """Of 140 GiB so many are free, and so many this process's own."""
    pipeline = decoder_of({})
    jpeg_engines.build(pipeline)
    gpu.free_gib, gpu.own_gib = free, own
    assert jpeg_engines.is_crowded(0) == crowded
    assert not jpeg_engines.must_rebuild(pipeline)
    assert bool(gpu.tried) == tried


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_where_torch_has_no_cuda_nothing_is_crowded(error: type[Exception], gpu: Gpu) -> None:
    gpu.error = error("Torch not compiled with CUDA enabled")
    assert not jpeg_engines.is_crowded(0) and gpu.looks > 0


def decoder_of(given: dict[str, Any], operator: str = "image", **inputs: Any) -> Pipeline:
    @on_gpu
    def graph() -> Any:
        encoded, number = fn.external_source(name="images"), fn.random.uniform(range=[0, 1])
        nodes = dict.fromkeys(inputs, number)
        how = {"device": "mixed", "output_type": types.RGB, "preallocate_width_hint": 300, **nodes, **given}
        return fn.resize(getattr(fn.decoders, operator)(encoded, **how), size=[8, 8])

    pipeline = graph()
    pipeline._build_graph()
    return pipeline


def words_of(pipeline: Pipeline) -> list[str]:
    """All that is said to its operators, but from which lines of code."""
    lines = [line.strip() for operator in pipeline._ops for line in str(operator.spec).splitlines()]
    return [line for line in lines if line and not line.startswith("_origin_stack")]


@pytest.mark.parametrize(
    ("given", "operator", "inputs"),
    [
        ({}, "image", {}),
        ({"hw_decoder_load": 0.5}, "image", {}),
        ({"hw_decoder_load": 1.0, "random_area": [0.1, 0.9], "seed": 7}, "image_random_crop", {}),
        ({"hw_decoder_load": 0.5, "preserve": True, "name": "mine"}, "image", {}),
        ({"crop": [20, 20]}, "image_crop", {"crop_pos_x": 1}),
    ],
    ids=str,
)
def test_its_decoders_are_told_to_leave_them_alone_and_nothing_else(
    given: dict[str, Any], operator: str, inputs: dict[str, Any]
) -> None:
    pipeline = decoder_of(given, operator, **inputs)
    before = words_of(pipeline)
    assert _executor.get_engine_paddings(pipeline)
    assert _executor.disable_engines(pipeline) and not _executor.get_engine_paddings(pipeline)
    after = words_of(pipeline)
    assert [line for line in after if line not in before] == ["hw_decoder_load: 0.000000"]
    assert [line for line in after if "hw_" not in line] == [line for line in before if "hw_" not in line]


def test_a_decoder_that_cannot_be_told_is_an_error(gpu: Gpu) -> None:
    jpeg_engines._engines[0] = "failing"
    assert not _executor.get_engine_paddings(decoder_of({"hw_decoder_load": 0}))
    pipeline = decoder_of({"crop": [20, 20], "hw_decoder_load": 0.5}, "image_crop", crop_pos_x=1)
    with raises(PipelineError, code="no-engines"):
        jpeg_engines.build(pipeline)
    assert _executor.get_engine_paddings(pipeline)


def test_a_line_of_code_that_names_the_argument_is_not_taken_for_it() -> None:
    @on_gpu
    def graph() -> Any:
        return fn.decoders.image(fn.external_source(name="images"), device="mixed")  # not hw_decoder_load: 0.000000

    pipeline = graph()
    pipeline._build_graph()
    assert _executor.get_engine_paddings(pipeline)


def test_equal_decoders_that_were_told_may_still_be_made_one() -> None:
    """A checkpoint holds one for both, and must fit."""

    @on_gpu
    def graph() -> Any:
        encoded = fn.external_source(name="images")
        return tuple(fn.decoders.image(encoded, device="mixed", hw_decoder_load=0.5) for _ in range(2))

    pipeline = graph()
    assert _executor.disable_engines(pipeline)
    told = [words_of(pipeline).count(line) for line in ("preserve_name: False", "hw_decoder_load: 0.000000")]
    assert told == [2, 2]


def test_a_pipeline_on_a_cpu_uses_none_and_stays_as_it_is() -> None:
    pipeline = build_pipeline(plan_for(PILToTensor()), PipelineOptions(1))
    executor = pipeline._pipe
    assert not jpeg_engines.must_rebuild(pipeline)
    assert _executor.disable_engines(pipeline) and pipeline._pipe is executor is not None


class Gpu:
    """In place of a GPU of 140 GiB, which is not here: how much is free or this process's own, and whether it has
    engines for those who try. What needs a real one is in ``tests/gpu/test_engines_gpu.py``."""

    def __init__(self) -> None:
        self.free_gib, self.own_gib, self.has_engines = 140, 0, True
        self.error: Exception | None = None  # when it is asked for its memory
        self.tried: list[Any] = []
        self.built: list[bool] = []  # whether on engines
        self.looks = 0

    def crowd(self) -> None:
        """Let others take ten GiB."""
        self.free_gib -= 10

    def memory(self, device_id: int) -> tuple[int, int]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.free_gib << 30, 140 << 30

    def build(self, pipeline: Pipeline) -> None:
        if pipeline._built:
            return
        if not pipeline._py_graph_built:
            pipeline._build_graph()
        # As much of an executor as a pipeline needs to be let go.
        pipeline._pipe = SimpleNamespace(Shutdown=lambda: None)
        pipeline._built, pipeline._device_id = True, 0
        self.built.append(bool(_executor.get_engine_paddings(pipeline)))

    def levels_off(self, device_id: int, padding: Any) -> float:
        self.tried.append(padding)
        return 0 if self.has_engines else 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    settings = {"_engines": {}, "CHECK_INTERVAL_S": 0.0, "CROWDED_BYTES": 4 << 30}  # whatever other tests have set
    for owner, mine in (
        (jpeg_engines, {**settings, "_measure_error": gpu.levels_off}),
        (_executor, {"build": gpu.build}),
        (torch.cuda, {"mem_get_info": gpu.memory, "memory_reserved": lambda device_id: gpu.own_gib << 30}),
    ):
        for name, value in mine.items():
            monkeypatch.setattr(owner, name, value)
    return gpu


def test_when_it_has_become_crowded_each_pipeline_is_tried_once_before_its_next_run(gpu: Gpu) -> None:
    first, second = decoder_of({}), decoder_of({"device_memory_padding": 1 << 20})
    for pipeline in (first, second):
        jpeg_engines.build(pipeline)
    assert not jpeg_engines.must_rebuild(first) and gpu.tried == [] and gpu.built == [True, True]
    gpu.crowd()
    for _ in range(2):
        assert not jpeg_engines.must_rebuild(first) and not jpeg_engines.must_rebuild(second)
    assert gpu.tried == [(), (("device_memory_padding", 1 << 20),)]
    gpu.has_engines = False  # others may use up what is left
    assert not jpeg_engines.must_rebuild(first)


def test_what_was_not_tried_before_others_used_them_up_is_built_again(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    tried, other = decoder_of({}), decoder_of({})
    for pipeline in (tried, other):
        jpeg_engines.build(pipeline)
    gpu.crowd()
    gpu.has_engines = False
    for pipeline in (tried, other):
        assert all(jpeg_engines.must_rebuild(pipeline) for _ in range(2))
        _executor.discard_executor(pipeline)
        jpeg_engines.build(pipeline)
        assert not jpeg_engines.must_rebuild(pipeline)
    assert gpu.built == [True, True, False, False] and gpu.tried == [()]
    assert caplog.text.count("CUDA, which decodes more slowly") == 1


def test_the_gpu_is_looked_at_once_a_second(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, other, clock = decoder_of({}), decoder_of({}), [7.0]
    monkeypatch.setattr(jpeg_engines, "CHECK_INTERVAL_S", 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for each in (pipeline, other):
        jpeg_engines.build(each)
    gpu.looks = 0
    for clock[0], looks in ((7.0, 1), (7.5, 1), (7.9, 1), (8.0, 2), (9.1, 3)):
        assert not jpeg_engines.must_rebuild(pipeline)
        assert gpu.looks == looks
    assert not jpeg_engines.must_rebuild(other)
    assert gpu.looks == 4


def test_on_a_crowded_gpu_they_are_tried_behind_each_once(gpu: Gpu) -> None:
    gpu.crowd()
    pipelines = [decoder_of({}) for _ in range(3)]
    for pipeline in pipelines * 2:
        jpeg_engines.build(pipeline)
    assert gpu.tried == [()] * 3
    _executor.discard_executor(pipelines[0])
    jpeg_engines.build(pipelines[0])
    assert gpu.tried == [()] * 4 and gpu.built == [True] * 4
    jpeg_engines.build(decoder_of({"device_memory_padding": 1 << 20, "host_memory_padding": 0}))
    assert gpu.tried[4:] == [(("device_memory_padding", 1 << 20), ("host_memory_padding", 0))]


def test_where_a_crowded_gpu_has_none_left_all_pipelines_leave_them_alone(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    before = decoder_of({})
    gpu.crowd()
    jpeg_engines.build(before)
    assert gpu.tried == [()]
    gpu.has_engines = False
    built_by_its_user = decoder_of({})
    gpu.build(built_by_its_user)
    executor = built_by_its_user._pipe
    gpu.built.clear()
    jpeg_engines.build(built_by_its_user)
    assert built_by_its_user._pipe is not executor and gpu.built == [False]
    jpeg_engines.build(decoder_of({"hw_decoder_load": 1.0}))
    anywhere = decoder_of({})
    anywhere._device_id = None  # DALI takes the current one, when it is built
    jpeg_engines.build(anywhere)
    assert gpu.built == [False, False, True, False] and gpu.tried == [()] * 2
    assert caplog.text.count("CUDA, which decodes more slowly") == 1
    jpeg_engines.build(before)  # it has its own
    assert _executor.get_engine_paddings(before)


def test_what_has_run_is_not_built_again_behind_its_users_back(gpu: Gpu) -> None:
    pipeline = decoder_of({})
    gpu.build(pipeline)
    pipeline._first_iter, gpu.has_engines = False, False
    gpu.crowd()
    for _ in range(2):
        with raises(PipelineError, code="no-engines"):
            jpeg_engines.build(pipeline)


@pytest.mark.parametrize("has_engines", [False, True])
def test_who_asks_whether_they_decode_tries_them_once(has_engines: bool, gpu: Gpu) -> None:
    """Where a GPU that is not crowded has none, DALI knows."""
    gpu.has_engines = has_engines
    pipeline = decoder_of({})
    jpeg_engines.build(pipeline)
    assert [jpeg_engines.can_use(0), jpeg_engines.can_use(0)] == [has_engines] * 2
    assert gpu.tried == [()] and gpu.built == [True]
    assert _executor.get_engine_paddings(pipeline) and not jpeg_engines.are_disabled(0)


def test_where_others_use_them_up_who_asks_is_told_so_and_what_is_built_from_then_on_does_without(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    jpeg_engines.build(decoder_of({}))
    gpu.crowd()
    gpu.has_engines = False
    assert not jpeg_engines.can_use(0) and jpeg_engines.are_disabled(0) and gpu.tried == [()]
    assert caplog.text.count("CUDA, which decodes more slowly") == 1
    jpeg_engines.build(decoder_of({}))
    assert gpu.built == [True, False] and gpu.tried == [()]


def test_threads_of_dali_return_to_a_core_whose_interrupts_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    task, cores = thread.native_id or 0, os.sched_getaffinity(0)
    Path(f"/proc/self/task/{task}/comm").write_text("[DALI] thread")
    for busy in cores:
        monkeypatch.setattr(interrupts, "_checked_s", time.monotonic() - 2 * interrupts.INTERVAL_S)
        monkeypatch.setattr(interrupts, "_counts", {busy: 0})
        monkeypatch.setattr(interrupts, "_busy", set())
        monkeypatch.setattr(interrupts, "_count_interrupts", functools.partial(dict, {busy: 1 << 20}))
        interrupts.avoid_busy_cores()
        assert os.sched_getaffinity(task) == (cores - {busy} or cores)
    assert os.sched_getaffinity(0) == cores
    done.set()
