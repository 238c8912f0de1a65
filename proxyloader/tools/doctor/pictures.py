"""Known pictures, decoded by DALI and compared with Pillow's pixels. Runs in a child process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import features

from ...dali.api import decoder_arguments, fn, pipeline_def, types
from ...dali.jpeg_engines import MOST_LEVELS, known_picture
from .questions import Engine, Facts, Format

SIZE_PX = (256, 192)
"""Width and height of the pictures. They differ, so that exchanged sides are noticed."""

BOUNDS = {"cpu": 0, "engines": 3, "cuda": 3}
"""Largest difference of a JPEG's pixels from Pillow's, in levels of 255, by who decodes: docs/fidelity.md. It is CUDA's
for the engines, too, as CUDA decodes what they do not take. Other formats are decoded on the CPU everywhere."""

FORMATS: dict[Format, tuple[str, str, dict[str, Any]]] = {
    "JPEG": ("RGB", "JPEG", {"quality": 90, "subsampling": "4:2:0"}),
    "JPEG 4:4:4": ("RGB", "JPEG", {"quality": 90, "subsampling": "4:4:4"}),
    "grey JPEG": ("L", "JPEG", {"quality": 90}),
    "progressive JPEG": ("RGB", "JPEG", {"quality": 90, "progressive": True}),
    "PNG": ("RGB", "PNG", {}),
    "BMP": ("RGB", "BMP", {}),
    "TIFF": ("RGB", "TIFF", {}),
    "WebP": ("RGB", "WEBP", {"lossless": True}),
}
"""The mode of Pillow, its name of the format, and its options."""


def decode_all(engine: Engine, device_id: int) -> Iterator[Facts]:
    """Yield for each format the largest difference from Pillow, or the ``error`` of DALI."""
    decoder = None
    for number, (name, (mode, format, options)) in enumerate(FORMATS.items()):
        if format == "WEBP" and not features.check("webp"):  # this Pillow cannot write one
            continue
        # All differ, as a decoder that fails may leave an earlier picture in its memory.
        files, wanted = zip(*[known_picture(2 * number + k, SIZE_PX, mode, format, **options) for k in range(2)])
        facts: Facts = {"format": name, "bound": BOUNDS[engine] if format == "JPEG" else 0, "error": ""}
        try:
            decoder = decoder or _decoder(engine, device_id)
            # Alone and in a batch, as the engines have room of its own for each. See dali/jpeg_engines.py.
            batches = [_decoded(decoder, files[:size]) for size in (1, 2)]
            off = [np.abs(image - right) for batch in batches for image, right in zip(batch, wanted)]
            facts["levels_off"] = int(max(map(np.max, off)))
            facts["by_engines"] = bool(max(map(np.mean, off)) < MOST_LEVELS)
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: an image of another shape
            facts["error"] = " ".join(str(error).split())
            decoder = None  # a pipeline that has failed does not go on
        yield facts


def _decoder(engine: Engine, device_id: int) -> Any:
    where = None if engine == "cpu" else device_id
    how = decoder_arguments("decoders__Image", where, 1.0 if engine == "engines" else 0.0)

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=2, num_threads=1, device_id=where, prefetch_queue_depth=1, exec_dynamic=True
    )
    def decoder() -> Any:
        return fn.decoders.image(fn.external_source(name="files", ndim=1, dtype=types.UINT8), **how)

    pipeline = decoder()
    pipeline.build()
    return pipeline


def _decoded(decoder: Any, files: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.int_]]:
    decoder.feed_input("files", list(files))
    (images,) = decoder.run()
    on_cpu = images if decoder.device_id is None else images.as_cpu()
    return [np.asarray(image).astype(int) for image in on_cpu]
