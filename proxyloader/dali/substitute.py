"""Find and replace the placeholders in a batch of a stock DataLoader, in any structure. Main process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch

from ..data.placeholders import ProxyBatch, ProxySample


def map_references(obj: Any, of: Callable[[ProxyBatch | ProxySample], Any], seen: set[int]) -> Any:
    """Return a batch with ``of(reference)`` in place of each reference, in containers and in objects with attributes.

    Lists, dicts, sets and objects change in place. ``seen`` has the IDs of those that were visited, at first none.
    """
    if isinstance(obj, (ProxyBatch, ProxySample)):
        return of(obj)
    if id(obj) in seen or isinstance(obj, (torch.Tensor, np.ndarray, str, bytes, int, float, type, type(None))):
        return obj
    if isinstance(obj, tuple):
        items = [map_references(item, of, seen) for item in obj]
        if all(new is old for new, old in zip(items, obj)):
            return obj
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    seen.add(id(obj))
    if isinstance(obj, (MutableSequence, MutableMapping)):
        for key in list(obj) if isinstance(obj, MutableMapping) else range(len(obj)):
            obj[key] = map_references(obj[key], of, seen)
    elif isinstance(obj, MutableSet):
        items = [map_references(item, of, seen) for item in obj]
        obj.clear()
        for item in items:
            obj.add(item)
    else:
        slots = itertools.chain(*(getattr(cls, "__slots__", ()) for cls in type(obj).__mro__))
        for name in [*getattr(obj, "__dict__", ()), *(name for name in slots if hasattr(obj, name))]:
            value = getattr(obj, name)
            new = map_references(value, of, seen)
            if new is not value:
                object.__setattr__(obj, name, new)  # frozen dataclasses too
    return obj
