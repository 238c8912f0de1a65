"""Checks of the inputs of a ProxyServer against the declarations of its pipeline. Main process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from . import api, executor

Kinds = tuple[tuple[str, int], ...]
"""(dtype, number of dimensions) of each input of a pipeline."""

BYTES_ADVICE = (
    ": the images are decoded, but the pipeline expects encoded ones. Give the dataset a loader that reads bytes: "
    'ImageFolder(root, transform=server.proxy, loader=read_bytes), with open(path, "rb").read() in read_bytes'
)


def check_sources(pipeline: Any) -> list[Any]:
    """Return the external sources of a pipeline, and check that the proxy can feed all of them.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``ProxyServer``.
    """
    if not isinstance(pipeline, api.Pipeline):
        advice = "; call the function that @pipeline_def returns" if api.is_pipeline_function(pipeline) else ""
        raise TypeError(f"pipeline must be a DALI pipeline, got {type(pipeline).__name__}{advice}")
    try:
        sources = executor.external_sources(pipeline)
    except RuntimeError as error:
        raise RuntimeError(
            "the inputs of a deserialized pipeline are unknown; pass the pipeline that was serialized"
        ) from error
    if not sources:
        raise RuntimeError(
            "the pipeline has no inputs for the dataset to feed. Begin its graph with "
            'fn.external_source(name="images") instead of a reader, or use pipelines.training(source="proxy")'
        )
    for source in sources:
        if executor.has_callback(source):
            raise ValueError(
                f"input {source.name!r} of the pipeline must not have a source, because the proxy feeds it. "
                'Omit source=... and name the input: fn.external_source(name="images")'
            )
        if executor.repeats_last(source):
            raise ValueError(f"input {source.name!r} of the pipeline must not have repeat_last=True; omit it")
    return sources


def check_declared(names: Sequence[str], kinds: Kinds, declared: Sequence[tuple[str | None, int | None]]) -> None:
    """Raise InputError if an input differs from its declaration, such as decoded images for a pipeline that decodes."""
    for name, kind, (dtype, ndim) in zip(names, kinds, declared):
        if dtype not in (None, kind[0]) or ndim not in (None, kind[1]):
            raise InputError(
                f"input {name!r} of the pipeline must be {_describe(dtype, ndim)}, got {_describe(*kind)}"
                f"{BYTES_ADVICE if kind == ('|u1', 3) and ndim == 1 else ''}",
                code="wrong-kind",
            )


def check_unchanged(names: Sequence[str], kinds: Kinds, taken: Kinds) -> None:
    """Raise InputError if the dtype or ndim of an input differs from that in earlier, successful runs."""
    for name, kind, before in zip(names, kinds, taken):
        if kind != before:
            raise InputError(
                f"input {name!r} of the pipeline must be {_describe(*before)} as in earlier batches, "
                f"got {_describe(*kind)}",
                code="wrong-kind",
            )


def _describe(dtype: str | None, ndim: int | None) -> str:
    return f"{np.dtype(dtype) if dtype else 'an array'} with {'any number of' if ndim is None else ndim} dimension(s)"
