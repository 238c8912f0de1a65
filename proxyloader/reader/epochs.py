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
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._exit_safety import before_exit
from ..dali import api, executor, jpeg_engines
from ..data.sharded_sampler import LastBatchPolicy
from ..errors import PipelineError
from .arguments import names_of, what_failed, what_is_missing

log = logging.getLogger(__name__)

NOT_ANEW = "goes on from a checkpoint, calls functions for data, or was deserialized, so it cannot begin anew"


class ReaderEpochs:
    """The batches of a pipeline and of DALI's iterator over it, epoch by epoch.

    Args:
        built: from the number of an epoch to the pipeline that begins with it; and from DALI's checkpoint, or None, to
            go on with that.
        reader_name: of the reader that says how long an epoch is.
        policy: what becomes of a shard's last batch.
        output_map: names of the pipeline's outputs, or None for the usual ones.
        is_given: ``built`` gives the same pipeline again and again, which was made by the user.
        find_bad_file: from DALI's error, and ``batch``, the numbers of the samples in it, to what is known of the file.

    Raises:
        FileNotFoundError, ValueError: see ``FileReaderLoader``.
    """

    STATE = ("samples", "epoch", "first_epoch", "batches", "checkpoint")

    def __init__(
        self,
        built: Callable[..., api.Pipeline],
        reader_name: str,
        policy: LastBatchPolicy,
        output_map: Sequence[str] | None,
        is_given: bool,
        find_bad_file: Callable[..., str],
    ) -> None:
        self._built, self._reader_name, self._policy, self.is_given = built, reader_name, policy, is_given
        self._to_blame = find_bad_file
        self._epoch = 0  # the one that is under way, or comes next
        self._meta: dict[str, Any] = {}  # what the reader says of itself
        self._handed_out, self._is_over = 0, False  # of the one under way
        self._goes_on = False  # what is to begin is the middle of an epoch
        self._is_broken = False
        self._why_closed = "this FileReaderLoader was closed, or belongs to the process that this one was forked from"
        self._open(output_map)

    @before_exit()
    def _open(self, output_map: Sequence[str] | None, checkpoint: bytes | None = None) -> None:
        """Build the pipeline, and DALI's iterator over it."""
        if self.is_closed:
            raise RuntimeError(self._why_closed)
        self._batches: Any = None
        self._pipeline: api.Pipeline | None = None  # or two would be in memory
        pipeline = self._built(self._epoch, checkpoint)
        executor.take_over(pipeline, self)
        if executor.is_under_way(pipeline):
            if not executor.begins_anew(pipeline):
                raise ValueError(f"somebody else has begun an epoch of the pipeline, which {NOT_ANEW}: define it again")
            log.warning("somebody else has begun an epoch of the pipeline, and left it; it begins anew")
            executor.take_apart(pipeline)
        try:
            jpeg_engines.build(pipeline)
        except RuntimeError as error:
            missing = what_is_missing(error)
            if missing is None:
                raise
            raise missing from error
        fed = executor.fed_by_hand(pipeline)
        if fed:
            raise ValueError(
                f"the pipeline is to be fed by hand: {', '.join(fed)}. FileReaderLoader feeds nothing: give "
                "fn.external_source a source=, or the pipeline to a ProxyServer"
            )
        readers = pipeline.reader_meta()
        if self._reader_name not in readers:
            advice = f"Name it: fn.readers.file(name={self._reader_name!r}, ...), or give the name as reader_name"
            if not self.is_given:
                advice = (
                    "Call source() in the pipeline function, which adds it, and return what comes of it: "
                    "encoded, labels = source()"
                )
            raise ValueError(
                f"the pipeline has no reader named {self._reader_name!r}; it has {', '.join(readers) or 'none'}. "
                f"{advice}"
            )
        samples, self._meta = self._meta.get("epoch_size"), readers[self._reader_name]
        if samples not in (None, self.samples):
            log.warning(
                "the reader lists %d samples now, and listed %d before: the data was changed. Shards that have listed "
                "it at different times do not fit together",
                self.samples,
                samples,
            )
        self._first_epoch = self._epoch  # of this pipeline, which is on the shard that it says
        self.output_map = names_of(output_map, pipeline.num_outputs)
        self._batches = self._iterator_over(pipeline)
        self._pipeline, self._at_start, self._is_broken = pipeline, True, False
        self._handed_out = executor.batches_before(pipeline)
        self._goes_on = self._handed_out > 0

    def _iterator_over(self, pipeline: api.Pipeline) -> Any:
        padded = bool(self._meta["pad_last_batch"])
        if not padded and self._epoch == 0:
            log.warning(
                "the reader %r does not pad its last batch, so epochs run into each other: "
                "give it pad_last_batch=True for epochs in which each sample comes once",
                self._reader_name,
            )
        # See NOTE [ Epochs of a reader ].
        policy = LastBatchPolicy.FILL if self._policy is LastBatchPolicy.DROP and padded else self._policy
        how = {
            "reader_name": self._reader_name,
            "auto_reset": True,
            "last_batch_policy": api.LastBatchPolicy[policy.name],
            "prepare_first_batch": False,
        }
        if self.output_map == ["data", "label"]:
            return api.DALIClassificationIterator(pipeline, **how)
        return api.DALIGenericIterator(pipeline, self.output_map, **how)

    @property
    def is_closed(self) -> bool:
        """For ever. What is neither open nor closed is opened by the next loop."""
        return self._built is _closed

    @property
    def is_open(self) -> bool:
        return self._pipeline is not None

    @property
    def pipeline(self) -> api.Pipeline:
        if self._pipeline is None:
            raise RuntimeError(
                self._why_closed if self.is_closed else "the epoch could not begin; try again: iter(loader)"
            )
        return self._pipeline

    @property
    def samples(self) -> int:
        """Of an epoch, in all shards."""
        return int(self._meta["epoch_size"])

    @property
    def batch_size(self) -> int:
        return int(self.pipeline.max_batch_size)

    def __len__(self) -> int:
        """How many batches the epoch has that is under way, or comes next."""
        return self.batches_of(self._epoch)

    def batches_of(self, epoch: int) -> int:
        """How many it has."""
        samples, shards = self.samples, int(self._meta["number_of_shards"])
        if self._policy is LastBatchPolicy.DROP:
            return samples // shards // self.batch_size
        if self._policy is LastBatchPolicy.FILL:
            return math.ceil(math.ceil(samples / shards) / self.batch_size)
        return math.ceil(len(self._shard_in(epoch)) / self.batch_size)

    def _shard_in(self, epoch: int) -> range:
        """The samples of this pipeline's shard, by their numbers in the reader's list."""
        shards = int(self._meta["number_of_shards"])
        moved = 0 if self._meta["stick_to_shard"] else epoch - self._first_epoch
        shard = (int(self._meta["shard_id"]) + moved) % shards
        return range(shard * self.samples // shards, (shard + 1) * self.samples // shards)

    @property
    def _next_samples(self) -> range:
        """Those of the batch that comes next, where they are not shuffled."""
        at = self._handed_out * self.batch_size
        return self._shard_in(self._epoch)[at : at + self.batch_size]

    def begin(self) -> None:
        """The next epoch; also from the middle of one."""
        if not self.is_open and not self.is_closed:
            self._open(self.output_map)  # which failed the last time: the folder was away, say
        self.pipeline  # noqa: B018  raises where there is none
        if not self._at_start and not self._goes_on:
            self._leave()
        if not self._goes_on:
            self._handed_out, self._is_over = 0, False

    def next_batch(self) -> dict[str, torch.Tensor]:
        """
        Returns:
            The outputs by their names.

        Raises:
            StopIteration: the epoch is over.
            PipelineError: DALI failed.
        """
        if self._is_over:
            raise StopIteration
        if self._is_broken:
            raise RuntimeError(
                "this loop failed, or was interrupted, in the middle of a batch; begin a new one: iter(loader)"
            )
        self.pipeline  # noqa: B018  raises where there is none
        self._at_start = self._goes_on = False
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
            self._at_start = self._is_over = True
            raise
        except BaseException as error:
            # DALI's iterator may have lost count, and no epoch after this one would be right.
            self._is_broken = True
            if isinstance(error, (RuntimeError, AssertionError)):
                raise PipelineError(what_failed(error, self._to_blame(error, batch=self._next_samples))) from error
            raise

    def lose_batch(self) -> None:
        """One was taken and will not be handed out: the loop must not go on as if it had been."""
        self._is_broken = True

    def _leave(self) -> None:
        """Come to the start of the next epoch from the middle of one. See NOTE [ Epochs of a reader ]."""
        why_not = self._why_not_anew()
        if not why_not:
            self.go_to(self._epoch + 1)
        elif self._is_broken:
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

    def _why_not_anew(self) -> str:
        """Why the pipeline cannot be brought to the next epoch's start by building it anew; "" where it can."""
        if not self.is_given:
            return ""
        if int(self._meta["number_of_shards"]) > 1 and not self._meta["stick_to_shard"]:
            return "comes to its next shard at an epoch's end alone (stick_to_shard=True avoids that)"
        if not executor.begins_anew(self.pipeline):
            return NOT_ANEW
        return ""

    @property
    def next_epoch(self) -> int:
        """The one that ``begin`` would begin, or go on with."""
        return self._epoch if self._at_start or self._goes_on else self._epoch + 1

    def go_to(self, epoch: int) -> None:
        """Let that be the next one, by building the pipeline anew."""
        self._epoch, self._goes_on = epoch, False
        self._handed_out, self._is_over = 0, False
        self._open(self.output_map)

    def state_dict(self) -> dict[str, Any]:
        """What ``STATE`` names: where the epoch stands, and DALI's checkpoint."""
        if not executor.keeps_checkpoints(self.pipeline):
            raise ValueError("the pipeline keeps no checkpoints; build it with enable_checkpointing=True")
        (checkpoint,) = self._batches.checkpoints()
        batches = 0 if self._is_over else self._handed_out
        return dict(zip(self.STATE, (self.samples, self._epoch, self._first_epoch, batches, checkpoint)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before, self._epoch = self.next_epoch, state["first_epoch"]
        try:
            self._open(self.output_map, state["checkpoint"])
        except RuntimeError as error:
            self.go_to(before)
            raise ValueError(
                f"DALI cannot go on from this state, which is of another pipeline than this loader's: {error}"
            ) from error
        self._epoch, self._handed_out = state["epoch"], state["batches"]
        self._is_over, self._goes_on = False, True

    def lose_pipeline(self) -> None:
        """Another loader, or a server, was made over it."""
        self._why_closed = (
            "another FileReaderLoader or ProxyServer was made over this loader's pipeline, which one alone can read: "
            "build a pipeline for each"
        )
        self.close()

    def close(self) -> None:
        self._built = _closed  # first, for what comes next takes a while, and other threads may look
        self._batches = self._pipeline = None

    def in_words(self) -> str:
        read = f"{self._meta['epoch_size']} samples, shard {self._meta['shard_id']} of {self._meta['number_of_shards']}"
        state = "closed" if self.is_closed else "to be opened"
        if self.is_open:
            state = f"{len(self)} batches of {self.batch_size}"
        return f"{read}; {state}; {self._policy.value}"


def _closed(epoch: int, checkpoint: bytes | None) -> api.Pipeline:
    raise AssertionError("closed")
