"""DALI reads the files: NVIDIA's iterators over a ready pipeline or one of your own, without workers and a dataset.

Training batches come from DALIClassificationIterator over proxyloader.pipelines.training, or over the graph below with
--pipeline own. Validation batches come from DALIGenericIterator over proxyloader.pipelines.validation.

Launch it:

    python examples/dali_iterator.py                         # makes photographs in data/example_photos
    python examples/dali_iterator.py my_pictures             # a folder with one folder of images for each class
    torchrun --nproc_per_node=2 examples/dali_iterator.py    # each process reads its shard

For LMDB or TFRecord change two lines of `read`, as its comments show.

Look at the number of batches: with --last-batch fill and drop it is the same in all processes, as DDP requires; with
partial, each picture comes once in an epoch. An iterator is reset only at the end of an epoch: after a `break`, the
next loop continues the same epoch.
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
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of pictures; the default is made")
    option("--pipeline", choices=["ready", "own"], default="ready", help="that training reads from")
    policies = [policy.name.lower() for policy in LastBatchPolicy]
    option("--last-batch", choices=policies, default="fill", help="policy of training; validation is partial")
    option("--epochs", type=int, default=2, help="times through the training pictures")
    option("--size", type=int, default=96, help="side of the square that a batch has, in pixels")
    option("--batch-size", type=int, default=16, help="pictures in a batch of each process")
    option("--threads", type=int, default=4, help="of DALI on the CPU, in each process")
    option("--seed", type=int, default=0, help="of crops, flips and the order")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "size": 1, "batch_size": 1, "threads": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


def read(root: Path, world: World, shuffle: bool) -> tuple[Any, Any]:
    """Add the reader to the graph. The iterators know it by its name; pad_last_batch keeps epochs apart."""
    shard = {"name": "Reader", "pad_last_batch": True, "num_shards": world.num_shards, "shard_id": world.shard_id}
    # LMDB of Caffe (fn.readers.caffe2 reads those of Caffe2):
    #   encoded, labels = fn.readers.caffe(path=str(root), random_shuffle=shuffle, **shard)
    # TFRecord, with the index that DALI's tfrecord2idx writes, and nvidia.dali.tfrecord as tfr:
    #   features = {"image/encoded": tfr.FixedLenFeature([], tfr.string, ""), "image/class/label": ...}
    #   encoded, labels = fn.readers.tfrecord(path=..., index_path=..., features=features, **shard).values()
    encoded, labels = fn.readers.file(file_root=str(root), random_shuffle=shuffle, **shard)
    return encoded, labels


@pipeline_def(exec_dynamic=True)
def own(source: Callable[[], tuple[Any, Any]], size: int) -> tuple[Any, Any]:
    """Decode, crop, resize, flip, normalize."""
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


def batches_of(iterator: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels (N,), as torch's loader gives them."""
    for (batch,) in iterator:
        if len(batch["label"]):  # with PARTIAL, a shard that is smaller than others may end with an empty batch
            yield batch["data"], batch["label"].squeeze(1).long()


def train(iterator: Any, epochs: int, rank: int) -> None:
    for epoch in range(1, epochs + 1):
        begin, pictures, batches = time.perf_counter(), 0, 0
        for images, _labels in batches_of(iterator):
            pictures, batches = pictures + len(images), batches + 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        speed = pictures / (time.perf_counter() - begin)
        print(f"rank {rank}, epoch {epoch}: {batches} batches, {pictures} pictures, {speed:,.0f} a second")


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    if not root.is_dir():
        sys.exit(f"{root}: no such folder. Without a folder, the script makes one in {PHOTOS}")
    try:
        folder = ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} is to hold a folder of pictures for each class, and none empty: {error}")
    world = World.current()
    if len(folder) < world.num_shards:
        sys.exit(f"{root} has {len(folder)} pictures, fewer than the {world.num_shards} shards that DALI is to read")
    common = {
        "batch_size": args.batch_size,
        "num_threads": args.threads,
        "device_id": world.shard_id % torch.cuda.device_count() if torch.cuda.is_available() else None,
        "seed": args.seed + world.shard_id,
        "size": args.size,
    }
    pipeline = pipelines.training if args.pipeline == "ready" else own
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
    labels = [label for _, batch in batches_of(validation) for label in batch.tolist()]
    first, end = (rank * len(folder) // world.num_shards for rank in (world.shard_id, world.shard_id + 1))
    if labels != folder.targets[first:end]:
        sys.exit(f"rank {world.shard_id}: validation gave other labels than the files {first} to {end - 1} have")
    print(f"rank {world.shard_id}, validation: each of the pictures {first} to {end - 1} once")


if __name__ == "__main__":
    main()
