"""Train a small network in TensorFlow on batches of proxyloader.DataLoader, without copying the images.

TensorFlow imports a batch through DLPack: tf.experimental.dlpack.from_dlpack returns a tensor that shares the memory of
the torch tensor, on the CPU and on a GPU. The loader returns channels-last images, so their memory has the layout
(N, H, W, 3) of Keras.

Usage, after pip install tensorflow-cpu, or "tensorflow[and-cuda]" for a GPU:

    python examples/tensorflow_training.py              # creates photos in data/framework_photos
    python examples/tensorflow_training.py my_images    # a folder with one subfolder of images per class

The script prints the loss of each epoch, which decreases, and the accuracy on the same images, which increases.
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
import tensorflow as tf  # after torch: the reverse order crashes with torch 2.14 and TensorFlow 2.21

PHOTOS = Path("data/framework_photos")
CHANNELS = (16, 32, 64)
MOMENTUM = 0.9


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--epochs", type=int, default=10, help="number of epochs")
    option("--batch-size", type=int, default=32, help="images per step; an incomplete last batch is dropped")
    option("--workers", type=int, default=2, help="worker processes; 0: load in the main process")
    option("--lr", type=float, default=0.03, help="learning rate")
    option("--size", type=int, default=64, help="height and width of the network's input, in pixels")
    option("--seed", type=int, default=0, help="seed of the initial weights, the order and the crops")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch_size": 1, "workers": 0, "lr": 0, "size": 1, "seed": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def load_data(args: argparse.Namespace) -> DataLoader:
    """Return a loader of channels-last images, (N, 3, size, size) float32, and labels, (N,) int64."""
    root = make_dataset(PHOTOS, images=512, size=(160, 120)) if args.data == PHOTOS else args.data
    steps = [transforms.RandomResizedCrop(args.size, (0.3, 1)), transforms.RandomHorizontalFlip()]
    normalize = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    try:
        dataset = ImageFolder(str(root), transforms.Compose([*steps, *normalize]))
    except FileNotFoundError as error:
        sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
    if len(dataset) < args.batch_size:
        sys.exit(f"{root}: {len(dataset)} images are fewer than one batch. Lower --batch-size")
    return DataLoader(
        dataset,
        args.batch_size,
        shuffle=True,
        drop_last=True,  # a different batch size would be compiled separately
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        multiprocessing_context="forkserver" if args.workers else None,  # TensorFlow's threads do not survive a fork
        device="cuda" if tf.config.list_physical_devices("GPU") else "cpu",
        memory_format=torch.channels_last,
        seed=args.seed,
    )


def to_tensorflow(images: torch.Tensor) -> tf.Tensor:
    """Return channels-last images (N, 3, H, W) as a TensorFlow tensor (N, H, W, 3)."""
    # TensorFlow does not pass its stream to torch, so torch cannot make that stream wait for the images.
    if images.is_cuda:
        torch.cuda.current_stream().synchronize()
    return tf.experimental.dlpack.from_dlpack(images.permute(0, 2, 3, 1).__dlpack__())


def build_network(classes: int) -> tf.keras.Model:
    """Return a network of convolutions with stride 2, global average pooling and a linear layer."""
    layers = tf.keras.layers
    convolutions = [layers.Conv2D(size, 3, 2, "same", activation="relu") for size in CHANNELS]
    return tf.keras.Sequential([*convolutions, layers.GlobalAveragePooling2D(), layers.Dense(classes)])


def build_train_step(network: tf.keras.Model, lr: float) -> Any:
    """Return a function that takes a step of SGD, and returns the loss and the number of correct predictions."""
    optimizer = tf.keras.optimizers.SGD(lr, MOMENTUM)
    compute_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            loss = compute_loss(labels, logits)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))
        return loss, tf.math.count_nonzero(tf.argmax(logits, 1) == labels)

    return train_step


def main() -> None:
    args = parse_args()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # leave memory for torch and DALI
    tf.keras.utils.set_random_seed(args.seed)
    loader = load_data(args)
    train_step = build_train_step(build_network(len(loader.dataset.classes)), args.lr)
    print(f"TensorFlow {tf.__version__} on {loader.device}, {len(loader.dataset)} images", flush=True)
    for epoch in range(1, args.epochs + 1):
        losses, hits = [], 0
        for images, labels in tqdm(loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=None):
            loss, correct = train_step(to_tensorflow(images), tf.constant(labels.numpy()))
            # Wait for the step, which runs asynchronously on a GPU, before the batch that it reads is released.
            losses.append(float(loss))
            hits += int(correct)
        accuracy = 100 * hits / (len(loader) * args.batch_size)
        print(f"epoch {epoch}/{args.epochs}: loss {sum(losses) / len(losses):.3f}, {accuracy:.1f}%", flush=True)


if __name__ == "__main__":
    main()
