"""Every name of DALI's and torch's that is not public and that we touch, held to what is installed."""

from __future__ import annotations

import inspect
import multiprocessing

import numpy as np
import pytest
import torch.utils.data
from nvidia.dali import Pipeline, backend, fn, pipeline_def, types
from nvidia.dali.plugin.pytorch.experimental import proxy
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray, to_torch_type
from torch._utils import ExceptionWrapper
from torch.utils.data import dataloader
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from proxyloader.dali import api, executor
from proxyloader.data.placeholders import ProxySample


def test_the_upstream_server_has_the_methods_that_ours_overrides() -> None:
    for name in ("proxy", "produce_data", "start_thread", "stop_thread", "_is_thread_running", "__enter__", "__exit__"):
        assert hasattr(proxy.DALIServer, name), name
    parameters = list(inspect.signature(proxy.DALIServer.__init__).parameters.values())
    assert [parameter.name for parameter in parameters] == ["self", "pipeline", "deterministic"]
    assert parameters[2].default is False
    assert hasattr(proxy.DataLoader, "ensure_server_listening")


def test_the_upstream_constructor_sets_what_ours_reads() -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph() -> object:
        return fn.external_source(name="b"), fn.external_source(name="a")

    server = proxy.DALIServer(graph())
    assert sorted(server._dali_input_names) == ["a", "b"] and isinstance(server._pipe, Pipeline)
    assert server._thread_stop_event is None


def test_the_pipeline_has_the_private_names_we_use() -> None:
    assert callable(Pipeline._run_once)
    for name in ("exec_async", "exec_dynamic", "max_batch_size", "device_id", "num_outputs", "prefetch_queue_depth"):
        assert isinstance(inspect.getattr_static(Pipeline, name), property), name
    assert isinstance(inspect.getattr_static(Pipeline, "stream_policy"), property)
    assert isinstance(Pipeline._pipes, set) and callable(Pipeline._shutdown) and callable(api._shutdown_pipelines)
    assert "cuda_stream" in inspect.signature(Pipeline.outputs).parameters


def test_a_queue_of_multiprocessing_has_the_lock_that_its_put_takes() -> None:
    queue = multiprocessing.get_context().Queue()
    assert queue._notempty.acquire(timeout=0)
    queue._notempty.release()
    queue.close()


def test_a_graph_says_which_inputs_nobody_can_feed() -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph() -> object:
        repeated = fn.external_source(name="repeated", repeat_last=True)
        return fn.external_source(name="fed"), repeated, fn.external_source(lambda: [np.zeros(1)], name="own")

    sources = executor.external_sources(graph())
    found = {source.name: (executor.has_source(source), executor.repeats_last(source)) for source in sources}
    assert found == {"fed": (False, False), "repeated": (False, True), "own": (True, False)}


def test_a_graph_says_which_operators_an_image_goes_through() -> None:
    with Pipeline(2, 1, None, exec_dynamic=True):
        encoded, draws = fn.external_source(name="images"), fn.external_source(name="draws")
        image = fn.decoders.image(encoded)
        number = fn.cast(draws[0], dtype=types.FLOAT)
        low, high = api.split(image, draws[1] < 0.5)
        changed = api.merge(fn.flip(low), fn.experimental.warp_perspective(high), draws[1] < 0.5) * number
        output = fn.cast(changed[:, :, 0:1], dtype=types.UINT8)
        assert api.operators_between(encoded, image) == ["decoders.image"]
        assert api.operators_between(image, output) == [
            *("split", "flip", "experimental.warp_perspective", "merge", "arithmetic", "subscript", "cast")
        ]
        assert api.operators_between(image, image) == [] == api.operators_between(image, number)


def test_the_pipeline_says_which_kinds_of_input_it_takes_and_can_be_built_anew() -> None:
    @pipeline_def(batch_size=2, num_threads=1, device_id=None, exec_dynamic=True)
    def graph() -> object:
        return fn.external_source(name="b", dtype=types.FLOAT, ndim=1), fn.external_source(name="a")

    pipeline = graph()
    pipeline.build()
    declared = {source.name: executor.declared_kind(pipeline, source) for source in executor.external_sources(pipeline)}
    assert declared == {"b": ("<f4", 1), "a": (None, None)}
    for name in (
        *("_pipe", "_backend_prepared", "_built", "_first_iter", "_last_iter", "_batches_to_consume"),
        *("_ops", "_py_graph_built", "_api_type"),
    ):
        assert name in vars(pipeline), name
    for operator in pipeline._ops:
        assert operator._autoname in (True, False) and isinstance(operator._op.device, str)
    for name in ("copy", "AddArg", "NumRegularInput", "NumOutput", "OutputName", "RenameOutput"):
        assert hasattr(backend.OpSpec, name), name
    for dtype in (np.float32, np.int16):  # DALI would hold on to the first
        for name in "ab":
            pipeline.feed_input(name, [np.zeros(2, np.float32 if name == "b" else dtype)] * 2)
        executor.run(pipeline)
        assert pipeline.outputs()[1].dtype == (types.FLOAT if dtype is np.float32 else types.INT16)
        executor.take_apart(pipeline)


def test_a_pipeline_built_anew_draws_by_its_seed() -> None:
    @pipeline_def(batch_size=8, num_threads=1, device_id=None, seed=1)
    def graph() -> object:
        return fn.random.uniform(range=[0, 1])

    assert api.is_pipeline_function(graph) and not api.is_pipeline_function(len)
    pipeline, found = graph(), []
    for _ in range(2):
        executor.take_apart(pipeline)
        found.append(np.array(pipeline.run()[0].as_tensor()))
    assert np.array_equal(*found)


@pytest.mark.parametrize("name", ["auto_augment", "rand_augment", "trivial_augment_wide"])
def test_automatic_augmentation_is_found_by_name(name: str) -> None:
    assert api.automatic_augmentation(name).__name__ == name


def test_the_backend_takes_views_of_memory() -> None:
    for name in ("TensorCPU", "TensorListCPU"):
        assert hasattr(backend, name)
    assert torch.uint8 in to_torch_type.values() and "cuda_stream" in inspect.signature(feed_ndarray).parameters


def test_torch_has_the_private_names_we_use() -> None:
    assert default_collate_fn_map[ProxySample] is not None
    assert callable(pin_memory) and {"where"} <= set(inspect.signature(ExceptionWrapper.__init__).parameters)
    assert hasattr(ExceptionWrapper, "reraise") and "exc_type" in inspect.getsource(ExceptionWrapper)


def test_torchs_iterator_has_the_private_names_we_use() -> None:
    parent = dataloader._MultiProcessingDataLoaderIter
    assert list(inspect.signature(parent._try_get_data).parameters) == ["self", "timeout"]
    assert list(inspect.signature(parent._get_data).parameters) == ["self"]
    assert list(inspect.signature(parent._shutdown_workers).parameters) == ["self"]
    assert callable(dataloader.DataLoader._get_iterator)
    assert callable(dataloader.DataLoader.check_worker_number_rationality)
    batches = iter(dataloader.DataLoader([1, 2], num_workers=1))
    assert batches._shutdown is False and batches._workers_status == [True]  # type: ignore[attr-defined]
    assert [worker.is_alive() for worker in batches._workers] == [True]  # type: ignore[attr-defined]
    assert len(batches._index_sampler) == 2 and batches._worker_pids_set is True  # type: ignore[attr-defined]
    assert callable(torch.utils.data._utils.signal_handling._remove_worker_pids)
    assert dataloader.DataLoader([1])._IterableDataset_len_called is None


@pytest.mark.parametrize("name", ["dataset", "id", "num_workers", "seed"])
def test_worker_info_lets_its_dataset_be_exchanged(name: str) -> None:
    info = torch.utils.data._utils.worker.WorkerInfo(
        id=0, num_workers=1, seed=2, dataset="a", rng=None, worker_method=""
    )
    object.__setattr__(info, name, "b")
    assert getattr(info, name) == "b"


def outputs_of(graph: object, *batches: list[np.ndarray]) -> list[list[np.ndarray]]:
    @pipeline_def(batch_size=len(batches[0]), num_threads=1, device_id=None, exec_dynamic=True)
    def pipeline() -> object:
        return graph(*(fn.external_source(batch, batch=True, cycle=True) for batch in ([each] for each in batches)))

    built = pipeline()
    built.build()
    return [[np.array(output.at(k)) for k in range(len(output))] for output in built.run()]


def test_a_batch_is_dealt_out_and_put_together_in_its_order() -> None:
    images = [np.full((k + 1, 2, 3), k, np.uint8) for k in range(5)]
    chosen = [np.array(k % 2 == 0) for k in range(5)]

    def graph(node: object, predicate: object) -> object:
        where_true, where_false = api.split(node, predicate)
        return api.merge(where_true + np.uint8(100), where_false, predicate)

    (merged,) = outputs_of(graph, images, chosen)
    for k, image in enumerate(merged):
        assert np.array_equal(image, images[k] + (100 if k % 2 == 0 else 0))


def test_a_filter_sees_what_stands_around_the_image() -> None:
    image = np.arange(12, dtype=np.float32).reshape(3, 4, 1)
    kernel = np.array([[0, 0, 0], [0, 0, 1], [0, 0, 0]], np.float32)

    def graph(node: object) -> object:
        with_layout = fn.reshape(node, layout="HWC")
        return api.filter_image(with_layout, types.Constant(kernel), types.Constant(np.float32(7)))

    (filtered,) = outputs_of(graph, [image])
    expected = np.concatenate([image[:, 1:], np.full((3, 1, 1), 7, np.float32)], axis=1)
    assert np.array_equal(filtered[0], expected)


def test_levels_are_spread_as_opencv_spreads_them() -> None:
    image = np.random.default_rng(0).integers(30, 90, (40, 50, 3), np.uint8)
    (spread,) = outputs_of(api.equalized, [image])
    for channel, found in zip(np.moveaxis(image, 2, 0), np.moveaxis(spread[0], 2, 0)):
        counts = np.bincount(channel.ravel(), minlength=256)
        first = counts[channel.min()]
        table = np.round((counts.cumsum() - first) * 255 / (channel.size - first))
        assert np.array_equal(found, table[channel])


def test_what_a_decoder_takes_is_bytes_whatever_the_source_says() -> None:
    @pipeline_def(batch_size=2, num_threads=1, device_id=None, exec_dynamic=True)
    def graph() -> object:
        images, others = (fn.external_source(name=name) for name in ("images", "others"))
        return fn.decoders.image(images), fn.cast(others, dtype=types.FLOAT)

    pipeline = graph()
    pipeline.build()
    declared = {source.name: executor.declared_kind(pipeline, source) for source in executor.external_sources(pipeline)}
    assert declared == {"images": ("|u1", 1), "others": (None, None)}
