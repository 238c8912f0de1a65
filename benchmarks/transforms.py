"""How much does a transform cost after a random crop?

    python benchmarks/transforms.py                # on a GPU if there is one
    python benchmarks/transforms.py --device cpu

Each transform follows RandomResizedCrop(224) of JPEGs of about 500 x 375 pixels; some replace it. On a GPU, measures
the images per second of DALI's decoder and the kernels, whose inputs are packed in advance. On the CPU,
measures CPU time per image of DALI with one thread, and of Pillow and torchvision. Rounds are interleaved, and medians
reported. Appends one JSON line to benchmarks/results/transforms.jsonl.
"""

from __future__ import annotations

import io
import itertools
import statistics
import time
from typing import Any

import torch
from _common import append_record, make_parser, make_photographs
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import transforms
from torchvision.transforms import v2
from tqdm import tqdm

from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer, get_decoder
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.transformed import TransformedImage
from proxyloader.kernels.operations import build_schedule
from proxyloader.transforms.chain import START

BILINEAR = transforms.InterpolationMode.BILINEAR
CROP = transforms.RandomResizedCrop(224)
RESIZES: dict[str, list[Any]] = {
    "crop": [CROP],
    "crop of 64": [transforms.RandomResizedCrop(64)],
    "whole to a square": [transforms.Resize((224, 224))],
    "whole to a shorter side": [transforms.Resize(256), transforms.CenterCrop(224)],
    "crop of uint8 tensors": [v2.PILToTensor(), v2.RandomResizedCrop(224)],
}
AUGMENTATIONS: dict[str, Any] = {
    "ColorJitter": transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "contrast": transforms.ColorJitter(0, 0.4),
    "equalize": transforms.RandomEqualize(1),
    "sharpness": transforms.RandomAdjustSharpness(2, 1),
    "affine, bilinear": transforms.RandomAffine(20, (0.1, 0.1), (0.9, 1.1), interpolation=BILINEAR),
    "perspective": transforms.RandomPerspective(0.5, 1),
    "blur": transforms.GaussianBlur(5),
    "RandAugment": transforms.RandAugment(),
    "TrivialAugmentWide": transforms.TrivialAugmentWide(),
    "AutoAugment": transforms.AutoAugment(),
    "AugMix": transforms.AugMix(),
}
CASES = RESIZES | {name: [CROP, transform] for name, transform in AUGMENTATIONS.items()}
"""On the CPU, only ``RESIZES``: torchvision runs the others in the workers."""

BATCHES = 4
"""Number of batches with different random parameters."""


class Case:
    """A transform, the queue that runs it, and the arguments of ``submit`` for several batches."""

    def __init__(self, parts: list[Any], files: list[bytes], on_gpu: bool) -> None:
        is_tensor = any(isinstance(each, v2.PILToTensor) for each in parts)
        last = transforms.ConvertImageDtype(torch.float32) if is_tensor else transforms.ToTensor()
        self.transform, self.files = transforms.Compose([*parts, last]), files
        chain = START.through(self.transform)
        assert chain is not None
        self.batches: list[tuple[Any, ...]] = []
        for _ in range(BATCHES):
            calls = [TransformedImage.sample(EncodedImage.from_bytes(data), chain) for data in files]
            inputs = [list(arrays) for arrays in zip(*(call.inputs for call in calls))]
            if on_gpu:
                images = [(chain.plan, call.image.size[::-1], call.row.packed()) for call in calls]
                self.batches.append((inputs[:1], build_schedule(images, None, False)))
            else:
                self.batches.append((inputs,))
        self.server: Any
        if on_gpu:
            self.server = get_decoder(PipelineOptions(len(files), device_id=0, num_threads=4), len(files))
        else:
            self.server = PlanServer(chain.plan, PipelineOptions(len(files), num_threads=1), OutputFormat())
        self.server.collect(self.server.submit(*self.batches[0]))

    def images_per_s(self, runs: int = 25) -> float:
        batches = itertools.cycle(self.batches)
        submitted = [self.server.submit(*next(batches)) for _ in range(2)]
        start = time.perf_counter()
        for _ in range(runs):
            submitted.append(self.server.submit(*next(batches)))
            self.server.collect(submitted.pop(0))
        torch.cuda.synchronize()
        spent = time.perf_counter() - start
        for each in submitted:
            self.server.collect(each)
        return runs * len(self.files) / spent

    def cpu_ms(self) -> tuple[float, float]:
        """Return the CPU time per image of DALI and of torchvision in milliseconds."""
        start = time.process_time()
        self.server.collect(self.server.submit(*self.batches[0]))
        middle = time.process_time()
        for data in self.files:
            self.transform(Image.open(io.BytesIO(data)).convert("RGB"))
        end = time.process_time()
        return 1e3 * (middle - start) / len(self.files), 1e3 * (end - middle) / len(self.files)


def main() -> None:
    parser = make_parser("transforms", __doc__)
    parser.add_argument("--images", type=int, help="in a batch (default: 256 on a GPU, 32 on the CPU)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain one of these")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    images = args.images or (256 if on_gpu else 32)
    torch.set_num_threads(1)
    files = [path.read_bytes() for path in sorted(make_photographs(images).rglob("*.jpg"))]
    known = CASES if on_gpu else RESIZES
    wanted = {name: parts for name, parts in known.items() if any(part in name for part in args.only)}
    if not wanted:
        parser.error(f"--only {' '.join(args.only)}: no case has that in its name; there are {', '.join(known)}")
    cases = {name: Case(parts, files, on_gpu) for name, parts in tqdm(wanted.items(), desc="pipelines", disable=None)}
    rounds: dict[str, list[Any]] = {name: [] for name in cases}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        for name, case in cases.items():
            rounds[name].append(case.images_per_s() if on_gpu else case.cpu_ms())
    table = Table("transform", *(["images/s"] if on_gpu else ["DALI, ms", "torchvision, ms"]))
    found: dict[str, Any] = {}
    for name, values in rounds.items():
        if on_gpu:
            found[name] = {"images_per_s": round(statistics.median(values), 1)}
        else:
            dali, stock = (round(statistics.median(each), 3) for each in zip(*values))
            found[name] = {"dali_cpu_ms_per_image": dali, "torchvision_cpu_ms_per_image": stock}
        table.add_row(name, *(f"{value:,.2f}" for value in found[name].values()))
    append_record(args, "device", images=images, cases=found)
    Console().print(table)


if __name__ == "__main__":
    main()
