"""Image folders in an object store: the samples are ImageFolder's, and the files of a batch are fetched together."""

from __future__ import annotations

import pickle
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader import ImageError, RemoteImageFolder

from ..limits import WAIT_S

fsspec = pytest.importorskip("fsspec")

TRAIN = transforms.Compose([transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
LATENCY_S = 0.02


@pytest.fixture
def in_memory(photos: Path) -> Iterator[str]:
    """The photographs in fsspec's file system in memory, with files beside them that are no images."""
    files = fsspec.filesystem("memory")
    files.put(str(photos) + "/", "/bucket/train", recursive=True)
    files.pipe("/bucket/train/README.txt", b"of no class")
    files.pipe("/bucket/train/class_000/notes.txt", b"no image")
    yield "memory://bucket/train"
    files.store.clear()


class Store:
    """An S3 server that answers each request for a file after ``LATENCY_S``.

    Attributes:
        waits_for: how many files must have been asked for at the same time before one is answered.
        most: largest number of files that were asked for at the same time.
        asked: how many files were asked for.
        failing: how many of the next requests for a file are answered by an error of the server.
    """

    def __init__(self) -> None:
        server = pytest.importorskip("moto.server")
        from werkzeug.serving import make_server

        self._application = server.DomainDispatcherApplication(server.create_backend_app)
        self._lock = threading.Lock()
        self._now = self.most = self.asked = self.failing = 0
        self.waits_for = 0
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="QueueFeederStore", daemon=True)
        self._thread.start()
        self.options: dict[str, Any] = dict(
            key="key",
            secret="secret",
            client_kwargs={"endpoint_url": f"http://127.0.0.1:{self._server.port}", "region_name": "eu-west-1"},
            config_kwargs={"retries": {"max_attempts": 0}},  # those of RemoteImageFolder count
        )

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith(".jpg"):
            return self._application(environ, start_response)
        with self._lock:
            self.asked += 1
            self._now += 1
            self.most = max(self.most, self._now)
            fails, self.failing = self.failing > 0, max(0, self.failing - 1)
        try:
            time.sleep(LATENCY_S)
            deadline = time.monotonic() + WAIT_S
            while self.most < self.waits_for and time.monotonic() < deadline:
                time.sleep(LATENCY_S)
            if fails:
                start_response("503 Slow Down", [("Content-Type", "text/plain")])
                return [b""]
            return self._application(environ, start_response)
        finally:
            with self._lock:
                self._now -= 1

    def close(self) -> None:
        # moto keeps its buckets for the process, and a later fixture makes its own.
        url = self.options["client_kwargs"]["endpoint_url"]
        urllib.request.urlopen(f"{url}/moto-api/reset", data=b"", timeout=WAIT_S).close()
        self._server.shutdown()
        self._thread.join(WAIT_S)
        self._server.server_close()


@pytest.fixture(scope="module")
def store(photos: Path) -> Iterator[Store]:
    server = Store()
    try:
        files = pytest.importorskip("s3fs").S3FileSystem(**server.options)
        files.mkdir("bucket")
        files.put(str(photos) + "/", "bucket/train", recursive=True)
        yield server
    finally:
        server.close()


def seen(kind: Any, dataset: Any, num_workers: int, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    return list(kind(dataset, batch_size=12, shuffle=True, num_workers=num_workers, **options))


def test_samples_are_those_of_an_image_folder_and_a_root_without_is_refused(in_memory: str, photos: Path) -> None:
    remote, local = RemoteImageFolder(in_memory), ImageFolder(str(photos))
    assert (remote.classes, remote.class_to_idx, remote.targets) == (local.classes, local.class_to_idx, local.targets)
    names = [url.removeprefix("memory:///bucket/train/") for url, _ in remote.samples]
    assert names == [str(Path(path).relative_to(photos)) for path, _ in local.samples]
    assert len(remote) == len(local) == 48
    image, label = remote[7]
    wanted, wanted_label = local[7]
    assert label == wanted_label and image.tobytes() == wanted.tobytes()
    dataset = pickle.loads(pickle.dumps(RemoteImageFolder(in_memory, TRAIN)))
    assert dataset[3][1] == 0
    fsspec.filesystem("memory").pipe("/bucket/train/empty/notes.txt", b"")
    with pytest.raises(FileNotFoundError, match="no image in empty"):
        RemoteImageFolder(in_memory)
    with pytest.raises(FileNotFoundError):
        RemoteImageFolder("memory://bucket/nothing")
    with pytest.raises(ValueError, match="connections must be an integer"):
        RemoteImageFolder(in_memory, connections=0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 3])
def test_batches_are_those_of_the_local_folder(
    in_memory: str, photos: Path, num_workers: int, seed: int | None, device: str
) -> None:
    options = dict(device=device, seed=seed)
    ours = seen(proxyloader.DataLoader, RemoteImageFolder(in_memory, TRAIN), num_workers, **options)
    local = seen(proxyloader.DataLoader, ImageFolder(str(photos), TRAIN), num_workers, **options)
    torch.testing.assert_close(ours, local, rtol=0, atol=0)
    stock = seen(StockLoader, RemoteImageFolder(in_memory, TRAIN), num_workers)
    local = seen(StockLoader, ImageFolder(str(photos), TRAIN), num_workers)
    torch.testing.assert_close(stock, local, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [StockLoader, proxyloader.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_files_of_a_batch_are_fetched_at_the_same_time(kind: Any, num_workers: int, store: Store) -> None:
    store.most = 0
    dataset = Subset(RemoteImageFolder("s3://bucket/train", TRAIN, storage_options=store.options), range(40))
    batches = seen(kind, dataset, num_workers, **({"device": "cpu"} if kind is not StockLoader else {}))
    assert sum(len(labels) for _, labels in batches) == 40
    assert store.most >= 6


def test_as_many_as_there_may_be_connections_and_no_more(store: Store) -> None:
    bounded = store.options | {"config_kwargs": {"max_pool_connections": 3}}
    for options, connections, most in ((store.options, 2, 2), (store.options, 32, 32), (bounded, 64, 3)):
        dataset = RemoteImageFolder("s3://bucket/train", storage_options=options, connections=connections)
        store.most, store.waits_for = 0, most
        dataset.fetch_ahead(range(40))
        store.waits_for = 0
        assert store.most == most


@pytest.fixture
def obstore_opens_s3() -> Iterator[None]:
    pytest.importorskip("obstore.fsspec").register("s3")
    yield
    fsspec.register_implementation("s3", pytest.importorskip("s3fs").S3FileSystem, clobber=True)


def test_files_are_fetched_by_obstore_at_the_same_time_but_not_in_forked_workers(
    store: Store, photos: Path, device: str, obstore_opens_s3: None
) -> None:
    endpoint = store.options["client_kwargs"]["endpoint_url"]
    config = dict(endpoint=endpoint, region="eu-west-1", access_key_id="key", secret_access_key="secret")
    options = dict(config=config, client_options={"allow_http": True})
    dataset = RemoteImageFolder("s3://bucket/train", TRAIN, storage_options=options)
    store.most = 0
    ours = seen(proxyloader.DataLoader, dataset, 0, device=device)
    assert store.most >= 6
    local = seen(proxyloader.DataLoader, ImageFolder(str(photos), TRAIN), 0, device=device)
    torch.testing.assert_close(ours, local, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="multiprocessing_context='spawn'"):
        seen(proxyloader.DataLoader, dataset, 1, device=device, multiprocessing_context="fork")


def test_a_request_that_fails_is_tried_again(store: Store) -> None:
    given: dict[str, Any] = {"storage_options": store.options, "connections": 1}
    dataset = RemoteImageFolder("s3://bucket/train", TRAIN, **given)
    store.failing = 3
    assert dataset[0][0].shape == (3, 32, 32) and store.failing == 0
    dataset = RemoteImageFolder("s3://bucket/train", TRAIN, **given, retries=1)
    store.failing = 100
    for on_error in ("raise", "skip", "replace"):
        loader = proxyloader.DataLoader(Subset(dataset, [1]), device="cpu", on_error=on_error)
        with pytest.raises(ImageError, match=r"s3://bucket/train/.*cannot be fetched") as caught:
            list(loader)
        assert caught.value.code == "machine"
    store.failing = 0


def test_a_missing_file_is_named_and_left_out_where_that_is_asked_for(in_memory: str) -> None:
    dataset = RemoteImageFolder(in_memory, TRAIN)
    url, _ = dataset.samples[5]
    fsspec.filesystem("memory").rm(url)
    with pytest.raises(ImageError, match=r"dataset\[5\].*memory://.*cannot be read: .*Replace the file"):
        seen(proxyloader.DataLoader, dataset, 0, device="cpu")
    loader = proxyloader.DataLoader(dataset, batch_size=12, device="cpu", on_error="skip")
    assert sum(len(labels) for _, labels in loader) == 47
    assert [(sample.index, sample.path) for sample in loader.errors] == [(5, url)]


def test_files_are_kept_in_a_folder_of_limited_size_and_the_oldest_go(
    store: Store, in_memory: str, tmp_path: Path
) -> None:
    pytest.importorskip("diskcache")
    asked, batches = [], []
    for _ in range(2):
        options = dict(storage_options=store.options, cache_dir=tmp_path / "large")
        dataset = RemoteImageFolder("s3://bucket/train", TRAIN, **options)
        batches.append(seen(proxyloader.DataLoader, dataset, 2, device="cpu"))
        asked.append(store.asked)
    assert asked[0] == asked[1]
    torch.testing.assert_close(*batches, rtol=0, atol=0)
    limit = 1 << 20
    dataset = RemoteImageFolder(in_memory, TRAIN, cache_dir=tmp_path / "small", cache_bytes=limit)
    files = fsspec.filesystem("memory")
    url, _ = dataset.samples[0]
    (name, size, _), data = dataset._versions[url], files.cat_file(url)
    for version in range(300):
        dataset._versions[url] = name, size, str(version)
        assert dataset._fetch(url) == data
    assert 300 * len(data) > 1.5 * limit > dataset._cache.volume()
