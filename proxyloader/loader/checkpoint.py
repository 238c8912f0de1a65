"""CheckpointedLoader: ``set_epoch``, ``state_dict`` and ``load_state_dict`` of a loader. Main process."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from .._validation import check_int
from ..data.dataset import get_length
from ..data.sharded_sampler import ShardedSampler, find_sharded_sampler
from ..workers.loader_state import LoaderState, carry_over, dataset_state
from ..workers.pool import WorkerPool
from ..workers.request_sampler import record_upcoming_order, sampler_generator, sampler_state, unwrap_batch_sampler

T = TypeVar("T")


class CheckpointedLoader(TorchDataLoader[T]):
    """Base class of DataLoader that tracks its epochs and their state."""

    seed: int | None
    _pool: WorkerPool | None
    _next_epoch: LoaderState
    _loader_state: LoaderState | None
    """State of the current or last epoch, or None."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as with ``DistributedSampler``. By default the loader counts epochs."""
        check_int("epoch", epoch, 0)
        if self._next_state.epoch != epoch:
            self._set_next_state(LoaderState(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop: epoch, number of batches returned, and the states that determine the order.

        Can be called at any time, even in every step. The state can be pickled or saved with ``torch.save``. The
        semantics are those of ``torchdata.stateful_dataloader.StatefulDataLoader``.

        Raises:
            ValueError: in the middle of an epoch with ``in_order=False``, as the remaining batches are unknown.
        """
        current, is_ordered = self._loader_state, self.in_order or self.num_workers <= 1
        if current is not None and current.batches and not current.finished and not is_ordered:
            raise ValueError(
                "with in_order=False the remaining batches of an epoch are unknown; call state_dict between epochs, or "
                "use in_order=True"
            )
        state = self._state_between_epochs() if current is None or current.finished else self._state_in_epoch(current)
        depends_on_workers = isinstance(self.dataset, IterableDataset) or bool(state.worker_states)
        workers = self.num_workers if depends_on_workers else None
        return state.state_dict(self.seed, self._dataset_length, self._order, workers)

    def _state_in_epoch(self, current: LoaderState) -> LoaderState:
        state = current.copy()
        if not state.batches and not isinstance(self.dataset, IterableDataset):
            record_upcoming_order(state, unwrap_batch_sampler(self._user_sampler), self.seed, "next")
        if self._pool is None or self._pool.worker_dataset is None:
            return state
        if not self.num_workers:
            state.worker_states = {0: saved} if (saved := self._pool.worker_dataset.state()) else {}
        else:  # each batch carries the state of its worker
            unknown = [worker for worker in range(self.num_workers) if worker not in state.worker_states]
            state.worker_states |= self._pool.states_at_start(unknown)
        return state

    def _state_between_epochs(self) -> LoaderState:
        state, previous = self._next_state.copy(), self._loader_state
        if state.resumes:  # a state was loaded, and its epoch has not started
            return state
        sampler = unwrap_batch_sampler(self._user_sampler)
        record_upcoming_order(state, sampler, self.seed, "iter")
        if self._seed_generator is not None:
            state.generator_states["workers"] = self._seed_generator.get_state()
        workers_persist = self.persistent_workers and self._pool is not None and self._pool.has_workers
        state.new_workers = not workers_persist and (sampler_generator(sampler) is not None or self.generator is None)
        if previous is not None:
            # A sampler with set_epoch restarts at each epoch, so its position does not matter.
            if not hasattr(sampler, "set_epoch"):
                state.sampler_state = sampler_state(sampler)
            if not self.num_workers:
                state.worker_states = {0: saved} if (saved := dataset_state(self.dataset)) else {}
            elif self.persistent_workers:
                state.worker_states = self._states_at_end(previous)
        return state

    def _states_at_end(self, previous: LoaderState) -> dict[int, dict[str, Any]]:
        states = dict(previous.worker_states)
        if self._pool is not None and self._pool.board is not None:
            states |= self._pool.board.read_end_states()
        return {worker: carry_over(state) for worker, state in states.items()}

    @property
    def _seed_generator(self) -> torch.Generator | None:
        """The user's generator, from which torch draws worker seeds; None if the sampler also uses it."""
        generator = self.generator if isinstance(self.generator, torch.Generator) else None  # torch rejects others
        return None if generator is sampler_generator(unwrap_batch_sampler(self._user_sampler)) else generator

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume in the next iteration where ``state_dict`` was called, with the remaining batches.

        The remaining samples and their order are always restored, and so are their random numbers if the loader has a
        ``seed``. In this case, the number of workers may differ. With ``num_shards`` or a ``DistributedSampler``, the
        number of processes may differ: they share the remaining samples. A custom batch sampler is advanced past the
        earlier batches, and so is an IterableDataset, which requires the same number of workers.

        Raises:
            ValueError: the argument is not such a state, or comes from a loader with a different seed or number of
                samples; or it is from the middle of an epoch, and the order (``shuffle``, ``num_shards`` or none) or,
                for an IterableDataset, the number of workers differs.
        """
        fingerprint = self.seed, self._dataset_length, self._order, self.num_workers
        saved = LoaderState.from_state_dict(state_dict, *fingerprint)
        self._set_next_state(saved.resume_for(self._sharded))
        self._loader_state = None

    @property
    def _user_sampler(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def _order(self) -> str:
        """Order of torch's own samplers, "shuffled" or "unshuffled"; "" for any other sampler."""
        names = {RandomSampler: "shuffled", SequentialSampler: "unshuffled"}
        return names.get(type(unwrap_batch_sampler(self._user_sampler)), "")

    @property
    def _sharded(self) -> ShardedSampler | None:
        return find_sharded_sampler(self._user_sampler)

    def _set_next_state(self, loader_state: LoaderState) -> None:
        self._next_epoch = loader_state
        if self._sharded is not None:
            self._sharded.set_epoch(loader_state.epoch)

    @property
    def _next_state(self) -> LoaderState:
        """State of the next epoch. ``loader.sampler.set_epoch`` of a sharded sampler takes precedence."""
        if self._sharded is not None and self._sharded.epoch != self._next_epoch.epoch:
            self._next_epoch = LoaderState(self._sharded.epoch)
        return self._next_epoch

    @property
    def _dataset_length(self) -> int | None:
        return None if isinstance(self.dataset, IterableDataset) else get_length(self.dataset)
