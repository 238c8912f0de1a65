"""PlanServers: the servers of a loader's plans, which are kept from epoch to epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dali.device import cuda_ordinal
from ..transforms.plan import Plan
from .options import LoaderOptions

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run_queue import RunQueue


class PlanServers:
    """
    Args:
        run_size: most samples that a run takes.
    """

    def __init__(self, run_size: int) -> None:
        self._run_size = run_size
        self.kept: dict[str, RunQueue] = {}
        """Of plans, by their keys."""
        self.found: dict[str, Plan] = {}
        """Plans of transforms that no attribute of the dataset holds. They came with a batch."""

    def of(self, plans: dict[str, Plan], options: LoaderOptions) -> dict[str, RunQueue]:
        """The servers of an epoch, by the key that runs name them with; the user's own is one of them."""
        given = {} if options.server is None else {options.server.runs.key: options.server.runs}
        if not plans:
            if options.device is not None:
                cuda_ordinal(options.device)  # which says so where it does not exist
            return given
        self.kept = {key: self.kept.get(key) or self._made(plan, options) for key, plan in plans.items()}
        return self.kept | given

    def serve(self, plan: Plan, options: LoaderOptions) -> RunQueue:
        """The server of a plan that came with a batch, and is known from the next epoch on."""
        options.format.check(plan)
        self.found[plan.key] = plan
        server = self.kept[plan.key] = self.kept.get(plan.key) or self._made(plan, options)
        return server

    def _made(self, plan: Plan, options: LoaderOptions) -> RunQueue:
        from ..dali.build import PipelineOptions
        from ..dali.plan_server import PlanServer

        how = PipelineOptions(
            self._run_size,
            cuda_ordinal(options.device),
            None if options.num_threads == "auto" else options.num_threads,
            options.prefetch + 1,
            None if options.hw_decoder_load == "auto" else options.hw_decoder_load,
        )
        return PlanServer(plan, how, options.format)
