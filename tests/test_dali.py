"""Every name of DALI's and torch's that is not public and that we touch, held to what is installed."""

from __future__ import annotations

import inspect

import pytest
import torch.utils.data
from nvidia.dali import Pipeline, backend, fn, pipeline_def
from nvidia.dali.plugin.pytorch.experimental import proxy
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray, to_torch_type
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from proxyloader.proxy import ProxySample


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
    for name in ("exec_dynamic", "max_batch_size", "device_id", "num_outputs", "prefetch_queue_depth"):
        assert isinstance(inspect.getattr_static(Pipeline, name), property), name
    assert "cuda_stream" in inspect.signature(Pipeline.outputs).parameters


def test_the_backend_takes_views_of_memory() -> None:
    for name in ("TensorCPU", "TensorListCPU"):
        assert hasattr(backend, name)
    assert torch.uint8 in to_torch_type.values() and "cuda_stream" in inspect.signature(feed_ndarray).parameters


def test_torch_has_the_private_names_we_use() -> None:
    assert default_collate_fn_map[ProxySample] is not None
    assert callable(pin_memory) and {"where"} <= set(inspect.signature(ExceptionWrapper.__init__).parameters)
    assert hasattr(ExceptionWrapper, "reraise")


@pytest.mark.parametrize("name", ["dataset", "id", "num_workers", "seed"])
def test_worker_info_lets_its_dataset_be_exchanged(name: str) -> None:
    info = torch.utils.data._utils.worker.WorkerInfo(
        id=0, num_workers=1, seed=2, dataset="a", rng=None, worker_method=""
    )
    object.__setattr__(info, name, "b")
    assert getattr(info, name) == "b"
