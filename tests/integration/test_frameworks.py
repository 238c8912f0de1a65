"""Other frameworks take batches by DLPack in the memory in which they are, and that memory stays as long as theirs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from .. import scripts
from ..limits import WAIT_S

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
    assert loader._recorder.images[0] and len(kept) == 2 * 2 * 6
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


ALIGNMENT_BYTES = 64
"""Of torch's memory on a CPU. JAX copies what is aligned to less, and TensorFlow ends the process."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("jax", "tensorflow", "cupy")
}
"""Looked up without an import, which starts threads and would forbid forks to the tests that follow."""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("framework", [numpy_, torch_])
def test_what_took_batches_by_dlpack_keeps_them(framework: Any, num_workers: int, photos: Path, device: str) -> None:
    on = "cpu" if framework is numpy_ else device
    keep_all(framework(), str(photos), on, num_workers=num_workers)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in needs.items()])
def test_a_framework_takes_the_memory_of_batches_and_keeps_it(name: str, photos: Path, device: str) -> None:
    if name == "cupy" and device == "cpu":
        pytest.skip("CuPy's arrays are on a GPU")
    script = "from tests.integration.test_frameworks import main; main()"
    done = scripts.run(script, name, photos, device, timeout_s=4 * WAIT_S, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    if done.stdout == "no GPU\n":
        pytest.skip(f"{name} sees no GPU")
    assert done.stdout == "kept\n"


class Inverted(transforms.ToTensor):
    """DALI cannot do it."""

    def __call__(self, image: Any) -> torch.Tensor:
        tensor: torch.Tensor = 1 - super().__call__(image)
        return tensor


@pytest.mark.parametrize("last", [transforms.ToTensor(), Inverted()], ids=["DALI", "torchvision"])
def test_tensors_of_workers_are_aligned_as_torchs_own(photos: Path, last: Any) -> None:
    dataset = ImageFolder(str(photos), transforms.Compose([transforms.RandomCrop(9), last]))
    for images, labels in DataLoader(dataset, 7, num_workers=1, device="cpu"):
        assert images.data_ptr() % ALIGNMENT_BYTES == labels.data_ptr() % ALIGNMENT_BYTES == 0


THREADED = ("JAX", "TensorFlow")
SCRIPT = """
import sys
from tests.integration.test_frameworks import TRANSFORM
from torchvision.datasets import ImageFolder

dataset = ImageFolder(sys.argv[1], TRANSFORM)
{code}
print(array.shape)
"""


def section(page: str, title: str) -> list[str]:
    """The code of one section of a page of the documentation."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("title", ["NumPy", *(pytest.param(each, marks=needs[each.lower()]) for each in THREADED)])
def test_what_the_page_says_runs(title: str, photos: Path) -> None:
    (code,) = section("frameworks.md", title)
    done = scripts.run(SCRIPT.format(code=code), photos, timeout_s=4 * WAIT_S, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "(48, 32, 32, 3)" in done.stdout
