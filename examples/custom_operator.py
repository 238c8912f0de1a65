"""An operator of your own in a DALI pipeline behind ProxyServer, written in Python, for numba, or in C++.

The operator stretches each channel of an image: its darkest level becomes 0, its brightest 255. There are three ways to
give it to DALI, from easy to fast:

    python examples/custom_operator.py                    # fn.python_function calls a function on numpy arrays
    python examples/custom_operator.py --operator numba   # numba compiles a function first (pip install numba)
    python examples/custom_operator.py --plugin ./libstretch_levels.so     # a library with a compiled operator

Python's functions run one at a time, under the interpreter's lock, in the process that trains; those of numba and of a
library run in all of DALI's threads. To compile the library, with the headers that DALI brings and those of a CUDA
toolkit:

    g++ -std=c++20 -O2 -w -shared -fPIC examples/stretch_levels.cc -o libstretch_levels.so -I/usr/local/cuda/include \\
        $(python -c "from nvidia.dali import sysconfig as s; print(*s.get_compile_flags(), *s.get_link_flags())")

Look at the levels that it prints: stretched, every channel goes from 0 to 255. And each picture is compared with what
the Python function makes of it, so whichever operator you choose, the last line is to say that all are equal.
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
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, nargs="?", default=PHOTOS, help="folder of pictures, by class; the default is made")
    option("--operator", choices=("python", "numba"), default="python", help="who runs the function")
    option("--plugin", metavar="PATH", type=Path, help="use the operator stretch_levels of this library instead")
    option("--size", type=int, default=96, help="side that pictures are resized to, in pixels")
    option("--batch-size", type=int, default=16, help="pictures in a batch")
    option("--workers", type=int, default=2, help="processes that read the files")
    args = parser.parse_args()
    for name, least in {"size": 1, "batch_size": 1, "workers": 0}.items():
        if getattr(args, name) < least:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


def stretch(image: Any) -> Any:
    """(H, W, C) uint8 to the same. DALI calls it for each image of a batch."""
    low, high = image.min((0, 1)).astype(np.int32), image.max((0, 1)).astype(np.int32)
    return ((image - low) * 255 // np.maximum(high - low, 1)).astype(np.uint8)


def stretch_for_numba(stretched: Any, image: Any) -> None:
    """The same as numba can compile it: it fills an output that is there already, a channel at a time."""
    for channel in range(image.shape[2]):
        low, high = image[:, :, channel].min(), image[:, :, channel].max()
        stretched[:, :, channel] = (image[:, :, channel].astype(np.int32) - low) * 255 // max(high - low, 1)


def by_python(images: Any) -> Any:
    return fn.python_function(images, function=stretch, output_layouts="HWC")


def by_numba(images: Any) -> Any:
    from nvidia.dali.plugin.numba.fn.experimental import numba_function  # which imports numba

    kinds = {"in_types": [types.UINT8], "out_types": [types.UINT8], "ins_ndim": [3], "outs_ndim": [3]}
    return numba_function(images, run_fn=stretch_for_numba, batch_processing=False, **kinds)


def by_plugin(images: Any) -> Any:
    return fn.stretch_levels(images)


OPERATORS = {"python": by_python, "numba": by_numba, "plugin": by_plugin}


@pipeline_def(num_threads=4, exec_dynamic=True)
def stretched_pictures(operator: str, size: int, on_gpu: bool) -> Any:
    """Encoded pictures in; (size, size, 3) uint8 out, as they were and stretched."""
    encoded = fn.external_source(name="images", no_copy=True)
    images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
    images = fn.resize(images, size=[size, size])
    stretched = OPERATORS[operator](images.cpu())  # all three work on the CPU; what is there already stays there
    return images, stretched.gpu() if on_gpu else stretched


def load_plugin(path: Path) -> None:
    """Make a library's operators known to DALI; ends the script where there is no ``stretch_levels`` among them."""
    if not path.is_file():
        sys.exit(f"{path}: no such file. --plugin takes a compiled library; how to make one: see --help")
    try:
        plugin_manager.load_library(str(path.resolve()))  # absolute: a bare name would be looked for elsewhere
    except RuntimeError as error:
        sys.exit(f"{path}: DALI cannot load it: {error}. Compiled for another DALI? See --help")
    if not hasattr(fn, "stretch_levels"):
        sys.exit(f"{path}: was loaded, and has no operator stretch_levels. Is it the library of stretch_levels.cc?")


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def check(args: argparse.Namespace) -> Path:
    """See to the operator and the pictures; gives the pictures' folder."""
    if args.plugin is not None:
        args.operator = "plugin"
        load_plugin(args.plugin)
    if args.operator == "numba":
        try:
            import numba  # noqa: F401
        except ImportError:
            sys.exit("--operator numba: numba is not installed. pip install numba")
    root = make_dataset(PHOTOS, images=64) if args.data == PHOTOS else args.data
    if not root.is_dir():
        sys.exit(f"{root}: no such folder. Without a folder, the script makes one in {PHOTOS}")
    try:
        ImageFolder(str(root))
    except FileNotFoundError as error:
        sys.exit(f"{root} is to hold a folder of pictures for each class, and none empty: {error}")
    return root


def main() -> None:
    args = parse_args()
    root = check(args)
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    size = {"size": args.size, "batch_size": args.batch_size}
    pipeline = stretched_pictures(args.operator, on_gpu=gpu is not None, device_id=gpu, **size)
    pictures = equal = 0
    with ProxyServer(pipeline) as server:
        # The pipeline has two outputs, so the folder gives two images and a label for each file.
        folder = ImageFolder(str(root), transform=server.proxy, loader=read_bytes)
        loader = DataLoader(folder, args.batch_size, num_workers=args.workers, server=server)
        for number, ((images, stretched), _) in enumerate(tqdm(loader, leave=False, disable=None), 1):
            lows = [batch.amin((1, 2)).float().mean().item() for batch in (images, stretched)]
            highs = [batch.amax((1, 2)).float().mean().item() for batch in (images, stretched)]
            levels = [f"{low:.0f} to {high:.0f}" for low, high in zip(lows, highs)]
            tqdm.write(f"batch {number}: levels {levels[0]} in the mean; stretched {levels[1]}")
            for image, ours in zip(images.cpu().numpy(), stretched.cpu().numpy()):
                equal += np.array_equal(stretch(image), ours)
                pictures += 1
    if equal < pictures:
        sys.exit(f"{pictures - equal} of {pictures} pictures are not what Python's function makes of them")
    print(f"{pictures} pictures stretched by {args.operator}, all equal to what Python's function makes of them")


if __name__ == "__main__":
    main()
