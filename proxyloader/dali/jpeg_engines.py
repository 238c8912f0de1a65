"""Build pipelines; on a crowded GPU without its JPEG engines, if these fail to decode. Main process.

NOTE [ Engines that fail ]
The JPEG engines of a GPU have room for a limited number of users, over all processes. A decoder that finds no room
reports it only on stderr, and CUDA decodes instead. But the operators after that decoder do not wait for CUDA, so an
image may be the earlier content of its memory (nvImageCodec 0.9). They do wait for a decoder that was configured to not
use the engines.

A decoder takes room in two steps. The room for batches of images of one kind is taken when the decoder is built. The
room for a single image, or for several kinds of JPEGs, is shared by all decoders of a process with the same padding,
and taken by the first one that needs it. So after a pipeline a decoder with the same padding is built, and decodes one
image and then two. This takes both kinds of room, and the pipeline keeps the shared one.

On a crowded GPU this is done after each pipeline is built, before it is used. Images from the engines equal those of
Pillow, while CUDA rounds differently. If the images are not those of the engines, the decoders of the pipeline are
configured to not use the engines, and the pipeline is built again. So is every later pipeline of the process.

On a GPU that is not crowded this is done after the first pipeline of a process, as it may need the shared room when the
GPU has become crowded. The result is not waited for: if such a GPU does not decode with engines, it has none, and DALI
handles that. So a thread does it, a moment after the pipeline was built. Without the delay the first batch came later
(``first_batch_s`` in the two records of 2026-11-23 in ``bench.jsonl``). It takes a second, and a fork has to wait for
it. So a fork begins the delay anew, and the workers of a short second epoch are not late.
"""

from __future__ import annotations

import contextlib
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
from .api import Pipeline, decoder_arguments, fn, pipeline_def, types
from .executor import Padding

log = logging.getLogger(__name__)

SIDE_PX = 256
"""Side of the test image, in pixels."""

MOST_LEVELS = 0.005
"""Bound of the mean difference between an image from the engines and Pillow's. For CUDA it is some hundredths."""

CROWDED_BYTES = 4 << 30
"""Used memory of a crowded GPU, without that of torch in this process. Each process with a decoder uses a good part of
a gigabyte, and the engines of an H200 have room for many such processes. See NOTE [ Queues ] in ``dali/device.py``."""

SHORT_BYTES = 1 << 30
"""Free memory of a GPU below which its engines may not have enough."""

AFTER_FIRST_BATCH_S = 1.0
"""Delay of the thread after the first pipeline was built, during which the first batch is decoded, in seconds."""

AT_LATEST_S = 10.0
"""Delay that forks and other pipelines may make of it, in seconds."""

LOOK_S = 0.05
"""Interval at which the thread checks meanwhile whether the process ends, in seconds."""

_failing: set[int] = set()
"""GPUs whose engines this process does not use."""

_missing: set[int] = set()
"""GPUs that are not crowded and whose engines do not decode, so that they have none."""

_holding: weakref.WeakKeyDictionary[Pipeline, set[Padding]] = weakref.WeakKeyDictionary()
"""Pipelines whose decoders hold the shared room, with their paddings."""


def are_left_alone(device_id: int | None) -> bool:
    """Return whether this process does not use the engines of a GPU, as they failed to decode."""
    return device_id in _failing


def are_used(device_id: int | None) -> bool:
    """Return whether the engines of a GPU decode for this process. This waits for the thread that tries them."""
    if _reservation is not None:
        _reservation.finish()
    return device_id not in _failing | _missing


def build(pipeline: Pipeline) -> None:
    """Build a pipeline, if it is not built yet, so that it does not use engines that fail to decode.

    This takes longer on a crowded GPU.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is not enough memory, on the GPU or on the CPU.
        PipelineError: the engines fail to decode, and the decoders cannot be changed, for example as the pipeline has
            run.
    """
    if pipeline in _holding and executor.is_built(pipeline):
        return
    _holding.pop(pipeline, None)
    with _reservation or contextlib.nullcontext():  # at the same time both would be slower
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
            "use them up; its pictures might be wrong. Give its decoders hw_decoder_load=0. `proxyloader doctor` shows "
            "what decodes",
            code="no-engines",
        )


def _fail_for(pipeline: Pipeline) -> bool:
    """Return whether a built pipeline uses engines that fail to decode."""
    device_id = pipeline.device_id
    if device_id is None or not (paddings := executor.paddings_on_engines(pipeline)):
        return False
    if are_left_alone(device_id):
        return True
    if not _is_crowded(device_id):
        held = [others for other, others in list(_holding.items()) if other.device_id == device_id]
        if missing := paddings.difference(*held):
            if _reservation is not None:
                _reservation.finish()
            _Reservation(device_id, missing).begin()
    else:
        with _reservation or contextlib.nullcontext():
            has_room = _decode(device_id, paddings)
        if not has_room:
            _leave_alone(device_id)
            return True
    _holding[pipeline] = paddings
    return False


def _leave_alone(device_id: int) -> None:
    _failing.add(device_id)
    log.warning(
        "CUDA decodes, which is slower: GPU %d has no JPEG engines, or other processes use them up. If it has some, "
        "end what is not needed, or give each process CUDA_DEVICE_MAX_CONNECTIONS=8 in its environment, and start this "
        "one again. `proxyloader doctor` shows what decodes",
        device_id,
    )


class _Reservation(threading.Thread):
    """A thread that tries the engines after a delay, and so takes the shared room of decoders with these paddings.

    A fork, or a block ``with`` it, begins the delay anew. If the thread is trying them already, they wait for its end.
    No lock is held meanwhile, as a pipeline that is built may fork processes of its own.
    """

    def __init__(self, device_id: int, paddings: set[Padding]) -> None:
        super().__init__(name="proxyloader-engines")
        self._device_id, self._paddings = device_id, paddings
        self._at_once = threading.Event()
        self._trial, self._put_off_by = threading.Lock(), 0
        self._latest_s = time.monotonic() + AT_LATEST_S
        self._begin_delay()

    def _begin_delay(self) -> None:
        self._due_s = min(time.monotonic() + AFTER_FIRST_BATCH_S, self._latest_s)

    def begin(self) -> None:
        global _reservation
        self.start()  # first, as others join it, and only a started thread can be joined
        _fork_safety.watch(self)
        _reservation = self

    def run(self) -> None:
        while True:
            is_asked_for = self._at_once.wait(LOOK_S)
            if not threading.main_thread().is_alive():
                return  # the process is ending, and waits for its threads
            with self._trial:
                if not self._put_off_by and (is_asked_for or time.monotonic() >= self._due_s):
                    self._try()
                    return

    def _try(self) -> None:
        if _decode(self._device_id, self._paddings):
            return
        if _is_crowded(self._device_id):
            _leave_alone(self._device_id)  # the GPU has become crowded; later pipelines do not use the engines
        else:
            _missing.add(self._device_id)

    def finish(self) -> None:
        """End the delay, and wait for the thread."""
        self._at_once.set()
        self.join()

    def __enter__(self) -> None:
        with self._trial:
            self._put_off_by += 1

    def __exit__(self, *_: object) -> None:
        self._begin_delay()
        with self._trial:
            self._put_off_by -= 1

    def pause(self) -> bool:
        was_under_way = self._trial.locked()
        self.__enter__()
        return was_under_way

    def resume(self) -> None:
        self.__exit__()

    def forget_in_child(self) -> None:
        global _reservation
        _reservation = None

    def end(self) -> None: ...


_reservation: _Reservation | None = None
"""The thread that was started last."""


def _is_crowded(device_id: int) -> bool:
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device_id)
    except (RuntimeError, AssertionError):  # CUDA itself has failed, or torch was built without it
        return False
    return free_bytes < SHORT_BYTES or total_bytes - free_bytes - torch.cuda.memory_reserved(device_id) > CROWDED_BYTES


def _decode(device_id: int, paddings: set[Padding]) -> bool:
    """Return whether the engines decode. This takes the shared room of these paddings, if the GPU has any left."""
    return max([_levels_off(device_id, padding) for padding in paddings]) < MOST_LEVELS


def _levels_off(device_id: int | None, padding: Padding = (), engine_share: float = 1.0) -> float:
    """Return the largest mean difference from Pillow of an image that is decoded alone, and in a batch of two.

    It is infinite if the image cannot be decoded, for example for lack of memory.
    """
    encoded, wanted = known_picture(quality=90)
    how = decoder_arguments("decoders__Image", device_id, engine_share) | dict(padding)

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=2, num_threads=1, device_id=device_id, prefetch_queue_depth=1, exec_dynamic=True
    )
    def pictures() -> Any:
        return fn.decoders.image(fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8), **how)

    pipeline, off = pictures(), []
    try:
        pipeline.build()  # even with little memory, as the next decoder would not find more
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


def known_picture(
    seed: int = 0,
    size_px: tuple[int, int] = (SIDE_PX, SIDE_PX),
    mode: str = "RGB",
    format: str = "JPEG",
    **options: Any,
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return a file of a picture whose colours change from pixel to pixel, and the pixels that Pillow decodes of it.

    Args:
        seed: each gives another picture.
        size_px: width and height.
        mode, format, options: as Pillow writes the file.

    Returns:
        The bytes, (bytes,) uint8, and the image in mode RGB, (H, W, 3).
    """
    width, height = size_px
    colors = np.random.default_rng(seed).integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(colors).resize(size_px, Image.Resampling.BICUBIC).convert(mode)
    image.save(file, format, **options)
    return np.frombuffer(file.getvalue(), np.uint8), np.asarray(Image.open(file).convert("RGB")).astype(int)
