"""The command line. One function per command declares its options; its docstring is the help text.

A command imports its modules when it runs, so ``--help`` and usage errors do not wait for torch.
"""

import argparse
import functools
import importlib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ProxyLoaderError
from .bench import AUGMENTATIONS, SIZES, TASKS

Parser = argparse.ArgumentParser
DATA_HELP = "your own ImageFolder (default: synthetic photographs, created once)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 130 for Ctrl-C, and 1 for an error or if the command fails."""
    options = vars(_parser().parse_args(argv))
    (module, function), debug = options.pop("handler"), options.pop("debug")
    try:
        return int(bool(getattr(importlib.import_module(module, __package__), function)(**options)))
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as in a shell
    except (ProxyLoaderError, ModuleNotFoundError, ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        print(f"proxyloader: error: {_format_error(error)}", file=sys.stderr)
        return 1


def _non_negative(text: str, minimum: int = 0) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"must be an integer >= {minimum}, got {text!r}")
    return int(text)


_positive = functools.partial(_non_negative, minimum=1)


def _size(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+)x(\d+)", text)):
        raise argparse.ArgumentTypeError(f"must be a size such as 500x375, got {text!r}")
    return int(match[1]), int(match[2])


def _demo(parser: Parser) -> None:
    """Compare this loader with torch's on this machine.

    Runs both loaders on the same photographs with the same seed, prints their speeds and the differences between their
    pixels, and saves a contact sheet. Takes about a minute on two cores.

    Exit status 1: the batches differ more than documented.

    Example:
      proxyloader demo
      proxyloader demo --data /data/imagenet/train --images 8192 --workers 8
    """
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    _option(parser, "--images", "N", _positive, "number of images to create, or to use from DIR", 768)
    _option(parser, "--batch-size", "N", _positive, "images per batch (default: 256 with a GPU, 64 without)")
    _option(parser, "--workers", "N", _non_negative, "workers of each loader (default: one per core, at most 16)")
    _option(parser, "--device", "DEVICE", str, "cuda, cuda:1 or cpu (default: the GPU if there is one)")
    _option(parser, "--out", "PNG", Path, "contact sheet to write (default: demo.png in ~/.cache/proxyloader)")


def _diagnose(parser: Parser) -> None:
    """Measure what limits a training loop, and the speedup with this loader.

    Runs a training script and measures the loop over its largest DataLoader, torch's or proxyloader's: the unmodified
    loop, its step alone with one repeated batch, both kinds of loader alone, and other numbers of workers. Then stops
    the script and reports the bottleneck (input, disk, model, CPU of the loop, or cores) and the speed with each
    loader. Until then, the script trains in a single process, possibly for more steps than it has. Requires psutil. In
    your own code, use proxyloader.diagnosis(loader).

    Exit status: that of the script if it fails; 1 if no loop was measured.

    Example:
      proxyloader diagnose train.py --batch-size 256
      proxyloader diagnose --seconds 120 train.py --epochs 90
    """
    _option(parser, "--seconds", "S", _positive, "approximate duration of the measurement", 60)
    _option(parser, "script", "SCRIPT", Path, "the training script")
    _option(parser, "arguments", "...", str, "its arguments", nargs=argparse.REMAINDER)


def _bench(parser: Parser) -> None:
    """Compare the throughput of this loader with other ways to load the same images.

    Each case loads the same JPEG files, crops at random, resizes to 224, flips and normalizes, in its own process.
    First, it is tuned by trying several numbers of workers, numbers of DALI threads and JPEG engine loads. Then all
    cases run in interleaved rounds, tuned and with default settings. Prints the medians of the rounds, appends a record
    to a results file, and saves a plot next to it. --first-epochs instead measures three epochs of each case in a new
    process, with the files in the page cache, without persistent workers, and with default settings.

    --task detection, segmentation and clips load photographs with boxes, with masks, or as clips of 16, by pipelines as
    users write them, with torch, proxyloader and, if installed and able to, SPDL, dataloader-rs, and Kornia on the GPU.
    The targets of proxyloader's first epoch are compared with torch's from the same seed.

    Requires psutil, and matplotlib for the plot: in a clone of proxyloader, pip install -e '.[bench]'.

    Exit status 1: proxyloader or all cases failed, or targets differ.

    Example:
      proxyloader bench
      proxyloader bench --data /data/imagenet/train --only torch proxyloader iterator
      proxyloader bench --model resnet50 --dtype float16 --channels-last
      proxyloader bench --task detection --only torch proxyloader proxyloader-4-workers
    """
    task_help = "what to load (default: classification; the others are called tasks below)"
    _option(parser, "--task", None, str, task_help, "classification", choices=TASKS)
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    size_help = "96x96, 500x375, also with progressive JPEGs, 3000x2000, 640x480 (default: imagenet; coco for tasks)"
    _option(parser, "--size", None, str, size_help, choices=SIZES)
    images_help = "synthetic photographs (default: 8192 with a GPU, 1024 without; fewer for camera and coco)"
    _option(parser, "--images", "N", _positive, images_help)
    passes_help = "passes over the images per loop (default: 6 with a GPU, 1 without; for tasks, --seconds long)"
    _option(parser, "--passes", "N", _positive, passes_help)
    batch_help = "images per batch (default: 256; 64 for camera; 16, or 8 clips, for tasks)"
    _option(parser, "--batch-size", "N", _positive, batch_help)
    _option(parser, "--device", None, str, "of the batches (default: the GPU if there is one)", choices=("cuda", "cpu"))
    _option(parser, "--dtype", None, str, "of the images", "float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--channels-last", action="store_true", help="load channels-last batches")
    augment_help = f"also run torch and proxyloader with these after the flip: {', '.join(AUGMENTATIONS)}"
    _option(parser, "--augment", "NAME", str, augment_help, [], nargs="+", choices=AUGMENTATIONS)
    datasets_help = "also run torch and proxyloader with each of these datasets"
    _option(parser, "--datasets", None, str, datasets_help, [], nargs="+", choices=("OwnDataset", "HuggingFace"))
    _option(parser, "--model", "NAME", str, "torchvision model to train on the batches, such as resnet50", "none")
    workers_help = "numbers of workers to try (default: 4, 8, 16, and a quarter, half and all of the cores)"
    _option(parser, "--workers", "N", _non_negative, workers_help, nargs="+")
    threads_help = "numbers of DALI threads to try (default: like --workers; without a GPU also cores + 1)"
    _option(parser, "--threads", "N", _positive, threads_help, nargs="+")
    load_help = "fractions of the JPEGs to try for the JPEG engines, in [0, 1] (default: 0.65, as in DALI, and 1.0)"
    _option(parser, "--hw-decoder-load", "FRACTION", float, load_help, [0.65, 1.0], nargs="+")
    _option(parser, "--rounds", "N", _positive, "number of rounds", 5)
    _option(parser, "--seconds", "S", float, "minimum duration of a case in a round", 3.0)
    _option(parser, "--only", "CASE", str, "cases or pipelines to run; --list names all of them", nargs="+")
    parser.add_argument("--first-epochs", action="store_true", help="measure only the first epochs")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    _option(parser, "--out", "JSONL", Path, "results file", Path("bench.jsonl"))


def _doctor(parser: Parser) -> None:
    """Check this machine and the installed packages.

    Checks the driver, torch, torchvision, DALI and nvImageCodec and their compatibility, the GPUs, /dev/shm, limits and
    cores. Decodes reference images of each format with each decoder, and compares the pixels with Pillow's.

    Exit status 1: a check failed. Warnings do not change it.

    Example:
      proxyloader doctor
      proxyloader doctor --json
    """
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON, for bug reports")
    _option(parser, "--limit", "S", _positive, "timeout of each child process, in seconds", 120)


def _verify(parser: Parser) -> None:
    """Find the damaged files of a dataset.

    Reads all files that ImageFolder would load, on all cores. Lists those that are damaged, truncated, unreadable, or
    in a format other than their suffix says, with the reason.

    Exit status 1: there are such files.

    Example:
      proxyloader verify /data/imagenet/train
    """
    _option(parser, "folder", "DIR", Path, "root of the dataset, or a folder of images")
    _option(parser, "--processes", "N", _positive, "number of processes (default: one per core)")


def _make_dataset(parser: Parser) -> None:
    """Write synthetic photographs for experiments.

    Creates a folder for torchvision.datasets.ImageFolder. The pictures compress and decode like photographs, and
    networks learn the classes in a few epochs. The same options give the same files, and existing files are kept.

    Example:
      proxyloader make-dataset /tmp/photos --images 4096 --size 500x375
    """
    _option(parser, "folder", "DIR", Path, "folder of the dataset; created if it is missing")
    _option(parser, "--images", "N", int, "number of photographs", 1024)
    _option(parser, "--size", "WxH", _size, "size of most photographs in pixels (default: 500x375)", (500, 375))
    _option(parser, "--classes", "N", int, "number of classes", 10)
    _option(parser, "--seed", "N", int, "seed of all random numbers", 0)
    _option(parser, "--progressive", "FRACTION", float, "fraction of progressive JPEGs", 0.0)
    _option(parser, "--processes", "N", int, "number of processes (default: one per core, or fewer)")


def make_photographs(folder: Path, **options: Any) -> None:
    from ..make_dataset import make_dataset

    sizes = [path.stat().st_size for path in make_dataset(folder, **options).glob("class_*/*")]
    print(f"{folder}: {len(sizes):,} images, {sum(sizes) / 1e6:,.1f} MB")


def _explain(parser: Parser) -> None:
    """Show how a worker handles a transform or a dataset.

    Runs a transform on a synthetic photograph, or reads a sample of a dataset, a few times with different seeds. Prints
    the recorded calls, the line of code that uses pixels, what transforms the images with and without a GPU,
    and the time that an image takes a worker. No GPU is required.

    Exit status 1: a worker for a GPU decodes the image, because its pixels are used.

    Example:
      proxyloader explain train:transform
      proxyloader explain torchvision.models:ResNet50_Weights.DEFAULT.transforms
    """
    _option(parser, "name", "NAME", str, "module:attribute of a transform or dataset, or a function returning one")


COMMANDS: dict[Callable[[Parser], None], tuple[str, str]] = {
    _demo: (".demo", "demo"),
    _diagnose: (".diagnose", "diagnose_script"),
    _bench: (".bench.command", "bench"),
    _doctor: (".doctor", "doctor"),
    _verify: (".verify", "verify"),
    _make_dataset: (".cli", "make_photographs"),
    _explain: (".explain", "explain_named"),
}
"""Module and function that implement each command. The function takes the options."""


def _parser() -> Parser:
    parser = Parser(
        prog="proxyloader",
        description="Decode and augment images on the GPU by changing one import:\n\n"
        "  from proxyloader import DataLoader      # was: from torch.utils.data import DataLoader",
        epilog="start here:\n  proxyloader demo\n\nproxyloader COMMAND --help explains a command and its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"proxyloader {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    fill = functools.partial(textwrap.fill, width=shutil.get_terminal_size().columns - 2, break_on_hyphens=False)
    for declare, handler in COMMANDS.items():
        text, _, examples = inspect.cleandoc(declare.__doc__ or "").partition("\n\nExample:\n")
        summary = text.partition(".\n")[0]
        command: Parser = commands.add_parser(
            declare.__name__[1:].replace("_", "-"),
            help=summary[:1].lower() + summary[1:],
            description="\n\n".join(map(fill, text.split("\n\n"))),
            epilog=f"example:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(handler=handler)
        declare(command)
    return parser


def _option(
    parser: Any, name: str, metavar: str | None, type: Callable[[str], Any], text: str, default: Any = None, **kw: Any
) -> None:
    """Declare an option. Its help ends with the default, unless there is none or the text describes it."""
    suffix = "" if default in (None, []) or "(default: " in text else "(default: %(default)s)"
    parser.add_argument(name, metavar=metavar, type=type, default=default, help=f"{text} {suffix}".strip(), **kw)


def _format_error(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in ("matplotlib", "psutil"):
        return f"{error.name} is not installed. In a clone of proxyloader, run pip install -e '.[bench]'"
    if isinstance(error, OSError) and error.filename and not isinstance(error, ProxyLoaderError):
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The message of a worker's error is a traceback, whose last line is the original message.
    return lines[-1] if "Traceback (most recent call last):" in str(error) else " ".join(lines)
