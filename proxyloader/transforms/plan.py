"""Plan: the frozen steps of all calls on an image, which do not depend on DALI.

The parameters of an image are a row: each step owns some of its columns, and arrays such as noise follow them. The
worker fills the row with the parameter code of torchvision or timm, using the default generators: see Translation. On
the GPU, kernels transform what DALI decodes by these rows; without kernels, they are an input of DALI's graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray


class Untranslatable(ValueError):
    """A transform, its arguments or its place has no equivalent steps, so torchvision's code runs."""


Size = tuple[int, int]  # (height, width) in pixels

Kind = Literal["pil", "tensor"]
Version = Literal["v1", "v2"]
"""Version of torchvision's transforms. v1 and v2 may draw different numbers, and round tensors differently."""

MemoryOrder = Literal["CHW", "HWC"]
"""Memory order of a tensor (C, H, W): channel by channel, or pixel by pixel as in a PIL image."""


@dataclass(frozen=True)
class ImageState:
    """State of torchvision's image at this point of the Compose."""

    kind: Kind = "pil"  # a PIL image, or a tensor (C, H, W)
    dtype: Literal["uint8", "float32"] = "uint8"
    channels: int = 3  # 3 (RGB) or 1 (grayscale)
    order: MemoryOrder | None = field(default=None, compare=False)  # of a tensor if known; torch generates noise in it
    # Whether a tensor is plain rather than a ``tv_tensors.Image``. v2 transforms only the first of several plain ones.
    pure: bool = field(default=True, compare=False)


class ParamRow(list[float]):
    """The parameters of an image while they are sampled: the columns in order, followed by attached arrays."""

    BLOCK: ClassVar[int] = 64
    """Alignment of arrays, in numbers. A position in these blocks is exact in float32 up to 4 GB."""

    _arrays: tuple[NDArray[np.float32], ...] = ()
    _blocks = 0

    def attach(self, array: NDArray[np.float32]) -> float:
        """Attach an array after the columns. Return the index of its first block, which a column stores."""
        first, end = self._blocks, self._blocks + -(-array.size // self.BLOCK)
        padding = np.zeros((end - first) * self.BLOCK - array.size, np.float32)
        self._arrays = (*self._arrays, array.reshape(-1), padding)
        self._blocks = end
        return first

    def copy(self) -> ParamRow:
        """Return a row that starts with the same parameters."""
        row = ParamRow(self)
        if self._blocks:
            row._arrays, row._blocks = self._arrays, self._blocks
        return row

    def packed(self) -> NDArray[np.float32]:
        """Return the columns, float64 viewed as two float32 each, and the arrays, (numbers,) float32."""
        columns = np.array(self, np.float64).view(np.float32)
        return np.concatenate([columns, *self._arrays]) if self._arrays else columns


@dataclass(frozen=True)
class Step:
    """One operation on an image."""

    keeps_order: ClassVar[bool] = False  # whether an output tensor is known to have the memory order of the input
    needs_kernels: ClassVar[bool] = True  # False: DALI's graph has such a step, and is not slower than torchvision

    @property
    def title(self) -> str:
        """Name in messages."""
        return type(self).__name__

    @property
    def num_params(self) -> int:
        """Number of columns per image."""
        return 0

    def output_state(self, state: ImageState) -> ImageState:
        """Return the state after this step."""
        return state


Branch = tuple[Step, ...]
"""Steps that are applied in order, or not at all. An empty tuple is also a branch."""

Sample = Callable[[Size, ParamRow], Size]
"""Function that appends the columns of steps to the row of an image, given its size, and returns the output size. It
raises Untranslatable if there are none, for example because the image is too small."""

Draws = Literal["", "numbers", "torch", "any"]
"""Which random numbers a ``Sample`` draws. "": none; "numbers": only those of ``in_thread`` in ``random_numbers.py``;
"torch": also from torch's generator directly; "any": also from Python's and NumPy's."""


class Translation(NamedTuple):
    """The steps of a transform, and how to sample their parameters."""

    steps: Branch = ()  # they do not depend on what is drawn
    sample: Sample | None = None  # None: the steps have no parameters, and keep the size
    draws: Draws = ""


def in_sequence(parts: Sequence[Translation]) -> Translation:
    """Return the translation of several transforms that are applied one after the other."""
    samples = [each.sample for each in parts if each.sample is not None]

    def sample(size: Size, row: ParamRow) -> Size:
        for each in samples:
            size = each(size, row)
        return size

    steps = tuple(step for each in parts for step in each.steps)
    draws = max((each.draws for each in parts), key=get_args(Draws).index, default=get_args(Draws)[0])
    return Translation(steps, sample if samples else None, draws)


@dataclass(frozen=True)
class OneOf(Step):
    """One of several branches. Its columns are the branch index, then as many columns as the widest branch has."""

    branches: tuple[Branch, ...]

    @cached_property
    def num_params(self) -> int:
        return 1 + max(map(count_params, self.branches))

    def take(self, chosen: int, sample: Sample | None, size: Size, row: ParamRow) -> Size:
        """Choose a branch and sample the parameters of its steps. Return the output size."""
        end = len(row) + self.num_params
        row.append(chosen)
        size = size if sample is None else sample(size, row)
        row.extend([0.0] * (end - len(row)))
        return size

    def put(self, chosen: int, row: ParamRow, *numbers: float) -> None:
        """Choose a branch with given parameters."""
        row.extend([chosen, *numbers, *[0.0] * (self.num_params - 1 - len(numbers))])

    def output_state(self, state: ImageState) -> ImageState:
        first, *others = {output_state(branch, state) for branch in self.branches}
        if others:
            raise Untranslatable  # the kind, dtype or channels of its output are random
        return first


def count_params(steps: Branch) -> int:
    """Return the number of columns of steps."""
    return sum(step.num_params for step in steps)


def output_state(steps: Branch, state: ImageState) -> ImageState:
    for step in steps:
        after = step.output_state(state)
        state = after if step.keeps_order else replace(after, order=None)
    return state


def iter_steps(steps: Branch) -> Iterator[Step]:
    """Yield the steps and, recursively, those of their branches."""
    for step in steps:
        yield step
        for branch in getattr(step, "branches", ()):
            yield from iter_steps(branch)


@dataclass(frozen=True)
class Plan:
    """A translated transform for any backend: steps in order, and the state of the output images."""

    steps: Branch
    output: ImageState

    @cached_property
    def key(self) -> str:
        """Key by which workers refer to the plan. Equal plans of different datasets share a pipeline."""
        return f"plan-{hashlib.sha1(repr(self.steps).encode(), usedforsecurity=False).hexdigest()[:16]}"

    def __hash__(self) -> int:
        return hash(self.key)  # faster than hashing the steps

    @property
    def num_params(self) -> int:
        """Number of columns per image."""
        return count_params(self.steps)


def plan_of(steps: Branch) -> Plan:
    """Return the plan of the steps of an RGB PIL image."""
    return Plan(steps, output_state(steps, ImageState()))
