"""Automatic augmentation: AutoAugment, RandAugment, TrivialAugmentWide, AugMix.

What is done and how strongly is found by torchvision's own code: its ``forward`` runs on an image without pixels, and
each operation that it would do is written down in place of being done.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torchvision.transforms import autoaugment as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .color import (
    FLOAT32,
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    Invert,
    Posterize,
    Saturation,
    Sharpness,
    Solarize,
    solarize_threshold,
    whole_levels,
)
from .params import meta_image, version_of
from .plan import Branch, ImageState, OneOf, Size, Step, Tolerance, output_state
from .registry import rule
from .warp import Affine, Kind, affine, rotation, warp_fill, warp_interpolation

Operation = tuple[str, float]
"""torchvision's name of it, and its magnitude."""

GEOMETRY = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


@dataclass(frozen=True)
class Operations:
    """The operations that automatic augmentation chooses from, as one step of which each image takes one branch.

    Attributes:
        warp: what the five geometric ones have in common.
        kind: of the image.
        channels: of the image; a grey one has no colour.
        solarize_up_to: what a magnitude of 1 is to Solarize; 255 in v2, and 1 in v1, whose magnitudes are thresholds.
    """

    warp: Affine
    kind: Kind
    channels: int
    solarize_up_to: float

    @functools.cached_property
    def choice(self) -> OneOf:
        color: Branch = (Saturation(self.kind),) if self.channels == 3 else ()
        branches: tuple[Branch, ...] = (
            (),
            (self.warp,),
            (Brightness(self.kind),),
            color,
            (Contrast(self.kind),),
            (Sharpness(self.kind),),
            (Posterize(),),
            (Solarize(),),
            (Autocontrast(self.kind),),
            (Equalize(),),
            (Invert(),),
        )
        return OneOf(branches)

    def put(self, operation: Operation | None, size: Size, row: list[float]) -> None:
        """Write an operation into a row; None: the image stays as it is."""
        name, magnitude = operation or ("Identity", 0.0)
        if name == "Identity" or (name == "Color" and self.channels == 1):
            self.choice.put(0, row)
        elif name in GEOMETRY:
            self.choice.put(1, row, *self._geometry(name, magnitude, size))
        elif name in ("AutoContrast", "Equalize", "Invert"):
            self.choice.put({"AutoContrast": 8, "Equalize": 9, "Invert": 10}[name], row)
        elif name == "Posterize":
            self.choice.put(6, row, int(magnitude))
        elif name == "Solarize":
            self.choice.put(7, row, solarize_threshold(magnitude * self.solarize_up_to, self.kind))
        else:
            self.choice.put({"Brightness": 2, "Color": 3, "Contrast": 4, "Sharpness": 5}[name], row, 1.0 + magnitude)

    def put_chain(self, chain: Sequence[Operation], layers: int, size: Size, row: list[float]) -> None:
        """Write operations that follow one upon the other; where they are fewer than ``layers``, nothing after them."""
        for layer in range(layers):
            self.put(chain[layer] if layer < len(chain) else None, size, row)

    def _geometry(self, name: str, magnitude: float, size: Size) -> list[float]:
        if name == "Rotate":
            return rotation(size, magnitude, self.warp)
        if name.startswith("Shear"):
            degrees = math.degrees(math.atan(magnitude))
            shear = (degrees, 0.0) if name == "ShearX" else (0.0, degrees)
            center = (0.0, 0.0)
            return affine(size, self.warp, 0.0, (0, 0), 1.0, shear, center)
        shift = int(magnitude)
        return affine(size, self.warp, 0.0, (shift, 0) if name == "TranslateX" else (0, shift), 1.0, (0.0, 0.0))


@dataclass
class Recording:
    """What ``forward`` would have done to one image.

    Attributes:
        chains: operations one upon the other; each chain begins with the image as it came in.
        weights: what was drawn for mixing, in the order of drawing, (n,) float32 each.
    """

    chains: list[list[Operation]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


class _Unmixed:
    """In place of weights, and of what ``forward`` mixes with them: arithmetic on images without pixels is slow."""

    def itself(self, *_: Any, **__: Any) -> _Unmixed:
        return self

    __getitem__ = __mul__ = add_ = view = reshape = to = itself


def _recorder_of(transform: Any) -> Callable[[Size], Recording]:
    """A function that draws what ``transform`` would do to an image of a size."""
    recording = Recording()

    def write_down(image: Any, name: str, magnitude: float, *_: Any, **__: Any) -> Any:
        if not hasattr(image, "written_down"):
            recording.chains.append([])
        recording.chains[-1].append((name, magnitude))
        done = image.detach()
        done.written_down = True
        return done

    def dirichlet(parameters: torch.Tensor) -> _Unmixed:
        # The parameters have no values where the image has no pixels; those of a class are all alpha.
        recording.weights.append(torch._sample_dirichlet(torch.full(parameters.shape, transform.alpha))[0])
        return _Unmixed()

    if hasattr(transform, "_sample_dirichlet"):
        transform._sample_dirichlet = dirichlet
    if isinstance(transform, v2.Transform):
        transform._apply_image_or_video_transform = write_down
        forward: Callable[[Any], Any] = transform.forward
    else:
        # The operation is a function of the module: the same code, in a module of which that function is ours.
        transform._augmentation_space = functools.lru_cache(maxsize=64)(transform._augmentation_space)
        code = type(transform).forward
        forward = types.FunctionType(code.__code__, {**code.__globals__, "_apply_op": write_down}).__get__(transform)

    def draw(size: Size) -> Recording:
        recording.chains, recording.weights = [], []
        forward(meta_image(*size))
        return recording

    return draw


@functools.lru_cache(maxsize=64)
def _recorder(name: str, version: str, arguments: tuple[tuple[str, Any], ...]) -> Callable[[Size], Recording]:
    return _recorder_of(getattr(v2 if version == "v2" else v1, name)(**dict(arguments)))


@dataclass(frozen=True)
class Automatic(Step):
    """AutoAugment, RandAugment and TrivialAugmentWide: one operation after the other.

    Attributes:
        choices: what is chosen from.
        name: of the class.
        version: v1 or v2.
        arguments: that make an instance whose draws these are.
        layers: most operations that one image gets.
    """

    choices: Operations
    name: str
    version: str
    arguments: tuple[tuple[str, Any], ...]
    layers: int

    @property
    def operations(self) -> Branch:
        return (self.choices.choice,) * self.layers

    @property
    def params_doc(self) -> str:
        return f"operations, magnitudes: {self.name}.forward"

    def sample_params(self, size: Size, row: list[float]) -> Size:
        chains = _recorder(self.name, self.version, self.arguments)(size).chains
        self.choices.put_chain(chains[0] if chains else [], self.layers, size, row)
        return size


def _automatic(transform: Any, state: ImageState, layers: int, *arguments: str) -> Branch:
    given = tuple((name, getattr(transform, name)) for name in arguments)
    if getattr(transform, "num_magnitude_bins", 2) < 2:
        raise UnsupportedTransformError(
            "num_magnitude_bins must be 2 or more, or torchvision divides by zero",
            code="invalid",
            argument="num_magnitude_bins",
        )
    choices = _choices(transform, state, state.kind)
    return (Automatic(choices, type(transform).__name__, version_of(transform), given, layers),)


def _choices(transform: Any, state: ImageState, kind: Kind) -> Operations:
    whole_levels(state)
    warp = Affine(warp_interpolation(transform.interpolation), warp_fill(transform.fill, state), kind)
    return Operations(warp, kind, state.channels, 255.0 if version_of(transform) == "v2" else 1.0)


@rule(v1.AutoAugment, v2.AutoAugment)
def auto_augment(transform: Any, state: ImageState) -> Branch:
    return _automatic(transform, state, 2, "policy")


@rule(v1.RandAugment, v2.RandAugment)
def rand_augment(transform: Any, state: ImageState) -> Branch:
    return _automatic(transform, state, int(transform.num_ops), "num_ops", "magnitude", "num_magnitude_bins")


@rule(v1.TrivialAugmentWide, v2.TrivialAugmentWide)
def trivial_augment_wide(transform: Any, state: ImageState) -> Branch:
    return _automatic(transform, state, 1, "num_magnitude_bins")


@dataclass(frozen=True)
class Mixture(Step):
    """A weighted sum of the image and of what each of several branches makes of it; whole levels are cut off.

    Takes the weights, the image's own first, and then the numbers of the branches, one after the other.
    """

    branches: tuple[Branch, ...]
    slow_on_cpu: ClassVar[bool] = True
    closeness: ClassVar[Tolerance] = Tolerance(
        0.3, 1, 25, "equalized images are within a level, and the weighted sum is cut off"
    )

    @property
    def num_params(self) -> int:
        return 1 + len(self.branches) + sum(step.num_params for branch in self.branches for step in branch)

    def output_state(self, state: ImageState) -> ImageState:
        for branch in self.branches:
            output_state(branch, state)
        return state


@dataclass(frozen=True)
class Blend(Step):
    """``Image.blend`` of the image, at 0, and what a branch makes of it, at 1; what is after the point is cut off.

    Takes the share of the other one, and then the numbers of the branch. Whole levels only.
    """

    branch: Branch
    slow_on_cpu: ClassVar[bool] = True
    closeness: ClassVar[Tolerance] = FLOAT32

    @property
    def branches(self) -> tuple[Branch, ...]:
        return (self.branch,)

    @property
    def num_params(self) -> int:
        return 1 + sum(step.num_params for step in self.branch)


@dataclass(frozen=True)
class AugMix(Step):
    """AugMix.

    Attributes:
        choices: what each operation is chosen from. torchvision does them to tensors, also where a PIL image came.
        version: v1 or v2.
        arguments: that make an instance whose draws these are.
        width: how many chains.
        depth: most operations of a chain.
    """

    choices: Operations
    version: str
    arguments: tuple[tuple[str, Any], ...]
    width: int
    depth: int

    params_doc: ClassVar[str] = "chains of operations, magnitudes, weights: AugMix.forward"

    @property
    def mixture(self) -> Mixture:
        return Mixture(((self.choices.choice,) * self.depth,) * self.width)

    @property
    def operations(self) -> Branch:
        return (self.mixture,)

    def sample_params(self, size: Size, row: list[float]) -> Size:
        recorded = _recorder("AugMix", self.version, self.arguments)(size)
        (own, others), shares = recorded.weights
        row.extend([float(own), *(shares * others).tolist()])
        for chain in recorded.chains:
            self.choices.put_chain(chain, self.depth, size, row)
        return size


@rule(v1.AugMix, v2.AugMix)
def aug_mix(transform: Any, state: ImageState) -> Branch:
    names = ("severity", "mixture_width", "chain_depth", "alpha", "all_ops")
    given = tuple((name, getattr(transform, name)) for name in names)
    depth = int(transform.chain_depth) if transform.chain_depth > 0 else 3
    choices = _choices(transform, state, "tensor")
    return (AugMix(choices, version_of(transform), given, int(transform.mixture_width), depth),)
