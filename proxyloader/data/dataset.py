"""Wrap a dataset so that it returns encoded images. Main process, when the loader is created."""

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
    """A dataset prepared for the workers.

    Attributes:
        dataset: the user's dataset with translated transforms.
        plans: the plans that it is known to use, by key.
        is_deferred: whether its images stay undecoded; see NOTE [ Intercepted transform calls ].
        reason: why torch's loader reads the dataset; "" if it does not.
        warnings: avoidable causes of slow loading.
        not_translated: untranslated transforms, with reasons. The first epoch shows whether they slow down loading.
        never_uses_dali: whether its samples never contain anything for DALI.
    """

    dataset: Any
    plans: dict[str, Plan]
    is_deferred: bool = False
    reason: str = ""
    warnings: tuple[str, ...] = ()
    not_translated: tuple[str, ...] = ()
    never_uses_dali: bool = False


def get_length(dataset: Any) -> int | None:
    """Return the length of a dataset, or None if it has none, such as a wrapper whose ``__len__`` raises an error."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def get_sources(dataset: Any) -> list[Any]:
    """Return the datasets inside nested ``Subset`` and ``ConcatDataset``, or the dataset itself."""
    if type(dataset) is Subset:
        return get_sources(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [source for each in dataset.datasets for source in get_sources(each)]
    return [dataset]


def wrap(dataset: D, *, compile: Callable[[Any], Any] = compile_transforms) -> D:
    """Return a shallow copy of ``dataset`` whose images stay encoded and are transformed in DALI.

    ``DataLoader`` calls this function itself. The original dataset is not modified. The copy differs in these
    attributes: ``transform`` is compiled. If the ``loader`` of a ``DatasetFolder`` is one of torchvision's PIL loaders,
    its replacement defers decoding, or, if torchvision runs the entire transform, adds the file name to Pillow's
    errors. ``load_bytes`` of timm's ``ImageDataset`` is True if its images are RGB. All other attributes and methods,
    such as ``target_transform``, ``classes``, ``samples`` and ``__getitem__``, are those of the original.

    Args:
        dataset: ``DatasetFolder``, ``ImageFolder``, ``ImageNet`` and their subclasses; ``Subset``, ``random_split`` and
            ``ConcatDataset`` of such datasets, possibly nested; or any dataset that applies ``self.transform``,
            which is or contains a torchvision or timm transform, to an RGB image. In a loader's workers, JPEGs that
            such a dataset opens with Pillow stay encoded as well, and Pillow decodes other images.
        compile: function that returns the replacement of a transform.

    Returns:
        The copy, or the dataset itself if nothing is replaced.

    Raises:
        UnsupportedTransformError: the transform is not translated.
    """
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        return _replace_attributes(dataset, dataset=wrap(dataset.dataset, compile=compile))
    if isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__:
        return _replace_attributes(dataset, datasets=[wrap(part, compile=compile) for part in dataset.datasets])
    transform = getattr(dataset, "transform", None)
    if _is_timm(dataset, "AugMixDataset"):  # ``transform`` is only the first of its three
        return dataset
    if transform is None or isinstance(transform, (Proxy, WorkerTransform)) or not is_image_dataset(dataset, transform):
        return dataset
    compiled = compile(transform)
    changed: dict[str, Any] = {"transform": compiled}
    if isinstance(getattr(dataset, "transforms", None), StandardTransform):
        changed["transforms"] = StandardTransform(compiled, getattr(dataset, "target_transform", None))
    if isinstance(dataset, DatasetFolder) and dataset.loader in (default_loader, pil_loader):
        uses_torchvision = not find_compiled(compiled) and not (compiled is transform and PILLOW_SUPPORTS_LAZY)
        changed["loader"] = open_decoded if uses_torchvision else open_lazy
    if isinstance(compiled, CompiledTransform) and _is_timm(dataset, "ImageDataset"):
        changed["load_bytes"] = getattr(dataset, "input_img_mode", None) == "RGB"
    return _replace_attributes(dataset, **changed)


def open_lazy(path: str) -> Image.Image | EncodedImage:
    """Open an image like torchvision's loaders, but defer decoding, and raise ImageError if it cannot be read."""
    deferral = current()
    if PILLOW_SUPPORTS_LAZY and deferral is not None and not deferral.is_active:
        return open_decoded(path)
    encoded = EncodedImage.open(path)
    return create_lazy_image(encoded) if PILLOW_SUPPORTS_LAZY else encoded


def collect_compiled(dataset: Any) -> list[CompiledTransform]:
    """Return the compiled transforms of a wrapped dataset."""
    if isinstance(dataset, Subset):
        return collect_compiled(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [each for part in dataset.datasets for each in collect_compiled(part)]
    attributes = [value for value in getattr(dataset, "__dict__", {}).values() if callable(value)]
    attributes.append(getattr(dataset, "transform", None))  # for classes with __slots__
    return [each for value in attributes for each in find_compiled(value)]


def collect_plans(dataset: Any) -> dict[str, Plan]:
    """Return the plans of a wrapped dataset by key."""
    return {each.plan.key: each.plan for each in collect_compiled(dataset)}


def get_sample_path(dataset: Any, index: Any) -> str:
    """Return the path of a sample of timm's ImageDataset, which returns only bytes; "" for other datasets."""
    return str(dataset.filename(index, absolute=True)) if _is_timm(dataset, "ImageDataset") else ""


def is_image_dataset(dataset: Any, transform: Any) -> bool:
    """Return whether ``transform`` transforms images, rather than graphs or audio in other libraries."""
    return isinstance(dataset, VisionDataset) or is_transform(transform) or bool(find_nested(transform))


def _is_timm(dataset: Any, name: str) -> bool:
    """Return whether the dataset uses ``__getitem__`` of this timm class, without importing timm."""
    method = getattr(type(dataset), "__getitem__", None)
    name_parts = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    return name_parts == ("timm.data.dataset", f"{name}.__getitem__")


def _replace_attributes(dataset: D, /, **changed: Any) -> D:
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
                f"{kind}.{name} cannot be set ({error}), but the loader replaces this attribute in a copy of the "
                f"dataset. Make it an ordinary attribute of {kind}, or use torch.utils.data.DataLoader"
            ) from error
    return wrapped
