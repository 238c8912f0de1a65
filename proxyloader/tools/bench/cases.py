"""Benchmark cases: functions that take settings and yield loops over batches. Run in a child process.

All cases crop at random, resize to 224, flip and normalize. DALI pipelines use default arguments, except tuned ones and
the number of prefetched batches.
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
from .config import CROP_PX, MEAN, STD, BenchConfig, make_transform

Batch = tuple[torch.Tensor, torch.Tensor]
Loops = Iterator[Iterator[Batch]]
"""Endless iterator of loops over batches: images (N, 3, H, W) and labels (N,)."""

PREFETCH_BATCHES = 3  # of a DALI pipeline with tuned settings

EXAMPLE: dict[str, Any] = dict(random_area=[0.1, 1.0], random_aspect_ratio=[0.8, 1.25], num_attempts=100)
EXAMPLE_MEMORY: dict[str, Any] = dict(preallocate_width_hint=5980, preallocate_height_hint=6430)
EXAMPLE_MEMORY |= dict(device_memory_padding=211025920, host_memory_padding=140544512)
"""Arguments of the decoder in NVIDIA's ImageNet example: for the crop, and for the memory of a GPU."""


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
"""Functions that create a dataset from the root of an ImageFolder and a transform."""


def torch_loader(config: BenchConfig) -> Loops:
    pin_memory = config.on_gpu and not config.use_defaults
    return loop_forever(config, StockLoader(samples(config), pin_memory=pin_memory, **loader_arguments(config)))


def upstream_proxy(config: BenchConfig) -> Loops:
    pipeline = dali_pipeline(config, lambda: [fn.io.file.read(fn.external_source(name="images", no_copy=True))])
    server = proxy.DALIServer(pipeline)
    server.start_thread()
    dataset = repeat_dataset(config, ImageFolder(config.root, server.proxy, loader=_path_to_array))
    return loop_forever(config, proxy.DataLoader(server, dataset, **loader_arguments(config)))


def _path_to_array(path: str) -> Any:
    return np.frombuffer(path.encode(), np.uint8)


def proxyloader(config: BenchConfig) -> Loops:
    threads, load = ("auto" if value is None else value for value in config.tuning[1:])
    options: dict[str, Any] = {"device": config.device, "num_threads": threads, "hw_decoder_load": load}
    options |= loader_arguments(config) | config.format
    return loop_forever(config, DataLoader(samples(config), **options))


def synthetic(config: BenchConfig) -> Loops:
    images = torch.randn(config.batch_size, 3, CROP_PX, CROP_PX)
    batch = to_device(config, (images, torch.randint(1000, (config.batch_size,))))
    return loop_forever(config, [batch] * math.ceil(config.images * config.passes / config.batch_size))


def samples(config: BenchConfig) -> Any:
    """Return one of ``DATASETS``, or an ImageFolder with an optional augmentation."""
    make, augmentation = (DATASETS[config.added], "") if config.added in DATASETS else (ImageFolder, config.added)
    return repeat_dataset(config, make(config.root, make_transform(augmentation)))


def repeat_dataset(config: BenchConfig, dataset: Any) -> Any:
    # Unlike ConcatDataset, Subset forwards __getitems__, which Hugging Face datasets implement.
    return dataset if config.passes == 1 else Subset(dataset, config.passes * [*range(len(dataset))])


def loader_arguments(config: BenchConfig) -> dict[str, Any]:
    """Return the arguments common to all loaders with workers."""
    workers = config.tuning.workers or 0
    persistent = {"persistent_workers": True} if config.persistent_workers and workers > 0 else {}
    return {"batch_size": config.batch_size, "shuffle": True, "num_workers": workers, **persistent}


def to_device(config: BenchConfig, batch: Any) -> Batch:
    """Move the images and labels of a batch to the device, and convert them to the configured format."""
    images, labels = batch.values() if isinstance(batch, dict) else batch
    if images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    images = images.to(config.device, non_blocking=True, **config.format)
    return images, labels.to(config.device, non_blocking=True).flatten().long()


def loop_forever(config: BenchConfig, loader: Any) -> Loops:
    while True:
        yield (to_device(config, batch) for batch in loader)


def iterator(config: BenchConfig) -> Loops:
    files: dict[str, Any] = {"file_root": config.root, "random_shuffle": True, "pad_last_batch": True}
    pipeline = dali_pipeline(config, lambda: fn.readers.file(name="Reader", **files))
    policy = LastBatchPolicy.PARTIAL
    batches = DALIClassificationIterator(pipeline, reader_name="Reader", auto_reset=True, last_batch_policy=policy)
    while True:
        passes = itertools.chain.from_iterable(itertools.repeat(batches, config.passes))
        yield (to_device(config, batch) for (batch,) in passes)


def dali_pipeline(config: BenchConfig, source: Callable[[], Any]) -> Any:
    """Return a typical pipeline that is equivalent to the transform, or that of NVIDIA's example."""
    decoder: dict[str, Any] = {"device": "mixed" if config.on_gpu else "cpu", "output_type": types.RGB}
    if config.on_gpu and config.tuning.hw_decoder_load is not None:
        decoder["hw_decoder_load"] = config.tuning.hw_decoder_load
    prefetch = {} if config.use_defaults else {"exec_dynamic": True, "prefetch_queue_depth": PREFETCH_BATCHES}
    resources = {"num_threads": config.tuning.threads or usable_cores(), "device_id": 0 if config.on_gpu else None}

    @pipeline_def(batch_size=config.batch_size, **resources, **prefetch)  # type: ignore[untyped-decorator,unused-ignore]
    def graph() -> Any:
        encoded, *labels = source()
        if config.case == NVIDIA:
            decoder.update(EXAMPLE | (EXAMPLE_MEMORY if config.on_gpu else {}))
            images = fn.decoders.image_random_crop(encoded, **decoder)
            images = fn.resize(images, resize_x=CROP_PX, resize_y=CROP_PX, interp_type=types.INTERP_TRIANGULAR)
        else:
            images = fn.decoders.image(encoded, **decoder)
            images = fn.random_resized_crop(images, size=CROP_PX, interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16 if config.dtype == "float16" else types.FLOAT,
            output_layout="HWC" if config.channels_last else "CHW",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(),
        )
        return images, *(label.gpu() if config.on_gpu else label for label in labels)

    return graph()


class Case(NamedTuple):
    """A way to load the images, and the fields of ``Tuning`` that it supports. If it prefetches, it prepares batches of
    the next loop before that starts."""

    loops: Callable[[BenchConfig], Loops]
    description: str
    tuned: tuple[str, ...] = ()
    prefetches: bool = False


OURS, NVIDIA = "proxyloader", "nvidia-example"
DALI = ("threads", "hw_decoder_load")
CROPS_ONLY = "DALI's file reader and iterator, with the graph of NVIDIA's ImageNet example, which decodes only crops"

CASES = {
    "torch": Case(torch_loader, "torch's DataLoader, with torchvision transforms in the workers", ("workers",)),
    "upstream-proxy": Case(upstream_proxy, "DALI's own proxy; DALI reads the files", ("workers", *DALI)),
    NVIDIA: Case(iterator, CROPS_ONLY, DALI, prefetches=True),
    "iterator": Case(
        iterator, "DALI's file reader and iterator, as in examples/dali_iterator.py", DALI, prefetches=True
    ),
    OURS: Case(proxyloader, "proxyloader.DataLoader", ("workers", *DALI), prefetches=True),
    "synthetic": Case(synthetic, "the same random batch in every step, to measure the model alone"),
}
"""Cases by name, in the order of the report."""
