"""Audit: images of DALI's compared with the stock loader's while training runs. Main process.

NOTE [ Audit ]
A worker that packs a batch makes a share of its images once more, as the stock loader makes them: Pillow decodes the
file, and torchvision's transforms draw the same numbers again. It does so after it has packed the batch, and restores
the generators, so all batches are those of a loader without an audit. The images travel in the message of their batch.
They are compared with what DALI made of the same files when the batch is assembled.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from .._cache_folder import cache_folder
from ..errors import AuditError
from ..transforms.closeness import Difference, bound_of, difference_of, levels_of
from ..transforms.plan import Plan
from ..workers.messages import PackedBatch
from ..workers.stock_images import StockImage

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.output_format import Outputs

log = logging.getLogger(__name__)

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
"""An image of DALI's and the stock loader's, in levels of 255, (C, H, W)."""

ON_DIFFERENCE = ("log", "raise")

MOST_SAVED = 20
"""Most images of a loader that are saved and logged. The others are counted."""


@dataclass(frozen=True)
class Audit:
    """How images are compared with the stock loader's while training runs: ``DataLoader(..., audit=Audit(1 / 1000))``.

    A share of the JPEGs that DALI decodes is made a second time in the worker, as the stock loader makes it. An image
    that differs by more than its transforms allow is saved in a folder of its own: ``ours.png``, ``stock.png``, and
    ``difference.png``, which is eight times as bright. Batches are the same with and without an audit.

    Attributes:
        share: share of the images, 0 to 1. Which these are follows from the epoch, the file and its random numbers.
        on_difference: "log" logs a warning. "raise" raises an AuditError at the batch of the image.
        folder: where images are saved. Default: ``audit`` in the user's cache folder for this package.

    Raises:
        ValueError: the share is not a number from 0 to 1, or ``on_difference`` is something else.
    """

    share: float
    on_difference: Literal["log", "raise"] = "log"
    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        share = self.share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(f"audit is a share of the images, from 0 to 1, or a proxyloader.Audit; got {share!r}")
        if self.on_difference not in ON_DIFFERENCE:
            allowed = ", ".join(map(repr, ON_DIFFERENCE))
            raise ValueError(f"on_difference is one of {allowed}; got {self.on_difference!r}")

    @classmethod
    def of(cls, audit: float | Audit) -> Audit:
        """Return the audit that a loader's argument stands for."""
        return audit if isinstance(audit, Audit) else cls(audit)


class Auditor:
    """Compares the images of a loader, and keeps count.

    Args:
        name: of the dataset, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._compared, self._found, self._largest = 0, 0, Difference(0.0, 0.0)
        self._said: int | None = None  # how many were beyond their bound in the last line of the log
        self._is_idle = False

    def warn_of_nothing(self, batch: PackedBatch, plans: Mapping[str, Plan]) -> None:
        """Log a warning, once, if the first batch has no image that can be compared."""
        made = [plans[run.server] for run in batch.runs if run.server in plans]
        if self._is_idle or (batch.images_by[0] and any(plan.rest is None for plan in made)):
            return
        self._is_idle = True
        log.warning(
            "%s, audit: the first batch has nothing to compare. Compared are JPEGs that DALI decodes for a translated "
            "transform, and neither what torchvision makes in the workers, nor what goes through a server= or "
            "unsupported='batch'. print(loader.backend) says who makes the images",
            self._name,
        )

    def compare(self, batch: PackedBatch, outputs: Sequence[Outputs], plans: Mapping[str, Plan], audit: Audit) -> None:
        """Compare the images of a batch that the worker has made, too. This waits for a GPU to make them.

        Raises:
            AuditError: an image differs by more than its bound, and the audit is to raise.
        """
        for stock in batch.stock_images:
            plan = plans[batch.runs[stock.run].server]
            bound = bound_of(plan)
            for output, values in zip(outputs[stock.run], stock.outputs):
                image = output[stock.row].cpu()
                ours, theirs = levels_of(image, plan), levels_of(torch.from_numpy(values).to(image.dtype), plan)
                difference = difference_of(ours, theirs)
                self._compared += 1
                self._largest = max(self._largest, difference)
                if difference.is_within(bound):
                    continue
                self._found += 1
                if audit.on_difference == "raise" or self._found <= MOST_SAVED:
                    how_much = f"{difference}; allowed are {bound}"
                    self._report(_error(batch, stock, how_much, (ours, theirs), audit), audit)

    def end_epoch(self) -> None:
        """Log how many images were compared, after the first epoch, and after others with images beyond their bound."""
        if not self._compared or self._said == self._found:
            return
        self._said = self._found
        log.log(
            logging.WARNING if self._found else logging.INFO,
            "%s, audit: %s images compared so far, %s beyond their bound; the largest difference is %s",
            self._name,
            f"{self._compared:,}",
            f"{self._found:,}",
            self._largest,
        )

    def _report(self, error: AuditError, audit: Audit) -> None:
        if audit.on_difference == "raise":
            raise error
        last = f". {MOST_SAVED} were saved; the next ones are only counted" if self._found == MOST_SAVED else ""
        log.warning("%s, audit: %s%s", self._name, error, last)


def _error(batch: PackedBatch, stock: StockImage, how_much: str, pair: Pair, audit: Audit) -> AuditError:
    """Save both images, and return the error that names them."""
    indices = batch.sample_indices
    index = None if indices is None or stock.sample is None else indices[stock.sample]
    where = "a sample" if index is None else f"dataset[{index}]"
    if stock.path:
        where = f"{where} ({stock.path})"
    try:
        folder = _save(pair, audit, index)
        saved = f"Both pictures are in {folder}: ours.png, stock.png, difference.png"
    except OSError as error:
        folder, saved = "", f"The pictures could not be saved ({error}); give Audit a folder= that can be written"
    return AuditError(
        f"{where}: the image that DALI made differs from the stock loader's by {how_much}, in levels of 255. {saved}. "
        "If it looks wrong, `proxyloader doctor` examines what decodes, and translate=False loads without DALI",
        index=index,
        path=stock.path,
        folder=folder,
    )


def _save(pair: Pair, audit: Audit, index: Any) -> str:
    """Save both images, and how they differ, in a new folder. Return its path. OSError: it cannot be written."""
    parent = Path(audit.folder) if audit.folder is not None else cache_folder() / "audit"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{index}-" if isinstance(index, int) else "sample-", dir=parent))
    ours, stock = pair
    pictures = {"ours": ours, "stock": stock}
    if ours.shape == stock.shape:
        pictures["difference"] = 8 * np.abs(ours - stock)
    for name, levels in pictures.items():
        pixels = np.nan_to_num(levels).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).save(folder / f"{name}.png")
    return str(folder)
