"""Build pipelines; on a crowded GPU without its JPEG engines, if these fail to decode. Main process.

NOTE [ Failing JPEG engines ]
The JPEG engines of a GPU have room for a limited number of users across all processes. A decoder that finds no room
reports it only on stderr, and CUDA decodes instead. But the operators after that decoder do not wait for CUDA, so an
image may be the earlier content of its memory (nvImageCodec 0.9). They do wait for a decoder that is configured not to
use the engines.

A decoder takes room in two steps. The room for batches of images of one kind is taken when the decoder is built. The
room for a single image, or for several kinds of JPEGs, is shared by all decoders of a process with the same padding,
and taken by the first one that needs it. The trial therefore builds another decoder with the same padding after the
pipeline, and decodes one image and then two. This takes both kinds of room, and the pipeline keeps the shared one.

On a crowded GPU each pipeline is tried before it is used. Images from the engines equal Pillow's, whereas CUDA rounds
differently. If the images are not those of the engines, the decoders of this and of every later pipeline of the process
are configured not to use the engines, and the pipeline is built again.

A trial takes as long as some fifty batches, and no run ends meanwhile (``longest_wait_ms`` in ``versions.jsonl``), so a
GPU that is not crowded is not tried. If it does not decode with engines, it has none, which DALI handles. But other
processes may arrive. Before a run, it is therefore checked once a second whether others use the GPU, and then each
pipeline is tried. Others cannot exhaust the engines within that second, as CUDA builds one decoder after the other. If
nothing ran for long and no room is left, the pipeline is built again. A model of this process that fills the memory is
no reason for a trial, which would fail for lack of memory.

The pipeline cannot take the shared room itself by decoding one image before its first batch, because its engines would
then decode only as many images of a later batch as there are engines; see ``PlanServer``.
"""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..errors import PipelineError
from ..lifetime import before_exit
from . import executor
from .api import Pipeline, decoder_arguments, fn, pipeline_def, types
from .executor import Padding

log = logging.getLogger(__name__)

SIDE_PX = 256
"""Side of the test image, in pixels."""

MOST_LEVELS = 0.005
"""Maximum mean difference between an image from the engines and Pillow's. For CUDA it is some hundredths."""

CROWDED_BYTES = 4 << 30
"""Memory of a GPU used by others than torch in this process, above which the GPU is crowded. Each process with a
decoder uses almost a gigabyte, and the engines of an H200 have room for many such processes. See NOTE [ CUDA queues ]
in ``dali/device.py``."""

SHORT_BYTES = 1 << 30
"""Free memory of a GPU below which its engines may not have enough."""

LOOK_EVERY_S = 1.0
"""Minimum interval between checks before a run whether the GPU has become crowded, in seconds."""

_engines: dict[int | None, Literal["decoding", "absent", "failing"]] = {}
"""State of the engines of each GPU. No pipeline uses failing engines. All decoders of a process share their room."""


def are_left_alone(device_id: int | None) -> bool:
    """Return whether this process avoids the engines of a GPU because they failed to decode."""
    return _engines.get(device_id) == "failing"


def are_used(device_id: int | None) -> bool:
    """Return whether the engines of a GPU decode for this process. The first call tries them, which is slow."""
    if device_id not in _engines:
        _engines[device_id] = "decoding" if _decode(device_id, {()}) else "absent"
        if _engines[device_id] == "absent" and is_crowded(device_id):
            _leave_alone(device_id)
    return _engines[device_id] == "decoding"


def is_crowded(device_id: int | None) -> bool:
    """Return whether the engines may lack room or memory."""
    return _others_use(device_id) or executor.gpu_memory(device_id)[0] < SHORT_BYTES


def build(pipeline: Pipeline) -> None:
    """Build a pipeline unless it is built already, without engines that fail to decode. Slower on a crowded GPU.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is not enough memory, on the GPU or on the CPU.
        PipelineError: the engines fail to decode, and the decoders cannot be changed, for example because the pipeline
            has run.
    """
    if not pipeline._built:
        executor.get_notes(pipeline).holds_engines = False
        if are_left_alone(pipeline.device_id):
            _avoid(pipeline)
        executor.build(pipeline)
    if _fail_for(pipeline, is_crowded):
        _avoid(pipeline)
        executor.build(pipeline)


def have_failed(pipeline: Pipeline) -> bool:
    """Return whether a built pipeline must be built again, without engines, before its next run.

    Call this before each run. It checks the GPU once a second, and tries the engines if others have started to use it.
    """
    now_s = time.monotonic()
    if pipeline.device_id is None or now_s < executor.get_notes(pipeline).look_at_s:
        return False
    if _fail_for(pipeline, _others_use):
        return True
    executor.get_notes(pipeline).look_at_s = time.monotonic() + LOOK_EVERY_S
    return False


def _avoid(pipeline: Pipeline) -> None:
    """Change the decoders of a pipeline not to use the engines. PipelineError: they cannot be changed."""
    if not executor.leave_engines_alone(pipeline):
        raise PipelineError(
            f"the pipeline decodes with the JPEG engines of GPU {pipeline.device_id}, which has none, or which other "
            "processes have exhausted; its images might be wrong. Give its decoders hw_decoder_load=0. "
            "`proxyloader doctor` shows which decoder is used",
            code="no-engines",
        )


def _fail_for(pipeline: Pipeline, is_to_be_tried: Callable[[int], bool]) -> bool:
    """Return whether a built pipeline uses engines that fail to decode, or may fail."""
    device_id, notes = pipeline.device_id, executor.get_notes(pipeline)
    if device_id is None or notes.holds_engines or not (paddings := executor.paddings_on_engines(pipeline)):
        return False
    if not are_left_alone(device_id):
        if not is_to_be_tried(device_id):
            return False
        if _decode(device_id, paddings):
            notes.holds_engines = True
            return False
        _leave_alone(device_id)
    return True


def _leave_alone(device_id: int | None) -> None:
    _engines[device_id] = "failing"
    log.warning(
        "Falling back to CUDA, which decodes more slowly: GPU %s has no JPEG engines, or other processes have "
        "exhausted them. If it has engines, end unneeded processes or set CUDA_DEVICE_MAX_CONNECTIONS=8 in the "
        "environment of each, and restart this one. `proxyloader doctor` shows which decoder is used",
        device_id,
    )


def _others_use(device_id: int | None) -> bool:
    free_bytes, total_bytes = executor.gpu_memory(device_id)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device_id) > CROWDED_BYTES


def _decode(device_id: int | None, paddings: set[Padding]) -> bool:
    """Return whether the engines decode. This takes the shared room of the paddings, if the GPU has any left."""
    with before_exit():
        return max([_levels_off(device_id, padding) for padding in paddings]) < MOST_LEVELS


def _levels_off(device_id: int | None, padding: Padding = (), engine_share: float = 1.0) -> float:
    """Return the largest mean difference from Pillow of an image that is decoded alone, and in a batch of two.

    Return infinity if the image cannot be decoded, for example for lack of memory.
    """
    encoded, wanted = known_picture(quality=90)
    pipeline = decoder(device_id, engine_share, padding)
    try:
        pipeline.build()  # even with little memory, as the next decoder would not find more
        found = [image for count in (1, 2) for image in decode(pipeline, [encoded] * count)]
    except (RuntimeError, MemoryError) as error:
        if "DataLoader worker" in str(error):  # raised by torch's signal handler because a worker has died
            raise
        log.info("failed to decode a test image on GPU %s: %s", device_id, str(error))
        return math.inf
    return max(float(np.abs(image - wanted).mean()) for image in found)


def decoder(device_id: int | None, engine_share: float, padding: Padding = ()) -> Pipeline:
    """Return a pipeline that decodes one or two images. It is not built."""
    how = decoder_arguments("decoders__Image", device_id, engine_share) | dict(padding)

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=2, num_threads=1, device_id=device_id, prefetch_queue_depth=1, exec_dynamic=True
    )
    def images() -> Any:
        return fn.decoders.image(fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8), **how)

    return images()


def decode(pipeline: Pipeline, files: list[NDArray[np.uint8]]) -> list[NDArray[Any]]:
    """Decode one or two files. Return the pixels of each, (H, W, 3)."""
    pipeline.feed_input("images", executor.tensor_list(files))
    executor.run(pipeline)
    (images,) = pipeline.outputs()
    return [np.asarray(image).astype(int) for image in (images if pipeline.device_id is None else images.as_cpu())]


def known_picture(
    seed: int = 0,
    size_px: tuple[int, int] = (SIDE_PX, SIDE_PX),
    mode: str = "RGB",
    format: str = "JPEG",
    **options: Any,
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return a file of a random image whose colors vary from pixel to pixel, and its pixels as Pillow decodes them.

    Args:
        seed: seed of the colors.
        size_px: width and height.
        mode, format, options: as in Pillow's ``Image.save``.

    Returns:
        The bytes, (bytes,) uint8, and the image in mode RGB, (H, W, 3).
    """
    width, height = size_px
    colors = np.random.default_rng(seed).integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(colors).resize(size_px, Image.Resampling.BICUBIC).convert(mode)
    image.save(file, format, **options)
    return np.frombuffer(file.getvalue(), np.uint8), np.asarray(Image.open(file).convert("RGB")).astype(int)
