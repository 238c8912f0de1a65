"""Checks of what a ProxyServer is fed against what its pipeline declares. Main process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from . import api, executor
from .run import Kinds


def fed_sources(pipeline: Any) -> list[Any]:
    """A pipeline's external sources, all of which the proxy can feed.

    Raises:
        TypeError, ValueError, RuntimeError: as of ``ProxyServer``.
    """
    if not isinstance(pipeline, api.Pipeline):
        step = "; call it: what @pipeline_def made gives one" if api.is_pipeline_function(pipeline) else ""
        raise TypeError(f"ProxyServer takes a DALI pipeline, got {type(pipeline).__name__}{step}")
    try:
        sources = executor.external_sources(pipeline)
    except RuntimeError as error:
        raise RuntimeError(
            "the pipeline was deserialized, and knows its inputs no more; give the server the one that was serialized"
        ) from error
    if not sources:
        raise RuntimeError(
            "the pipeline has no inputs, so a dataset can give it nothing. Begin its graph with "
            'fn.external_source(name="images") instead of a reader; ready ones: pipelines.training(source="proxy")'
        )
    for source in sources:
        if executor.has_source(source):
            raise ValueError(
                f"input {source.name!r} of the pipeline has a source of its own, and the proxy is to be its source. "
                'Leave out source=... and give it a name: fn.external_source(name="images")'
            )
        if executor.repeats_last(source):
            raise ValueError(
                f"input {source.name!r} of the pipeline has repeat_last=True, and the proxy feeds every batch; "
                "leave it out"
            )
    return sources


class InputKinds:
    """The kinds of a pipeline's inputs: those that it declares, and those that it was given.

    Attributes:
        taken: of runs that succeeded; None: there was none.
        failed: of the last run, where that failed.
    """

    def __init__(self, pipeline: Any, sources: list[Any]) -> None:
        self._pipeline = pipeline
        self._declared = {source.name: executor.declared_kind(pipeline, source) for source in sources}
        self.taken: Kinds | None = None
        self.failed: Kinds | None = None

    def kinds_of(self, inputs: Sequence[Any]) -> Kinds:
        """
        Raises:
            InputError: a batch is too large, or the pipeline declares another kind, or decodes what is decoded.
        """
        if len(inputs[0]) > self._pipeline.max_batch_size:
            raise InputError(
                f"a batch of {len(inputs[0])} for a pipeline of batch_size={self._pipeline.max_batch_size}",
                code="large-batch",
            )
        kinds = tuple((samples[0].dtype.str, samples[0].ndim) for samples in inputs)
        for (name, declared), kind in zip(self._declared.items(), kinds):
            _check_declared(name, kind, declared)
        return kinds

    def check_taken(self, kinds: Kinds) -> None:
        """
        Raises:
            InputError: runs of other kinds have succeeded.
        """
        for name, kind, taken in zip(self._declared, kinds, self.taken or kinds):
            if kind != taken:
                raise InputError(
                    f"input {name!r} of the pipeline was {np.dtype(taken[0])} with {taken[1]} dimensions until now, "
                    f"and is {np.dtype(kind[0])} with {kind[1]} in this batch. DALI takes one kind for each input",
                    code="wrong-kind",
                )

    def note_success(self, kinds: Kinds) -> None:
        """A run has succeeded."""
        self.taken, self.failed = self.taken or kinds, None


def _check_declared(name: str, kind: tuple[str, int], declared: tuple[str | None, int | None]) -> None:
    """
    Args:
        name: of an input.
        kind: (dtype, number of dimensions) of its arrays.
        declared: the same, as ``executor.declared_kind`` gives it.

    Raises:
        InputError: the pipeline declares another kind, or decodes them.
    """
    if all(said in (None, found) for said, found in zip(declared, kind)):
        return
    dtype = "any dtype" if declared[0] is None else np.dtype(declared[0])
    ndim = "any number of" if declared[1] is None else declared[1]
    raise InputError(
        f"input {name!r} of the pipeline takes {dtype} with {ndim} dimensions, "
        f"and is {np.dtype(kind[0])} with {kind[1]} in this batch{_advice(kind, declared[1])}",
        code="wrong-kind",
    )


def _advice(kind: tuple[str, int], declared_ndim: int | None) -> str:
    if kind != ("|u1", 3) or declared_ndim != 1:
        return ""
    return (
        ": decoded images, and the pipeline decodes. Give the dataset a loader that reads bytes: "
        'ImageFolder(root, transform=server.proxy, loader=read_bytes), with open(path, "rb").read() in read_bytes'
    )
