"""The command ``proxyloader``: for each verb, a function that declares its options and one that runs it.

A verb imports its modules in the function that runs it, so ``--help`` and usage errors do not import torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ProxyLoaderError

INTERRUPTED = 130  # what a shell reports for Ctrl-C: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process.

    Returns:
        The exit status: 0 after success; 1 if the verb failed, with one line on stderr; 130 after Ctrl-C.

    Raises:
        SystemExit: raised by argparse, with 2 for a usage error, and 0 for ``--help`` and ``--version``.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ProxyLoaderError, ValueError, OSError, RuntimeError) as error:
        if args.debug:
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
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to; made if it is missing")
    parser.add_argument("--images", metavar="N", type=int, default=1024, help="how many (default: %(default)s)")
    parser.add_argument(
        "--size",
        metavar="WxH",
        type=_size,
        default=(500, 375),
        help="of most of them, in pixels; some are upright, square, larger or smaller (default: 500x375: about 105 KB)",
    )
    parser.add_argument("--classes", metavar="N", type=int, default=10, help="how many (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of all that is random (default: %(default)s)")
    parser.add_argument(
        "--processes", metavar="N", type=int, help="that write them (default: one for each core, or fewer)"
    )


def _run_make_dataset(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .synthetic.dataset import make_dataset

    root = make_dataset(
        args.folder,
        images=args.images,
        size=args.size,
        classes=args.classes,
        seed=args.seed,
        processes=args.processes,
    )
    sizes = [path.stat().st_size for path in root.glob("class_*/*")]
    Console(soft_wrap=True).print(f"{root}: {len(sizes):,} images, {sum(sizes) / 1e6:,.1f} MB", markup=False)
    return 0


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
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="an ImageFolder of your own (default: photographs made once, and kept)"
    )
    parser.add_argument(
        "--images",
        metavar="N",
        type=int,
        default=768,
        help="how many to make, or to use of DIR (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=int, help="images in a batch (default: 256 with a GPU, 64 without)"
    )
    parser.add_argument(
        "--workers", metavar="N", type=int, help="of each loader (default: one for each core, at most 16)"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", type=_device, help="cuda, cuda:1 or cpu (default: the GPU if there is one)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=30, help="of the training, 0 for none (default: %(default)s)"
    )
    parser.add_argument(
        "--out", metavar="PNG", type=Path, help="the contact sheet (default: demo.png in ~/.cache/proxyloader)"
    )


def _run_demo(args: argparse.Namespace) -> int:
    from .demo import demo

    kept_its_promise = demo(
        data=args.data,
        images=args.images,
        batch_size=args.batch_size,
        workers=args.workers,
        device=args.device,
        steps=args.steps,
        out=args.out,
    )
    return 0 if kept_its_promise else 1


def _explain(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "explain",
        _run_explain,
        "say what becomes of a torchvision transform",
        "Prints a table of its parts: which random numbers are drawn for each image, and by\n"
        "which function; the DALI operators that do the work; and how far the pixels may be\n"
        "from torchvision's. Where a part is refused, it says why and what to do instead.\n"
        "Exit status 1: something is refused, so a loader for it could not be made.",
        "proxyloader explain resnet50\n"
        "  proxyloader explain ResNet50_Weights.IMAGENET1K_V2\n"
        "  proxyloader explain train:transform",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="module:attribute of a transform, or of a function or class that makes one without arguments, looked for "
        "as python -m would from here. It must be at module level, not below if __name__ == '__main__'. Or weights of "
        "torchvision, or a model for its default weights "
        "(nothing is downloaded)",
    )


def _run_explain(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .explain import explain, find

    explanation = explain(find(args.name))
    Console().print(explanation)
    return 1 if explanation.refused else 0


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
        "  proxyloader bench --first-epochs --rounds 1 --out first_epochs.jsonl\n"
        "  proxyloader bench --check results/bench.jsonl",
    )
    _add_workload(parser)
    _add_tuning(parser)
    _add_measurement(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="an ImageFolder of your own (default: photographs made once, and kept)"
    )
    parser.add_argument(
        "--images", metavar="N", type=int, help="how many to make (default: 8192 with a GPU, 1024 without)"
    )
    parser.add_argument(
        "--passes", metavar="N", type=int, help="over the images in each loop (default: 6 with a GPU, 1 without)"
    )
    parser.add_argument("--batch-size", metavar="N", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="(default: the GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="(default: %(default)s)"
    )
    parser.add_argument("--channels-last", action="store_true", help="the memory format of the batches")
    parser.add_argument(
        "--augment",
        nargs="+",
        metavar="NAME",
        default=[],
        help="such as RandAugment: adds torch's loader and ours with each of these behind the flip",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="none",
        help="of torchvision, such as resnet50: trained on the batches, and with synthetic ones as the reference",
    )


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        nargs="+",
        help="numbers to try (default: 4, 8, 16, a quarter, half and all of the cores, as far as there are so many)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        nargs="+",
        help="of DALI on the CPU, to try (default: as --workers; without a GPU also one more than cores)",
    )
    parser.add_argument(
        "--hw-decoder-load",
        metavar="SHARE",
        type=float,
        nargs="+",
        default=[0.65, 1.0],
        help="of the JPEGs for the GPU's engines, 0 to 1, to try (default: 0.65, which is DALI's, and 1.0)",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=3.0, help="at least, for a case in a round (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CASE",
        help="these alone, each name in quotes where it has spaces; proxyloader bench --list names all",
    )
    parser.add_argument("--first-epochs", action="store_true", help="measure these, and nothing else")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    parser.add_argument(
        "--out", metavar="JSONL", type=Path, default=Path("bench.jsonl"), help="the results (default: %(default)s)"
    )
    parser.add_argument("--check", metavar="JSONL", type=Path, help="compare with the last record of this file")


def _run_bench(args: argparse.Namespace) -> int:
    try:
        from .bench.command import bench, list_cases
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed. pip install 'proxyloader[bench]' brings it, or, in a clone, "
            "pip install -e '.[bench]'"
        ) from error
    return list_cases() if args.list else bench(args)


VERBS = (_demo, _bench, _make_dataset, _explain)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str, example: str
) -> argparse.ArgumentParser:
    """Declare a verb.

    Args:
        run: takes the parsed options and returns the exit status.
        summary: short description, for the list of verbs.
        text: long description, for the help of the verb.
        example: one or more command lines.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=run)
    return parser


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
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # An error from a worker of torch has the traceback of the worker, whose last line is the message.
    return lines[-1] if "Traceback (most recent call last):" in str(error) else " ".join(lines)
