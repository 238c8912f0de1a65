"""States of datasets and their iterators: recorded with each batch, and restored from a checkpoint.

As in ``torchdata.stateful_dataloader``, each worker's dataset has its own state. The recorded state is that after the
last batch of the worker that the training loop received. Runs in the worker, or in the main process if there are no
workers.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from .arena import Arena
from .loader_state import is_stateful

START_BYTES = 1 << 12
LENGTH_BYTES = 8
LOOK_AGAIN_S = 0.001

WorkerStates = Mapping[int, dict[str, Any]]
"""States by worker number, which is 0 without workers. The keys of a state are "dataset" and "iterator", each present
if the object has a state. "itself" is the state of a dataset that is its own iterator. "ended" means that the worker
has no more samples in this epoch; the dataset may then already be at the start of the next epoch."""


def dataset_state(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset.state_dict()} if is_stateful(dataset) else {}


def load_dataset_state(dataset: Any, state: dict[str, Any]) -> None:
    if "dataset" in state and is_stateful(dataset):
        dataset.load_state_dict(state["dataset"])


def between_epochs(state: dict[str, Any]) -> dict[str, Any]:
    """Return the dataset's part of a state, which is kept between epochs. The next epoch has a new iterator."""
    kept = [state[name] for name in ("dataset", "itself") if name in state]
    return {"dataset": kept[0]} if kept else {}


class StateBoard:
    """Shared memory for dataset states that are not sent with a batch: those at the start and at the end of an epoch.

    It raises OSError if the system cannot provide shared memory.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._arena = workers, Arena(2 * workers, START_BYTES)

    @classmethod
    def of(cls, dataset: Any, workers: int) -> StateBoard | None:
        """Return a board if the dataset may have a state and memory can be shared with workers; otherwise None."""
        may_have = isinstance(dataset, IterableDataset) or is_stateful(dataset)
        return cls(workers) if workers and may_have and hasattr(os, "memfd_create") else None

    def write(self, worker: int, state: dict[str, Any], is_end: bool = False) -> None:
        """Write the state at the start or at the end of an epoch. Worker."""
        slot, data = worker + is_end * self._workers, np.frombuffer(pickle.dumps(state), np.uint8)
        memory = self._arena.memory(slot, LENGTH_BYTES + len(data))
        memory[:LENGTH_BYTES].view(np.int64)[0] = len(data)
        memory[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data
        self._arena.mark_ready(slot)

    def forget(self) -> None:
        """Discard all states before an epoch begins. Main process."""
        for slot in range(2 * self._workers):
            self._arena.mark_ready(slot, False)

    def read_start(self, worker: int, is_alive: Callable[[], bool]) -> dict[str, Any]:
        """Wait for a worker that is starting. Return its state at the epoch's start; {} if it died. Main process."""
        while not self._arena.is_ready(worker) and is_alive():
            time.sleep(LOOK_AGAIN_S)
        return self._read(worker)

    def read_ends(self) -> dict[int, dict[str, Any]]:
        """Return the states of the workers that have reached the end of the epoch, by worker number. Main process."""
        found = {worker: self._read(worker + self._workers) for worker in range(self._workers)}
        return {worker: state for worker, state in found.items() if state}

    def _read(self, slot: int) -> dict[str, Any]:
        if not self._arena.is_ready(slot):
            return {}
        length = int(self._arena.memory(slot, LENGTH_BYTES)[:LENGTH_BYTES].view(np.int64)[0])
        found: dict[str, Any] = pickle.loads(self._arena.memory(slot, LENGTH_BYTES + length)[LENGTH_BYTES:].data)
        return found


class StatefulStream(IterableDataset[Any]):
    """An IterableDataset that can return the state of its current iterator.

    The first iteration begins with ``states``. Workers write states to the board, if there is one.
    """

    def __init__(self, dataset: Any, states: WorkerStates, board: StateBoard | None) -> None:
        self.dataset, self._states, self._board = dataset, states, board
        self._iterator: Any = None
        self._has_ended = False

    def __repr__(self) -> str:
        return repr(self.dataset)  # torch's warning about a wrong length prints it

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info is not None and info.dataset is self.dataset else 0
        state = self._states.get(worker, {})
        self._states = {}
        load_dataset_state(self.dataset, state)
        self._has_ended = "ended" in state
        if self._has_ended:
            return iter(())
        iterator: Iterator[Any] = iter(self.dataset)
        self._iterator = iterator
        for name in ("iterator", "itself"):
            if name in state and is_stateful(iterator):
                iterator.load_state_dict(state[name])  # type: ignore[attr-defined]
        started = self.state()
        if self._board is not None:
            self._board.write(worker, started)
        return self._with_end(iterator, worker) if started else iterator

    def _with_end(self, iterator: Iterator[Any], worker: int) -> Iterator[Any]:
        while True:
            try:
                sample = next(iterator)
            except StopIteration:
                self._has_ended = True
                if self._board is not None:
                    self._board.write(worker, self.state(), is_end=True)
                return
            yield sample

    def state(self) -> dict[str, Any]:
        ended = {"ended": True} if self._has_ended else {}
        if self._iterator is self.dataset:
            return ended | ({"itself": self.dataset.state_dict()} if is_stateful(self.dataset) else {})
        iterator = {"iterator": self._iterator.state_dict()} if is_stateful(self._iterator) else {}
        return ended | dataset_state(self.dataset) | iterator
