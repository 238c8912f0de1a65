"""What do the parts of the road cost, on one core of this machine, and on its GPU if it has one?

    python benchmarks/parts.py

Times of one batch of photographs of about 500 x 375, median of several, in milliseconds. Appends one JSON line to
benchmarks/results/parts.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali.backend import TensorCPU, TensorListCPU
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, PILToTensor, RandomResizedCrop, Resize, ToTensor, v2
from tqdm import tqdm

from proxyloader import compile_transforms, wrap
from proxyloader.dali.api import fn, pipeline_def, types
from proxyloader.dali.build import PipelineOptions, build_pipeline
from proxyloader.dali.executor import run as run_pipeline
from proxyloader.dali.run_queue import RunQueue
from proxyloader.data.dataset import collect_plans
from proxyloader.data.deferral import Deferral
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.jpeg import checks, is_sound, read_jpeg_header, read_scans
from proxyloader.data.lazy_tensor import get_sample
from proxyloader.data.transformed import TransformedImage
from proxyloader.make_dataset import FORMAT, make_dataset
from proxyloader.tools.bench.cases import DATASETS
from proxyloader.tools.bench.config import AUGMENTATIONS, CROP_PX, MEAN, STD, machine, make_transform
from proxyloader.transforms.plan import Plan
from proxyloader.transforms.random_numbers import drawing_ahead
from proxyloader.workers.arena import Arena
from proxyloader.workers.fetch import Fetcher
from proxyloader.workers.fetch_folder import FolderFetcher
from proxyloader.workers.packing import Packer
from proxyloader.workers.request_sampler import BatchRequest
from proxyloader.workers.scan_checks import PassedSamples
from proxyloader.workers.worker import PackedDataset, keep_freed_memory, set_up_worker

PARTS = ("reading", "road", "datasets", "crops", "progressive", "grey")
GPU_PARTS = ("decoders", "registered_memory", "engine_shares")
"""Functions of this file."""

SIZES = ((96, 96), (192, 192), (500, 375), (1000, 750), (1500, 1000))
"""Sizes of images, in pixels, of which a GPU's engines decode all or a share."""


def median_ms(run: Callable[[], Any], times: int = 9) -> float:
    run()
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        spent.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(spent), 2)


def reading(root: str) -> dict[str, float]:
    """Opening a batch's files in a worker, with malloc as it comes and as workers set it."""
    paths = [path for path, _ in ImageFolder(root).samples]
    files = [Path(path).read_bytes() for path in paths]
    before = median_ms(lambda: [EncodedImage.open(path) for path in paths])
    keep_freed_memory()
    return {
        "open files, malloc as it comes": before,
        "open files, freed memory kept": median_ms(lambda: [EncodedImage.open(path) for path in paths]),
        "check them (once, before a GPU decodes them)": median_ms(lambda: [_is_sound(file) for file in files]),
    }


def _is_sound(data: bytes) -> bool:
    header = read_jpeg_header(data)
    scans = header and read_scans(data, header)
    return bool(header and scans and is_sound(data, header, scans))


def datasets(root: str) -> dict[str, float]:
    """A worker's whole batch of datasets that open their files with Pillow, and what is done with any such image."""
    keep_freed_memory()
    set_up_worker(None, Deferral(on_gpu=True), worker_id=0)
    folder = ImageFolder(root)
    paths = [path for path, _ in folder.samples]
    arena = Arena(2, len(paths) << 20)
    request = BatchRequest(0, 0, list(range(len(paths))), batched=True, slot=0)
    checks.already_passed = True  # as in all epochs but the first, on a GPU
    costs = {
        "read files, their bytes alone": median_ms(lambda: [_bytes_of(path) for path in paths]),
        "Image.open(path).convert('RGB'), decoded late": median_ms(
            lambda: [Image.open(path).convert("RGB") for path in paths]
        ),
    }
    kinds = {"ImageFolder": lambda root, t: wrap(ImageFolder(root, t)), **DATASETS}
    for of, transform in {"": make_transform(), ", transforms.v2": _of_v2()}.items():
        for name, kind in kinds.items():
            try:
                fetcher = _fetcher_of(kind(root, transform), PassedSamples(len(paths)))
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            packed = PackedDataset(fetcher, Packer(default_collate, arena, len(paths)), arena)
            packed.__getitems__(request)  # which checks them
            costs[f"worker: a whole batch, {name}{of}"] = median_ms(functools.partial(packed.__getitems__, request))
    return costs


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _of_v2() -> v2.Compose:
    random = [v2.RandomResizedCrop(CROP_PX), v2.RandomHorizontalFlip()]
    return v2.Compose([*random, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def road(root: str) -> dict[str, float]:
    """A worker's whole batch, and what the training process does with it before DALI takes over."""
    keep_freed_memory()
    dataset = wrap(ImageFolder(root, make_transform()))
    arena = Arena(2, len(dataset) << 20)
    packer = Packer(default_collate, arena, len(dataset))
    passed = PassedSamples(len(dataset))
    fetchers = _fetcher_of(dataset, None), _fetcher_of(dataset, passed), Fetcher(dataset, passed=passed)
    packed, known, by_sample = (PackedDataset(fetcher, packer, arena) for fetcher in fetchers)
    request = BatchRequest(0, 0, list(range(len(dataset))), batched=True, slot=0)
    known.__getitems__(request)  # which checks them
    plan = dataset.transform.plan
    server = RunQueue(build_pipeline(plan, PipelineOptions(len(dataset), num_threads=1)))
    submitted = []

    def submit() -> None:
        memory = batch.memory(arena)
        submitted.append(server.submit([part.views(memory) for part in batch.runs[0].inputs]))

    costs = {
        "worker: a whole batch": median_ms(lambda: packed.__getitems__(request)),
        "worker: a whole batch, its JPEGs known to be sound": median_ms(lambda: known.__getitems__(request)),
        "worker: the same, sample by sample": median_ms(lambda: by_sample.__getitems__(request)),
        "worker: draws alone": drawing(plan, len(dataset), drawing_ahead),
        "worker: draws alone, one by one": drawing(plan, len(dataset)),
    }
    batch = packed.__getitems__(request).open(request, arena)  # no worker writes into this memory any more
    costs["main: submit a run"] = median_ms(submit, times=5)
    for ticket in submitted:
        server.collect(ticket)
    for name in AUGMENTATIONS:
        plan = compile_transforms(make_transform(name)).plan
        costs[f"worker: draws alone, {name}"] = drawing(plan, len(dataset))
    return costs


def _fetcher_of(dataset: Any, passed: PassedSamples | None) -> Fetcher:
    """Return the fetcher that a worker has for torch's default ``collate_fn``."""
    plans = collect_plans(dataset) if isinstance(dataset, ImageFolder) else {}
    return Fetcher(dataset, passed=passed, folders=FolderFetcher(plans, passed, is_in_worker=True))


def drawing(plan: Plan, images: int, context: Callable[[], Any] = contextlib.nullcontext) -> float:
    def draw() -> None:
        with context():
            for _ in range(images):
                plan.sample_params(375, 500)

    return median_ms(draw)


def crops(root: str) -> dict[str, float]:
    """Decoding on one CPU thread: the crop alone, as the loader does it, and the whole image, then the crop."""
    dataset = wrap(ImageFolder(root, make_transform()))
    torch.manual_seed(0)
    calls = [get_sample(dataset[index][0]).call for index in range(len(dataset))]
    inputs = [list(arrays) for arrays in zip(*(call.inputs for call in calls))]

    @pipeline_def(batch_size=len(dataset), num_threads=1, device_id=None, exec_dynamic=True)
    def whole() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        draws = fn.external_source(name="draws", no_copy=True)
        box = fn.cast(draws[0:4], dtype=types.INT32)
        images = fn.decoders.image(encoded, output_type=types.RGB, jpeg_fancy_upsampling=True)
        images = fn.slice(images, start=box[0:2], shape=box[2:4], axes=[0, 1])
        images = fn.resize(images, size=draws[4:6], interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.cast(draws[6], dtype=types.INT32)
        return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mirror=mirror)

    servers = {
        "DALI: crop decoded alone": RunQueue(
            build_pipeline(dataset.transform.plan, PipelineOptions(len(dataset), num_threads=1))
        ),
        "DALI: whole image decoded, then cropped": RunQueue(whole()),
    }
    spent: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(7):
        for name, server in servers.items():
            spent[name].append(median_ms(lambda server=server: server.collect(server.submit(inputs)), times=1))
    return {name: round(statistics.median(values), 1) for name, values in spent.items()}


def progressive(root: str) -> dict[str, float]:
    """The same photographs as progressive JPEGs: what the check, Pillow and DALI take for them."""
    files = []
    for path, _ in ImageFolder(root).samples:
        file = io.BytesIO()
        Image.open(path).save(file, "JPEG", quality=93, progressive=True)
        files.append(file.getvalue())
    on_gpu = torch.cuda.is_available()
    server = RunQueue(
        build_pipeline(
            compile_transforms(PILToTensor()).plan,
            PipelineOptions(len(files), device_id=0 if on_gpu else None, num_threads=4, hw_decoder_load=1.0),
        )
    )
    encoded = [[np.frombuffer(file, np.uint8) for file in files]]

    def decode() -> None:
        server.collect(server.submit(encoded))
        if on_gpu:
            torch.cuda.synchronize()

    return {
        "progressive: check them": median_ms(lambda: [_is_sound(file) for file in files], times=3),
        "progressive: decoded by Pillow": median_ms(
            lambda: [EncodedImage.decode_with_pillow(file) for file in files], times=3
        ),
        f"progressive: decoded by DALI on {'a GPU and ' if on_gpu else ''}4 threads": median_ms(decode, times=5),
    }


def grey(root: str) -> dict[str, float]:
    """Grey JPEGs, and those in colour after ``convert("L")``, on one CPU thread: by DALI and by torchvision."""
    ways = {"crop": RandomResizedCrop(224), "resize": Resize((224, 224))}
    torch.manual_seed(0)
    spent: dict[str, list[float]] = {}
    for kind in ("grey", "colour, converted"):
        images = []
        for path, _ in ImageFolder(root).samples:
            file = io.BytesIO()
            Image.open(path).convert("L" if kind == "grey" else "RGB").save(file, "JPEG", quality=93)
            images.append(EncodedImage.from_bytes(file.getvalue()))
        for name, first in ways.items():
            start = [TransformedImage.start(image, "L") for image in images]
            for transform in (first, ToTensor(), Normalize((0.5,), (0.5,))):
                start = [each.apply(each.chain.then(transform)) for each in start]
            plan = start[0].chain.plan
            server = RunQueue(build_pipeline(plan, PipelineOptions(len(images), num_threads=1)))
            inputs = [list(arrays) for arrays in zip(*(each.inputs for each in start))]

            def by_torchvision(images: Any = images, first: Any = first) -> None:
                transform = Compose([first, ToTensor(), Normalize((0.5,), (0.5,))])
                torch.stack([transform(Image.open(io.BytesIO(image.data)).convert("L")) for image in images])

            for _ in range(5):
                dali = median_ms(lambda server=server, inputs=inputs: server.collect(server.submit(inputs)), times=1)
                spent.setdefault(f"mode L: {kind}, {name}: DALI", []).append(dali)
                spent.setdefault(f"mode L: {kind}, {name}: torchvision", []).append(median_ms(by_torchvision, times=1))
    return {name: round(statistics.median(values), 1) for name, values in spent.items()}


def decoders(root: str, device_id: int | None = 0, batches: int = 64) -> dict[str, float]:
    """Decoding on a GPU's JPEG engines, one batch after the other: whole images, crops of them, and crops alone."""

    def ms_per_batch(decoded: Callable[[Any, dict[str, Any]], Any]) -> float:
        @pipeline_def(batch_size=256, num_threads=4, device_id=device_id, prefetch_queue_depth=3, exec_dynamic=True)
        def graph() -> Any:
            encoded, _ = fn.readers.file(file_root=root, random_shuffle=True)
            engines = {} if device_id is None else {"device": "mixed", "hw_decoder_load": 1.0}
            return decoded(encoded, {"output_type": types.RGB, "jpeg_fancy_upsampling": True, **engines})

        pipeline = graph()
        pipeline.build()
        times = []
        for _ in range(batches):
            pipeline.run()
            times.append(time.perf_counter())
        return round(1e3 * (times[-1] - times[batches // 4]) / (len(times) - 1 - batches // 4), 2)

    box = {"axes": [0, 1], "normalized_anchor": True, "normalized_shape": True}

    def corner_and_size() -> list[Any]:
        return [fn.random.uniform(range=between, shape=[2]) for between in ((0.0, 0.3), (0.4, 0.7))]

    ways: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
        "GPU: whole images": lambda encoded, how: fn.decoders.image(encoded, **how),
        "GPU: whole images, then cropped": lambda encoded, how: fn.slice(
            fn.decoders.image(encoded, **how), *corner_and_size(), **box
        ),
        "GPU: crops alone": lambda encoded, how: fn.decoders.image_slice(encoded, *corner_and_size(), **box, **how),
        "GPU: random crops alone": lambda encoded, how: fn.decoders.image_random_crop(encoded, **how),
    }
    return {name: ms_per_batch(decoded) for name, decoded in ways.items()}


def registered_memory(root: str, device_id: int | None = 0, batches: int = 96) -> dict[str, float]:
    """What a GPU's decoder takes where the files lie in memory that is registered with CUDA, and where in other."""
    files = [np.fromfile(path, np.uint8) for path, _ in ImageFolder(root).samples]
    arena = Arena(2, sum(file.nbytes for file in files))
    copies = []
    for slot in range(2):
        memory, end = arena.memory(slot, arena.slot_bytes), 0
        for file in files:
            memory[end : end + file.nbytes] = file
            end += file.nbytes
        copies.append(np.split(memory[:end], np.cumsum([file.nbytes for file in files])[:-1]))
    costs = {}
    start = time.perf_counter()
    if device_id is not None:
        torch.zeros(1, device="cuda")  # starts CUDA, which takes longer than what is measured
        registered = arena.memory(1, arena.slot_bytes)
        start = time.perf_counter()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(registered.ctypes.data, registered.nbytes, 0))
    costs["GPU: register a batch's memory, once"] = round(1e3 * (time.perf_counter() - start), 2)

    @pipeline_def(batch_size=len(files), num_threads=4, device_id=device_id, prefetch_queue_depth=2, exec_dynamic=True)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        engines = {} if device_id is None else {"device": "mixed", "hw_decoder_load": 1.0}
        return fn.decoders.image(encoded, output_type=types.RGB, jpeg_fancy_upsampling=True, **engines)

    pipeline = graph()
    pipeline.build()
    spent: dict[str, tuple[list[float], list[float]]] = {"other memory": ([], []), "registered memory": ([], [])}
    for at in range(6):  # in turn; the first of each warms up
        name = list(spent)[at % 2]
        parts = copies[at % 2]
        is_registered = device_id is not None and name == "registered memory"
        images = TensorListCPU([TensorCPU(part, "", is_registered) for part in parts], "", False)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for run in range(batches + 2):
            if run < batches:
                pipeline.feed_input("images", images)
                run_pipeline(pipeline)
            if run >= 2:
                pipeline.outputs()
        spent[name][0].append(1e3 * (time.process_time() - cpu_s) / batches)
        spent[name][1].append(1e3 * (time.perf_counter() - wall_s) / batches)
    for name, (cpu_ms, wall_ms) in spent.items():
        costs[f"GPU: whole images, from {name}"] = round(statistics.median(wall_ms[1:]), 2)
        costs[f"GPU: whole images, from {name}, CPU time"] = round(statistics.median(cpu_ms[1:]), 2)
    return costs


def engine_shares(
    root: str,
    device_id: int | None = 0,
    sizes: Sequence[tuple[int, int]] = SIZES,
    threads_and_shares: Sequence[tuple[int, float]] = ((4, 1.0), (4, 0.65), (16, 0.65)),
    batches: int = 16,
    rounds: int = 5,
) -> dict[str, float]:
    """A run with images of several sizes: all on a GPU's JPEG engines, and 0.65 of them there, the rest by CUDA."""
    images = len(ImageFolder(root))
    costs = {}
    for size in sizes:
        folder = Path(f"{root}-{size[0]}x{size[1]}")
        dataset = wrap(ImageFolder(make_dataset(folder, images=images, size=size), make_transform()))
        torch.manual_seed(0)
        calls = [get_sample(dataset[index][0]).call for index in range(images)]
        inputs = [list(arrays) for arrays in zip(*(call.inputs for call in calls))]
        kind = f"GPU: {size[0]}x{size[1]}, {np.mean([file.nbytes for file in inputs[0]]):,.0f} bytes"
        servers = {
            f"{kind}, {share} on the engines, {threads} threads": RunQueue(
                build_pipeline(
                    dataset.transform.plan, PipelineOptions(images, device_id, threads, hw_decoder_load=share)
                )
            )
            for threads, share in threads_and_shares
        }
        spent: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in servers}
        for name, server in list(servers.items()) * (rounds + 1):  # in turn; the first round warms up
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            submitted = []
            for _ in range(batches):
                submitted.append(server.submit(inputs))
                if len(submitted) > 2:
                    server.collect(submitted.pop(0))
            for each in submitted:
                server.collect(each)
            if device_id is not None:
                torch.cuda.synchronize()
            spent[name][0].append(1e3 * (time.process_time() - cpu_s) / batches)
            spent[name][1].append(1e3 * (time.perf_counter() - wall_s) / batches)
        for name, (cpu_ms, wall_ms) in spent.items():
            costs[name] = round(statistics.median(wall_ms[1:]), 2)
            costs[f"{name}, CPU time"] = round(statistics.median(cpu_ms[1:]), 2)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "parts.jsonl", type=Path)
    parser.add_argument("--images", type=int, default=256, help="in a batch (default: %(default)s)")
    parser.add_argument("--part", choices=PARTS + GPU_PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = str(make_dataset(Path(tempfile.gettempdir()) / f"photos-v{FORMAT}-{args.images}", images=args.images))
    torch.set_num_threads(1)
    if args.part:
        print(json.dumps(globals()[args.part](root)))
        return
    costs: dict[str, float] = {}
    for part in tqdm(PARTS + GPU_PARTS * torch.cuda.is_available(), unit="part", disable=None):
        command = [sys.executable, __file__, "--part", part, "--images", str(args.images)]
        # A process each: how malloc is set stays for good.
        costs |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    record = {
        "date": datetime.date.today().isoformat(),
        "benchmark": "parts",
        "command": "python benchmarks/parts.py",
        "images": args.images,
        "machine": machine(),
        "ms_per_batch": costs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    table = Table("part", f"ms for {args.images} images")
    for name, cost in costs.items():
        table.add_row(name, f"{cost:,.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
