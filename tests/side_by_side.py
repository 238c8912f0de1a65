"""Uses torch's DataLoader and ours in the same way under the same seed, and compares all that a script can see."""

from __future__ import annotations

import functools
import random
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as StockLoader

import proxyloader

from .outcomes import without_frames

Build = Callable[[Any], Any]
"""Makes a loader, given the class to make it of."""

Use = Callable[[Any], Any]
"""Does something with a loader; what it gives is compared."""

MEAN_ALLOWED = 2.5 / 255
"""Of images as small as those of tests, whose outermost pixels are further off: DALI resizes none to them for users."""
ON_GPU_TOO = 0.1 / 255 / 0.225
"""What ``Bound.on`` of compare.py adds to a mean on a GPU, of images that are divided by ImageNet's deviations."""

MOST_STEPS = 100


@dataclass(frozen=True)
class Failed:
    """What stands in the place of a result that was an exception.

    Attributes:
        kind: of the exception.
        message: its text; of a worker's traceback the first and the last line, as the frames between are not promised.
    """

    kind: type[BaseException]
    message: tuple[str, ...]

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        without_frames(error)
        traced = any(line.startswith("Original Traceback") for line in lines)
        return cls(type(error), tuple([lines[0], lines[-1]] if traced else lines))


def tried(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or how it failed."""
    try:
        return call(*arguments)
    except Exception as error:
        return Failed.by(error)


def walked(loader: Any) -> list[Any]:
    """Every batch of an epoch, and in the place of each that failed how it did."""
    batches = tried(iter, loader)
    if isinstance(batches, Failed):
        return [batches]
    found: list[Any] = []
    while len(found) < MOST_STEPS:
        try:
            found.append(next(batches))
        except StopIteration as end:
            without_frames(end)
            return found
        except Exception as error:
            found.append(Failed.by(error))
    raise AssertionError(f"the epoch has no end: {found[-3:]}")


def epochs(loader: Any, count: int = 2) -> Any:
    """What a training script sees: lengths, batches, errors, and the state that the generators are left in."""
    seen = []
    for _ in range(count):
        batches = walked(loader)
        given = loader.generator
        states = torch.get_rng_state(), given.get_state() if given is not None else None
        seen.append({"batches": batches, "generators": states, "python's": random.getstate()})
    return {"length": tried(len, loader), "epochs": seen}


def one_epoch(loader: Any) -> Any:
    """As ``epochs``."""
    return epochs(loader, 1)


def by_dali(loader: Any) -> Any:
    """As ``epochs``; and DALI has made every image of ours, in pipelines of their transforms."""
    seen = epochs(loader)
    if isinstance(loader, proxyloader.DataLoader):
        assert loader.backend.startswith(f"DALI on {loader.device}: "), loader.backend
        stats = loader.stats()
        assert stats.images_by_dali + stats.images_by_pillow > 0
        assert not stats.images_by_workers, f"the workers made {stats.images_by_workers} images"
    return seen


def used(loader_class: Any, build: Build, use: Use) -> Any:
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loader = tried(build, loader_class)
        result = loader if isinstance(loader, Failed) else use(loader)
    told = {str(each.message) for each in caught if issubclass(each.category, UserWarning)}
    return {"result": result, "warnings": sorted(each for each in told if each.startswith("Length of IterableDataset"))}


def assert_as_torch(build: Build, use: Use = epochs, *, device: str = "cpu") -> Any:
    """Both loaders are built and used alike, and show the same.

    Args:
        build: called once for each loader, so that neither sees what the other did to a dataset or a sampler.
        use: gives what is compared; exceptions in it that ``tried`` or ``walked`` do not catch are the test's.

    Returns:
        What torch's loader showed.
    """
    theirs = used(StockLoader, build, use)
    ours = used(functools.partial(proxyloader.DataLoader, device=device), build, use)
    assert_same(ours, theirs)
    return theirs["result"]


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Same types, same structure, same values; images as near as decoders are."""

    def differ() -> str:  # only where it is said: to write tensors out takes longer than to load them
        return f"{where}: {_short(ours)}, and torch's is {_short(theirs)}"

    assert type(ours) is type(theirs), differ()
    if isinstance(theirs, torch.Tensor):
        _assert_same_tensor(ours, theirs, where)
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), differ()
        np.testing.assert_array_equal(ours, theirs, where)
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), differ()
        assert getattr(ours, "default_factory", None) is getattr(theirs, "default_factory", None), differ()
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple, deque)):
        assert len(ours) == len(theirs), differ()
        for k, (a, b) in enumerate(zip(ours, theirs)):
            assert_same(a, b, f"{where}[{k}]")
    elif _fields(theirs):
        for name in _fields(theirs):
            assert_same(getattr(ours, name), getattr(theirs, name), f"{where}.{name}")
    else:
        assert ours == theirs, differ()


def _fields(value: Any) -> list[str]:
    """Of an object of a test's own class."""
    if isinstance(value, Failed) or not type(value).__module__.startswith("tests."):
        return []
    return [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 300 else f"{text[:300]}..."


def _assert_same_tensor(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    for name in ("dtype", "shape", "layout", "requires_grad"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a == b, f"{where}.{name}: {a}, and torch's is {b}"
    assert ours.stride() == theirs.stride(), f"{where}: strides are {ours.stride()}, and torch's {theirs.stride()}"
    ours, is_from_gpu = ours.detach().cpu(), ours.is_cuda
    if is_of_images(theirs):
        differences = (ours - theirs).abs().flatten(-3).mean(-1)
        allowed = MEAN_ALLOWED + (ON_GPU_TOO if is_from_gpu else 0)
        assert differences.max() <= allowed, f"{where}: the images differ by {differences}"
    else:
        assert torch.equal(ours, theirs.detach()), f"{where}: {_short(ours)}, and torch's is {_short(theirs)}"


def is_of_images(tensor: torch.Tensor) -> bool:
    """(..., 3, H, W), or (..., 1, H, W) of more than a row or a column."""
    if tensor.dtype != torch.float32 or tensor.ndim < 3 or not tensor.numel():
        return False
    return tensor.shape[-3] == 3 or (tensor.shape[-3] == 1 and min(tensor.shape[-2:]) > 1)
