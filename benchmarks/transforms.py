"""What does a transform cost behind a random crop?

    python benchmarks/transforms.py                # on a GPU where there is one
    python benchmarks/transforms.py --device cpu

Each transform stands behind RandomResizedCrop(224) of JPEGs of about 500 x 375, and other sizes in its place. On a
GPU: images a second of DALI's decoder and the kernels, fed as fast as they take them, and as a share of the same
without the transform. On the CPU, where DALI resizes: CPU time for an image, with one thread, by DALI and by
torchvision with Pillow. Rounds are interleaved; medians. Appends one JSON line to benchmarks/results/transforms.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from proxyloader import EncodedImage, compile_transforms
from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer
from proxyloader.dali.program_server import ProgramServer, get_decoder
from proxyloader.kernels.launcher import Launcher
from proxyloader.make_dataset import FORMAT, make_dataset
from proxyloader.tools.bench.config import machine

BILINEAR = transforms.InterpolationMode.BILINEAR
RESIZES: dict[str, list[Any]] = {
    "plain": [],
    "crop of 64": [transforms.RandomResizedCrop(64)],
    "crop of 127": [transforms.RandomResizedCrop(127)],
    "crop of 128": [transforms.RandomResizedCrop(128)],
    "whole to a square": [transforms.Resize((224, 224))],
    "whole to a shorter side": [transforms.Resize(256), transforms.CenterCrop(224)],
    "crop of uint8 tensors": [v2.PILToTensor(), v2.RandomResizedCrop(224)],
    "square of uint8 tensors": [v2.PILToTensor(), v2.Resize((224, 224))],
}
CASES: dict[str, list[Any]] = RESIZES | {
    "brightness": [transforms.ColorJitter(0.4)],
    "contrast": [transforms.ColorJitter(0, 0.4)],
    "saturation": [transforms.ColorJitter(0, 0, 0.4)],
    "hue": [transforms.ColorJitter(0, 0, 0, 0.1)],
    "grey": [transforms.RandomGrayscale(1)],
    "invert": [transforms.RandomInvert(1)],
    "posterize": [transforms.RandomPosterize(3, 1)],
    "solarize": [transforms.RandomSolarize(99, 1)],
    "sharpness": [transforms.RandomAdjustSharpness(2, 1)],
    "autocontrast": [transforms.RandomAutocontrast(1)],
    "equalize": [transforms.RandomEqualize(1)],
    "rotation": [transforms.RandomRotation(30)],
    "rotation, bilinear": [transforms.RandomRotation(30, BILINEAR)],
    "affine, bilinear": [transforms.RandomAffine(20, (0.1, 0.1), (0.9, 1.1), interpolation=BILINEAR)],
    "perspective": [transforms.RandomPerspective(0.5, 1)],
    "blur": [transforms.GaussianBlur(5)],
    "ColorJitter": [transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "RandAugment": [transforms.RandAugment()],
    "TrivialAugmentWide": [transforms.TrivialAugmentWide()],
    "AutoAugment": [transforms.AutoAugment()],
    "AugMix": [transforms.AugMix()],
}
CROPS = transforms.RandomResizedCrop, v2.RandomResizedCrop
MOST_BATCHES = 4
"""Drawn in advance, and given in turn."""


class Case:
    """A transform, its pipeline, and batches that are drawn already."""

    def __init__(self, added: list[Any], files: list[bytes], device_id: int | None) -> None:
        has_size = any(isinstance(each, (transforms.Resize, v2.Resize, *CROPS)) for each in added)
        is_tensor = any(isinstance(each, v2.PILToTensor) for each in added)
        first = [] if has_size else [transforms.RandomResizedCrop(224)]
        last = transforms.ConvertImageDtype(torch.float32) if is_tensor else transforms.ToTensor()
        self.transform = transforms.Compose([*first, *added, last])
        compiled = compile_transforms(self.transform)
        self.server: PlanServer | ProgramServer
        if device_id is None:
            self.server = PlanServer(compiled.plan, PipelineOptions(len(files), num_threads=1), OutputFormat())
        else:
            decoder = get_decoder(PipelineOptions(len(files), device_id=device_id, num_threads=4))
            launcher = Launcher(device_id, torch.float32, channels_last=False)
            self.server = ProgramServer(decoder, compiled.plan, launcher, OutputFormat())
        self.files = files
        self.batches = []
        for _ in range(1 if device_id is None else MOST_BATCHES):
            calls = [compiled.sample(EncodedImage.from_bytes(data)) for data in files]
            self.batches.append([list(arrays) for arrays in zip(*(call.inputs for call in calls))])
        self.server.collect(self.server.submit(self.batches[0]))

    def images_per_s(self, runs: int) -> float:
        tickets = [self.server.submit(self.batches[k % MOST_BATCHES]) for k in range(2)]
        start = time.perf_counter()
        for k in range(runs):
            tickets.append(self.server.submit(self.batches[k % MOST_BATCHES]))
            self.server.collect(tickets.pop(0))
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        for ticket in tickets:
            self.server.collect(ticket)
        return runs * len(self.files) / took

    def cpu_ms(self) -> tuple[float, float]:
        """(DALI's, torchvision's) CPU time for an image."""
        start = time.process_time()
        self.server.collect(self.server.submit(self.batches[0]))
        middle = time.process_time()
        for data in self.files:
            self.transform(Image.open(io.BytesIO(data)).convert("RGB"))
        end = time.process_time()
        return 1e3 * (middle - start) / len(self.files), 1e3 * (end - middle) / len(self.files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, help="in a batch (default: 256 on a GPU, 32 on the CPU)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="cases whose names contain one of these; plain is always there")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "transforms.jsonl", type=Path)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.images = args.images or (256 if on_gpu else 32)
    torch.set_num_threads(1)
    root = make_dataset(Path(tempfile.gettempdir()) / f"photos-v{FORMAT}-{args.images}", images=args.images)
    files = [Path(path).read_bytes() for path, _ in ImageFolder(str(root)).samples]
    wanted = {
        name: added
        for name, added in (CASES if on_gpu else RESIZES).items()
        if name == "plain" or not args.only or any(part in name for part in args.only)
    }
    if args.only and len(wanted) == 1:
        parser.error(f"--only {' '.join(args.only)}: no case has that in its name; there are {', '.join(CASES)}")
    cases = {
        name: Case(added, files, 0 if on_gpu else None)
        for name, added in tqdm(wanted.items(), desc="pipelines", disable=None)
    }
    rounds: dict[str, list[Any]] = {name: [] for name in cases}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        for name, case in cases.items():
            rounds[name].append(case.images_per_s(25) if on_gpu else case.cpu_ms())
    table = Table("transform", *(["images/s", "of plain"] if on_gpu else ["DALI, ms", "torchvision, ms"]))
    found: dict[str, Any] = {}
    for name, values in rounds.items():
        if on_gpu:
            found[name] = {"images_per_s": round(statistics.median(values), 1)}
            share = found[name]["images_per_s"] / found["plain"]["images_per_s"]
            table.add_row(name, f"{found[name]['images_per_s']:,.0f}", f"{share:.2f}")
        else:
            dali, stock = (round(statistics.median(each), 3) for each in zip(*values))
            found[name] = {"dali_cpu_ms_per_image": dali, "torchvision_cpu_ms_per_image": stock}
            table.add_row(name, f"{dali:.2f}", f"{stock:.2f}")
    record = {
        "date": datetime.date.today().isoformat(),
        "benchmark": "transforms",
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "images": args.images,
        "device": args.device,
        "cases": found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
