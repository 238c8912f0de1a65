"""What do the checks of JPEGs cost, and which damage do they find?

    python benchmarks/scan_checks.py
    python benchmarks/scan_checks.py --images 512 --processes 1 2

Times of one file on one core, in milliseconds. Then, for each kind of damage, the share of files in which the check
finds it, and in which libjpeg does, by which ``proxyloader verify`` reads each file. Where there is a GPU, what it
makes of files that pass the check: how many fail, how many are other pictures than Pillow's, and how far they are from
them, in levels of 255. Then images/s of ``proxyloader verify`` with each number of processes, over the same files, of
which 40 are damaged in ten ways, and whether it found those and no others. Appends one JSON line to
benchmarks/results/scan_checks.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import append_record, make_parser
from PIL import Image
from tqdm import tqdm

from proxyloader._cores import usable_cores
from proxyloader.data.jpeg import JpegHeader, find_damage, is_sound, read_jpeg_header, read_scans
from proxyloader.make_dataset import make_dataset
from proxyloader.tools.verify import verify

DAMAGED = 40


def arguments() -> argparse.Namespace:
    parser = make_parser("scan_checks", __doc__, has_device=False)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--looked-at", type=int, default=200, help="files that times and shares are of")
    parser.add_argument("--shown", type=int, default=50, help="files of each damage that a GPU decodes")
    cores = usable_cores()
    steps = sorted({1, 2, 4, 8, 16, cores} & set(range(1, cores + 1)))
    parser.add_argument("--processes", type=int, nargs="+", default=steps, help="of verify (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


class Damage:
    """Ways to damage a file, each at a place in its scan that is drawn."""

    def __init__(self, files: list[bytes]) -> None:
        self.rng, self.files = random.Random(0), files

    def place(self, data: bytes, size: int) -> int:
        header = header_of(data)
        return self.rng.randrange(header.first_scan + 20, len(data) - size - 2)

    def changed(self, data: bytes, block: bytes) -> bytes:
        at = self.place(data, len(block))
        return data[:at] + block + data[at + len(block) :]

    def without(self, data: bytes, size: int) -> bytes:
        at = self.place(data, size)
        return data[:at] + data[at + size :]

    def bit(self, data: bytes) -> bytes:
        at = self.place(data, 1)
        return data[:at] + bytes([data[at] ^ (1 << self.rng.randrange(8))]) + data[at + 1 :]

    def other(self, data: bytes) -> bytes:
        file = self.rng.choice([each for each in self.files if len(each) > 10_000])
        at = self.place(file, 4096)
        return self.changed(data, file[at : at + 4096])

    def ways(self) -> dict[str, Callable[[bytes], bytes]]:
        return {
            "truncated": lambda data: data[: self.place(data, 1)],
            "truncated, and ended as a JPEG": lambda data: data[: self.place(data, 1)] + b"\xff\xd9",
            "512 bytes of zeros": lambda data: self.changed(data, bytes(512)),
            "4,096 bytes of zeros": lambda data: self.changed(data, bytes(4096)),
            "512 other bytes": lambda data: self.changed(data, self.rng.randbytes(512)),
            "4,096 other bytes": lambda data: self.changed(data, self.rng.randbytes(4096)),
            "4,096 bytes of another scan": self.other,
            "4,096 bytes missing": lambda data: self.without(data, 4096),
            "16 other bytes": lambda data: self.changed(data, self.rng.randbytes(16)),
            "a byte missing": lambda data: self.without(data, 1),
            "a bit changed": self.bit,
        }


SEEN_BY_VERIFY = (
    "truncated",
    "truncated, and ended as a JPEG",
    "4,096 bytes of zeros",
    "512 other bytes",
    "4,096 other bytes",
    "4,096 bytes missing",
)
"""Of the ways, those of which libjpeg finds all; ``verify`` is given four more."""


def header_of(data: bytes) -> JpegHeader:
    header = read_jpeg_header(data)
    assert header is not None
    return header


def passes(data: bytes) -> bool:
    header = header_of(data)
    scans = read_scans(data, header)
    return scans is not None and is_sound(data, header, scans)


def ms_per_file(check: Callable[[bytes], Any], files: list[bytes], rounds: int) -> float:
    spent = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for data in files:
            check(data)
        spent.append(1e3 * (time.perf_counter() - start) / len(files))
    return round(statistics.median(spent[1:]), 4)


def times(files: list[bytes], rounds: int) -> dict[str, float]:
    return {
        "read the header": ms_per_file(read_jpeg_header, files, rounds),
        "check": ms_per_file(passes, files, rounds),
        "read by libjpeg": ms_per_file(find_damage, files, rounds),
    }


def as_progressive(data: bytes) -> bytes:
    file = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        image.save(file, "JPEG", quality=93, progressive=True)
    return file.getvalue()


def shown_by_gpu(files: list[bytes]) -> dict[str, dict[str, float]]:
    """Of the damaged files that pass the check: what a loader on a GPU returns, and torch's."""
    found = {}
    for name, way in tqdm(Damage(files).ways().items(), desc="damaged files on a GPU", disable=None):
        damaged = [way(data) for data in files]
        with tempfile.TemporaryDirectory() as folder:
            passed = [data for data in damaged if passes(data)]
            # Sound pictures between them, whose parts may show.
            for number, data in enumerate(each for pair in zip(passed, files) for each in pair):
                path = Path(folder, "class", f"{number:05d}.jpg")
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            found[name] = {"passed": len(passed)} | (compared_with_pillow(folder) if passed else {})
    return found


def compared_with_pillow(root: str) -> dict[str, float]:
    """Compare every other image of a folder with Pillow's, and check that those between them are right."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    from proxyloader import DataLoader, ImageError

    dataset, failed, levels = ImageFolder(root, PILToTensor()), 0, []
    batches = iter(DataLoader(dataset, 1, device="cuda"))
    for index in range(len(dataset)):
        is_sound = index % 2 == 1
        try:
            ((image,), _) = next(batches)
        except ImageError:
            assert not is_sound, f"the sound picture {dataset.samples[index][0]} fails"
            failed += 1
            continue
        difference = (image.cpu().int() - dataset[index][0].int()).abs()
        if is_sound:
            assert difference.max() <= 3, f"the sound picture {dataset.samples[index][0]} is another"
        else:
            levels.append(difference.float().mean().item())
    return {
        "failed": failed,
        "other_pictures": sum(each > 1 for each in levels),
        "mean_levels": round(statistics.mean(levels), 2) if levels else 0.0,
        "most_levels": round(max(levels, default=0.0), 1),
    }


def shares(files: list[bytes]) -> dict[str, dict[str, float]]:
    found = {}
    for name, way in tqdm(Damage(files).ways().items(), desc="ways to damage a file", disable=None):
        damaged = [way(data) for data in files]
        found[name] = {
            "check": share([not passes(data) for data in damaged]),
            "libjpeg": share([bool(find_damage(data)) for data in damaged]),
        }
    return found


def share(found: list[bool]) -> float:
    return round(sum(found) / len(found), 3)


def verified(root: Path, processes: list[int], rounds: int) -> dict[str, Any]:
    """Damage 40 files of a data set in ten ways, and let ``verify`` find them."""
    paths = sorted(root.rglob("*.jpg"))
    chosen = random.Random(0).sample(paths, DAMAGED)
    ways = Damage([path.read_bytes() for path in paths[:200]]).ways()
    damage: list[Callable[[bytes], bytes]] = [
        *(ways[name] for name in SEEN_BY_VERIFY),
        lambda data: b"",
        lambda data: b"<html>404 Not Found</html>",
        lambda data: data[:100],
        lambda data: b"\x89PNG\r\n\x1a\n" + data[8:],
    ]
    for number, path in enumerate(chosen):
        path.write_bytes(damage[number % len(damage)](path.read_bytes()))
    seconds: dict[int, list[float]] = {number: [] for number in processes}
    all_found = True
    for _ in range(rounds):
        for number in processes:
            with contextlib.redirect_stdout(io.StringIO()):
                start = time.perf_counter()
                bad = verify(root, processes=number)
                seconds[number].append(time.perf_counter() - start)
            all_found &= sorted(finding.path for finding in bad) == sorted(map(str, chosen))
    return {
        "images_per_s": {str(k): round(len(paths) / statistics.median(spent)) for k, spent in seconds.items()},
        "damaged": DAMAGED,
        "found_all_and_no_others": all_found,
    }


def main() -> None:
    import torch  # not in the processes of verify

    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        root = make_dataset(Path(folder) / "set", images=options.images)
        files = [path.read_bytes() for path in sorted(root.rglob("*.jpg"))[: options.looked_at]]
        progressive = [as_progressive(data) for data in files]
        record = append_record(
            options,
            "images",
            bytes_per_file=round(statistics.mean(map(len, files))),
            ms_per_file=times(files, options.rounds),
            ms_per_progressive_file=times(progressive, options.rounds),
            share_found=shares(files),
            share_found_of_progressive=shares(progressive),
            shown_by_gpu={
                kind: shown_by_gpu(some[: options.shown])
                for kind, some in {"baseline": files, "progressive": progressive}.items()
                if torch.cuda.is_available()
            },
            verify=verified(root, options.processes, options.rounds),
        )
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
