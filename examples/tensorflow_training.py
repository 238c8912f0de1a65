"""Train a small network in TensorFlow on batches of proxyloader.DataLoader, without a copy of the images.

A batch is a torch tensor. TensorFlow takes it by DLPack: tf.experimental.dlpack.from_dlpack gives a tensor in the same
memory, on the CPU and on a GPU. The loader makes the images channels-last, so that they are (N, H, W, 3) as Keras wants
them.

Launch it, after pip install tensorflow-cpu, or pip install "tensorflow[and-cuda]" for a GPU:

    python examples/tensorflow_training.py                # makes photographs in data/framework_photos
    python examples/tensorflow_training.py my_pictures    # a folder with one folder of images for each class

It prints the loss of each epoch, which falls, and the accuracy on the same images, which rises.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import make_dataset

# isort: split
import tensorflow as tf  # behind torch: the other order ends the process, with torch 2.14 and TensorFlow 2.21

PHOTOS = Path("data/framework_photos")
CHANNELS = (16, 32, 64)
MOMENTUM = 0.9


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of images; the default is made")
    option("--epochs", type=int, default=10, help="times through the images")
    option("--batch-size", type=int, default=32, help="images in a step; those that fill no batch are left out")
    option("--workers", type=int, default=2, help="processes that read the files; 0 reads them between the steps")
    option("--lr", type=float, default=0.03, help="learning rate")
    option("--size", type=int, default=64, help="side of the square that the network sees, in pixels")
    option("--seed", type=int, default=0, help="decides the first weights, the order of the images and their crops")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch_size": 1, "workers": 0, "lr": 0, "size": 1, "seed": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


def load_data(args: argparse.Namespace) -> DataLoader:
    """Batches of (N, 3, size, size) float32 images, in memory (N, size, size, 3), and (N,) int64 labels."""
    root = make_dataset(PHOTOS, images=512, size=(160, 120)) if args.data == PHOTOS else args.data
    steps = [transforms.RandomResizedCrop(args.size, (0.3, 1)), transforms.RandomHorizontalFlip()]
    normalize = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    try:
        dataset = ImageFolder(str(root), transforms.Compose([*steps, *normalize]))
    except FileNotFoundError as error:
        sys.exit(f"{root} is to be a folder with a folder of images for each class, and none empty: {error}")
    if len(dataset) < args.batch_size:
        sys.exit(f"{root}: {len(dataset)} images are less than one batch. Lower --batch-size")
    return DataLoader(
        dataset,
        args.batch_size,
        shuffle=True,
        drop_last=True,  # each other size of a batch would be compiled for
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        multiprocessing_context="forkserver" if args.workers else None,  # TensorFlow's threads do not outlive a fork
        device="cuda" if tf.config.list_physical_devices("GPU") else "cpu",
        memory_format=torch.channels_last,
        seed=args.seed,
    )


def to_tensorflow(images: torch.Tensor) -> tf.Tensor:
    """The memory of (N, 3, H, W) channels-last images as a TensorFlow tensor (N, H, W, 3)."""
    # TensorFlow takes a capsule, by which it cannot say in which stream it will read, so torch cannot let that stream
    # wait for the images. Python waits instead.
    if images.is_cuda:
        torch.cuda.current_stream().synchronize()
    return tf.experimental.dlpack.from_dlpack(images.permute(0, 2, 3, 1).__dlpack__())


def network_of(classes: int) -> tf.keras.Model:
    """Convolutions of stride 2, the mean over the pixels, and one layer. It returns (N, classes)."""
    layers = tf.keras.layers
    convolutions = [layers.Conv2D(size, 3, 2, "same", activation="relu") for size in CHANNELS]
    return tf.keras.Sequential([*convolutions, layers.GlobalAveragePooling2D(), layers.Dense(classes)])


def step_of(network: tf.keras.Model, lr: float) -> Any:
    """A step of SGD, as a function of images and labels. It returns the loss and how many are recognized."""
    optimizer = tf.keras.optimizers.SGD(lr, MOMENTUM)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            loss = loss_of(labels, logits)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))
        return loss, tf.math.count_nonzero(tf.argmax(logits, 1) == labels)

    return train_step


def main() -> None:
    args = parse_args()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # not all of it: torch and DALI need their part
    tf.keras.utils.set_random_seed(args.seed)
    loader = load_data(args)
    train_step = step_of(network_of(len(loader.dataset.classes)), args.lr)
    print(f"TensorFlow {tf.__version__} on {loader.device}, {len(loader.dataset)} images", flush=True)
    for epoch in range(1, args.epochs + 1):
        losses, hits = [], 0
        for images, labels in tqdm(loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=None):
            loss, right = train_step(to_tensorflow(images), tf.constant(labels.numpy()))
            # Waits for the step. TensorFlow begins one on a GPU and returns. Until it is done, the memory of its images
            # must stay.
            losses.append(float(loss))
            hits += int(right)
        accuracy = 100 * hits / (len(loader) * args.batch_size)
        print(f"epoch {epoch}/{args.epochs}: loss {sum(losses) / len(losses):.3f}, {accuracy:.1f}%", flush=True)


if __name__ == "__main__":
    main()
