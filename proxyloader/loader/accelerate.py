"""PreparedLoader, and what makes Accelerate build it where it would build a loader of torch. Main process.

NOTE [ Loaders prepared by Accelerate ]
``Accelerator.prepare`` does not keep a loader. It copies the attributes that it lists by name, puts a sampler for this
process around the batches, and builds a loader of torch from them. So does ``skip_first_batches``. Here one more name
is added to that list. Its value is a function that builds a loader of ours with the arguments of the one before, and
Accelerate is made to call it in the place of torch's class. Loaders of torch are built as before.

This is done when a loader of ours is made while Accelerate is imported, and when a loader is asked whether Accelerate
has prepared it, which ``prepare`` does first. So nothing happens in programs that do not use Accelerate.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from ..data.sharded_sampler import find_sharded_sampler
from .dataloader import DataLoader
from .options import OPTION_NAMES

log = logging.getLogger(__name__)

T = TypeVar("T")

BUILD = "_proxyloader_build"
"""The name that is added to Accelerate's list: an attribute that builds a loader with the arguments of this one."""

OF_TORCHDATA = {"_sampler_iter_yielded": 0, "_num_yielded": 0, "_index_sampler_state": None}
"""Parts of torchdata's states from which Accelerate takes a number of batches, with values of which it takes none."""

NO_STATE = (
    "a prepared loader has a state_dict only with "
    "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), in_order=True and, with "
    "several processes, dispatch_batches=False"
)


def keep_loaders() -> bool:
    """Let Accelerate build loaders of this package from loaders of this package; whether that could be done."""
    theirs = sys.modules.get("accelerate.data_loader")
    names = getattr(theirs, "_PYTORCH_DATALOADER_KWARGS", None)
    adapter, torchs = (getattr(theirs, name, None) for name in ("DataLoaderAdapter", "DataLoader"))
    if theirs is None or names is None or adapter is None or torchs is None:
        return False
    if BUILD not in names:
        names[BUILD] = None
        theirs.DataLoader = _building_ours(torchs)  # type: ignore[attr-defined]
        adapter.__init__ = _telling_ours(adapter.__init__, theirs)
    return True


@functools.cache
def warn_of_torchs_loader() -> None:
    log.warning(
        "Accelerate %s builds a loader of torch in place of this one, so DALI decodes nothing. Do not prepare the "
        "loader: make it with num_shards='auto', and move its batches to accelerator.device",
        version("accelerate"),
    )


def _building_ours(torchs: Any) -> Callable[..., Any]:
    """Return what Accelerate calls to build a loader: torch's class, or the function of a loader of ours."""

    @functools.wraps(torchs, updated=())
    def loader(*arguments: Any, _proxyloader_build: Any = None, **named: Any) -> Any:
        return (_proxyloader_build or torchs)(*arguments, **named)

    return loader


def _telling_ours(init: Callable[..., None], theirs: Any) -> Callable[..., None]:
    """Return the constructor of Accelerate's loaders, which also tells ours which of them it is in."""

    @functools.wraps(init)
    def tells_ours(
        self: Any, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **arguments: Any
    ) -> None:
        build = arguments.pop(BUILD, None)
        if build is None:
            init(self, dataset, use_stateful_dataloader, batch_sampler, **arguments)
            return
        processes = theirs.PartialState().num_processes if isinstance(self, theirs.DataLoaderDispatcher) else 1
        _refuse_two_shardings(batch_sampler, processes)
        has_state = use_stateful_dataloader and _can_have_state(arguments, processes)
        arguments[BUILD] = functools.partial(build, prepared_by=self, has_state=has_state)
        init(self, dataset, False, batch_sampler, **arguments)  # True would have it build torchdata's loader
        self.use_stateful_dataloader = has_state

    return tells_ours


def _can_have_state(arguments: dict[str, Any], processes: int) -> bool:
    """Whether Accelerate's states of a loader are true, for ``processes`` that are given the batches of the first."""
    if not arguments.get("in_order", True) and arguments["num_workers"] > 1:
        why = "in_order=False does not say which batches are left. Use in_order=True"
    elif processes > 1:
        why = (
            "with dispatch_batches only the first process reads it, and some batches ahead. Use dispatch_batches=False"
        )
    else:
        return True
    log.warning("Accelerate saves no state of this loader, as %s", why)
    return False


def _refuse_two_shardings(batch_sampler: Any, processes: int) -> None:
    """Raise ValueError if Accelerate makes shards of batches that are a shard already."""
    processes = getattr(batch_sampler, "num_processes", processes)
    shards = find_sharded_sampler(batch_sampler) or find_sharded_sampler(getattr(batch_sampler, "batch_sampler", None))
    if shards is not None and shards.num_shards > 1 and processes > 1:
        raise ValueError(
            f"the loader has num_shards={shards.num_shards}, and Accelerate gives each of its {processes} processes a "
            "part of that shard, so that some samples would never come. Make the loader without num_shards"
        )


class PreparedLoader(DataLoader[T]):
    """A DataLoader inside one of Accelerate's, which was built from another one."""

    _prepared_by: weakref.ref[Any] | None = None
    """Accelerate's loader around this one, which counts the epochs."""

    _has_state = True

    @classmethod
    def built_from(
        cls, loader: Any, dataset: Any, *, prepared_by: Any = None, has_state: bool = True, **arguments: Any
    ) -> PreparedLoader[Any]:
        """Build a loader with the arguments of ``loader`` that torch's does not have, at the same epoch.

        Args:
            prepared_by: Accelerate's loader around it; None: there is none.
            has_state: whether Accelerate is to keep its state.
            arguments: of torch's loader.
        """
        own = {name: getattr(loader, name) for name in OPTION_NAMES}
        built = cls(dataset, **arguments, **own)
        built._begin(loader._upcoming.copied())
        built._has_state = has_state
        if hasattr(type(prepared_by), "set_epoch"):
            built._prepared_by = weakref.ref(prepared_by)  # not to keep it, and with it the workers, until a collection
        return built

    def __iter__(self) -> Any:
        theirs = self._theirs
        if theirs is not None and not self._upcoming.resumes:
            self.set_epoch(theirs.iteration)
        elif theirs is not None:
            theirs.set_epoch(self._upcoming.epoch)
        return super().__iter__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._theirs is not None:
            self._theirs.set_epoch(self._upcoming.epoch)  # which sets that of the samplers

    @property
    def _theirs(self) -> Any:
        return None if self._prepared_by is None else self._prepared_by()

    @property
    def state_dict(self) -> Callable[[], dict[str, Any]]:
        # Accelerate takes it at each batch of a loader that has it.
        if not self._has_state:
            raise AttributeError(NO_STATE)
        return lambda: super(PreparedLoader, self).state_dict() | OF_TORCHDATA

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        # Accelerate's ``state_dict`` returns this attribute, which it sets on its own loader if that keeps states. Only
        # Accelerate knows the state, as it takes a batch ahead of the loop.
        raise AttributeError(NO_STATE)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_prepared_by": None}
