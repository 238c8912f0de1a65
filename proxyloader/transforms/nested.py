"""Find and replace transforms in the attributes of user-defined callable objects.

Objects such as ``TwoCropsTransform`` hold one or more transforms, call them several times, and return a list of the
results. Their own code still does so, with compiled transforms in place of the original ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

Exchange = Callable[[str, Any], Any]
"""Function that maps the position of a transform, such as ``.crops[1]``, and the transform to its replacement."""

LIBRARY_MODULES = ("torchvision.transforms", "timm.data", __package__)


class TransformStandIn:
    """Base class of objects that replace a transform in a dataset."""


def find_nested(holder: Any) -> dict[str, Any]:
    """Return the transforms that a callable object holds in its attributes, by position.

    Lists, tuples, dicts and callable objects in the attributes are also searched. The result is empty for transforms
    of torchvision and timm, functions and classes.
    """
    found: dict[str, Any] = {}
    replace_nested(holder, found.setdefault)
    return found


def replace_nested(holder: Any, exchange: Exchange) -> Any:
    """Return a copy of ``holder`` with each transform replaced by ``exchange``, or ``holder`` if nothing changes."""
    return holder if is_transform(holder) or not _may_hold(holder) else _replace(holder, "", exchange, set())


def _replace(value: Any, position: str, exchange: Exchange, seen: set[int]) -> Any:
    if is_transform(value):
        return exchange(position, value)
    if type(value) in (list, tuple):
        items = [_replace(each, f"{position}[{k}]", exchange, seen) for k, each in enumerate(value)]
        return value if all(new is old for new, old in zip(items, value)) else type(value)(items)
    if type(value) is dict:
        changed = _changed_items(value, f"{position}[{{!r}}]", exchange, seen)
        return {**value, **changed} if changed else value
    if not _may_hold(value) or id(value) in seen:
        return value
    seen.add(id(value))
    attributes = {name: each for name, each in vars(value).items() if name != "_modules"}
    changed = _changed_items(attributes, f"{position}.{{}}", exchange, seen)
    if isinstance(value, torch.nn.Module):
        modules = _changed_items(value._modules, f"{position}.{{}}", exchange, seen)
        changed |= {"_modules": {**value._modules, **modules}} if modules else {}
    if not changed:
        return value
    other = copy.copy(value)
    vars(other).update(changed)
    return other


def _changed_items(values: dict[str, Any], position: str, exchange: Exchange, seen: set[int]) -> dict[str, Any]:
    new = {name: _replace(value, position.format(name), exchange, seen) for name, value in values.items()}
    return {name: value for name, value in new.items() if value is not values[name]}


def is_transform(value: Any) -> bool:
    """Return whether the value is a transform of torchvision or timm, or its replacement."""
    known = isinstance(value, TransformStandIn) or type(value).__module__.startswith(LIBRARY_MODULES)
    return known and callable(value)


def _may_hold(value: Any) -> bool:
    return callable(value) and hasattr(value, "__dict__") and not (inspect.isroutine(value) or inspect.isclass(value))
