"""The command ``proxyloader``: a function for each verb, which declares its options and what runs it.

Verbs import their modules when they run, so ``--help`` and usage errors do not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ProxyLoaderError

Parser = argparse.ArgumentParser

INTERRUPTED = 130  # what a shell reports for Ctrl-C: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return the exit status.

    Errors of the package, of arguments and of the system end in one line on stderr and status 1, Ctrl-C in status 130.
    argparse raises SystemExit for usage errors, ``--help`` and ``--version``.
    """
    parsed, unknown = _parser().parse_known_args(argv)
    options = vars(parsed)
    run, debug, verb = options.pop("run"), options.pop("debug"), options.pop("parser")
    if unknown:
        verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(run(**options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ProxyLoaderError, ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        print(f"proxyloader: error: {_in_one_line(error)}", file=sys.stderr)
        return 1


def _calls(module: str, function: str) -> Callable[..., int]:
    """Return a function that imports a function of the tools and calls it."""

    def run(**options: Any) -> int:
        with _needs_extra():
            return int(getattr(importlib.import_module(f".{module}", __package__), function)(**options))

    return run


def _make_dataset(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "make-dataset",
        _run_make_dataset,
        "write synthetic photographs to experiment with",
        "Creates a folder for torchvision.datasets.ImageFolder. The textures, light and noise\n"
        "of the pictures compress and decode like photographs, and networks learn the classes\n"
        "in a few epochs. The same options give the same files. Existing files are kept, and\n"
        "an interrupted dataset is completed.",
        "proxyloader make-dataset /tmp/photos --images 4096 --size 500x375",
    )
    _option(parser, "folder", "DIR", Path, "folder of the dataset; created if it is missing")
    _option(parser, "--images", "N", int, "number of photographs", 1024)
    size_help = "size of most photographs in pixels; others are upright, square, larger or smaller (default: 500x375)"
    _option(parser, "--size", "WxH", _size, size_help, (500, 375))
    _option(parser, "--classes", "N", int, "number of classes", 10)
    _option(parser, "--seed", "N", int, "seed of all random numbers", 0)
    _option(parser, "--progressive", "SHARE", float, "share of progressive JPEGs, 0 to 1", 0.0)
    _option(parser, "--processes", "N", int, "number of processes (default: one per core, or fewer)")


def _run_make_dataset(folder: Path, **options: Any) -> int:
    from ..make_dataset import make_dataset

    sizes = [path.stat().st_size for path in make_dataset(folder, **options).glob("class_*/*")]
    print(f"{folder}: {len(sizes):,} images, {sum(sizes) / 1e6:,.1f} MB")
    return 0


def _verify(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "verify",
        _run_verify,
        "find the damaged files of a data set",
        "Reads the files that ImageFolder reads to their ends, on all cores. It lists those that\n"
        "are damaged, truncated, of another format than their names say, or unreadable, each\n"
        "with the reason.\n\n"
        "Exit status 1: there are such files.",
        "proxyloader verify /data/imagenet/train\n"
        "  proxyloader verify /data/imagenet/train --sound sound.txt\n"
        "  proxyloader verify /data/web --copy /data/web-without-damaged",
    )
    _option(parser, "folder", "DIR", Path, "the data set; folders in it are searched, too")
    _option(parser, "--processes", "N", int, "that read (default: one for each core)")
    _option(parser, "--sound", "FILE", Path, "write the paths of the sound files to this file")
    _option(parser, "--copy", "DIR", Path, "make a copy of the data set without the bad files, of hard links if it can")


def _run_verify(**options: Any) -> int:
    from .verify import verify

    return 1 if verify(**options) else 0


def _demo(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "demo",
        _calls("demo", "demo"),
        "compare this loader with torch's on this machine",
        "Runs both loaders over the same photographs with the same seed. Prints their speeds\n"
        "and how much their pixels differ, writes a contact sheet of one batch of both, and\n"
        "trains a ResNet-18 for a few steps. Takes about a minute on two cores.\n\n"
        "Exit status 1: the batches differ by more than documented.",
        "proxyloader demo\n  proxyloader demo --data /data/imagenet/train --images 8192 --workers 8",
    )
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    _option(parser, "--images", "N", int, "number of images to create, or to use from DIR", 768)
    _option(parser, "--batch-size", "N", int, "images per batch (default: 256 with a GPU, 64 without)")
    _option(parser, "--workers", "N", int, "workers of each loader (default: one per core, at most 16)")
    _option(parser, "--device", "DEVICE", _device, "cuda, cuda:1 or cpu (default: the GPU if there is one)")
    _option(parser, "--steps", "N", int, "training steps, 0 for none", 30)
    _option(parser, "--out", "PNG", Path, "the contact sheet (default: demo.png in ~/.cache/proxyloader)")


def _explain(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "explain",
        _calls("explain", "explain_named"),
        "show how a torchvision transform is translated",
        "Prints for each part the random numbers that are drawn for each image, the function\n"
        "that draws them, the DALI operators, and the maximum difference from torchvision's\n"
        "pixels. For parts that are not translated, it prints the reason and an alternative.\n\n"
        "Exit status 1: a part is not translated. Loaders leave it to the workers then,\n"
        "unless translate='all'.",
        "proxyloader explain resnet50\n"
        "  proxyloader explain ResNet50_Weights.IMAGENET1K_V2\n"
        "  proxyloader explain train:transform",
    )
    name_help = (
        "module:attribute of a transform, or of a function or class that returns one when called without arguments, "
        "importable from here. It must be at module level, not below if __name__ == '__main__'. Or torchvision "
        "weights, or a model for its default weights (nothing is downloaded)"
    )
    _option(parser, "name", "NAME", str, name_help)


def _doctor(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "doctor",
        _calls("doctor", "doctor"),
        "examine this machine and the installed packages",
        "Checks the driver, torch, torchvision, DALI and nvImageCodec and whether they fit\n"
        "together, the GPUs, /dev/shm, limits, cores and NUMA. Decodes known pictures of each\n"
        "format with each decoder, and compares the pixels with Pillow's. Whatever may crash\n"
        "or hang runs in a child process with a time limit. Each problem comes with a remedy.\n\n"
        "Exit status 1: a check failed. Warnings leave it at 0.",
        "proxyloader doctor\n  proxyloader doctor --json",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON, for bug reports")
    _option(parser, "--limit", "S", float, "seconds that each child process may take", 120.0)


def _diagnose(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "diagnose",
        _calls("diagnose.command", "diagnose_script"),
        "measure what bounds a training, and what this loader gains there",
        "Runs a training script and measures the loop over its largest DataLoader, torch's or\n"
        "proxyloader's: the loop as it is, its step alone with one batch again and again, the\n"
        "loader alone, the other loader over the same samples, and other numbers of workers.\n"
        "Then it ends the script and reports what bounds the training (input, disk, model,\n"
        "CPU of the loop, or cores) and the speed with each loader.\n\n"
        "Options precede the script: what follows it is passed to the script. It trains for\n"
        "some hundred steps, and must be a single process, without torchrun. In a loop of\n"
        "your own, use proxyloader.diagnosis(loader). Requires psutil, and matplotlib for\n"
        "plots: pip install 'proxyloader[bench]', or, in a clone, pip install -e '.[bench]'.\n\n"
        "Exit status: that of the script if it fails; 1 if no loop was measured.",
        "proxyloader diagnose train.py --batch-size 256\n"
        "  proxyloader diagnose --seconds 120 --plot report.png train.py --epochs 90",
    )
    _option(parser, "--seconds", "S", float, "approximate duration of the measurement", 60.0)
    _option(parser, "--json", "FILE", Path, "write the report with all figures to this file", dest="json_file")
    _option(parser, "--plot", "FILE", Path, "plot the speed of both loaders, as .png, .svg or .pdf", dest="plot_file")
    _option(parser, "script", "SCRIPT", Path, "the training script")
    _option(parser, "arguments", "...", str, "its arguments", nargs=argparse.REMAINDER)


DATA_HELP = "an ImageFolder of your own (default: photographs made once, and kept)"

SIZES = ("thumbnails", "imagenet", "web", "camera")

SIZE_HELP = (
    "of the photographs that are made: thumbnails (96x96), imagenet (500x375), web (the same, one in five a "
    "progressive JPEG), camera (3000x2000) (default: %(default)s)"
)

AUGMENTATIONS = ("ColorJitter", "RandAugment", "TrivialAugmentWide", "AutoAugment", "AugMix")

BENCH_HELP = (
    "Each case loads the same JPEG files, crops at random, resizes to 224, flips and\n"
    "normalizes, in a process of its own. First each is tuned: numbers of workers and of\n"
    "DALI's threads and the engines' share are tried, and the fastest is kept. Then the\n"
    "cases run in turn, in interleaved rounds, and after them those with default settings\n"
    "and the most workers that are tried. It prints medians of the rounds, adds a line to a\n"
    "file of results, and writes a picture next to it. It needs psutil and matplotlib:\n"
    "pip install 'proxyloader[bench]', or, in a clone, pip install -e '.[bench]'.\n\n"
    "--first-epochs measures what a user sees who starts a script: three epochs of each\n"
    "case, in a new process, with the files in the page cache, no persistent workers, and\n"
    "default settings.\n\n"
    "--compare compares proxyloader's share of each other case with the same share in the\n"
    "last record of a file, of the same settings. Less than 0.9 of it is worse.\n\n"
    "Exit status 1: proxyloader or all cases failed, or it is worse."
)


def _bench(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "bench",
        _run_bench,
        "measure the loader beside all else that could load the same images",
        BENCH_HELP,
        "proxyloader bench\n"
        "  proxyloader bench --data /data/imagenet/train --only torch proxyloader iterator\n"
        "  proxyloader bench --model resnet50 --dtype float16 --channels-last\n"
        "  proxyloader bench --only torch proxyloader --augment RandAugment AutoAugment\n"
        "  proxyloader bench --size web\n"
        "  taskset -c 0-3 proxyloader bench --only torch proxyloader iterator\n"
        "  proxyloader bench --first-epochs --rounds 1 --out first_epochs.jsonl\n"
        "  proxyloader bench --compare results/bench.jsonl",
    )
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    parser.add_argument("--size", choices=SIZES, default="imagenet", help=SIZE_HELP)
    images_help = "how many to make (default: 8192 with a GPU, 1024 without; of camera an eighth of these)"
    _option(parser, "--images", "N", _at_least(1), images_help)
    _option(parser, "--passes", "N", _at_least(1), "over the images in each loop (default: 6 with a GPU, 1 without)")
    _option(parser, "--batch-size", "N", _at_least(1), "(default: 256; of camera 64)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="(default: the GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="(default: %(default)s)"
    )
    parser.add_argument("--channels-last", action="store_true", help="the memory format of the batches")
    augment_help = "such as RandAugment: adds torch's loader and ours with each of these behind the flip"
    _option(parser, "--augment", "NAME", str, augment_help, [], nargs="+", choices=AUGMENTATIONS)
    datasets_help = "OwnDataset, HuggingFace: adds torch's loader and ours with the images in each of these"
    _option(parser, "--datasets", "NAME", str, datasets_help, [], nargs="+", choices=("OwnDataset", "HuggingFace"))
    model_help = "of torchvision, such as resnet50: trained on the batches, and with synthetic ones as the reference"
    _option(parser, "--model", "NAME", str, model_help, "none")
    _bench_tunings(parser)
    _option(parser, "--rounds", "N", _at_least(1), "", 5)
    _option(parser, "--seconds", "S", float, "at least, for a case in a round", 3.0)
    only_help = "these alone, each name in quotes where it has spaces; proxyloader bench --list names all"
    _option(parser, "--only", "CASE", str, only_help, nargs="+")
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--first-epochs", action="store_true", help="measure these, and nothing else")
    compare_help = "compare with the last record of this file"
    one_of.add_argument("--compare", metavar="JSONL", type=Path, help=compare_help)
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    _option(parser, "--out", "JSONL", Path, "the results", Path("bench.jsonl"))


def _bench_tunings(parser: Parser) -> None:
    workers_help = "numbers to try (default: 4, 8, 16, a quarter, half and all of the cores, up to all)"
    _option(parser, "--workers", "N", _at_least(0), workers_help, nargs="+")
    threads_help = "of DALI on the CPU, to try (default: as --workers; without a GPU also one more than cores)"
    _option(parser, "--threads", "N", _at_least(1), threads_help, nargs="+")
    load_help = "of the JPEGs for the GPU's engines, 0 to 1, to try (default: 0.65, which is DALI's, and 1.0)"
    _option(parser, "--hw-decoder-load", "SHARE", float, load_help, [0.65, 1.0], nargs="+")


def _run_bench(**options: Any) -> int:
    with _needs_extra():
        from .bench.command import bench, list_cases
    return list_cases() if options["list"] else bench(argparse.Namespace(**options))


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    """Raise ValueError if what is imported meanwhile needs a package that only the extra ``bench`` brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed. pip install 'proxyloader[bench]' brings it, or, in a clone, "
            "pip install -e '.[bench]'"
        ) from error


VERBS = (_demo, _diagnose, _bench, _doctor, _verify, _make_dataset, _explain)


def _parser() -> Parser:
    parser = Parser(
        prog="proxyloader",
        description="Decode and augment images on the GPU by changing one import:\n\n"
        "  from proxyloader import DataLoader      # was: from torch.utils.data import DataLoader",
        epilog="start here:\n  proxyloader demo\n\nproxyloader VERB --help explains a verb and its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"proxyloader {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb(verbs)
    return parser


def _verb(verbs: Any, name: str, run: Callable[..., int], summary: str, text: str, example: str) -> Parser:
    """Declare a verb. ``run`` takes the parsed options and returns the exit status."""
    parser: Parser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _option(
    parser: Parser, name: str, metavar: str, type: Callable[[str], Any], text: str, default: Any = None, **more: Any
) -> None:
    """Declare an option. Its help ends with the default, unless there is none or the text describes it."""
    shown = "" if default in (None, []) or "(default: " in text else "(default: %(default)s)"
    parser.add_argument(name, metavar=metavar, type=type, default=default, help=f"{text} {shown}".strip(), **more)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
        return int(text)

    return number


def _size(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in pixels such as 500x375")
    width, height = map(int, text.split("x"))
    return width, height


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be cuda, cuda:N or cpu")
    return text


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and not isinstance(error, ProxyLoaderError):
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # An error from a worker of torch has the traceback of the worker, whose last line is the message.
    return lines[-1] if "Traceback (most recent call last):" in str(error) else " ".join(lines)
