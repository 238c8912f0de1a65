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

MakeParams = Callable[[Any, list[Any]], dict[str, Any]]
"""``RandomIoUCrop.make_params``: returns the parameters of a crop, given the transform and the inputs."""

BOX_DTYPES = frozenset({torch.float32, torch.float64, torch.int64})
"""Dtypes of the boxes whose arithmetic is the same in NumPy."""

SIZES = ((375, 500), (64, 64), (200, 120))
"""Height and width of the images for which draws are compared."""


def make_params(theirs: MakeParams, transform: Any, inputs: list[Any]) -> Any:
    """Return what ``theirs``, torchvision's function, returns; NotImplemented if torchvision has to draw."""
    boxes = next(each for each in inputs if isinstance(each, tv_tensors.BoundingBoxes))
    xyxy = F.convert_bounding_box_format(
        boxes.as_subclass(torch.Tensor), boxes.format, tv_tensors.BoundingBoxFormat.XYXY
    )
    sizes = {tuple(F.get_size(each)) for each in inputs if not isinstance(each, tv_tensors.BoundingBoxes)}
    is_known = xyxy.dtype in BOX_DTYPES and xyxy.ndim == 2 and xyxy.shape[1] == 4
    if not is_known or sizes != {tuple(boxes.canvas_size)} or not draws_alike(theirs):
        return NotImplemented
    state = torch.default_generator.get_state()
    try:
        return sample_crop(transform, *boxes.canvas_size, xyxy.numpy())
    except Exception:  # torchvision raises its own error, after the same draws
        torch.default_generator.set_state(state)
        return NotImplemented


def sample_crop(transform: Any, height: int, width: int, boxes: NDArray[Any]) -> dict[str, Any]:
    """Return the parameters that RandomIoUCrop draws for an image of (height, width).

    Args:
        boxes: (N, 4), left, top, right and bottom of each box; float32, float64 or int64.
    """
    while True:
        overlap = transform.options[int(torch.randint(low=0, high=len(transform.options), size=(1,)))]
        if overlap >= 1.0:
            return {}
        state = torch.default_generator.get_state()
        crops, counts, drawn = _draw_crops(transform, height, width)
        crop, is_within = _find_crop(crops, boxes, overlap)
        torch.default_generator.set_state(state)
        _uniform(drawn if crop is None else int(counts[crop]))
        if crop is not None:
            left, top, right, bottom = map(int, crops[crop])
            mask = torch.from_numpy(is_within[crop].copy())
            return {
                "top": top, "left": left, "height": bottom - top, "width": right - left, "is_within_crop_area": mask
            }  # fmt: skip


def _draw_crops(transform: Any, height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Draw the crops of one overlap that have an allowed aspect ratio.

    Return left, top, right and bottom of each, how many numbers torchvision has drawn up to each, and after all trials.
    """
    size = np.array((width, height))
    pairs = _uniform(4 * transform.trials).reshape(-1, 2)
    low, span = np.float32(transform.min_scale), np.float32(transform.max_scale - transform.min_scale)
    extents = (size.astype(np.float32) * (low + span * pairs)).astype(np.int64)
    if not extents[:, 1].all():
        raise ZeroDivisionError
    ratios = extents[:, 0] / extents[:, 1]
    is_allowed = ((transform.min_aspect_ratio <= ratios) & (ratios <= transform.max_aspect_ratio)).tolist()
    at, found = 0, []
    for _ in range(transform.trials):
        if is_allowed[at]:
            found.append(at)
            at += 1  # the position is drawn, too
        at += 1
    chosen = np.array(found, np.int64)
    extents = extents[chosen]
    starts = ((size - extents).astype(np.float32) * pairs[chosen + 1]).astype(np.int64)
    return np.concatenate((starts, starts + extents), 1), 2 * chosen + 4, 2 * at


def _find_crop(crops: NDArray[np.int64], boxes: NDArray[Any], overlap: float) -> tuple[int | None, NDArray[np.bool_]]:
    """Return the first crop that overlaps a box sufficiently, and which boxes have their center in each crop."""
    real = np.float64 if boxes.dtype == np.float64 else np.float32  # torch divides integers in float32
    with np.errstate(all="ignore"):
        x, y = (real(0.5) * (boxes[:, k] + boxes[:, 2 + k]).astype(real) for k in (0, 1))
        left, top, right, bottom = crops.astype(real).T[..., None]
        is_within: NDArray[np.bool_] = (left < x) & (x < right) & (top < y) & (y < bottom)
        if not is_within.any():
            return None, is_within
        left, top, right, bottom = crops.astype(boxes.dtype).T[..., None]
        x1, y1, x2, y2 = boxes.T
        inside = np.maximum(np.minimum(x2, right) - np.maximum(x1, left), 0) * np.maximum(
            np.minimum(y2, bottom) - np.maximum(y1, top), 0
        )
        union = (x2 - x1) * (y2 - y1) + (right - left) * (bottom - top) - inside
        ious = inside.astype(real) / union.astype(real)
        best = np.where(is_within, ious, -np.inf).max(1)
        is_area = (crops[:, 0] != crops[:, 2]) & (crops[:, 1] != crops[:, 3])
        found = np.flatnonzero(is_within.any(1) & is_area & ~(best < real(overlap)))
    return (int(found[0]) if len(found) else None), is_within


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
            return all(_is_alike(theirs, seed, size) for seed, size in enumerate(SIZES * 2))
    except Exception:
        return False
    finally:
        torch.set_rng_state(state)


def _is_alike(theirs: MakeParams, seed: int, size: tuple[int, int]) -> bool:
    torch.default_generator.manual_seed(seed)
    corners, sides = torch.rand(2, 5, 2) * torch.tensor(size[::-1]) / 2
    boxes = torch.cat((corners, corners + sides), 1)
    bounding_boxes: Any = tv_tensors.BoundingBoxes
    inputs, state = [bounding_boxes(boxes, format="XYXY", canvas_size=size)], torch.get_rng_state()
    # No overlap of 1.0, which may end the draws at once.
    transform = v2.RandomIoUCrop(sampler_options=[0.1, 0.3, 0.5])
    results = []
    for draw in (lambda: theirs(transform, inputs), lambda: sample_crop(transform, *size, boxes.numpy())):
        torch.set_rng_state(state)
        params = draw()
        mask = params.pop("is_within_crop_area").tolist()
        results.append((params, mask, torch.rand(1).item()))
    return results[0] == results[1]
