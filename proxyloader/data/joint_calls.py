"""Run torchvision's own v2 code for images with targets in less time, with equal results. Runs where the dataset runs.

With boxes, much of it is operations on tensors of a few elements, and torch's generic traversal of the nested sample
by each transform (``benchmarks/results/parts.jsonl``, line 15).
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torchvision import tv_tensors
from torchvision.transforms import v2

from ..transforms import iou_crop
from .recorded import map_leaves
from .replaced_code import find, original, replacements, unless_handled


def joint_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each function to speed up."""
    for make_params in find("torchvision.transforms.v2:RandomIoUCrop.make_params").values():
        yield v2.RandomIoUCrop, "make_params", unless_handled(make_params, iou_crop.make_params)
    for check in find("torchvision.transforms.v2.functional._misc:_get_sanitize_bounding_boxes_mask").values():
        yield from replacements(check, unless_handled(original(check), _find_valid_boxes))
    for name, module in [*sys.modules.items()]:
        if name.startswith("torchvision.transforms.v2.") and hasattr(module, "tree_flatten"):
            yield module, "tree_flatten", _flatten


@np.errstate(all="ignore")  # like torch
def _find_valid_boxes(
    _: Any, boxes: Any, format: Any, canvas_size: Any, min_size: float = 1.0, min_area: float = 1.0
) -> Any:
    """Return which boxes SanitizeBoundingBoxes keeps, (N,) bool, by the same float32 arithmetic in NumPy."""
    if boxes.dtype is not torch.float32 or format is not tv_tensors.BoundingBoxFormat.XYXY:
        return NotImplemented
    left, top, right, bottom = (values := boxes.as_subclass(torch.Tensor).numpy()).T
    height, width = canvas_size
    widths, heights = right - left, bottom - top
    valid = (widths >= np.float32(min_size)) & (heights >= np.float32(min_size)) & (values >= 0).all(1)
    valid &= (widths * heights >= np.float32(min_area)) & (left <= width) & (right <= width)
    return torch.from_numpy(valid & (top <= height) & (bottom <= height))


class _Structure(pytree.TreeSpec):
    """The structure of a sample of tuples, lists and dicts. torch's ``tree_unflatten`` accepts it."""

    sample: Any  # without the leaves

    def __init__(self, sample: Any) -> None:
        object.__setattr__(self, "sample", sample)  # a TreeSpec is frozen

    def unflatten(self, leaves: Any) -> Any:
        remaining = iter(leaves)
        return map_leaves(lambda _: next(remaining), self.sample)


def _flatten(tree: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a sample in torch's order, and its structure."""
    leaves: list[Any] = []

    def take(leaf: Any) -> None:
        if isinstance(leaf, tuple) or type(leaf) in pytree.SUPPORTED_NODES:
            raise TypeError(f"{type(leaf).__name__} is a container")
        leaves.append(leaf)

    try:
        return leaves, _Structure(map_leaves(take, tree))
    except TypeError:
        return pytree.tree_flatten(tree, *args, **kwargs)
