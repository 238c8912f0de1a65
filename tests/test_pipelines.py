"""The ready DALI pipelines: what they give, that a seed repeats it, and that they work behind a ProxyServer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, ops, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, PipelineError, ProxyServer, pipelines

from .integration.roads import read_bytes
from .outcomes import raises
from .tiers import by_default, has_gpu

BATCH = 6


def how(device: str, **others: Any) -> dict[str, Any]:
    return dict(batch_size=BATCH, num_threads=2, device_id=0 if device == "cuda" else None) | others


def outputs_of(pipeline: Any, runs: int = 2) -> list[list[np.ndarray[Any, Any]]]:
    """For each run, each output as an array (N, ...)."""
    pipeline.build()
    return [[np.array(output.as_cpu().as_tensor()) for output in pipeline.run()] for _ in range(runs)]


AUGMENTATIONS = {name: name for name in ("autoaugment", "randaugment", "trivialaugment")} | {"none": None}


@pytest.mark.parametrize("augmentation", by_default(AUGMENTATIONS, "none", "randaugment", "trivialaugment"))
def test_training_gives_images_and_labels_and_the_same_again_under_a_seed(
    photos: Path, device: str, augmentation: str | None
) -> None:
    def found(seed: int) -> list[list[np.ndarray[Any, Any]]]:
        graph = dict(file_root=str(photos), size=48, augmentation=augmentation)
        return outputs_of(pipelines.training(**graph, **how(device, seed=seed)))

    first = found(1)
    for images, labels in first:
        assert images.shape == (BATCH, 3, 48, 48) and images.dtype == np.float32
        assert labels.shape == (BATCH, 1) and labels.dtype == np.int32
        assert -2.2 < images.min() < -0.5 and 0.5 < images.max() < 2.7
    if augmentation in (None, "randaugment"):
        for run, same in zip(first, found(1)):
            assert all(np.array_equal(a, b) for a, b in zip(run, same))
    if augmentation is None:
        assert not np.array_equal(first[0][0], found(2)[0][0])


def test_validation_is_what_torchvision_does_where_no_half_pixel_is_rounded(
    photos: Path, folder: ImageFolder, device: str
) -> None:
    graph = dict(file_root=str(photos), resize=72, size=64)
    ((images, labels),) = outputs_of(pipelines.validation(**graph, **how(device, batch_size=48)), runs=1)
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    steps = [transforms.Resize(72), transforms.CenterCrop(64), transforms.ToTensor(), normalize]
    folder.transform = transforms.Compose(steps)
    assert labels.ravel().tolist() == folder.targets
    common = [k for k, (path, _) in enumerate(folder.samples) if folder.loader(path).size in [(160, 120), (120, 160)]]
    expected = torch.stack([folder[k][0] for k in common])
    levels = (torch.from_numpy(images[common]) - expected).abs() * 0.225 * 255
    assert len(common) > 20 and levels.mean() < 0.5 and levels.quantile(0.999) < (1.1 if device == "cpu" else 4)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f2"), (torch.float16, "f2"), ("uint8", "u1")], ids=str)
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize("graph", [pipelines.training, pipelines.validation], ids=["training", "validation"])
def test_images_come_in_the_dtype_and_layout_that_are_asked_for(
    photos: Path, device: str, graph: Any, dtype: Any, kind: str, layout: Any
) -> None:
    arguments = dict(file_root=str(photos), size=40, dtype=dtype, layout=layout)
    ((images, _),) = outputs_of(graph(**arguments, **how(device)), runs=1)
    assert images.dtype == np.dtype(kind)
    assert images.shape[1:] == ((3, 40, 40) if layout == "CHW" else (40, 40, 3))
    assert kind != "u1" or images.max() > 100


@pytest.mark.parametrize("graph", [pipelines.training, pipelines.validation])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_same_graph_works_behind_a_proxy(folder: ImageFolder, device: str, graph: Any, workers: int) -> None:
    with ProxyServer(graph(source="proxy", size=48, **how(device, seed=0))) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=read_bytes)
        loader = DataLoader(dataset, BATCH, num_workers=workers, server=server)
        batches = list(loader)
    assert torch.cat([labels for _, labels in batches]).tolist() == folder.targets
    assert {images.device.type for images, _ in batches} == {device} and batches[0][0].shape[-2] == 48


def test_a_source_of_ones_own_and_a_graph_kept_on_the_cpu(photos: Path, device: str) -> None:
    def source() -> tuple[Any, Any, Any]:
        encoded, labels = fn.readers.file(file_root=str(photos), name="Mine")
        return encoded, labels, labels + 100

    ((images, labels, more),) = outputs_of(pipelines.validation(source, resize=40, size=40, **how(device)), runs=1)
    assert len(images) == BATCH and np.array_equal(labels + 100, more)
    pipeline = pipelines.training(file_root=str(photos), size=40, device="cpu", **how(device))
    pipeline.build()
    images, labels = pipeline.run()
    assert "CPU" in type(images).__name__ and "CPU" in type(labels).__name__


@pytest.mark.parametrize("policy", LastBatchPolicy)
def test_shards_and_policies_are_those_of_dalis_iterator(
    folder: ImageFolder, device: str, policy: LastBatchPolicy
) -> None:
    targets, found = folder.targets, {}
    for shard_id in range(5):  # of 9 or 10 samples
        shard = dict(num_shards=5, shard_id=shard_id, pad_last_batch=True)
        pipeline = pipelines.validation(file_root=folder.root, resize=32, size=32, **shard, **how(device))
        batches = DALIClassificationIterator(pipeline, reader_name="Reader", last_batch_policy=policy)
        found[shard_id] = [label for (batch,) in batches for label in batch["label"].ravel().tolist()]
    bounds = [shard_id * len(targets) // 5 for shard_id in range(6)]
    for shard_id, labels in found.items():
        own = targets[bounds[shard_id] : bounds[shard_id + 1]]
        rest = 2 * BATCH - len(own)
        assert labels == {"FILL": own + rest * own[-1:], "PARTIAL": own, "DROP": own[:BATCH]}[policy.name]


PROXY = dict(source="proxy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(source="folder"), "source must be 'files', 'proxy' or a function .*, got 'folder'"),
        (dict(), "source='files' requires file_root"),
        (PROXY | dict(dtype="float64"), "dtype must be one of float32, float16, uint8, got 'float64'"),
        (PROXY | dict(layout="NCHW"), "layout must be 'CHW' or 'HWC', got 'NCHW'"),
        (PROXY | dict(file_root="here"), "arguments file_root: .* require source='files', got source='proxy'"),
        (PROXY | dict(size="32"), "size must be an integer >= 1, got '32'"),
        (PROXY | dict(flip=3), r"flip must be in \[0, 1\], got 3"),
        (PROXY | dict(area=(2, 3)), r"area must be \(min, max\) with 0 < min <= max <= 1.0, got \(2, 3\)"),
        (PROXY | dict(aspect_ratio=(2, 1)), r"aspect_ratio must be \(min, max\) with 0 < min <= max, got \(2, 1\)"),
        (PROXY | dict(hw_decoder_load=3), r"hw_decoder_load must be in \[0, 1\], got 3"),
        (PROXY | dict(hw_decoder_load="auto"), r"hw_decoder_load must be in \[0, 1\], got 'auto'"),
        (PROXY | dict(area=0.5), r"area must be \(min, max\) .*, got 0.5"),
        (PROXY | dict(mean=(1, 2)), r"mean and std must have 1 or 3 values.*, got mean=\(1, 2\) and"),
        (PROXY | dict(mean=1), "mean and std must have 1 or 3 values.*, got mean=1 and"),
        (PROXY | dict(std=(0, 0, 0)), r"std positive, got .* and std=\(0, 0, 0\)"),
        (PROXY | dict(device="cuda"), "device must be 'cpu', 'gpu' or 'mixed', got 'cuda'"),
        (PROXY | dict(device="mixed"), "device='mixed' requires a pipeline with a device_id, got device_id=None"),
        (PROXY | dict(augmentation="augmix"), "one of autoaugment, randaugment, trivialaugment, got 'augmix'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_is_not_offered_is_refused_with_what_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        pipelines.training(**arguments, **how("cpu"))
    assert "in user code" not in str(refused.value)


def test_what_a_single_graph_does_not_take_is_refused() -> None:
    for graph in (pipelines.training, pipelines.validation):
        with pytest.raises(FileNotFoundError, match="^file_root 'nowhere' is not a folder"):
            graph(file_root="nowhere", **how("cpu"))
        with pytest.raises(ValueError, match="^unexpected keyword arguments foo: reader arguments require"):
            graph("proxy", foo=3, **how("cpu"))
    with pytest.raises(ValueError, match="resize must be at least size, got resize=100 and size=224"):
        pipelines.validation(source="proxy", resize=100, **how("cpu"))


def test_a_pipeline_that_cannot_be_built_is_refused_by_a_server() -> None:
    with pytest.raises(ValueError, match="^the pipeline requires batch_size and num_threads; pass them when"):
        ProxyServer(pipelines.training("proxy"))
    if not has_gpu():
        with raises(PipelineError, code="no-gpu"):
            ProxyServer(pipelines.training("proxy", **how("cuda")))


class Decoded(Pipeline):
    """A pipeline in the style of classes, with operators as attributes."""

    def __init__(self, device: str, name: str, **others: Any) -> None:
        super().__init__(**how(device), **others)
        self.name = name
        self.input = ops.ExternalSource()
        self.decode = ops.decoders.Image(device="mixed" if device == "cuda" else "cpu", output_type=types.RGB)
        self.resize = ops.Resize(device="gpu" if device == "cuda" else "cpu", size=[32, 32])

    def define_graph(self) -> Any:
        self.encoded = self.input(name=self.name)
        return self.resize(self.decode(self.encoded))


class DecodedWithNameAtOnce(Decoded):
    def __init__(self, device: str, name: str, **others: Any) -> None:
        super().__init__(device, name, **others)
        self.input = ops.ExternalSource(name=name)

    def define_graph(self) -> Any:
        return self.resize(self.decode(self.input()))


@pytest.mark.parametrize("style", [Decoded, DecodedWithNameAtOnce])
@pytest.mark.parametrize("exec_dynamic", [False, True])
def test_a_server_takes_a_pipeline_class(folder: ImageFolder, device: str, style: Any, exec_dynamic: bool) -> None:
    with ProxyServer(style(device, "images", exec_dynamic=exec_dynamic)) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=read_bytes)
        batches = list(DataLoader(dataset, BATCH, num_workers=1, server=server))
    assert torch.cat([labels for _, labels in batches]).tolist() == folder.targets
    decoded = [transforms.functional.pil_to_tensor(image).float().mean((1, 2)) for image, _ in folder]
    found = torch.cat([images for images, _ in batches]).cpu().float().mean((1, 2))
    assert torch.cdist(found, torch.stack(decoded)).argmin(1).tolist() == list(range(len(folder)))


@pytest.mark.parametrize("graph", [pipelines.training, pipelines.validation])
@pytest.mark.parametrize("source", ["files", "proxy"])
def test_the_graph_for_a_gpu_can_be_drawn_without_one(photos: Path, graph: Any, source: str) -> None:
    drawn = {}
    for device in ("mixed", "gpu", None, "cpu"):
        arguments: dict[str, Any] = {"source": source, "device": device}
        if source == "files":
            arguments["file_root"] = str(photos)
        if graph is pipelines.training and device == "mixed":
            arguments["augmentation"] = "trivialaugment"
        drawn[device] = [node.device for node in graph(**arguments, **how("cuda"))._graph_out]
    assert set(drawn["cpu"]) == {"cpu"} and len(drawn["cpu"]) == (2 if source == "files" else 1)
    assert drawn[None] == drawn["gpu"] == drawn["mixed"] == ["gpu"] * len(drawn["cpu"])
