"""The private parts of DALI that this package uses exist in the installed version."""

from __future__ import annotations

import inspect

import numpy as np
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.plugin.pytorch.experimental import proxy

from proxyloader.dali import api, executor


def test_dali_has_the_methods_that_are_overridden() -> None:
    for name in ("proxy", "produce_data", "start_thread", "stop_thread", "_is_thread_running", "__enter__", "__exit__"):
        assert hasattr(proxy.DALIServer, name), name
    parameters = list(inspect.signature(proxy.DALIServer.__init__).parameters.values())
    assert [parameter.name for parameter in parameters] == ["self", "pipeline", "deterministic"]
    assert parameters[2].default is False
    assert hasattr(proxy.DataLoader, "ensure_server_listening")
    assert isinstance(Pipeline._pipes, set) and callable(Pipeline._shutdown) and callable(api._shutdown_pipelines)


def test_a_pipeline_declares_its_kinds_of_input_and_can_be_rebuilt() -> None:
    @pipeline_def(batch_size=2, num_threads=1, device_id=None, exec_dynamic=True)
    def graph() -> object:
        return fn.external_source(name="b", dtype=types.FLOAT, ndim=1), fn.external_source(name="a")

    pipeline = graph()
    pipeline.build()
    sources = executor.check_sources(pipeline)
    declared = {source.name: executor.get_declared_kind(pipeline, source) for source in sources}
    assert declared == {"b": ("<f4", 1), "a": (None, None)}
    for name in ("_pipe", "_backend_prepared", "_built", "_first_iter", "_last_iter", "_batches_to_consume"):
        assert name in vars(pipeline), name  # what discard_executor sets
    for dtype in (np.float32, np.int16):  # DALI would hold on to the first
        for name in "ab":
            pipeline.feed_input(name, [np.zeros(2, np.float32 if name == "b" else dtype)] * 2)
        pipeline._run_once()
        assert pipeline.outputs()[1].dtype == (types.FLOAT if dtype is np.float32 else types.INT16)
        executor.discard_executor(pipeline)


def test_a_rebuilt_pipeline_draws_from_its_seed() -> None:
    @pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=1)
    def graph() -> object:
        return fn.random.uniform(range=[0, 1])

    pipeline, found = graph(), []
    for _ in range(2):
        executor.discard_executor(pipeline)
        found.append(np.array(pipeline.run()[0].as_tensor()))
    assert np.array_equal(*found)


def test_the_input_of_a_decoder_is_bytes_whatever_the_source_declares() -> None:
    @pipeline_def(batch_size=2, num_threads=1, device_id=None, exec_dynamic=True)
    def graph() -> object:
        images, others = (fn.external_source(name=name) for name in ("images", "others"))
        return fn.decoders.image(images), fn.cast(others, dtype=types.FLOAT)

    pipeline = graph()
    pipeline.build()
    sources = executor.check_sources(pipeline)
    declared = {source.name: executor.get_declared_kind(pipeline, source) for source in sources}
    assert declared == {"images": ("|u1", 1), "others": (None, None)}
