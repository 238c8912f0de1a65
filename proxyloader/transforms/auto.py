"""Automatic augmentation: AutoAugment, RandAugment, TrivialAugmentWide, AugMix.

What is done and how strongly is found by torchvision's own code: its ``forward`` runs on an image without pixels, and
each operation that it would do is written down in place of being done.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchvision.transforms import autoaugment as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .color import Autocontrast, Brightness, Contrast, Equalize, Invert, Posterize, Saturation, Sharpness, Solarize
from .drawing import like, version_of
from .plan import Branch, ImageState, OneOf, Size, Step
from .registry import rule
from .warp import Affine, Kind, affine, rotation, warp_fill, warp_interpolation

Operation = tuple[str, float]
"""torchvision's name of it, and its magnitude."""

NAMES = (
    *("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness"),
    *("Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"),
)
GEOMETRY = NAMES[:5]


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

    @property
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
            self.choice.put(7, row, magnitude * self.solarize_up_to)
        else:
            self.choice.put({"Brightness": 2, "Color": 3, "Contrast": 4, "Sharpness": 5}[name], row, 1.0 + magnitude)

    def _geometry(self, name: str, magnitude: float, size: Size) -> list[float]:
        if name == "Rotate":
            return rotation(size, magnitude, self.kind)
        if name.startswith("Shear"):
            degrees = math.degrees(math.atan(magnitude))
            shear = (degrees, 0.0) if name == "ShearX" else (0.0, degrees)
            center = (0.0, 0.0)
            return affine(size, 0.0, (0, 0), 1.0, shear, center)
        shift = int(magnitude)
        return affine(size, 0.0, (shift, 0) if name == "TranslateX" else (0, shift), 1.0, (0.0, 0.0))


def _recording(transform: Any) -> Callable[[Size], list[Operation]]:
    """A function that draws what ``transform`` would do to an image of a size."""
    found: list[Operation] = []

    def write_down(image: Any, name: str, magnitude: float, *_: Any, **__: Any) -> Any:
        found.append((name, magnitude))
        return image

    if isinstance(transform, v2.Transform):
        transform._apply_image_or_video_transform = write_down
        forward: Callable[[Any], Any] = transform.forward
    else:
        # The operation is a function of the module: the same code, in a module of which that function is ours.
        transform._augmentation_space = functools.lru_cache(maxsize=64)(transform._augmentation_space)
        code = type(transform).forward
        forward = types.FunctionType(code.__code__, {**code.__globals__, "_apply_op": write_down}).__get__(transform)

    def draw(size: Size) -> list[Operation]:
        found.clear()
        forward(like(*size))
        return list(found)

    return draw


@functools.lru_cache(maxsize=64)
def _recorder(cls: type, arguments: tuple[tuple[str, Any], ...]) -> Callable[[Size], list[Operation]]:
    return _recording(cls(**dict(arguments)))


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
    def columns(self) -> int:
        return self.choices.choice.columns * self.layers

    @property
    def drawn(self) -> str:
        return f"operations, magnitudes: {self.name}.forward"

    def draw(self, size: Size, row: list[float]) -> Size:
        cls = getattr(v2 if self.version == "v2" else v1, self.name)
        drawn = _recorder(cls, self.arguments)(size)
        for layer in range(self.layers):
            self.choices.put(drawn[layer] if layer < len(drawn) else None, size, row)
        return size

    def state_after(self, state: ImageState) -> ImageState:
        return state


def _automatic(transform: Any, state: ImageState, layers: int, *arguments: str) -> Branch:
    if state.dtype != "uint8":
        raise UnsupportedTransformError("it works on whole levels (uint8); put the conversion to float after it")
    version = version_of(transform)
    warp = Affine(warp_interpolation(transform.interpolation), warp_fill(transform.fill, state), state.kind)
    choices = Operations(warp, state.kind, state.channels, 255.0 if version == "v2" else 1.0)
    given = tuple((name, getattr(transform, name)) for name in arguments)
    return (Automatic(choices, type(transform).__name__, version, given, layers),)


@rule(v1.AutoAugment, v2.AutoAugment)
def auto_augment(transform: Any, state: ImageState) -> Branch:
    return _automatic(transform, state, 2, "policy")


@rule(v1.RandAugment, v2.RandAugment)
def rand_augment(transform: Any, state: ImageState) -> Branch:
    return _automatic(transform, state, int(transform.num_ops), "num_ops", "magnitude", "num_magnitude_bins")


@rule(v1.TrivialAugmentWide, v2.TrivialAugmentWide)
def trivial_augment_wide(transform: Any, state: ImageState) -> Branch:
    return _automatic(transform, state, 1, "num_magnitude_bins")
