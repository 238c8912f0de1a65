"""Benchmark cases: functions that take settings and yield loops over batches. Run in a child process.

All cases crop at random, resize to 224, flip and normalize. DALI pipelines use default arguments, except for tuned ones
and the number of prefetched batches.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy
from nvidia.dali.plugin.pytorch.experimental import proxy
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset, Subset
from torchvision.datasets import ImageFolder

from ..._cores import usable_cores
from ...loader.dataloader import DataLoader
from .config import CROP_PX, MEAN, STD, BenchConfig, transform_with

Batch = tuple[torch.Tensor, torch.Tensor]
Loops = Iterator[Iterator[Batch]]
"""Endless iterator of loops over batches: images (N, 3, H, W) and labels (N,)."""

PREFETCH_BATCHES = 3  # of a DALI pipeline, unless its default is used

EXAMPLE_CROP: dict[str, Any] = {"random_area": [0.1, 1.0], "random_aspect_ratio": [0.8, 1.25], "num_attempts": 100}
EXAMPLE_MEMORY: dict[str, Any] = dict(preallocate_width_hint=5980, preallocate_height_hint=6430)
EXAMPLE_MEMORY |= dict(device_memory_padding=211025920, host_memory_padding=140544512)
"""Crops and GPU memory of the decoder in NVIDIA's ImageNet example."""


class OwnDataset(Dataset[Any]):
    """A typical custom dataset, which opens files with Pillow and calls its transform."""

    def __init__(self, root: str, transform: Any) -> None:
        self.samples, self.augment = ImageFolder(root).samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.augment(Image.open(path).convert("RGB")), label


def hugging_face(root: str, transform: Any) -> Any:
    """Return a Hugging Face dataset with ``set_transform``. A batch is a dict of images and labels."""
    datasets = importlib.import_module("datasets")
    paths, labels = zip(*ImageFolder(root).samples)
    dataset = datasets.Dataset.from_dict({"image": list(paths), "label": list(labels)})
    dataset = dataset.cast_column("image", datasets.Image())
    dataset.set_transform(functools.partial(_transform_rows, transform))
    return dataset


def _transform_rows(transform: Any, rows: dict[str, Any]) -> dict[str, Any]:
    return {"image": [transform(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}


DATASETS: dict[str, Callable[[str, Any], Any]] = {"OwnDataset": OwnDataset, "HuggingFace": hugging_face}
"""Functions that make a dataset from the root of an ImageFolder and a transform."""


def torch_loader(setting: BenchConfig, added: str = "") -> Loops:
    """torch's DataLoader, with torchvision transforms in the workers."""
    pin_memory = setting.on_gpu and not setting.by_default
    return endless(setting, StockLoader(samples(setting, added), pin_memory=pin_memory, **loader_arguments(setting)))


def path_to_array(path: str) -> Any:
    return np.frombuffer(path.encode(), np.uint8)


def upstream_proxy(setting: BenchConfig) -> Loops:
    """DALI's own proxy. Workers send paths, and DALI reads the files."""
    pipeline = dali_pipeline(setting, lambda: [fn.io.file.read(fn.external_source(name="images", no_copy=True))])
    server = proxy.DALIServer(pipeline)
    server.start_thread()
    dataset = repeated(setting, ImageFolder(setting.root, server.proxy, loader=path_to_array))
    return endless(setting, proxy.DataLoader(server, dataset, **loader_arguments(setting)))


def proxyloader(setting: BenchConfig, added: str = "") -> Loops:
    """proxyloader.DataLoader."""
    threads, load = ("auto" if each is None else each for each in setting.tuning[1:])
    own: dict[str, Any] = {"device": setting.device, "num_threads": threads, "hw_decoder_load": load, **setting.format}
    return endless(setting, DataLoader(samples(setting, added), **own, **loader_arguments(setting)))


def synthetic(setting: BenchConfig) -> Loops:
    """The same random batch in each step, to measure the model alone."""
    images = torch.randn(setting.batch_size, 3, CROP_PX, CROP_PX)
    batch = to_device(setting, (images, torch.randint(1000, (setting.batch_size,))))
    return endless(setting, [batch] * math.ceil(setting.images * setting.passes / setting.batch_size))


def samples(setting: BenchConfig, added: str) -> Any:
    """Return an ImageFolder with an optional augmentation, or one of ``DATASETS``."""
    if added in DATASETS:
        return repeated(setting, DATASETS[added](setting.root, transform_with()))
    return repeated(setting, ImageFolder(setting.root, transform_with(added)))


def repeated(setting: BenchConfig, once: Any) -> Any:
    # Unlike ConcatDataset, Subset forwards __getitems__, which Hugging Face datasets implement.
    return once if setting.passes == 1 else Subset(once, setting.passes * [*range(len(once))])


def loader_arguments(setting: BenchConfig) -> dict[str, Any]:
    """Return the arguments common to all loaders with workers."""
    workers = setting.tuning.workers or 0
    persistent = {"persistent_workers": True} if setting.persistent_workers and workers > 0 else {}
    return {"batch_size": setting.batch_size, "shuffle": True, "num_workers": workers, **persistent}


def to_device(setting: BenchConfig, batch: Any) -> Batch:
    """Move the images and labels of a batch to the device, and convert them to the format of the setting."""
    images, labels = batch.values() if isinstance(batch, dict) else batch
    if images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    images = images.to(setting.device, non_blocking=True, **setting.format)
    return images, labels.to(setting.device, non_blocking=True).flatten().long()


def endless(setting: BenchConfig, loader: Any) -> Loops:
    while True:
        yield (to_device(setting, batch) for batch in loader)


def nvidia_example(setting: BenchConfig) -> Loops:
    """DALI's file reader and iterator, with the graph of NVIDIA's ImageNet example, which decodes only crops."""
    return iterator(setting, is_example=True)


def iterator(setting: BenchConfig, is_example: bool = False) -> Loops:
    """DALI's file reader and DALIClassificationIterator, as in examples/dali_iterator.py."""
    files: dict[str, Any] = {"file_root": setting.root, "random_shuffle": True, "pad_last_batch": True}
    pipeline = dali_pipeline(setting, lambda: fn.readers.file(name="Reader", **files), is_example)
    policy = LastBatchPolicy.PARTIAL
    batches = DALIClassificationIterator(pipeline, reader_name="Reader", auto_reset=True, last_batch_policy=policy)
    while True:
        passes = itertools.chain.from_iterable(itertools.repeat(batches, setting.passes))
        yield (to_device(setting, batch) for (batch,) in passes)


def dali_pipeline(setting: BenchConfig, source: Callable[[], Any], is_example: bool = False) -> Any:
    """Return a typical pipeline that is equivalent to the transform."""
    load = setting.tuning.hw_decoder_load if setting.on_gpu else None
    decoder: dict[str, Any] = {"device": "mixed" if setting.on_gpu else "cpu", "output_type": types.RGB}
    decoder |= {} if load is None else {"hw_decoder_load": load}
    ahead = {} if setting.by_default else {"exec_dynamic": True, "prefetch_queue_depth": PREFETCH_BATCHES}
    where = {"num_threads": setting.tuning.threads or usable_cores(), "device_id": 0 if setting.on_gpu else None}

    @pipeline_def(batch_size=setting.batch_size, **where, **ahead)  # type: ignore[untyped-decorator,unused-ignore]
    def graph() -> Any:
        encoded, *labels = source()
        if is_example:
            decoder.update(EXAMPLE_CROP | (EXAMPLE_MEMORY if setting.on_gpu else {}))
            images = fn.decoders.image_random_crop(encoded, **decoder)
            images = fn.resize(images, resize_x=CROP_PX, resize_y=CROP_PX, interp_type=types.INTERP_TRIANGULAR)
        else:
            images = fn.decoders.image(encoded, **decoder)
            images = fn.random_resized_crop(images, size=CROP_PX, interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16 if setting.dtype == "float16" else types.FLOAT,
            output_layout="HWC" if setting.channels_last else "CHW",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(),
        )
        return images, *(label.gpu() if setting.on_gpu else label for label in labels)

    return graph()


class Case(NamedTuple):
    """A way to load the images, and the fields of ``Tuning`` that it supports. If it runs ahead, it prepares batches of
    the next loop before that starts."""

    loops: Callable[..., Loops]
    tuned: tuple[str, ...] = ()
    runs_ahead: bool = False


OURS = "proxyloader"
DALI_SETTINGS = ("threads", "hw_decoder_load")

CASES = {
    "torch": Case(torch_loader, ("workers",)),
    "upstream-proxy": Case(upstream_proxy, ("workers", *DALI_SETTINGS)),
    "nvidia-example": Case(nvidia_example, DALI_SETTINGS, runs_ahead=True),
    "iterator": Case(iterator, DALI_SETTINGS, runs_ahead=True),
    OURS: Case(proxyloader, ("workers", *DALI_SETTINGS), runs_ahead=True),
    "synthetic": Case(synthetic),
}
"""Cases by name, in the order of the report."""

WITH = " + "  # between the name of a case and an added augmentation or dataset
BY_DEFAULT = ", by default"  # suffix of a case that uses default settings where possible


def case_names(setting: BenchConfig) -> list[str]:
    names = [name for name in CASES if name != "synthetic" or setting.model != "none"]
    return names + [name + WITH + added for added in setting.added for name in ("torch", OURS)]


def default_names(names: list[str]) -> list[str]:
    """Return the names of the variants with default settings, for cases that have defaults."""
    return [name + BY_DEFAULT for name in names if "threads" in find_case(name).tuned]


def find_case(name: str) -> Case:
    return CASES[name.removesuffix(BY_DEFAULT).split(WITH)[0]]


def make_loops(name: str, setting: BenchConfig) -> Loops:
    return find_case(name).loops(setting, *name.removesuffix(BY_DEFAULT).split(WITH)[1:])
