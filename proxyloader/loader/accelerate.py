"""Accelerate: lets its ``Accelerator.prepare`` keep this loader. Main process.

NOTE [ Loaders that Accelerate prepares ]
``Accelerator.prepare`` does not keep a loader. It copies the attributes that it lists by name, puts a sampler for this
process around the batches, and builds a loader of torch from them. So does ``skip_first_batches``. Here one more name
is added to that list. Its value builds a loader with the arguments of ours, and takes the place of torch's.

This is done when a loader is asked whether Accelerate has prepared it, which is the first thing that Accelerate does.
So nothing happens in programs that do not use it. Accelerate and Hugging Face's Trainer need no other change.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from ..data.sharded_sampler import find_sharded
from .options import LoaderOptions

log = logging.getLogger(__name__)

PREPARED = "_is_accelerate_prepared"
"""Accelerate's name for whether it has prepared a loader."""

ITSELF = "_proxyloader"
"""The name that is added to Accelerate's list: an attribute that is the loader itself."""


class NotPrepared:
    """Descriptor: False until Accelerate sets the attribute. Whoever reads it is Accelerate."""

    def __get__(self, loader: Any, kind: Any) -> bool:
        if loader is not None:
            keep_loaders()
        return False


class Itself:
    """Descriptor: the loader."""

    def __get__(self, loader: Any, kind: Any) -> Any:
        return loader


def keep_loaders() -> None:
    """Let Accelerate build loaders of this package from loaders of this package."""
    theirs = sys.modules.get("accelerate.data_loader")
    names, adapter = (getattr(theirs, name, None) for name in ("_PYTORCH_DATALOADER_KWARGS", "DataLoaderAdapter"))
    if names is None or adapter is None:
        found = version("accelerate") if theirs is not None else "of an unknown version"
        log.warning(
            "Accelerate (%s) builds a loader of torch in place of this one, so DALI decodes nothing. Do not prepare "
            "the loader. With several processes, make it with num_shards='auto'",
            found,
        )
    elif ITSELF not in names:
        names[ITSELF] = None
        adapter.__init__ = _taking_ours(adapter.__init__)


def _taking_ours(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def takes_ours(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **arguments: Any
    ) -> None:
        loader = arguments.pop(ITSELF, None)
        if loader is None:
            init(self, dataset, use_stateful_dataloader, batch_sampler, **arguments)
            return
        _refuse_two_shardings(batch_sampler)
        init(self, dataset, batch_sampler=batch_sampler, **arguments)
        self.use_stateful_dataloader = use_stateful_dataloader
        own = {field.name: getattr(loader, field.name) for field in fields(LoaderOptions)}
        kind = next(each for each in type(loader).__mro__ if PREPARED in vars(each))
        build = kind if use_stateful_dataloader else _without_state(kind)
        self.base_dataloader = build(dataset, batch_sampler=batch_sampler, **arguments, **own)
        if use_stateful_dataloader:
            self.dl_state_dict = self.base_dataloader.state_dict()

    return takes_ours


@functools.cache
def _without_state(kind: type[Any]) -> type[Any]:
    """Return a class of loaders without ``state_dict``, which Accelerate would call at each batch for nothing."""

    def no_state(_: Any) -> Any:
        raise AttributeError("state_dict: Accelerate keeps states of loaders with use_stateful_dataloader=True")

    return type(kind.__name__, (kind,), {"state_dict": property(no_state)})


def _refuse_two_shardings(batch_sampler: Any) -> None:
    """Raise ValueError if Accelerate makes shards of batches that are a shard already."""
    shards = find_sharded(getattr(batch_sampler, "batch_sampler", None))
    if shards is not None and shards.num_shards > 1 and batch_sampler.num_processes > 1:
        raise ValueError(
            f"the loader has num_shards={shards.num_shards}, and Accelerate gives each of its "
            f"{batch_sampler.num_processes} processes a part of that shard. Make the loader without num_shards"
        )
