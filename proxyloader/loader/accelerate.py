"""PreparedLoader, and a patch that makes Accelerate build it in place of torch's loader. Main process.

NOTE [ Loaders prepared by Accelerate ]
``Accelerator.prepare`` does not keep a loader. It copies a fixed list of attributes, shards the batch sampler for this
process, and builds a torch loader from them; so does ``skip_first_batches``. The patch adds one attribute to this list.
Its value is a function that builds a loader of this package with the arguments of the original one, and Accelerate
calls it in place of torch's class. Other loaders are built as before.

A loader of this package applies the patch if Accelerate is imported when the loader is created, or when ``prepare``
checks whether the loader is already prepared. Programs without Accelerate are not affected.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from ..data.sharded_sampler import ShardedSampler
from ..workers.request_sampler import unwrap_batch_sampler
from .dataloader import DataLoader, T
from .options import OPTION_NAMES

log = logging.getLogger(__name__)

BUILD = "_proxyloader_build"  # name of the added attribute

TORCHDATA_STATE = {"_sampler_iter_yielded": 0, "_num_yielded": 0, "_index_sampler_state": None}
"""Entries of torchdata's states that Accelerate decrements, with values that it leaves unchanged."""

NO_STATE = (
    "a prepared loader has a state_dict only with DataLoaderConfiguration(use_stateful_dataloader=True), in_order=True "
    "and, with several processes, dispatch_batches=False"
)


def patch_accelerate() -> None:
    """Patch Accelerate if it is imported, or log a warning if this version cannot be patched."""
    module: Any = sys.modules.get("accelerate.data_loader")
    if module is None:
        return
    try:
        names, adapter, stock_class = module._PYTORCH_DATALOADER_KWARGS, module.DataLoaderAdapter, module.DataLoader
    except AttributeError:
        warn_loader_replaced()
        return
    if BUILD not in names:

        @functools.wraps(stock_class, updated=())
        def build(*args: Any, _proxyloader_build: Any = None, **kwargs: Any) -> Any:
            return (_proxyloader_build or stock_class)(*args, **kwargs)

        names[BUILD] = None
        module.DataLoader = build
        adapter.__init__ = _patch_init(adapter.__init__, module)


@functools.cache
def warn_loader_replaced() -> None:
    log.warning(
        "Accelerate %s replaces this loader with a torch loader, so DALI is not used. Do not prepare the loader: set "
        "num_shards='auto' and move the batches to accelerator.device",
        version("accelerate"),
    )


def _patch_init(init: Callable[..., None], module: Any) -> Callable[..., None]:
    """Return a constructor of Accelerate's loaders that passes the new object to our build function."""

    @functools.wraps(init)
    def patched(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **arguments: Any
    ) -> None:
        if (build := arguments.pop(BUILD, None)) is None:
            init(self, dataset, use_stateful_dataloader, batch_sampler, **arguments)
            return
        processes = module.PartialState().num_processes if isinstance(self, module.DataLoaderDispatcher) else 1
        shards, total = unwrap_batch_sampler(batch_sampler), getattr(batch_sampler, "num_processes", processes)
        if isinstance(shards, ShardedSampler) and shards.num_shards > 1 and total > 1:
            raise ValueError(
                f"Accelerate shards the loader over {total} processes, but it already has num_shards="
                f"{shards.num_shards}, so samples would be missing. Create the loader without num_shards"
            )
        has_state = use_stateful_dataloader and processes == 1 and arguments.get("in_order", True)
        if use_stateful_dataloader and not has_state:
            log.warning("Accelerate cannot save the state of this loader: %s", NO_STATE)
        arguments[BUILD] = functools.partial(build, prepared_by=self, has_state=has_state)
        init(self, dataset, False, batch_sampler, **arguments)  # True would build torchdata's loader
        self.use_stateful_dataloader = has_state

    return patched


class PreparedLoader(DataLoader[T]):
    """A DataLoader wrapped by a loader of Accelerate."""

    _prepared_by: Callable[[], Any] = staticmethod(lambda: None)
    """Return the wrapping loader, which counts the epochs, if it exists."""

    _has_state = True

    @classmethod
    def from_loader(
        cls, loader: Any, dataset: Any, *, prepared_by: Any = None, has_state: bool = True, **arguments: Any
    ) -> PreparedLoader[Any]:
        """Build a loader at the same epoch, with torch's arguments and the options of ``loader``."""
        prepared = cls(dataset, **arguments, **{name: getattr(loader, name) for name in OPTION_NAMES})
        prepared._set_next_state(loader._next_state.copy())
        prepared._has_state = has_state
        if hasattr(type(prepared_by), "set_epoch"):
            prepared._prepared_by = weakref.ref(prepared_by)  # avoids a cycle, which would keep the workers alive
        return prepared

    def __iter__(self) -> Any:
        if (wrapper := self._prepared_by()) is not None and not self._next_state.resumes:
            self.set_epoch(wrapper.iteration)
        elif wrapper is not None:
            wrapper.set_epoch(self._next_state.epoch)
        return super().__iter__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if (wrapper := self._prepared_by()) is not None:
            wrapper.set_epoch(self._next_state.epoch)  # which also sets that of the samplers

    @property
    def state_dict(self) -> Callable[[], dict[str, Any]]:
        # Accelerate calls it for each batch, if it exists.
        if not self._has_state:
            raise AttributeError(NO_STATE)
        return lambda: super(PreparedLoader, self).state_dict() | TORCHDATA_STATE

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_prepared_by"}
