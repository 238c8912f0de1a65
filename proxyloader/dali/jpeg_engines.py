"""Build pipelines, and disable the JPEG engines if they fail on a crowded GPU. Runs in the main process.

NOTE [ Failing JPEG engines ]
The JPEG engines of a GPU have capacity for a limited number of decoders across all processes. A decoder that gets no
capacity reports this only on stderr, and CUDA decodes instead. But the operators after that decoder do not wait for
CUDA, so an image may show the previous contents of its memory (nvImageCodec 0.9). They do wait for a decoder that is
configured not to use the engines.

Building a decoder reserves capacity for batches of images of one kind. The capacity for a single image, or for several
kinds of JPEGs, is shared by all decoders of a process with the same padding. The first one that needs it reserves it.
Therefore a trial builds another decoder with the same padding after the pipeline, and decodes one image and then two.
The pipeline itself would then decode only as many images of a later batch as it has engines; see ``PlanServer``.

On a crowded GPU, each pipeline is tried before it is used. Images from the engines equal Pillow's, whereas CUDA rounds
differently. If the test images were not decoded by the engines, the decoders of this and every later pipeline of the
process are configured not to use them, and the pipeline is rebuilt.

A trial takes as long as about fifty batches (``longest_wait_ms`` in ``versions.jsonl``), so it is skipped if the GPU
is not crowded. If such a GPU does not decode with engines, it has none, which DALI handles. Other processes may start
later, so at most once a second, a run is preceded by a check whether others use the GPU, and if so, by a trial. CUDA
builds decoders one after the other, so others cannot exhaust the engines within a second. A model of this process that
fills the memory does not cause a trial, which would fail for lack of memory.
"""

import io
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..errors import PipelineError
from ..lifetime import delay_exit
from . import executor
from .api import Pipeline, decoder_arguments, fn, types
from .executor import Padding

log = logging.getLogger(__name__)

SIZE_PX = (256, 256)  # of the test image
MAX_MEAN_ERROR = 0.005  # in levels, between an image from the engines and Pillow's. With CUDA, it is a few hundredths
MIN_FREE_BYTES = 1 << 30  # free memory of a GPU below which its engines may run out of memory
CHECK_INTERVAL_S = 1.0  # minimum interval between checks for a crowded GPU

CROWDED_BYTES = 4 << 30
"""A GPU is crowded if more than this is used by anything but torch in this process. Each process with a decoder uses
almost a gigabyte, and the engines of an H200 serve many of them. See NOTE [ CUDA queues ] in ``dali/device.py``."""

_engines: dict[int | None, Literal["decoding", "absent", "failing"]] = {}
"""State of the engines of each GPU, shared by all decoders of the process. No pipeline uses failing engines."""

# Built pipelines for which a trial has shown that the engines decode, and when to check for a crowded GPU again.
_verified: weakref.WeakSet[Pipeline] = weakref.WeakSet()
_next_check_s: weakref.WeakKeyDictionary[Pipeline, float] = weakref.WeakKeyDictionary()


def are_disabled(device_id: int | None) -> bool:
    """Return whether this process does not use the engines of a GPU, because they failed to decode."""
    return _engines.get(device_id) == "failing"


def can_use(device_id: int | None) -> bool:
    """Return whether this process can use the engines of a GPU. The first call tries them, which is slow."""
    if device_id not in _engines:
        _engines[device_id] = "decoding" if _decode(device_id, {()}) else "absent"
        if _engines[device_id] == "absent" and is_crowded(device_id):
            _disable(device_id)
    return _engines[device_id] == "decoding"


def is_crowded(device_id: int | None) -> bool:
    """Return whether the engines may lack capacity or memory."""
    return _is_used_by_others(device_id) or executor.get_gpu_memory(device_id)[0] < MIN_FREE_BYTES


def build(pipeline: Pipeline) -> None:
    """Build a pipeline unless it is already built, without engines that fail to decode. Slower on a crowded GPU.

    Raises:
        torch.OutOfMemoryError, MemoryError: the GPU or the CPU runs out of memory.
        PipelineError: the engines fail to decode, and the decoders cannot be changed, for example because the pipeline
            has run.
    """
    if not pipeline._built:
        _verified.discard(pipeline)
        if are_disabled(pipeline.device_id):
            _exclude_engines(pipeline)
        executor.build(pipeline)
    if _fails(pipeline, is_crowded):
        _exclude_engines(pipeline)
        executor.build(pipeline)


def must_rebuild(pipeline: Pipeline) -> bool:
    """Return whether a built pipeline must be rebuilt without engines before its next run.

    Call this before each run. It checks the GPU at most once a second, and tries the engines if others use it.
    """
    if pipeline.device_id is None or time.monotonic() < _next_check_s.get(pipeline, 0.0):
        return False
    if not (fails := _fails(pipeline, _is_used_by_others)):
        _next_check_s[pipeline] = time.monotonic() + CHECK_INTERVAL_S
    return fails


def _exclude_engines(pipeline: Pipeline) -> None:
    """Configure the decoders of a pipeline not to use the engines. PipelineError: they cannot be changed."""
    if not executor.disable_engines(pipeline):
        raise PipelineError(
            f"the pipeline requires the JPEG engines of GPU {pipeline.device_id}, which has none, or which other "
            "processes have exhausted, so images might be wrong. Pass hw_decoder_load=0 to its decoders. `proxyloader "
            "doctor` shows which decoder is used",
            code="no-engines",
        )


def _fails(pipeline: Pipeline, needs_trial: Callable[[int], bool]) -> bool:
    """Return whether a built pipeline uses engines that fail to decode, tested only if ``needs_trial(device_id)``."""
    device_id = pipeline.device_id
    if device_id is None or pipeline in _verified or not (paddings := executor.get_engine_paddings(pipeline)):
        return False
    if not are_disabled(device_id):
        if not needs_trial(device_id):
            return False
        if _decode(device_id, paddings):
            _verified.add(pipeline)
            return False
        _disable(device_id)
    return True


def _disable(device_id: int | None) -> None:
    _engines[device_id] = "failing"
    log.warning(
        "Falling back to CUDA, which decodes more slowly: GPU %s has no JPEG engines, or other processes have "
        "exhausted them. If it has engines, end unneeded processes or set CUDA_DEVICE_MAX_CONNECTIONS=8 in the "
        "environment of each, and restart this one. `proxyloader doctor` shows which decoder is used",
        device_id,
    )


def _is_used_by_others(device_id: int | None) -> bool:
    free_bytes, total_bytes = executor.get_gpu_memory(device_id)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device_id) > CROWDED_BYTES


def _decode(device_id: int | None, paddings: set[Padding]) -> bool:
    """Return whether the engines decode. This reserves the shared capacity for each padding if any is left."""
    with delay_exit():
        return max([_measure_error(device_id, padding) for padding in paddings]) < MAX_MEAN_ERROR


def _measure_error(device_id: int | None, padding: Padding = (), engine_share: float = 1.0) -> float:
    """Return the largest mean difference from Pillow of a test image decoded alone and in a batch of two.

    Return infinity if the image cannot be decoded, for example for lack of memory.
    """
    encoded, expected = make_test_image(quality=90)
    pipeline = create_decoder(device_id, engine_share, padding)
    try:
        pipeline.build()  # even if memory is low, because the next decoder would not have more
        decoded = [image for count in (1, 2) for image in decode(pipeline, [encoded] * count)]
    except (RuntimeError, MemoryError) as error:
        if "DataLoader worker" in str(error):  # raised by torch's signal handler because a worker died
            raise
        log.info("failed to decode a test image on GPU %s: %s", device_id, str(error))
        return np.inf
    return max(float(np.abs(image - expected).mean()) for image in decoded)


def create_decoder(device_id: int | None, engine_share: float, padding: Padding = ()) -> Pipeline:
    """Return an unbuilt pipeline that decodes one or two images."""
    args = decoder_arguments("decoders__Image", device_id, engine_share) | dict(padding)
    pipeline = Pipeline(batch_size=2, num_threads=1, device_id=device_id, prefetch_queue_depth=1, exec_dynamic=True)
    with pipeline:
        encoded = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        pipeline.set_outputs(fn.decoders.image(encoded, **args))
    return pipeline


def decode(pipeline: Pipeline, files: list[NDArray[np.uint8]]) -> list[NDArray[Any]]:
    """Decode one or two files. Return their pixels, each (H, W, 3)."""
    pipeline.feed_input("images", executor.tensor_list(files))
    pipeline._run_once()
    (images,) = pipeline.outputs()
    return [np.asarray(image).astype(int) for image in (images if pipeline.device_id is None else images.as_cpu())]


def make_test_image(
    seed: int = 0, size_px: tuple[int, int] = SIZE_PX, mode: str = "RGB", format: str = "JPEG", **options: Any
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return the file of a random image of (width, height) ``size_px`` whose colors vary from pixel to pixel, (bytes,)
    uint8, and its pixels decoded by Pillow, (H, W, 3) in mode RGB. Options are those of ``Image.save``."""
    width, height = size_px
    colors = np.random.default_rng(seed).integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors).resize(size_px, Image.Resampling.BICUBIC).convert(mode).save(file, format, **options)
    return np.frombuffer(file.getvalue(), np.uint8), np.asarray(Image.open(file).convert("RGB")).astype(int)
