"""Factories of a loader's pipelines: from a pipeline function, or from a given pipeline. Main process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .._random_state import seed_for
from .._validation import check_int, check_num_threads
from ..dali import api, executor, jpeg_engines
from ..dali.build import PipelineOptions
from ..dali.device import check_device, cuda_ordinal
from ..data.sharded_sampler import LastBatchPolicy
from .arguments import as_called, check_pipeline_function, named, what_is_missing
from .bad_files import find_bad_file
from .sources import READER_NAME, Reader

log = logging.getLogger(__name__)

NOT_ANEW = "goes on from a checkpoint, calls functions for data, or was deserialized, so it cannot begin anew"


class PipelineFactory:
    """Returns the pipeline at the start of an epoch, or at a checkpoint."""

    reader_name = READER_NAME
    """Name of the reader that sets the length of an epoch."""

    reader_advice = (
        "Call source() in the pipeline function, which adds it, and return what comes of it: encoded, labels = source()"
    )
    """Advice for a pipeline without such a reader."""

    def _make(self, epoch: int, checkpoint: bytes | None) -> api.Pipeline:
        """Return the pipeline, not built, at the start of an epoch or at DALI's checkpoint."""
        raise NotImplementedError

    def build(self, epoch: int, checkpoint: bytes | None, owner: Any) -> api.Pipeline:
        """Return the pipeline, built, at the start of an epoch or at DALI's checkpoint. Only ``owner`` may run it."""
        pipeline = self._make(epoch, checkpoint)
        executor.take_over(pipeline, owner)
        if executor.is_under_way(pipeline):
            if not executor.begins_anew(pipeline):
                raise ValueError(f"somebody else has begun an epoch of the pipeline, which {NOT_ANEW}: define it again")
            log.warning("somebody else has begun an epoch of the pipeline, and left it; it begins anew")
            executor.take_apart(pipeline)
        try:
            jpeg_engines.build(pipeline)
        except RuntimeError as error:
            if missing := what_is_missing(error):
                raise missing from error
            raise
        fed, readers = executor.fed_by_hand(pipeline), pipeline.reader_meta()
        if fed:
            raise ValueError(
                f"the pipeline is to be fed by hand: {', '.join(fed)}. FileReaderLoader feeds nothing: give "
                "fn.external_source a source=, or the pipeline to a ProxyServer"
            )
        if self.reader_name not in readers:
            raise ValueError(
                f"the pipeline has no reader named {self.reader_name!r}; it has {', '.join(readers) or 'none'}. "
                f"{self.reader_advice}"
            )
        return pipeline

    def why_not_anew(self, meta: Mapping[str, Any]) -> str:
        """Return why the pipeline, with DALI's metadata of its reader, cannot leave an epoch in the middle, or ""."""
        return ""

    def find_bad_file(self, error: Exception, batch: range) -> str:
        """Return a message about the file on which DALI failed, among the samples with these indices, or ""."""
        return ""

    def fingerprint(self, policy: LastBatchPolicy) -> dict[str, Any]:
        """Return the keys and values that a state must agree with."""
        return {}

    def close(self) -> None:
        """Release the pipeline."""


@dataclass(frozen=True, eq=False)
class PipelineFunction(PipelineFactory):
    """Factory that calls a pipeline function for each pipeline, with ``source`` on the shard of the epoch.

    The attributes are checked. Those that are not named here are arguments of ``FileReaderLoader``.

    Attributes:
        source: the reader, on the shard of epoch 0.
        function: the pipeline function.
    """

    source: Reader
    function: Callable[..., api.Pipeline]
    graph_options: Mapping[str, Any]
    batch_size: int
    device: Any
    num_threads: int | None
    seed: int | None
    prefetch: int

    def __post_init__(self) -> None:
        check_pipeline_function(self.function, self.graph_options)
        check_device(self.device)
        check_int("batch_size", self.batch_size, 1)
        check_int("prefetch", self.prefetch, 1)
        if self.seed is not None:
            check_int("seed", self.seed, 0, ", or None")
        if self.num_threads is not None:
            check_num_threads(self.num_threads, ", or None")

    @cached_property
    def _options(self) -> PipelineOptions:
        return PipelineOptions(self.batch_size, cuda_ordinal(self.device), self.num_threads)

    @cached_property
    def _first_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_()) if self.seed is None else self.seed

    def _make(self, epoch: int, checkpoint: bytes | None) -> api.Pipeline:
        moved = 0 if self.source.stick_to_shard else epoch
        return self.function(
            source=replace(self.source, shard_id=(self.source.shard_id + moved) % self.source.num_shards),
            batch_size=self.batch_size,
            num_threads=self._options.threads,
            device_id=self._options.device_id,
            seed=seed_for(self._first_seed, "pipeline", self.source.shard_id, epoch),
            prefetch_queue_depth=self.prefetch,
            **{"enable_checkpointing": True, "checkpoint": checkpoint, **self.graph_options},
        )

    def find_bad_file(self, error: Exception, batch: range) -> str:
        return find_bad_file(error, self.source, batch)

    def fingerprint(self, policy: LastBatchPolicy) -> dict[str, Any]:
        return {
            "seed": self._first_seed,
            "num_shards": self.source.num_shards,
            "shard_id": self.source.shard_id,
            "batch_size": self.batch_size,
            "shuffle": self.source.random_shuffle,
            "stick_to_shard": self.source.stick_to_shard,
            "last_batch_policy": policy.value,
            "reader": self.source.kind,
            "pipeline": as_called(self.function.__name__, self.graph_options),
        }


class GivenPipeline(PipelineFactory):
    """Factory that always returns the same pipeline, which the user has made."""

    def __init__(self, pipeline: api.Pipeline, reader_name: str) -> None:
        if not isinstance(pipeline, api.Pipeline):
            raise TypeError(
                f"from_pipeline takes a nvidia.dali.Pipeline, got {named(pipeline)}. "
                "Call the function that makes it, with batch_size, num_threads and device_id"
            )
        self._pipeline: Any = pipeline
        self.reader_name = reader_name
        self.reader_advice = f"Name it: fn.readers.file(name={reader_name!r}, ...), or give the name as reader_name"

    def _make(self, epoch: int, checkpoint: bytes | None) -> Any:
        if epoch:
            seed = self._pipeline.seed
            executor.take_apart(self._pipeline, None if seed is None else seed_for(seed, "pipeline", epoch))
        return self._pipeline

    def why_not_anew(self, meta: Mapping[str, Any]) -> str:
        if meta["number_of_shards"] > 1 and not meta["stick_to_shard"]:
            return "comes to its next shard at an epoch's end alone (stick_to_shard=True avoids that)"
        return "" if executor.begins_anew(self._pipeline) else NOT_ANEW

    def close(self) -> None:
        self._pipeline = None
