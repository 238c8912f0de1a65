"""Checks of the inputs of a ProxyServer against the declarations of its pipeline. Main process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from . import api, executor

Kinds = tuple[tuple[str, int], ...]
"""(dtype, number of dimensions) of each input of a pipeline."""


def fed_sources(pipeline: Any) -> list[Any]:
    """Return the external sources of a pipeline, and check that the proxy can feed all of them.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``ProxyServer``.
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
    """The kinds of a pipeline's inputs: dtypes and numbers of dimensions, as declared and as given.

    Attributes:
        taken: kinds of the runs that succeeded; None before the first one.
        failed: kinds of the last run if it failed, else None.
    """

    def __init__(self, pipeline: Any, sources: list[Any]) -> None:
        self._max_batch_size = pipeline.max_batch_size
        self._declared = {source.name: executor.declared_kind(pipeline, source) for source in sources}
        self.taken: Kinds | None = None
        self.failed: Kinds | None = None

    def kinds_of(self, inputs: Sequence[Any]) -> Kinds:
        """Return the kinds of the inputs of a run, and check them against the declarations of the pipeline.

        Raises:
            InputError: the batch is too large, or an input is of another kind than declared, such as decoded images for
                a pipeline that decodes.
        """
        if len(inputs[0]) > self._max_batch_size:
            raise InputError(
                f"a batch of {len(inputs[0])} for a pipeline of batch_size={self._max_batch_size}",
                code="large-batch",
            )
        kinds = tuple((samples[0].dtype.str, samples[0].ndim) for samples in inputs)
        for (name, declared), kind in zip(self._declared.items(), kinds):
            if any(said not in (None, found) for said, found in zip(declared, kind)):
                raise _not_as_declared(name, kind, declared)
        return kinds

    def check_taken(self, kinds: Kinds) -> None:
        """Raise InputError if a run of other kinds has succeeded."""
        for name, kind, taken in zip(self._declared, kinds, self.taken or kinds):
            if kind != taken:
                raise InputError(
                    f"input {name!r} of the pipeline was {np.dtype(taken[0])} with {taken[1]} dimensions until now, "
                    f"and is {np.dtype(kind[0])} with {kind[1]} in this batch. DALI takes one kind for each input",
                    code="wrong-kind",
                )


def _not_as_declared(name: str, kind: tuple[str, int], declared: tuple[str | None, int | None]) -> InputError:
    dtype = "any dtype" if declared[0] is None else np.dtype(declared[0])
    ndim = "any number of" if declared[1] is None else declared[1]
    advice = (
        ": decoded images, and the pipeline decodes. Give the dataset a loader that reads bytes: "
        'ImageFolder(root, transform=server.proxy, loader=read_bytes), with open(path, "rb").read() in read_bytes'
    )
    return InputError(
        f"input {name!r} of the pipeline takes {dtype} with {ndim} dimensions, and is {np.dtype(kind[0])} with "
        f"{kind[1]} in this batch{advice if kind == ('|u1', 3) and declared[1] == 1 else ''}",
        code="wrong-kind",
    )
