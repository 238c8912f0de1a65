"""LiveDataset: a translated view that shares its attributes with the user's dataset, for num_workers=0. Main process.

A stock loader without workers uses the dataset itself. So changes to the dataset or its transform take effect with the
next batch, and attributes that ``__getitem__`` sets on ``self`` persist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

REPLACED = ("transform", "transforms", "loader", "load_bytes", "dataset", "datasets")
"""Attributes that differ between a translated dataset and the user's."""


class LiveDataset:
    """Translates a dataset anew for each batch. ``translate`` returns a translated copy, or the dataset itself."""

    def __init__(self, dataset: Any, translate: Callable[[], Any]) -> None:
        self.dataset, self._translate = dataset, translate
        self._views: dict[int, tuple[Any, dict[str, Any]]] = {}  # by id of the dataset, which the view keeps alive

    def __call__(self) -> Any:
        """Return the translated view of the current dataset, the same object in every call if possible."""
        return self._view(self.dataset, self._translate())

    def _view(self, dataset: Any, translated: Any) -> Any:
        new = getattr(translated, "__dict__", {})
        changed = {name: new[name] for name in REPLACED if name in new and new[name] is not vars(dataset).get(name)}
        if isinstance(dataset, Subset) and "dataset" in changed:
            changed["dataset"] = self._view(dataset.dataset, changed["dataset"])
        if isinstance(dataset, ConcatDataset) and "datasets" in changed:
            changed["datasets"] = list(map(self._view, dataset.datasets, changed["datasets"]))
        if id(dataset) not in self._views:
            if translated is dataset:
                return dataset
            replaced: dict[str, Any] = {}
            try:
                self._views[id(dataset)] = _create_view(dataset, replaced), replaced
            except TypeError:  # not all attributes are in a __dict__
                return translated
        view, replaced = self._views[id(dataset)]
        replaced.clear()
        replaced.update(changed)
        return view


def _create_view(dataset: Any, replaced: dict[str, Any]) -> Any:
    """Return an object that shares all attributes with the dataset except those in ``replaced``.

    TypeError: not all attributes are in a ``__dict__``.
    """
    kind = type(dataset)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        raise TypeError(f"{kind.__name__} has __slots__")
    body: dict[str, Any] = {name: _create_property(dataset, name, replaced) for name in REPLACED}
    body |= {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body["__class__"] = property(lambda self: kind)
    body["__reduce_ex__"] = lambda self, protocol: dataset.__reduce_ex__(protocol)  # copy the user's dataset
    metaclass: Any = type(kind)
    view: Any = object.__new__(metaclass(kind.__name__, (kind,), body))
    view.__dict__ = vars(dataset)
    return view


def _create_property(dataset: Any, name: str, replaced: dict[str, Any]) -> property:
    def get(self: Any) -> Any:
        return replaced[name] if name in replaced else getattr(dataset, name)

    def set(self: Any, value: Any) -> None:
        replaced.clear()  # until the next batch, behave like the user's dataset
        setattr(dataset, name, value)

    return property(get, set)
