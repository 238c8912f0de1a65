"""PlanServers: the run queues of a loader's plans, reused across epochs. Main process."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ..dali.device import cuda_ordinal
from ..transforms.plan import Plan
from ..workers.packing import KERNELS, MAX_NEW_PLANS
from .options import LoaderOptions

if TYPE_CHECKING:  # importing them imports DALI
    from ..dali.build import PipelineOptions
    from ..dali.run_queue import RunQueue

    PlanQueue = RunQueue


class PlanServers:
    """The run queues of a loader's plans. A run has at most ``run_size`` samples."""

    def __init__(self, run_size: int) -> None:
        self._run_size = run_size
        self._options: LoaderOptions | None = None  # of the queues
        self.queues: dict[str, PlanQueue] = {}  # by the key of the plan, or KERNELS
        self.discovered: dict[str, Plan] = {}  # arrived with a batch, as the dataset does not store the transform
        self._runs_seen: dict[str, int] = {}  # runs started before this epoch, by the key of the queue
        self._idle: set[str] = set()  # discovered plans without a batch in the last epoch; rebuilt for their next batch

    def begin_epoch(self, plans: dict[str, Plan], options: LoaderOptions, expects_images: bool) -> dict[str, PlanQueue]:
        """Return the run queues of an epoch by key, including that of the user's server.

        ``expects_images``: whether to start decoding on a GPU before the first batch, although no plan is known.
        """
        user_queue = {} if options.server is None else {options.server.runs.key: options.server.runs}
        if not plans and options.device is not None:
            cuda_ordinal(options.device)  # raises if the device does not exist
        self._idle &= plans.keys()
        active = {key for key in plans if key not in self._idle}
        if options.has_kernels:
            active = {KERNELS} if plans or expects_images else set()
        if options != self._options:  # the user has changed one
            self.queues, self._options = {}, options
        # Drop pipelines before building others, as both may not fit into GPU memory.
        self.queues = {key: queue for key, queue in self.queues.items() if key in active}
        for key in active - self.queues.keys():
            self.queues[key] = (
                self._build_for_kernels(plans, options) if key == KERNELS else self._build(plans[key], options)
            )
        return self.queues | user_queue

    def drop_unused(self) -> dict[str, Plan]:
        """Forget discovered plans without a batch since the last call. Return the others.

        A dataset may create a transform with different arguments for each image or epoch. Such plans do not recur, but
        without kernels, each has a pipeline.
        """
        used = {key for key, queue in self.queues.items() if queue.runs_started != self._runs_seen.get(queue.key, 0)}
        if KERNELS not in used:
            self._idle = (self._idle | self.discovered.keys()) - used
            self.discovered = {key: plan for key, plan in self.discovered.items() if key in used}
        self._runs_seen = {queue.key: queue.runs_started for queue in self.queues.values()}
        return self.discovered

    def discover(self, plans: Iterable[Plan], options: LoaderOptions) -> None:
        """Keep plans that arrived with a batch for later epochs. With kernels, only the first of them, for the log."""
        for plan in plans:
            options.format.check(plan)
            self._idle.discard(plan.key)
            if not options.has_kernels or len(self.discovered) < MAX_NEW_PLANS:
                self.discovered[plan.key] = plan

    def serve(self, plan: Plan | None, options: LoaderOptions) -> PlanQueue:
        """Return the run queue of a plan, or that of all plans that kernels run."""
        key = KERNELS if plan is None else plan.key
        if key not in self.queues:
            self._idle.discard(key)
            self.queues[key] = self._build_for_kernels({}, options) if plan is None else self._build(plan, options)
        return self.queues[key]

    def _build(self, plan: Plan, options: LoaderOptions) -> PlanQueue:
        from ..dali.plan_server import PlanServer

        return PlanServer(plan, self._pipeline_options(options), options.format)

    def _build_for_kernels(self, plans: dict[str, Plan], options: LoaderOptions) -> PlanQueue:
        from ..dali.plan_server import get_decoder
        from ..kernels.launcher import get_launcher
        from ..kernels.operations import get_output_dtype

        pipeline_options, format = self._pipeline_options(options), options.format
        dtypes = {get_output_dtype(plan, format.dtype) for plan in plans.values()} or {format.dtype or torch.float32}
        with ThreadPoolExecutor(1) as pool:  # compiles the kernels while DALI starts
            device_id = pipeline_options.device_id
            launching = [pool.submit(get_launcher, device_id, dtype, format.channels_last) for dtype in dtypes]
            decoder = get_decoder(pipeline_options)
            for each in launching:
                each.result()
        return decoder

    def _pipeline_options(self, options: LoaderOptions) -> PipelineOptions:
        from ..dali.build import PipelineOptions

        num_threads = None if options.num_threads == "auto" else options.num_threads
        hw_decoder_load = None if options.hw_decoder_load == "auto" else options.hw_decoder_load
        device_id, depth = cuda_ordinal(options.device), options.prefetch + 1
        return PipelineOptions(self._run_size, device_id, num_threads, depth, hw_decoder_load)
