"""A class-style DALI pipeline behind ProxyServer: a subclass of Pipeline with ops and define_graph.

Older DALI code is written in this style. ProxyServer accepts such a pipeline unchanged if its inputs are named
ExternalSource operators, without iter_setup: the loader feeds them. The same pipeline as a function that uses fn
follows the class.

Usage:

    python examples/class_style_pipeline.py              # creates photos in data/example_photos
    python examples/class_style_pipeline.py my_images    # a folder with one subfolder of images per class

The script compares the batches of both pipelines. They have the same seed, and therefore the same random crops and
flips, so their batches are bit-identical.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import Pipeline, fn, ops, pipeline_def, types
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader, ProxyServer
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")
DECODED = {
    "output_type": types.RGB,
    "hw_decoder_load": 1.0,  # only the JPEG engines of a GPU, because CUDA rounds differently
}
NORMALIZED = {
    "dtype": types.FLOAT,
    "output_layout": "CHW",
    "mean": [0.485 * 255, 0.456 * 255, 0.406 * 255],  # of ImageNet
    "std": [0.229 * 255, 0.224 * 255, 0.225 * 255],
}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--size", type=int, default=96, help="height and width of the crops, in pixels")
    option("--batch-size", type=int, default=16, help="images per batch")
    option("--workers", type=int, default=2, help="number of worker processes")
    option("--seed", type=int, default=0, help="seed of both pipelines and of the order")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "workers": 0, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


class ClassStyle(Pipeline):
    """Encoded images to randomly cropped, flipped and normalized ones, (3, size, size) float32."""

    def __init__(self, size: int, batch_size: int, device_id: int | None, seed: int) -> None:
        super().__init__(batch_size, num_threads=4, device_id=device_id, seed=seed, exec_dynamic=True)
        on_gpu = device_id is not None
        device = "gpu" if on_gpu else "cpu"  # fn infers it from the inputs
        self.encoded = ops.ExternalSource(name="images", no_copy=True)
        self.decode = ops.decoders.Image(device="mixed" if on_gpu else "cpu", **DECODED)
        self.crop = ops.RandomResizedCrop(device=device, size=[size, size])
        self.coin = ops.random.CoinFlip()
        self.normalize = ops.CropMirrorNormalize(device=device, **NORMALIZED)

    def define_graph(self) -> Any:
        images = self.crop(self.decode(self.encoded()))
        return self.normalize(images, mirror=self.coin())


@pipeline_def(num_threads=4, exec_dynamic=True)
def function_style(size: int) -> Any:
    """The same pipeline as a function."""
    encoded = fn.external_source(name="images", no_copy=True)
    on_gpu = Pipeline.current().device_id is not None
    images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", **DECODED)
    images = fn.random_resized_crop(images, size=[size, size])
    return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **NORMALIZED)


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def load(pipeline: Pipeline, root: Path, args: argparse.Namespace) -> list[list[torch.Tensor]]:
    """Return all batches of a pipeline: images (N, 3, size, size) float32 and labels (N,) int64."""
    torch.manual_seed(args.seed)
    with ProxyServer(pipeline) as server:
        folder = ImageFolder(str(root), transform=server.proxy, loader=read_bytes)
        loader = DataLoader(folder, args.batch_size, shuffle=True, num_workers=args.workers, server=server)
        return list(tqdm(loader, type(pipeline).__name__, leave=False, disable=None))


def main() -> None:
    args = parse_args()
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    common = {"size": args.size, "batch_size": args.batch_size, "device_id": gpu, "seed": args.seed}
    first, second = load(ClassStyle(**common), root, args), load(function_style(**common), root, args)
    print("batch  shape             mean   images  labels")
    all_equal = True
    for number, (expected, batch) in enumerate(zip(first, second), 1):
        equal = [torch.equal(*tensors) for tensors in zip(expected, batch)]
        words = ["equal" if each else "DIFFER" for each in equal]
        print(f"{number:>5}  {list(batch[0].shape)!s:<16}  {batch[0].mean():+.2f}  {words[0]:<6}  {words[1]}")
        all_equal = all_equal and all(equal)
    if not all_equal:
        sys.exit("the batches of the two pipelines differ. This is a bug, please report it")
    print("The batches of both pipelines are bit-identical")


if __name__ == "__main__":
    main()
