"""EarlyEpoch: the next epoch of a loader, begun before it is asked for. Main process.

NOTE [ The next epoch, early ]
Persistent workers have nothing to do when they have given the last batch of an epoch. So the next epoch begins then,
while the training loop has its last batches, or validates. The first batches are read, and DALI is given them when it
has none of this epoch left, up to the same number of batches. ``iter(loader)`` takes that epoch if it is the one that
would begin now, which is known of

- its number, the sampler and the arguments, as they are kept to be compared;
- the order, if the loader has a ``seed``, or if torch's default generator is where it was. The order was drawn from a
  copy of it. It now goes on behind what was drawn;
- what is in the batches, as no code of the user's has a part in them, which may be told of the next epoch between the
  two. So the dataset is an ``ImageFolder``, and the sampler and the ``collate_fn`` are torch's.

Else the epoch is dropped, like a loop that is left before its first batch. The workers set their generators back to
where they were before it. No epoch of the loader begins early any more, so that nothing is read in vain again.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ..data.dataset import length_of
from ..workers.early_draws import EarlyDraws, draws_one_seed
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
        self._was_dropped = False
        self._lock = threading.RLock()  # the loop of this epoch and ``iter(loader)`` may be in two threads

    def __reduce__(self) -> tuple[Any, ...]:
        return EarlyEpoch, ()  # a copy of a loader begins its own

    def begin(self, loader: DataLoader[Any]) -> bool:
        """Begin the next epoch if its batches are known now. Return whether it has begun."""
        state, pool = loader._upcoming.copied(), loader._pool
        if self._feed is not None or self._was_dropped or state.resumes:
            return False
        if pool is None or not _is_known(loader, pool):
            return False
        self._decided_by, self._draws, user = _decided_by(loader), EarlyDraws(), pool.user
        try:
            self._feed = loader._begin_epoch(pool, state, self._draws)
        except Exception as error:  # ``iter(loader)`` tries it again, and raises what is then wrong
            log.warning("the workers could not begin the next epoch (%s); new ones will", str(error))
            return False
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
        state, pool = loader._upcoming, loader._pool
        is_next = not state.resumes and state.epoch == feed.loader_state.epoch and feed.can_go_on(pool)
        is_known = is_next and _is_known(loader, feed.pool) and self._decided_by == _decided_by(loader)
        if is_known and self._draws.accept():
            return feed
        feed.close()
        assert feed.pool.requests is not None
        feed.pool.requests.dropped, self._was_dropped = self._draws.key, True
        return None


def _is_known(loader: DataLoader[Any], pool: WorkerPool) -> bool:
    """Return whether nothing but its order, the files and random numbers decides what is in the next epoch."""
    batches, folders = loader.batch_sampler, pool.fetcher.folders
    return (
        loader.persistent_workers
        and pool.has_workers
        and pool.arena is not None
        and folders is not None
        and folders.knows(pool.fetcher.dataset)
        and (loader.seed is not None or draws_one_seed())
        and loader.generator is None
        and loader.worker_init_fn is None
        and type(batches) is BatchSampler
        and type(batches.sampler) in (RandomSampler, SequentialSampler)
        and getattr(batches.sampler, "generator", None) is None
    )


def _decided_by(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what else decides what is in a batch, and may be changed between two epochs."""
    batches: Any = loader.batch_sampler
    order = batches.batch_size, batches.drop_last, *vars(batches.sampler).values(), length_of(loader.dataset)
    return loader._options, loader.collate_fn, batches.sampler, *order
