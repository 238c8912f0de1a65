"""What an augmentation does, as a picture: photographs, each turned at random several times, with the angles.

The pipeline is the one that DALI's introduction has for random rotations: a random angle for each image, and an
operator that takes it. It has three outputs here, so the gallery knows what each picture was before, and by how much
it was turned.

Launch it:

    python examples/rotation_gallery.py                       # makes photographs in data/example_photos
    python examples/rotation_gallery.py my_pictures --angle 90 --columns 10     # of one folder of images for each class

It prints the angles, and writes the gallery to --out. Look there: each row is one photograph, first as it is; a
positive angle turns it to the left, and the corners that turning leaves empty are black. Another --seed gives other
angles, the same seed the same.
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
MARGIN, GAP, CAPTION = 16, 6, 24  # of the gallery, in pixels


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of pictures; the default is made")
    option("--angle", type=float, default=30, help="most that a picture is turned, in degrees, to either side")
    option("--rows", type=int, default=4, help="photographs")
    option("--columns", type=int, default=6, help="how often each is turned")
    option("--size", type=int, default=160, help="side of a picture in the gallery, in pixels")
    option("--seed", type=int, default=0, help="of the pipeline: decides the angles")
    option("--out", type=Path, default=Path("rotation_gallery.png"), help="where the gallery goes")
    args = parser.parse_args()
    for name, least in {"angle": 0.1, "rows": 1, "columns": 1, "size": 1, "seed": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    if args.out.suffix.lower() not in FORMATS:
        sys.exit(f"--out {args.out}: the name of the gallery ends with {', '.join(FORMATS)}")
    return args


@pipeline_def(num_threads=4, exec_dynamic=True)
def randomly_turned(angle: float, size: int, decoder: str) -> Any:
    """Encoded pictures in; (size, size, 3) uint8 as they were and turned, and the angle in degrees, out."""
    encoded = fn.external_source(name="images", no_copy=True)
    images = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
    images = fn.crop(fn.resize(images, resize_shorter=size), crop=(size, size))
    angles = fn.random.uniform(range=(-angle, angle))
    return images, fn.rotate(images, angle=angles, fill_value=0, keep_size=True), angles


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def gallery(rows: list[tuple[list[Image.Image], list[str]]]) -> Image.Image:
    """Rows of pictures of one size, each picture with its caption above it."""
    size, font = rows[0][0][0].width, ImageFont.load_default(size=14)
    across, down = len(rows[0][0]) * (size + GAP) - GAP, len(rows) * (size + CAPTION)
    sheet = Image.new("RGB", (across + 2 * MARGIN, down + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (pictures, captions) in enumerate(rows):
        top = MARGIN + row * (size + CAPTION) + CAPTION
        for column, (picture, caption) in enumerate(zip(pictures, captions)):
            left = MARGIN + column * (size + GAP)
            draw.text((left, top - 6), caption, "black", font, anchor="ls")
            sheet.paste(picture, (left, top))
    return sheet


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    if not root.is_dir():
        sys.exit(f"{root}: no such folder. Without a folder, the script makes one in {PHOTOS}")
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} is to hold a folder of pictures for each class, and none empty: {error}")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {args.out}: its folder cannot be made: {error.strerror}")
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    graph = {"angle": args.angle, "size": args.size, "decoder": "cpu" if gpu is None else "mixed"}
    pipeline = randomly_turned(**graph, batch_size=args.columns, device_id=gpu, seed=args.seed)
    rows = []
    with ProxyServer(pipeline) as server:
        folder = ImageFolder(str(root), transform=server.proxy, loader=read_bytes)
        # Each photograph as often as it is to be turned: so a batch is a row. They are taken from all over the folder.
        if args.rows > len(folder):
            print(f"{root} holds {len(folder)} pictures, so there are as many rows")
        chosen = torch.linspace(0, len(folder) - 1, min(args.rows, len(folder))).long()
        dataset = Subset(folder, chosen.repeat_interleave(args.columns).tolist())
        loader = DataLoader(dataset, args.columns, server=server)
        for (images, turned, angles), _ in tqdm(loader, leave=False, disable=None):
            degrees = [f"{angle:+.1f}" for angle in angles.flatten().tolist()]
            name = Path(folder.samples[chosen[len(rows)]][0]).name
            tqdm.write(f"{name}: turned by {' '.join(degrees)} degrees")
            pictures = [to_pil_image(image.permute(2, 0, 1).cpu()) for image in (images[0], *turned)]
            rows.append((pictures, [name, *(f"{angle}°" for angle in degrees)]))
    gallery(rows).save(args.out)
    print(f"{args.out}: a gallery of {len(rows)} photographs, each turned {args.columns} times")


if __name__ == "__main__":
    main()
