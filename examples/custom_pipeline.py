"""A custom DALI pipeline behind ProxyServer, which applies the same random crop and flip to an image and its mask.

The pipeline has two inputs and two outputs. The dataset calls server.proxy with both inputs by name, and gets a
placeholder for each output. The loader replaces the placeholders of a batch with tensors.

Usage:

    python examples/custom_pipeline.py              # creates photos in data/example_photos
    python examples/custom_pipeline.py my_images    # a folder with one subfolder of images per class

The mask marks the bright pixels of an image. The script recomputes it from the cropped image, and compares the two:
all pixels must agree on a CPU, and nearly all on a GPU, whose JPEG decoder may round differently. The last column shows
how many would agree if image and mask were flipped independently.

The same --seed yields the same batches. DALI draws the crops and flips, so the loader's state_dict does not include
their random state, and they change after a break.
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
BRIGHT = 3 * 110  # minimum sum of the channels of a bright pixel
MIN_AGREEMENT = 0.95  # fraction of pixels


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--size", type=int, default=64, help="height and width of the crops, in pixels")
    option("--batch-size", type=int, default=16, help="images per batch")
    option("--workers", type=int, default=2, help="number of worker processes")
    option("--seed", type=int, default=0, help="seed of the order, crops and flips")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "workers": 0, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


@pipeline_def(num_threads=4, exec_dynamic=True)
def paired_crops(size: int, decoder: str) -> Any:
    """Encoded images and masks (H, W, 1) to crops: (3, size, size) float32 in [0, 1] and (1, size, size) uint8."""
    encoded = fn.external_source(name="image", no_copy=True)
    mask = fn.external_source(name="mask", no_copy=True, layout="HWC")
    image = fn.decoders.image(encoded, device=decoder, output_type=types.RGB)
    if decoder == "mixed":  # the decoder returns pixels on the GPU
        mask = mask.gpu()
    # Each node draws one number per sample. Operators that use the same node get the same number.
    shared = {
        "crop": (size, size),
        "crop_pos_x": fn.random.uniform(range=(0.0, 1.0)),
        "crop_pos_y": fn.random.uniform(range=(0.0, 1.0)),
        "mirror": fn.random.coin_flip(),
        "output_layout": "CHW",
    }
    image = fn.crop_mirror_normalize(image, **shared, dtype=types.FLOAT, mean=[0.0], std=[255.0])
    return image, fn.crop_mirror_normalize(mask, **shared, dtype=types.UINT8)


class ImagesAndMasks(Dataset[tuple[Any, Any]]):
    """Images and masks of their bright pixels. A segmentation dataset would read the masks from files."""

    def __init__(self, root: Path, proxy: Any, size: int) -> None:
        self.paths = [path for path, _ in ImageFolder(str(root)).samples]
        self.proxy, self.size = proxy, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path = Path(self.paths[index])
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")  # upright, like the output of DALI's decoder
        if min(image.size) < self.size:
            raise ValueError(f"{path}: the image of {image.size} is smaller than the crop. Lower --size")
        mask = np.asarray(image).sum(2, keepdims=True) > BRIGHT
        return self.proxy(image=path.read_bytes(), mask=mask.astype(np.uint8))


def agreement(image: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the fraction of pixels for which the mask matches the image."""
    bright = (image * 255).round().sum(1, keepdim=True) > BRIGHT
    return (bright == mask).float().mean().item()


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    decoder = "cpu" if gpu is None else "mixed"
    pipeline = paired_crops(args.size, decoder, batch_size=args.batch_size, device_id=gpu, seed=args.seed)
    lowest = 1.0
    with ProxyServer(pipeline) as server:
        dataset = ImagesAndMasks(root, server.proxy, args.size)
        workers = {"num_workers": args.workers, "server": server}
        loader = DataLoader(dataset, args.batch_size, shuffle=True, seed=args.seed, **workers)
        print("batch  images                masks                 bright  mask agrees  flipped mask agrees")
        for number, (images, masks) in enumerate(tqdm(loader, leave=False, disable=None), 1):
            agrees, flipped = agreement(images, masks), agreement(images, masks.flip(-1))
            bright = masks.float().mean().item()
            shapes = f"{list(images.shape)!s:<20}  {list(masks.shape)!s:<20}"
            tqdm.write(f"{number:>5}  {shapes}  {bright:>6.1%}  {agrees:>11.2%}  {flipped:>19.2%}")
            lowest = min(lowest, agrees)
    if lowest < MIN_AGREEMENT:
        sys.exit(f"masks agree with their images in only {lowest:.2%} of the pixels. This is a bug, please report it")
    print(f"All masks agree with their images; decoded on {'the CPU' if gpu is None else 'the GPU'}")


if __name__ == "__main__":
    main()
