"""Ray Train: lets it build a loader of ours where it would build one of torch. Main process.

NOTE [ Loaders that Ray prepares ]
In several processes ``ray.train.torch.prepare_data_loader`` builds a loader of torch with a DistributedSampler, from
the dataset and other attributes of the loader that it was given. It does not say which one that was. So the loaders
that are made while Ray is imported are remembered, and the one with these very attributes builds a loader of ours.
Others are built by torch's class as before.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

MODULES = ("ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils")
COPIED = ("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator")
"""Attributes of a loader that Ray copies."""

_ours: weakref.WeakSet[Any] = weakref.WeakSet()


def let_ray_keep(loader: Any) -> None:
    """Have Ray, if it is imported, build a loader of this package in the place of ``loader``."""
    for theirs in filter(None, map(sys.modules.get, MODULES)):
        _ours.add(loader)
        if not hasattr(theirs.DataLoader, "__wrapped__"):
            theirs.DataLoader = _building_ours(theirs.DataLoader)  # type: ignore[attr-defined]


def _building_ours(torchs: Any) -> Callable[..., Any]:
    @functools.wraps(torchs, updated=())
    def loader(*arguments: Any, **named: Any) -> Any:
        copied = [each for each in _ours if all(getattr(each, name) is named.get(name) for name in COPIED)]
        return (copied[0]._proxyloader_build if copied else torchs)(*arguments, **named)

    return loader
