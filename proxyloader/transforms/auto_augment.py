"""Automatic augmentation: AutoAugment, RandAugment, TrivialAugmentWide, AugMix.

torchvision's own code draws the operations and their magnitudes. Its ``forward`` runs on an image without pixels, and
each operation is recorded instead of applied.
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
"""torchvision's name of an operation, and its magnitude."""

GEOMETRY = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


@dataclass(frozen=True)
class Operations:
    """The operations of automatic augmentation as one step, of which each image takes one branch.

    Attributes:
        warp: common properties of the five geometric operations.
        kind: kind of the image.
        channels: number of channels of the image; Color does nothing to a grey image.
        solarize_up_to: factor from the magnitude of Solarize to its threshold: 255 in v2, and 1 in v1.
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
        """Append the parameters of an operation to a row; None: the image does not change."""
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
        """Append the parameters of consecutive operations, padded to ``layers`` operations that change nothing."""
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
        chains: lists of consecutive operations; each list begins with the input image.
        weights: the numbers drawn for mixing, in the order of drawing, (n,) float32 each.
    """

    chains: list[list[Operation]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


class _Unmixed:
    """Replacement of weights, and of the results that ``forward`` mixes with them. It skips slow tensor arithmetic."""

    def itself(self, *_: Any, **__: Any) -> _Unmixed:
        return self

    __getitem__ = __mul__ = add_ = view = reshape = to = itself


def _recorder_of(transform: Any) -> Callable[[Size], Recording]:
    """Return a function that draws what ``transform`` would do to an image of a given size."""
    recording = Recording()

    def write_down(image: Any, name: str, magnitude: float, *_: Any, **__: Any) -> Any:
        if not hasattr(image, "written_down"):
            recording.chains.append([])
        recording.chains[-1].append((name, magnitude))
        done = image.detach()
        done.written_down = True
        return done

    def dirichlet(parameters: torch.Tensor) -> _Unmixed:
        # Without pixels, the parameters have no values. All parameters of this class are alpha.
        recording.weights.append(torch._sample_dirichlet(torch.full(parameters.shape, transform.alpha))[0])
        return _Unmixed()

    if hasattr(transform, "_sample_dirichlet"):
        transform._sample_dirichlet = dirichlet
    if isinstance(transform, v2.Transform):
        transform._apply_image_or_video_transform = write_down
        forward: Callable[[Any], Any] = transform.forward
    else:
        # v1 applies an operation with a function of its module, so run the same code with that function replaced.
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
    """AutoAugment, RandAugment and TrivialAugmentWide: consecutive operations.

    Attributes:
        choices: the operations to choose from.
        name: name of the class.
        version: v1 or v2.
        arguments: constructor arguments of an instance that draws the same numbers.
        layers: maximum number of operations for one image.
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
    """Weighted sum of the image and of the results of several branches. uint8 results are truncated.

    Parameters: the weights, that of the image itself first, then the parameters of the branches in order.
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
    """``Image.blend`` of the image, at 0, and the result of a branch, at 1. Results are truncated. uint8 only.

    Parameters: the weight of the result, then the parameters of the branch.
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
    """Draws of AugMix.

    Attributes:
        choices: the operations to choose from. torchvision applies them to tensors, even if the input is a PIL image.
        version: v1 or v2.
        arguments: constructor arguments of an instance that draws the same numbers.
        width: number of chains.
        depth: maximum number of operations in a chain.
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
