"""Checks of what a ProxyServer is fed against what its pipeline declares. Main process."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError
from . import api, executor


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


def check_declared(name: str, kind: tuple[str, int], declared: tuple[str | None, int | None]) -> None:
    """
    Args:
        name: of an input.
        kind: (dtype, number of dimensions) of its arrays.
        declared: the same, as ``_executor.declared_kind`` gives it.

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
