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

import contextlib
import enum
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._exit_safety import before_exit
from ..dali import api, executor
from ..data.sharded_sampler import LastBatchPolicy
from ..errors import PipelineError
from .arguments import check_state, names_of, what_failed
from .pipeline_factory import PipelineFactory

log = logging.getLogger(__name__)

STATE_VERSION = 2

CLOSED = "this FileReaderLoader was closed, or belongs to the process that this one was forked from"

TAKEN_OVER = (
    "another FileReaderLoader or ProxyServer was made over this loader's pipeline, which one alone can read: "
    "build a pipeline for each"
)


def shard_after(meta: Mapping[str, Any], epochs: int) -> range:
    """Return the samples of the shard that is read ``epochs`` epochs later, as indices in the reader's list."""
    samples, shards = meta["epoch_size"], meta["number_of_shards"]
    shard = (meta["shard_id"] + (0 if meta["stick_to_shard"] else epochs)) % shards
    return range(shard * samples // shards, (shard + 1) * samples // shards)


def batches_after(meta: Mapping[str, Any], epochs: int, batch_size: int, policy: LastBatchPolicy) -> int:
    """Return the number of batches of the shard that is read ``epochs`` epochs later."""
    samples, shards = int(meta["epoch_size"]), int(meta["number_of_shards"])
    if policy is LastBatchPolicy.DROP:
        return samples // shards // batch_size
    if policy is LastBatchPolicy.FILL:
        return math.ceil(math.ceil(samples / shards) / batch_size)
    return math.ceil(len(shard_after(meta, epochs)) / batch_size)


def warn_of_epochs(reader_name: str, meta: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Log a warning if the data has changed, or if epochs are not separated.

    Args:
        reader_name: name of the reader.
        meta: DALI's metadata of the reader.
        before: the metadata in the pipeline before; empty for the first pipeline.
    """
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


def iterator_over(pipeline: api.Pipeline, reader_name: str, policy: LastBatchPolicy, output_map: Sequence[str]) -> Any:
    """Return DALI's iterator over a pipeline. See NOTE [ Epochs of a reader ]."""
    if policy is LastBatchPolicy.DROP and pipeline.reader_meta(reader_name)["pad_last_batch"]:
        policy = LastBatchPolicy.FILL
    how = {
        "reader_name": reader_name,
        "auto_reset": True,
        "last_batch_policy": api.LastBatchPolicy[policy.name],
        "prepare_first_batch": False,
    }
    if output_map == ["data", "label"]:
        return api.DALIClassificationIterator(pipeline, **how)
    return api.DALIGenericIterator(pipeline, output_map, **how)


class Progress(enum.Enum):
    """Progress of the loop over an epoch."""

    READY = "no batch was taken; the epoch may have had some before a checkpoint"
    UNDER_WAY = "batches were taken"
    BROKEN = "it failed, or was interrupted, so that DALI's iterator may have lost count"
    OVER = "all batches were taken"


class ReaderEpochs:
    """The batches of a pipeline and of DALI's iterator over it, epoch by epoch.

    Args:
        factory: returns the pipeline, and the pipeline after a loop that was left early.
        policy: what to do with the last batch of a shard.
        output_map: names of the pipeline's outputs, or None for the default names.

    Raises:
        FileNotFoundError, ValueError: as for ``FileReaderLoader``.
    """

    def __init__(self, factory: PipelineFactory, policy: LastBatchPolicy, output_map: Sequence[str] | None) -> None:
        self.factory, self._policy = factory, policy
        self._epoch = 0  # the current epoch, or the next one between epochs
        self._meta: dict[str, Any] = {}  # DALI's metadata of the reader
        self._why_closed = ""  # not part of the progress, as closing is final, and other threads may close
        self._open(output_map)

    @before_exit()
    def _open(self, output_map: Sequence[str] | None, checkpoint: bytes | None = None) -> None:
        """Build the pipeline and DALI's iterator over it."""
        if self._why_closed:
            raise RuntimeError(self._why_closed)
        self._batches: Any = None
        self._pipeline: api.Pipeline | None = None  # freed first, so that only one is in memory
        self._progress, self._handed_out = Progress.READY, 0
        pipeline, reader = self.factory.build(self._epoch, checkpoint, owner=self), self.factory.reader_name
        before, self._meta = self._meta, pipeline.reader_meta(reader)
        warn_of_epochs(reader, self._meta, before)
        self._first_epoch = self._epoch  # the epoch whose shard the metadata describes
        self.output_map = names_of(output_map, pipeline.num_outputs)
        self._batches = iterator_over(pipeline, reader, self._policy, self.output_map)
        self._handed_out = executor.batches_before(pipeline)
        self._pipeline = pipeline

    @property
    def is_open(self) -> bool:
        """Whether there is a pipeline. If there is none and the loader is not closed, the next loop builds it."""
        return self._pipeline is not None

    @property
    def pipeline(self) -> api.Pipeline:
        if self._pipeline is None:
            raise RuntimeError(self._why_closed or "the epoch could not begin; try again: iter(loader)")
        return self._pipeline

    @property
    def batch_size(self) -> int:
        return int(self.pipeline.max_batch_size)

    def __len__(self) -> int:
        """Number of batches of the current epoch, or of the next one between epochs."""
        return self.batches_of(self._epoch)

    def batches_of(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return batches_after(self._meta, epoch - self._first_epoch, self.batch_size, self._policy)

    def begin(self) -> None:
        """Begin the next epoch, also from the middle of one."""
        if not self.is_open and not self._why_closed:
            self._open(self.output_map)  # the last attempt failed, for example as the folder was missing
        self.pipeline  # noqa: B018  raises where there is none
        if self._progress in (Progress.UNDER_WAY, Progress.BROKEN):
            self._leave()
        elif self._progress is Progress.OVER:
            self._progress, self._handed_out = Progress.READY, 0

    def next_batch(self) -> dict[str, torch.Tensor]:
        """Return the outputs of the next batch by their names.

        Raises:
            StopIteration: the epoch is over.
            PipelineError: DALI failed.
            RuntimeError: the loop failed or was interrupted before, or the loader was closed.
        """
        if self._progress is Progress.OVER:
            raise StopIteration
        if self._progress is Progress.BROKEN:
            raise RuntimeError(
                "this loop failed, or was interrupted, in the middle of a batch; begin a new one: iter(loader)"
            )
        self.pipeline  # noqa: B018  raises where there is none
        self._progress = Progress.UNDER_WAY
        try:
            while True:
                with before_exit():
                    (batch,) = next(self._batches)
                self._handed_out += 1
                if self._policy is LastBatchPolicy.DROP and self._handed_out > len(self):
                    continue  # the next call ends the epoch
                if len(batch[self.output_map[0]]):  # a smaller shard ends with an empty batch
                    outputs: dict[str, torch.Tensor] = batch
                    return outputs
        except StopIteration:
            if self._handed_out < len(self) and executor.calls_functions(self.pipeline):
                log.warning(
                    "the epoch ended after %d of %d batches: a function that the pipeline calls for data gives no "
                    "more. Let it give as much as the reader, and give fn.external_source cycle='raise'",
                    self._handed_out,
                    len(self),
                )
            self._epoch += 1
            self._progress = Progress.OVER
            raise
        except BaseException as error:
            self._progress = Progress.BROKEN  # otherwise a later epoch would be wrong
            if isinstance(error, (RuntimeError, AssertionError)):
                at = self._handed_out * self.batch_size
                shard = shard_after(self._meta, self._epoch - self._first_epoch)  # if it is not shuffled
                blamed = self.factory.find_bad_file(error, shard[at : at + self.batch_size])
                raise PipelineError(what_failed(error, blamed)) from error
            raise

    def lose_batch(self) -> None:
        """Mark the loop as broken, as a batch was taken that will not be returned."""
        if self._progress is Progress.UNDER_WAY:
            self._progress = Progress.BROKEN

    def _leave(self) -> None:
        """Go from the middle of an epoch to the start of the next one. See NOTE [ Epochs of a reader ]."""
        why_not = self.factory.why_not_anew(self._meta)
        if not why_not:
            self.go_to(self._epoch + 1)
        elif self._progress is Progress.BROKEN:
            raise RuntimeError(
                f"an epoch failed, and the pipeline that was given {why_not}: build it anew, or let "
                "FileReaderLoader(root, function) build it"
            )
        else:
            log.warning(
                "the loop was left early, and the pipeline that was given %s: what is left is read and thrown away",
                why_not,
            )
            with contextlib.suppress(StopIteration):
                while True:
                    next(self._batches)
            self._epoch += 1
            self._progress, self._handed_out = Progress.READY, 0

    @property
    def next_epoch(self) -> int:
        """The epoch that ``begin`` would begin or continue."""
        return self._epoch + (self._progress in (Progress.UNDER_WAY, Progress.BROKEN))

    def go_to(self, epoch: int) -> None:
        """Rebuild the pipeline at the start of an epoch."""
        self._epoch = epoch
        self._open(self.output_map)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, with DALI's checkpoint."""
        if not executor.keeps_checkpoints(self.pipeline):
            raise ValueError("the pipeline keeps no checkpoints; build it with enable_checkpointing=True")
        (checkpoint,) = self._batches.checkpoints()
        return {
            **self._fingerprint,
            "epoch": self._epoch,
            "first_epoch": self._first_epoch,
            "batches": 0 if self._progress is Progress.OVER else self._handed_out,
            "checkpoint": checkpoint,
        }

    @property
    def _fingerprint(self) -> dict[str, Any]:
        """The keys and values that a state must agree with."""
        return {
            "version": STATE_VERSION,
            **self.factory.fingerprint(self._policy),
            "samples": int(self._meta["epoch_size"]),
        }

    def load_state_dict(self, state: Any) -> None:
        check_state(state, self._fingerprint)
        before, self._epoch = self.next_epoch, state["first_epoch"]
        try:
            self._open(self.output_map, state["checkpoint"])
        except RuntimeError as error:
            self.go_to(before)
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

    def in_words(self) -> str:
        read = f"{self._meta['epoch_size']} samples, shard {self._meta['shard_id']} of {self._meta['number_of_shards']}"
        state = "closed" if self._why_closed else "to be opened"
        if self.is_open:
            state = f"{len(self)} batches of {self.batch_size}"
        return f"{read}; {state}; {self._policy.value}"
