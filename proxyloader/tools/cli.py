"""The command ``proxyloader``: a function for each verb, which declares its options and has its description.

Verbs import their modules when they run, so ``--help`` and usage errors do not import torch.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ProxyLoaderError

Parser = argparse.ArgumentParser

INTERRUPTED = 130  # what a shell reports for Ctrl-C: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return the exit status: 1 if the verb returns something.

    Errors of the package, of arguments and of the system end in one line on stderr and status 1, Ctrl-C in status 130.
    argparse raises SystemExit for usage errors, ``--help`` and ``--version``.
    """
    parsed, unknown = _parser().parse_known_args(argv)
    options = vars(parsed)
    (module, function), debug, verb = options.pop("runs"), options.pop("debug"), options.pop("verb")
    if unknown:
        verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(bool(getattr(importlib.import_module(module, __package__), function)(**options)))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ProxyLoaderError, ModuleNotFoundError, ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        print(f"proxyloader: error: {_in_one_line(error)}", file=sys.stderr)
        return 1


def _checked(pattern: str, message: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return the type of an option whose text must match a pattern."""

    def value(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(message.format(text))
        return convert(text)

    return value


_size = _checked(
    r"\d+x\d+", "{!r} is not a size in pixels such as 500x375", lambda text: tuple(map(int, text.split("x")))
)
_device = _checked(r"cpu|cuda(:\d{1,2})?", "{!r} must be cuda, cuda:N or cpu")
_at_least_0 = _checked(r"\d+", "must be an integer >= 0, got {!r}", int)
_at_least_1 = _checked(r"\d*[1-9]\d*", "must be an integer >= 1, got {!r}", int)


def _demo(parser: Parser) -> None:
    """Compare this loader with torch's on this machine.

    Runs both loaders over the same photographs with the same seed. Prints their speeds and how much their pixels
    differ, writes a contact sheet of one batch of both, and trains a ResNet-18 for a few steps. Takes about a minute on
    two cores.

    Exit status 1: the batches differ by more than documented.

    Example:
      proxyloader demo
      proxyloader demo --data /data/imagenet/train --images 8192 --workers 8
    """
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    _option(parser, "--images", "N", _at_least_1, "number of images to create, or to use from DIR", 768)
    _option(parser, "--batch-size", "N", _at_least_1, "images per batch (default: 256 with a GPU, 64 without)")
    _option(parser, "--workers", "N", _at_least_0, "workers of each loader (default: one per core, at most 16)")
    _option(parser, "--device", "DEVICE", _device, "cuda, cuda:1 or cpu (default: the GPU if there is one)")
    _option(parser, "--steps", "N", _at_least_0, "training steps, 0 for none", 30)
    _option(parser, "--out", "PNG", Path, "the contact sheet (default: demo.png in ~/.cache/proxyloader)")


def _diagnose(parser: Parser) -> None:
    """Measure what bounds a training, and what this loader gains there.

    Runs a training script and measures the loop over its largest DataLoader, torch's or proxyloader's: the loop as it
    is, its step alone with one batch again and again, the loader alone, the other loader over the same samples, and
    other numbers of workers. Then it ends the script and reports what bounds the training (input, disk, model, CPU of
    the loop, or cores) and the speed with each loader.

    Options precede the script: what follows it is passed to the script. It trains for some hundred steps, and must be a
    single process, without torchrun. In a loop of your own, use proxyloader.diagnosis(loader). Requires psutil, and
    matplotlib for plots: pip install 'proxyloader[bench]', or, in a clone, pip install -e '.[bench]'.

    Exit status: that of the script if it fails; 1 if no loop was measured.

    Example:
      proxyloader diagnose train.py --batch-size 256
      proxyloader diagnose --seconds 120 --plot report.png train.py --epochs 90
    """
    _option(parser, "--seconds", "S", _at_least_1, "approximate duration of the measurement", 60)
    _option(parser, "--json", "FILE", Path, "write the report with all figures to this file", dest="json_file")
    _option(parser, "--plot", "FILE", Path, "plot the speed of both loaders, as .png, .svg or .pdf", dest="plot_file")
    _option(parser, "script", "SCRIPT", Path, "the training script")
    _option(parser, "arguments", "...", str, "its arguments", nargs=argparse.REMAINDER)


def _bench(parser: Parser) -> None:
    """Measure the loader beside all else that could load the same images.

    Each case loads the same JPEG files, crops at random, resizes to 224, flips and normalizes, in a process of its own.
    First each is tuned: numbers of workers and of DALI's threads and the engines' share are tried, and the fastest is
    kept. Then the cases run in turn, in interleaved rounds, and after them those with default settings and the most
    workers that are tried. It prints medians of the rounds, adds a line to a file of results, and writes a picture next
    to it. It needs psutil and matplotlib: pip install 'proxyloader[bench]', or, in a clone, pip install -e '.[bench]'.

    --first-epochs measures what a user sees who starts a script: three epochs of each case, in a new process, with the
    files in the page cache, no persistent workers, and default settings.

    --compare compares proxyloader's share of each other case with the same share in the last record of a file, of the
    same settings. Less than 0.9 of it is worse.

    Exit status 1: proxyloader or all cases failed, or it is worse.

    Example:
      proxyloader bench
      proxyloader bench --data /data/imagenet/train --only torch proxyloader iterator
      proxyloader bench --model resnet50 --dtype float16 --channels-last
      proxyloader bench --only torch proxyloader --augment RandAugment AutoAugment
      proxyloader bench --size web
      taskset -c 0-3 proxyloader bench --only torch proxyloader iterator
      proxyloader bench --first-epochs --rounds 1 --out first_epochs.jsonl
      proxyloader bench --compare results/bench.jsonl
    """
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    size_help = (
        "of the photographs that are made: thumbnails (96x96), imagenet (500x375), web (the same, one in five a "
        "progressive JPEG), camera (3000x2000)"
    )
    _option(parser, "--size", None, str, size_help, "imagenet", choices=SIZES)
    images_help = "how many to make (default: 8192 with a GPU, 1024 without; of camera an eighth of these)"
    _option(parser, "--images", "N", _at_least_1, images_help)
    _option(parser, "--passes", "N", _at_least_1, "over the images in each loop (default: 6 with a GPU, 1 without)")
    _option(parser, "--batch-size", "N", _at_least_1, "(default: 256; of camera 64)")
    _option(parser, "--device", None, str, "(default: the GPU if there is one)", choices=("cuda", "cpu"))
    _option(parser, "--dtype", None, str, "", "float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--channels-last", action="store_true", help="the memory format of the batches")
    augment_help = "such as RandAugment: adds torch's loader and ours with each of these behind the flip"
    _option(parser, "--augment", "NAME", str, augment_help, [], nargs="+", choices=AUGMENTATIONS)
    datasets_help = "OwnDataset, HuggingFace: adds torch's loader and ours with the images in each of these"
    _option(parser, "--datasets", "NAME", str, datasets_help, [], nargs="+", choices=("OwnDataset", "HuggingFace"))
    model_help = "of torchvision, such as resnet50: trained on the batches, and with synthetic ones as the reference"
    _option(parser, "--model", "NAME", str, model_help, "none")
    workers_help = "numbers to try (default: 4, 8, 16, a quarter, half and all of the cores, up to all)"
    _option(parser, "--workers", "N", _at_least_0, workers_help, nargs="+")
    threads_help = "of DALI on the CPU, to try (default: as --workers; without a GPU also one more than cores)"
    _option(parser, "--threads", "N", _at_least_1, threads_help, nargs="+")
    load_help = "of the JPEGs for the GPU's engines, 0 to 1, to try (default: 0.65, which is DALI's, and 1.0)"
    _option(parser, "--hw-decoder-load", "SHARE", float, load_help, [0.65, 1.0], nargs="+")
    _option(parser, "--rounds", "N", _at_least_1, "", 5)
    _option(parser, "--seconds", "S", float, "at least, for a case in a round", 3.0)
    only_help = "these alone, each name in quotes where it has spaces; proxyloader bench --list names all"
    _option(parser, "--only", "CASE", str, only_help, nargs="+")
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--first-epochs", action="store_true", help="measure these, and nothing else")
    _option(one_of, "--compare", "JSONL", Path, "compare with the last record of this file")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    _option(parser, "--out", "JSONL", Path, "the results", Path("bench.jsonl"))


def _doctor(parser: Parser) -> None:
    """Examine this machine and the installed packages.

    Checks the driver, torch, torchvision, DALI and nvImageCodec and whether they fit together, the GPUs, /dev/shm,
    limits and cores. Decodes known pictures of each format with each decoder, and compares the pixels with
    Pillow's. Whatever may crash or hang runs in a child process with a time limit. Each problem comes with a remedy.

    Exit status 1: a check failed. Warnings leave it at 0.

    Example:
      proxyloader doctor
      proxyloader doctor --json
    """
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON, for bug reports")
    _option(parser, "--limit", "S", _at_least_1, "seconds that each child process may take", 120)


def _verify(parser: Parser) -> None:
    """Find the damaged files of a data set.

    Reads the files that ImageFolder reads to their ends, on all cores. It lists those that are damaged, truncated, of
    another format than their names say, or unreadable, each with the reason.

    Exit status 1: there are such files.

    Example:
      proxyloader verify /data/imagenet/train
      proxyloader verify /data/imagenet/train --sound sound.txt
      proxyloader verify /data/web --copy /data/web-without-damaged
    """
    _option(parser, "folder", "DIR", Path, "the data set; folders in it are searched, too")
    _option(parser, "--processes", "N", _at_least_1, "that read (default: one for each core)")
    _option(parser, "--sound", "FILE", Path, "write the paths of the sound files to this file")
    _option(parser, "--copy", "DIR", Path, "make a copy of the data set without the bad files, of hard links if it can")


def _make_dataset(parser: Parser) -> None:
    """Write synthetic photographs to experiment with.

    Creates a folder for torchvision.datasets.ImageFolder. The textures, light and noise of the pictures compress and
    decode like photographs, and networks learn the classes in a few epochs. The same options give the same files.
    Existing files are kept, and an interrupted dataset is completed.

    Example:
      proxyloader make-dataset /tmp/photos --images 4096 --size 500x375
    """
    _option(parser, "folder", "DIR", Path, "folder of the dataset; created if it is missing")
    _option(parser, "--images", "N", int, "number of photographs", 1024)
    size_help = "size of most photographs in pixels; others are upright, square, larger or smaller (default: 500x375)"
    _option(parser, "--size", "WxH", _size, size_help, (500, 375))
    _option(parser, "--classes", "N", int, "number of classes", 10)
    _option(parser, "--seed", "N", int, "seed of all random numbers", 0)
    _option(parser, "--progressive", "SHARE", float, "share of progressive JPEGs, 0 to 1", 0.0)
    _option(parser, "--processes", "N", int, "number of processes (default: one per core, or fewer)")


def make_photographs(folder: Path, **options: Any) -> None:
    from ..make_dataset import make_dataset

    sizes = [path.stat().st_size for path in make_dataset(folder, **options).glob("class_*/*")]
    print(f"{folder}: {len(sizes):,} images, {sum(sizes) / 1e6:,.1f} MB")


def _explain(parser: Parser) -> None:
    """Show how a torchvision transform is translated.

    Prints for each part the random numbers that are drawn for each image, the function that draws them, the DALI
    operators, and the maximum difference from torchvision's pixels. For parts that are not translated, it prints the
    reason and an alternative.

    Exit status 1: a part is not translated. Loaders leave it to the workers then, unless translate='all'.

    Example:
      proxyloader explain resnet50
      proxyloader explain ResNet50_Weights.IMAGENET1K_V2
      proxyloader explain train:transform
    """
    name_help = (
        "module:attribute of a transform, or of a function or class that returns one when called without arguments, "
        "importable from here. It must be at module level, not below if __name__ == '__main__'. Or torchvision "
        "weights, or a model for its default weights (nothing is downloaded)"
    )
    _option(parser, "name", "NAME", str, name_help)


VERBS: dict[Callable[[Parser], None], tuple[str, str]] = {
    _demo: (".demo", "demo"),
    _diagnose: (".diagnose", "diagnose_script"),
    _bench: (".bench.command", "bench"),
    _doctor: (".doctor", "doctor"),
    _verify: (".verify", "verify"),
    _make_dataset: (".cli", "make_photographs"),
    _explain: (".explain", "explain_named"),
}
"""The module and the function that run each verb. The function takes the options."""

DATA_HELP = "an ImageFolder of your own (default: photographs made once, and kept)"

SIZES = ("thumbnails", "imagenet", "web", "camera")

AUGMENTATIONS = ("ColorJitter", "RandAugment", "TrivialAugmentWide", "AutoAugment", "AugMix")


class Paragraphs(argparse.RawDescriptionHelpFormatter):
    """Wraps the paragraphs of a description, except for examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            each if "\n  " in each else textwrap.fill(each, width, break_on_hyphens=False)
            for each in text.split("\n\n")
        )


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
    for declare, runs in VERBS.items():
        text, _, examples = inspect.cleandoc(declare.__doc__ or "").partition("\n\nExample:\n")
        summary = text.partition(".\n")[0]
        verb: Parser = verbs.add_parser(
            declare.__name__[1:].replace("_", "-"),
            help=summary[:1].lower() + summary[1:],
            description=text,
            epilog=f"example:\n{examples}",
            formatter_class=Paragraphs,
        )
        verb.add_argument("--debug", action="store_true", help="show where an error comes from")
        verb.set_defaults(runs=runs, verb=verb)
        declare(verb)
    return parser


def _option(
    parser: Any, name: str, metavar: str | None, type: Callable[[str], Any], text: str, default: Any = None, **more: Any
) -> None:
    """Declare an option. Its help ends with the default, unless there is none or the text describes it."""
    shown = "" if default in (None, []) or "(default: " in text else "(default: %(default)s)"
    parser.add_argument(name, metavar=metavar, type=type, default=default, help=f"{text} {shown}".strip(), **more)


def _in_one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        brought = "pip install 'proxyloader[bench]' brings it, or, in a clone, pip install -e '.[bench]'"
        return f"{error.name} is not installed. {brought}"
    if isinstance(error, OSError) and error.filename and not isinstance(error, ProxyLoaderError):
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # An error from a worker of torch has the traceback of the worker, whose last line is the message.
    return lines[-1] if "Traceback (most recent call last):" in str(error) else " ".join(lines)
