"""The command ``proxyloader``: for each verb, a function that declares its options and one that runs it.

A verb imports its modules in the function that runs it, so ``--help`` and usage errors do not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
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
    """Run a command line, by default that of the process.

    Returns:
        The exit status: 0 after success; 1 if the verb failed, with one line on stderr; 130 after Ctrl-C.

    Raises:
        SystemExit: raised by argparse, with 2 for a usage error, and 0 for ``--help`` and ``--version``.
    """
    parsed, unknown = _parser().parse_known_args(argv)
    options = vars(parsed)
    run, debug, of_verb = options.pop("run"), options.pop("debug"), options.pop("parser")
    if unknown:
        of_verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(run(**options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ProxyLoaderError, ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        print(f"proxyloader: error: {_in_one_line(error)}", file=sys.stderr)
        return 1


def _make_dataset(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "make-dataset",
        _run_make_dataset,
        "write photographs to try things with",
        "Makes a folder for torchvision.datasets.ImageFolder. The pictures are painted:\n"
        "textures, light and noise that compress, weigh and decode as photographs do, and\n"
        "classes that a network learns in a few epochs. The same options give the same\n"
        "files. What is there already is kept, and an interrupted set is completed.",
        "proxyloader make-dataset /tmp/photos --images 4096 --size 500x375",
    )
    _option(parser, "folder", "DIR", Path, "where to; made if it is missing")
    _option(parser, "--images", "N", int, "how many", 1024)
    size_help = (
        "of most of them, in pixels; some are upright, square, larger or smaller (default: 500x375: about 105 KB)"
    )
    _option(parser, "--size", "WxH", _size, size_help, (500, 375))
    _option(parser, "--classes", "N", int, "how many", 10)
    _option(parser, "--seed", "N", int, "of all that is random", 0)
    _option(parser, "--progressive", "SHARE", float, "of them that are progressive JPEGs, 0 to 1", 0.0)
    _option(parser, "--processes", "N", int, "that write them (default: one for each core, or fewer)")


def _run_make_dataset(folder: Path, **options: Any) -> int:
    from rich.console import Console

    from .synthetic.dataset import make_dataset

    root = make_dataset(folder, **options)
    sizes = [path.stat().st_size for path in root.glob("class_*/*")]
    Console(soft_wrap=True).print(f"{root}: {len(sizes):,} images, {sum(sizes) / 1e6:,.1f} MB", markup=False)
    return 0


def _verify(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "verify",
        _run_verify,
        "find the damaged files of a data set",
        "Reads the files that ImageFolder reads to their ends, on all cores. It lists those that\n"
        "are damaged, truncated, of another format than their names say, or unreadable, each\n"
        "with the reason. Loaders know afterwards which JPEGs are damaged, and need not look:\n"
        "what was found is kept in ~/.cache/proxyloader by the content of the files.\n\n"
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
        _run_demo,
        "compare this loader with torch's on this machine",
        "Both loaders go over the same photographs under the same seed. It prints both\n"
        "speeds and how far the pixels are apart, draws the same batch of both on a contact\n"
        "sheet, and trains a ResNet-18 for a few steps. It takes about a minute on two\n"
        "cores. Exit status 1: the batches differ by more than is promised.",
        "proxyloader demo\n  proxyloader demo --data /data/imagenet/train --images 8192 --workers 8",
    )
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    _option(parser, "--images", "N", int, "how many to make, or to use of DIR", 768)
    _option(parser, "--batch-size", "N", int, "images in a batch (default: 256 with a GPU, 64 without)")
    _option(parser, "--workers", "N", int, "of each loader (default: one for each core, at most 16)")
    _option(parser, "--device", "DEVICE", _device, "cuda, cuda:1 or cpu (default: the GPU if there is one)")
    _option(parser, "--steps", "N", int, "of the training, 0 for none", 30)
    _option(parser, "--out", "PNG", Path, "the contact sheet (default: demo.png in ~/.cache/proxyloader)")


def _run_demo(**options: Any) -> int:
    from .demo import demo

    return 0 if demo(**options) else 1


def _explain(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "explain",
        _run_explain,
        "say what becomes of a torchvision transform",
        "Prints a table of its parts: which random numbers are drawn for each image, and by\n"
        "which function; the DALI operators that do the work; and how far the pixels may be\n"
        "from torchvision's. Where a part is refused, it says why and what to do instead.\n"
        "Exit status 1: something is refused. A loader leaves it to the workers then, unless\n"
        "translate='all'.",
        "proxyloader explain resnet50\n"
        "  proxyloader explain ResNet50_Weights.IMAGENET1K_V2\n"
        "  proxyloader explain train:transform",
    )
    _option(
        parser,
        "name",
        "NAME",
        str,
        "module:attribute of a transform, or of a function or class that makes one without arguments, looked for as "
        "python -m would from here. It must be at module level, not below if __name__ == '__main__'. Or weights of "
        "torchvision, or a model for its default weights (nothing is downloaded)",
    )


def _run_explain(name: str) -> int:
    from rich.console import Console

    from .explain import explain, find

    explanation = explain(find(name))
    Console().print(explanation)
    return 1 if explanation.refused else 0


def _doctor(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "doctor",
        _run_doctor,
        "examine this machine and the installed packages",
        "Looks at the driver, torch, torchvision, DALI and nvImageCodec, and whether they\n"
        "fit; at the GPUs; at /dev/shm, limits, cores and NUMA. It decodes known pictures of\n"
        "each format with each decoder, and compares the pixels. What may crash or hang runs\n"
        "in a process of its own with a time limit. Each line that is not ok says what to do.\n\n"
        "Exit status 1: a line says fail. It is 0 if lines say warn.",
        "proxyloader doctor\n  proxyloader doctor --json",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON, as for a bug report")
    _option(parser, "--limit", "S", float, "seconds that each process may take", 120.0)


def _run_doctor(as_json: bool, limit: float) -> int:
    from .doctor.command import doctor

    return 0 if doctor(as_json, limit) else 1


DIAGNOSE_HELP = (
    "Runs a training script, and measures the loop over its largest DataLoader, torch's\n"
    "or proxyloader's: the loop as it is, its step alone with one batch again and again,\n"
    "the loader alone, and the other of the two loaders over the same samples. Then the\n"
    "script is ended. The report says what bounds the run (input, disk, model, the CPU of\n"
    "the loop, or the cores), what either loader gives, and under which conditions\n"
    "proxyloader wins and does not, with the figures. Arguments of the loader that were\n"
    "tried and gained 5 % or more are suggested.\n\n"
    "Options come before the script: what stands behind it is given to the script. It\n"
    "trains for some hundred steps, and writes what it always writes. It must be one\n"
    "process, without torchrun. In a loop of your own, use proxyloader.diagnosis(loader).\n"
    "It needs psutil and matplotlib: pip install 'proxyloader[bench]', or, in a clone,\n"
    "pip install -e '.[bench]'.\n\n"
    "Exit status: that of the script, if it ends before all is measured; 1 if it ends\n"
    "well and no loop was diagnosed."
)


def _diagnose(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "diagnose",
        _run_diagnose,
        "say what bounds a training, and whether this loader is worth it",
        DIAGNOSE_HELP,
        "proxyloader diagnose train.py --batch-size 256\n"
        "  proxyloader diagnose --seconds 120 --html report.html train.py --epochs 90",
    )
    _option(parser, "--seconds", "S", float, "about how long to measure", 60.0)
    _option(parser, "--json", "FILE", Path, "write all figures and sentences to this file", dest="json_file")
    _option(parser, "--html", "FILE", Path, "write a page with plots to this file", dest="html_file")
    _option(parser, "script", "SCRIPT", Path, "the training script")
    _option(parser, "arguments", "...", str, "its arguments", nargs=argparse.REMAINDER)


def _run_diagnose(**options: Any) -> int:
    with _needs_extra():
        from .diagnose.command import diagnose_script

        diagnose_script(**options)
    return 0


DATA_HELP = "an ImageFolder of your own (default: photographs made once, and kept)"

SIZES = ("thumbnails", "imagenet", "web", "camera")

SIZE_HELP = (
    "of the photographs that are made: thumbnails (96x96), imagenet (500x375), web (the same, one in five a "
    "progressive JPEG), camera (3000x2000) (default: %(default)s)"
)

BENCH_HELP = (
    "Each case loads the same JPEG files, crops at random, resizes to 224, flips and\n"
    "normalises, in a process of its own. First each is tuned: numbers of workers and of\n"
    "DALI's threads and the engines' share are tried in two short loops each, and the\n"
    "fastest is kept. Then they run in turn, in rounds, so that a change of the machine's\n"
    "mood meets all of them; their first loops are left out. Those by default, with as\n"
    "many workers and threads as the most that are tried, follow in rounds of their own.\n"
    "It prints medians of the rounds, and adds a line to a file of results, with a table\n"
    "and a picture beside it. It needs psutil and matplotlib: pip install\n"
    "'proxyloader[bench]', or, in a clone, pip install -e '.[bench]'.\n\n"
    "--first-epochs measures what a user sees who starts a script: three epochs of each\n"
    "case, in a new process, with nothing kept from earlier ones but the files in the page\n"
    "cache, no persistent workers, and nothing said that has a default.\n\n"
    "--check compares proxyloader's share of each other case with the same share in the\n"
    "last record of a file, of the same settings. Less than 0.9 of it is worse.\n\n"
    "Exit status 1: proxyloader or all cases failed, or it is worse. 130: Ctrl-C; what was\n"
    "measured until then is reported."
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
        "  proxyloader bench --check results/bench.jsonl",
    )
    _option(parser, "--data", "DIR", Path, DATA_HELP)
    parser.add_argument("--size", choices=SIZES, default="imagenet", help=SIZE_HELP)
    images_help = "how many to make (default: 8192 with a GPU, 1024 without; of camera an eighth of these)"
    _option(parser, "--images", "N", int, images_help)
    _option(parser, "--passes", "N", int, "over the images in each loop (default: 6 with a GPU, 1 without)")
    _option(parser, "--batch-size", "N", int, "(default: 256; of camera 64)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="(default: the GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="(default: %(default)s)"
    )
    parser.add_argument("--channels-last", action="store_true", help="the memory format of the batches")
    augment_help = "such as RandAugment: adds torch's loader and ours with each of these behind the flip"
    _option(parser, "--augment", "NAME", str, augment_help, [], nargs="+")
    datasets_help = "OwnDataset, HuggingFace, Food101: adds torch's loader and ours with the images in each of these"
    _option(parser, "--datasets", "NAME", str, datasets_help, [], nargs="+")
    model_help = "of torchvision, such as resnet50: trained on the batches, and with synthetic ones as the reference"
    _option(parser, "--model", "NAME", str, model_help, "none")
    _bench_tunings(parser)
    _option(parser, "--rounds", "N", int, "", 5)
    _option(parser, "--seconds", "S", float, "at least, for a case in a round", 3.0)
    only_help = "these alone, each name in quotes where it has spaces; proxyloader bench --list names all"
    _option(parser, "--only", "CASE", str, only_help, nargs="+")
    parser.add_argument("--first-epochs", action="store_true", help="measure these, and nothing else")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    _option(parser, "--out", "JSONL", Path, "the results", Path("bench.jsonl"))
    _option(parser, "--check", "JSONL", Path, "compare with the last record of this file")


def _bench_tunings(parser: Parser) -> None:
    workers_help = "numbers to try (default: 4, 8, 16, a quarter, half and all of the cores, up to all)"
    _option(parser, "--workers", "N", int, workers_help, nargs="+")
    threads_help = "of DALI on the CPU, to try (default: as --workers; without a GPU also one more than cores)"
    _option(parser, "--threads", "N", int, threads_help, nargs="+")
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
    """Declare a verb, whose help has the ``summary``, the ``text`` and the command lines of ``example``. ``run`` takes
    the parsed options and returns the exit status."""
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
    """Declare an option. Its help ends with the default, unless there is none or the text has its own words for it."""
    shown = "" if default in (None, []) or "(default: " in text else "(default: %(default)s)"
    parser.add_argument(name, metavar=metavar, type=type, default=default, help=f"{text} {shown}".strip(), **more)


def _size(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a width and a height in pixels, such as 500x375")
    width, height = map(int, text.split("x"))
    return width, height


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cuda, cuda:N or cpu")
    return text


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and not isinstance(error, ProxyLoaderError):
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # An error from a worker of torch has the traceback of the worker, whose last line is the message.
    return lines[-1] if "Traceback (most recent call last):" in str(error) else " ".join(lines)
