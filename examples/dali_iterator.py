"""Let DALI read the files: NVIDIA's iterators over a predefined or custom pipeline, without workers and a dataset.

Training batches come from DALIClassificationIterator over proxyloader.pipelines.training, or over the graph below with
--pipeline custom. Validation batches come from DALIGenericIterator over proxyloader.pipelines.validation.

Usage:

    python examples/dali_iterator.py                         # creates photos in data/example_photos
    python examples/dali_iterator.py my_images               # a folder with one subfolder of images per class
    torchrun --nproc_per_node=2 examples/dali_iterator.py    # each process reads its shard

To read LMDB or TFRecord, change two lines of `read` as its comments show.

With --last-batch fill and drop, all processes have the same number of batches, as DDP requires. With partial, each
image is returned once per epoch. An iterator is reset only at the end of an epoch: after a `break`, the next loop
continues the same epoch.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, DALIGenericIterator
from torchvision.datasets import ImageFolder

from proxyloader import World, pipelines
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--pipeline", choices=["predefined", "custom"], default="predefined", help="training pipeline")
    policies = [policy.name.lower() for policy in LastBatchPolicy]
    option("--last-batch", choices=policies, default="fill", help="last-batch policy of training")
    option("--epochs", type=int, default=2, help="number of training epochs")
    option("--size", type=int, default=96, help="height and width of the crops, in pixels")
    option("--batch-size", type=int, default=16, help="images per batch and process")
    option("--threads", type=int, default=4, help="DALI's CPU threads per process")
    option("--seed", type=int, default=0, help="seed of the order, crops and flips")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "size": 1, "batch_size": 1, "threads": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def read(root: Path, world: World, shuffle: bool) -> tuple[Any, Any]:
    """Add a reader to the graph. The iterators find it by its name; pad_last_batch separates epochs."""
    shard = {"name": "Reader", "pad_last_batch": True, "num_shards": world.num_shards, "shard_id": world.shard_id}
    # LMDB in Caffe's format (fn.readers.caffe2 reads Caffe2's):
    #   encoded, labels = fn.readers.caffe(path=str(root), random_shuffle=shuffle, **shard)
    # TFRecord with an index created by DALI's tfrecord2idx, where tfr is nvidia.dali.tfrecord:
    #   features = {"image/encoded": tfr.FixedLenFeature([], tfr.string, ""), "image/class/label": ...}
    #   encoded, labels = fn.readers.tfrecord(path=..., index_path=..., features=features, **shard).values()
    encoded, labels = fn.readers.file(file_root=str(root), random_shuffle=shuffle, **shard)
    return encoded, labels


@pipeline_def(exec_dynamic=True)
def custom(source: Callable[[], tuple[Any, Any]], size: int) -> tuple[Any, Any]:
    """Decode, crop, resize, flip and normalize."""
    encoded, labels = source()
    on_gpu = Pipeline.current().device_id is not None
    images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
    images = fn.random_resized_crop(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=list(pipelines.MEAN),
        std=list(pipelines.STD),
        mirror=fn.random.coin_flip(),
    )
    return images, labels.gpu() if on_gpu else labels


def iterate(iterator: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images and labels (N,) like torch's loader."""
    for (batch,) in iterator:
        if len(batch["label"]):  # with PARTIAL, a smaller shard may end with an empty batch
            yield batch["data"], batch["label"].squeeze(1).long()


def train(iterator: Any, epochs: int, rank: int) -> None:
    for epoch in range(1, epochs + 1):
        start, count, batches = time.perf_counter(), 0, 0
        for images, _labels in iterate(iterator):
            count, batches = count + len(images), batches + 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        speed = count / (time.perf_counter() - start)
        print(f"rank {rank}, epoch {epoch}: {batches} batches, {count} images, {speed:,.0f} images/s")


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    try:
        folder = ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
    world = World.current()
    if len(folder) < world.num_shards:
        sys.exit(f"{root} has {len(folder)} images, fewer than the {world.num_shards} shards")
    common = {
        "batch_size": args.batch_size,
        "num_threads": args.threads,
        "device_id": world.shard_id % torch.cuda.device_count() if torch.cuda.is_available() else None,
        "seed": args.seed + world.shard_id,
        "size": args.size,
    }
    pipeline = pipelines.training if args.pipeline == "predefined" else custom
    training = DALIClassificationIterator(
        pipeline(source=functools.partial(read, root, world, True), **common),
        reader_name="Reader",
        last_batch_policy=LastBatchPolicy[args.last_batch.upper()],
        auto_reset=True,
    )
    train(training, args.epochs, world.shard_id)
    validation = DALIGenericIterator(
        pipelines.validation(source=functools.partial(read, root, world, False), resize=args.size * 8 // 7, **common),
        ["data", "label"],
        reader_name="Reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    labels = [label for _, batch in iterate(validation) for label in batch.tolist()]
    first, end = (rank * len(folder) // world.num_shards for rank in (world.shard_id, world.shard_id + 1))
    if labels != folder.targets[first:end]:
        sys.exit(f"rank {world.shard_id}: the validation labels differ from those of images {first} to {end - 1}")
    print(f"rank {world.shard_id}, validation: images {first} to {end - 1}, once each")


if __name__ == "__main__":
    main()
