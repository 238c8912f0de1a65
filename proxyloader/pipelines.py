"""Predefined DALI pipelines for image classification. DALI reads the files, or workers send encoded images.

    pipeline = pipelines.training(file_root="data/train", batch_size=256, num_threads=4, device_id=0)
    iterator = DALIClassificationIterator(pipeline, reader_name="Reader", auto_reset=True)
    server = ProxyServer(pipelines.training(source="proxy", batch_size=256, num_threads=4, device_id=0))

The functions are decorated with ``@pipeline_def``. In addition to their own arguments, they accept those of
``nvidia.dali.Pipeline``, such as ``batch_size``, ``num_threads``, ``device_id``, ``seed`` and ``prefetch_queue_depth``.
DALI draws the random numbers: the same seed gives the same crops and flips, but not torchvision's. Main process only.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ._validation import check_int
from .dali.api import Pipeline, automatic_augmentation, decoder_arguments, do_not_convert, fn, pipeline_def, types

__all__ = ["MEAN", "STD", "from_workers", "training", "validation"]

MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
"""Mean of each channel in ImageNet, in [0, 255]; ``STD`` is the standard deviation."""

STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)

Source = Literal["files", "proxy"] | Callable[[], tuple[Any, ...]]
"""DALI's file reader, the workers of a ``ProxyServer``, or a function that adds a reader and returns its outputs."""

Device = Literal["cpu", "gpu", "mixed"]

PIPELINE_ARGUMENTS = inspect.signature(Pipeline.__init__).parameters.keys()

DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}

MAX_TRANSLATION = 150 / 331  # fraction of the image size, as in torchvision

AUGMENTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "autoaugment": ("auto_augment", {"max_translate_rel": MAX_TRANSLATION}),
    "randaugment": ("rand_augment", {"n": 2, "m": 9, "max_translate_rel": MAX_TRANSLATION}),
    "trivialaugment": ("trivial_augment_wide", {}),
}
"""Functions of ``nvidia.dali.auto_aug`` with their non-default arguments."""


def from_workers() -> tuple[Any, ...]:
    """Return the input of a ``ProxyServer``: encoded images, (bytes,) uint8 each. Workers keep the labels."""
    return (fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8),)


def _pipeline(graph: Callable[..., Any]) -> Callable[..., Any]:
    """DALI's ``pipeline_def``, but the graph may have variadic arguments."""

    @functools.wraps(graph)
    def create(*args: Any, **arguments: Any) -> Any:
        def pipeline() -> Any:
            return graph(*args, **arguments)

        options = {name: arguments.pop(name) for name in PIPELINE_ARGUMENTS & arguments.keys()}
        # With conditionals, which only augmentations need, DALI wraps the errors of the graph.
        has_conditions = arguments.get("augmentation") in AUGMENTATIONS
        return pipeline_def(pipeline, exec_dynamic=True, enable_conditionals=has_conditions)(**options)

    return create


@_pipeline
def training(
    source: Source = "files",
    *,
    size: int = 224,
    area: tuple[float, float] = (0.08, 1.0),
    aspect_ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    augmentation: str | None = None,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    dtype: Any = "float32",
    layout: Literal["CHW", "HWC"] = "CHW",
    device: Device | None = None,
    hw_decoder_load: float = 1.0,
    **reader: Any,
) -> Any:
    """Decode a random crop, resize, augment, flip, normalize.

    Args:
        source: "files": DALI's file reader, named "Reader". "proxy": an input named "images", for ``ProxyServer``.
            Alternatively, a function that adds a reader to the graph and returns its outputs, encoded images first.
        size: height and width of the returned images, in pixels.
        area: (minimum, maximum) area of the crop, as a fraction of the image area.
        aspect_ratio: (minimum, maximum) ratio of width to height of the crop.
        flip: probability of a horizontal flip.
        augmentation: DALI's "autoaugment", "randaugment" or "trivialaugment", applied to the resized image; or None.
        mean, std: mean and standard deviation of each channel, in [0, 255]. Ignored if ``dtype`` is uint8.
        dtype: "float32", "float16" or "uint8", or the torch dtype.
        layout: "CHW" or "HWC".
        device: "cpu" or "gpu"; "mixed" means "gpu". None: "gpu" if the pipeline has a ``device_id``.
        hw_decoder_load: fraction of the JPEGs, in [0, 1], decoded by the GPU's JPEG engines, if it has any.
        reader: arguments of ``fn.readers.file``: ``file_root``, and others such as ``shard_id``, ``num_shards`` and
            ``pad_last_batch``. ``random_shuffle`` is True by default, but False in ``validation``.

    Returns:
        Images, (3, size, size) or (size, size, 3), on ``device``, followed by the labels of files, (1,) integers, or by
        the other outputs of ``source``.

    Raises:
        ValueError: an argument is invalid.
        FileNotFoundError: ``file_root`` is not a folder.

    DALI operators: ``decoders.image_random_crop`` and ``resize``, or on a GPU ``decoders.image`` and
    ``random_resized_crop``; ``random.coin_flip`` and ``crop_mirror_normalize``.
    """
    encoded, labels = _read(source, reader, random_shuffle=True)
    gpu = _get_decoding_gpu(device, hw_decoder_load)
    if not 0 <= flip <= 1:
        raise ValueError(f"flip must be in [0, 1], got {flip!r}")
    check_int("size", size, 1)
    _check_range("area", area, 1.0)
    _check_range("aspect_ratio", aspect_ratio, math.inf)
    crop: dict[str, Any] = {"random_area": area, "random_aspect_ratio": aspect_ratio, "num_attempts": 10}
    resize: dict[str, Any] = {"size": [size, size], "interp_type": types.INTERP_LINEAR, "antialias": True}
    # A CPU decodes only the crop, a GPU the whole image, as this is faster (benchmarks/results/parts.jsonl).
    if gpu is None:
        decoder = decoder_arguments("decoders__ImageRandomCrop", gpu, hw_decoder_load)
        images = fn.resize(fn.decoders.image_random_crop(encoded, **crop, **decoder), **resize)
    else:
        images = fn.decoders.image(encoded, **decoder_arguments("decoders__Image", gpu, hw_decoder_load))
        images = fn.random_resized_crop(images, **crop, **resize)
    if augmentation is not None:
        images = _augment(images, augmentation, size)
    mirror = fn.random.coin_flip(probability=flip)
    images = fn.crop_mirror_normalize(images, mirror=mirror, **_normalize_arguments(mean, std, dtype, layout))
    return images, *(label if gpu is None else label.gpu() for label in labels)


@_pipeline
def validation(
    source: Source = "files",
    *,
    resize: int = 256,
    size: int = 224,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    dtype: Any = "float32",
    layout: Literal["CHW", "HWC"] = "CHW",
    device: Device | None = None,
    hw_decoder_load: float = 1.0,
    **reader: Any,
) -> Any:
    """Decode, resize the shorter side, center crop, normalize.

    The result matches torchvision's ``Resize`` and ``CenterCrop``, on a CPU within 1/255. Where the resized
    side or the crop offset must be rounded, the crop may be shifted by one pixel relative to torchvision's.

    Args:
        resize: length of the shorter side before the center crop, in pixels.

    See ``training`` for other arguments, return values and errors.
    """
    check_int("size", size, 1)
    check_int("resize", resize, 1)
    if resize < size:
        raise ValueError(f"resize must be at least size, got resize={resize} and size={size}")
    encoded, labels = _read(source, reader)
    gpu = _get_decoding_gpu(device, hw_decoder_load)
    images = fn.decoders.image(encoded, **decoder_arguments("decoders__Image", gpu, hw_decoder_load))
    images = fn.resize(images, resize_shorter=resize, interp_type=types.INTERP_LINEAR, antialias=True)
    images = fn.crop_mirror_normalize(images, crop=(size, size), **_normalize_arguments(mean, std, dtype, layout))
    return images, *(label if gpu is None else label.gpu() for label in labels)


def _check_range(name: str, limits: Any, maximum: float) -> None:
    if len(_to_floats(limits)) != 2 or not 0 < limits[0] <= limits[1] <= maximum:
        upper = "" if math.isinf(maximum) else f" <= {maximum}"
        raise ValueError(f"{name} must be (min, max) with 0 < min <= max{upper}, got {limits!r}")


def _to_floats(values: Any) -> list[float]:
    """Convert a sequence of finite numbers to floats; return [] for anything else."""
    try:
        return [float(value) for value in values] if all(map(math.isfinite, values)) else []
    except (TypeError, ValueError):
        return []


@do_not_convert  # type: ignore[untyped-decorator,unused-ignore]
def _read(source: Any, reader: dict[str, Any], **defaults: Any) -> tuple[Any, list[Any]]:
    """Add the source to the graph. Return encoded images, and labels or other outputs."""
    if source == "files":
        if (root := reader.get("file_root")) is None:
            raise ValueError("source='files' requires file_root, a folder with file_root/class/image.jpg")
        if not os.path.isdir(root):  # DALI's error does not say so
            raise FileNotFoundError(f"file_root {os.fspath(root)!r} is not a folder")
        arguments = {**defaults, **reader, "file_root": os.fspath(root)}
        source = functools.partial(fn.readers.file, name="Reader", **arguments)
    elif reader:
        names = ", ".join(reader)
        raise ValueError(
            f"unexpected keyword arguments {names}: reader arguments require source='files', got source={source!r}"
        )
    elif source == "proxy":
        source = from_workers
    elif not callable(source):
        raise ValueError(f"source must be 'files', 'proxy' or a function that adds a reader, got {source!r}")
    encoded, *labels = source()
    return encoded, labels


def _get_decoding_gpu(device: Device | None, hw_decoder_load: float) -> int | None:
    """Return 0 if the pipeline decodes on its GPU, None if on the CPU."""
    has_gpu = Pipeline.current().device_id is not None
    if device not in (None, "cpu", "gpu", "mixed"):
        raise ValueError(f"device must be 'cpu', 'gpu' or 'mixed', got {device!r}")
    if device in ("gpu", "mixed") and not has_gpu:
        raise ValueError(f"device={device!r} requires a pipeline with a device_id, got device_id=None")
    if not (isinstance(hw_decoder_load, (int, float)) and 0 <= hw_decoder_load <= 1):
        raise ValueError(f"hw_decoder_load must be in [0, 1], got {hw_decoder_load!r}")
    return 0 if has_gpu and device != "cpu" else None


def _augment(images: Any, augmentation: str, size: int) -> Any:
    if augmentation not in AUGMENTATIONS:
        raise ValueError(f"augmentation must be None or one of {', '.join(AUGMENTATIONS)}, got {augmentation!r}")
    function, settings = AUGMENTATIONS[augmentation]
    if "max_translate_rel" in settings:
        settings = {**settings, "shape": (size, size)}
    # DALI's policies use deprecated operator names, and DALI's warnings bypass the filters.
    with warnings.catch_warnings(record=True):
        return automatic_augmentation(function)(images, **settings)


def _normalize_arguments(mean: Sequence[float], std: Sequence[float], dtype: Any, layout: str) -> dict[str, Any]:
    """Return the arguments of ``crop_mirror_normalize``."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if layout not in ("CHW", "HWC"):
        raise ValueError(f"layout must be 'CHW' or 'HWC', got {layout!r}")
    arguments = {"dtype": DTYPES[name], "output_layout": layout}
    if name == "uint8":
        return arguments
    means, stds = _to_floats(mean), _to_floats(std)
    if len(means) not in (1, 3) or len(stds) != len(means) or min(stds) <= 0:
        raise ValueError(f"mean and std must have 1 or 3 values, std positive, got mean={mean!r} and std={std!r}")
    return arguments | {"mean": means, "std": stds}
