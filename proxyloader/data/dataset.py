"""Wrap a dataset so that it hands out encoded images. Main process, when the loader is built."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader, pil_loader
from torchvision.datasets.vision import StandardTransform, VisionDataset

from ..transforms.nested import find_nested, is_transform
from ..transforms.plan import Plan
from .compiled_transform import CompiledTransform, WorkerTransform, compile_transforms, compiled_in, with_max_pixels
from .encoded_image import EncodedImage
from .placeholders import Proxy

D = TypeVar("D")


def wrap(dataset: D, max_pixels: int | None = None, *, compile: Callable[[Any], Any] = compile_transforms) -> D:
    """A shallow copy of ``dataset`` whose images travel encoded and are transformed in DALI.

    ``DataLoader`` does this by itself, and the original stays as it is. What is exchanged in the copy: ``transform``,
    by its compiled equal; in a ``DatasetFolder`` with one of torchvision's PIL loaders the ``loader``, by one that
    reads bytes (where all is left to torchvision, by one that names the file when Pillow cannot decode it); in timm's
    ``ImageDataset`` ``load_bytes``, which becomes True. All else, ``target_transform``, ``classes``, ``samples`` and
    the dataset's own ``__getitem__`` among it, is the user's.

    Args:
        dataset: ``DatasetFolder``, ``ImageFolder``, ``ImageNet`` and what inherits from them; ``Subset``,
            ``random_split`` and ``ConcatDataset`` of such, nested at will; any dataset that keeps a torchvision
            or timm transform in ``.transform``, or an object that calls some, and calls it with an RGB image (then
            Pillow decodes, in the worker).
        max_pixels: most that an image may have; by default what Pillow opens.
        compile: makes what stands in the place of a transform.

    Returns:
        The copy; or the dataset itself where there is nothing to exchange.

    Raises:
        UnsupportedTransformError: the transform is not translated.
    """
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return _with(dataset, dataset=wrap(dataset.dataset, max_pixels, compile=compile))
    if isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__:
        return _with(dataset, datasets=[wrap(part, max_pixels, compile=compile) for part in dataset.datasets])
    transform = getattr(dataset, "transform", None)
    if _is_of_timm(dataset, "AugMixDataset"):  # its transform is the first of three
        return dataset
    if transform is None or isinstance(transform, (Proxy, WorkerTransform)) or not is_for_images(dataset, transform):
        return dataset
    compiled = compile(transform)
    if max_pixels is not None:
        compiled = with_max_pixels(compiled, max_pixels)
    changed: dict[str, Any] = {"transform": compiled}
    if isinstance(getattr(dataset, "transforms", None), StandardTransform):
        changed["transforms"] = StandardTransform(compiled, getattr(dataset, "target_transform", None))
    if isinstance(dataset, DatasetFolder) and dataset.loader in (default_loader, pil_loader):
        opens: Callable[..., Any] = EncodedImage.open if compiled_in(compiled) else _opened_by_pillow
        changed["loader"] = opens if max_pixels is None else functools.partial(opens, max_pixels=max_pixels)
    if isinstance(compiled, CompiledTransform) and _is_of_timm(dataset, "ImageDataset"):
        changed["load_bytes"] = getattr(dataset, "input_img_mode", None) == "RGB"
    return _with(dataset, **changed)


def _opened_by_pillow(path: str, max_pixels: int | None = None) -> Image.Image:
    """What torchvision's loaders give; what cannot be read raises an ImageError."""
    return EncodedImage.open(path, max_pixels).decoded()


def plans_in(dataset: Any) -> dict[str, Plan]:
    """The plans that a wrapped dataset refers to, by key: each needs a pipeline."""
    if isinstance(dataset, Subset):
        return plans_in(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return {key: plan for part in dataset.datasets for key, plan in plans_in(part).items()}
    attributes = [value for value in getattr(dataset, "__dict__", {}).values() if callable(value)]
    attributes.append(getattr(dataset, "transform", None))  # where there are __slots__
    return {each.plan.key: each.plan for value in attributes for each in compiled_in(value)}


def path_of(dataset: Any, index: Any) -> str:
    """The file of a sample that is handed out as bytes, of timm's dataset; "" elsewhere."""
    return str(dataset.filename(index, absolute=True)) if _is_of_timm(dataset, "ImageDataset") else ""


def is_for_images(dataset: Any, transform: Any) -> bool:
    """Other libraries' datasets have a ``transform`` too, and it may be about graphs or sound."""
    return isinstance(dataset, VisionDataset) or is_transform(transform) or bool(find_nested(transform))


def _is_of_timm(dataset: Any, name: str) -> bool:
    """It hands out images as timm's class of this name does. timm is not imported for that."""
    method = getattr(type(dataset), "__getitem__", None)
    named = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    return named == ("timm.data.dataset", f"{name}.__getitem__")


def _with(dataset: D, /, **changed: Any) -> D:
    changed = {name: value for name, value in changed.items() if getattr(dataset, name) is not value}
    if not changed:
        return dataset
    wrapped = copy.copy(dataset)
    for name, value in changed.items():
        try:
            setattr(wrapped, name, value)
        except AttributeError as error:  # a property, or a dataclass that is frozen
            kind = type(dataset).__name__
            raise TypeError(
                f"{kind}.{name} cannot be set ({error}), and the loader puts a transform of its own there, in a copy "
                f"of the dataset. Let {kind} keep it in an ordinary attribute, or use torch.utils.data.DataLoader"
            ) from error
    return wrapped
