"""Workers that are lost: every wait ends, and nothing is mixed up.

Rows 5b to 5d of the table of faults.
"""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any

import pytest
from torchvision.datasets import ImageFolder

from ..faults import in_thread, without_torchs_signal
from ..limits import WAIT_S
from ..outcomes import without_frames
from .roads import BATCH, Road, assert_batches_match, assert_pictures_match
from .test_processes import directly


def kill_workers() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def loss_of(batches: Any) -> BaseException:
    """What the loop meets when its workers are gone; the batches until then are right."""
    while True:
        try:
            images, numbers, *_ = next(batches)
        except StopIteration:
            raise AssertionError("an epoch without workers came to its end") from None
        except (RuntimeError, OSError, EOFError) as error:
            return without_frames(error)
        assert_pictures_match(images, numbers)


class Ballast(ImageFolder):
    """Gives with each picture more than a pipe holds, and says when it has got ahead of the loop."""

    ahead: Any
    ballast_bytes: int

    def __getitem__(self, index: int) -> Any:
        if index == 3 * BATCH:
            self.ahead.set()
        return *super().__getitem__(index), bytes(self.ballast_bytes)


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full pipe"])
def test_a_killed_worker_is_an_error_and_the_next_epoch_holds_its_own_pictures(
    road: Road, is_full: bool, start_method: str
) -> None:
    dataset = road.dataset(Ballast, ahead=multiprocessing.get_context(start_method).Event())
    # Pictures do not fill a stock loader's pipe, and all else there is torch's affair.
    dataset.ballast_bytes = 1 << 18 if is_full and road.name != "produced" else 0
    loader = road.loader(dataset, num_workers=1, prefetch_factor=8, multiprocessing_context=start_method)
    for consumed in (directly, in_thread):
        dataset.ahead.clear()
        batches = iter(loader)
        assert_pictures_match(*next(batches)[:2])
        assert not is_full or dataset.ahead.wait(WAIT_S)
        with without_torchs_signal():
            kill_workers()
            error = consumed(functools.partial(loss_of, batches))
            del batches
        # A connection that breaks off is what torch raises where the worker dies while it hands over a tensor.
        assert isinstance(error, (OSError, EOFError)) or "DataLoader worker" in str(error), error
        assert_batches_match((images, numbers) for images, numbers, _ in loader)
