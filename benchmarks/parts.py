"""How much does an image cost a worker, and the main process?

    python benchmarks/parts.py

Batches of photographs of about 500 x 375 pixels are measured in interleaved rounds. Reports medians in microseconds per
image: CPU time, which hardly depends on other work on the machine, or elapsed time where a GPU works. Workers work as
for a loader with a GPU, even without one. Appends one JSON line to benchmarks/results/parts.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from _common import append_record, make_parser, make_photographs
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import RandAugment, RandomGrayscale, RandomResizedCrop, functional
from torchvision.transforms.v2 import RandomIoUCrop, SanitizeBoundingBoxes
from torchvision.tv_tensors import BoundingBoxes
from tqdm import tqdm

from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer, get_decoder
from proxyloader.data.dataset import find_plans
from proxyloader.data.deferral import Deferral
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import checks
from proxyloader.kernels.operations import find_obstacle
from proxyloader.tools.bench.cases import OwnDataset
from proxyloader.tools.bench.config import CROP_PX, MEAN, STD, make_transform
from proxyloader.transforms import boxes as numpy_boxes
from proxyloader.transforms.random_numbers import in_thread
from proxyloader.workers.arena import Arena
from proxyloader.workers.fetch import Fetcher, PassedSamples
from proxyloader.workers.messages import PackedBatch
from proxyloader.workers.packing import Packer
from proxyloader.workers.request_sampler import BatchRequest
from proxyloader.workers.worker import PackedDataset, keep_freed_memory, set_up_worker

PARTS = ("files", "worker", "boxes", "iou_crops", "main_process")
"""Functions of this file. Each runs in its own process, because hooks and the settings of malloc are permanent."""

CROPS = 64
BOXES = [[20, 30, 120, 310], [200, 100, 480, 300], [5, 5, 60, 60], [250, 10, 400, 370], [90, 90, 99, 99]]
ROUNDS = 9
"""After a first one that is not counted."""

ALONE, TOGETHER = "worker: ImageFolder, sample by sample", "worker: ImageFolder, all files read first"
COMPOSE, BY_HAND = "worker: own dataset, Compose", "worker: own dataset, functionals by hand"
BY_TORCH, FROM_STATE = (
    "worker: own dataset, colors, drawn by torch",
    "worker: own dataset, colors, drawn from its state",
)
AT_ONCE, BY_CALL = "worker: own dataset, RandAugment", "worker: own dataset, RandAugment recorded call by call"
THEIR_BOXES, OUR_BOXES = "worker: SanitizeBoundingBoxes by torchvision", "worker: SanitizeBoundingBoxes in NumPy"
THEIR_CROPS, OUR_CROPS = "worker: RandomIoUCrop's draws by torchvision", "worker: RandomIoUCrop's draws in NumPy"
GAINS = {
    "all files read first, drawn together": (ALONE, TOGETHER),
    "crop, flip, conversions drawn at once": (BY_HAND, COMPOSE),
    "RandAugment drawn at once": (BY_CALL, AT_ONCE),
    "numbers from the generator's state": (BY_TORCH, FROM_STATE),
    "boxes checked in NumPy": (THEIR_BOXES, OUR_BOXES),
    "RandomIoUCrop drawn in NumPy": (THEIR_CROPS, OUR_CROPS),
}
"""The slower and the faster of two ways to do the same."""

Costs = dict[str, float]


def measure(cases: dict[str, Callable[[], Any]], images: int, clock: Callable[[], float] = time.process_time) -> Costs:
    """Return the median time of each function in microseconds per image."""
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + ROUNDS):
        for name, run in cases.items():
            start = clock()
            run()
            spent[name].append(1e6 * (clock() - start) / images)
    return {name: round(statistics.median(times[1:]), 1) for name, times in spent.items()}


def files(root: str) -> Costs:
    """Read the files of a batch, as a worker does, with malloc's default settings and with those of workers."""
    paths = [path for path, _ in ImageFolder(root).samples]

    def read(are_checked: bool) -> list[EncodedImage]:
        checks.already_passed = are_checked
        return [EncodedImage.open(path) for path in paths]

    costs = measure({"files: read, malloc by default": lambda: read(True)}, len(paths))
    keep_freed_memory()
    cases = {
        "files: read, freed memory kept": lambda: read(True),
        "files: read and check, once before a GPU decodes them": lambda: read(False),
    }
    return costs | measure(cases, len(paths))


def by_hand(image: Any) -> torch.Tensor:
    """The transform of the benchmark, by calls of torchvision's functionals."""
    top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    image = functional.resized_crop(image, top, left, height, width, [CROP_PX, CROP_PX])
    if torch.rand(1) < 0.5:
        image = functional.hflip(image)
    return functional.normalize(functional.to_tensor(image), MEAN, STD)


class OwnRandAugment(RandAugment):
    """A class without a rule, whose calls are recorded."""


def worker(root: str) -> Costs:
    """A worker's whole batch of several datasets, from the request to the packed batch."""
    colors = make_transform("ColorJitter")
    colors.transforms.insert(3, RandomGrayscale(0.2))
    by_call = make_transform("RandAugment")
    by_call.transforms[2] = OwnRandAugment()
    datasets = {
        ALONE: ImageFolder(root, make_transform()),
        TOGETHER: ImageFolder(root, make_transform()),
        COMPOSE: OwnDataset(root, make_transform()),
        BY_HAND: OwnDataset(root, by_hand),
        AT_ONCE: OwnDataset(root, make_transform("RandAugment")),
        BY_CALL: OwnDataset(root, by_call),
        BY_TORCH: OwnDataset(root, colors),
        FROM_STATE: OwnDataset(root, colors),
    }
    deferral = start_deferring(on_gpu=True)
    workers = {name: Worker(dataset, deferral, name == TOGETHER) for name, dataset in datasets.items()}

    def pack(name: str) -> None:
        if name == BY_TORCH:
            with patch.object(in_thread, "from_state", None):
                workers[name].pack()
        else:
            workers[name].pack()

    return measure({name: functools.partial(pack, name) for name in workers}, len(datasets[ALONE]))


def make_boxes() -> Any:
    return BoundingBoxes(torch.tensor(BOXES).float(), format="XYXY", canvas_size=(375, 500))  # type: ignore[call-overload]


def boxes(root: str) -> Costs:
    """v2's check of five boxes, whose image is already decoded."""
    transform = SanitizeBoundingBoxes()
    target = {"image_id": 1, "boxes": make_boxes(), "labels": torch.arange(5)}
    sample = Image.new("RGB", (500, 375)), target

    def run() -> None:
        torch.manual_seed(0)
        for _ in range(CROPS):
            transform(*sample)

    costs = measure({THEIR_BOXES: run}, CROPS)
    start_deferring(on_gpu=True)
    return costs | measure({OUR_BOXES: run}, CROPS)


def iou_crops(root: str) -> Costs:
    """The crops that v2's RandomIoUCrop draws for five boxes in each image, without applying them."""
    crop, theirs, target = RandomIoUCrop(), RandomIoUCrop.make_params, make_boxes()

    def draw(make_params: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        for _ in range(CROPS):
            make_params(crop, [target])

    ours = functools.partial(numpy_boxes.make_params, theirs)
    return measure({THEIR_CROPS: lambda: draw(theirs), OUR_CROPS: lambda: draw(ours)}, CROPS)


def start_deferring(on_gpu: bool) -> Deferral:
    """Turn this process into a worker, as far as it matters here."""
    deferral = Deferral(on_gpu, functools.partial(find_obstacle, has_kernels=on_gpu))
    keep_freed_memory()
    set_up_worker(None, deferral, worker_id=0)
    return deferral


class Worker:
    """What a worker does for a batch of all images of a dataset.

    Args:
        reads_first: whether it reads all files of an ImageFolder before it draws for any image.
    """

    def __init__(self, dataset: Any, deferral: Deferral, reads_first: bool) -> None:
        size, on_gpu = len(dataset), deferral.on_gpu
        plans, passed = find_plans(dataset, deferral.find_obstacle)[0], PassedSamples(size)
        known = plans if reads_first else ()
        fetcher = Fetcher(dataset, passed=passed, has_workers=True, deferral=deferral, plans=known)
        self.arena = Arena(1)
        output = (None, False) if on_gpu else None
        packer = Packer(default_collate, self.arena, size, plans=plans, deferral=deferral, kernel_output=output)
        self._dataset = PackedDataset(fetcher, packer, self.arena, {})
        self._request = BatchRequest(0, 0, [*range(size)], batched=True, slot=0)

    def pack(self) -> PackedBatch:
        batch: PackedBatch = self._dataset.__getitems__(self._request).open(self._request, self.arena)
        if isinstance(batch.failure, Exception):
            raise batch.failure
        assert batch.image_counts == (batch.num_samples, 0, 0), f"{batch.decode_reason}: {batch.image_counts}"
        return batch


def main_process(root: str) -> Costs:
    """What the main process does with a batch: submit it, and wait until DALI and the kernels are done."""
    dataset, on_gpu = ImageFolder(root, make_transform()), torch.cuda.is_available()
    worker = Worker(dataset, start_deferring(on_gpu), reads_first=True)
    batch = worker.pack()
    (run,) = batch.runs
    arguments = batch.read(run, worker.arena)
    if on_gpu:
        server, where = get_decoder(PipelineOptions(len(dataset), device_id=0, num_threads=4), len(dataset)), "on a GPU"
    else:
        (plan,) = find_plans(dataset, lambda plan: "")[0].values()
        options, where = PipelineOptions(len(dataset), num_threads=1), "by one CPU thread"
        server = PlanServer(plan, options, OutputFormat())
    submitted: list[Any] = []

    def finish(run: Any) -> None:
        server.collect(run)
        if on_gpu:
            torch.cuda.synchronize()

    cases = {
        "main process: submit": lambda: submitted.append(server.submit(*arguments)),
        f"decode and transform {where}": lambda: finish(submitted.pop()),
    }
    if on_gpu:
        cases[f"decode {where}"] = lambda: finish(server.submit(*arguments[:1]))
    return measure(cases, len(dataset), time.perf_counter if on_gpu else time.process_time)


def main() -> None:
    parser = make_parser("parts", __doc__, has_device=False)
    parser.add_argument("--images", type=int, default=256, help="in a batch (default: %(default)s)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = str(make_photographs(args.images))
    torch.set_num_threads(1)
    if args.part:
        print(json.dumps(globals()[args.part](root)))
        return
    costs: Costs = {}
    for part in tqdm(PARTS, unit="part", disable=None):
        command = [sys.executable, __file__, "--part", part, "--images", str(args.images)]
        costs |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    gains = {name: round(costs[slow] - costs[fast], 1) for name, (slow, fast) in GAINS.items()}
    load = round(os.getloadavg()[0], 1)
    append_record(args, "images", load=load, us_per_image=costs, gains_us_per_image=gains)
    table = Table("part", "µs per image", title=f"{args.images} images, load of the machine {load}")
    for name, cost in costs.items():
        table.add_row(name, f"{cost:,.0f}")
    table.add_section()
    for name, gain in gains.items():
        table.add_row(f"gain: {name}", f"{gain:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
