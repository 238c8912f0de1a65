"""v2's code for boxes, faster: RandomIoUCrop, horizontal flips, SanitizeBoundingBoxes. Runs in the worker.

RandomIoUCrop tries up to 40 crops for an overlap, and compares each of them with the boxes in about thirty operations
on tensors of a few elements, which takes 2.4 ms for five boxes (``benchmarks/results/parts.jsonl``, line 14). The code
below draws the numbers of all trials at once, compares all crops together with the same arithmetic, and then advances
torch's generator by the numbers that torchvision would have drawn. Before first use, its crops, masks and generator
states are compared with those of the installed torchvision. If they differ, torchvision draws the crops. The check of
boxes takes 5 to 15% off a worker's time for an image with boxes (``benchmarks/results/detection.txt``, 13).
"""

import contextlib
import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from .._random_state import preserve_rng
from .plan import Size

BOX_DTYPES = frozenset({torch.float32, torch.float64, torch.int64})  # with the same arithmetic in NumPy
MARGIN = 1e-6  # of a minimum; more than the error of float32


def find_valid(_: Any, boxes: Any, format: Any, canvas_size: Any, min_size: float = 1.0, min_area: float = 1.0) -> Any:
    """Return which boxes SanitizeBoundingBoxes keeps, (N,) bool; NotImplemented if torchvision has to compare them."""
    if boxes.dtype is not torch.float32 or min(min_size, min_area) <= 0 or not _is_known(boxes, format):
        return NotImplemented
    (height, width), valid = canvas_size, []
    for left, top, right, bottom in boxes.as_subclass(torch.Tensor).tolist():
        sides = right - left, bottom - top
        excess = min(min(sides) / min_size, sides[0] * sides[1] / min_area) - 1
        is_inside = 0 <= left <= width and 0 <= right <= width and 0 <= top <= height and 0 <= bottom <= height
        if is_inside and abs(excess) < MARGIN:
            return NotImplemented
        valid.append(is_inside and excess > 0)
    return torch.from_numpy(np.array(valid, bool))


def select(_: Any, sanitize: Any, inpt: Any, params: dict[str, Any]) -> Any:
    """Return a copy of boxes or labels if SanitizeBoundingBoxes keeps all; NotImplemented if torchvision must index."""
    is_boxes, valid = type(inpt) is tv_tensors.BoundingBoxes, params["valid"]
    is_label = type(inpt) is torch.Tensor and any(inpt is each for each in params["labels"] or ())
    is_known = (is_boxes or is_label) and type(valid) is torch.Tensor and inpt.shape[:1] == valid.shape
    if not is_known or not valid.numpy().all():
        return NotImplemented
    copy = inpt.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    return tv_tensors.wrap(copy, like=inpt) if is_boxes else copy


def flip(_: Any, boxes: Any, format: Any, canvas_size: Any) -> Any:
    """Return boxes of a mirrored image; NotImplemented if torchvision has to compute them."""
    if boxes.dtype not in BOX_DTYPES or not _is_known(boxes, format) or type(canvas_size[1]) is not int:
        return NotImplemented
    values = boxes.numpy()
    flipped = values.copy("K")
    flipped[:, ::2] = -(values[:, 2::-2] - canvas_size[1])
    return torch.from_numpy(flipped)


def _is_known(boxes: Any, format: Any) -> bool:
    is_xyxy = format is tv_tensors.BoundingBoxFormat.XYXY and boxes.ndim == 2 and boxes.shape[1] == 4
    return is_xyxy and not tv_tensors._torch_function_helpers._must_return_subclass()


_FUNCTIONAL = "torchvision.transforms.v2.functional."
FUNCTIONS = {
    f"{_FUNCTIONAL}_misc:_get_sanitize_bounding_boxes_mask": find_valid,
    f"{_FUNCTIONAL}_geometry:horizontal_flip_bounding_boxes": flip,
}
"""Functions that replace torchvision's, by their names there."""


def make_params(theirs: Any, transform: Any, inputs: list[Any]) -> Any:
    """Return what ``theirs``, torchvision's function, returns; NotImplemented if torchvision has to draw."""
    boxes = next(each for each in inputs if isinstance(each, tv_tensors.BoundingBoxes))
    plain, xyxy_format = boxes.as_subclass(torch.Tensor), tv_tensors.BoundingBoxFormat.XYXY
    xyxy = F.convert_bounding_box_format(plain, boxes.format, xyxy_format)
    size, *others = {tuple(F.get_size(each)) for each in inputs}
    is_known = xyxy.dtype in BOX_DTYPES and xyxy.ndim == 2 and xyxy.shape[1] == 4 and not others
    is_float = torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
    if not is_known or not is_float or not draws_alike(theirs):
        return NotImplemented
    state = torch.default_generator.get_state()
    try:
        return sample_crop(transform, size, xyxy.numpy())
    except Exception:  # torchvision raises its own error, after the same draws
        torch.default_generator.set_state(state)
        return NotImplemented


def sample_crop(transform: Any, size: Size, boxes: NDArray[Any]) -> dict[str, Any]:
    """Return the parameters that RandomIoUCrop draws. ZeroDivisionError: a crop has no pixels.

    ``boxes``: (N, 4), left, top, right and bottom of each box, of a dtype in ``BOX_DTYPES``.
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
            found = np.flatnonzero(is_within.any(1) & ~(ious.max(1, initial=-np.inf) < real(overlap)))
            torch.default_generator.set_state(state)
            torch.rand(counts[found[0] if len(found) else -1])
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
    pairs = torch.rand(2 * transform.trials, 2).numpy()
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


@functools.cache
def draws_alike(theirs: Any) -> bool:
    """Return whether crops drawn here, and the numbers after them, are those of the installed torchvision."""
    found = []
    transform, size = v2.RandomIoUCrop(sampler_options=[0.1, 0.3, 0.5]), (375, 500)  # without 1.0, which draws no crop
    boxes = torch.tensor([[20.0, 30.0, 120.0, 310.0], [200.5, 99.9, 480.1, 301.0]])
    inputs = [tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)]
    with contextlib.suppress(Exception), preserve_rng():
        for draw, args in ((theirs, (transform, inputs)), (sample_crop, (transform, size, boxes.numpy()))):
            torch.default_generator.manual_seed(0)
            crops = [draw(*args) for _ in range(4)]
            masks = [crop.pop("is_within_crop_area").tolist() for crop in crops]
            found.append((crops, masks, torch.rand(1).item()))
    return len(found) == 2 and bool(found[0] == found[1])


METHODS: dict[str, Any] = {
    "torchvision.transforms.v2:RandomIoUCrop.make_params": make_params,
    "torchvision.transforms.v2:SanitizeBoundingBoxes.transform": select,
}
"""Functions that replace methods, by their names."""
