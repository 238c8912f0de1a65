"""DALI's own ways to load the images. Runs in a child process.

Pipelines and decoders have their default arguments, except for those that are tuned and the number of prepared batches.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import signal_handling

from ..._cores import usable_cores
from .config import CROP_PX, MEAN, STD, BenchConfig
from .torch_cases import Loops, images_of, loader_arguments

RUNS_UNDER_WAY = 3
"""Number of batches that a DALI pipeline prepares ahead, where it is not DALI's default."""

LARGEST_OF_IMAGENET: dict[str, Any] = {
    "preallocate_width_hint": 5980,
    "preallocate_height_hint": 6430,
    "device_memory_padding": 211025920,
    "host_memory_padding": 140544512,
}
"""Memory that the GPU decoder of NVIDIA's example allocates ahead, for the largest images of ImageNet."""


def graph(setting: BenchConfig) -> Any:
    from ...dali.api import pipeline_def

    ahead = {} if setting.by_default else {"exec_dynamic": True, "prefetch_queue_depth": RUNS_UNDER_WAY}
    return pipeline_def(
        batch_size=setting.batch_size,
        num_threads=setting.tuning.threads or usable_cores(),
        device_id=0 if setting.on_gpu else None,
        **ahead,
    )


def decoder(setting: BenchConfig) -> dict[str, Any]:
    """Return the arguments of a decoder."""
    from ...dali.api import types

    load = setting.tuning.hw_decoder_load if setting.on_gpu else None
    engines = {} if load is None else {"hw_decoder_load": load}
    return {"device": "mixed" if setting.on_gpu else "cpu", "output_type": types.RGB, **engines}


def augmented(setting: BenchConfig, encoded: Any) -> Any:
    """Apply the transform, as it is usually written in DALI."""
    from ...dali.api import fn, types

    images = fn.decoders.image(encoded, **decoder(setting))
    images = fn.random_resized_crop(images, size=CROP_PX, interp_type=types.INTERP_LINEAR, antialias=True)
    return normalized(setting, images)


def normalized(setting: BenchConfig, images: Any) -> Any:
    """Return the images flipped, and in the format of the batches."""
    from ...dali.api import fn, types

    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if setting.dtype == "float16" else types.FLOAT,
        output_layout="HWC" if setting.channels_last else "CHW",
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(),
    )


def in_format(setting: BenchConfig, images: torch.Tensor) -> torch.Tensor:
    images = images.permute(0, 3, 1, 2) if setting.channels_last else images
    return images.to(setting.torch_dtype)


def upstream(setting: BenchConfig, loader: Callable[[str], Any], reads_files: bool) -> Loops:
    """DALI's proxy as it is shipped."""
    from nvidia.dali.plugin.pytorch.experimental import proxy

    from ...dali.api import fn

    @graph(setting)  # type: ignore[untyped-decorator,unused-ignore]
    def pipeline() -> Any:
        given = fn.external_source(name="images", no_copy=True)
        return augmented(setting, fn.io.file.read(given) if reads_files else given)

    server = proxy.DALIServer(pipeline())
    server.start_thread()
    batches: Any = None
    try:
        batches = proxy.DataLoader(server, images_of(setting, server.proxy, loader), **loader_arguments(setting))
        while True:
            yield ((in_format(setting, images), labels.to(setting.device)) for images, labels in batches)
    finally:
        # It waits for up to five seconds, which should not be measured.
        threading.Thread(target=server.stop_thread, daemon=True).start()
        if batches is not None and batches._iterator is not None:
            _kill_workers(batches._iterator)


def _kill_workers(iterator: Any) -> None:
    """Kill the workers. They wait for a server that has ended, and torch would wait five seconds for each of them."""
    if iterator._worker_pids_set:  # otherwise torch reports lost workers
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.kill()


def file_as_array(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def path_as_array(path: str) -> Any:
    return np.frombuffer(path.encode(), np.uint8)


def upstream_with_bytes(setting: BenchConfig) -> Loops:
    """DALI's proxy as it is shipped, fed with encoded bytes."""
    return upstream(setting, file_as_array, False)


def upstream_with_paths(setting: BenchConfig) -> Loops:
    """DALI's proxy as it is shipped, fed with paths, which DALI reads."""
    return upstream(setting, path_as_array, True)


def reader(setting: BenchConfig, images_of: Callable[[BenchConfig, Any], Any], **options: Any) -> Loops:
    """DALI's file reader, with ``options``, and DALIClassificationIterator."""
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    from ...dali.api import fn

    @graph(setting)  # type: ignore[untyped-decorator,unused-ignore]
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(file_root=setting.root, random_shuffle=True, name="Reader", **options)
        return images_of(setting, encoded), labels.gpu() if setting.on_gpu else labels

    batches = DALIClassificationIterator(
        pipeline(), reader_name="Reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
    )
    while True:
        passes = itertools.chain.from_iterable(itertools.repeat(batches, setting.passes))
        yield ((in_format(setting, batch["data"]), batch["label"].flatten().long()) for (batch,) in passes)


def iterator(setting: BenchConfig) -> Loops:
    """DALI's file reader and iterator; the whole image is decoded, then cropped."""
    return reader(setting, augmented)


def nvidia_example(setting: BenchConfig) -> Loops:
    """DALI's file reader and iterator with the graph of NVIDIA's ImageNet example: a crop is decoded, then resized."""
    return reader(setting, augmented_as_in_the_example, pad_last_batch=True)


def augmented_as_in_the_example(setting: BenchConfig, encoded: Any) -> Any:
    """Crop 0.1 to 1 of the image with ratios from 4:5 to 5:4, and allocate LARGEST_OF_IMAGENET, as in the example."""
    from ...dali.api import fn, types

    images = fn.decoders.image_random_crop(
        encoded,
        random_area=[0.1, 1.0],
        random_aspect_ratio=[0.8, 1.25],
        num_attempts=100,
        **decoder(setting),
        **(LARGEST_OF_IMAGENET if setting.on_gpu else {}),
    )
    images = fn.resize(images, resize_x=CROP_PX, resize_y=CROP_PX, interp_type=types.INTERP_TRIANGULAR)
    return normalized(setting, images)


def decoder_alone(setting: BenchConfig) -> Loops:
    """DALI's file reader and decoder, and nothing else."""
    return decoders(setting, 1)


def two_decoders(setting: BenchConfig) -> Loops:
    """The same, in two pipelines at once."""
    return decoders(setting, 2)


def decoders(setting: BenchConfig, pipelines: int) -> Loops:
    from ...dali.api import fn

    @graph(setting)  # type: ignore[untyped-decorator,unused-ignore]
    def pipeline(shard: int) -> Any:
        encoded, _ = fn.readers.file(
            file_root=setting.root, random_shuffle=True, shard_id=shard, num_shards=pipelines, name="Reader"
        )
        return fn.decoders.image(encoded, **decoder(setting))

    built = [pipeline(shard) for shard in range(pipelines)]
    for each in built:
        each.build()
    while True:
        # Each pipeline goes on while the loop takes a batch of another one.
        yield (each.run() for each, _ in zip(itertools.cycle(built), range(setting.batches)))
