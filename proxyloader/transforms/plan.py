"""Plan: frozen steps that a Compose is compiled to. Steps draw their parameters per image and do not depend on DALI.

The parameters of one image are a row of float32: each step has some columns of it, and arrays such as noise follow
after the columns. The worker draws the row with the parameter code of torchvision or timm from the default generators.
The row and the bytes of the image are all that the DALI graph needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedTransformError
from ..lifetime import cached_property

Size = tuple[int, int]
"""(height, width) in pixels."""

Kind = Literal["pil", "tensor"]
MemoryOrder = Literal["CHW", "HWC"]
"""Memory order of a tensor (C, H, W): channel by channel, or pixel by pixel as in a PIL image."""


@dataclass(frozen=True)
class ImageState:
    """What torchvision would hold at this point of the Compose.

    Attributes:
        kind: a PIL image, or a tensor (C, H, W).
        dtype: dtype of the values; uint8 for a PIL image.
        channels: 3 (RGB) or 1 (grey).
        size: (height, width) if it is the same for every image; otherwise None.
        images: number of images; FiveCrop makes five from one.
        order: memory order of a tensor if it is known; torch assigns noise in this order.
        pure: whether a tensor is a plain one, not a ``tv_tensors.Image``. v2 transforms only the first of several plain
            tensors.
    """

    kind: Kind = "pil"
    dtype: Literal["uint8", "float32"] = "uint8"
    channels: int = 3
    size: Size | None = None
    images: int = 1
    order: MemoryOrder | None = field(default=None, compare=False)
    pure: bool = field(default=True, compare=False)


class ParamRow(list[float]):
    """The parameters of one image while they are drawn: the columns in order, followed by attached arrays."""

    BLOCK: ClassVar[int] = 64
    """Alignment of arrays, in numbers. A position in these blocks is exact in float32 up to 4 GB."""

    _arrays: tuple[NDArray[np.float32], ...] = ()
    _blocks = 0

    def attach(self, array: NDArray[np.float32]) -> float:
        """Attach an array after the columns. Return the number of its first block, to be stored in a column."""
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
        """Return columns and arrays, (numbers,) float32."""
        columns = np.array(self, np.float32)
        return np.concatenate([columns, *self._arrays]) if self._arrays else columns


@dataclass(frozen=True)
class Tolerance:
    """Largest difference from torchvision's image, in levels of 255, if the input images are equal.

    The values hold for uint8. Float tensors may also differ by float rounding. This is the only place that states the
    tolerance of a step: ``proxyloader explain`` prints it, and ``tests/transforms/test_closeness.py`` tests every step.

    Attributes:
        mean: over all pixels of a batch.
        p999: 99.9th percentile.
        max: over all pixels.
        why: cause of the difference.
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
    """One operation on an image. A step is run by a backend's operator, or made of other steps, its ``operations``.

    Attributes:
        keeps_order: whether an output tensor is known to have the memory order of the input tensor.
        cuts: whether pixels that are one level apart before it may be any number of levels apart after it.
    """

    keeps_order: ClassVar[bool] = False
    cuts: ClassVar[bool] = False

    @property
    def slow_on_cpu(self) -> bool:
        """Whether torchvision is so much faster than DALI on a CPU that a plan with this step is left to it."""
        return False

    @property
    def num_params(self) -> int:
        """Number of columns for an image: the sum over ``operations``."""
        return sum(step.num_params for step in self.operations if step is not self)

    @property
    def operations(self) -> tuple[Step, ...]:
        """Steps that a backend runs for this step, in order: itself, or its parts, which share its columns."""
        return (self,)

    @property
    def params_doc(self) -> str:
        """What ``sample_params`` draws, and with which function of torchvision, torch or Python; "" for nothing."""
        return ""

    @property
    def takes_numbers_ahead(self) -> bool:
        """Whether all that it draws may be drawn ahead: see NOTE [ Numbers ahead ] in ``random_numbers.py``."""
        return not self.params_doc

    @property
    def closeness(self) -> Tolerance:
        """Tolerance of the result of the backend's operator, compared with torchvision."""
        return EXACT

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        """Append this step's columns for an image of ``size`` to ``row``. Return the size of the output.

        A step that attaches no array accepts any list as the row.
        """
        return size

    def output_state(self, state: ImageState) -> ImageState:
        """Return the state after this step: by default that after its ``operations``, or the same without any."""
        return state if self.operations == (self,) else output_state(self.operations, state)


Branch = tuple[Step, ...]
"""Steps that are applied in order, or not at all. An empty tuple is a branch, too."""

S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class Draws(Step, Generic[S]):
    """Base class of the steps that draw the parameters of one other step."""

    step: S

    @property
    def operations(self) -> Branch:
        return (self.step,)


@dataclass(frozen=True)
class OneOf(Step):
    """One of several branches. Its columns are the number of the branch, then as many columns as the widest branch has.

    It draws nothing itself. The step that contains it chooses the branch.
    """

    branches: tuple[Branch, ...]

    @cached_property
    def num_params(self) -> int:
        return 1 + max(sum(step.num_params for step in branch) for branch in self.branches)

    def take(self, chosen: int, size: Size, row: ParamRow) -> Size:
        """Choose a branch, and let its steps draw their parameters. Return the size of the output."""
        end = len(row) + self.num_params
        row.append(chosen)
        for step in self.branches[chosen]:
            size = step.sample_params(size, row)
        row.extend([0.0] * (end - len(row)))
        return size

    def put(self, chosen: int, row: list[float], *numbers: float) -> None:
        """Choose a branch with given parameters."""
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
class ConstantParams(Draws[Step]):
    """A step with the same parameters for every image."""

    numbers: tuple[float, ...]

    def sample_params(self, size: Size, row: list[float]) -> Size:
        row.extend(self.numbers)
        return size


def output_state(steps: Branch, state: ImageState) -> ImageState:
    for step in steps:
        after = step.output_state(state)
        state = after if step.keeps_order else replace(after, order=None)
    return state


def iter_steps(steps: Branch) -> Iterator[Step]:
    """Yield the steps and, recursively, the steps that they consist of."""
    for step in steps:
        yield step
        for branch in getattr(step, "branches", ()):
            yield from iter_steps(branch)
        if step.operations != (step,):
            yield from iter_steps(step.operations)


FASTER_ON_CPU = "on a CPU torchvision is faster at"
"""How messages begin that say why DALI does not do a transform. Its name follows."""


@dataclass(frozen=True)
class Plan:
    """A translated transform for any backend: steps in order, and the state of the output images.

    Attributes:
        steps: in the order in which they are applied.
        output: dtype, channels, size if it is fixed, and number of the output tensors of one image.
    """

    steps: Branch
    output: ImageState
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Equal plans in different datasets share one pipeline. Workers refer to it by this key.
        digest = hashlib.sha1(repr(self.steps).encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "key", f"plan-{digest[:16]}")

    @property
    def slow_on_cpu(self) -> bool:
        """Whether torchvision is faster than DALI on a CPU."""
        return any(step.slow_on_cpu for step in iter_steps(self.steps))

    @property
    def num_params(self) -> int:
        """Number of columns that are drawn for an image."""
        return sum(step.num_params for step in self.steps)

    @cached_property
    def takes_numbers_ahead(self) -> bool:
        """See ``Step.takes_numbers_ahead``."""
        return all(step.takes_numbers_ahead for step in iter_steps(self.steps))

    def sample_params(self, height: int, width: int) -> NDArray[np.float32]:
        """Draw the parameters of one image of ``height`` x ``width`` pixels from the default generators.

        Returns:
            (columns,) float32, followed by attached arrays, if any. Pixel coordinates are integers, exact in float32 up
            to 16,777,216.
        """
        row = ParamRow()
        size = height, width
        for step in self.steps:
            size = step.sample_params(size, row)
        return row.packed()


def plan_of(steps: Branch) -> Plan:
    """Check that the steps end in a tensor, and return the plan."""
    state = output_state(steps, ImageState())
    if state.kind == "pil":
        raise UnsupportedTransformError(
            "the transform ends with a PIL image, which cannot be put into a batch. "
            "Add transforms.ToTensor() (or v2.ToImage() and v2.ToDtype(torch.float32, scale=True)) at the end. "
            "(Where the dataset itself decodes images to tensors, nothing is left for DALI: use torch's DataLoader)",
            code="no-tensor",
        )
    return Plan(steps, state)
