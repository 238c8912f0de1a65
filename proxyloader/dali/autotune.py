"""Automatic choice of the number of DALI's threads and the share of the JPEG engines. Main process.

NOTE [ What is measured ]
The best share depends on the GPU. Some GPUs have seven JPEG engines, some one, some none. CUDA decodes the images that
are not given to the engines. So the first large batch of a loader on a GPU is decoded a few times with each of a few
settings. The result is stored on disk, for this GPU, number of cores, DALI version, batch size and approximate file
size. The first setting gives all images to the engines. Another one is used only if it is clearly faster: images from
the engines and from CUDA differ by a level in some pixels, and should not differ between runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import jpeg_engines
from .build import DALI_VERSION, decoding_s
from .operators import PipelineOptions

log = logging.getLogger(__name__)

LOADS = (1.0, 0.65, 0.0)  # DALI's default is 0.65
THREADS = (4, 8)
"""Numbers of threads to try. They are few, as each needs a pipeline."""

CLEARLY_FASTER = 0.85
"""A setting is clearly faster if it takes less than this share of the other's time."""

FEWEST_IMAGES = 32
"""Minimum number of images of a batch that is measured. With fewer, a measurement is inaccurate and gains little."""


def is_to_be_tuned(options: PipelineOptions, images: int) -> bool:
    """Whether an option is not set and a batch of this number of images can determine it."""
    is_open = options.num_threads is None or options.hw_decoder_load is None
    return is_open and options.device_id is not None and images >= FEWEST_IMAGES


def tuned(options: PipelineOptions, images: list[Any]) -> PipelineOptions:
    """Return the options with all values set, from the stored result or from a measurement.

    Args:
        options: the options of a pipeline.
        images: a batch, (bytes,) uint8 each.
    """
    key, path = _key(options, images), cache_path()
    known = _read(path)
    settled = _settled(options, known.get(key))
    if settled is None:
        log.info("measuring how this GPU decodes fastest (%s); the answer is kept in %s", key, path)
        try:
            settled = measured(options, lambda candidate: decoding_s(candidate, images))
        except (RuntimeError, MemoryError):  # a bad image, or no memory: the run will raise it
            return replace(options, hw_decoder_load=options.engine_share, num_threads=options.threads)
        if not jpeg_engines.are_left_alone(options.device_id):  # a measurement without the engines holds only for now
            known[key] = {"hw_decoder_load": settled.hw_decoder_load, "num_threads": settled.num_threads}
            _write(path, known)
    return settled


def _settled(options: PipelineOptions, found: Any) -> PipelineOptions | None:
    """Return the options with the stored result, or None if it is missing or invalid. Users may edit the file."""
    try:
        load, threads = float(found["hw_decoder_load"]), int(found["num_threads"])
    except (KeyError, TypeError, ValueError):
        return None
    return replace(options, hw_decoder_load=load, num_threads=threads) if 0 <= load <= 1 and threads > 0 else None


def measured(options: PipelineOptions, seconds_of: Callable[[PipelineOptions], float]) -> PipelineOptions:
    """Return the fastest setting. The share of the engines is chosen first, then the number of threads.

    Args:
        options: the options of a pipeline.
        seconds_of: returns the time that a setting takes, in seconds.
    """
    cores = len(os.sched_getaffinity(0))
    best = replace(options, num_threads=options.threads, hw_decoder_load=options.engine_share)
    seconds = seconds_of(best)
    others: dict[str, Any] = {
        "hw_decoder_load": LOADS if options.hw_decoder_load is None else (),
        "num_threads": [threads for threads in THREADS if threads <= cores] if options.num_threads is None else (),
    }
    for name, values in others.items():
        start, start_s = best, seconds
        for value in values:
            if value == getattr(start, name):
                continue
            change: dict[str, Any] = {name: value}
            candidate = replace(start, **change)
            candidate_s = seconds_of(candidate)
            if candidate_s < min(seconds, CLEARLY_FASTER * start_s):
                best, seconds = candidate, candidate_s
    return best


def cache_path() -> Path:
    """Return the path of the file with the stored results."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyloader" / "decoding.json"


def _key(options: PipelineOptions, images: list[Any]) -> str:
    mean_bytes = sum(image.nbytes for image in images) / len(images)
    given = {"num_threads": options.num_threads, "hw_decoder_load": options.hw_decoder_load}
    parts = [
        "CPU" if options.device_id is None else torch.cuda.get_device_name(options.device_id),
        f"{len(os.sched_getaffinity(0))} cores",
        DALI_VERSION,
        f"batches of {options.batch_size}",
        f"files of about {2 ** round(math.log2(max(1.0, mean_bytes)) - 10)} KiB",
        *(f"{name}={value}" for name, value in given.items() if value is not None),
    ]
    return ", ".join(parts)


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # without the file, it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # so no process reads a partial file
            written = Path(folder) / path.name
            written.write_text(json.dumps(known, indent=1))
            written.replace(path)
