"""Plan: frozen steps that a Compose is compiled to. They draw their numbers per image and know nothing of DALI.

A plan's numbers for one image are a row of float32: each step owns some columns of it, and noise lies behind them. The
row is drawn in the worker, by torchvision's own parameter code from torch's own generator, and is all that the DALI
graph needs beside the bytes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedTransformError
from .deferred import DeferredTransforms

Size = tuple[int, int]
"""(height, width) in pixels."""


MemoryOrder = Literal["CHW", "HWC"]
"""How a tensor (C, H, W) lies in torch's memory: channel after channel, or pixel after pixel as in a PIL image."""


@dataclass(frozen=True)
class ImageState:
    """What torchvision would hold at this point of the Compose.

    Attributes:
        kind: a PIL image, or a tensor (C, H, W).
        dtype: of the values; a PIL image's are uint8.
        channels: 3 (RGB) or 1 (grey).
        size: (height, width) where it is the same for every image, else None.
        images: how many there are; FiveCrop makes five of one.
        order: of a tensor in memory, where it is known; torch deals noise out in that order.
        pure: a tensor is a plain one, no ``tv_tensors.Image``; of several of those v2 takes the first alone.
    """

    kind: Literal["pil", "tensor"] = "pil"
    dtype: Literal["uint8", "float32"] = "uint8"
    channels: int = 3
    size: Size | None = None
    images: int = 1
    order: MemoryOrder | None = field(default=None, compare=False)
    pure: bool = field(default=True, compare=False)


class ParamRow(list[float]):
    """The numbers of one image while they are drawn: the columns, one after the other, and arrays behind the last."""

    BLOCK: ClassVar[int] = 64
    """Arrays begin at multiples of so many numbers; counted in these, a float32 says exactly where, up to 4 GB."""

    def __init__(self, numbers: Sequence[float] = ()) -> None:
        super().__init__(numbers)
        self._arrays: list[NDArray[np.float32]] = []
        self._blocks = 0

    def attach(self, array: NDArray[np.float32]) -> float:
        """Put an array behind the columns; returns its first block, for a column."""
        first, end = self._blocks, self._blocks + -(-array.size // self.BLOCK)
        self._arrays += array.reshape(-1), np.zeros((end - first) * self.BLOCK - array.size, np.float32)
        self._blocks = end
        return first

    def packed(self) -> NDArray[np.float32]:
        """(columns and arrays,) float32"""
        columns = np.array(self, np.float32)
        return np.concatenate([columns, *self._arrays]) if self._arrays else columns


@dataclass(frozen=True)
class Tolerance:
    """How far an image may be from torchvision's, in levels of 255, where both were the same before.

    It holds for uint8; float tensors may be off by float rounding beside it. This is the one place where a step says
    so: ``proxyloader explain`` prints it, and ``tests/transforms/test_closeness.py`` holds every step to its own.

    Attributes:
        mean: over all pixels of a batch.
        p999: 99.9th percentile.
        max: the worst pixel.
        why: where the difference comes from.
    """

    mean: float = 0.0
    p999: float = 0.0
    max: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if not self.max:
            return "exact"
        return f"mean {self.mean:g}, 99.9% within {self.p999:g}, all within {self.max:g} ({self.why})"


EXACT = Tolerance()


@dataclass(frozen=True)
class Step:
    """One thing done to an image. Subclasses say how many columns they draw and what they leave behind.

    Attributes:
        keeps_order: a tensor that comes out lies in memory as the one that went in. Only what is known to is True.
        slow_on_cpu: on a CPU torchvision does it so much faster than DALI that a plan with it is left to torchvision.
    """

    keeps_order: ClassVar[bool] = False
    slow_on_cpu: ClassVar[bool] = False

    @property
    def num_params(self) -> int:
        """How many numbers it takes for an image: as many as what it is made of."""
        return sum(step.num_params for step in self.operations if step is not self)

    @property
    def operations(self) -> tuple[Step, ...]:
        """What a backend does for this step, in order: itself, unless it is made of others. They share its columns."""
        return (self,)

    @property
    def params_doc(self) -> str:
        """What ``sample_params`` draws, in words, and by which function of torchvision, torch or Python; or ""."""
        return ""

    @property
    def closeness(self) -> Tolerance | None:
        """How close what a backend does for this step is to torchvision. None: see the steps that it is made of."""
        return None

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        """Append this step's columns for an image of ``size`` to ``row``; return the size it has afterwards.

        A step that attaches no array needs no more of the row than that it is a list.
        """
        return size

    def output_state(self, state: ImageState) -> ImageState:
        return state


Branch = tuple[Step, ...]
"""Steps that are taken one after the other, or not at all. None is a branch, too."""


@dataclass(frozen=True)
class OneOf(Step):
    """One of several branches. Its columns are the number of the branch, and as many as the widest branch has.

    It draws nothing itself: the step that it belongs to says which branch is taken.
    """

    branches: tuple[Branch, ...]

    @functools.cached_property
    def num_params(self) -> int:
        return 1 + max(sum(step.num_params for step in branch) for branch in self.branches)

    def take(self, chosen: int, size: Size, row: ParamRow) -> Size:
        """Take a branch whose steps draw their numbers themselves."""
        end = len(row) + self.num_params
        row.append(chosen)
        for step in self.branches[chosen]:
            size = step.sample_params(size, row)
        row.extend([0.0] * (end - len(row)))
        return size

    def put(self, chosen: int, row: list[float], *numbers: float) -> None:
        """Take a branch with numbers that are known."""
        row.extend([chosen, *numbers, *[0.0] * (self.num_params - 1 - len(numbers))])

    def output_state(self, state: ImageState) -> ImageState:
        found = [output_state(branch, state) for branch in self.branches]
        alike = {replace(each, size=None) for each in found}
        if any(each.images > state.images for each in found):
            raise UnsupportedTransformError(
                "it holds one that makes several images; put that beside it", code="several-images"
            )
        if len(alike) > 1:
            raise UnsupportedTransformError(
                "what it leaves behind depends on chance (the kind of image, its type or its channels); "
                "put what changes them before or after it",
                code="chance",
            )
        size = found[0].size if len({each.size for each in found}) == 1 else None
        return replace(found[0], size=size)


@dataclass(frozen=True)
class ConstantParams(Step):
    """A step that takes the same numbers for every image."""

    step: Step
    numbers: tuple[float, ...]

    @property
    def num_params(self) -> int:
        return len(self.numbers)

    @property
    def operations(self) -> Branch:
        return (self.step,)

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.extend(self.numbers)
        return size

    def output_state(self, state: ImageState) -> ImageState:
        return self.step.output_state(state)


def output_state(steps: Branch, state: ImageState) -> ImageState:
    for step in steps:
        after = step.output_state(state)
        state = after if step.keeps_order else replace(after, order=None)
    return state


def iter_steps(steps: Branch) -> Iterator[Step]:
    """The steps, and all that they are made of."""
    for step in steps:
        yield step
        for branch in getattr(step, "branches", ()):
            yield from iter_steps(branch)
        if step.operations != (step,):
            yield from iter_steps(step.operations)


@dataclass(frozen=True)
class Plan:
    """A transform, ready for any backend: steps in order, and the state the images end in.

    Attributes:
        steps: in the order they act.
        output: dtype, channels and (where it is fixed) size of the tensors that come out, and how many for an image.
        rest: what is done to the batches afterwards, by other means.
    """

    steps: tuple[Step, ...]
    output: ImageState
    rest: DeferredTransforms | None = None
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Equal plans in different datasets share one pipeline, and workers name it by this.
        digest = hashlib.sha1(repr(self.steps).encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "key", f"plan-{digest[:16]}{f'-{self.rest.key}' if self.rest else ''}")

    @property
    def slow_on_cpu(self) -> bool:
        """On a CPU torchvision is faster than DALI."""
        return any(step.slow_on_cpu for step in iter_steps(self.steps))

    @property
    def num_params(self) -> int:
        """How many numbers are drawn for an image."""
        return sum(step.num_params for step in self.steps)

    def sample_params(self, height: int, width: int) -> NDArray[np.float32]:
        """Draw the numbers for one image of ``height`` x ``width`` from torch's default generator.

        Returns:
            (columns,) float32, and more where steps attached arrays. Pixel coordinates are whole numbers, exact in
            float32 up to 16,777,216.
        """
        row = ParamRow()
        size = height, width
        for step in self.steps:
            size = step.sample_params(size, row)
        return row.packed()


def plan_of(steps: tuple[Step, ...]) -> Plan:
    """Check that the steps end in a tensor, and make the plan."""
    state = output_state(steps, ImageState())
    if state.kind == "pil":
        raise UnsupportedTransformError(
            "the transform ends with a PIL image, which cannot be put into a batch. "
            "Add transforms.ToTensor() (or v2.ToImage() and v2.ToDtype(torch.float32, scale=True)) at the end. "
            "(Where the dataset itself decodes images to tensors, nothing is left for DALI: use torch's DataLoader)",
            code="no-tensor",
        )
    return Plan(steps, state)
