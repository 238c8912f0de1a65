"""Turn the sampled parameters of a batch into programs, one function per class of step, and decide what runs a plan."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from numpy.typing import NDArray

from ..transforms import augment, auto_augment, color, geometry, resize, type_conversion, warp
from ..transforms.plan import Branch, OneOf, ParamRow, Plan, Step, iter_steps
from .programs import FILTERS, FIRST_BRANCH, MAX_BRANCHES, OPCODES, Indices, Jobs, Programs, Schedule

NO_KERNELS = "requires CUDA kernels"  # obstacle reported when kernels are unavailable

Columns = NDArray[np.float64]

Planned = tuple[Plan, tuple[int, int], Any]
"""A plan, height and width of the decoded image, and its sampled parameters, as ``ParamRow.packed`` returns them."""


class FloatResize(NamedTuple):
    """A resize of floats, which the step that stores the output performs, with the crops and flips after it.

    ``x`` and ``y`` are, in the resized image, the first column or row of the output, and the step to the next one.
    Outside, values are 0.
    """

    numbers: tuple[Any, ...]
    x: tuple[Any, Any]
    y: tuple[Any, Any]
    size: Any
    is_cropped: bool = False

    def crop(self, top: Any, left: Any, height: Any, width: Any) -> FloatResize:
        (x, step_x), (y, step_y) = self.x, self.y
        return FloatResize(self.numbers, (x + step_x * left, step_x), (y + step_y * top, step_y), (height, width), True)

    def flip(self, axis: str, mask: Any) -> FloatResize:
        (start, step), count = (self.y, self.size[0]) if axis == "vertical" else (self.x, self.size[1])
        turned = start + np.where(mask, step * (count - 1), 0), np.where(mask, -step, step)
        return self._replace(y=turned) if axis == "vertical" else self._replace(x=turned)


@dataclass(eq=False)
class State:
    """Images of a batch between two steps."""

    programs: Programs
    columns: Columns  # (N, parameters), of all decoded images; only the rows of those with this plan count
    rows: dict[int, Any]  # parameters of each decoded image with this plan, as ``ParamRow.packed`` returns them
    images: Indices  # of the programs
    column: int = 0  # the next one of the parameters
    channels: int = 3  # or 1 for grayscale images, whose three channels are equal
    # Left, top, width and height of a crop that the next step has to make, and its fill.
    crop: tuple[Any, tuple[float, ...]] | None = None
    scale: int | None = None  # of a conversion to float: 0 unscaled, 1 as in v1, 2 as in v2; None: still uint8
    mean: tuple[float, ...] = ()  # of Normalize
    std: tuple[float, ...] = ()
    resized: FloatResize | None = None
    # Boxes to erase in the output: images, numbers, noise (or None).
    erased: list[tuple[Indices, Any, Any]] = field(default_factory=list)

    def take(self, count: int) -> Columns:
        """Return the next columns of the images, (count, N)."""
        self.column += count
        columns: Columns = self.columns[self.programs.sources[self.images], self.column - count : self.column].T
        return columns

    def arrays(self, first_blocks: Columns, counts: Columns) -> list[NDArray[np.float32]]:
        """Return the array attached to each image's parameters, given its first block and length."""
        starts = 2 * self.columns.shape[1] + first_blocks.astype(np.int64) * ParamRow.BLOCK
        rows = [self.rows[image] for image in self.programs.sources[self.images].tolist()]
        lengths = counts.astype(np.int64).tolist()
        return [row[start : start + n] for row, start, n in zip(rows, starts.tolist(), lengths)]

    def branch(self, steps: Branch) -> Indices:
        """Return new programs, which begin as those of the images and continue with other steps."""
        self.make_crop()
        images = self.programs.branch(self.images)
        branch = replace(self, images=images)
        branch.apply(steps)
        branch.add("CHANNELS", (0, 1, 2))  # so that there is a result, even without steps
        self.column = branch.column
        return images

    def apply(self, steps: Branch) -> None:
        for step in steps:
            add_step(step, self)

    def add(self, name: str, numbers: Any = (), sizes: Any = None, extras: Any = ()) -> None:
        """Append a step to the programs of the images. See ``Programs.add``."""
        self.make_crop()
        self.programs.add(name, numbers, self.images, sizes, extras)

    def make_crop(self) -> None:
        if self.crop is not None:
            (left, top, width, height), fill = self.crop
            self.crop = None
            self.add("AFFINE_NEAREST", (*rgb(fill), 1, 0, left, 0, 1, top), sizes=(height, width))

    def turn(self, turn: geometry.Turn, images: Indices) -> None:
        """Move the pixels of some of the images."""
        self.make_crop()
        height, width = self.programs.sizes[images].T
        x, at_x = (-1, width) if turn.reverses_x else (1, 0)
        y, at_y = (-1, height) if turn.reverses_y else (1, 0)
        matrix = (0, x, at_x, y, 0, at_y) if turn.swaps else (x, 0, at_x, 0, y, at_y)
        self.programs.add("AFFINE_NEAREST", (0, 0, 0, *matrix), images, (width, height) if turn.swaps else None)

    def resample(self, step: resize.Resize | resize.ResizeBox, size: Columns, arithmetic: int, box: Any = None) -> None:
        """Resize the images or, as Pillow does, ``box`` of them: left, top, right and bottom. See ``RESAMPLE``."""
        old_height, old_width = self.programs.sizes[self.images].T
        crop, fill = self.crop or ((0, 0, old_width, old_height), (0.0,))
        self.crop = None
        box = (0, 0, crop[2], crop[3]) if box is None else box
        red, green, blue = map(int, rgb(fill))
        height_first = arithmetic == 0 and resize.pillow_resizes_height_first((crop[3], crop[2]), size)
        options = FILTERS[step.interpolation], arithmetic, red | green << 8 | blue << 16, height_first
        self.add("RESAMPLE", (*crop, *box, *options), sizes=size)

    def require_uint8(self, step: Step) -> None:
        if self.scale is not None:
            raise MissingKernelError(step, "on float images")

    def require_moves(self, step: Step, fill: tuple[float, ...] = ()) -> None:
        """Check a step that only moves pixels, so that it may as well precede a conversion to floats."""
        if self.std or self.erased or self.resized is not None or (self.scale is not None and any(fill)):
            raise MissingKernelError(step, "on float images with these arguments")


class MissingKernelError(Exception):
    """There is no kernel for a step. ``get_missing_kernel`` returns the message."""

    def __init__(self, step: Step, why: str = "") -> None:
        super().__init__(f"no CUDA kernel for {step.title} {why}".strip())


def rgb(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return one value for each of three channels."""
    return tuple(values or (0.0,)) * (3 // max(1, len(values)))


def build_programs(images: Sequence[Planned]) -> Programs:
    """Return the programs of a batch, whose plans have the same ``get_output_kind``. Raises MissingKernelError."""
    programs = Programs([size for _, size, _ in images])
    images_by_plan: dict[str, list[int]] = {}
    for number, (plan, _, _) in enumerate(images):
        images_by_plan.setdefault(plan.key, []).append(number)
    for numbers in images_by_plan.values():
        _add_plan(programs, images[numbers[0]][0], np.array(numbers), [images[number][2] for number in numbers])
    return programs


def _add_plan(programs: Programs, plan: Plan, images: Indices, rows: Any) -> None:
    """Append the steps of a plan to the programs of some images."""
    end = 2 * plan.num_params
    columns = np.zeros((len(programs.decoded_sizes), end), np.float32)
    if end and len(images):
        columns[images] = np.stack([row[:end] for row in rows])
    state = State(programs, columns.view(np.float64), dict(zip(images.tolist(), rows)), images)
    state.apply(plan.steps)
    state.make_crop()
    mean, std = rgb(state.mean), rgb(state.std or (1.0,))
    numbers = (state.channels, state.scale or 0, *mean, *std)
    if state.resized is None:
        programs.add("STORE", numbers, state.images)
    else:
        numbers, x, y, size = (*numbers, *state.resized.numbers), *state.resized[1:4]
        programs.add("STORE_RESIZED", (*numbers, *x, *y), state.images, size)
    for erased, box, noise in state.erased:
        programs.add("ERASE_OUTPUT", box, erased, extras=noise or ())


def get_output_kind(plan: Plan) -> tuple[Any, ...]:
    """Return a key that is equal for plans whose images may share a schedule."""
    return plan.output.dtype, plan.output.channels


def build_schedule(images: Sequence[Planned], dtype: torch.dtype | None, channels_last: bool, *groups: Any) -> Schedule:
    """Return the launches that transform a batch. ``groups``: ``counts`` and ``files`` of ``Jobs.schedule``.

    ``dtype``: that of floating-point images; None is float32.
    """
    output = images[0][0].output
    if output.dtype == "uint8" or dtype in (None, torch.uint8):  # the loader rejects uint8 for floats
        dtype = getattr(torch, output.dtype)
    return Jobs(build_programs(images)).schedule(output.channels, dtype, channels_last, *groups)


@functools.lru_cache(maxsize=4096)
def get_missing_kernel(plan: Plan) -> str:
    """Return why the kernels cannot run the steps of a plan; "" if they can."""
    try:
        _add_plan(Programs(()), plan, np.arange(0), ())
    except MissingKernelError as error:
        return str(error)
    return ""


def find_obstacle(plan: Plan, has_kernels: bool, left_out: Collection[str] = ()) -> str:
    """Return why a plan falls back to torchvision; "" if kernels run it, or where there are none, DALI's operators.

    ``left_out``: titles of the steps that the installed Pillow does differently.
    """
    if not has_kernels:
        obstacles = [step for step in plan.steps if step.needs_kernels]
        is_size = all(isinstance(step, resize.Resize) for step in obstacles)
        return "" if not obstacles else f"{NO_KERNELS} for this size or filter" if is_size else NO_KERNELS
    if left_out and (titles := {step.title for step in iter_steps(plan.steps)}.intersection(left_out)):
        return f"Pillow {PIL.__version__} differs from the kernels in {', '.join(sorted(titles))}"
    return get_missing_kernel(plan)


@functools.singledispatch
def add_step(step: Any, state: State) -> None:
    """Append a step to the programs of images. Raises MissingKernelError if there is no kernel."""
    raise MissingKernelError(step)


# --- choices ----------------------------------------------------------------------------------------------------------


@add_step.register(OneOf)
def one_of(step: OneOf, state: State) -> None:
    state.make_crop()
    column = state.column
    (chosen,) = state.take(1)
    outcomes = set()
    for number, branch in enumerate(step.branches):
        images = state.images[chosen == number]
        if len(images) or not len(chosen):
            after = replace(state, images=images, column=column + 1)
            after.apply(branch)
            after.make_crop()
            outcomes.add((after.scale, after.mean, after.std, after.channels))
            if after.resized is not state.resized:
                raise MissingKernelError(step, "with branches that resize float images")
    if len(outcomes) > 1:  # these apply to all images
        raise MissingKernelError(step, "with branches that convert or normalize differently")
    state.column = column + step.num_params
    ((state.scale, state.mean, state.std, state.channels),) = outcomes


@add_step.register(auto_augment.Mixture)
def mixture(step: auto_augment.Mixture, state: State) -> None:
    if len(step.branches) > MAX_BRANCHES:
        raise MissingKernelError(step, f"of more than {MAX_BRANCHES} branches")
    weights = state.take(1 + len(step.branches))
    branches = [state.branch(branch) for branch in step.branches]
    unused = MAX_BRANCHES - len(branches)
    state.add("MIX", (len(branches), *weights, *[0] * unused, *branches, *branches[:1] * unused))


@add_step.register(auto_augment.Blend)
def blend(step: auto_augment.Blend, state: State) -> None:
    (share,) = state.take(1)
    state.add("BLEND", (share, *[0] * (FIRST_BRANCH - 1), *[state.branch(step.branch)] * MAX_BRANCHES))


# --- geometry ---------------------------------------------------------------------------------------------------------


@add_step.register(geometry.Crop)
def crop(step: geometry.Crop, state: State) -> None:
    if state.erased or (not step.inside and (state.std or (state.scale is not None and any(step.fill)))):
        raise MissingKernelError(step, "on float images with these arguments")
    top, left, height, width = state.take(4)
    if state.resized is not None:
        if state.resized.is_cropped and not step.inside:
            raise MissingKernelError(step, "after a crop of a resized float image, whose rest would reappear")
        state.resized = state.resized.crop(top, left, height, width)
        return
    state.make_crop()
    state.crop = (left, top, width, height), step.fill


@add_step.register(geometry.Flip)
def flip(step: geometry.Flip, state: State) -> None:
    (mask,) = state.take(1)
    if state.erased:
        raise MissingKernelError(step, "after erasing")
    if state.resized is not None:
        state.resized = state.resized.flip(step.axis, mask != 0)
        return
    turn = geometry.Turn(False, step.axis == "horizontal", step.axis == "vertical")
    state.turn(turn, state.images[mask != 0])


@add_step.register(geometry.Transpose)
def transpose(step: geometry.Transpose, state: State) -> None:
    state.require_moves(step)
    state.turn(geometry.TURNS[step.method], state.images)


@add_step.register(geometry.IndexSelect)
def index_select(step: geometry.IndexSelect, state: State) -> None:
    state.require_moves(step)
    height, width, first_block = state.take(3)
    state.add("SELECT", sizes=(height, width), extras=state.arrays(first_block, height + width))


@add_step.register(resize.Resize)
def resize_(step: resize.Resize, state: State) -> None:
    size = height, width = state.take(2)
    if not step.antialias:
        raise MissingKernelError(step, "without antialias")
    if state.scale is not None:
        if state.std or state.erased or state.resized is not None:
            raise MissingKernelError(step, "on float images after Resize, Normalize or erasing")
        state.make_crop()
        axis, numbers = (0, np.ones_like(width)), (FILTERS[step.interpolation], torch_fuses_products(), height, width)
        state.resized = FloatResize(numbers, axis, axis, size)
        return
    if step.rounding is None:
        state.add("TENSOR_RESIZE", (FILTERS[step.interpolation], torch_fuses_products()), sizes=size)
        return
    state.resample(step, size, int(step.rounding == "torch"))


@add_step.register(resize.ResizeBox)
def resize_box(step: resize.ResizeBox, state: State) -> None:
    state.require_uint8(step)
    box, size = state.take(4), state.take(2)
    state.resample(step, size, 0, box)


@functools.cache
def torch_fuses_products() -> bool:
    """Return whether torch's antialiased resize of floats uses fused multiply-add.

    That depends on the compiler of torch: 2.6 does, while 2.14 rounds most products. The probe resizes a row
    whose first two products, with weights of 1/32 and 3/32, only cancel out if the second is rounded.
    """
    row = torch.zeros(1, 1, 1, 16)
    row[..., 2:4] = (1 + 2**-23) * torch.tensor([-3.0, 1.0])
    return bool(torch.nn.functional.interpolate(row, (1, 4), mode="bilinear", antialias=True)[..., 1] != 0)


@add_step.register(warp.Warp)
def apply_warp(step: warp.Warp, state: State) -> None:
    if step.interpolation == "nearest":
        state.require_moves(step, step.fill)
    else:
        state.require_uint8(step)
    sizes, numbers = state.take(2), state.take(step.num_params - 2)
    name = f"{'AFFINE' if isinstance(step, warp.Affine) else 'PERSPECTIVE'}_{step.interpolation.upper()}"
    fill = rgb(step.fill)
    if step.kind == "tensor":
        name, fill = f"TENSOR_{name}", (*fill, ("v1", "v2").index(step.version) + 1 if step.fill else 0)
    state.add(name, (*fill, *numbers), sizes=sizes)


# --- colors -----------------------------------------------------------------------------------------------------------


@add_step.register(color.Adjustment)
def adjust(step: color.Adjustment, state: State) -> None:
    state.require_uint8(step)
    numbers, name = tuple(state.take(step.num_params)), step.name.upper()
    if step.kind == "tensor" and f"TENSOR_{name}" in OPCODES:
        name, numbers = f"TENSOR_{name}", (*numbers, step.version == "v1", state.channels == 1)
    state.add(name, numbers)


@add_step.register(color.Table)
def table(step: color.Table, state: State) -> None:
    state.require_uint8(step)
    (first_block,) = state.take(1)
    state.add("TABLE", extras=state.arrays(first_block, np.full_like(first_block, 192)))


@add_step.register(color.Matrix)
def matrix(step: color.Matrix, state: State) -> None:
    state.require_uint8(step)
    state.add("MATRIX", state.take(12))
    state.channels = step.channels


@add_step.register(color.ChannelOrder)
def channel_order(step: color.ChannelOrder, state: State) -> None:
    state.require_moves(step)
    state.add("CHANNELS", state.take(3))


@add_step.register(color.Grayscale)
def grayscale(step: color.Grayscale, state: State) -> None:
    state.require_uint8(step)
    if state.channels == 3:
        state.add(*(("GREY", ()) if step.kind == "pil" else ("TENSOR_GREY", (step.version == "v1",))))
    state.channels = step.channels


# --- blurs and erasing ------------------------------------------------------------------------------------------------


@add_step.register(augment.Blur)
def blur(step: augment.Blur, state: State) -> None:
    state.require_uint8(step)
    (sigmas,) = state.take(1)
    height, width = step.window
    weights = np.concatenate([_gaussian(side, sigmas) for side in (width, height)], 1)
    state.add("TENSOR_BLUR", (width // 2, height // 2), extras=weights)


def _gaussian(side: int, sigmas: Columns) -> NDArray[np.float32]:
    """Return the weights of torchvision's ``_get_gaussian_kernel1d`` for each sigma, (N, side)."""
    # NumPy, as torch would wake its threads.
    away = (np.arange(side) - (side - 1) / 2).astype(np.float32) / sigmas.astype(np.float32)[:, None]
    weights: NDArray[np.float32] = np.exp(np.float64(-0.5) * away * away).astype(np.float32)
    weights /= weights.sum(1, keepdims=True)
    return weights


@add_step.register(augment.PillowBlur)
def box_blur(step: augment.PillowBlur, state: State) -> None:
    state.require_uint8(step)
    radii = state.take(2)
    state.add("BOX_BLUR", (*(_box_radius(radii) if step.is_gaussian else radii), 3 if step.is_gaussian else 1))


def _box_radius(sigmas: Columns) -> NDArray[Any]:
    """Return the radius of the box blurs with which Pillow's ``BoxBlur.c`` approximates a Gaussian blur."""
    one, variance = np.float32(1), sigmas.astype(np.float32) ** 2 / np.float32(3)
    length = np.sqrt(12.0 * variance.astype(np.float64) + 1.0).astype(np.float32)
    whole = np.floor((length.astype(np.float64) - 1.0) / 2.0).astype(np.float32)
    part = (2 * whole + one) * (whole * (whole + one) - 3 * variance)
    return np.asarray(whole + part / (6 * (variance - (whole + one) ** 2)))


@add_step.register(augment.Kernel)
def kernel(step: augment.Kernel, state: State) -> None:
    state.require_uint8(step)
    offset, *weights = state.take(step.num_params)
    state.add(f"KERNEL{step.side}", (offset,), extras=np.stack(weights, 1))


@add_step.register(augment.Erase)
def erase(step: augment.Erase, state: State) -> None:
    top, left, height, width, *rest = state.take(step.num_params)
    values, noise = rest * (3 // len(rest)), None
    if step.is_noisy:
        values, noise = [0.0] * 3, state.arrays(rest[0], np.maximum(height, 1) * np.maximum(width, 1) * state.channels)
    if state.scale is None and noise is None:
        state.add("ERASE", (left, top, left + width, top + height, *values))
        return
    state.make_crop()
    numbers = left, top, width, height, noise is not None, *values, state.channels
    state.erased.append((state.images, numbers, noise))


# --- conversions ------------------------------------------------------------------------------------------------------


@add_step.register(type_conversion.ToTensor)
def keep(step: Step, state: State) -> None:
    """No-op: the schedule sets the layout of the output."""


@add_step.register(type_conversion.ToPIL)
def to_pil(step: type_conversion.ToPIL, state: State) -> None:
    state.require_moves(step)
    if state.scale == 0:
        raise MissingKernelError(step, "on unscaled float images")
    state.scale = None  # a uint8 value divided by 255 and multiplied again is the same


@add_step.register(type_conversion.ToFloat)
def to_float(step: type_conversion.ToFloat, state: State) -> None:
    state.scale = (1 if step.version == "v1" else 2) if step.scale else 0


@add_step.register(type_conversion.Normalize)
def normalize(step: type_conversion.Normalize, state: State) -> None:
    if state.std or state.erased:
        raise MissingKernelError(step, "after another one, or after erasing")
    state.mean, state.std = step.mean, step.std
