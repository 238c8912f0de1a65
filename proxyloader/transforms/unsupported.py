"""Unsupported transforms: the reason, and what to do instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UnsupportedTransformError

LEAVE_OUT = "Leave it out, or to torchvision in the workers (translate=True, the default)"
STOCK_LOADER = "Leave it to torchvision in the workers (translate=True, the default)"
ON_BATCHES = f"{STOCK_LOADER}, or apply it to the batches of the loader"
LISTED = "docs/transforms.md lists what is translated, and `proxyloader explain` shows it of a transform"
MIXES = "it mixes the images of a batch, and here is one image. Call it in a collate_fn, or in the loop on each batch"
NAFLEX = f"it is for images that differ in size within a batch, or come as patches (NaFlex). {STOCK_LOADER}"
BOXES = f"it is about boxes or points, and the dataset's transform gets the image alone. {LEAVE_OUT}"
CALLS_BY_ITSELF = (
    "it is an object of your own that calls the transforms which it holds, and that is translated where it is the "
    "dataset's whole transform. Do there what stands around it here"
)
HAS_HOOKS = f"it has hooks, or a forward of its own, which only torch calls. {STOCK_LOADER}"
TAKES_ONE = "there are several images of one here, and torchvision's v1 classes take one image. Use v2.{name}"
TAKES_ALL = (
    "there are several images of one here, and what a function does with them is not known. v2.ToImage() and "
    "v2.ToDtype(torch.float32, scale=True) take each of them: a batch is as many tensors then, which "
    "torch.stack(images, 1) puts together"
)

REFUSED = {
    "ClampBoundingBoxes": BOXES,
    "ClampKeyPoints": BOXES,
    "ConvertBoundingBoxFormat": BOXES,
    "CutMix": MIXES,
    "ElasticTransform": f"it displaces each pixel by a random offset, which DALI supports on GPUs only. {LEAVE_OUT}",
    "Lambda": f"it calls a function, which cannot be said in DALI operators. {ON_BATCHES}",
    "LinearTransformation": (
        f"it multiplies the whole image by one matrix, for which DALI has no operator. {ON_BATCHES}"
    ),
    "MixUp": MIXES,
    "ObjectDetection": "it is for another task. In its place: ToTensor(), which does the same",
    "OpticalFlow": f"it takes two images. {STOCK_LOADER}",
    "RandomIoUCrop": BOXES,
    "SanitizeBoundingBoxes": BOXES,
    "SanitizeKeyPoints": BOXES,
    "SemanticSegmentation": "it is for another task. In its place: Resize, ToTensor and Normalize, with its numbers",
    "Sequential": "it holds modules of any kind. Put the transforms into a Compose",
    "SetClampingMode": BOXES,
    "ToPILImage": "images end as tensors here. Put what needs a PIL image before the conversion, and leave this out",
    "UniformTemporalSubsample": f"it takes frames out of a video. {STOCK_LOADER}",
    "VideoClassification": f"it works on videos. {STOCK_LOADER}",
}
"""Reasons by the name of a class of torch, or of torchvision, where it is the same in v1 and v2.

``tests/transforms/test_unsupported.py`` compares the table with the installed torchvision."""

REFUSED_OF_TIMM = {
    "CenterCropToSequence": NAFLEX,
    "FastCollateMixup": MIXES,
    "Mixup": MIXES,
    "MultiLabelTarget": "it is about labels. Use it as the dataset's target_transform",
    "NaFlexMixup": MIXES,
    "PatchRandomErasing": NAFLEX,
    "Patchify": NAFLEX,
    "RandomCropToSequence": NAFLEX,
    "RandomResizedCropToSequence": NAFLEX,
    "ResizeKeepRatioToSequence": NAFLEX,
    "ResizeToSequence": NAFLEX,
    "TfPreprocessTransform": "TensorFlow does it. Use create_transform without tf_preprocessing=True",
    "ToNumpy": "it makes numpy arrays, and images end as tensors here. Put MaybePILToTensor() in its place",
}
"""Reasons by the name of a class of timm. ``tests/transforms/test_timm.py`` compares the table with the installed
timm."""

REFUSED_OF_OURS = {
    "Proxy": (
        "it is a server's, and the dataset's whole transform: transform=server.proxy. Do the rest in the server's "
        "pipeline, or before, in a dataset of your own that calls server.proxy last"
    ),
}
"""Reasons by the name of a class of this package."""


def unsupported(reason: str, argument: str) -> UnsupportedTransformError:
    """Return the error for an argument that is not translated."""
    return UnsupportedTransformError(reason, argument=argument)


def invalid(reason: str, argument: str) -> UnsupportedTransformError:
    """Return the error for an argument that torchvision refuses, too, or fails with."""
    return UnsupportedTransformError(reason, code="invalid", argument=argument)


def wrong_place(reason: str, argument: str = "") -> UnsupportedTransformError:
    """Return the error for a transform that is not translated for the images here."""
    return UnsupportedTransformError(reason, code="wrong-place", argument=argument)


def error_of(transform: Any, translated: Iterable[type]) -> UnsupportedTransformError:
    """Return the error for a transform without a rule, with the reason and what to do.

    Args:
        transform: the transform.
        translated: the classes that have a rule.
    """
    cls = type(transform)
    classes = set(translated)
    # The rules of timm are registered only after one of its transforms was met.
    names = sorted({each.__name__ for each in classes if each.__module__.startswith("torchvision.")})
    if isinstance(transform, type):
        return _no_transform(f"it is the class, where an instance, {transform.__name__}(...), is expected")
    tables = {"torch": REFUSED, "torchvision": REFUSED, "timm": REFUSED_OF_TIMM, "proxyloader": REFUSED_OF_OURS}
    refused = tables.get(cls.__module__.partition(".")[0], {})
    if cls.__name__ in refused:
        return UnsupportedTransformError(refused[cls.__name__], code="unsupported-class")
    if isinstance(transform, tuple):
        return _no_transform(
            "it is a tuple, as of timm's create_transform(..., separate=True), and one transform is expected. "
            "Put what is in it into a Compose, or use torch.utils.data.DataLoader for this dataset"
        )
    if isinstance(transform, list):
        return _no_transform("it is a list, and one transform is expected. Put what is in it into a Compose")
    if hasattr(transform, "transform") and hasattr(transform, "__getitem__"):
        return _no_transform("it is a dataset, and a transform is expected. Take its .transform")
    if not callable(transform):
        return _no_transform(f"it cannot be called, so it is no transform. {LEAVE_OUT}")
    base = next((base for base in cls.__mro__ if base in classes), None)
    if base is not None:
        return UnsupportedTransformError(
            f"it is a class of its own, derived from {base.__name__}, and may do anything. Use {base.__name__} itself",
            code="subclass",
        )
    spelled = transform.__name__ if inspect.isroutine(transform) else cls.__name__
    if near := _near(spelled, names):
        advice = f"Use {near[0]}, if that does the same. {ON_BATCHES}"
    elif inspect.isroutine(transform) or isinstance(transform, functools.partial):
        advice = f"If it calls transforms, put its transforms into a Compose. {ON_BATCHES}. {LISTED}"
    else:
        advice = f"{ON_BATCHES}. {LISTED}"
    return UnsupportedTransformError(f"it is not translated to DALI. {advice}", code="unsupported-class")


def _near(spelled: str, names: Sequence[str]) -> list[str]:
    """Return the names that are near this one, also without the word Random, which says little."""
    found = difflib.get_close_matches(spelled, names, cutoff=0.65)
    words = {name: name.removeprefix("Random") for name in (spelled, *found)}
    return [name for name in found if difflib.get_close_matches(words[spelled], [words[name]], cutoff=0.65)]


def _no_transform(reason: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(reason, code="no-transform")
