"""How v2's transforms take samples apart and put them together. Runs in the worker.

Each transform flattens its inputs with torch's pytree, which also knows other containers. For an image with boxes, this
takes 5% of a worker's time off (``benchmarks/results/recording.txt``).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torchvision.transforms import v2

from .random_numbers import bernoulli


def sample_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each of v2's functions that take samples apart."""
    for module in (v2._transform, v2._misc):
        if getattr(module, "tree_flatten", None) is pytree.tree_flatten:
            yield module, "tree_flatten", flatten
    at_random = v2._transform._RandomApplyTransform
    if hasattr(v2.Transform, "check_inputs") and "forward" in vars(at_random):
        yield at_random, "forward", _apply_at_random(at_random.forward)


class Structure(pytree.TreeSpec):
    """The tuples, lists and dicts of a sample, with None in place of the leaves."""

    def __init__(self, containers: Any) -> None:
        vars(self)["_containers"] = containers  # the base class is frozen

    def __getattr__(self, name: str) -> Any:
        return getattr(pytree.tree_structure(vars(self)["_containers"]), name)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        return _fill(self._containers, iter(leaves))


def flatten(sample: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return what torch returns, faster."""
    leaves: list[Any] = []
    try:
        return leaves, Structure(_take_leaves(sample, leaves))
    except LookupError:
        return pytree.tree_flatten(sample)


def _take_leaves(sample: Any, leaves: list[Any]) -> Any:
    """Append the leaves of a sample. Return its containers. LookupError: one of another class."""
    kind = type(sample)
    if kind is dict:
        return {key: _take_leaves(each, leaves) for key, each in sample.items()}
    if kind is tuple or kind is list:
        return kind([_take_leaves(each, leaves) for each in sample])
    if kind in pytree.SUPPORTED_NODES or hasattr(kind, "_fields"):  # of a namedtuple
        raise LookupError
    return leaves.append(sample)


def _fill(containers: Any, leaves: Iterator[Any]) -> Any:
    kind = type(containers)
    if kind is dict:
        return {key: _fill(each, leaves) for key, each in containers.items()}
    return next(leaves) if containers is None else kind([_fill(each, leaves) for each in containers])


def _apply_at_random(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that draws without new tensors, and does not take apart a sample that it leaves unchanged."""

    @functools.wraps(theirs)
    def forward(transform: Any, *inputs: Any) -> Any:
        p = vars(transform).get("p")
        # A tensor may change, and a property may draw numbers.
        is_known = inputs and type(p) in (float, int) and 0 <= p <= 1
        checks = type(transform).check_inputs is not v2.Transform.check_inputs
        if not is_known or checks or torch.get_default_dtype() is not torch.float32:
            return theirs(transform, *inputs)
        if bernoulli(p):
            return v2.Transform.forward(transform, *inputs)
        return inputs if len(inputs) > 1 else inputs[0]

    return forward
