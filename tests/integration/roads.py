"""The roads from a dataset to the training loop, over pictures that spell their number.

``compiled``   an ordinary ``ImageFolder`` with a ``Compose``, under ``proxyloader.DataLoader``
``server``     a dataset that calls ``server.proxy``, under ``proxyloader.DataLoader(server=server)``
``produced``   the same dataset under torch's own ``DataLoader``, each batch through ``server.produce_data``

The server of the last two may be one of ``VARIANTS``, as in ``server, old executor``.

On each of them a batch is ``(images, numbers)``: images (N, 3, 32, 32) float32, white being 1, and the numbers that
they must spell. ``tests/integration/conftest.py`` makes the fixtures below known to the tests. Nothing here imports
DALI before a pipeline is built, so workers that are not forked need not load it to find these classes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader as StockLoader, Dataset, IterableDataset, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from proxyloader import DataLoader

from ..faults import await_true
from ..numbered import read_numbers, spell_dataset

if TYPE_CHECKING:
    from proxyloader import ProxyServer

PICTURES = 48
BATCH = 4
BATCHES = PICTURES // BATCH
TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])


def read_bytes(path: str) -> NDArray[np.uint8]:
    """A loader for datasets that give their files to a server's proxy."""
    return np.fromfile(path, np.uint8)


def picture_folder(
    root: Path,
    transform: Callable[[Any], Any] = TRANSFORM,
    loader: Callable[[str], Any] = default_loader,
    kind: type[ImageFolder] = ImageFolder,
) -> Any:
    """The pictures of ``root`` as an ``ImageFolder`` whose labels are their numbers: 0, 1, 2, ..."""
    dataset = kind(str(root), transform=transform, loader=loader)
    dataset.samples = dataset.imgs = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    dataset.targets = [number for _, number in dataset.samples]
    return dataset


class Faulty(ImageFolder):
    """Raises the exception that there is for an index, or gives its transform what there is instead of a picture."""

    faults: dict[int, Any]

    def __getitem__(self, index: int) -> Any:
        if index not in self.faults:
            return super().__getitem__(index)
        fault = self.faults[index]
        if isinstance(fault, Exception):
            raise fault
        return self.transform(fault), index


class Stream(IterableDataset[Any]):
    """The pictures of a folder, each worker reading every so many of them; with two workers one has more."""

    def __init__(self, paths: Sequence[Any], transform: Any, read: Callable[[Any], Any]) -> None:
        self.paths, self.transform, self.read = paths, transform, read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, len(self.paths), step):
            yield self.transform(self.read(self.paths[number])), number


class Mapped(Dataset[Any]):
    """What a function makes of each item."""

    def __init__(self, make: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self.make, self.items = make, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.items[index])


class Streamed(IterableDataset[Any]):
    """The samples of a dataset, one after the other."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return map(self.dataset.__getitem__, range(len(self.dataset)))


def resized(images: Any) -> Any:
    from nvidia.dali import fn

    return fn.resize(images, size=[32, 32])


def picture_pipeline(
    device: str, batch_size: int = BATCH, exec_dynamic: bool = True, then: Callable[[Any], Any] = resized, **given: Any
) -> Any:
    """A hand-written DALI pipeline that does to encoded pictures what ``TRANSFORM`` does, or ``then``."""
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = device == "cuda"
    arguments = {"num_threads": 2, "device_id": 0 if on_gpu else None, "exec_dynamic": exec_dynamic} | given

    @pipeline_def(batch_size=batch_size, **arguments)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        images = then(fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB))
        return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=[0.0], std=[255.0])

    return graph()


class Produced:
    """A stock loader, each of whose batches goes through ``server.produce_data``."""

    def __init__(self, loader: StockLoader[Any], server: ProxyServer) -> None:
        self.loader, self.server = loader, server

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self.server.produce_data, self.loader)


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "deterministic": {"deterministic": True},
    "old executor": {"exec_dynamic": False},
    "in the calling thread": {"exec_async": False},
}


class Road:
    """One of the roads, with a server of its own where the road needs one.

    Args:
        kind: ``compiled``, ``server`` or ``produced``, perhaps with one of ``VARIANTS``.
        transform: of the compiled road.
        pipeline: arguments of ``picture_pipeline`` for a server's.

    Attributes:
        name: ``compiled``, ``server`` or ``produced``.
        root: of the pictures.
        device: that decodes them.
        server: opened; None on the compiled road.
    """

    def __init__(
        self,
        kind: str,
        root: Path,
        device: str = "cpu",
        deterministic: bool = False,
        transform: Callable[[Any], Any] = TRANSFORM,
        **pipeline: Any,
    ) -> None:
        self.kind, self.root, self.device, self.transform = kind, root, device, transform
        self.name, _, variant = kind.partition(", ")
        self.server: ProxyServer | None = None
        if self.name != "compiled":
            from proxyloader import ProxyServer

            pipeline = {"deterministic": deterministic} | VARIANTS[variant] | pipeline
            deterministic = pipeline.pop("deterministic")
            self.server = ProxyServer(picture_pipeline(device, **pipeline), deterministic)
            self.server.start_thread()

    def __enter__(self) -> Road:
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.stop_thread()

    def another(self, **pipeline: Any) -> Road:
        """One of the same kind, with a server of its own."""
        return Road(self.kind, self.root, self.device, **pipeline)

    def dataset(self, kind: type[ImageFolder] = ImageFolder, root: Path | None = None, **attributes: Any) -> Any:
        """The pictures as this road wants them; ``kind`` may misbehave, ``root`` may hold others."""
        if self.server is None:
            dataset = picture_folder(root or self.root, self.transform, kind=kind)
        else:
            dataset = picture_folder(root or self.root, self.server.proxy, read_bytes, kind)
        vars(dataset).update(attributes)
        return dataset

    def loader(self, dataset: Any = None, batch_size: int | None = BATCH, **arguments: Any) -> Any:
        """A loader of this road; ``arguments`` are torch's."""
        dataset = self.dataset() if dataset is None else dataset
        if self.name == "compiled":
            return DataLoader(dataset, batch_size, device=self.device, **arguments)
        if self.name == "server":
            return DataLoader(dataset, batch_size, server=self.server, **arguments)
        assert self.server is not None
        return Produced(StockLoader(dataset, batch_size, **arguments), self.server)


ROADS = ("compiled", "server", "produced")
START_METHODS = ("fork", "forkserver", "spawn")


def on_roads(*kinds: str) -> pytest.MarkDecorator:
    """Runs a test that takes a ``road`` on these instead of all three."""
    return pytest.mark.parametrize("road", kinds, indirect=True)


on_servers = on_roads("server", "produced")

PERSISTENT = pytest.mark.parametrize("persistent", [False, True], ids=["fresh workers", "persistent workers"])


@pytest.fixture(scope="session")
def spelled_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 JPEG files that spell 0 to 47."""
    return spell_dataset(tmp_path_factory.mktemp("spelled") / "set", PICTURES)


@pytest.fixture
def root(spelled_root: Path, tmp_path: Path) -> Path:
    """A copy of the pictures, which may be hurt."""
    return Path(shutil.copytree(spelled_root, tmp_path / "set"))


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest, spelled_root: Path, device: str) -> Iterator[Road]:
    """Runs the test on each road, on the CPU and, where there is one, on a GPU."""
    with Road(request.param, spelled_root, device) as road:
        yield road


@pytest.fixture(scope="session", autouse=True)
def warm_forkserver() -> None:
    """Children of the forkserver begin with what it has imported, and so they start as fast as forked ones."""
    multiprocessing.set_forkserver_preload(["torch", "torchvision.datasets", "proxyloader.workers.worker", __name__])


@pytest.fixture(params=START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    """Runs the test with each way to start worker processes; for ``multiprocessing_context=``.

    A spawned worker takes two seconds of CPU time to start: one worker and one epoch, or persistent ones, if it can be.
    """
    return str(request.param)


def grown(data: bytes, size_bytes: int) -> bytes:
    """The same JPEG with comments in it, as long as asked for: large to move, quick to decode."""
    comment = b"\xff\xfe\xff\xff" + bytes(65533)
    return data[:2] + comment * (size_bytes // len(comment)) + data[2:]


def assert_pictures_match(images: torch.Tensor, numbers: torch.Tensor | Sequence[int]) -> None:
    """Every single picture of a batch is the one that its number says."""
    expected = numbers.tolist() if isinstance(numbers, torch.Tensor) else list(numbers)
    found = read_numbers(images, white=1.0)
    wrong = {place: pair for place, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]}
    assert len(found) == len(expected), f"{len(found)} pictures for {len(expected)} numbers"
    assert not wrong, f"{len(wrong)} of {len(found)} pictures are others; place: (found, expected) {wrong}"


def assert_batches_match(batches: Iterable[Any], numbers: Iterable[int] = range(PICTURES)) -> None:
    """The batches hold these numbers, in this order, and for each of them its own picture."""
    seen: list[int] = []
    for images, labels in batches:
        assert_pictures_match(images, labels)
        seen += labels.tolist()
    assert seen == list(numbers), f"the batches hold the numbers {seen}"


def take(loader: Any, count: int) -> None:
    """Look at the first ``count`` batches of an epoch, and leave it."""
    assert_batches_match(itertools.islice(loader, count), range(BATCH * count))


def assert_only_these_fail(found: list[Any], failed: Iterable[int], kinds: Any = Exception) -> None:
    """Of the outcomes of an epoch the batches ``failed`` are errors, and all others hold their own pictures."""
    assert len(found) == BATCHES
    for at, batch in enumerate(found):
        if at in set(failed):
            assert isinstance(batch, kinds), f"batch {at} is {batch!r}"
        else:
            assert not isinstance(batch, Exception), f"batch {at} is {batch!r}"
            assert_batches_match([batch], range(BATCH * at, BATCH * (at + 1)))


# --- how far workers are ---------------------------------------------------------------------------------------------


class Counted(ImageFolder):
    """Notes in the file ``log`` each picture that was read: one byte for each."""

    log: str

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        with open(self.log, "ab", buffering=0) as file:
            file.write(b".")
        return sample


class Heavy(Counted):
    """Gives a long text with each picture, so that a few batches fill the pipe to the training process."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), "x" * 100_000)


class Gated(ImageFolder):
    """Waits before picture 16 until somebody opens the named pipe ``gate`` for writing."""

    gate: str

    def __getitem__(self, index: int) -> Any:
        if index == 16:
            with open(self.gate, "rb"):
                pass
        return super().__getitem__(index)


def wait_until_read(log: Path, pictures: int) -> None:
    """Wait until the workers of a ``Counted`` have read so many."""
    await_true(lambda: log.exists() and log.stat().st_size >= pictures)


def runs_under_way(road: Road, loader: Any) -> int:
    """How many batches DALI works on or holds ready."""
    queues = [road.server.runs] if road.server is not None else list(loader._servers.queues.values())
    return sum(queue.num_runs for queue in queues)


class Batches(list[list[int]]):
    """A batch sampler of any batches that says that they are of the pipeline's size."""

    batch_size = BATCH
