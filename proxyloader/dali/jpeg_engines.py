"""Build pipelines; on a crowded GPU without its JPEG engines, if these fail to decode. Main process.

NOTE [ Engines that fail ]
A GPU has room for so many users of its JPEG engines, of all processes together. A decoder that finds none says so on
stderr alone, and CUDA decodes in their place; but what comes behind that decoder does not wait for CUDA then, and a
picture may be what lay in that memory before (nvImageCodec 0.9). A decoder that is told to leave the engines alone is
waited for.

A decoder takes its room in two steps. What it needs for pictures alike it takes when it is built. What it needs for a
single one, or for several kinds of JPEGs, is shared by all decoders of a process that are given the same padding; the
first that needs it takes it. So behind a pipeline a decoder like its own is built, and given a single picture and then
two: that takes both kinds of room, and the pipeline keeps what is shared.

On a crowded GPU that is done behind each pipeline, before it is used. Pictures of the engines are Pillow's, while CUDA
rounds otherwise. Where CUDA shows, or something else, the pipeline's decoders are told to leave the engines alone, it
is built once more, and so is every other of the process from then on.

On one that is not crowded it is done behind a process's first pipeline, which may need what is shared when others have
come. Nobody waits for the answer there: a GPU that does not decode has no engines, and DALI knows. So a thread does it,
a moment after the pipeline was built: done at once it made the first batch come later (``first_batch_s`` in the two
records of 2026-11-23 in ``bench.jsonl``).
"""

from __future__ import annotations

import io
import logging
import math
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from .. import _fork_safety
from ..errors import PipelineError
from . import executor
from .api import Pipeline, fn, pipeline_def, types, upright
from .executor import Padding

log = logging.getLogger(__name__)

SIDE_PX = 256
"""Of the picture."""

MOST_LEVELS = 0.005
"""In the mean, that a picture from the engines differs from Pillow's; CUDA's differs by some hundredths."""

CROWDED_BYTES = 4 << 30
"""Of a GPU's memory that are not torch's in this process. Each process with a decoder holds a good part of one of these
gigabytes, and many such processes have room on the engines of an H200. (See NOTE [ Queues ] in ``dali/device.py``.)"""

SHORT_BYTES = 1 << 30
"""Of a GPU's memory, with which its engines may find too little."""

AFTER_FIRST_BATCH_S = 1.0
"""From when the first pipeline was built; so long the first batch has the GPU to itself."""

LOOK_S = 0.05
"""How often the thread looks meanwhile whether the process ends."""

_failing: set[int] = set()
"""GPUs whose engines this process leaves alone."""

_holding: weakref.WeakKeyDictionary[Pipeline, set[Padding]] = weakref.WeakKeyDictionary()
"""Pipelines with decoders that hold what they share with others of their padding."""


def are_left_alone(device_id: int | None) -> bool:
    """By this process, since they did not decode."""
    return device_id in _failing


def build(pipeline: Pipeline) -> None:
    """Build a pipeline, if it is not built yet, such that it does not count on engines that do not decode.

    It takes longer on a crowded GPU.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is no memory for it, on the GPU or on the CPU.
        PipelineError: engines do not decode, and its decoders cannot be told; the pipeline has run, say.
    """
    if pipeline in _holding and executor.is_built(pipeline):
        return
    if _reservation is not None:
        _reservation.finish()  # or both would be slower, and tuning would measure that
    _holding.pop(pipeline, None)
    if are_left_alone(pipeline.device_id):
        _avoid(pipeline)
    executor.build(pipeline)
    if _fail_for(pipeline):
        _avoid(pipeline)
        executor.build(pipeline)


def _avoid(pipeline: Pipeline) -> None:
    if not executor.leave_engines_alone(pipeline):
        raise PipelineError(
            f"the pipeline gives JPEGs to the engines of GPU {pipeline.device_id}, which has none, or other processes "
            "use them up; its pictures might be wrong. Give its decoders hw_decoder_load=0",
            code="no-engines",
        )


def _fail_for(pipeline: Pipeline) -> bool:
    """See whether a pipeline that is built counts on engines that do not decode."""
    device_id = pipeline.device_id
    if device_id is None or not executor.uses_engines(pipeline):
        return False
    if are_left_alone(device_id):
        return True
    paddings = executor.paddings_on_engines(pipeline)
    if not _is_crowded(device_id):
        held = [others for other, others in list(_holding.items()) if other.device_id == device_id]
        _reserve_beside(device_id, paddings.difference(*held))
        _holding[pipeline] = paddings
        return False
    if _decode(device_id, paddings):
        _holding[pipeline] = paddings
        return False
    _leave_alone(device_id)
    return True


def _leave_alone(device_id: int) -> None:
    _failing.add(device_id)
    log.warning(
        "CUDA decodes, which is slower: GPU %d has no JPEG engines, or other processes use them up. If it has some, "
        "end what is not needed, or give each process CUDA_DEVICE_MAX_CONNECTIONS=8 in its environment, and start this "
        "one again",
        device_id,
    )


def _reserve_beside(device_id: int, paddings: set[Padding]) -> None:
    """Take what decoders of these paddings share, a moment later, beside what the calling thread does."""
    global _reservation
    if paddings:
        reservation = _Reservation(device_id, paddings)
        reservation.start()  # first: who waits for it takes for granted that it was
        _fork_safety.watch(reservation)
        _reservation = reservation


class _Reservation(threading.Thread):
    """Tries the engines, which takes room. A fork waits for its end."""

    def __init__(self, device_id: int, paddings: set[Padding]) -> None:
        super().__init__(name="proxyloader-engines")
        self._device_id, self._paddings = device_id, paddings
        self._at_once = threading.Event()

    def run(self) -> None:
        until_s = time.monotonic() + AFTER_FIRST_BATCH_S
        while not self._at_once.wait(LOOK_S) and time.monotonic() < until_s:
            if not threading.main_thread().is_alive():
                return  # the process ends, and waits for its threads
        if not _decode(self._device_id, self._paddings) and _is_crowded(self._device_id):
            _leave_alone(self._device_id)  # others came meanwhile; what is built from now on does without

    def finish(self) -> None:
        """Now, and wait for it."""
        self._at_once.set()
        self.join()

    def pause(self) -> bool:
        was_under_way = self.is_alive()
        self.finish()
        return was_under_way

    def resume(self) -> None: ...

    def forget_in_child(self) -> None: ...

    def end(self) -> None: ...


_reservation: _Reservation | None = None
"""The last one."""


def _is_crowded(device_id: int) -> bool:
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device_id)
    except (RuntimeError, AssertionError):  # CUDA itself has failed, or torch was built without it
        return False
    return free_bytes < SHORT_BYTES or total_bytes - free_bytes - torch.cuda.memory_reserved(device_id) > CROWDED_BYTES


def _decode(device_id: int, paddings: set[Padding]) -> bool:
    """Try the engines, which takes the room that decoders of these paddings share, where there is some."""
    return max([_levels_off(device_id, padding) for padding in paddings]) < MOST_LEVELS


def _levels_off(device_id: int | None, padding: Padding = (), engine_share: float = 1.0) -> float:
    """Decode a picture, alone and beside itself, and compare with Pillow's: the most that one differs in the mean.

    Infinite where they cannot be decoded, for want of memory, say.
    """
    encoded, wanted = _picture()
    pipeline = _decoder(device_id, padding, engine_share)
    off = []
    try:
        pipeline.build()  # also where there is little memory: what is not found then, the next decoder will not find
        for images in ([encoded], [encoded, encoded]):
            pipeline.feed_input("images", executor.tensor_list(images))
            executor.run(pipeline)
            (decoded,) = pipeline.outputs()
            on_cpu = decoded if device_id is None else decoded.as_cpu()
            off += [float(np.abs(np.asarray(found).astype(int) - wanted).mean()) for found in on_cpu]
    except (RuntimeError, MemoryError) as error:
        log.info("a picture could not be decoded on GPU %s: %s", device_id, str(error))
        return math.inf
    return max(off)


def _decoder(device_id: int | None, padding: Padding, engine_share: float) -> Pipeline:
    how: dict[str, Any] = {"output_type": types.RGB, "jpeg_fancy_upsampling": True, **upright("decoders__Image")}
    if device_id is not None:
        how |= {"device": "mixed", "hw_decoder_load": engine_share, **dict(padding)}

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=2, num_threads=1, device_id=device_id, prefetch_queue_depth=1, exec_dynamic=True
    )
    def pictures() -> Any:
        return fn.decoders.image(fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8), **how)

    return pictures()


def _picture() -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """A JPEG of colours that change from pixel to pixel: its bytes, and what Pillow makes of it."""
    colors = np.random.default_rng(0).integers(0, 256, (SIDE_PX // 2, SIDE_PX // 2, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors).resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return np.frombuffer(file.getvalue(), np.uint8), np.asarray(Image.open(file).convert("RGB")).astype(int)
