"""A DALI pipeline of your own behind ProxyServer: a picture and its mask get one and the same random crop and flip.

The pipeline has two inputs and two outputs. The dataset calls server.proxy with both inputs by name and gets a
stand-in for each output; the loader turns those into tensors, a batch at a time.

Launch it:

    python examples/custom_pipeline.py                # makes photographs in data/example_photos
    python examples/custom_pipeline.py my_pictures    # a folder with one folder of images for each class

The mask says where a picture is bright. So it can be computed once more, from the crop, and compared with the mask
that went through the pipeline. Look at the table: nearly all of the pixels agree (on a CPU all; the JPEG decoder of a
GPU may round to the next level). Against masks mirrored once more many do not: that is how it would look if picture
and mask had been flipped each for itself.

The same --seed gives the same batches again. But the crops and flips here are DALI's own numbers, which go on from one
batch to the next: a state_dict of the loader does not hold them, and after a break out of the loop they are others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from PIL import Image, ImageOps
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader, ProxyServer
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")
BRIGHT = 3 * 110  # where red, green and blue add up to more
ENOUGH = 0.95  # of the pixels


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of pictures; the default is made")
    option("--size", type=int, default=64, help="side of the square crops, in pixels")
    option("--batch-size", type=int, default=16, help="pictures in a batch")
    option("--workers", type=int, default=2, help="processes that read the pictures and masks")
    option("--seed", type=int, default=0, help="of the loader and the pipeline: decides order, crops and flips")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "workers": 0, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


@pipeline_def(num_threads=4, exec_dynamic=True)
def cropped_alike(size: int, decoder: str) -> Any:
    """Encoded pictures and (H, W, 1) uint8 masks in; (3, size, size) float32 in 0..1 and (1, size, size) uint8 out."""
    encoded = fn.external_source(name="image", no_copy=True)
    mask = fn.external_source(name="mask", no_copy=True, layout="HWC")
    image = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
    if decoder == "mixed":  # it takes bytes on the CPU and gives pixels on the GPU
        mask = mask.gpu()
    # Each of these is one random number for each sample. Whoever uses the same node gets the same number.
    alike = {
        "crop": (size, size),
        "crop_pos_x": fn.random.uniform(range=(0.0, 1.0)),
        "crop_pos_y": fn.random.uniform(range=(0.0, 1.0)),
        "mirror": fn.random.coin_flip(),
        "output_layout": "CHW",
    }
    image = fn.crop_mirror_normalize(image, **alike, dtype=types.FLOAT, mean=[0.0], std=[255.0])
    return image, fn.crop_mirror_normalize(mask, **alike, dtype=types.UINT8)


class PicturesAndMasks(Dataset[tuple[Any, Any]]):
    """Pictures and where they are bright. A data set for segmentation would read its masks from files here."""

    def __init__(self, root: Path, proxy: Any, size: int) -> None:
        self.paths = [path for path, _ in ImageFolder(str(root)).samples]
        self.proxy, self.size = proxy, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path = Path(self.paths[index])
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file).convert("RGB")  # upright, as DALI's decoder gives it
        if min(picture.size) < self.size:
            raise ValueError(f"{path}: {picture.size} pixels are less than the crop of {self.size}. Lower --size")
        mask = np.asarray(picture).sum(2, keepdims=True) > BRIGHT
        return self.proxy(image=path.read_bytes(), mask=mask.astype(np.uint8))


def agreement(image: torch.Tensor, mask: torch.Tensor) -> float:
    """The share of pixels where a mask says what the picture says."""
    bright = (image * 255).round().sum(1, keepdim=True) > BRIGHT
    return (bright == mask).float().mean().item()


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    if not root.is_dir():
        sys.exit(f"{root}: no such folder. Without a folder, the script makes one in {PHOTOS}")
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} is to hold a folder of pictures for each class, and none empty: {error}")
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    decoder = "cpu" if gpu is None else "mixed"
    pipeline = cropped_alike(args.size, decoder, batch_size=args.batch_size, device_id=gpu, seed=args.seed)
    worst = 1.0
    with ProxyServer(pipeline) as server:
        dataset = PicturesAndMasks(root, server.proxy, args.size)
        workers = {"num_workers": args.workers, "server": server}
        loader = DataLoader(dataset, args.batch_size, shuffle=True, seed=args.seed, **workers)
        print("batch  pictures              masks                 bright  mask fits  mirrored mask fits")
        for number, (images, masks) in enumerate(tqdm(loader, leave=False, disable=None), 1):
            fits, mirrored = agreement(images, masks), agreement(images, masks.flip(-1))
            bright = masks.float().mean().item()
            shapes = f"{list(images.shape)!s:<20}  {list(masks.shape)!s:<20}"
            tqdm.write(f"{number:>5}  {shapes}  {bright:>6.1%}  {fits:>9.2%}  {mirrored:>18.2%}")
            worst = min(worst, fits)
    if worst < ENOUGH:
        sys.exit(f"a mask fits its picture in {worst:.2%} of the pixels only. That should not be: please report it")
    print(f"Every mask went with its picture; decoded on {'the CPU' if gpu is None else 'the GPU'}")


if __name__ == "__main__":
    main()
