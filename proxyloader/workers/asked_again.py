"""AskedAgain: the samples of damaged files whose error a dataset meets where it meets it with the stock loader.

NOTE [ Asked again ]
A dataset may catch the error of a file that Pillow cannot decode, and return something else. Where images are decoded
late, the error of a damaged file comes behind the dataset. Then the generators go back to where the batch began, and
the dataset is asked for the batch again. It gets the damaged image decoded, so it meets the error where it always did,
and all samples draw what they draw with the stock loader.

Runs where the dataset runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._random_state import go_back_to, states_now
from ..data.bad_samples import is_about_the_file
from ..data.lazy_image import is_late
from ..data.placeholders import ImageCall
from ..data.transformed import making_values
from ..errors import ImageError

T = TypeVar("T")


class _FoundBehind(Exception):
    """An image that the dataset has returned cannot be decoded."""

    def __init__(self, error: ImageError, indices: Sequence[Any]) -> None:
        super().__init__(str(error))
        self.error, self.indices = error, indices


class AskedAgain:
    """The indices whose images were found to be damaged behind the dataset."""

    def __init__(self) -> None:
        self._errors: dict[Any, ImageError] = {}
        self._has_images = True  # as far as is known; reading the generators takes longer than a batch of numbers

    def holds(self, indices: Sequence[Any]) -> bool:
        """Return whether one of the indices is among them."""
        return bool(self._errors) and any(index in self._errors for index in indices if _is_hashable(index))

    def until_known(self, fetch: Callable[[], T]) -> T:
        """Return what a function fetches. It is called again, with the same random numbers, after each new find."""
        before = states_now(beside_torch=True) if self._has_images and is_late() else None
        while True:
            try:
                fetched = fetch()
                self._has_images = ImageCall.was_made
                return fetched
            except _FoundBehind as found:
                self._errors |= dict.fromkeys(found.indices, found.error)
                if before is not None:
                    go_back_to(before)

    def note(self, error: ImageError, indices: Sequence[Any]) -> None:
        """Let the error of what the dataset has returned end ``fetch`` above, unless the indices are known already."""
        if not self.holds(indices) and all(map(_is_hashable, indices)):
            raise _FoundBehind(error.with_traceback(None), indices) from None

    def sample(self, dataset: Any, index: Any) -> Any:
        """Return the sample of a known index. ImageError: the dataset does not catch the error of its image."""
        try:
            with making_values():
                return dataset[index]
        except Exception as error:
            if not is_about_the_file(error):
                raise
            raise copy.copy(self._errors[index]) from error  # a copy, as an error that is raised keeps all frames


def _is_hashable(index: Any) -> bool:
    try:
        hash(index)
    except TypeError:
        return False
    return True
