"""Visualize an augmentation: a figure of photos, each rotated by several random angles.

The pipeline is the random rotation of DALI's getting started guide. It also returns the original images and the angles,
which the figure shows.

Usage:

    python examples/rotation_gallery.py                                        # creates photos in data/example_photos
    python examples/rotation_gallery.py my_images --angle 90 --columns 10      # one subfolder of images per class

The script prints the angles and saves the figure to --out. Each row shows a photo and its rotations. Positive angles
rotate counterclockwise, and empty corners are black. The --seed determines the angles.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import fn, pipeline_def, types
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_pil_image
from tqdm import tqdm

from proxyloader import DataLoader, ProxyServer
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")
FORMATS = (".png", ".jpg", ".jpeg", ".webp")
MARGIN, GAP, CAPTION = 16, 6, 24  # of the figure, in pixels


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--angle", type=float, default=30, help="maximum angle in either direction, in degrees")
    option("--rows", type=int, default=4, help="number of photos")
    option("--columns", type=int, default=6, help="rotations per photo")
    option("--size", type=int, default=160, help="height and width of each image, in pixels")
    option("--seed", type=int, default=0, help="seed of the angles")
    option("--out", type=Path, default=Path("rotation_gallery.png"), help="path of the figure")
    args = parser.parse_args()
    for name, least in {"angle": 0.1, "rows": 1, "columns": 1, "size": 1, "seed": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    if args.out.suffix.lower() not in FORMATS:
        sys.exit(f"--out must end in {', '.join(FORMATS)}, got {args.out}")
    return args


@pipeline_def(num_threads=4, exec_dynamic=True)
def random_rotations(angle: float, size: int, decoder: str) -> Any:
    """Encoded images to cropped and rotated ones, both (size, size, 3) uint8, and the angles in degrees."""
    encoded = fn.external_source(name="images", no_copy=True)
    images = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
    images = fn.crop(fn.resize(images, resize_shorter=size), crop=(size, size))
    angles = fn.random.uniform(range=(-angle, angle))
    return images, fn.rotate(images, angle=angles, fill_value=0, keep_size=True), angles


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def draw_figure(rows: list[tuple[list[Image.Image], list[str]]]) -> Image.Image:
    """Return a figure with rows of equally sized images, each below its caption."""
    size, font = rows[0][0][0].width, ImageFont.load_default(size=14)
    width, height = len(rows[0][0]) * (size + GAP) - GAP, len(rows) * (size + CAPTION)
    figure = Image.new("RGB", (width + 2 * MARGIN, height + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(figure)
    for row, (images, captions) in enumerate(rows):
        top = MARGIN + row * (size + CAPTION) + CAPTION
        for column, (image, caption) in enumerate(zip(images, captions)):
            left = MARGIN + column * (size + GAP)
            draw.text((left, top - 6), caption, "black", font, anchor="ls")
            figure.paste(image, (left, top))
    return figure


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {args.out}: cannot create its folder: {error.strerror}")
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    graph = {"angle": args.angle, "size": args.size, "decoder": "cpu" if gpu is None else "mixed"}
    pipeline = random_rotations(**graph, batch_size=args.columns, device_id=gpu, seed=args.seed)
    rows = []
    with ProxyServer(pipeline) as server:
        folder = ImageFolder(str(root), transform=server.proxy, loader=read_bytes)
        if args.rows > len(folder):
            print(f"{root} contains only {len(folder)} images")
        indices = torch.linspace(0, len(folder) - 1, min(args.rows, len(folder))).long()
        dataset = Subset(folder, indices.repeat_interleave(args.columns).tolist())  # one row per batch
        loader = DataLoader(dataset, args.columns, server=server)
        for (images, rotated, angles), _ in tqdm(loader, leave=False, disable=None):
            degrees = [f"{angle:+.1f}" for angle in angles.flatten().tolist()]
            name = Path(folder.samples[indices[len(rows)]][0]).name
            tqdm.write(f"{name}: rotated by {' '.join(degrees)} degrees")
            tiles = [to_pil_image(image.permute(2, 0, 1).cpu()) for image in (images[0], *rotated)]
            rows.append((tiles, [name, *(f"{angle}°" for angle in degrees)]))
    draw_figure(rows).save(args.out)
    print(f"{args.out}: {len(rows)} photos, each rotated {args.columns} times")


if __name__ == "__main__":
    main()
