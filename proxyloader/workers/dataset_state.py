"""States of datasets and their iterators: recorded with each batch, and restored from a checkpoint.

As ``torchdata.stateful_dataloader`` does it: each worker's dataset has a state of its own, which is that after its last
batch that the loop was given. Runs in the worker; in the main process where there are no workers.
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
"""By the worker's number, or 0: "dataset" and "iterator", each where it has a state. "itself" is that of a dataset that
is its own iterator. "ended": this epoch has no more samples there; the dataset may be at the start of the next one."""


def dataset_state(dataset: Any) -> dict[str, Any]:
    """Of a dataset that is not being iterated over."""
    return {"dataset": dataset.state_dict()} if is_stateful(dataset) else {}


def load_dataset_state(dataset: Any, state: dict[str, Any]) -> None:
    """Give a dataset the state that it had, before anything is asked of it."""
    if "dataset" in state and is_stateful(dataset):
        dataset.load_state_dict(state["dataset"])


def between_epochs(state: dict[str, Any]) -> dict[str, Any]:
    """What is left of a state when the iteration is over: the iterator is another one then."""
    kept = [state[name] for name in ("dataset", "itself") if name in state]
    return {"dataset": kept[0]} if kept else {}


class StateBoard:
    """Memory in which workers leave the states that come with no batch: those of an epoch's start and of its end.

    Args:
        workers: how many.

    Raises:
        OSError: the system gives no memory to share.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._arena = workers, Arena(2 * workers, START_BYTES)

    @classmethod
    def of(cls, dataset: Any, workers: int) -> StateBoard | None:
        """One for a dataset that may have states; None where it has none, or where there is nobody to share with."""
        may_have = isinstance(dataset, IterableDataset) or is_stateful(dataset)
        return cls(workers) if workers and may_have and hasattr(os, "memfd_create") else None

    def write(self, worker: int, state: dict[str, Any], is_end: bool = False) -> None:
        """In the worker."""
        slot, data = worker + is_end * self._workers, np.frombuffer(pickle.dumps(state), np.uint8)
        memory = self._arena.memory(slot, LENGTH_BYTES + len(data))
        memory[:LENGTH_BYTES].view(np.int64)[0] = len(data)
        memory[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data
        self._arena.mark_ready(slot)

    def forget(self) -> None:
        """Before an epoch begins. In the main process."""
        for slot in range(2 * self._workers):
            self._arena.mark_ready(slot, False)

    def read_start(self, worker: int, is_alive: Callable[[], bool]) -> dict[str, Any]:
        """Wait for a worker that is starting. In the main process."""
        while not self._arena.is_ready(worker) and is_alive():
            time.sleep(LOOK_AGAIN_S)
        return self._read(worker)

    def read_ends(self) -> dict[int, dict[str, Any]]:
        """Of the workers that have come so far. In the main process."""
        found = {worker: self._read(worker + self._workers) for worker in range(self._workers)}
        return {worker: state for worker, state in found.items() if state}

    def _read(self, slot: int) -> dict[str, Any]:
        if not self._arena.is_ready(slot):
            return {}
        length = int(self._arena.memory(slot, LENGTH_BYTES)[:LENGTH_BYTES].view(np.int64)[0])
        found: dict[str, Any] = pickle.loads(self._arena.memory(slot, LENGTH_BYTES + length)[LENGTH_BYTES:].data)
        return found


class StatefulStream(IterableDataset[Any]):
    """An IterableDataset, whose iterator can be asked for its state.

    Args:
        dataset: the user's, or a copy of it.
        states: to begin the first iteration with.
        board: that workers write to.
    """

    def __init__(self, dataset: Any, states: WorkerStates, board: StateBoard | None) -> None:
        self.dataset, self._states, self._board = dataset, states, board
        self._iterator: Any = None
        self._has_ended = False

    def __repr__(self) -> str:
        return repr(self.dataset)  # which torch's warning about a wrong length names

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
        """Of the dataset and of the iterator that was made last."""
        ended = {"ended": True} if self._has_ended else {}
        if self._iterator is self.dataset:
            return ended | ({"itself": self.dataset.state_dict()} if is_stateful(self.dataset) else {})
        iterator = {"iterator": self._iterator.state_dict()} if is_stateful(self._iterator) else {}
        return ended | dataset_state(self.dataset) | iterator
