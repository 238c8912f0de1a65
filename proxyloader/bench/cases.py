"""The ways to load the same images: each is a function from a setting to loops over batches. Runs in a child process.

All of them crop at random, resize to 224, flip and normalise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as StockLoader
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from ..loader import DataLoader
from .setting import CROP_PX, MEAN, STD, Setting, transform_with

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (N, 3, H, W) and labels (N,), on the device."""

Loops = Iterator[Iterator[Any]]
"""Loops over batches, one after the other, without end; each goes ``passes`` times over the images."""

RUNS_UNDER_WAY = 3
"""Of a DALI pipeline of one of these cases."""

CACHED_BATCHES = 8


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        loops: of a setting; and of an augmentation, by its name, where it takes one.
        is_ceiling: it leaves work out, to show what no loader can exceed.
        needs_gpu: it is left out on a CPU.
        for_models: it is there where a model is trained (True), or where none is (False); None: in either case.
        augments: it can augment images, too.
        runs_ahead: into the next loop, so that batches lie ready when a round begins.
    """

    loops: Callable[..., Loops]
    is_ceiling: bool = False
    needs_gpu: bool = False
    for_models: bool | None = None
    augments: bool = False
    runs_ahead: bool = False


CASES: dict[str, Case] = {}
"""By name, in the order of the report."""


WITH = " + "
"""Between the names of a case and of what its images are augmented by."""


def case(name: str, **attributes: Any) -> Callable[[Callable[..., Loops]], Any]:
    """Register a way to load; with attributes of Case."""

    def register(loops: Callable[..., Loops]) -> Callable[..., Loops]:
        CASES[name] = Case(loops, **attributes)
        return loops

    return register


def cases_for(setting: Setting) -> list[str]:
    """Those that have a meaning there."""
    trains = setting.model != "none"
    names = [
        name
        for name, each in CASES.items()
        if (setting.on_gpu or not each.needs_gpu) and each.for_models in (None, trains)
    ]
    augmenting = [name for name in names if CASES[name].augments]
    return names + [name + WITH + added for added in setting.augmentations for name in augmenting]


def case_of(name: str) -> Case:
    """By its name, alone or with an augmentation."""
    return CASES[name.split(WITH)[0]]


def loops_of(name: str, setting: Setting) -> Loops:
    return case_of(name).loops(setting, *name.split(WITH)[1:])


# --- torch -----------------------------------------------------------------------------------------------------------


def images_of(setting: Setting, transform: Any = None, loader: Any = default_loader) -> ConcatDataset[Any]:
    return ConcatDataset(setting.passes * [ImageFolder(setting.root, transform, loader=loader)])


@case("torch", augments=True)
def stock(setting: Setting, augmentation: str = "") -> Loops:
    """torch's DataLoader, with torchvision's transforms in its workers."""
    loader = StockLoader(
        images_of(setting, transform_with(augmentation)),
        setting.batch_size,
        shuffle=True,
        num_workers=setting.stock_workers,
        persistent_workers=setting.stock_workers > 0,
        pin_memory=setting.on_gpu,
    )
    while True:
        yield (on_device(setting, batch) for batch in loader)


def on_device(setting: Setting, batch: Any) -> Batch:
    """As a training loop does it by hand."""
    images, labels = batch
    images = images.to(setting.device, setting.torch_dtype, non_blocking=True, memory_format=setting.memory_format)
    return images, labels.to(setting.device, non_blocking=True)


@case("torch-gpu", needs_gpu=True)
def torchvision_on_a_gpu(setting: Setting) -> Loops:
    """Workers read bytes; torchvision decodes them on the GPU and transforms them there, image by image."""
    transform = v2.Compose([v2.RandomResizedCrop(CROP_PX, antialias=True), v2.RandomHorizontalFlip()])
    finish = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    loader: Any = StockLoader(
        images_of(setting, loader=file_as_tensor),
        setting.batch_size,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=setting.workers > 0,
        collate_fn=as_lists,
    )

    def decoded(batch: Any) -> Batch:
        files, labels = batch
        images = decode_jpeg(files, ImageReadMode.RGB, device=setting.device)
        return on_device(setting, (finish(torch.stack([transform(image) for image in images])), torch.tensor(labels)))

    while True:
        yield map(decoded, loader)


def file_as_tensor(path: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))


def as_lists(samples: list[Any]) -> Any:
    files, labels = zip(*samples)
    return list(files), list(labels)


# --- DALI ------------------------------------------------------------------------------------------------------------


def graph(setting: Setting) -> Any:
    from .._dali import pipeline_def

    return pipeline_def(
        batch_size=setting.batch_size,
        num_threads=setting.threads,
        device_id=0 if setting.on_gpu else None,
        exec_dynamic=True,
        prefetch_queue_depth=RUNS_UNDER_WAY,
    )


def decoded(setting: Setting, encoded: Any, hw_decoder_load: float | None = None) -> Any:
    """The decoder, set as proxyloader sets it.

    Args:
        hw_decoder_load: None: DALI's default.
    """
    from .._dali import fn, types, upright

    how: dict[str, Any] = {"output_type": types.RGB, "jpeg_fancy_upsampling": True, **upright("decoders__Image")}
    if setting.on_gpu and hw_decoder_load is not None:
        how["hw_decoder_load"] = hw_decoder_load
    return fn.decoders.image(encoded, device="mixed" if setting.on_gpu else "cpu", **how)


def augmented(setting: Setting, encoded: Any, hw_decoder_load: float | None = None) -> Any:
    """The work of the transform as one writes it in DALI."""
    from .._dali import fn, types

    images = decoded(setting, encoded, hw_decoder_load)
    images = fn.random_resized_crop(images, size=CROP_PX, interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if setting.dtype == "float16" else types.FLOAT,
        output_layout="HWC" if setting.channels_last else "CHW",
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(),
    )


def in_format(setting: Setting, images: torch.Tensor) -> torch.Tensor:
    images = images.permute(0, 3, 1, 2) if setting.channels_last else images
    return images.to(setting.torch_dtype)


def upstream(setting: Setting, loader: Callable[[str], Any], reads_files: bool, hw_decoder_load: float | None) -> Loops:
    """DALI's proxy as it is shipped."""
    from nvidia.dali.plugin.pytorch.experimental import proxy

    from .._dali import fn

    @graph(setting)  # type: ignore[untyped-decorator,unused-ignore]
    def pipeline() -> Any:
        given = fn.external_source(name="images", no_copy=True)
        return augmented(setting, fn.io.file.read(given) if reads_files else given, hw_decoder_load)

    server = proxy.DALIServer(pipeline())
    server.start_thread()
    batches = proxy.DataLoader(
        server,
        images_of(setting, server.proxy, loader),
        setting.batch_size,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=setting.workers > 0,
    )
    while True:
        yield ((in_format(setting, images), labels.to(setting.device)) for images, labels in batches)


def file_as_array(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def path_as_array(path: str) -> Any:
    return np.frombuffer(path.encode(), np.uint8)


@case("upstream-proxy")
def upstream_with_bytes(setting: Setting) -> Loops:
    """DALI's proxy as it is shipped, fed with encoded bytes."""
    return upstream(setting, file_as_array, False, None)


@case("upstream-proxy, engines", needs_gpu=True)
def upstream_with_bytes_on_engines(setting: Setting) -> Loops:
    """The same, with the decoder set as ours is."""
    return upstream(setting, file_as_array, False, setting.hw_decoder_load)


@case("upstream-proxy-paths")
def upstream_with_paths(setting: Setting) -> Loops:
    """DALI's proxy as it is shipped, fed with paths, which DALI reads."""
    return upstream(setting, path_as_array, True, setting.hw_decoder_load)


def reader(setting: Setting, hw_decoder_load: float | None) -> Loops:
    """DALI's file reader and DALIClassificationIterator."""
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    from .._dali import fn

    @graph(setting)  # type: ignore[untyped-decorator,unused-ignore]
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(file_root=setting.root, random_shuffle=True, name="Reader")
        return augmented(setting, encoded, hw_decoder_load), labels.gpu() if setting.on_gpu else labels

    batches = DALIClassificationIterator(
        pipeline(), reader_name="Reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
    )
    while True:
        passes = itertools.chain.from_iterable(itertools.repeat(batches, setting.passes))
        yield ((in_format(setting, batch["data"]), batch["label"].flatten().long()) for (batch,) in passes)


@case("iterator, DALI's defaults", needs_gpu=True, runs_ahead=True)
def iterator_by_default(setting: Setting) -> Loops:
    """DALI's file reader and iterator; the decoder leaves a third of the JPEGs to CUDA."""
    return reader(setting, None)


@case("iterator", runs_ahead=True)
def iterator(setting: Setting) -> Loops:
    """DALI's file reader and iterator, with the decoder set as ours is."""
    return reader(setting, setting.hw_decoder_load)


# --- ours ------------------------------------------------------------------------------------------------------------


@case("proxyloader", augments=True)
def swap(setting: Setting, augmentation: str = "") -> Loops:
    """proxyloader.DataLoader: bytes read by workers, crops drawn by torchvision."""
    loader: DataLoader[Any] = DataLoader(
        images_of(setting, transform_with(augmentation)),
        setting.batch_size,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=setting.workers > 0,
        device=setting.device,
        dtype=setting.torch_dtype,
        memory_format=setting.memory_format,
        num_threads=setting.threads,
        hw_decoder_load=setting.hw_decoder_load,
    )
    while True:
        yield ((images, labels.to(setting.device, non_blocking=True)) for images, labels in loader)


@case("FileReaderLoader", runs_ahead=True)
def reader_loader(setting: Setting) -> Loops:
    """proxyloader.FileReaderLoader with pipelines.training: DALI reads and draws."""
    from .. import FileReaderLoader, pipelines

    loader = FileReaderLoader(
        setting.root,
        pipelines.training,
        setting.batch_size,
        shuffle=True,
        device=setting.device,
        num_threads=setting.threads,
        prefetch=RUNS_UNDER_WAY,
        size=CROP_PX,
        dtype="float16" if setting.dtype == "float16" else "float32",
        layout="HWC" if setting.channels_last else "CHW",
        hw_decoder_load=setting.hw_decoder_load,
    )
    while True:
        passes = itertools.chain.from_iterable(itertools.repeat(loader, setting.passes))
        yield ((in_format(setting, images), labels) for images, labels in passes)


# --- ceilings --------------------------------------------------------------------------------------------------------


@case("decode-only", is_ceiling=True, for_models=False, runs_ahead=True)
def decoder_alone(setting: Setting) -> Loops:
    """DALI's file reader and decoder, and nothing else."""
    return decoders(setting, 1)


@case("decode-only, two pipelines", is_ceiling=True, for_models=False, runs_ahead=True)
def two_decoders(setting: Setting) -> Loops:
    """The same, in two pipelines at once."""
    return decoders(setting, 2)


def decoders(setting: Setting, pipelines: int) -> Loops:
    from .._dali import fn

    @graph(setting)  # type: ignore[untyped-decorator,unused-ignore]
    def pipeline(shard: int) -> Any:
        encoded, _ = fn.readers.file(
            file_root=setting.root, random_shuffle=True, shard_id=shard, num_shards=pipelines, name="Reader"
        )
        return decoded(setting, encoded, setting.hw_decoder_load)

    built = [pipeline(shard) for shard in range(pipelines)]
    for each in built:
        each.build()
    while True:
        # Each goes on by itself while another one is asked.
        yield (each.run() for each, _ in zip(itertools.cycle(built), range(setting.batches)))


@case("synthetic", is_ceiling=True, for_models=True)
def synthetic(setting: Setting) -> Loops:
    """One batch of random numbers, again and again."""
    images = torch.randn(setting.batch_size, 3, CROP_PX, CROP_PX)
    batch = on_device(setting, (images, torch.randint(1000, (setting.batch_size,))))
    while True:
        yield itertools.repeat(batch, setting.batches)


@case("replay", is_ceiling=True, for_models=True)
def replay(setting: Setting) -> Loops:
    """Batches that were loaded once, again and again: what training would gain from a loader that costs nothing."""
    cached = list(itertools.islice(next(swap(setting)), CACHED_BATCHES))
    while True:
        yield itertools.islice(itertools.cycle(cached), setting.batches)
