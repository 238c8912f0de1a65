"""Train a small network in JAX on batches of proxyloader.DataLoader, without a copy of the images.

A batch is a torch tensor. JAX takes it by DLPack: jax.numpy.from_dlpack gives an array in the same memory, on the CPU
and on a GPU. The loader makes the images channels-last, so that they are (N, H, W, 3) as JAX's convolutions want them.

Launch it, after pip install jax; for a GPU "jax[cuda12]" or "jax[cuda13]", as the CUDA of torch is:

    python examples/jax_training.py                # makes photographs in data/framework_photos
    python examples/jax_training.py my_pictures    # a folder with one folder of images for each class

It prints the loss of each epoch, which falls, and the accuracy on the same images, which rises.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader
from proxyloader.make_dataset import make_dataset

# Without this JAX takes three quarters of a GPU's memory at its start. torch and DALI need their part.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

PHOTOS = Path("data/framework_photos")
CHANNELS = (3, 16, 32, 64)
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
        multiprocessing_context="forkserver" if args.workers else None,  # JAX's threads do not outlive a fork
        device="cuda" if jax.default_backend() == "gpu" else "cpu",
        memory_format=torch.channels_last,
        seed=args.seed,
    )


def to_jax(images: torch.Tensor) -> jax.Array:
    """The memory of (N, 3, H, W) channels-last images as a JAX array (N, H, W, 3). JAX waits for them by itself."""
    return jnp.from_dlpack(images.permute(0, 2, 3, 1))


def first_weights(key: jax.Array, classes: int) -> list[Any]:
    """Pairs of a kernel and a bias: (3, 3, inputs, outputs) for a convolution, and (inputs, outputs) for the end."""
    keys = jax.random.split(key, len(CHANNELS))
    initial = jax.nn.initializers.he_normal()
    shapes = [(3, 3, *pair) for pair in pairwise(CHANNELS)] + [(CHANNELS[-1], classes)]
    return [(initial(key, shape), jnp.zeros(shape[-1])) for key, shape in zip(keys, shapes)]


def logits_of(weights: list[Any], images: jax.Array) -> jax.Array:
    """The network: convolutions of stride 2, the mean over the pixels, and one layer. Returns (N, classes)."""
    *convolutions, (kernel, bias) = weights
    for convolution, offset in convolutions:
        images = jax.lax.conv_general_dilated(
            images, convolution, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        images = jax.nn.relu(images + offset)
    return images.mean((1, 2)) @ kernel + bias


def loss_of(weights: list[Any], images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cross entropy, and the number of images that are recognized."""
    logits = logits_of(weights, images)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -chosen.mean(), (logits.argmax(1) == labels).sum()


@jax.jit
def train_step(
    weights: list[Any], velocity: list[Any], images: jax.Array, labels: jax.Array, lr: float
) -> tuple[list[Any], list[Any], jax.Array, jax.Array]:
    """One step of SGD with momentum. Returns the new weights and velocity, the loss, and how many are recognized."""
    (loss, right), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, images, labels)
    velocity = jax.tree.map(lambda moving, gradient: MOMENTUM * moving + gradient, velocity, gradients)
    weights = jax.tree.map(lambda weight, moving: weight - lr * moving, weights, velocity)
    return weights, velocity, loss, right


def main() -> None:
    args = parse_args()
    loader = load_data(args)
    weights = first_weights(jax.random.key(args.seed), len(loader.dataset.classes))
    velocity = jax.tree.map(jnp.zeros_like, weights)
    print(f"JAX {jax.__version__} on {jax.devices()[0]}, {len(loader.dataset)} images", flush=True)
    for epoch in range(1, args.epochs + 1):
        losses, hits = [], 0
        for images, labels in tqdm(loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=None):
            weights, velocity, loss, right = train_step(
                weights, velocity, to_jax(images), jnp.asarray(labels.numpy()), args.lr
            )
            # Waits for the step. JAX begins one and returns. Until it is done, the memory of its images must stay.
            losses.append(float(loss))
            hits += int(right)
        accuracy = 100 * hits / (len(loader) * args.batch_size)
        print(f"epoch {epoch}/{args.epochs}: loss {sum(losses) / len(losses):.3f}, {accuracy:.1f}%", flush=True)


if __name__ == "__main__":
    main()
