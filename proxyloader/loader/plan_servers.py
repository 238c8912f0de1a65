"""PlanServers: the run queues of a loader's plans, reused across epochs. Main process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..dali.device import cuda_ordinal
from ..errors import PipelineError
from ..transforms.plan import Plan
from .options import LoaderOptions

if TYPE_CHECKING:  # importing them imports DALI
    from ..dali.plan_server import PlanServer
    from ..dali.program_server import ProgramServer
    from ..dali.run_queue import RunQueue

    PlanQueue = RunQueue | ProgramServer


class PlanServers:
    """The run queues of a loader's plans. A run has at most ``run_size`` samples."""

    def __init__(self, run_size: int) -> None:
        self._run_size = run_size
        self._decoder: PlanServer | None = None  # of the plans that kernels run; kept while these change
        self.queues: dict[str, PlanQueue] = {}  # by the key of the plan
        self.discovered: dict[str, Plan] = {}  # arrived with a batch, as the dataset does not store the transform
        self._idle: set[str] = set()  # discovered plans without a batch in the last epoch; rebuilt for their next batch

    def begin_epoch(self, plans: dict[str, Plan], options: LoaderOptions) -> dict[str, PlanQueue]:
        """Return the run queues of an epoch by key, including that of the user's server."""
        user_queue = {} if options.server is None else {options.server.runs.key: options.server.runs}
        if not plans and options.device is not None:
            cuda_ordinal(options.device)  # raises if the device does not exist
        self._idle &= plans.keys()
        active = {key: plan for key, plan in plans.items() if key not in self._idle}
        # Drop pipelines before building others, as both may not fit into GPU memory.
        self.queues = {key: queue for key, queue in self.queues.items() if key in active}
        for key, plan in active.items():
            if key not in self.queues:
                self.queues[key] = self._build(plan, options)
        return self.queues | user_queue

    def drop_unused(self) -> dict[str, Plan]:
        """Forget discovered plans without a batch since the last call. Return the others.

        A dataset may create a transform with different arguments for each image or epoch. Such plans do not recur, but
        each has a pipeline.
        """
        used = {key for key, queue in self.queues.items() if queue.was_used}
        self._idle = (self._idle | self.discovered.keys()) - used
        self.discovered = {key: plan for key, plan in self.discovered.items() if key in used}
        for queue in self.queues.values():
            queue.was_used = False
        return self.discovered

    def serve(self, plan: Plan, options: LoaderOptions) -> PlanQueue:
        """Return the run queue of a plan that arrived with a batch, and keep the plan for later epochs."""
        options.format.check(plan)
        self._idle.discard(plan.key)
        self.discovered[plan.key] = plan
        queue = self.queues[plan.key] = self.queues.get(plan.key) or self._build(plan, options)
        return queue

    def _build(self, plan: Plan, options: LoaderOptions) -> PlanQueue:
        from ..dali.build import PipelineOptions
        from ..dali.plan_server import PlanServer
        from ..dali.program_server import ProgramServer, get_decoder
        from ..kernels.launcher import get_launcher
        from ..kernels.operations import output_dtype

        if why := options.find_obstacle(plan):
            raise PipelineError(f"{why}. Do not compile the transform, but use it as it is", code="no-kernels")
        num_threads = None if options.num_threads == "auto" else options.num_threads
        hw_decoder_load = None if options.hw_decoder_load == "auto" else options.hw_decoder_load
        device_id, depth = cuda_ordinal(options.device), options.prefetch + 1
        pipeline_options = PipelineOptions(self._run_size, device_id, num_threads, depth, hw_decoder_load)
        if device_id is None or not options.has_kernels:
            return PlanServer(plan, pipeline_options, options.format)
        format = options.format
        with ThreadPoolExecutor(1) as pool:  # compiles the kernels while DALI starts
            launching = pool.submit(get_launcher, device_id, output_dtype(plan, format.dtype), format.channels_last)
            self._decoder = get_decoder(pipeline_options)
            launcher = launching.result()
        return ProgramServer(self._decoder, plan, launcher, format)
