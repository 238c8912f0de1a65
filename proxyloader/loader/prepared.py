"""PreparedLoader: the loader inside one of Accelerate's. Main process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .dataloader import DataLoader
from .options import OPTION_NAMES

T = TypeVar("T")

OF_TORCHDATA = {"_sampler_iter_yielded": 0, "_num_yielded": 0, "_index_sampler_state": None}
"""Parts of torchdata's states from which Accelerate takes a number of batches, with values of which it takes none."""


NO_STATE = (
    "a prepared loader has a state_dict only with "
    "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), in_order=True and, with "
    "several processes, dispatch_batches=False"
)


class PreparedLoader(DataLoader[T]):
    """A DataLoader that a trainer has built from another one.

    See NOTE [ Loaders that Accelerate prepares ].
    """

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
