"""Loops over a reader, of which only one is active at a time. Threads may share a loop. Main process."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from .. import _fork_safety
from ..dali import executor
from .arguments import are_class_numbers
from .epochs import ReaderEpochs


class _Turn:
    """Identity of one loop, or of one epoch of ``next(loader)``. Only the batches of the current turn are returned."""

    is_over = False
    """Whether all of its batches were returned."""


class ReaderLoops:
    """Begins loops over epochs, and returns their batches. A pipeline reads one epoch at a time.

    Args:
        epochs: the epochs.
        auto_reset, style: as for ``FileReaderLoader``.
    """

    def __init__(self, epochs: ReaderEpochs, auto_reset: bool, style: str) -> None:
        self._epochs, self._auto_reset, self._style = epochs, auto_reset, style
        self._turn = _Turn()  # the current turn
        self._own_turn: _Turn | None = None  # the turn of next(loader)
        self._loop: weakref.ref[ReaderLoop] | None = None  # the loop that was begun last
        self.lock = threading.RLock()  # guards the epochs, which several threads may use
        _fork_safety.watch(self)

    def __len__(self) -> int:
        """Number of batches of the current epoch, or of the next one between epochs."""
        with self.lock:
            was_left = self._own_turn is None and self._loop is not None and self._loop() is None
            return self._epochs.batches_of(self._epochs.next_epoch) if was_left else len(self._epochs)

    def begin_loop(self) -> ReaderLoop:
        """Begin an epoch, and return its loop. This ends a loop in progress."""
        with self.lock:
            loop = ReaderLoop(self, self._begin())
            self._loop = weakref.ref(loop)
            return loop

    def _begin(self) -> _Turn:
        """Begin an epoch, and return its turn. The caller holds the lock."""
        self._epochs.begin()
        self._turn = _Turn()
        return self._turn

    def next_of_own(self) -> Any:
        """Return the next batch of the epoch of ``next(loader)``, and begin one if necessary."""
        with self.lock:
            turn = self._own_turn = self._own_turn or self._begin()
        try:
            return self.next_of(turn)
        except StopIteration:
            with self.lock:
                if self._auto_reset and turn is self._own_turn:  # otherwise another thread has begun an epoch
                    self._own_turn = None
            raise

    def end_own(self) -> None:
        """Let ``next(loader)`` begin a new epoch."""
        self._own_turn = None

    def end_all(self) -> None:
        """End all loops in progress, as the epoch has changed."""
        self._turn, self._own_turn = _Turn(), None

    def next_of(self, turn: _Turn) -> Any:
        """Return the next batch of a turn, in the style of the loader."""
        took = False
        try:
            with self.lock:  # inside the try, as Ctrl-C may come when the lock is released
                if turn.is_over:  # another thread that shares the loop has reached the end
                    raise StopIteration
                if turn is not self._turn:
                    raise RuntimeError(
                        "another loop over this FileReaderLoader has begun, and its pipeline reads one epoch at a "
                        "time. For two loops at once build two loaders"
                    )
                took = True
                try:
                    batch = self._epochs.next_batch()
                except StopIteration:
                    turn.is_over = True
                    raise
                return [batch] if self._style == "dali" else self._as_torch(batch)
        except StopIteration:
            raise
        except BaseException:
            if took and turn is self._turn:
                self._epochs.lose_batch()
                self._own_turn = None
            raise

    def _as_torch(self, batch: dict[str, torch.Tensor]) -> Any:
        names = self._epochs.output_map
        outputs = [batch[name] for name in names]
        for at, name in enumerate(names):
            if name == "label" and are_class_numbers(outputs[at], len(outputs[0])):
                outputs[at] = outputs[at].reshape(-1).to(outputs[0].device, torch.int64)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    # --- around a fork: see NOTE [ Forks ] in _fork_safety.py --------------------------------------------------------

    def pause(self) -> bool:
        """Return whether there may be runs. DALI always reads ahead, so there are runs if there is a pipeline."""
        return self._epochs.is_open

    def resume(self) -> None: ...

    def forget_in_child(self) -> None:
        self.lock = threading.RLock()  # a thread of the parent may hold the old lock forever
        if self._epochs.is_open:
            executor.forget_in_child(self._epochs.pipeline)
            self._epochs.close()

    def end(self) -> None:
        """Free the pipeline before the end of the interpreter."""
        self.lock = threading.RLock()  # a thread that waits until Python ends may hold the old lock
        self._epochs.close()


class ReaderLoop:
    """Iterator over one epoch of a loader."""

    def __init__(self, loops: ReaderLoops, turn: _Turn) -> None:
        self._loops: ReaderLoops | None = loops
        self._turn = turn

    def __iter__(self) -> ReaderLoop:
        return self

    def __next__(self) -> Any:
        if (loops := self._loops) is None:  # read once, as another thread may set it to None
            raise StopIteration
        try:
            return loops.next_of(self._turn)
        except StopIteration:
            self._loops = None  # a loop that has ended does not keep the pipeline alive
            raise
