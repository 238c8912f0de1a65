"""EarlyEpoch: the next epoch of a loader, begun before it is asked for. Main process.

NOTE [ The next epoch, early ]
Persistent workers have nothing to do when they have given the last batch of an epoch. So the next epoch begins then,
while the training loop has its last batches, or validates. The first batches are read, and DALI is given them when it
has none of this epoch left, up to the same number of batches. As many again are read. The workers are asked for more
when the epoch is taken, as the files of all that were asked for are looked at then. ``iter(loader)`` takes that epoch
if it is the one that would begin now, which is known of

- its number, the sampler and the arguments, as they are kept to be compared;
- the order, if the loader has a ``seed``, or if torch's default generator is where it was expected. The order was drawn
  from a copy of it. It now goes on behind what was drawn;
- what is in the batches, as no code of the user's has a part in them, which may be told of the next epoch between the
  two. So the dataset is an ``ImageFolder``, and the sampler and the ``collate_fn`` are torch's. Of the files that were
  asked for none may have changed since. File systems of other machines may tell of that late, so that nothing begins
  early there.

Else the epoch is dropped, like a loop that is left before its first batch. The workers set their generators back to
where they were before it: see NOTE [ As many draws as torch's ] in ``workers/draws_ahead.py``. Loops over other
loaders, as for validation, draw a seed each. So the number of seeds that were drawn is expected the next time. After
another epoch that was dropped none begins early, so that little is read in vain.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ..data.dataset import length_of
from ..data.file_changes import FileChanges, is_local
from ..workers.early_draws import DRAWS_ONE_SEED, EarlyDraws
from ..workers.fetch_folder import FolderFetcher
from ..workers.pool import WorkerPool
from .feed import Feed

if TYPE_CHECKING:
    from .dataloader import DataLoader

log = logging.getLogger(__name__)


class EarlyEpoch:
    """The next epoch of a loader, if it has begun."""

    def __init__(self) -> None:
        self._feed: Feed | None = None
        self._draws: EarlyDraws | None = None
        self._decided_by: tuple[Any, ...] = ()
        self._changes: FileChanges | None = None
        self._seeds: int | None = 0  # how many are drawn between two epochs; None: no epoch begins early any more
        self._lock = threading.RLock()  # the loop of this epoch and ``iter(loader)`` may be in two threads

    def __reduce__(self) -> tuple[Any, ...]:
        return EarlyEpoch, ()  # a copy of a loader begins its own

    def begin(self, loader: DataLoader[Any]) -> bool:
        """Begin the next epoch if its batches are known now. Return whether the workers have left this epoch."""
        if self._feed is not None or self._seeds is None:
            return False
        try:
            state, pool = loader._upcoming.copied(), loader._pool
            if pool is None or state.resumes or not _is_known(loader, pool):
                return False
            self._decided_by = _decided_by(loader)
            self._changes = FileChanges(FolderFetcher.root_of(pool.fetcher.dataset))
        except Exception:  # an argument is not valid any more, or the data is gone: ``iter(loader)`` says so
            return False
        self._draws, user = EarlyDraws(self._seeds), pool.user
        pool.workers.first_requests = 2 * (loader._options.prefetch + 1)
        try:
            self._feed = loader._begin_epoch(pool, state, self._draws)
        except Exception as error:
            log.warning("the workers could not begin the next epoch (%s); new ones will", str(error))
            self._seeds = None
        finally:
            pool.workers.first_requests = None
            pool.user = user  # the loop of this epoch still has some of its batches
        return True

    def feed(self, most: int) -> None:
        """Give DALI the batches that are ready in the workers, until ``most`` are in flight. This does not wait."""
        with self._lock:
            if self._feed is not None:
                self._feed.fill_early(most)

    def take(self, loader: DataLoader[Any]) -> Feed | None:
        """Return the epoch that has begun, if it is the one that would begin now. Else drop it, and return None."""
        with self._lock:
            feed, self._feed = self._feed, None
        if feed is None or self._draws is None:
            return None
        is_next = False
        try:
            with contextlib.suppress(Exception):  # as above
                is_next = self._is_next(loader, feed) and self._draws.accept()
        finally:
            if not is_next:
                self._drop(feed, self._draws)
        if not is_next:
            return None
        assert feed.pool.requests is not None
        feed.pool.requests.ahead.accept_early()
        return feed

    def _is_next(self, loader: DataLoader[Any], feed: Feed) -> bool:
        state = loader._upcoming
        is_next = not state.resumes and state.epoch == feed.loader_state.epoch and feed.can_go_on(loader._pool)
        is_next = is_next and feed.pool.requests is not None and feed.pool.requests.ahead.early_fits
        if self._changes is None or not (
            is_next and _is_known(loader, feed.pool) and self._decided_by == _decided_by(loader)
        ):
            return False
        return self._changes.are_unchanged(FolderFetcher.files_of(feed.pool.fetcher.dataset, feed.requested()))

    def _drop(self, feed: Feed, draws: EarlyDraws) -> None:
        feed.close()
        self._seeds = draws.seeds_drawn_meanwhile() if self._seeds == 0 else None


def _is_known(loader: DataLoader[Any], pool: WorkerPool) -> bool:
    """Return whether nothing but its order, the files and random numbers decides what is in the next epoch."""
    batches, folders = loader.batch_sampler, pool.fetcher.folders
    return (
        loader.persistent_workers
        and pool.has_workers
        and pool.arena is not None
        and folders is not None
        and folders.knows(pool.fetcher.dataset)
        and all(map(is_local, folders.files_of(pool.fetcher.dataset, [0])))
        and loader.generator is None
        and loader.worker_init_fn is None
        and type(batches) is BatchSampler
        and type(batches.sampler) in (RandomSampler, SequentialSampler)
        and getattr(batches.sampler, "generator", None) is None
        and torch.get_default_device().type == "cpu"  # on which the order is drawn
        and (DRAWS_ONE_SEED or loader.seed is not None)
    )


def _decided_by(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what else decides what is in a batch, and may be changed between two epochs."""
    batches: Any = loader.batch_sampler
    lengths = length_of(loader.dataset), length_of(batches.sampler.data_source)
    order = batches.sampler, batches.batch_size, batches.drop_last, *lengths, *vars(batches.sampler).values()
    return loader._options, loader.collate_fn, *order
