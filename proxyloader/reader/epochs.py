"""Epochs of a DALI pipeline that reads files: one after the other, left early, resumed. Main process.

NOTE [ Epochs of a reader ]
DALI's iterators separate epochs only if the reader pads its last batch (``pad_last_batch``), so our reader always does.
The iterator then removes the padding (PARTIAL) or keeps it (FILL). With DROP it miscounts padded batches if shards
differ by one sample, and begins the next epoch with one of them (DALI 2.4). So DROP is implemented here as FILL without
the last batch. DALI cannot leave an epoch in the middle, as batches that its threads have read ahead would appear in
the next epoch. So after a ``break`` the pipeline is rebuilt for the next shard, with another seed. If a pipeline of the
user cannot be rebuilt, the rest of its epoch is read and discarded.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import lifetime
from ..dali import api, executor, jpeg_engines
from ..data.sharded_sampler import LastBatchPolicy
from ..errors import PipelineError
from ..lifetime import before_exit
from .arguments import check_state, names_of, what_failed
from .pipeline_factory import PipelineFactory

log = logging.getLogger(__name__)

STATE_VERSION = 2

CLOSED = "this FileReaderLoader was closed, or belongs to the process that this one was forked from"

TAKEN_OVER = (
    "another FileReaderLoader or ProxyServer was made over this loader's pipeline, which one alone can read: "
    "build a pipeline for each"
)


def shard_after(meta: dict[str, Any], epochs: int) -> range:
    """Return the samples of the shard that is read ``epochs`` epochs later, as indices in the reader's list."""
    samples, shards = meta["epoch_size"], meta["number_of_shards"]
    shard = (meta["shard_id"] + (0 if meta["stick_to_shard"] else epochs)) % shards
    return range(shard * samples // shards, (shard + 1) * samples // shards)


def batches_after(meta: dict[str, Any], epochs: int, batch_size: int, policy: LastBatchPolicy) -> int:
    """Return the number of batches of the shard that is read ``epochs`` epochs later."""
    samples, shards = meta["epoch_size"], meta["number_of_shards"]
    if policy is LastBatchPolicy.DROP:
        return int(samples // shards // batch_size)
    longest = math.ceil(samples / shards)
    return math.ceil((longest if policy is LastBatchPolicy.FILL else len(shard_after(meta, epochs))) / batch_size)


def warn_of_epochs(reader_name: str, meta: dict[str, Any], before: dict[str, Any]) -> None:
    """Log a warning if the data has changed since the metadata ``before``, or if epochs are not separated."""
    if before and before["epoch_size"] != meta["epoch_size"]:
        log.warning(
            "the reader lists %d samples now, and listed %d before: the data was changed. Shards that have listed "
            "it at different times do not fit together",
            meta["epoch_size"],
            before["epoch_size"],
        )
    if not before and not meta["pad_last_batch"]:
        log.warning(
            "the reader %r does not pad its last batch, so epochs run into each other: "
            "give it pad_last_batch=True for epochs in which each sample comes once",
            reader_name,
        )


class Progress(enum.Enum):
    """Progress of the current epoch."""

    READY = "no batch was taken; the epoch may have had some before a checkpoint"
    UNDER_WAY = "batches were taken"
    BROKEN = "the loop failed, or was interrupted, so that DALI's iterator may have lost count"


class ReaderLoop:
    """Iterator over one epoch. Threads may share it."""

    has_failed = False
    """Whether it failed or was interrupted, so that batches may be missing."""

    def __init__(self, epochs: ReaderEpochs) -> None:
        self.epochs: ReaderEpochs | None = epochs  # None after the last batch, as it would keep the pipeline alive

    @property
    def is_over(self) -> bool:
        """Whether all batches were returned."""
        return self.epochs is None

    def __iter__(self) -> ReaderLoop:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
            PipelineError: DALI failed.
            RuntimeError: another loop has begun, this loop failed or was interrupted, or the loader was closed.
        """
        if (epochs := self.epochs) is None:  # read once, as another thread may set it to None
            raise StopIteration
        took = False
        try:
            with epochs.lock:  # inside the try, as Ctrl-C may come when the lock is released
                if self.is_over:  # another thread that shares the loop has reached the end
                    raise StopIteration
                epochs.pipeline  # noqa: B018  raises where there is none
                if epochs.loop() is not self:
                    raise RuntimeError(
                        "another loop over this FileReaderLoader has begun, and its pipeline reads one epoch at a "
                        "time. For two loops at once build two loaders"
                    )
                if self.has_failed:
                    raise RuntimeError(
                        "this loop failed, or was interrupted, in the middle of a batch; begin a new one: iter(loader)"
                    )
                took = True
                return epochs.style(epochs.next_batch(self))
        except BaseException:
            if took and epochs.loop() is self and epochs.progress is Progress.UNDER_WAY:
                self.has_failed, epochs.progress = True, Progress.BROKEN
            raise


def no_loop() -> None:
    """Stand for the weak reference to a loop, if there is none."""


class ReaderEpochs:
    """The batches of a pipeline and of DALI's iterator over it, epoch by epoch. One loop is active at a time.

    Args:
        factory: returns the pipeline, and the pipeline after a loop that was left early.
        policy: what to do with the last batch of a shard.
        output_map: names of the pipeline's outputs, or None for the default names.
        style: returns a batch in the style of the loader, from the outputs by their names.
    """

    def __init__(
        self,
        factory: PipelineFactory,
        policy: LastBatchPolicy,
        output_map: Sequence[str] | None,
        style: Callable[[dict[str, torch.Tensor]], Any],
    ) -> None:
        self.factory, self._policy, self.style = factory, policy, style
        self.lock = threading.RLock()  # guards all of this, as several threads may share a loop
        self._meta: dict[str, Any] = {}  # DALI's metadata of the reader
        self._why_closed = ""  # not part of the progress, as closing is final, and other threads may close
        self.output_map: Any = output_map
        self.open(0)
        lifetime.watch(self)

    @before_exit()
    def open(self, epoch: int, checkpoint: bytes | None = None) -> None:
        """Build the pipeline and DALI's iterator, at the start of an epoch or at a checkpoint. This ends all loops."""
        if self._why_closed:
            raise RuntimeError(self._why_closed)
        self._epoch = epoch  # the current epoch, or the next one between epochs
        self._batches: Any = None
        self._pipeline: api.Pipeline | None = None  # freed first, so that only one is in memory
        self.progress, self._handed_out = Progress.READY, 0
        self.loop: Callable[[], ReaderLoop | None] = no_loop  # a weak reference to the loop that was begun last
        pipeline, reader = self.factory.build(epoch, checkpoint, owner=self), self.factory.reader_name
        before, self._meta = self._meta, pipeline.reader_meta(reader)
        warn_of_epochs(reader, self._meta, before)
        self._first_epoch = epoch  # the epoch whose shard the metadata describes
        self.output_map = names_of(self.output_map, pipeline.num_outputs)
        drops_padded = self._policy is LastBatchPolicy.DROP and self._meta["pad_last_batch"]
        policy = LastBatchPolicy.FILL if drops_padded else self._policy  # see NOTE [ Epochs of a reader ]
        self._batches = api.DALIGenericIterator(
            pipeline,
            self.output_map,
            reader_name=reader,
            auto_reset=True,
            last_batch_policy=api.LastBatchPolicy[policy.name],
            prepare_first_batch=False,
        )
        self._handed_out = executor.batches_before(pipeline)
        self._pipeline = pipeline

    @property
    def pipeline(self) -> api.Pipeline:
        if self._pipeline is None:
            raise RuntimeError(self._why_closed or "the epoch could not begin; try again: iter(loader)")
        return self._pipeline

    @property
    def batch_size(self) -> int:
        return int(self.pipeline.max_batch_size)

    def __len__(self) -> int:
        """Number of batches of the current epoch, or of the next one between epochs and after a loop that was left."""
        with self.lock:
            return self._batches_of(self.next_epoch if self.loop() is None else self._epoch)

    def _batches_of(self, epoch: int) -> int:
        return batches_after(self._meta, epoch - self._first_epoch, self.batch_size, self._policy)

    @property
    def next_epoch(self) -> int:
        """The epoch that ``begin`` would begin or continue."""
        return self._epoch + (self.progress is not Progress.READY)

    def begin(self) -> ReaderLoop:
        """Begin the next epoch, also from the middle of one, and return its loop. This ends a loop in progress."""
        with self.lock:
            if self._pipeline is None:
                self.open(self._epoch)  # the last attempt failed, for example as the folder was missing
            if self.progress is not Progress.READY:
                self._leave()
            elif not self._handed_out and jpeg_engines.have_failed(self.pipeline):
                self.open(self._epoch)
            loop = ReaderLoop(self)
            self.loop = weakref.ref(loop)
            return loop

    def _leave(self) -> None:
        """Go from the middle of an epoch to the start of the next one. See NOTE [ Epochs of a reader ]."""
        if not (why_not := self.factory.why_not_anew(self._meta)):
            self.open(self._epoch + 1)
        elif self.progress is Progress.BROKEN:
            raise RuntimeError(
                f"an epoch failed, and the pipeline that was given {why_not}: build it anew, or let "
                "FileReaderLoader(root, function) build it"
            )
        else:
            log.warning(
                "the loop was left early, and the pipeline that was given %s: what is left is read and thrown away",
                why_not,
            )
            for _ in self._batches:
                pass
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._epoch += 1
        self.progress, self._handed_out = Progress.READY, 0

    def next_batch(self, loop: ReaderLoop) -> dict[str, torch.Tensor]:
        """Return the outputs of the next batch by their names, or end the loop and the epoch."""
        self.progress, length = Progress.UNDER_WAY, self._batches_of(self._epoch)
        if self._handed_out < length and jpeg_engines.have_failed(self.pipeline):
            raise jpeg_engines.error_of(self.pipeline)
        try:
            while True:
                with before_exit():
                    (batch,) = next(self._batches)
                self._handed_out += 1
                if self._policy is LastBatchPolicy.DROP and self._handed_out > length:
                    continue  # the next call ends the epoch
                if len(batch[self.output_map[0]]):  # a smaller shard ends with an empty batch
                    return {name: batch[name] for name in self.output_map}
        except StopIteration:
            if self._handed_out < length and executor.calls_functions(self.pipeline):
                log.warning(
                    "the epoch ended after %d of %d batches: a function that the pipeline calls for data gives no "
                    "more. Let it give as much as the reader, and give fn.external_source cycle='raise'",
                    self._handed_out,
                    length,
                )
            loop.epochs = None
            self._end_epoch()
            raise
        except (RuntimeError, AssertionError) as error:
            at = self._handed_out * self.batch_size
            shard = shard_after(self._meta, self._epoch - self._first_epoch)  # if it is not shuffled
            blamed = self.factory.find_bad_file(error, shard[at : at + self.batch_size])
            raise PipelineError(what_failed(error, blamed)) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, with DALI's checkpoint."""
        if not executor.keeps_checkpoints(self.pipeline):
            raise ValueError("the pipeline keeps no checkpoints; build it with enable_checkpointing=True")
        (checkpoint,) = self._batches.checkpoints()
        return {
            **self._fingerprint,
            "epoch": self._epoch,
            "first_epoch": self._first_epoch,
            "batches": self._handed_out,
            "checkpoint": checkpoint,
        }

    @property
    def _fingerprint(self) -> dict[str, Any]:
        """The keys and values that a state must agree with."""
        own = self.factory.fingerprint(self._policy)
        return {"version": STATE_VERSION, **own, "samples": int(self._meta["epoch_size"])}

    def load_state_dict(self, state: Any) -> None:
        check_state(state, self._fingerprint)
        before = self.next_epoch
        try:
            self.open(state["first_epoch"], state["checkpoint"])
        except RuntimeError as error:
            self.open(before)
            raise ValueError(
                f"DALI cannot go on from this state, which is of another pipeline than this loader's: {error}"
            ) from error
        self._epoch, self._handed_out = state["epoch"], state["batches"]

    def lose_pipeline(self) -> None:
        """Give up the pipeline, which another loader or server has taken over."""
        self._why_closed = TAKEN_OVER
        self.close()

    def close(self) -> None:
        self._why_closed = self._why_closed or CLOSED  # first, as freeing takes time and other threads read it
        self._batches = self._pipeline = None
        self.factory.close()

    def __repr__(self) -> str:
        read = f"{self._meta['epoch_size']} samples, shard {self._meta['shard_id']} of {self._meta['number_of_shards']}"
        state = "closed" if self._why_closed else "to be opened"
        if self._pipeline is not None:
            state = f"{len(self)} batches of {self.batch_size}"
        return f"{read}; {state}; {self._policy.value}"

    # --- around a fork: see NOTE [ What ends when ] in lifetime.py ---------------------------------------------------

    def pause(self) -> bool:
        """Return whether there may be runs. DALI always reads ahead, so there are runs if there is a pipeline."""
        return self._pipeline is not None

    def resume(self) -> None: ...

    def forget_in_child(self) -> None:
        self.lock = threading.RLock()  # a thread of the parent may hold the old lock forever
        if self._pipeline is not None:
            executor.forget_in_child(self._pipeline)
            self.close()

    def end(self) -> None:
        """Free the pipeline before the end of the interpreter."""
        self.lock = threading.RLock()  # a thread that waits until Python ends may hold the old lock
        self.close()
