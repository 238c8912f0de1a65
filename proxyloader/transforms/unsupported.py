"""Unsupported transforms: the reason, and what to do instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UnsupportedTransformError

LEAVE_OUT = "Remove it, or leave it to torchvision in the workers (translate=True, the default)"
STOCK_LOADER = "Leave it to torchvision in the workers (translate=True, the default)"
ON_BATCHES = f"{STOCK_LOADER}, or apply it to the batches of the loader"
LISTED = "docs/transforms.md lists the supported transforms, and `proxyloader explain` checks a transform"
MIXES = "it mixes the images of a batch, but gets one image here. Call it in a collate_fn, or on batches in the loop"
NAFLEX = f"it is for batches of patches or of images of different sizes (NaFlex). {STOCK_LOADER}"
BOXES = f"it operates on boxes or keypoints, but the dataset's transform gets only the image. {LEAVE_OUT}"
CALLS_BY_ITSELF = (
    "it is a custom object that calls the transforms it holds, which is supported only as the dataset's entire "
    "transform. Move the surrounding transforms into it"
)
HAS_HOOKS = f"it has hooks or an overridden forward, which only torch calls. {STOCK_LOADER}"
TAKES_ONE = "an earlier transform returns multiple images, but torchvision's v1 classes accept only one. Use v2.{name}"
TAKES_ALL = (
    "an earlier transform returns multiple images, and it is unknown how a function handles them. v2.ToImage() and "
    "v2.ToDtype(torch.float32, scale=True) convert each of them: a batch is then a list of tensors, which "
    "torch.stack(images, 1) combines"
)

REFUSED = {
    "ClampBoundingBoxes": BOXES,
    "ClampKeyPoints": BOXES,
    "ConvertBoundingBoxFormat": BOXES,
    "CutMix": MIXES,
    "ElasticTransform": f"it displaces each pixel by a random offset, for which there is no kernel. {LEAVE_OUT}",
    "GaussianNoise": f"there is no kernel for it. {LEAVE_OUT}",
    "JPEG": f"there is no kernel for it. {LEAVE_OUT}",
    "Lambda": f"it calls a Python function, which kernels cannot run. {ON_BATCHES}",
    "LinearTransformation": (
        f"it multiplies the flattened image by a matrix, for which there is no kernel. {ON_BATCHES}"
    ),
    "MixUp": MIXES,
    "ObjectDetection": "it is for a different task. Use ToTensor(), which is equivalent",
    "OpticalFlow": f"it takes two images. {STOCK_LOADER}",
    "RandomIoUCrop": BOXES,
    "SanitizeBoundingBoxes": BOXES,
    "SanitizeKeyPoints": BOXES,
    "SemanticSegmentation": "it is for a different task. Use Resize, ToTensor and Normalize with its parameters",
    "Sequential": "it may hold arbitrary modules. Put the transforms into a Compose",
    "SetClampingMode": BOXES,
    "ToPILImage": "images must end up as tensors. Put transforms of PIL images before the conversion, and remove this",
    "UniformTemporalSubsample": f"it samples frames from a video. {STOCK_LOADER}",
    "VideoClassification": f"it works on videos. {STOCK_LOADER}",
}
"""Reasons by the name of a class in torch, or in torchvision, where v1 and v2 share it.

``tests/transforms/test_unsupported.py`` compares the table with the installed torchvision."""

REFUSED_TIMM = {
    "CenterCropToSequence": NAFLEX,
    "FastCollateMixup": MIXES,
    "Mixup": MIXES,
    "MultiLabelTarget": "it transforms labels. Use it as the dataset's target_transform",
    "NaFlexMixup": MIXES,
    "PatchRandomErasing": NAFLEX,
    "Patchify": NAFLEX,
    "RandomCropToSequence": NAFLEX,
    "RandomResizedCropToSequence": NAFLEX,
    "ResizeKeepRatioToSequence": NAFLEX,
    "ResizeToSequence": NAFLEX,
    "TfPreprocessTransform": "it runs in TensorFlow. Use create_transform without tf_preprocessing=True",
    "ToNumpy": "it returns NumPy arrays, but images must be converted to tensors. Use MaybePILToTensor() instead",
}
"""Reasons by the name of a class in timm. ``tests/transforms/test_timm.py`` compares the table with the installed
timm."""

REFUSED_PROXYLOADER = {
    "Proxy": (
        "it belongs to a server and must be the dataset's entire transform: transform=server.proxy. Move other steps "
        "to the server's pipeline, or to a custom dataset that calls server.proxy last"
    ),
}
"""Reasons by the name of a class in this package."""


def unsupported(reason: str, argument: str) -> UnsupportedTransformError:
    """Return the error for an argument that is not translated."""
    return UnsupportedTransformError(reason, argument=argument)


def invalid(reason: str, argument: str) -> UnsupportedTransformError:
    """Return the error for an argument that torchvision also rejects or fails with."""
    return UnsupportedTransformError(reason, code="invalid", argument=argument)


def wrong_place(reason: str, argument: str = "") -> UnsupportedTransformError:
    """Return the error for a transform that is not translated for images at this point."""
    return UnsupportedTransformError(reason, code="wrong-place", argument=argument)


def missing_rule_error(transform: Any, translated: Iterable[type]) -> UnsupportedTransformError:
    """Return the error for a transform without a rule, with the reason and advice.

    Args:
        transform: the transform.
        translated: the classes that have a rule.
    """
    cls = type(transform)
    classes = set(translated)
    # timm's rules are registered lazily.
    names = sorted({each.__name__ for each in classes if each.__module__.startswith("torchvision.")})
    if isinstance(transform, type):
        return _not_a_transform(f"expected an instance, {transform.__name__}(...), got the class")
    tables = {"torch": REFUSED, "torchvision": REFUSED, "timm": REFUSED_TIMM, "proxyloader": REFUSED_PROXYLOADER}
    refused = tables.get(cls.__module__.partition(".")[0], {})
    if cls.__name__ in refused:
        return UnsupportedTransformError(refused[cls.__name__], code="unsupported-class")
    if isinstance(transform, tuple):
        return _not_a_transform(
            "expected a single transform, got a tuple, as returned by timm's create_transform(..., separate=True). "
            "Put its items into a Compose, or use torch.utils.data.DataLoader for this dataset"
        )
    if isinstance(transform, list):
        return _not_a_transform("expected a single transform, got a list. Put its items into a Compose")
    if hasattr(transform, "transform") and hasattr(transform, "__getitem__"):
        return _not_a_transform("expected a transform, got a dataset. Use its .transform")
    if not callable(transform):
        return _not_a_transform(f"expected a transform, got an object that is not callable. {LEAVE_OUT}")
    base = next((base for base in cls.__mro__ if base in classes), None)
    if base is not None:
        return UnsupportedTransformError(
            f"it is a subclass of {base.__name__} and may behave differently. Use {base.__name__} itself",
            code="subclass",
        )
    spelled = transform.__name__ if inspect.isroutine(transform) else cls.__name__
    if similar := _similar_names(spelled, names):
        advice = f"Use {similar[0]}, if it is equivalent. {ON_BATCHES}"
    elif inspect.isroutine(transform) or isinstance(transform, functools.partial):
        advice = f"If it calls transforms, put them into a Compose. {ON_BATCHES}. {LISTED}"
    else:
        advice = f"{ON_BATCHES}. {LISTED}"
    return UnsupportedTransformError(f"it is not translated. {advice}", code="unsupported-class")


def _similar_names(spelled: str, names: Sequence[str]) -> list[str]:
    """Return the names similar to this one, also when the common prefix Random is ignored."""
    found = difflib.get_close_matches(spelled, names, cutoff=0.65)
    words = {name: name.removeprefix("Random") for name in (spelled, *found)}
    return [name for name in found if difflib.get_close_matches(words[spelled], [words[name]], cutoff=0.65)]


def _not_a_transform(reason: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(reason, code="no-transform")
