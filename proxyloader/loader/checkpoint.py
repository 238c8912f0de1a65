"""CheckpointedLoader: epochs and ``state_dict`` of a loader. Main process."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from .._validation import check_int
from ..data.dataset import get_length
from ..data.sharded_sampler import ShardedSampler, find_sharded_sampler
from ..workers.loader_state import LoaderState, between_epochs, dataset_state
from ..workers.pool import WorkerPool
from ..workers.request_sampler import own_generator, record_upcoming_order, sampler_state, unwrap_batch_sampler

T = TypeVar("T")


class CheckpointedLoader(TorchDataLoader[T]):
    """Base class of DataLoader that keeps the state of its epochs."""

    seed: int | None
    _pool: WorkerPool | None
    _next_epoch: LoaderState
    _loader_state: LoaderState | None
    """State of the latest epoch, or None."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as with ``DistributedSampler``. By default the loader counts epochs."""
        check_int("epoch", epoch, 0)
        if self._upcoming.epoch != epoch:
            self._begin(LoaderState(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop: epoch, number of batches returned, and the states that determine the order.

        Can be called at any time, even in every step. The state can be pickled and saved with ``torch.save``. It has
        the semantics of ``torchdata.stateful_dataloader.StatefulDataLoader``.

        Raises:
            ValueError: in the middle of an epoch with ``in_order=False``, as the remaining batches are unknown.
        """
        begun = self._loader_state
        if begun is not None and begun.batches and not begun.finished and not self.in_order and self.num_workers > 1:
            raise ValueError(
                "with in_order=False the remaining batches of an epoch are unknown; call state_dict between epochs, or "
                "use in_order=True"
            )
        here = self._between_epochs() if begun is None or begun.finished else self._in_epoch(begun)
        depends_on_workers = isinstance(self.dataset, IterableDataset) or bool(here.worker_states)
        workers = self.num_workers if depends_on_workers else None
        return here.state_dict(self.seed, self._dataset_length, self._order, workers)

    def _in_epoch(self, begun: LoaderState) -> LoaderState:
        here = begun.copied()
        if not here.batches and not isinstance(self.dataset, IterableDataset):
            record_upcoming_order(here, unwrap_batch_sampler(self._own_sampler), self.seed, "next")
        if self._pool is None or self._pool.source is None:
            return here
        if not self.num_workers:
            here.worker_states = {0: state} if (state := self._pool.source.state()) else {}
        else:  # batches bring the states of their workers
            unknown = [worker for worker in range(self.num_workers) if worker not in here.worker_states]
            here.worker_states |= self._pool.states_at_start(unknown)
        return here

    def _between_epochs(self) -> LoaderState:
        here, before = self._upcoming.copied(), self._loader_state
        if here.resumes:  # a state was loaded, and its epoch has not started
            return here
        sampler = unwrap_batch_sampler(self._own_sampler)
        record_upcoming_order(here, sampler, self.seed, "iter")
        if self._generator_of_seeds is not None:
            here.generator_states["workers"] = self._generator_of_seeds.get_state()
        goes_on = self.persistent_workers and self._pool is not None and self._pool.has_workers
        here.new_workers = not goes_on and (own_generator(sampler) is not None or self.generator is None)
        if before is not None:
            # A sampler with set_epoch restarts at each epoch, so its position does not matter.
            if not hasattr(sampler, "set_epoch"):
                here.sampler_state = sampler_state(sampler)
            if not self.num_workers:
                here.worker_states = {0: state} if (state := dataset_state(self.dataset)) else {}
            elif self.persistent_workers:
                here.worker_states = self._states_at_end(before)
        return here

    def _states_at_end(self, before: LoaderState) -> dict[int, dict[str, Any]]:
        states = dict(before.worker_states)
        if self._pool is not None and self._pool.board is not None:
            states |= self._pool.board.read_ends()
        return {worker: between_epochs(state) for worker, state in states.items()}

    @property
    def _generator_of_seeds(self) -> torch.Generator | None:
        """The user's generator, from which torch draws worker seeds; None if the sampler uses it, too."""
        generator = self.generator if isinstance(self.generator, torch.Generator) else None  # torch rejects others
        return None if generator is own_generator(unwrap_batch_sampler(self._own_sampler)) else generator

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume in the next iteration where ``state_dict`` was called, with the remaining batches.

        The remaining samples and their order are always restored; their random numbers, if both loaders have the same
        ``seed``. In this case, the number of workers may differ. With ``num_shards`` or a ``DistributedSampler``, the
        number of processes may differ: they share the remaining samples. A custom batch sampler is advanced past the
        earlier batches, and so is an IterableDataset, which needs the same number of workers.

        Raises:
            ValueError: the argument is not such a state, or comes from a loader with a different seed or number of
                samples; or it is from the middle of an epoch, and the order (``shuffle``, ``num_shards`` or none) or,
                for an IterableDataset, the number of workers differs.
        """
        here = self.seed, self._dataset_length, self._order, self.num_workers
        saved = LoaderState.from_state_dict(state_dict, *here)
        self._begin(saved.resume_for(self._sharded))
        self._loader_state = None

    @property
    def _own_sampler(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def _order(self) -> str:
        """Order of torch's own samplers, "shuffled" or "unshuffled"; "" for any other sampler."""
        names = {RandomSampler: "shuffled", SequentialSampler: "unshuffled"}
        return names.get(type(unwrap_batch_sampler(self._own_sampler)), "")

    @property
    def _sharded(self) -> ShardedSampler | None:
        return find_sharded_sampler(self._own_sampler)

    def _begin(self, loader_state: LoaderState) -> None:
        self._next_epoch = loader_state
        if self._sharded is not None:
            self._sharded.set_epoch(loader_state.epoch)

    @property
    def _upcoming(self) -> LoaderState:
        """State of the next epoch. An epoch set by ``loader.sampler.set_epoch`` on a sharded sampler has precedence."""
        if self._sharded is not None and self._sharded.epoch != self._next_epoch.epoch:
            self._next_epoch = LoaderState(self._sharded.epoch)
        return self._next_epoch

    @property
    def _dataset_length(self) -> int | None:
        return None if isinstance(self.dataset, IterableDataset) else get_length(self.dataset)
