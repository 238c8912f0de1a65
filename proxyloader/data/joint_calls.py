"""Run torchvision's own v2 code for images with targets in less time, with equal results. Runs where the dataset runs.

In a sample with boxes, most of a worker's time is spent on operations on tensors of a few elements and on torch's
generic traversal of nested samples, which each v2 transform repeats (``benchmarks/results/parts.jsonl``, line 15).
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


def _find_valid_boxes(
    _: Any, boxes: Any, format: Any, canvas_size: Any, min_size: float = 1.0, min_area: float = 1.0
) -> Any:
    """Return which boxes SanitizeBoundingBoxes keeps, (N,) bool, by the same float32 arithmetic in NumPy."""
    if boxes.dtype is not torch.float32 or format is not tv_tensors.BoundingBoxFormat.XYXY:
        return NotImplemented
    values, (height, width) = boxes.as_subclass(torch.Tensor).numpy(), canvas_size
    left, top, right, bottom = values.T
    widths, heights = right - left, bottom - top
    valid = (widths >= np.float32(min_size)) & (heights >= np.float32(min_size)) & (values >= 0).all(1)
    valid &= (widths * heights >= np.float32(min_area)) & (left <= width) & (right <= width)
    return torch.from_numpy(valid & (top <= height) & (bottom <= height))


class _Structure(pytree.TreeSpec):
    """The structure of a sample of tuples, lists and dicts. torch's ``tree_unflatten`` accepts it."""

    nodes: Any

    def __init__(self, nodes: Any) -> None:
        object.__setattr__(self, "nodes", nodes)  # a TreeSpec is frozen

    def unflatten(self, leaves: Any) -> Any:
        return _build(self.nodes, iter(leaves))


def _flatten(tree: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a sample in torch's order, and its structure."""
    leaves = list[Any]()
    try:
        return leaves, _Structure(_take_apart(tree, leaves))
    except TypeError:
        return pytree.tree_flatten(tree, *args, **kwargs)


def _take_apart(tree: Any, leaves: list[Any]) -> Any:
    """Append the leaves. Return the class, the keys and the children; None for a leaf.

    Raises:
        TypeError: there is a container of another class.
    """
    kind = type(tree)
    if kind is dict:
        return kind, [*tree], [_take_apart(each, leaves) for each in tree.values()]
    if kind is tuple or kind is list:
        return kind, None, [_take_apart(each, leaves) for each in tree]
    if kind in pytree.SUPPORTED_NODES or isinstance(tree, tuple):
        raise TypeError
    leaves.append(tree)
    return None


def _build(nodes: Any, leaves: Iterator[Any]) -> Any:
    if nodes is None:
        return next(leaves)
    kind, keys, children = nodes
    values = [_build(each, leaves) for each in children]
    return kind(values) if keys is None else dict(zip(keys, values))
