"""How fast is the loader of the swap, beside DALI's own reader, the upstream proxy and the stock DataLoader?

    python benchmarks/swap_speed.py --images 8192                          # on a GPU
    python benchmarks/swap_speed.py --images 1024 --workers 2 --device cpu # on a laptop
    python benchmarks/swap_speed.py --images 8192 --transforms plain RandAugment AutoAugment --only stock proxyloader

All cases read the same JPEG files, crop and resize to 224, flip and normalise, batch by batch, in one process and in
rounds: each round runs every case once, so that a change of the machine's mood meets all of them. A case's first loop,
with the start of its workers, is left out. With ``--transforms`` the two loaders augment, too, behind the flip; each
is a case of its own, and the table says what is left of the plain one's speed. (On a CPU proxyloader leaves those
transforms to torchvision.) Appends one JSON line to benchmarks/results/swap_speed.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

import proxyloader
from proxyloader._dali import fn, pipeline_def, types, upright
from proxyloader.make_dataset import make_dataset

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PLAIN = "plain"
AUGMENTATIONS: dict[str, list[Any]] = {
    PLAIN: [],
    "ColorJitter": [transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "RandAugment": [transforms.RandAugment()],
    "TrivialAugmentWide": [transforms.TrivialAugmentWide()],
    "AutoAugment": [transforms.AutoAugment()],
    "AugMix": [transforms.AugMix()],
}
TRANSFORMS = {
    name: transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            *added,
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    for name, added in AUGMENTATIONS.items()
}
Case = Callable[[], Iterator[Any]]  # each call is one loop over the data set


def stock(args: argparse.Namespace, workers: int, transform: str) -> Case:
    """torch's DataLoader and torchvision's transforms on the CPU."""
    dataset = photographs(args, passes=1, transform=TRANSFORMS[transform])
    loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: iter(loader)


def photographs(args: argparse.Namespace, passes: int, **arguments: Any) -> Dataset[Any]:
    """An epoch of a fast case goes over the files several times: its start weighs little, as in a real one."""
    return ConcatDataset([ImageFolder(args.data, **arguments)] * passes)


def swap(args: argparse.Namespace, transform: str) -> Case:
    """proxyloader: bytes read by workers, crops drawn by torchvision."""
    loader = proxyloader.DataLoader(
        photographs(args, args.passes, transform=TRANSFORMS[transform]),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        device=args.device,
        num_threads=args.threads,
    )
    return lambda: iter(loader)


def iterator(args: argparse.Namespace, **decoder: Any) -> Case:
    """DALI's file reader and DALIClassificationIterator."""
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    @graph(args)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(file_root=args.data, random_shuffle=True, name="Reader")
        return augmented(args, encoded, **decoder), labels.gpu() if args.device == "cuda" else labels

    batches = DALIClassificationIterator(
        pipeline(), reader_name="Reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
    )
    return lambda: iter(batches)


def decoder_alone(args: argparse.Namespace, **decoder: Any) -> Case:
    """DALI's file reader and decoder, and nothing else: what no loader on this machine can exceed."""

    @graph(args)
    def pipeline() -> Any:
        encoded, _ = fn.readers.file(file_root=args.data, random_shuffle=True, name="Reader")
        return decoded(args, encoded, **decoder)

    runs = pipeline()
    runs.build()

    def epoch() -> Iterator[Any]:
        for _ in range(-(-args.images // args.batch_size)):
            yield runs.run()

    return epoch


def upstream(args: argparse.Namespace, **decoder: Any) -> Case:
    """DALI's proxy as it is shipped, fed with encoded bytes."""
    from nvidia.dali.plugin.pytorch.experimental import proxy

    @graph(args)
    def pipeline() -> Any:
        return augmented(args, fn.external_source(name="images", no_copy=True), **decoder)

    server = proxy.DALIServer(pipeline())
    server.start_thread()
    dataset = photographs(args, passes=2, transform=server.proxy, loader=read_bytes)
    loader = proxy.DataLoader(
        server, dataset, args.batch_size, shuffle=True, num_workers=args.workers, persistent_workers=True
    )
    return lambda: iter(loader)


def read_bytes(path: str) -> np.ndarray[Any, Any]:
    return np.fromfile(path, np.uint8)


def graph(args: argparse.Namespace) -> Any:
    return pipeline_def(
        batch_size=args.batch_size,
        num_threads=args.threads,
        device_id=0 if args.device == "cuda" else None,
        exec_dynamic=True,
        prefetch_queue_depth=3,
    )


def decoded(args: argparse.Namespace, encoded: Any, **decoder: Any) -> Any:
    """The decoder, set as proxyloader sets it."""
    where = {"device": "mixed", **decoder} if args.device == "cuda" else {"device": "cpu"}
    return fn.decoders.image(
        encoded, output_type=types.RGB, jpeg_fancy_upsampling=True, **upright("decoders__Image"), **where
    )


def augmented(args: argparse.Namespace, encoded: Any, **decoder: Any) -> Any:
    """The work of the plain transform as one writes it in DALI."""
    images = decoded(args, encoded, **decoder)
    images = fn.random_resized_crop(images, size=224, interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(),
    )


def cases(args: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    """DALI's own with the plain transform alone, the loaders with each that is asked for."""
    workers = args.workers if args.device == "cpu" else 16
    made = {named(args, "stock", each): partial(stock, args, workers, each) for each in args.transforms}
    if PLAIN in args.transforms:
        made |= others_on_cpu(args) if args.device == "cpu" else others_on_gpu(args)
    return made | {named(args, "proxyloader", each): partial(swap, args, each) for each in args.transforms}


def named(args: argparse.Namespace, loader: str, transform: str) -> str:
    workers = ", 16 workers" if loader == "stock" and args.device == "cuda" else ""
    return loader + workers + (f", {transform}" if transform != PLAIN else "")


def others_on_cpu(args: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    return {"decoder alone": partial(decoder_alone, args), "iterator": partial(iterator, args)}


def others_on_gpu(args: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    return {
        "upstream proxy, bytes, hw 0.65 (default)": partial(upstream, args),
        "upstream proxy, bytes, hw 1.0": partial(upstream, args, hw_decoder_load=1.0),
        "iterator, hw 0.65 (default)": partial(iterator, args),
        "iterator, hw 1.0": partial(iterator, args, hw_decoder_load=1.0),
        "decoder alone, hw 1.0": partial(decoder_alone, args, hw_decoder_load=1.0),
    }


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Loop over the data set until ``seconds`` have passed; whole loops only."""
    before, start, images = cpu_seconds(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for batch in case():
            first = batch[0]
            images += len(first["data"] if isinstance(first, dict) else first)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall = time.perf_counter() - start
    return {"images_per_s": images / wall, "cpu_ms_per_image": 1e3 * (cpu_seconds() - before) / images}


def cpu_seconds() -> float:
    """CPU time of this process and its children that are alive."""
    process = psutil.Process()
    times = [part.cpu_times() for part in [process, *process.children(recursive=True)]]
    return sum(part.user + part.system for part in times)


def machine() -> dict[str, Any]:
    import nvidia.dali

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "dali": nvidia.dali.__version__,
        "proxyloader": proxyloader.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="an ImageFolder root; by default photographs are made in a temporary folder")
    parser.add_argument("--images", type=int, default=8192, help="how many to make (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8, help="of the proxies and, on the CPU, of the stock loader")
    parser.add_argument("--threads", type=int, help="DALI's CPU threads (default: 4 beside a GPU, else all cores)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--passes", type=int, default=4, help="over the files in an epoch of ours (default: %(default)s)"
    )
    parser.add_argument("--transforms", nargs="+", choices=list(AUGMENTATIONS), default=[PLAIN], help="of both loaders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="at least, for a case in a round")
    parser.add_argument("--only", nargs="*", help="cases whose names contain one of these")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "swap_speed.jsonl", type=Path)
    args = parser.parse_args()
    args.threads = args.threads or (4 if args.device == "cuda" else len(os.sched_getaffinity(0)))
    # The upstream proxy can hang: then say where, and end.
    faulthandler.dump_traceback_later(600 + args.rounds * 60 * args.seconds, exit=True)
    args.data = args.data or str(
        make_dataset(Path(tempfile.gettempdir()) / f"photos-{args.images}", images=args.images)
    )
    wanted = {
        name: make for name, make in cases(args).items() if not args.only or any(part in name for part in args.only)
    }
    running = {}
    for name, make in tqdm(wanted.items(), desc="first loops", disable=None):
        running[name] = make()
        for _ in running[name]():
            pass
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        for name, case in running.items():
            gc.collect()
            rows[name].append(measure(case, args.seconds))
    record = {
        "date": datetime.date.today().isoformat(),
        "benchmark": "swap_speed",
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "images": args.images,
        "passes": args.passes,
        "batch_size": args.batch_size,
        "workers": args.workers,
        "threads": args.threads,
        "device": args.device,
        "transforms": args.transforms,
        "cases": {name: summary(values) for name, values in rows.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    Console().print(as_table(record))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # the upstream server's thread would keep the process for ever


def summary(values: list[dict[str, float]]) -> dict[str, Any]:
    speeds = [value["images_per_s"] for value in values]
    return {
        "images_per_s": round(statistics.median(speeds), 1),
        "images_per_s_rounds": [round(speed, 1) for speed in speeds],
        "cpu_ms_per_image": round(statistics.median(value["cpu_ms_per_image"] for value in values), 3),
    }


def as_table(record: dict[str, Any]) -> Table:
    table = Table(
        title=f"batch {record['batch_size']}, {record['workers']} workers, {record['machine']['gpu'] or 'CPU'}"
    )
    several = len(record["transforms"]) > 1
    for column in ("case", "images/s, median", "lowest to highest", "CPU ms/image", "proxyloader / case"):
        table.add_column(column)
    if several:
        table.add_column("case / the same, plain")
    cases = record["cases"]
    for name, case in cases.items():
        speed, speeds = case["images_per_s"], case["images_per_s_rounds"]
        transform = next((each for each in record["transforms"] if name.endswith(f", {each}")), None)
        ours = cases.get("proxyloader" if transform is None else f"proxyloader, {transform}")
        plain = cases.get(name.removesuffix(f", {transform}")) if transform else None
        table.add_row(
            name,
            f"{speed:,.0f}",
            f"{min(speeds):,.0f} - {max(speeds):,.0f}",
            f"{case['cpu_ms_per_image']:.2f}",
            f"{ours['images_per_s'] / speed:.2f}" if ours else "",
            *([f"{speed / plain['images_per_s']:.2f}" if plain else ""] if several else []),
        )
    return table


if __name__ == "__main__":
    main()
