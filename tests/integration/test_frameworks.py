"""Other frameworks take batches by DLPack in the memory in which they are, and that memory stays as long as theirs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader

from .. import scripts
from ..limits import WAIT_S
from . import frameworks

ALIGNMENT_BYTES = 64
"""Of torch's memory on a CPU. JAX copies what is aligned to less, and TensorFlow ends the process."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("jax", "tensorflow", "cupy")
}
"""Looked up without an import, which starts threads and would forbid forks to the tests that follow."""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("framework", [frameworks.numpy_, frameworks.torch_])
def test_what_took_batches_by_dlpack_keeps_them(framework: Any, num_workers: int, photos: Path, device: str) -> None:
    on = "cpu" if framework is frameworks.numpy_ else device
    frameworks.keep_all(framework(), str(photos), on, num_workers=num_workers)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in needs.items()])
def test_a_framework_takes_the_memory_of_batches_and_keeps_it(name: str, photos: Path, device: str) -> None:
    if name == "cupy" and device == "cpu":
        pytest.skip("CuPy's arrays are on a GPU")
    script = "from tests.integration.frameworks import main; main()"
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
from tests.integration.frameworks import TRANSFORM
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
