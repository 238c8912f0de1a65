"""What does it take to start: imports, CUDA, and building pipelines, in one process and in several at the same time?

    python benchmarks/starts.py
    python benchmarks/starts.py --device cpu --processes 1 2

Times of new processes in milliseconds, medians over the processes and their repetitions. Appends one JSON line to
benchmarks/results/starts.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# New processes import this file, and are to take the time of importing torch and DALI.


class Clock:
    """Times in milliseconds, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.spent[name].append(1e3 * (time.perf_counter() - start_s))


def start(device: str, repeats: int) -> dict[str, list[float]]:
    """Start as a script does, then build each pipeline several times. Runs in a process of its own."""
    clock = Clock()
    with clock("import torch and torchvision"):
        import torch
        import torchvision as torchvision
    with clock("import proxyloader and DALI"):
        from proxyloader.dali import api as api
        from proxyloader.dali import executor, jpeg_engines
    device_id = None
    if device == "cuda":
        with clock("start CUDA"):
            torch.ones(1, device=device).cpu()
        device_id = torch.cuda.current_device()
        jpeg_engines.CROWDED_BYTES = torch.cuda.mem_get_info()[1]  # or each is tried first, beside other processes
    file, _ = jpeg_engines.known_picture(quality=90)
    kept = []  # DALI loads its decoders with the first pipeline, and lets them go with the last
    for name, build in builders_of(device_id).items():
        for _ in range(repeats + 1):
            when = "" if kept else "first: "
            with clock(f"{when}build {name}"):
                pipeline = build()
            with clock(f"{when}run {name}"):
                pipeline.feed_input("images", executor.tensor_list([file]))
                executor.run(pipeline)
                pipeline.outputs()
            if not kept:
                kept.append(pipeline)
                continue
            with clock(f"free {name}"):
                del pipeline
    return dict(clock.spent)


def builders_of(device_id: int | None) -> dict[str, Callable[[], Any]]:
    """Return functions that build a pipeline, by its name."""
    from torchvision import transforms

    from proxyloader.dali.api import OperatorConcurrency, Pipeline, fn, types
    from proxyloader.dali.build import PipelineOptions, build_pipeline
    from proxyloader.tools.bench.config import MEAN, STD
    from proxyloader.transforms.registry import plan_for

    # Steps without parameters, of which DALI needs none then.
    plan = plan_for(transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)]))

    def decoder(how: dict[str, Any], **of_pipeline: Any) -> Any:
        pipeline = Pipeline(64, 4, device_id, exec_dynamic=True, **of_pipeline)
        where = "cpu" if device_id is None else "mixed"
        with pipeline:
            files = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
            pipeline.set_outputs(fn.decoders.image(files, device=where, **how))
        pipeline.build()
        return pipeline

    options = PipelineOptions(64, device_id, prefetch_queue_depth=3)
    found = {
        "proxyloader's pipeline": lambda: build_pipeline(plan, options),
        "DALI's decoder": lambda: decoder({}),
        "DALI's decoder, fancy upsampling": lambda: decoder({"jpeg_fancy_upsampling": True}),
        "DALI's decoder, launched by several threads": lambda: decoder({}, concurrency=OperatorConcurrency.FULL),
        "DALI's decoder, 3 batches": lambda: decoder({}, prefetch_queue_depth=3),
    }
    if device_id is not None:
        found["DALI's decoder, no engines"] = lambda: decoder({"hw_decoder_load": 0.0})
    return found


def measure(device: str, processes: int, repeats: int) -> dict[str, float]:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(start, [device] * processes, [repeats] * processes))
    names = dict.fromkeys(name for each in found for name in each)
    return {name: round(statistics.median([ms for each in found for ms in each.get(name, [])]), 1) for name in names}


def main() -> None:
    import torch

    from proxyloader.tools.bench.system_info import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument("--queues", nargs="+", default=["32", "8"], help="of CUDA, to try (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "starts.jsonl")
    options = parser.parse_args()
    found = {}
    for queues in options.queues if options.device == "cuda" else ["32"]:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
        for processes in options.processes:
            case = f"processes: {processes}" + (f", queues: {queues}" if options.device == "cuda" else "")
            found[case] = measure(options.device, processes, options.repeats)
            print(case, json.dumps(found[case], indent=2), flush=True)
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "device": options.device,
        "ms": found,
    }
    with options.out.open("a") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
