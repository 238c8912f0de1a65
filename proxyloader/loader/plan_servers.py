"""PlanServers: the servers of a loader's plans, kept across epochs. Main process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..dali.device import cuda_ordinal
from ..transforms.plan import Plan
from .options import LoaderOptions

if TYPE_CHECKING:  # importing it imports DALI
    from ..dali.run_queue import RunQueue


class PlanServers:
    """The servers of the plans of a loader, by the key of the plan. A run has at most ``run_size`` samples."""

    def __init__(self, run_size: int) -> None:
        self._run_size = run_size
        self.kept: dict[str, RunQueue] = {}
        self.found: dict[str, Plan] = {}  # arrived with batches: their transforms are no attribute of the dataset
        self._idle: set[str] = set()  # found plans without a batch in the last epoch; served with their next batch

    def begin_epoch(self, plans: dict[str, Plan], options: LoaderOptions) -> dict[str, RunQueue]:
        """Return the servers of an epoch by key, including the server that the user passed."""
        given = {} if options.server is None else {options.server.runs.key: options.server.runs}
        if not plans and options.device is not None:
            cuda_ordinal(options.device)  # raises if there is no such device
        self._idle &= plans.keys()
        wanted = {key: plan for key, plan in plans.items() if key not in self._idle}
        # Drop pipelines before building others, as both may not fit into the memory of the GPU.
        self.kept = {key: server for key, server in self.kept.items() if key in wanted}
        for key, plan in wanted.items():
            if key not in self.kept:
                self.kept[key] = self._build(plan, options)
        return self.kept | given

    def drop_unused(self) -> dict[str, Plan]:
        """Forget the found plans that had no batch since the last call. Return the others.

        A dataset may create a transform with other arguments for each image or each epoch. Such plans do not recur, but
        each has a pipeline.
        """
        used = {key for key, server in self.kept.items() if server.was_used}
        self._idle = (self._idle | self.found.keys()) - used
        self.found = {key: plan for key, plan in self.found.items() if key in used}
        for server in self.kept.values():
            server.was_used = False
        return self.found

    def serve(self, plan: Plan, options: LoaderOptions) -> RunQueue:
        """Return the server of a plan that arrived with a batch, and keep the plan for later epochs."""
        options.format.check(plan)
        self._idle.discard(plan.key)
        self.found[plan.key] = plan
        server = self.kept[plan.key] = self.kept.get(plan.key) or self._build(plan, options)
        return server

    def _build(self, plan: Plan, options: LoaderOptions) -> RunQueue:
        from ..dali.build import PipelineOptions
        from ..dali.plan_server import PlanServer
        from ..kernels.launcher import get_launcher
        from ..kernels.operations import explain_missing

        num_threads = None if options.num_threads == "auto" else options.num_threads
        hw_decoder_load = None if options.hw_decoder_load == "auto" else options.hw_decoder_load
        device_id, depth = cuda_ordinal(options.device), options.prefetch + 1
        pipeline_options = PipelineOptions(self._run_size, device_id, num_threads, depth, hw_decoder_load)
        launcher = None
        if device_id is not None and not explain_missing(plan):
            dtype = torch.uint8 if plan.output.dtype == "uint8" else options.format.dtype or torch.float32
            launcher = get_launcher(device_id, dtype, options.format.channels_last)
        return PlanServer(plan, pipeline_options, options.format, launcher)
