"""Fetch the samples of a request from an ImageFolder: read all files, then draw for all images. Runs in the worker.

NOTE [ Read all, then draw for all ]
Reading a file of a hundred kilobytes takes the code that draws random numbers, and its tables, out of the processor's
caches, and they are fetched again for each image. A dataset that reads a file and calls its transform, for one image
after the other, leaves no choice. But what ``DatasetFolder`` does for a sample is known. Nothing in it depends on the
order in which files are read, and the numbers are drawn in the order of the samples. So its files are read first, and
then the transform is called for all of them. No code of the user's runs in between.

If torch's ``collate_fn`` alone gets the samples, nothing but the drawn numbers is asked of the transform, which takes
less than its call.

What is not as expected, such as a damaged file or images of several sizes, is left to ``Fetcher``, which then fetches
sample by sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.utils.data import Subset
from torchvision.datasets import DatasetFolder

from .._random_state import set_states, states_now
from ..data.compiled_transform import CompiledTransform
from ..data.dataset import LateOpener
from ..data.encoded_image import EncodedImage
from ..data.placeholders import ProxySample
from ..data.read_check import is_sound, reading
from ..errors import ImageError
from ..transforms.random_numbers import are_alike_ahead, drawing_ahead
from .scan_checks import IntegrityTable, ScanStatus


class FolderFetcher:
    """Fetches the samples of ``DatasetFolder`` and ``ImageFolder``, and of a ``Subset`` of one.

    Args:
        plans: keys of the plans that the loader knows, if torch's default ``collate_fn`` alone gets the samples.
        scans: what is known of the JPEGs; None: they are not checked.
        is_in_worker: whether nobody else draws from the generators at the same time.
    """

    def __init__(self, plans: Collection[str], scans: IntegrityTable | None, is_in_worker: bool = False) -> None:
        self._plans, self._scans = plans, scans
        self._may_draw_ahead = is_in_worker and are_alike_ahead()

    def __call__(
        self, dataset: Any, indices: Sequence[Any], seed_for: Callable[[Any], None] | None = None
    ) -> list[tuple[Any, Any]] | None:
        """Return the samples; None if the dataset is another, or a sample needs a look of its own.

        Args:
            seed_for: seeds the generators for the sample of an index; None: they go on as they are.
        """
        folder, places = _folder_of(dataset, indices)
        if not _is_known(folder):
            return None
        chosen = [folder.samples[place] for place in places]
        images = self._read(folder, [path for path, _ in chosen], indices)
        if images is None:
            return None
        before = states_now(beside_torch=True)
        try:
            transformed = self._transformed(folder.transform, images, indices, seed_for)
        except Exception:
            transformed = None
        if transformed is None:
            set_states(before)
            return None
        return [(image, target) for image, (_, target) in zip(transformed, chosen)]

    def _transformed(
        self,
        transform: CompiledTransform,
        images: Sequence[EncodedImage],
        indices: Sequence[Any],
        seed_for: Callable[[Any], None] | None,
    ) -> list[Any] | None:
        """Return what stands for each image after the transform; None if they cannot be one batch."""
        plan, sizes = transform.plan, set()
        made: list[Any] = []
        draws_alone = plan.key in self._plans and plan.rest is None and plan.output.images == 1
        is_ahead = draws_alone and seed_for is None and self._may_draw_ahead and plan.takes_numbers_ahead
        with drawing_ahead() if is_ahead else contextlib.nullcontext():
            for index, image in zip(indices, images):
                if seed_for is not None:
                    seed_for(index)
                if draws_alone:
                    call, size = transform.drawn(image)
                    made.append(ProxySample(call))
                    sizes.add(size)
                else:
                    made.append(transform.outputs(image))
        return made if len(sizes) <= 1 else None

    def _read(self, folder: Any, paths: Sequence[str], indices: Sequence[Any]) -> list[EncodedImage] | None:
        """Return the images of files; None if one of them is not sound."""
        are_known = self._scans is not None and self._scans.are_sound(indices)
        checker = None if self._scans is None else self._scans.checker
        reading.begin(are_known, checker)
        images = []
        try:
            for index, path in zip(indices, paths):
                image = EncodedImage.open(path, folder.loader.max_pixels)
                if not are_known and self._scans is not None:
                    reading.is_known = self._scans.of(index) is ScanStatus.SOUND
                if not is_sound(image):
                    return None
                if not are_known and self._scans is not None:
                    self._scans.note(index, is_damaged=False)
                images.append(image)
        except ImageError:
            return None
        finally:
            reading.is_known = False
        return images


def _is_known(folder: Any) -> bool:
    """Return whether it is known what a dataset does for a sample."""
    if getattr(type(folder), "__getitem__", None) is not DatasetFolder.__getitem__:
        return False
    transform = folder.transform
    return (
        not hasattr(folder, "__getitems__")
        and folder.target_transform is None
        and type(transform) is CompiledTransform
        and transform.is_as_translated()
        and type(folder.loader) is LateOpener
        and folder.loader.max_pixels == transform.max_pixels
    )


def _folder_of(dataset: Any, indices: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the dataset that the samples of a Subset come from, and their indices there."""
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    return dataset, indices
