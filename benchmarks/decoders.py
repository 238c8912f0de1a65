"""How close are DALI's JPEG decoders to Pillow, and how fast are they?

    python benchmarks/decoders.py                                           # on a GPU
    python benchmarks/decoders.py --device cpu --batches 2 --batch-size 32  # on a laptop

Photographs of 500x375, with smooth gradients and hard edges in saturated colors, are saved by Pillow as JPEGs of each
kind and quality, and decoded by a GPU's JPEG engines (hw_decoder_load=1), by CUDA (hw_decoder_load=0), and by DALI on
the CPU. Only GPUs have a choice of upsampling (jpeg_fancy_upsampling), as the CPU always does it like Pillow, and only
the CPU has one of the inverse DCT (use_fast_idct). The loader uses fancy upsampling and the accurate IDCT. The engines
leave progressive JPEGs, here 4:2:0, to CUDA.

Prints each row once it is measured: differences from Pillow in RGB over all values of all images, in levels of 255
(mean, 99.9th percentile, largest), and images/s of decoding alone, from bytes in memory, with two more batches in
flight and a thread per core. Appends one JSON line to benchmarks/results/decoders.jsonl.
"""

from __future__ import annotations

import colorsys
import datetime
import importlib.metadata
import io
import itertools
import mmap
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from _common import append_record, make_parser
from PIL import Image, ImageDraw, ImageOps, features
from tqdm import tqdm

from proxyloader._cores import usable_cores
from proxyloader.dali.api import decoder_arguments, fn, pipeline_def
from proxyloader.dali.executor import tensor_list
from proxyloader.dali.run_queue import to_torch
from proxyloader.make_dataset import photograph
from proxyloader.tools.bench.config import machine

WIDTH, HEIGHT = 500, 375
KINDS = ("4:2:0", "4:2:2", "4:4:4", "gray", "progressive")
UPSAMPLING = {"fancy upsampling": {"jpeg_fancy_upsampling": True}, "plain upsampling": {"jpeg_fancy_upsampling": False}}
IDCT = {"accurate IDCT": {"use_fast_idct": False}, "fast IDCT": {"use_fast_idct": True}}
IN_FLIGHT = 2
LEAST_S = 0.1  # that a speed is measured
HEADER = "JPEG         quality  decoder  setting             mean  99.9%  largest  images/s"
ROW = "{kind:<11}  {quality:>7}  {decoder:<7}  {setting:<16}  {mean:.4f}  {p99_9:>5}  {largest:>7}  {images_per_s:>8,}"
originals: Any = None  # uint8 (N, H, W, 3), in memory shared with the processes that fill it
expected: Any = None  # the same, decoded by Pillow


def draw(index: int) -> None:
    """Draw small shapes with hard edges on a photograph whose left third is a smooth gradient."""
    rng, image = np.random.default_rng((index, 4)), photograph(index, size=(WIDTH, HEIGHT))
    colors = [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 1, 1)) for hue in rng.random(10)]
    gradient = ImageOps.colorize(Image.linear_gradient("L").rotate(90 * (index % 4)), colors[0], colors[1])
    image.paste(gradient.resize((WIDTH // 3, HEIGHT)))
    canvas = ImageDraw.Draw(image)
    for color in colors[2:]:
        (x, y, column, row), size = rng.random(4) * (WIDTH, HEIGHT, WIDTH, HEIGHT), rng.uniform(8, 40)
        canvas.regular_polygon((x, y, size / 2), int(rng.integers(3, 7)), rng.uniform(0, 360), color)
        canvas.text((column, row), "proxyloader", color, font_size=size)
    originals[index] = image


def encode(index: int, kind: str, quality: int) -> bytes:
    """Return an image as a JPEG, and store the pixels that Pillow decodes."""
    image, file = Image.fromarray(originals[index]), io.BytesIO()
    options = {"subsampling": kind} if ":" in kind else {"progressive": kind == "progressive"}
    (image.convert("L") if kind == "gray" else image).save(file, "JPEG", quality=quality, **options)
    expected[index] = Image.open(file).convert("RGB")
    return file.getvalue()


def build(decoder: str, options: dict[str, bool], batch_size: int) -> Any:
    device_id = None if decoder == "CPU" else 0
    arguments = decoder_arguments("decoders__Image", device_id, float(decoder == "engines")) | options

    @pipeline_def(batch_size=batch_size, num_threads=usable_cores(), device_id=device_id, exec_dynamic=True)
    def decoded() -> Any:
        return fn.decoders.image(fn.external_source(name="images", no_copy=True), **arguments)

    pipeline = decoded()
    pipeline.build()
    return pipeline


def decode(pipeline: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the images of each batch, (N, H, W, 3) or a list, with the next batches in flight."""
    stream = None if pipeline.device_id is None else torch.cuda.current_stream()
    for number, batch in enumerate(itertools.chain(batches, [None] * IN_FLIGHT)):
        if batch is not None:
            pipeline.feed_input("images", batch)
            pipeline._run_once()
        if number >= IN_FLIGHT:
            (images,) = to_torch(pipeline.outputs(cuda_stream=stream), exec_dynamic=True)
            if stream:
                stream.synchronize()
            yield images


def compare(pipeline: Any, batches: list[Any], expected: torch.Tensor) -> dict[str, float]:
    counts = torch.zeros(256, dtype=torch.int64, device=expected.device)
    for images, theirs in zip(decode(pipeline, batches), expected.chunk(len(batches))):
        ours = torch.stack(images) if isinstance(images, list) else images
        counts += torch.bincount((ours.to(theirs.device).short() - theirs).abs_().flatten(), minlength=256)
    share = counts.cpu().double() / counts.sum().item()
    mean, p99_9 = (share * torch.arange(256)).sum().item(), int((share.cumsum(0) < 0.999).sum())
    return {"mean": round(mean, 4), "p99_9": p99_9, "largest": int(share.nonzero().max())}


def images_per_s(pipeline: Any, batches: list[Any], batch_size: int) -> int:
    """Decode all batches, and again until the time is over. The last ones, with fewer in flight, do not count."""
    times: list[float] = []
    more = itertools.takewhile(lambda _: len(times) <= len(batches) or times[-1] - times[0] < LEAST_S, batches * 1000)
    for _ in decode(pipeline, more):
        times.append(time.perf_counter())
    times = times[:-IN_FLIGHT]
    return round(batch_size * (len(times) - 1) / (times[-1] - times[0]))


def main() -> None:
    global originals, expected
    parser = make_parser("decoders", __doc__)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="default: all")
    parser.add_argument("--qualities", type=int, nargs="+", default=[50, 75, 90, 98], help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=4, help="of each kind and quality (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="default: %(default)s")
    args = parser.parse_args()
    size, images = args.batch_size, args.batches * args.batch_size
    shape = (images, HEIGHT, WIDTH, 3)
    originals, expected = (np.ndarray(shape, np.uint8, mmap.mmap(-1, int(np.prod(shape)))) for _ in range(2))
    names = ("engines", "CUDA", "CPU") if args.device == "cuda" else ("CPU",)
    cases = [(name, setting) for name in names for setting in (IDCT if name == "CPU" else UPSAMPLING).items()]
    pipelines: dict[tuple[str, str], Any] = {}
    rows: list[dict[str, Any]] = []
    with get_context("fork").Pool(usable_cores()) as pool:  # before DALI and CUDA have threads
        pool.map(draw, range(images))
        versions = machine() | {"libjpeg_turbo": features.version("libjpeg_turbo")}
        installed = {package.name: package.version for package in importlib.metadata.distributions()}
        versions |= {name: installed.get(name) for name in ("pillow", "nvidia-nvimgcodec-cu12", "nvidia-nvjpeg-cu12")}
        print(__doc__.splitlines()[0], f"{images:,} images in batches of {size}, {datetime.date.today()}")
        print(textwrap.fill(", ".join(f"{name} {value}" for name, value in versions.items() if value), 120))
        print(f"\n{HEADER}", flush=True)
        for kind, quality in tqdm(list(itertools.product(args.kinds, args.qualities)), disable=None):
            files = pool.starmap(encode, [(index, kind, quality) for index in range(images)])
            arrays = [np.frombuffer(file, np.uint8) for file in files]
            batches = [tensor_list(arrays[at : at + size]) for at in range(0, images, size)]
            theirs = torch.from_numpy(expected).to(args.device)
            for name, (setting, options) in cases:
                if (name, setting) not in pipelines or (name == "engines" and quality == args.qualities[0]):
                    pipelines[name, setting] = build(name, options, size)  # engines: a new one for each kind
                differences = compare(pipelines[name, setting], batches, theirs)
                speed = {"images_per_s": images_per_s(pipelines[name, setting], batches, size)}
                rows.append(dict(kind=kind, quality=quality, decoder=name, setting=setting, **differences, **speed))
                tqdm.write(ROW.format(**rows[-1]))
                sys.stdout.flush()
    append_record(args, "batch_size", machine=versions, images=images, rows=rows)


if __name__ == "__main__":
    main()
