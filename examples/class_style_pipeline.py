"""A DALI pipeline in the style of classes behind ProxyServer: a subclass of Pipeline with ops and define_graph.

Older DALI code is written so. ProxyServer takes such a pipeline as it is, if its inputs are ExternalSource operators
with names: then nothing is fed in iter_setup, the loader does that. The same pipeline in today's style, a function
with fn, stands below it.

Launch it:

    python examples/class_style_pipeline.py                # makes photographs in data/example_photos
    python examples/class_style_pipeline.py my_pictures    # a folder with one folder of images for each class

Look at the table: the two pipelines have the same seed, so their random crops and flips are the same, and the batches
are equal, bit for bit.
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
    "hw_decoder_load": 1.0,  # all to a GPU's JPEG engines: its other decoder rounds in another way
}
NORMALIZED = {
    "dtype": types.FLOAT,
    "output_layout": "CHW",
    "mean": [0.485 * 255, 0.456 * 255, 0.406 * 255],  # those of ImageNet
    "std": [0.229 * 255, 0.224 * 255, 0.225 * 255],
}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of pictures; the default is made")
    option("--size", type=int, default=96, help="side of the square that a batch has, in pixels")
    option("--batch-size", type=int, default=16, help="pictures in a batch")
    option("--workers", type=int, default=2, help="processes that read the files")
    option("--seed", type=int, default=0, help="of both pipelines, and of the order of the pictures")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "workers": 0, "seed": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


class ClassStyle(Pipeline):
    """Encoded pictures in; (3, size, size) float32, randomly cropped, mirrored and normalized, out."""

    def __init__(self, size: int, batch_size: int, device_id: int | None, seed: int) -> None:
        super().__init__(batch_size, num_threads=4, device_id=device_id, seed=seed, exec_dynamic=True)
        on_gpu = device_id is not None
        device = "gpu" if on_gpu else "cpu"  # ops are told where they work; fn sees it from their inputs
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
    """The same."""
    encoded = fn.external_source(name="images", no_copy=True)
    on_gpu = Pipeline.current().device_id is not None
    images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", **DECODED)
    images = fn.random_resized_crop(images, size=[size, size])
    return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **NORMALIZED)


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def load(pipeline: Pipeline, root: Path, args: argparse.Namespace) -> list[list[torch.Tensor]]:
    """All batches of a pipeline: images (N, 3, size, size) float32, and labels (N,) int64."""
    torch.manual_seed(args.seed)
    with ProxyServer(pipeline) as server:
        folder = ImageFolder(str(root), transform=server.proxy, loader=read_bytes)
        loader = DataLoader(folder, args.batch_size, shuffle=True, num_workers=args.workers, server=server)
        return list(tqdm(loader, type(pipeline).__name__, leave=False, disable=None))


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
    common = {"size": args.size, "batch_size": args.batch_size, "device_id": gpu, "seed": args.seed}
    by_class, by_function = load(ClassStyle(**common), root, args), load(function_style(**common), root, args)
    print("batch  shape             mean   images  labels")
    all_equal = True
    for number, (theirs, ours) in enumerate(zip(by_class, by_function), 1):
        same = [torch.equal(their, our) for their, our in zip(theirs, ours)]
        words = ["equal" if each else "OTHER" for each in same]
        print(f"{number:>5}  {list(theirs[0].shape)!s:<16}  {theirs[0].mean():+.2f}  {words[0]:<6}  {words[1]}")
        all_equal = all_equal and all(same)
    if not all_equal:
        sys.exit("the two pipelines gave other batches. That should not be: please report it")
    print("The class and the function give the same batches, bit for bit")


if __name__ == "__main__":
    main()
