"""What the benchmarks share: options, photographs and records. Imports torch only where it is used."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def make_parser(name: str, description: str | None, has_device: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks: the file of the records and the device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS / f"{name}.jsonl", type=Path)
    if has_device:
        import torch

        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def make_photographs(images: int) -> Path:
    """Return a folder of photographs of about 500 x 375 pixels, which is kept for the next run."""
    from proxyloader.make_dataset import FORMAT, make_dataset

    return make_dataset(Path(tempfile.gettempdir()) / f"photos-v{FORMAT}-{images}", images=images)


def cpu_s() -> float:
    """Return the CPU time of this process and its workers, which are all alive."""
    import psutil

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


def append_record(args: argparse.Namespace, *settings: str, **fields: Any) -> dict[str, Any]:
    """Append a JSON line with the machine, the command, some of its arguments and ``fields`` to ``args.out``."""
    from proxyloader.tools.bench.config import machine

    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "benchmark": Path(sys.argv[0]).stem,
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        **{name: getattr(args, name) for name in settings},
        **fields,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record
