"""Live dataset: a translated view that shares its attributes with the user's dataset, for num_workers=0. Main process.

A stock loader without workers reads the dataset itself. Therefore a change of the dataset or of its transform takes
effect with the next batch, and attributes that ``__getitem__`` sets on ``self`` persist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

EXCHANGED = ("transform", "transforms", "loader", "load_bytes", "dataset", "datasets")
"""Attributes that differ between a translated dataset and the user's."""


class LiveDataset:
    """Translate a dataset again for each batch. ``translate`` returns a translated copy of it, or itself."""

    def __init__(self, dataset: Any, translate: Callable[[], Any]) -> None:
        self.dataset, self._translate = dataset, translate
        self._views: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the id of the dataset, which the view keeps alive

    def __call__(self) -> Any:
        """Return the translated view of the dataset as it is now. It is the same object in each call, if possible."""
        return self._view(self.dataset, self._translate())

    def _view(self, dataset: Any, translated: Any) -> Any:
        own = getattr(translated, "__dict__", {})
        changed = {name: own[name] for name in EXCHANGED if name in own and own[name] is not vars(dataset).get(name)}
        if isinstance(dataset, Subset) and "dataset" in changed:
            changed["dataset"] = self._view(dataset.dataset, changed["dataset"])
        if isinstance(dataset, ConcatDataset) and "datasets" in changed:
            changed["datasets"] = list(map(self._view, dataset.datasets, changed["datasets"]))
        if id(dataset) not in self._views:
            if translated is dataset:
                return dataset
            exchanged: dict[str, Any] = {}
            try:
                self._views[id(dataset)] = _view_of(dataset, exchanged), exchanged
            except TypeError:  # some attributes are not in a __dict__
                return translated
        view, exchanged = self._views[id(dataset)]
        exchanged.clear()
        exchanged.update(changed)
        return view


def _view_of(dataset: Any, exchanged: dict[str, Any]) -> Any:
    """Return an object that shares all attributes with the dataset except those in ``exchanged``.

    TypeError: some attributes are not in a ``__dict__``.
    """
    kind = type(dataset)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        raise TypeError(f"{kind.__name__} has __slots__")
    body: dict[str, Any] = {name: _exchanged(dataset, name, exchanged) for name in EXCHANGED}
    body |= {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body["__class__"] = property(lambda self: kind)
    body["__reduce_ex__"] = lambda self, protocol: dataset.__reduce_ex__(protocol)  # copied as the user's dataset
    metaclass: Any = type(kind)
    view: Any = object.__new__(metaclass(kind.__name__, (kind,), body))
    view.__dict__ = vars(dataset)
    return view


def _exchanged(dataset: Any, name: str, exchanged: dict[str, Any]) -> property:
    def get(self: Any) -> Any:
        return exchanged[name] if name in exchanged else getattr(dataset, name)

    def set(self: Any, value: Any) -> None:
        exchanged.clear()  # until the next batch, behave as the user's dataset
        setattr(dataset, name, value)

    return property(get, set)
