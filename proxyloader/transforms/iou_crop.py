"""The crop of v2's RandomIoUCrop, drawn in NumPy. Runs in the worker.

NOTE [ Trials of RandomIoUCrop ]
RandomIoUCrop draws up to 40 crops for an overlap, and compares each of them with the boxes in about thirty operations
on tensors of a few elements, which take milliseconds per image. The code below draws the numbers of all trials at once,
tests all crops together with the same float32 arithmetic, and then advances torch's generator by the numbers that
torchvision would have drawn. Before first use, crops, masks and generator states are compared with those of the
installed torchvision. If they differ, torchvision draws the crops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from .plan import Size

MakeParams = Callable[[Any, list[Any]], dict[str, Any]]
"""``RandomIoUCrop.make_params``: returns the parameters of a crop, given the transform and the inputs."""

BOX_DTYPES = frozenset({torch.float32, torch.float64, torch.int64})
"""Dtypes of the boxes whose arithmetic is the same in NumPy."""

SIZES = ((375, 500), (64, 64), (200, 120))
"""Height and width of the images for which draws are compared."""


def make_params(theirs: MakeParams, transform: Any, inputs: list[Any]) -> Any:
    """Return what ``theirs``, torchvision's function, returns; NotImplemented if torchvision has to draw."""
    boxes = next(each for each in inputs if isinstance(each, tv_tensors.BoundingBoxes))
    height, width = boxes.canvas_size
    xyxy = F.convert_bounding_box_format(
        boxes.as_subclass(torch.Tensor), boxes.format, tv_tensors.BoundingBoxFormat.XYXY
    )
    sizes = {tuple(F.get_size(each)) for each in inputs if not isinstance(each, tv_tensors.BoundingBoxes)}
    is_known = xyxy.dtype in BOX_DTYPES and xyxy.ndim == 2 and xyxy.shape[1] == 4 and sizes == {(height, width)}
    if not is_known or torch.get_default_dtype() is not torch.float32 or not draws_alike(theirs):
        return NotImplemented
    state = torch.default_generator.get_state()
    try:
        return sample_crop(transform, (height, width), xyxy.numpy())
    except Exception:  # torchvision raises its own error, after the same draws
        torch.default_generator.set_state(state)
        return NotImplemented


def sample_crop(transform: Any, size: Size, boxes: NDArray[Any]) -> dict[str, Any]:
    """Return the parameters that RandomIoUCrop draws.

    Args:
        size: (height, width) of the image.
        boxes: (N, 4), left, top, right and bottom of each box; float32, float64 or int64.

    Raises:
        ZeroDivisionError: a crop is empty.
    """
    real = np.float64 if boxes.dtype == np.float64 else np.float32  # torch divides integers in float32
    begins, ends = boxes[:, :2], boxes[:, 2:]
    with np.errstate(all="ignore"):
        centers, areas = real(0.5) * (begins + ends).astype(real), np.multiply(*(ends - begins).T)
        while True:
            overlap = transform.options[int(torch.randint(low=0, high=len(transform.options), size=(1,)))]
            if overlap >= 1.0:
                return {}
            state = torch.default_generator.get_state()
            crops, counts = _draw_crops(transform, np.array(size[::-1]))
            starts, stops = crops.astype(real)[..., None, :]
            is_within = ((starts < centers) & (centers < stops)).all(2)
            starts, stops = crops.astype(boxes.dtype)[..., None, :]
            sides = np.maximum(np.minimum(ends, stops) - np.maximum(begins, starts), 0)
            shared = sides[..., 0] * sides[..., 1]
            unions = areas + np.multiply(*(stops - starts).T).T - shared
            ious = np.where(is_within, shared.astype(real) / unions.astype(real), -np.inf)
            found = np.flatnonzero(~(ious.max(1, initial=-np.inf) < real(overlap)))
            torch.default_generator.set_state(state)
            _uniform(counts[found[0] if len(found) else -1])
            if len(found):
                (left, top), (right, bottom) = crops[:, found[0]].tolist()
                mask = torch.from_numpy(is_within[found[0]].copy())
                box = {"top": top, "left": left, "height": bottom - top, "width": right - left}
                return {**box, "is_within_crop_area": mask}


def _draw_crops(transform: Any, size: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """Draw the crops of one overlap that have an allowed aspect ratio, for an image of (width, height).

    Returns:
        (2, crops, 2): left and top, and right and bottom, of each.
        How many numbers torchvision draws up to each, and for all trials.
    """
    pairs = _uniform(4 * transform.trials).reshape(-1, 2)
    low, span = np.float32(transform.min_scale), np.float32(transform.max_scale - transform.min_scale)
    extents = (size.astype(np.float32) * (low + span * pairs)).astype(np.int64)
    if not extents.all():
        raise ZeroDivisionError
    ratios = extents[:, 0] / extents[:, 1]
    is_allowed = ((transform.min_aspect_ratio <= ratios) & (ratios <= transform.max_aspect_ratio)).tolist()
    at, chosen = 0, []
    for _ in range(transform.trials):
        if is_allowed[at]:
            chosen.append(at)
            at += 1  # a position is drawn, too
        at += 1
    extents, places = extents[chosen], pairs[1:][chosen]
    starts = ((size - extents).astype(np.float32) * places).astype(np.int64)
    return np.stack((starts, starts + extents)), [*(2 * each + 4 for each in chosen), 2 * at]


def _uniform(count: int) -> NDArray[np.float32]:
    """Draw numbers as ``torch.rand``, on any default device."""
    numbers: NDArray[np.float32] = torch.empty(count, dtype=torch.float32, device="cpu").uniform_().numpy()
    return numbers


@functools.cache
def draws_alike(theirs: MakeParams) -> bool:
    """Return whether crops drawn here, and the numbers after them, are those of the installed torchvision."""
    state = torch.get_rng_state()
    try:
        with torch.device("cpu"):  # regardless of torch's default device
            return all(_is_alike(theirs, seed, size) for seed, size in enumerate(SIZES))
    except Exception:
        return False
    finally:
        torch.set_rng_state(state)


def _is_alike(theirs: MakeParams, seed: int, size: Size) -> bool:
    torch.default_generator.manual_seed(seed)
    corners, sides = torch.rand(2, 5, 2) * torch.tensor(size[::-1]) / 2
    boxes = torch.cat((corners, corners + sides), 1)
    inputs = [tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)]
    transform = v2.RandomIoUCrop(sampler_options=[0.1, 0.3, 0.5])  # without 1.0, which draws no crop
    state, results = torch.get_rng_state(), []
    for draw, args in ((theirs, (transform, inputs)), (sample_crop, (transform, size, boxes.numpy()))):
        torch.set_rng_state(state)
        params = draw(*args)
        results.append((params.pop("is_within_crop_area").tolist(), params, torch.rand(1).item()))
    return bool(results[0] == results[1])
