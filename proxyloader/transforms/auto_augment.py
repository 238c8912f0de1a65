"""Automatic augmentation: AutoAugment, RandAugment, TrivialAugmentWide, AugMix.

torchvision's own code samples the operations and their magnitudes: its ``forward`` runs on an image without data, and
operations are recorded instead of applied.
"""

from __future__ import annotations

import functools
import math
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchvision.transforms import autoaugment as v1
from torchvision.transforms import v2

from ..lifetime import cached_property
from . import color
from .params import Version, meta_image, version_of
from .plan import Branch, Draws, ImageState, Kind, OneOf, Size, Step, Untranslatable
from .registry import rule
from .warp import Affine, affine, make_warp, rotation

Arguments = tuple[tuple[str, Any], ...]
"""Names and values of constructor arguments."""

BranchParams = tuple[int, Sequence[float]]
"""Index of a branch of a OneOf, and its parameters."""


def put_chain(choice: OneOf, chain: Sequence[BranchParams], layers: int, row: list[float]) -> None:
    """Append the parameters of consecutive branches, padded to ``layers`` with the first branch, which has no steps."""
    for chosen, numbers in [*chain, *[(0, ())] * (layers - len(chain))]:
        choice.put(chosen, row, *numbers)


@dataclass(frozen=True)
class Operations:
    """The operations that torchvision chooses from, sampled by the code of one of its classes.

    Attributes:
        warp: step for the five geometric operations.
        channels: number of channels of the image; Color does nothing to a grayscale image.
        name, version, arguments: class, version and arguments of an instance that draws the same numbers.
    """

    warp: Affine
    channels: int
    name: str
    version: Version
    arguments: Arguments

    @cached_property
    def branches(self) -> dict[str, Branch]:
        """The branch of each operation, by its name in torchvision."""
        how = self.warp.kind, self.warp.version
        return {
            "Identity": (),
            **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), (self.warp,)),
            "Brightness": (color.Brightness(*how),),
            "Color": (color.Saturation(*how),) if self.channels == 3 else (),
            "Contrast": (color.Contrast(*how),),
            "Sharpness": (color.Sharpness(*how),),
            "Posterize": (color.Posterize(),),
            "Solarize": (color.Solarize(),),
            "AutoContrast": (color.Autocontrast(*how),),
            "Equalize": (color.Equalize(),),
            "Invert": (color.Invert(),),
        }

    @cached_property
    def choice(self) -> OneOf:
        return OneOf(tuple(dict.fromkeys(self.branches.values())))

    @cached_property
    def _chosen(self) -> dict[str, int]:
        return {name: self.choice.branches.index(branch) for name, branch in self.branches.items()}

    def draw(self, size: Size) -> tuple[list[list[BranchParams]], list[torch.Tensor]]:
        """Sample chains of operations for an image of ``size``, and the weights for mixing them, (n,) float32 each."""
        chains, weights = _recorder(self.name, self.version, self.arguments).draw(size)
        return [[self.branch_params(*operation, size) for operation in chain] for chain in chains], weights

    def branch_params(self, name: str, magnitude: float, size: Size) -> BranchParams:
        chosen = self._chosen[name]
        return chosen, self._numbers(name, magnitude, size) if chosen else ()

    def _numbers(self, name: str, magnitude: float, size: Size) -> Sequence[float]:
        if name == "Rotate":
            return rotation(size, magnitude, self.warp, version=self.version)
        if name.startswith("Shear"):
            degrees = math.degrees(math.atan(magnitude))
            shear = (degrees, 0.0) if name == "ShearX" else (0.0, degrees)
            return affine(size, self.warp, 0.0, (0, 0), 1.0, shear, (0.0, 0.0), self.version)
        if name.startswith("Translate"):
            shift = int(magnitude)
            shifts = (shift, 0) if name == "TranslateX" else (0, shift)
            return affine(size, self.warp, 0.0, shifts, 1.0, (0.0, 0.0), version=self.version)
        if name == "Posterize":
            return (int(magnitude),)
        if name == "Solarize":  # v1 samples the threshold, v2 a fraction of the maximum
            return (color.solarize_threshold(magnitude * (255.0 if self.version == "v2" else 1.0), self.warp.kind),)
        return () if name in ("AutoContrast", "Equalize", "Invert") else (1.0 + magnitude,)


class _NoMixing:
    """Stand-in for the weights and results that ``forward`` mixes, to skip slow tensor arithmetic."""

    def return_self(self, *_: Any, **__: Any) -> _NoMixing:
        return self

    __getitem__ = __mul__ = add_ = view = reshape = to = return_self


Recording = tuple[list[list[tuple[str, float]]], list[torch.Tensor]]
"""Chains of operations with their magnitudes, each starting from the input image, and weights."""


class _Recorder(threading.local):
    """Samples what an instance would do to an image of a given size. Each thread has its own instance."""

    def __init__(self, name: str, version: str, arguments: Arguments) -> None:
        self.draw = _drawing(getattr(v2 if version == "v2" else v1, name)(**dict(arguments)))


_recorder = functools.lru_cache(maxsize=64)(_Recorder)  # creating an instance takes longer than sampling


def _drawing(transform: Any) -> Callable[[Size], Recording]:
    """Return a function that records what a transform samples, one call at a time."""
    chains: list[list[tuple[str, float]]] = []
    weights: list[torch.Tensor] = []

    def record(image: Any, name: str, magnitude: float, *_: Any, **__: Any) -> Any:
        if not hasattr(image, "recorded"):
            chains.append([])
        chains[-1].append((name, magnitude))
        output = image.detach()
        output.recorded = True
        return output

    def dirichlet(parameters: torch.Tensor) -> _NoMixing:
        # Without data, the parameters have no values. All parameters of this class are alpha.
        weights.append(torch._sample_dirichlet(torch.full(parameters.shape, transform.alpha))[0])
        return _NoMixing()

    if hasattr(transform, "_sample_dirichlet"):
        transform._sample_dirichlet = dirichlet
    if isinstance(transform, v2.Transform):
        transform._apply_image_or_video_transform = record
        forward: Callable[[Any], Any] = transform.forward
    else:
        # v1 applies operations with a module-level function, so run the same code with that function replaced.
        transform._augmentation_space = functools.lru_cache(maxsize=8)(transform._augmentation_space)
        code = type(transform).forward
        forward = types.FunctionType(code.__code__, {**code.__globals__, "_apply_op": record}).__get__(transform)

    def draw(size: Size) -> Recording:
        chains.clear()
        weights.clear()
        forward(meta_image(*size))
        return chains, weights

    return draw


@dataclass(frozen=True)
class Automatic(Step):
    """AutoAugment, RandAugment and TrivialAugmentWide: at most ``layers`` consecutive operations."""

    source: Operations
    layers: int

    @property
    def operations(self) -> Branch:
        return (self.source.choice,) * self.layers

    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        chains, _ = self.source.draw(size)
        put_chain(self.source.choice, chains[0] if chains else [], self.layers, row)
        return size


def _automatic(transform: Any, state: ImageState, layers: int, *arguments: str) -> Branch:
    if getattr(transform, "num_magnitude_bins", 2) < 2:
        raise Untranslatable
    return (Automatic(_operations(transform, state, state.kind, *arguments), layers),)


def _operations(transform: Any, state: ImageState, kind: Kind, *arguments: str) -> Operations:
    color.require_uint8(state)
    warp = make_warp(Affine, transform, state, kind)
    given = tuple((name, getattr(transform, name)) for name in arguments)
    return Operations(warp, state.channels, type(transform).__name__, version_of(transform), given)


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
    """Weighted sum of the image and the results of several branches. uint8 results are truncated.

    Parameters: the weights, that of the image itself first, then the parameters of the branches in order.
    """

    branches: tuple[Branch, ...]

    @property
    def num_params(self) -> int:
        return 1 + len(self.branches) + sum(step.num_params for branch in self.branches for step in branch)


@dataclass(frozen=True)
class Blend(Step):
    """``Image.blend`` of the image (0) and the result of a branch (1). Results are truncated. uint8 only.

    Parameters: the weight of the result, then the parameters of the branch.
    """

    branch: Branch

    @property
    def branches(self) -> tuple[Branch, ...]:
        return (self.branch,)

    @property
    def num_params(self) -> int:
        return 1 + sum(step.num_params for step in self.branch)


@dataclass(frozen=True)
class AugMix(Draws[Mixture]):
    """Draws of AugMix. torchvision applies the operations to tensors, even if the input is a PIL image."""

    source: Operations
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: list[float]) -> Size:
        chains, ((own, others), shares) = self.source.draw(size)
        row.extend([float(own), *(shares * others).tolist()])
        for chain in chains:
            put_chain(self.source.choice, chain, len(self.step.branches[0]), row)
        return size


@rule(v1.AugMix, v2.AugMix)
def aug_mix(transform: Any, state: ImageState) -> Branch:
    names = ("severity", "mixture_width", "chain_depth", "alpha", "all_ops")
    source = _operations(transform, state, "tensor", *names)
    depth = int(transform.chain_depth) if transform.chain_depth > 0 else 3
    return (AugMix(Mixture(((source.choice,) * depth,) * int(transform.mixture_width)), source),)
