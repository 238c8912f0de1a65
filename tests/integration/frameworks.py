"""Batches taken by other frameworks, and kept. As a script for one of them, as JAX and TensorFlow start threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])

Framework = tuple[Callable[[torch.Tensor], Any], Callable[[Any], int], Callable[[Any], Any]]
"""What takes a tensor, the address of what it has made of it, and that as an array of NumPy's."""


def numpy_() -> Framework:
    return np.from_dlpack, lambda array: array.ctypes.data, np.asarray


def torch_() -> Framework:
    """A consumer as others are, which is there also where there is a GPU."""
    return torch.from_dlpack, torch.Tensor.data_ptr, lambda tensor: tensor.cpu().numpy()


def cupy() -> Framework:
    import cupy

    return cupy.from_dlpack, lambda array: array.data.ptr, cupy.asnumpy


def jax() -> Framework:
    import jax

    return jax.numpy.from_dlpack, lambda array: array.unsafe_buffer_pointer(), np.asarray


def tensorflow() -> Framework:
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)

    def take(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        return tf.experimental.dlpack.from_dlpack(tensor.__dlpack__())

    def address(tensor: Any) -> int:
        return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)).data_ptr()

    return take, address, lambda tensor: tensor.numpy()


def keep_all(framework: Framework, root: str, device: str, **arguments: Any) -> None:
    """Take two epochs of batches, keep nothing else of them, and look at the end whether all are as they came."""
    take, address, to_numpy = framework
    dataset = ImageFolder(root, TRANSFORM)
    loader = DataLoader(dataset, 8, True, device=device, memory_format=torch.channels_last, **arguments)
    kept, came = [], []
    for _ in range(2):
        for images, labels in loader:
            for tensor in (images.permute(0, 2, 3, 1), labels):
                came.append(tensor.cpu().numpy().copy())
            kept.append(take(images.permute(0, 2, 3, 1)))
            assert address(kept[-1]) == images.data_ptr()
            kept.append(take(labels.to(device)))
            del images, labels, tensor
    assert loader._counts.images[0] and len(kept) == 2 * 2 * 6
    assert len({address(each) for each in kept}) == len(kept)
    for each, before in zip(kept, came):
        assert each.shape == before.shape and np.array_equal(to_numpy(each), before)


def sees_a_gpu(name: str) -> bool:
    if name == "jax":
        import jax

        return bool(jax.default_backend() == "gpu")
    if name == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    return True


def main() -> None:
    name, root, device = sys.argv[1:]
    if device == "cuda" and not sees_a_gpu(name):
        print("no GPU")
        return
    keep_all({"jax": jax, "tensorflow": tensorflow, "cupy": cupy}[name](), root, device)
    print("kept")
