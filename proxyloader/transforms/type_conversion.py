"""Steps that convert images: PIL image to tensor, uint8 to float, normalization."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torchvision.transforms import transforms as v1, v2
from torchvision.transforms._presets import ImageClassification

from .plan import ImageState, MemoryOrder, Step, Translation, Untranslatable, Version
from .registry import rule, translate, version_of


@dataclass(frozen=True)
class ToTensor(Step):
    """Conversion of a PIL image to a uint8 tensor (C, H, W) with the same values."""

    # See ImageState. They are not compared, because the result does not depend on them.
    order: MemoryOrder = field(default="HWC", compare=False, repr=False)
    pure: bool = field(default=True, compare=False, repr=False)
    needs_kernels: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, kind="tensor", order=self.order, pure=self.pure)


@dataclass(frozen=True)
class ToFloat(Step):
    """Conversion from uint8 to float32, if ``scale`` is set with a division by 255, or in v2 a product with 1 / 255."""

    scale: bool
    version: Version = "v1"
    needs_kernels: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, dtype="float32")


@dataclass(frozen=True)
class Normalize(Step):
    """``functional.normalize``: (value - mean) / std for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    needs_kernels: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True


class ToPIL(Step):
    """``functional.to_pil_image`` of a uint8 tensor, or of one divided by 255."""

    def output_state(self, state: ImageState) -> ImageState:
        return replace(state, kind="pil", dtype="uint8")


@rule(v1.ToTensor, v2.ToTensor, v1.PILToTensor, v2.PILToTensor, v2.ToImage)
def to_tensor(transform: Any, state: ImageState) -> Translation:
    if state.kind == "tensor":  # classes of v2 and timm leave it unchanged; those of v1 raise an error
        if type(transform) in (v1.ToTensor, v1.PILToTensor):
            raise Untranslatable
        return Translation()
    if not isinstance(transform, (v1.ToTensor, v2.ToTensor)):
        return Translation((ToTensor(pure=not isinstance(transform, v2.ToImage)),))
    if torch.get_default_dtype() is not torch.float32:
        raise Untranslatable
    return Translation((ToTensor("CHW"), ToFloat(scale=True)))


@rule(v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype)
def to_dtype(transform: Any, state: ImageState) -> Translation:
    if state.kind == "pil" and (isinstance(transform, v1.ConvertImageDtype) or isinstance(transform.dtype, dict)):
        raise Untranslatable  # a dict is mainly for the other inputs
    if state.kind == "pil" or transform.dtype is getattr(torch, state.dtype):  # v2 classes leave PIL images unchanged
        return Translation()
    if transform.dtype is torch.float32:
        return Translation((ToFloat(bool(getattr(transform, "scale", True)), version_of(transform)),))
    raise Untranslatable


@rule(v2.Identity, v2.ToPureTensor)
def as_it_is(transform: Any, state: ImageState) -> Translation:
    """Return no steps. ToPureTensor only changes the class of a tensor, and batches are plain tensors anyway."""
    return Translation()


@rule(v1.Normalize, v2.Normalize)
def normalize(transform: Any, state: ImageState) -> Translation:
    if state.dtype != "float32":
        raise Untranslatable
    return Translation((normalization(transform.mean, transform.std, state),))


def _as_floats(values: Any) -> tuple[float, ...]:
    if type(values) in (list, tuple) and set(map(type, values)) == {float}:
        return tuple(values)  # faster
    if isinstance(values, torch.Tensor) and values.requires_grad:
        raise Untranslatable
    return tuple(torch.as_tensor(values, dtype=torch.float64).reshape(-1).tolist())


def normalization(mean: Any, std: Any, state: ImageState) -> Normalize:
    mean, std = map(_as_floats, (mean, std))
    if not {len(mean), len(std)} <= {1, state.channels} or 0 in std:
        raise Untranslatable
    return Normalize(mean * (state.channels // len(mean)), std * (state.channels // len(std)))


@rule(ImageClassification)
def image_classification(transform: Any, state: ImageState) -> Translation:
    """Translate the preset of torchvision's weights: resize, center crop, conversion to float, normalization."""
    resize = v1.Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
    last = v1.ConvertImageDtype(torch.float32), v1.Normalize(transform.mean, transform.std)
    parts = [resize, v1.CenterCrop(transform.crop_size), v2.PILToTensor(), *last]  # it leaves tensors unchanged
    return translate(v1.Compose(parts), state)[0]
