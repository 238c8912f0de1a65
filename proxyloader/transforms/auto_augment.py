"""Automatic augmentation: AutoAugment, RandAugment, TrivialAugmentWide, AugMix.

torchvision's own code samples the operations and their magnitudes: its ``forward`` runs on an image without data, and
operations are recorded instead of applied.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchvision.transforms import autoaugment as v1, v2

from .._random_state import preserve_rng
from . import color
from .plan import Branch, ImageState, Kind, OneOf, ParamRow, Size, Step, Translation, Untranslatable, count_params
from .random_numbers import in_thread, meta_image, rounded
from .registry import rule, version_of
from .warp import Affine, affine, make_warp, rotation

BranchParams = tuple[int, Sequence[float]]  # index of a branch of a OneOf, and its parameters


def put_chain(choice: OneOf, chain: Sequence[BranchParams], layers: int, row: ParamRow) -> None:
    """Append the parameters of consecutive branches, padded to ``layers`` with the first branch, which has no steps."""
    for chosen, numbers in [*chain, *[(0, ())] * (layers - len(chain))]:
        choice.put(chosen, row, *numbers)


def _branches(warp: Affine, channels: int) -> dict[str, Branch]:
    """Return the branch of each operation, by its name in torchvision. Color does nothing to a grayscale image."""
    how, names = (warp.kind, warp.version), ("Brightness", "Contrast", "Sharpness", "AutoContrast")
    return {
        "Identity": (),
        **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), (warp,)),
        "Color": (color.Adjustment("saturation", *how),) if channels == 3 else (),
        **{name: (color.Adjustment(name.lower(), *how),) for name in names},
        **{name: (color.Adjustment(name.lower()),) for name in ("Posterize", "Solarize", "Equalize", "Invert")},
    }


def _numbers(name: str, magnitude: float, size: Size, warp: Affine) -> Sequence[float]:
    if name == "Rotate":
        return rotation(size, magnitude, warp)
    if name.startswith("Shear"):
        degrees = math.degrees(math.atan(magnitude))
        shear = (degrees, 0.0) if name == "ShearX" else (0.0, degrees)
        return affine(size, warp, 0.0, (0, 0), 1.0, shear, (0.0, 0.0))
    if name.startswith("Translate"):
        shift = int(magnitude)
        return affine(size, warp, 0.0, (shift, 0) if name == "TranslateX" else (0, shift), 1.0, (0.0, 0.0))
    if name == "Posterize":
        return (int(magnitude),)
    if name == "Solarize":  # v1 samples the threshold, v2 a fraction of the maximum
        return (color.solarize_threshold(magnitude * (255.0 if warp.version == "v2" else 1.0), warp.kind),)
    return () if name in ("AutoContrast", "Equalize", "Invert") else (1.0 + magnitude,)


class _NoMixing:
    """Stand-in for the weights and results that ``forward`` mixes, to skip slow tensor arithmetic."""

    def return_self(self, *_: Any, **__: Any) -> _NoMixing:
        return self

    __getitem__ = __mul__ = add_ = view = reshape = to = return_self


_RECORDED = object()  # stands for the result of an operation


class _Drawn(float):
    """Stands for a float32 tensor of one random number: compares in float32."""

    def item(self) -> float:
        return self

    def __le__(self, probability: float) -> bool:
        return float(self) <= rounded(probability)


class _DrawnInteger(int):
    """Stands for an int64 tensor of one random number."""

    def item(self) -> int:
        return self


class _Magnitudes(list[float]):
    """Stands for a float tensor, (bins,), whose elements take longer to read."""

    ndim = 1

    def __getitem__(self, index: Any) -> Any:
        return _Drawn(super().__getitem__(index))


def _as_lists(found: Any) -> Any:
    """Return magnitudes, or all those of a dict of v1, as lists."""
    if isinstance(found, dict):
        return {name: (_as_lists(magnitudes), signed) for name, (magnitudes, signed) in found.items()}
    return _Magnitudes(found.tolist()) if getattr(found, "ndim", 0) else found


def _listing(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function return lists of magnitudes, and keep those of the last sizes."""
    return functools.lru_cache(maxsize=8)(lambda *args: _as_lists(make(*args)))


@functools.lru_cache(maxsize=64)
def _as_tensor(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


class _Torch:
    """Stand-in for torch in the code of transforms, which draws from ``in_thread.numbers``, without new tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, values: list[float], **_: Any) -> torch.Tensor:
        return _as_tensor(tuple(values))

    def rand(self, size: tuple[int, ...]) -> Any:
        drawn = [_Drawn(in_thread.numbers.fraction()) for _ in range(math.prod(size))]
        return drawn if len(drawn) > 1 else drawn[0]

    def randint(self, high: int, size: tuple[int, ...], low: int = 0, dtype: Any = None) -> Any:
        draw = in_thread.numbers.integer
        drawn = [_DrawnInteger(low + draw(high - low)) for _ in range(math.prod(size))]
        return drawn if len(drawn) > 1 else drawn[0]


class _Recorder(threading.local):
    """Samples what a transform would do to an image of a given size, one call at a time. Each thread has its own."""

    def __init__(self, transform: Any) -> None:
        self.chains: list[list[tuple[str, float]]] = []  # operations and magnitudes of each chain of the input image
        self.weights: list[list[float]] = []  # for mixing the chains
        transform = copy.copy(transform)
        if hasattr(transform, "_sample_dirichlet"):
            transform._sample_dirichlet = self._sample_dirichlet
        if isinstance(transform, v2.Transform):
            transform._apply_image_or_video_transform = self._record
            for name in ("_AUGMENTATION_SPACE", "_PARTIAL_AUGMENTATION_SPACE"):
                space = getattr(transform, name, {})
                setattr(transform, name, {key: (_listing(make), signed) for key, (make, signed) in space.items()})
        else:
            transform._augmentation_space = _listing(transform._augmentation_space)
        # The same code, with other globals: v1 applies operations with a module-level function.
        for name in ("forward", "get_params", "_get_random_item"):
            if (method := inspect.getattr_static(transform, name, None)) is not None:
                code = getattr(method, "__func__", method)
                if not getattr(code, "__globals__", {}).get("__name__", "").startswith("torchvision."):
                    raise Untranslatable  # other code wraps it, which may call torch itself
                names = {**code.__globals__, "_apply_op": self._record, "torch": _Torch()}
                function = types.FunctionType(code.__code__, names, name, code.__defaults__, code.__closure__)
                setattr(transform, name, function if isinstance(method, staticmethod) else function.__get__(transform))
        self._forward: Callable[[Any], Any] = transform.forward

    def _record(self, image: Any, name: str, magnitude: float, *_: Any, **__: Any) -> Any:
        if image is not _RECORDED:
            self.chains.append([])
        self.chains[-1].append((name, magnitude))
        return _RECORDED

    def _sample_dirichlet(self, parameters: torch.Tensor) -> _NoMixing:
        in_thread.numbers.write()
        (weights,) = torch._sample_dirichlet(parameters).tolist()
        in_thread.numbers.read()
        self.weights.append(weights)
        return _NoMixing()

    def __call__(self, size: Size) -> None:
        self.chains.clear()
        self.weights.clear()
        self._forward(meta_image(*size))


Draw = Callable[[Size], tuple[list[list[BranchParams]], list[list[float]]]]
"""Function that samples chains of operations for an image of a size, and the weights for mixing them."""


def _operations(transform: Any, state: ImageState, kind: Kind) -> tuple[OneOf, Draw]:
    """Return the operations that torchvision chooses from, and how it draws them."""
    if state.dtype != "uint8":
        raise Untranslatable
    warp = make_warp(Affine, transform.interpolation, transform.fill, state, kind, version_of(transform))
    branches, recorder = _branches(warp, state.channels), _Recorder(transform)
    choice = OneOf(tuple(dict.fromkeys(branches.values())))
    numbered = {name: choice.branches.index(branch) for name, branch in branches.items()}

    def params(name: str, magnitude: float, size: Size) -> BranchParams:
        chosen = numbered[name]
        return chosen, _numbers(name, magnitude, size, warp) if chosen else ()

    def draw(size: Size) -> tuple[list[list[BranchParams]], list[list[float]]]:
        recorder(size)
        return [[params(*each, size) for each in chain] for chain in recorder.chains], recorder.weights

    try:
        with preserve_rng():
            torch.default_generator.manual_seed(0)
            for _ in range(20):
                draw((64, 64))
    except Exception as error:  # wrong arguments, or a later torchvision that calls other functions of torch
        raise Untranslatable from error
    return choice, draw


@rule(v1.AutoAugment, v1.RandAugment, v1.TrivialAugmentWide, v2.AutoAugment, v2.RandAugment, v2.TrivialAugmentWide)
def automatic(transform: Any, state: ImageState) -> Translation:
    if getattr(transform, "num_magnitude_bins", 2) < 2:
        raise Untranslatable
    choice, draw = _operations(transform, state, state.kind)
    policies = getattr(transform, "policies", getattr(transform, "_policies", ((None,),)))
    layers = int(getattr(transform, "num_ops", max(map(len, policies))))

    def sample(size: Size, row: ParamRow) -> Size:
        chains, _ = draw(size)
        put_chain(choice, chains[0] if chains else [], layers, row)
        return size

    return Translation((choice,) * layers, sample, "numbers")


@dataclass(frozen=True)
class Mixture(Step):
    """Weighted sum of the image and the results of several branches. uint8 results are truncated.

    Parameters: the weights, that of the image itself first, then the parameters of the branches in order.
    """

    branches: tuple[Branch, ...]

    @property
    def num_params(self) -> int:
        return 1 + len(self.branches) + sum(map(count_params, self.branches))


@dataclass(frozen=True)
class Blend(Step):
    """``Image.blend`` of the image (0) and the result of a branch (1). Results are truncated. uint8 only.

    Parameters: the weight of the result, then the parameters of the branch.
    """

    branch: Branch

    @property
    def num_params(self) -> int:
        return 1 + count_params(self.branch)


@rule(v1.AugMix, v2.AugMix)
def aug_mix(transform: Any, state: ImageState) -> Translation:
    """Translate AugMix, which applies the operations to tensors, even if the input is a PIL image."""
    if not isinstance(transform.alpha, float):  # torch raises an error for integers
        raise Untranslatable
    choice, draw = _operations(transform, state, "tensor")
    depth = int(transform.chain_depth) if transform.chain_depth > 0 else 3

    def sample(size: Size, row: ParamRow) -> Size:
        chains, ((own, others), shares) = draw(size)
        row.extend([own, *(np.float32(share * others).item() for share in shares)])
        for chain in chains:
            put_chain(choice, chain, depth, row)
        return size

    mixture = Mixture(((choice,) * depth,) * int(transform.mixture_width))
    return Translation((mixture,), sample, "numbers")
