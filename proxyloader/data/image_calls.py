"""What a sample or a batch holds that is not computed yet: images that DALI is to decode, placeholders. Worker."""

from __future__ import annotations

import contextlib
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from PIL import Image

from .lazy_tensor import LazyTensor
from .placeholders import ImageCall, ProxyBatch, ProxySample
from .recorded import Node, Operation, leaves


def image_calls_in(content: Any) -> list[ImageCall]:
    """Return the calls of compiled transforms in a sample or a batch, in every object that pickle would visit."""
    if not (LazyTensor.was_made or ProxySample.was_handed_out):
        return []
    found: dict[int, ImageCall] = {}
    if not _note_calls(content, found):
        walk = _Walk(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        walk.found = found
        with contextlib.suppress(Exception):  # if it holds images, packing raises the same error
            walk.dump(content)
    return list(found.values())


_LARGE = (torch.Tensor, np.ndarray, bytes, bytearray, Image.Image)
"""Objects that hold no others, and are not copied by a search."""

_WITHOUT_CALLS = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, np.ndarray})


def _note_calls(content: Any, found: dict[int, ImageCall]) -> bool:
    """Collect the calls of common sample types, in a tenth of the time of pickle. Return False for other types."""
    kind = type(content)
    if kind is tuple or kind is list:
        return all(_note_calls(each, found) for each in content)
    if issubclass(kind, LazyTensor):
        content = content._node
    if isinstance(content, Node):
        found.update({id(call): call for call in _calls_of(content)})
        return True
    return kind in _WITHOUT_CALLS or issubclass(kind, LazyTensor)


def _calls_of(node: Any) -> list[ImageCall]:
    """Return the calls that a node is made of. Several operations may be on the result of the same one."""
    calls: list[Any] = []
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ProxySample):
            calls.append(node.call)
        elif isinstance(node, ProxyBatch):
            calls += node.run.calls
        elif isinstance(node, Operation) and id(node) not in seen:
            seen.add(id(node))
            waiting += reversed([*leaves((node.args, node.kwargs))])
    return [call for call in calls if isinstance(call, ImageCall)]


class _Walk(ForkingPickler):
    found: dict[int, ImageCall]
    """Calls by id, because several outputs may refer to the same call."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (LazyTensor, Node)):
            _note_calls(obj, self.found)
        elif not isinstance(obj, _LARGE):
            return None
        return ""


def holds(content: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a sample or a batch holds an object of these kinds, in any object that pickle would visit."""
    if type(content) in (tuple, list):
        return any(holds(each, kinds) for each in content)
    if isinstance(content, kinds) or type(content) in _WITHOUT_CALLS:
        return isinstance(content, kinds)
    search = _Search(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    search.kinds = kinds
    with contextlib.suppress(Exception):  # what cannot be pickled is not searched further
        search.dump(content)
    return search.has_found


class _Search(ForkingPickler):
    kinds: tuple[type, ...]
    has_found = False

    def persistent_id(self, obj: Any) -> Any:
        self.has_found |= isinstance(obj, self.kinds)
        return "" if self.has_found or isinstance(obj, _LARGE) else None
