"""Train a small network in JAX on batches of proxyloader.DataLoader, without copying the images.

JAX imports a batch through DLPack: jax.numpy.from_dlpack returns an array that shares the memory of the torch tensor,
on the CPU and on a GPU. The loader returns channels-last images, so their memory has the layout (N, H, W, 3) of JAX's
convolutions.

Usage, after pip install jax, or for a GPU "jax[cuda12]" or "jax[cuda13]", matching torch's CUDA version:

    python examples/jax_training.py              # creates photos in data/framework_photos
    python examples/jax_training.py my_images    # a folder with one subfolder of images per class

The script prints the loss of each epoch, which decreases, and the accuracy on the same images, which increases.
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

# By default, JAX preallocates three quarters of a GPU's memory, which leaves little for torch and DALI.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

PHOTOS = Path("data/framework_photos")
CHANNELS = (3, 16, 32, 64)
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
        multiprocessing_context="forkserver" if args.workers else None,  # JAX's threads do not survive a fork
        device="cuda" if jax.default_backend() == "gpu" else "cpu",
        memory_format=torch.channels_last,
        seed=args.seed,
    )


def to_jax(images: torch.Tensor) -> jax.Array:
    """Return channels-last images (N, 3, H, W) as a JAX array (N, H, W, 3). JAX waits for torch's stream."""
    return jnp.from_dlpack(images.permute(0, 2, 3, 1))


def init_weights(key: jax.Array, classes: int) -> list[Any]:
    """Return (kernel, bias) per layer. Kernels are (3, 3, inputs, outputs), of the last layer (inputs, outputs)."""
    keys = jax.random.split(key, len(CHANNELS))
    initial = jax.nn.initializers.he_normal()
    shapes = [(3, 3, *pair) for pair in pairwise(CHANNELS)] + [(CHANNELS[-1], classes)]
    return [(initial(key, shape), jnp.zeros(shape[-1])) for key, shape in zip(keys, shapes)]


def forward(weights: list[Any], images: jax.Array) -> jax.Array:
    """Return the logits (N, classes) of convolutions with stride 2, global average pooling and a linear layer."""
    *convolutions, (kernel, bias) = weights
    layout = ("NHWC", "HWIO", "NHWC")
    for filters, offset in convolutions:
        images = jax.lax.conv_general_dilated(images, filters, (2, 2), "SAME", dimension_numbers=layout)
        images = jax.nn.relu(images + offset)
    return images.mean((1, 2)) @ kernel + bias


def compute_loss(weights: list[Any], images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy and the number of correct predictions."""
    logits = forward(weights, images)
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -log_likelihood.mean(), (logits.argmax(1) == labels).sum()


@jax.jit
def train_step(
    weights: list[Any], velocity: list[Any], images: jax.Array, labels: jax.Array, lr: float
) -> tuple[list[Any], list[Any], jax.Array, jax.Array]:
    """Take one step of SGD with momentum. Return weights, velocity, loss and the number of correct predictions."""
    (loss, correct), gradients = jax.value_and_grad(compute_loss, has_aux=True)(weights, images, labels)
    velocity = jax.tree.map(lambda momentum, gradient: MOMENTUM * momentum + gradient, velocity, gradients)
    weights = jax.tree.map(lambda weight, momentum: weight - lr * momentum, weights, velocity)
    return weights, velocity, loss, correct


def main() -> None:
    args = parse_args()
    loader = load_data(args)
    weights = init_weights(jax.random.key(args.seed), len(loader.dataset.classes))
    velocity = jax.tree.map(jnp.zeros_like, weights)
    print(f"JAX {jax.__version__} on {jax.devices()[0]}, {len(loader.dataset)} images", flush=True)
    for epoch in range(1, args.epochs + 1):
        losses, hits = [], 0
        for images, labels in tqdm(loader, f"epoch {epoch}/{args.epochs}", leave=False, disable=None):
            weights, velocity, loss, correct = train_step(
                weights, velocity, to_jax(images), jnp.asarray(labels.numpy()), args.lr
            )
            # Wait for the step, which runs asynchronously, before the batch that it reads is released.
            losses.append(float(loss))
            hits += int(correct)
        accuracy = 100 * hits / (len(loader) * args.batch_size)
        print(f"epoch {epoch}/{args.epochs}: loss {sum(losses) / len(losses):.3f}, {accuracy:.1f}%", flush=True)


if __name__ == "__main__":
    main()
