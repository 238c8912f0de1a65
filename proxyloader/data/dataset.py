"""Wrap a dataset so that it returns encoded images. Main process, when the loader is built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader, pil_loader
from torchvision.datasets.vision import StandardTransform, VisionDataset

from ..transforms.nested import find_nested, is_transform
from ..transforms.plan import Plan
from .compiled_transform import CompiledTransform, WorkerTransform, compile_transforms, find_compiled
from .deferral import current
from .encoded_image import EncodedImage, open_decoded
from .lazy_image import PILLOW_SUPPORTS_LAZY, create_lazy_image
from .placeholders import Proxy

D = TypeVar("D")


class Translated(NamedTuple):
    """A dataset as the workers read it.

    Attributes:
        dataset: the user's dataset, with its transforms translated.
        plans: the plans that it is known to need, by key.
        is_late: whether its images stay undecoded; see NOTE [ Intercepted transform calls ].
        reason: why torch loads the dataset by itself; "" if it does not.
        warnings: what makes it slower than it might be.
        not_translated: the transforms that are not translated, and why. The first epoch shows if that makes it slower.
        is_torchs: whether nothing in its samples can be for DALI.
    """

    dataset: Any
    plans: dict[str, Plan]
    is_late: bool = False
    reason: str = ""
    warnings: tuple[str, ...] = ()
    not_translated: tuple[str, ...] = ()
    is_torchs: bool = False


def get_length(dataset: Any) -> int | None:
    """Return the length of a dataset, or None. One that wraps others may have the method, and no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def get_sources(dataset: Any) -> list[Any]:
    """Return the datasets that a ``Subset`` or ``ConcatDataset`` is made of, also of nested ones; of others, itself."""
    if type(dataset) is Subset:
        return get_sources(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [source for each in dataset.datasets for source in get_sources(each)]
    return [dataset]


def wrap(dataset: D, *, compile: Callable[[Any], Any] = compile_transforms) -> D:
    """Return a shallow copy of ``dataset`` whose images stay encoded and are transformed in DALI.

    ``DataLoader`` does this by itself. The original dataset does not change. The copy differs in these attributes:
    ``transform`` is compiled. The ``loader`` of a ``DatasetFolder`` with one of torchvision's PIL loaders is replaced
    by one whose images are decoded late; if the whole transform is left to torchvision, by one that names the file if
    Pillow cannot decode it. ``load_bytes`` of timm's ``ImageDataset`` is True if its images are RGB. All other
    attributes and methods, such as ``target_transform``, ``classes``, ``samples`` and ``__getitem__``, are those of the
    original.

    Args:
        dataset: ``DatasetFolder``, ``ImageFolder``, ``ImageNet`` and their subclasses; ``Subset``, ``random_split`` and
            ``ConcatDataset`` of such datasets, also nested; any dataset that keeps a torchvision or timm transform, or
            an object that calls some, in ``.transform`` and calls it with an RGB image. In a loader's workers JPEGs
            that the latter opens with Pillow stay encoded, too; Pillow decodes other images.
        compile: function that returns the replacement of a transform.

    Returns:
        The copy; or the dataset itself if nothing is replaced.

    Raises:
        UnsupportedTransformError: the transform is not translated.
    """
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return _with(dataset, dataset=wrap(dataset.dataset, compile=compile))
    if isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__:
        return _with(dataset, datasets=[wrap(part, compile=compile) for part in dataset.datasets])
    transform = getattr(dataset, "transform", None)
    if _is_of_timm(dataset, "AugMixDataset"):  # its transform is only the first of three
        return dataset
    if transform is None or isinstance(transform, (Proxy, WorkerTransform)) or not is_image_dataset(dataset, transform):
        return dataset
    compiled = compile(transform)
    changed: dict[str, Any] = {"transform": compiled}
    if isinstance(getattr(dataset, "transforms", None), StandardTransform):
        changed["transforms"] = StandardTransform(compiled, getattr(dataset, "target_transform", None))
    if isinstance(dataset, DatasetFolder) and dataset.loader in (default_loader, pil_loader):
        is_left = not find_compiled(compiled) and not (compiled is transform and PILLOW_SUPPORTS_LAZY)
        changed["loader"] = open_decoded if is_left else open_lazy
    if isinstance(compiled, CompiledTransform) and _is_of_timm(dataset, "ImageDataset"):
        changed["load_bytes"] = getattr(dataset, "input_img_mode", None) == "RGB"
    return _with(dataset, **changed)


def open_lazy(path: str) -> Image.Image | EncodedImage:
    """Open an image as torchvision's loaders do, but raise ImageError if it cannot be read, and decode it late."""
    deferral = current()
    if PILLOW_SUPPORTS_LAZY and deferral is not None and not deferral.is_active:
        return open_decoded(path)
    encoded = EncodedImage.open(path)
    return create_lazy_image(encoded) if PILLOW_SUPPORTS_LAZY else encoded


def collect_plans(dataset: Any) -> dict[str, Plan]:
    """Return the plans that a wrapped dataset refers to, by key. Each of them needs a pipeline."""
    if isinstance(dataset, Subset):
        return collect_plans(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return {key: plan for part in dataset.datasets for key, plan in collect_plans(part).items()}
    attributes = [value for value in getattr(dataset, "__dict__", {}).values() if callable(value)]
    attributes.append(getattr(dataset, "transform", None))  # also found if the class has __slots__
    return {each.plan.key: each.plan for value in attributes for each in find_compiled(value)}


def get_sample_path(dataset: Any, index: Any) -> str:
    """Return the path of a sample of timm's dataset, which returns bytes without a path; "" for other datasets."""
    return str(dataset.filename(index, absolute=True)) if _is_of_timm(dataset, "ImageDataset") else ""


def is_image_dataset(dataset: Any, transform: Any) -> bool:
    """Return whether ``transform`` is for images. Datasets of other libraries have one for graphs or audio."""
    return isinstance(dataset, VisionDataset) or is_transform(transform) or bool(find_nested(transform))


def _is_of_timm(dataset: Any, name: str) -> bool:
    """Return whether the dataset uses the ``__getitem__`` of timm's class of this name. timm is not imported."""
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
        except AttributeError as error:  # a property without a setter, or a frozen dataclass
            kind = type(dataset).__name__
            raise TypeError(
                f"{kind}.{name} cannot be set ({error}), and the loader puts a transform of its own there, in a copy "
                f"of the dataset. Let {kind} keep it in an ordinary attribute, or use torch.utils.data.DataLoader"
            ) from error
    return wrapped
