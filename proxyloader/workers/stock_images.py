"""A share of the images that DALI decodes, made once more as the stock loader makes them, for the audit. Worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._random_state import seed_for
from ..data.image_calls import image_calls_in
from ..data.placeholders import ImageCall, ProxyInputs
from ..data.transformed import pixel_uses
from ..errors import ImageError

LOOKED_AT = 64
"""Numbers of each input of an image that decide whether it is made again."""


@dataclass(frozen=True)
class StockImage:
    """What the stock loader makes of an image that DALI decodes.

    Attributes:
        run, row: the place of DALI's image.
        sample: the place of the image's sample in the batch; None if it was found in no sample.
        path: of the file; "" if unknown.
        outputs: the images of the transform, (C, H, W) uint8 or float32.
    """

    run: int
    row: int
    sample: int | None
    path: str
    outputs: tuple[NDArray[Any], ...]

    def __repr__(self) -> str:
        return f"StockImage(run {self.run}, row {self.row}, {self.path})"


def stock_images(
    runs: Sequence[Sequence[ProxyInputs]], samples: Sequence[Any], share: float, epoch: int
) -> tuple[StockImage, ...]:
    """Make a share of the images of a batch once more. No generator is drawn from, and no use of pixels is counted.

    Left out are images that Pillow has decoded or cannot decode, and those that are not finished by their transform,
    of a server or of ``unsupported="batch"``.
    """
    chosen = [
        (run, row, call)
        for run, calls in enumerate(runs)
        for row, call in enumerate(calls)
        if isinstance(call, ImageCall) and _is_comparable(call) and _is_chosen(call, share, epoch)
    ]
    if not chosen:
        return ()
    sample_of = {id(call): k for k, sample in enumerate(samples) for call in image_calls_in([sample])}
    found = []
    with _uncounted():
        for run, row, call in chosen:
            with contextlib.suppress(ImageError):
                outputs = tuple(np.asarray(output) for output in call.real())
                found.append(StockImage(run, row, sample_of.get(id(call)), call.source, outputs))
    return tuple(found)


def _is_comparable(call: ImageCall) -> bool:
    return call.image.header is not None and call.transformed is not None and call.plan.rest is None


def _is_chosen(call: ImageCall, share: float, epoch: int) -> bool:
    """Return whether an image is in the share, by a hash of the epoch, its file, and the numbers that were drawn."""
    parts = []
    for array in call.inputs:
        middle = len(array) // 2  # of a file, as the ends of many files are alike
        parts.append(array[middle : middle + LOOKED_AT].tobytes())
    return seed_for(0, epoch, call.source, *parts) < share * 2**63


@contextlib.contextmanager
def _uncounted() -> Iterator[None]:
    count, why = pixel_uses.count, pixel_uses.why
    try:
        yield
    finally:
        pixel_uses.count, pixel_uses.why = count, why
