"""Loops over a reader: one at a time has the turn, and threads may share it. Main process."""

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
    """Whose batches are handed out: those of one loop, or of ``next(loader)`` in one epoch."""

    is_over = False
    """All of them were."""


class ReaderLoops:
    """Begins loops over epochs, and hands out their batches. One pipeline cannot read two epochs at once.

    Args:
        epochs: what is handed out.
        auto_reset, style: as ``FileReaderLoader`` takes them.
    """

    def __init__(self, epochs: ReaderEpochs, auto_reset: bool, style: str) -> None:
        self._epochs, self._auto_reset, self._style = epochs, auto_reset, style
        self._turn = _Turn()  # of the loop whose batches are handed out
        self._own_turn: _Turn | None = None  # of next(loader)
        self._loop: weakref.ref[ReaderLoop] | None = None  # that was begun last
        self.lock = threading.RLock()  # of the epoch, which several threads may ask
        _fork_safety.watch(self)

    def __len__(self) -> int:
        """How many batches the epoch has that is under way, or comes next."""
        with self.lock:
            was_left = self._own_turn is None and self._loop is not None and self._loop() is None
            return self._epochs.batches_of(self._epochs.next_epoch) if was_left else len(self._epochs)

    def begin_loop(self) -> ReaderLoop:
        """Begin an epoch. A loop that was under way ends."""
        with self.lock:
            loop = ReaderLoop(self, self._begin())
            self._loop = weakref.ref(loop)
            return loop

    def _begin(self) -> _Turn:
        """Begin an epoch, and a turn that it belongs to. Under the lock."""
        self._epochs.begin()
        self._turn = _Turn()
        return self._turn

    def next_of_own(self) -> Any:
        """The next batch of the epoch that ``next(loader)`` has begun."""
        with self.lock:
            turn = self._own_turn = self._own_turn or self._begin()
        try:
            return self.next_of(turn)
        except StopIteration:
            with self.lock:
                if self._auto_reset and turn is self._own_turn:  # else another thread has begun an epoch
                    self._own_turn = None
            raise

    def end_own(self) -> None:
        """Let ``next(loader)`` begin an epoch."""
        self._own_turn = None

    def end_all(self) -> None:
        """Loops that are under way; the epoch is another."""
        self._turn, self._own_turn = _Turn(), None

    def next_of(self, turn: _Turn) -> Any:
        """The next batch, in the style that was asked for."""
        took = False
        try:
            with self.lock:  # in the try, for Ctrl-C may come when it is given back
                if turn.is_over:  # as another thread has seen that shares the loop
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
        """DALI reads ahead whatever is asked of it, so it says that runs were under way."""
        return self._epochs.is_open

    def resume(self) -> None: ...

    def forget_in_child(self) -> None:
        self.lock = threading.RLock()  # the other is held for ever by a thread that is not here, perhaps
        if self._epochs.is_open:
            executor.forget_in_child(self._epochs.pipeline)
            self._epochs.close()

    def end(self) -> None:
        """The interpreter ends, and the pipeline before."""
        self.lock = threading.RLock()  # a thread that waits until Python ends may hold the other
        self._epochs.close()


class ReaderLoop:
    """One epoch of a loader."""

    def __init__(self, loops: ReaderLoops, turn: _Turn) -> None:
        self._loops: ReaderLoops | None = loops
        self._turn = turn

    def __iter__(self) -> ReaderLoop:
        return self

    def __next__(self) -> Any:
        if (loops := self._loops) is None:  # which another thread may set meanwhile
            raise StopIteration
        try:
            return loops.next_of(self._turn)
        except StopIteration:
            self._loops = None  # a loop that has ended keeps no pipeline
            raise
