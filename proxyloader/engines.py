"""Whether a GPU's JPEG engines do the decoding. Main process.

NOTE [ Engines that fail ]
A GPU gives its JPEG engines to so many decoders at a time, of all processes together. A decoder that comes too late
says so on stderr alone, and CUDA decodes in their place; but what comes behind that decoder does not wait for CUDA then
(nvImageCodec 0.9), so now and then a picture is what lay in that memory before. A decoder that is told to leave the
engines alone is waited for. So when a pipeline was built, a decoder of its own is given a picture, to see who decodes
it: that of the engines is Pillow's, and CUDA rounds otherwise. Where it was CUDA, the pipeline is built once more, and
the process leaves the engines alone from then on.
"""

from __future__ import annotations

import io
import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from . import _dali
from ._dali import Pipeline, fn, pipeline_def, types, upright

log = logging.getLogger("proxyloader")

SIDE_PX = 256
"""Of the picture."""

MOST_LEVELS = 0.005
"""In the mean, that a picture from the engines differs from Pillow's; CUDA's differs by some hundredths."""

_failing: set[int] = set()
"""GPUs whose engines this process leaves alone."""


def share(asked_for: float, device_id: int | None) -> float:
    """How many of the JPEGs, 0 to 1, the engines are to be given.

    Args:
        asked_for: by the user.
        device_id: CUDA ordinal; None: the CPU.
    """
    return 0.0 if device_id in _failing else asked_for


def fail_for(pipeline: Pipeline) -> bool:
    """See whether a pipeline that was just built counts on engines that do not decode. Takes a fifth of a second.

    If so, those that are defined from now on leave the engines alone, where they ask ``share``.
    """
    device_id = pipeline.device_id
    if device_id is None or not _dali.uses_engines(pipeline):
        return False
    if device_id not in _failing and _levels_off(device_id) < MOST_LEVELS:
        return False
    if device_id not in _failing:
        _failing.add(device_id)
        log.warning(
            "CUDA decodes, which is slower: GPU %d has no JPEG engines, or too many decoders use them. If it has some, "
            "close loaders and processes that are not needed, and start this one again; until then the decoders of "
            "pipelines of your own need hw_decoder_load=0, or pictures may be wrong",
            device_id,
        )
    return True


def _levels_off(device_id: int | None, engine_share: float = 1.0) -> float:
    """Decode a picture, and compare it with Pillow's. Infinite where it cannot be decoded, for want of memory, say."""
    encoded, wanted = _picture()
    pipeline = _decoder(device_id, engine_share)
    try:
        pipeline.build()  # also where there is little memory: what is not found then, the next decoder will not find
        pipeline.feed_input("picture", _dali.tensor_list([encoded]))
        _dali.run(pipeline)
        (decoded,) = pipeline.outputs()
    except (RuntimeError, MemoryError) as error:
        log.info("a picture could not be decoded on GPU %s: %s", device_id, str(error))
        return math.inf
    found = np.asarray((decoded if device_id is None else decoded.as_cpu())[0])
    return float(np.abs(found.astype(int) - wanted).mean())


def _decoder(device_id: int | None, engine_share: float) -> Pipeline:
    how: dict[str, Any] = {"output_type": types.RGB, "jpeg_fancy_upsampling": True, **upright("decoders__Image")}
    if device_id is not None:
        padding = {"device_memory_padding": 0, "host_memory_padding": 0}
        how |= {"device": "mixed", "hw_decoder_load": engine_share, **padding}

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=1, num_threads=1, device_id=device_id, prefetch_queue_depth=1, exec_dynamic=True
    )
    def one_picture() -> Any:
        return fn.decoders.image(fn.external_source(name="picture", no_copy=True, ndim=1, dtype=types.UINT8), **how)

    return one_picture()


def _picture() -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """A JPEG of colours that change from pixel to pixel: its bytes, and what Pillow makes of it."""
    colors = np.random.default_rng(0).integers(0, 256, (SIDE_PX // 2, SIDE_PX // 2, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors).resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return np.frombuffer(file.getvalue(), np.uint8), np.asarray(Image.open(file).convert("RGB")).astype(int)
