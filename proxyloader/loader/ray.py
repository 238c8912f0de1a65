"""Ray Train: lets it build a loader of ours where it would build one of torch. Main process.

NOTE [ Loaders that Ray prepares ]
In several processes ``ray.train.torch.prepare_data_loader`` builds a loader of torch with a DistributedSampler, from
attributes of the loader that it was given. It has no setting for the class. So the class is replaced, in the modules of
Ray, by a function. That looks in its caller for the variable ``loader``, which holds the loader that was given. One of
ours builds a loader of ours. From others torch's class is built as before.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from .accelerate import BUILD

log = logging.getLogger(__name__)

MODULES = ("ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils")


def let_ray_keep_loaders() -> None:
    """Have Ray, if it is imported, build loaders of this package from loaders of this package."""
    for theirs in filter(None, map(sys.modules.get, MODULES)):
        if not hasattr(theirs.DataLoader, "__wrapped__"):
            theirs.DataLoader = _building_ours(theirs.DataLoader)  # type: ignore[attr-defined]


def _building_ours(torchs: Any) -> Callable[..., Any]:
    @functools.wraps(torchs, updated=())
    def loader(*arguments: Any, **named: Any) -> Any:
        variables = sys._getframe(1).f_locals
        if "loader" not in variables:
            log.warning(
                "Ray Train builds a loader of torch, and from which one is not known. If from one of proxyloader, give "
                "prepare_data_loader add_dist_sampler=False, and the loader num_shards='auto'"
            )
        return getattr(variables.get("loader"), BUILD, torchs)(*arguments, **named)

    return loader
