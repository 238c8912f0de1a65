"""Is a training that is interrupted at any moment gone in two seconds, with nothing left of it?

    python benchmarks/interrupted.py                          # 100 trainings with each loader
    python benchmarks/interrupted.py --trainings 6 --seed 4

Starts a training on the CPU, with two workers and two epochs, again and again, in turn with this loader and with the
stock one. A signal ends each of them, at a moment drawn between its first import and its end; both loaders get the same
moments. SIGINT goes to all processes of the training, as Ctrl-C in a terminal does; SIGTERM and SIGKILL go to the
trainer alone. Then it is looked how long a process of the training's session is still there, and what is left: in
/dev/shm, in the folder for temporary files, and of the memory that workers share with the trainer.

The status is 1 where a training with this loader was there for longer than ``--limit``, or left anything. The limit is
meant for a machine that has nothing else to do; the record has its load at each signal.
Appends one JSON line to benchmarks/results/interrupted.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from proxyloader.make_dataset import make_dataset
from proxyloader.tools.bench.system_info import machine

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
LOADERS = {"proxyloader": "from proxyloader import DataLoader", "torch": "from torch.utils.data import DataLoader"}
WAIT_S = 20.0
"""So long a training is waited for; then it is ended, and was there for ever."""

LOOK_S = 0.01

SHORT = "/tmp"
"""Where a training has its folder for temporary files. Workers of the stock loader bind sockets there, whose path may
have 107 bytes; where they cannot, that loader hangs."""

TRAINING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may inherit it ignored
os.write(1, b"imports\\n")
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
{loader}

if __name__ == "__main__":
    os.write(1, b"start\\n")
    crop = transforms.RandomResizedCrop(64)
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    loader = DataLoader(ImageFolder(sys.argv[1], transform), 16, shuffle=True, num_workers=2)
    layers = torch.nn.Conv2d(3, 8, 5, 4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 15 * 15, 4)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in (1, 2):
        os.write(1, b"epoch %d\\n" % epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    os.write(1, b"end\\n")
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one training.

    Attributes:
        loader: proxyloader or torch.
        signal: that it got.
        at: where in it, as a part of the time that it takes.
        phase: what it had said last.
        gone_s: from the signal until no process of it was there; ``WAIT_S`` where some had to be killed.
        left: what else was there then.
        status: of the trainer.
        tracebacks: on stderr.
        load: of the machine, processes that want to run, when the signal came.
    """

    loader: str
    signal: str
    at: float
    phase: str
    gone_s: float
    left: list[str]
    status: int
    tracebacks: int
    load: float


def session_of(leader: int) -> list[int]:
    """The processes of a session that run, or could; so also those whose parent is gone."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(entry))
    return found


def memory_of(pid: int) -> set[int]:
    """The inodes of memory of ours that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:proxyloader" in os.readlink(link):
                    found.add(link.stat().st_ino)
    return found


def of_these(names: set[str], pids: set[int]) -> list[str]:
    """Those names that hold one of these numbers."""
    return sorted(name for name in names if pids & {int(number) for number in re.findall(r"\d+", name)})


@contextlib.contextmanager
def training(loader: str, root: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that has begun to import. What it says is in ``folder``; in the end none of its processes is left."""
    script = folder / "train.py"
    script.write_text(TRAINING.format(loader=LOADERS[loader]))
    (folder / "tmp").mkdir()
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(folder / "tmp")}
    with (folder / "stdout").open("w") as output, (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script), str(root)],
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    try:
        while process.poll() is None and not (folder / "stdout").stat().st_size:
            time.sleep(LOOK_S)
        yield process
    finally:
        for pid in session_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def takes_s(loader: str, root: Path) -> float:
    """From its first import to its end."""
    with tempfile.TemporaryDirectory(dir=SHORT) as name, training(loader, root, Path(name)) as process:
        start_s = time.monotonic()
        if process.wait(10 * WAIT_S) != 0:
            raise RuntimeError((Path(name) / "stderr").read_text())
        return time.monotonic() - start_s


def interrupted(loader: str, kind: signal.Signals, at: float, whole_s: float, root: Path) -> Outcome:
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(dir=SHORT) as name, training(loader, root, Path(name)) as process:
        folder = Path(name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(at * whole_s)
        load, pids = os.getloadavg()[0], {process.pid, *session_of(process.pid)}
        memory = set[int]().union(*map(memory_of, pids))
        phase = (folder / "stdout").read_text().split("\n")[-2]
        if process.poll() is None:
            (os.killpg if kind is signal.SIGINT else os.kill)(process.pid, kind)
        start_s = time.monotonic()
        while (there := session_of(process.pid)) and time.monotonic() - start_s < WAIT_S:
            pids.update(there)
            process.poll()
            time.sleep(LOOK_S)
        gone_s = time.monotonic() - start_s
        left = of_these(set(os.listdir("/dev/shm")) - before, pids) + sorted(os.listdir(folder / "tmp"))
        holders = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if memory_of(pid) & memory]
        return Outcome(
            loader=loader,
            signal=kind.name,
            at=round(at, 3),
            phase=phase,
            gone_s=round(gone_s, 3),
            left=left + [f"memory in process {pid}" for pid in holders],
            status=process.wait(),
            tracebacks=(folder / "stderr").read_text().count("Traceback"),
            load=load,
        )


def summary(outcomes: list[Outcome], limit_s: float) -> dict[str, Any]:
    gone_s = [each.gone_s for each in outcomes]
    return {
        "trainings": len(outcomes),
        "median_s": round(statistics.median(gone_s), 3),
        "longest_s": max(gone_s),
        "late": sum(each > limit_s for each in gone_s),
        "killed_by_us": sum(each >= WAIT_S for each in gone_s),
        "left": sorted({name for each in outcomes for name in each.left}),
        "statuses": dict(Counter(each.status for each in outcomes)),
        "tracebacks": dict(Counter(each.tracebacks for each in outcomes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=100, help="with each loader")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--limit", type=float, default=2.0, help="seconds")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "interrupted.jsonl", type=Path)
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    draw = random.Random(args.seed)
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as name:
        root = make_dataset(Path(name) / "set", images=args.images, size=(160, 120), classes=4, progress=False)
        whole_s = {loader: takes_s(loader, root) for loader in LOADERS}
        for number in tqdm(range(args.trainings), desc="trainings", disable=None):
            kind, at = SIGNALS[number % len(SIGNALS)], draw.random()
            outcomes += [interrupted(loader, kind, at, whole_s[loader], root) for loader in LOADERS]
    found: dict[str, Any] = {loader: {} for loader in LOADERS}
    for loader, kind in itertools.product(LOADERS, SIGNALS):
        chosen = [each for each in outcomes if (each.loader, each.signal) == (loader, kind.name)]
        found[loader][kind.name] = summary(chosen, args.limit) if chosen else None
    record = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/interrupted.py", *sys.argv[1:]]),
        "benchmark": "interrupted",
        "machine": machine(),
        "seed": args.seed,
        "limit_s": args.limit,
        "whole_s": {loader: round(seconds, 2) for loader, seconds in whole_s.items()},
        "load": {"median": statistics.median(each.load for each in outcomes), "most": max(e.load for e in outcomes)},
        "found": found,
        "outcomes": [asdict(each) for each in outcomes],
    }
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    for loader, by_signal in found.items():
        for kind, numbers in by_signal.items():
            print(loader, kind, numbers)
    bad = [each for each in outcomes if each.loader == "proxyloader" and (each.left or each.gone_s > args.limit)]
    for each in bad:
        print(each)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
