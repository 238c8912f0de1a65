"""CheckpointedLoader: the epoch that comes next, and ``state_dict`` in the middle of one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from .._validation import check_int
from ..data.sharded_sampler import ShardedSampler, find_sharded
from ..workers.dataset_state import between_epochs, dataset_state
from ..workers.loader_state import LoaderState
from ..workers.pool import WorkerPool
from ..workers.request_sampler import note_the_order_to_come, of_samples, own_generator, sampler_state

T = TypeVar("T")


class CheckpointedLoader(TorchDataLoader[T]):
    """What DataLoader keeps of its epochs.

    Attributes:
        seed: of the loader.
    """

    seed: int | None
    _pool: WorkerPool | None
    _next_epoch: LoaderState
    _loader_state: LoaderState | None
    """Of the epoch that was begun last."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, as for a ``DistributedSampler``. Without it the loader counts them."""
        check_int("epoch", epoch, 0)
        if self._upcoming.epoch != epoch:
            self._begin(LoaderState(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: epoch, batches that it was given, and what their order came from.

        It may be called at any time, at each step too, and can be pickled (``torch.save``). The contract is that of
        ``torchdata.stateful_dataloader.StatefulDataLoader``.

        Raises:
            ValueError: with ``in_order=False``, in the middle of an epoch: what is left is not known.
        """
        begun = self._loader_state
        if begun is not None and begun.batches and not begun.finished and not self.in_order and self.num_workers > 1:
            raise ValueError(
                "with in_order=False the loader cannot say which batches of this epoch are left; "
                "call state_dict between epochs, or use in_order=True"
            )
        here = self._between_epochs() if begun is None or begun.finished else self._in_epoch(begun)
        depends_on_workers = isinstance(self.dataset, IterableDataset) or bool(here.worker_states)
        workers = self.num_workers if depends_on_workers else None
        return here.state_dict(self.seed, self._dataset_length, self._order, workers)

    def _in_epoch(self, begun: LoaderState) -> LoaderState:
        here = begun.copied()
        if not here.batches and not isinstance(self.dataset, IterableDataset):
            note_the_order_to_come(here, of_samples(self._own_sampler), self.seed, "next")
        if not self.num_workers and self._pool is not None:
            here.worker_states = {0: state} if (state := self._pool.source.state()) else {}
        elif self._pool is not None:  # the batches bring it
            unknown = [worker for worker in range(self.num_workers) if worker not in here.worker_states]
            here.worker_states |= self._pool.states_at_start(unknown)
        return here

    def _between_epochs(self) -> LoaderState:
        here, before = self._upcoming.copied(), self._loader_state
        if here.resumes:  # a state that was loaded, and not yet begun
            return here
        sampler = of_samples(self._own_sampler)
        note_the_order_to_come(here, sampler, self.seed, "iter")
        if self._generator_of_seeds is not None:
            here.generator_states["workers"] = self._generator_of_seeds.get_state()
        goes_on = self.persistent_workers and self._pool is not None and self._pool.has_workers
        here.new_workers = not goes_on and (own_generator(sampler) is not None or self.generator is None)
        if before is not None:
            # One that is told its epoch begins that anew, wherever it was in another.
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
        """The user's, from which torch draws the workers' seeds, where the sampler draws from another one."""
        return None if self.generator is own_generator(of_samples(self._own_sampler)) else self.generator

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state_dict`` was called: with the batches that were left.

        The order and the samples are those that were left in any case. Their random numbers are, too, where both
        loaders have the same ``seed``; the number of workers may then be another, and with a ``DistributedSampler``
        the number of processes (with ``num_shards`` between epochs alone). A custom batch sampler is asked for the
        batches before and they are thrown away; so are those of an IterableDataset, which needs as many workers as
        before.

        Raises:
            ValueError: it is no such state, or that of a loader with another seed or another number of samples; or it
                is of mid-epoch, and of other shards, or in another order (``shuffle``), or of an IterableDataset with
                another number of workers.
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
        """Of torch's own samplers, "shuffled" or "unshuffled"; "" where the order is another one's matter."""
        names = {RandomSampler: "shuffled", SequentialSampler: "unshuffled"}
        return names.get(type(of_samples(self._own_sampler)), "")

    @property
    def _sharded(self) -> ShardedSampler | None:
        return find_sharded(self._own_sampler)

    def _begin(self, loader_state: LoaderState) -> None:
        self._next_epoch = loader_state
        if self._sharded is not None:
            self._sharded.set_epoch(loader_state.epoch)

    @property
    def _upcoming(self) -> LoaderState:
        """The next epoch: the one that a sharded sampler was set to, for scripts that do so by ``loader.sampler``."""
        if self._sharded is not None and self._sharded.epoch != self._next_epoch.epoch:
            self._next_epoch = LoaderState(self._sharded.epoch)
        return self._next_epoch

    @property
    def _dataset_length(self) -> int | None:
        try:
            return None if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None
