"""A custom operator in a DALI pipeline behind ProxyServer: in Python, compiled by Numba, or in C++.

The operator stretches each channel of an image to the levels 0 to 255. There are three ways to add it to DALI, from the
easiest to the fastest:

    python examples/custom_operator.py                                    # fn.python_function, on NumPy arrays
    python examples/custom_operator.py --operator numba                   # a function that Numba compiles
    python examples/custom_operator.py --plugin ./libstretch_levels.so    # a library with a compiled operator

Python functions hold the interpreter lock of the training process, so they run one at a time. Functions compiled by
Numba and C++ operators run in all of DALI's threads. Compile the library with DALI's headers and those of a CUDA
toolkit:

    g++ -std=c++20 -O2 -w -shared -fPIC examples/stretch_levels.cc -o libstretch_levels.so -I/usr/local/cuda/include \\
        $(python -c "from nvidia.dali import sysconfig as s; print(*s.get_compile_flags(), *s.get_link_flags())")

The script prints the levels before and after stretching, and compares each image with the result of the Python
function, which must be equal for every operator.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, plugin_manager, types
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from proxyloader import DataLoader, ProxyServer
from proxyloader.make_dataset import make_dataset

PHOTOS = Path("data/example_photos")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder with one subfolder of images per class")
    option("--operator", choices=("python", "numba"), default="python", help="how the function is run")
    option("--plugin", metavar="PATH", type=Path, help="use the operator stretch_levels of a library")
    option("--size", type=int, default=96, help="height and width to resize to, in pixels")
    option("--batch-size", type=int, default=16, help="images per batch")
    option("--workers", type=int, default=2, help="number of worker processes")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "workers": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def stretch(image: Any) -> Any:
    """Stretch one image, (H, W, C) uint8. DALI calls this for each image of a batch."""
    low, high = image.min((0, 1)).astype(np.int32), image.max((0, 1)).astype(np.int32)
    return ((image - low) * 255 // np.maximum(high - low, 1)).astype(np.uint8)


def stretch_into(stretched: Any, image: Any) -> None:
    """Stretch one image into an existing array, in code that Numba can compile."""
    for channel in range(image.shape[2]):
        low, high = image[:, :, channel].min(), image[:, :, channel].max()
        stretched[:, :, channel] = (image[:, :, channel].astype(np.int32) - low) * 255 // max(high - low, 1)


def stretch_in_python(images: Any) -> Any:
    return fn.python_function(images, function=stretch, output_layouts="HWC")


def stretch_in_numba(images: Any) -> Any:
    from nvidia.dali.plugin.numba.fn.experimental import numba_function  # imports numba

    signature = {"in_types": [types.UINT8], "out_types": [types.UINT8], "ins_ndim": [3], "outs_ndim": [3]}
    return numba_function(images, run_fn=stretch_into, batch_processing=False, **signature)


OPERATORS = {
    "python": stretch_in_python,
    "numba": stretch_in_numba,
    "plugin": lambda images: fn.stretch_levels(images),  # exists once the library is loaded
}


@pipeline_def(num_threads=4, exec_dynamic=True)
def stretching_pipeline(operator: str, size: int, on_gpu: bool) -> Any:
    """Encoded images to resized and stretched ones, both (size, size, 3) uint8."""
    encoded = fn.external_source(name="images", no_copy=True)
    images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
    images = fn.resize(images, size=[size, size])
    stretched = OPERATORS[operator](images.cpu())  # all three run on the CPU
    return images, stretched.gpu() if on_gpu else stretched


def load_plugin(path: Path) -> None:
    """Load the operators of a library into DALI. Exit if ``stretch_levels`` is not among them."""
    if not path.is_file():
        sys.exit(f"{path}: no such file. See --help for the command that compiles the library")
    try:
        plugin_manager.load_library(str(path.resolve()))  # absolute, so that the library path is not searched
    except RuntimeError as error:
        sys.exit(f"{path}: DALI cannot load it: {error}. Was it compiled for a different version of DALI? See --help")
    if not hasattr(fn, "stretch_levels"):
        sys.exit(f"{path}: the library has no operator stretch_levels. Was it compiled from stretch_levels.cc?")


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def prepare(args: argparse.Namespace) -> Path:
    """Load the operator and check the images. Return their folder."""
    if args.plugin is not None:
        args.operator = "plugin"
        load_plugin(args.plugin)
    if args.operator == "numba":
        try:
            import numba  # noqa: F401
        except ImportError:
            sys.exit("--operator numba: numba is not installed. pip install numba")
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} must contain one folder of images per class, none empty: {error}")
    return root


def main() -> None:
    args = parse_args()
    root = prepare(args)
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    sizes = {"size": args.size, "batch_size": args.batch_size}
    pipeline = stretching_pipeline(args.operator, on_gpu=gpu is not None, device_id=gpu, **sizes)
    total = equal = 0
    with ProxyServer(pipeline) as server:
        # The pipeline has two outputs, so a sample consists of two images and a label.
        folder = ImageFolder(str(root), transform=server.proxy, loader=read_bytes)
        loader = DataLoader(folder, args.batch_size, num_workers=args.workers, server=server)
        for number, ((images, stretched), _) in enumerate(tqdm(loader, leave=False, disable=None), 1):
            lows = [batch.amin((1, 2)).float().mean().item() for batch in (images, stretched)]
            highs = [batch.amax((1, 2)).float().mean().item() for batch in (images, stretched)]
            levels = [f"{low:.0f} to {high:.0f}" for low, high in zip(lows, highs)]
            tqdm.write(f"batch {number}: mean levels {levels[0]}, stretched {levels[1]}")
            for image, output in zip(images.cpu().numpy(), stretched.cpu().numpy()):
                equal += np.array_equal(stretch(image), output)
                total += 1
    if equal < total:
        sys.exit(f"{total - equal} of {total} images differ from the result of the Python function")
    print(f"{total} images stretched by {args.operator}, all equal to the result of the Python function")


if __name__ == "__main__":
    main()
