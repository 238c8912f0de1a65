"""Epochs of a DALI pipeline that reads files: one after the other, left early, resumed. Main process.

NOTE [ Epochs of a reader ]
DALI's iterators keep epochs apart only if the reader pads its last batch, so ours always does (``pad_last_batch``).
The iterator then cuts the padding off (PARTIAL) or leaves it (FILL). With DROP it loses count of padded batches where
shards differ by one sample, and begins the next epoch with one of them (DALI 2.4); so DROP is done here, as FILL of
which the last batch is not handed out. And DALI cannot leave an epoch half way: what its threads have read ahead would
be in the next one. So after a ``break`` the pipeline is built anew, on the shard that is next and with another seed;
or where one that was given cannot begin anew, the rest of its epoch is read and thrown away.
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
    """The samples of the shard that is read so many epochs later, by their numbers in the reader's list."""
    samples, shards = meta["epoch_size"], meta["number_of_shards"]
    shard = (meta["shard_id"] + (0 if meta["stick_to_shard"] else epochs)) % shards
    return range(shard * samples // shards, (shard + 1) * samples // shards)


def batches_after(meta: Mapping[str, Any], epochs: int, batch_size: int, policy: LastBatchPolicy) -> int:
    """How many that epoch has."""
    samples, shards = int(meta["epoch_size"]), int(meta["number_of_shards"])
    if policy is LastBatchPolicy.DROP:
        return samples // shards // batch_size
    if policy is LastBatchPolicy.FILL:
        return math.ceil(math.ceil(samples / shards) / batch_size)
    return math.ceil(len(shard_after(meta, epochs)) / batch_size)


def warn_of_epochs(reader_name: str, meta: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Say where epochs, or shards, do not fit together.

    Args:
        meta: what the reader says of itself.
        before: what it has said in the pipeline before, if there was one.
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
    """DALI's. See NOTE [ Epochs of a reader ]."""
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
    """How far the loop over an epoch is."""

    READY = "no batch was taken; the epoch may have had some before a checkpoint"
    UNDER_WAY = "batches were taken"
    BROKEN = "it failed, or was interrupted, so that DALI's iterator may have lost count"
    OVER = "all batches were taken"


class ReaderEpochs:
    """The batches of a pipeline and of DALI's iterator over it, epoch by epoch.

    Args:
        factory: gives the pipeline; after a loop that was left early, another one or the same.
        policy: what becomes of a shard's last batch.
        output_map: names of the pipeline's outputs, or None for the usual ones.

    Raises:
        FileNotFoundError, ValueError: see ``FileReaderLoader``.
    """

    def __init__(self, factory: PipelineFactory, policy: LastBatchPolicy, output_map: Sequence[str] | None) -> None:
        self.factory, self._policy = factory, policy
        self._epoch = 0  # the one that is under way, or comes next
        self._meta: dict[str, Any] = {}  # what the reader says of itself
        self._why_closed = ""  # for ever, and by other threads, too, so it is no state of the loop
        self._open(output_map)

    @before_exit()
    def _open(self, output_map: Sequence[str] | None, checkpoint: bytes | None = None) -> None:
        """Build the pipeline, and DALI's iterator over it."""
        if self._why_closed:
            raise RuntimeError(self._why_closed)
        self._batches: Any = None
        self._pipeline: api.Pipeline | None = None  # or two would be in memory
        self._progress, self._handed_out = Progress.READY, 0
        pipeline, reader = self.factory.build(self._epoch, checkpoint, owner=self), self.factory.reader_name
        before, self._meta = self._meta, pipeline.reader_meta(reader)
        warn_of_epochs(reader, self._meta, before)
        self._first_epoch = self._epoch  # of this pipeline, which is on the shard that it says
        self.output_map = names_of(output_map, pipeline.num_outputs)
        self._batches = iterator_over(pipeline, reader, self._policy, self.output_map)
        self._handed_out = executor.batches_before(pipeline)
        self._pipeline = pipeline

    @property
    def is_open(self) -> bool:
        """What is neither open nor closed is opened by the next loop."""
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
        """How many batches the epoch has that is under way, or comes next."""
        return self.batches_of(self._epoch)

    def batches_of(self, epoch: int) -> int:
        """How many it has."""
        return batches_after(self._meta, epoch - self._first_epoch, self.batch_size, self._policy)

    def begin(self) -> None:
        """The next epoch; also from the middle of one."""
        if not self.is_open and not self._why_closed:
            self._open(self.output_map)  # which failed the last time: the folder was away, say
        self.pipeline  # noqa: B018  raises where there is none
        if self._progress in (Progress.UNDER_WAY, Progress.BROKEN):
            self._leave()
        elif self._progress is Progress.OVER:
            self._progress, self._handed_out = Progress.READY, 0

    def next_batch(self) -> dict[str, torch.Tensor]:
        """
        Returns:
            The outputs by their names.

        Raises:
            StopIteration: the epoch is over.
            PipelineError: DALI failed.
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
                    continue  # the next one ends the epoch
                if len(batch[self.output_map[0]]):  # a shard that is smaller than others ends with an empty one
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
            self._progress = Progress.BROKEN  # or an epoch that comes would not be right
            if isinstance(error, (RuntimeError, AssertionError)):
                at = self._handed_out * self.batch_size
                shard = shard_after(self._meta, self._epoch - self._first_epoch)  # if it is not shuffled
                blamed = self.factory.find_bad_file(error, shard[at : at + self.batch_size])
                raise PipelineError(what_failed(error, blamed)) from error
            raise

    def lose_batch(self) -> None:
        """One was taken and will not be handed out: the loop must not go on as if it had been."""
        if self._progress is Progress.UNDER_WAY:
            self._progress = Progress.BROKEN

    def _leave(self) -> None:
        """Come to the start of the next epoch from the middle of one. See NOTE [ Epochs of a reader ]."""
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
        """The one that ``begin`` would begin, or go on with."""
        return self._epoch + (self._progress in (Progress.UNDER_WAY, Progress.BROKEN))

    def go_to(self, epoch: int) -> None:
        """Let that be the next one, by building the pipeline anew."""
        self._epoch = epoch
        self._open(self.output_map)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, with DALI's checkpoint."""
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
        """What a state must agree with."""
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
        """Another loader, or a server, was made over it."""
        self._why_closed = TAKEN_OVER
        self.close()

    def close(self) -> None:
        self._why_closed = self._why_closed or CLOSED  # first: what comes next takes a while, and other threads look
        self._batches = self._pipeline = None
        self.factory.close()

    def in_words(self) -> str:
        read = f"{self._meta['epoch_size']} samples, shard {self._meta['shard_id']} of {self._meta['number_of_shards']}"
        state = "closed" if self._why_closed else "to be opened"
        if self.is_open:
            state = f"{len(self)} batches of {self.batch_size}"
        return f"{read}; {state}; {self._policy.value}"
