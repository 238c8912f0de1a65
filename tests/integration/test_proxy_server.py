"""ProxyServer with hand-written pipelines: under proxyloader's DataLoader, a stock one, and upstream's own."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.plugin.pytorch.experimental import proxy as upstream
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, EncodedImage, InputError, PipelineError, ProxyServer, pipelines
from proxyloader.dali import jpeg_engines

from ..compare import jpeg_of
from ..faults import in_fork
from ..limits import STOP_S
from ..outcomes import raises

BATCH = 8


def read_bytes(path: str) -> np.ndarray[Any, Any]:
    return np.fromfile(path, np.uint8)


def resized(device: str, batch_size: int = BATCH, **arguments: Any) -> Any:
    """Decode, resize: one input, one output."""

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=0 if device == "cuda" else None, **arguments)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        images = fn.decoders.image(encoded, device="mixed" if device == "cuda" else "cpu", output_type=types.RGB)
        return fn.resize(images, size=[32, 32])

    return graph()


def spelled(device: str, batch_size: int = BATCH, **arguments: Any) -> Any:
    """Two inputs, two outputs, from one random shift: the sum and the difference, and the same shift in both."""

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=0 if device == "cuda" else None, seed=3, **arguments)
    def graph() -> Any:
        a, b = fn.external_source(name="a", no_copy=True), fn.external_source(name="b", no_copy=True)
        shift = fn.random.uniform(range=[100, 200], dtype=types.FLOAT)
        first, second = a + b + shift, a - b + shift
        return (first.gpu(), second.gpu()) if device == "cuda" else (first, second)

    return graph()


@pytest.fixture
def images_in(folder: ImageFolder) -> Any:
    """The photographs through a server's proxy."""

    def through(server: ProxyServer) -> ImageFolder:
        return ImageFolder(folder.root, transform=server.proxy, loader=read_bytes)

    return through


def labels_of(batches: Any) -> list[int]:
    return [int(label) for _, labels in batches for label in labels]


def spell(folder: ImageFolder) -> torch.Tensor:
    """The mean colour of each picture: what tells one from another. (N, 3)"""
    decoded = [np.asarray(Image.open(path), np.float32) for path, _ in folder.samples]
    return torch.stack([torch.from_numpy(image.mean((0, 1))) for image in decoded])


def assert_right(images: torch.Tensor, indices: Any, folder: ImageFolder) -> None:
    colours = spell(folder)
    nearest = torch.cdist(images.float().cpu().mean((1, 2)), colours).argmin(1)
    assert nearest.tolist() == list(indices)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_hand_written_pipeline_under_our_loader(
    folder: ImageFolder, images_in: Any, workers: int, device: str
) -> None:
    with ProxyServer(resized(device)) as server:
        loader = DataLoader(images_in(server), BATCH, num_workers=workers, server=server)
        for _ in range(2):
            batches = list(loader)
            images = torch.cat([images for images, _ in batches])
            assert images.shape == (48, 32, 32, 3) and images.device.type == device
            assert labels_of(batches) == folder.targets
            assert_right(images, range(48), folder)


@pytest.mark.parametrize("translated", [True, False], ids=["images", "no images"])
def test_a_server_that_nothing_goes_through_is_said_to_be_idle(
    folder: ImageFolder, images_in: Any, translated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with ProxyServer(resized("cpu")) as server:
        list(DataLoader(images_in(server), BATCH, server=server))
        assert "goes through" not in caplog.text
        folder.transform = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
        dataset: Any = folder if translated else list(range(16))
        loader = DataLoader(dataset, BATCH, server=server, device="cpu")
        for _ in range(2):
            list(loader)
    assert caplog.text.count("given a server=, and nothing in its first batch goes through that") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_and_produce_data(folder: ImageFolder, images_in: Any, workers: int, device: str) -> None:
    with ProxyServer(resized(device), deterministic=True) as server:
        loader = StockLoader(images_in(server), BATCH, num_workers=workers, drop_last=True)
        found = [server.produce_data(batch) for batch in loader]
        assert_right(torch.cat([images for images, _ in found]), range(48), folder)
        images, _ = server.produce_data(next(iter(loader)))
        assert_right(images, range(8), folder)


def test_upstreams_own_loader_takes_our_server(folder: ImageFolder, images_in: Any) -> None:
    with ProxyServer(resized("cpu")) as server:
        loader = upstream.DataLoader(server, images_in(server), batch_size=BATCH, num_workers=1)
        assert_right(torch.cat([images for images, _ in loader]), range(48), folder)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_proxy_reaches_workers_that_are_not_forked(
    folder: ImageFolder, images_in: Any, method: str, device: str
) -> None:
    with ProxyServer(resized(device)) as server:
        arguments: dict[str, Any] = dict(batch_size=BATCH, num_workers=1, multiprocessing_context=method)
        ours = DataLoader(images_in(server), server=server, **arguments)
        assert_right(torch.cat([images for images, _ in ours]), range(48), folder)
        stock = StockLoader(images_in(server), **arguments)
        assert_right(torch.cat([server.produce_data(images) for images, _ in stock]), range(48), folder)


class HoldsServer(ImageFolder):
    """Asks its server for the proxy at each sample."""

    server: Any

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return self.server.proxy(read_bytes(path)), target


@pytest.mark.parametrize("method", [None, "fork"])
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_a_dataset_may_hold_the_server_itself(
    folder: ImageFolder, method: str | None, stock: bool, device: str
) -> None:
    with ProxyServer(resized(device)) as server:
        dataset = HoldsServer(folder.root)
        dataset.server = server
        arguments: dict[str, Any] = dict(
            batch_size=BATCH, multiprocessing_context=method, num_workers=int(bool(method))
        )
        if stock:
            found = [server.produce_data(images) for images, _ in StockLoader(dataset, **arguments)]
        else:
            found = [images for images, _ in DataLoader(dataset, server=server, **arguments)]
        assert_right(torch.cat(found), range(48), folder)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_server_that_is_copied_points_to_its_proxy(copied: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled; give server\.proxy to the dataset"):
        copied(ProxyServer(resized("cpu")))


class Numbers(Dataset[Any]):
    def __init__(self, call: Any, size: int = 24) -> None:
        self.call, self.size = call, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        first, second = self.call(a=np.float32([index, index]), b=np.float32([1, 2]))
        return {"index": index, "outputs": (first, second), "name": f"n{index}"}


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("workers", [0, 2])
def test_several_inputs_and_outputs_of_one_sample_come_from_one_run(workers: int, stock: bool, device: str) -> None:
    with ProxyServer(spelled(device)) as server:
        dataset = Numbers(server.proxy)
        arguments: dict[str, Any] = dict(batch_size=5, num_workers=workers)
        if stock:
            batches = [server.produce_data(batch) for batch in StockLoader(dataset, **arguments)]
        else:
            batches = list(DataLoader(dataset, server=server, **arguments))
        for batch in batches:
            first, second = batch["outputs"]
            # (a + b + shift) - (a - b + shift) is 2 b only if both have the same shift
            assert torch.allclose((first - second).cpu(), torch.tensor([2.0, 4.0]).expand(len(first), 2), atol=1e-3)
            assert batch["name"] == [f"n{k}" for k in batch["index"].tolist()]


NUMBERS: dict[str, Callable[[int], Any]] = {
    "array": np.array,
    "float_of_numpy": np.float32,
    "tensor": torch.tensor,
    "of_python": int,
    "truth": bool,
    "with_a_dimension": lambda k: np.array([k]),
    "transposed": lambda k: np.arange(k, k + 6).reshape(2, 3).T,
}


class Given(Dataset[Any]):
    """Six samples, each a number in all forms."""

    def __init__(self, call: Any, as_arrays: bool = False) -> None:
        self.call, self.as_arrays = call, as_arrays

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        given = {name: make(index) for name, make in NUMBERS.items()}
        if self.as_arrays:
            given = {name: np.asarray(value, order="C") for name, value in given.items()}
        return self.call(**given)


def one_more() -> Any:
    @pipeline_def(batch_size=4, num_threads=2, device_id=None)
    def graph() -> Any:
        return tuple(fn.external_source(name=name, no_copy=True) + 1 for name in NUMBERS)

    return graph()


@pytest.fixture(scope="module")
def as_upstream_gives_them() -> list[Any]:
    """Upstream's server takes five seconds to end, so it is asked once."""
    with upstream.DALIServer(one_more()) as server:  # which takes nothing but arrays on a CPU
        dataset = Given(server.proxy, as_arrays=True)
        return list(upstream.DataLoader(server, dataset, batch_size=4, num_workers=1))


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_numbers_get_no_dimension_of_their_own_as_with_upstreams_server(
    as_upstream_gives_them: list[Any], method: str | None, stock: bool
) -> None:
    expected = as_upstream_gives_them
    assert [tuple(output.shape) for output in expected[0]] == [(4,)] * 5 + [(4, 1), (4, 3, 2)]
    arguments: dict[str, Any] = dict(batch_size=4, num_workers=int(bool(method)), multiprocessing_context=method)
    with ProxyServer(one_more()) as server:
        dataset = Given(server.proxy)
        if stock:
            found = [server.produce_data(batch) for batch in StockLoader(dataset, **arguments)]
        else:
            found = list(DataLoader(dataset, server=server, **arguments))
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected):
        for name, output, other in zip(NUMBERS, ours, theirs):
            assert (output.dtype, output.shape) == (other.dtype, other.shape), name
            assert torch.equal(output, other), name


class Places(Dataset[Any]):
    """Places in a list of five: the last one is behind its end."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.call(np.int32(index)), index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_number_that_the_pipeline_fails_on_is_left_out_alone(workers: int) -> None:
    @pipeline_def(batch_size=4, num_threads=2, device_id=None)
    def graph() -> Any:
        place = fn.stack(fn.external_source(name="place", no_copy=True))
        return fn.slice(types.Constant([10, 11, 12, 13, 14], device="cpu"), start=place, shape=[1], axes=[0])

    with ProxyServer(graph()) as server:
        loader = DataLoader(Places(server.proxy), 4, num_workers=workers, server=server, on_error="skip")
        assert [(found.tolist(), places.tolist()) for found, places in loader] == [
            ([[10], [11], [12], [13]], [0, 1, 2, 3]),
            ([[14]], [4]),
        ]
    assert [error.index for error in loader.errors] == [5]


def test_the_same_seed_gives_the_same_random_outputs_for_any_number_of_workers(device: str) -> None:
    found = []
    for workers in (0, 1, 2, 3):
        with ProxyServer(spelled(device)) as server:
            loader = DataLoader(Numbers(server.proxy), 5, num_workers=workers, server=server)
            found.append(torch.cat([batch["outputs"][0].cpu() for batch in loader]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_deterministic_servers_draws_follow_from_the_batches_that_loops_had_until_they_were_left(device: str) -> None:
    found = []
    for workers in (0, 1, 3):
        with ProxyServer(spelled(device), deterministic=True) as server:
            loader = DataLoader(Numbers(server.proxy), 2, num_workers=workers, server=server)
            loops = [list(itertools.islice(loader, 3)) for _ in range(3)]
            found.append(torch.stack([batch["outputs"][0].cpu() for loop in loops for batch in loop]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("method", ["ours", "stock"])
def test_two_loaders_on_one_server_take_turns_in_any_way(folder: ImageFolder, images_in: Any, method: str) -> None:
    with ProxyServer(resized("cpu")) as server:

        def loader(indices: Any, workers: int) -> Any:
            dataset = Subset(images_in(server), indices)
            if method == "ours":
                return DataLoader(dataset, 4, num_workers=workers, server=server)
            return map(server.produce_data, StockLoader(dataset, 4, num_workers=workers))

        for (a, _), (b, _), at in zip(loader(range(24), 1), loader(range(24, 48), 2), range(6), strict=True):
            assert_right(a, range(4 * at, 4 * at + 4), folder)
            assert_right(b, range(24 + 4 * at, 28 + 4 * at), folder)
        for at, (a, _) in enumerate(loader(range(24), 1)):
            assert_right(a, range(4 * at, 4 * at + 4), folder)
            for inner, (b, _) in enumerate(loader(range(24, 32), 1)):
                assert_right(b, range(24 + 4 * inner, 28 + 4 * inner), folder)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_after_a_break_the_next_epochs_are_right(
    folder: ImageFolder, images_in: Any, persistent: bool, device: str
) -> None:
    with ProxyServer(resized(device)) as server:
        loader = DataLoader(
            images_in(server), 4, num_workers=2, prefetch_factor=4, persistent_workers=persistent, server=server
        )
        for stop in (0, 3, 1):
            for at, (images, _) in enumerate(loader):
                assert_right(images, range(4 * at, 4 * at + 4), folder)
                if at == stop:
                    break
        assert_right(torch.cat([images for images, _ in loader]), range(48), folder)


def test_stopping_is_quick_and_what_was_under_way_appears_nowhere(
    folder: ImageFolder, images_in: Any, device: str
) -> None:
    server = ProxyServer(resized(device))
    loader = DataLoader(images_in(server), 4, num_workers=2, server=server)
    for _ in range(3):
        with server:
            batches = iter(loader)
            next(batches)
            start_s = time.perf_counter()
        assert time.perf_counter() - start_s < STOP_S
        del batches
    assert_right(torch.cat([images for images, _ in loader]), range(48), folder)


def test_a_corrupt_image_fails_its_own_batch_and_no_other(folder: ImageFolder, images_in: Any, device: str) -> None:
    with ProxyServer(resized(device)) as server:
        dataset = images_in(server)
        dataset.loader = SometimesBad([path for path, _ in dataset.samples[21:23]])
        loader = DataLoader(dataset, 4, num_workers=2, server=server)
        for _ in range(2):
            batches, right = iter(loader), 0
            for at in range(12):
                if at == 5:
                    with raises(PipelineError, code="failed", indices=[20, 21, 22, 23]):
                        next(batches)
                else:
                    assert_right(next(batches)[0], range(4 * at, 4 * at + 4), folder)
                    right += 1
            assert right == 11


class SometimesBad:
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __call__(self, path: str) -> Any:
        return np.zeros(500, np.uint8) if path in self.paths else read_bytes(path)


class Inputs(Dataset[Any]):
    """Gives sample k of a list to the proxy."""

    def __init__(self, call: Any, values: list[Any]) -> None:
        self.call, self.values = call, values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.call(self.values[index])


def doubled(batch_size: int = 2, **arguments: Any) -> Any:
    @pipeline_def(batch_size=batch_size, num_threads=1, device_id=None, **arguments)
    def graph() -> Any:
        return 2 * fn.external_source(name="x")

    return graph()


GOOD = [np.float32([k, k + 1]) for k in range(2)]


@pytest.mark.parametrize(
    ("bad", "code", "index"),
    [
        (np.float64([1, 2]), "wrong-kind", None),
        (np.float32([[1, 2]]), "wrong-kind", None),
        ("text", "wrong-input", 3),
        (None, "wrong-input", 3),
        (np.array([object()]), "wrong-input", 3),
    ],
    ids=["another dtype", "another number of dimensions", "a string", "None", "objects"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_input_that_dali_cannot_take_is_an_input_error_and_the_next_batch_is_right(
    bad: Any, code: str, index: int | None, workers: int
) -> None:
    with ProxyServer(doubled()) as server:
        loader = DataLoader(Inputs(server.proxy, [*GOOD, GOOD[0], bad, *GOOD]), 2, num_workers=workers, server=server)
        for _ in range(2):
            batches = iter(loader)
            assert next(batches).tolist() == [[0, 2], [2, 4]]
            with raises(InputError, code=code, index=index):
                next(batches)
            assert next(batches).tolist() == [[0, 2], [2, 4]]


@pytest.mark.parametrize("exec_dynamic", [True, False])
def test_a_whole_batch_of_another_kind_is_refused_before_dali_sees_it(exec_dynamic: bool) -> None:
    with ProxyServer(doubled(exec_dynamic=exec_dynamic)) as server:
        values = [*GOOD, *(np.float64(value) for value in GOOD), *(value[None] for value in GOOD), *GOOD]
        batches = iter(DataLoader(Inputs(server.proxy, values), 2, server=server))
        assert next(batches).tolist() == [[0, 2], [2, 4]]
        for _ in range(2):
            with raises(InputError, code="wrong-kind"):
                next(batches)
        assert next(batches).tolist() == [[0, 2], [2, 4]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", [{"exec_dynamic": False}, {"exec_async": False}], ids=["old", "in the calling thread"])
@pytest.mark.timeout(60)
def test_other_executors_fail_on_the_bad_batch_alone(
    folder: ImageFolder, images_in: Any, workers: int, how: dict[str, bool]
) -> None:
    with ProxyServer(resized("cpu", **how)) as server:
        dataset = images_in(server)
        dataset.loader = SometimesBad([path for path, _ in dataset.samples[21:23]])
        for _ in range(2):
            batches, failed = iter(DataLoader(dataset, 4, num_workers=workers, server=server)), []
            for at in range(12):
                try:
                    assert_right(next(batches)[0], range(4 * at, 4 * at + 4), folder)
                except PipelineError:
                    failed.append(at)
            assert failed == [5]


@pytest.mark.parametrize("exec_dynamic", [True, False])
def test_outputs_kept_for_long_stay_what_they_were(exec_dynamic: bool) -> None:
    with ProxyServer(doubled(exec_dynamic=exec_dynamic)) as server:
        values = [np.float32([k, k]) for k in range(40)]
        kept = list(DataLoader(Inputs(server.proxy, values), 2, num_workers=1, server=server))
        assert torch.cat(kept)[:, 0].tolist() == [2.0 * k for k in range(40)]


def test_a_batch_larger_than_the_pipelines_is_run_in_parts() -> None:
    with ProxyServer(doubled(batch_size=2)) as server:
        values = [np.float32([k]) for k in range(7)]
        for workers in (0, 1):
            (batch,) = DataLoader(Inputs(server.proxy, values), 7, num_workers=workers, server=server)
            assert batch[:, 0].tolist() == [2.0 * k for k in range(7)]


def test_images_of_several_sizes_reach_a_collate_fn_one_by_one(folder: ImageFolder) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def graph() -> Any:
        return fn.decoders.image(fn.external_source(name="images"), output_type=types.RGB)

    with ProxyServer(graph()) as server:
        dataset = ImageFolder(folder.root, transform=server.proxy, loader=read_bytes)
        batches = list(DataLoader(dataset, 12, num_workers=1, collate_fn=list, server=server))
        found = [image for batch in batches for image, _ in batch]
        assert len({image.shape for image in found}) > 1
        colours = torch.stack([image.float().mean((0, 1)) for image in found])
        assert torch.allclose(colours, spell(folder), atol=0.5)


@dataclasses.dataclass(frozen=True)
class Pair:
    image: Any
    label: Any


Named = namedtuple("Named", "image label")


class Slotted:
    __slots__ = ("image",)

    def __init__(self, image: Any) -> None:
        self.image = image


class Structures(Dataset[Any]):
    def __init__(self, call: Any, make: Any) -> None:
        self.call, self.make = call, make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.make(self.call(np.float32([index])), index)


def take(thing: Any) -> Any:
    return thing


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    [Pair, Named, lambda image, label: Slotted(image), lambda image, label: {"a": [(image, label)]}],
    ids=["frozen dataclass", "namedtuple", "slots", "nested"],
)
def test_an_image_is_found_wherever_the_sample_holds_it(make: Any, workers: int) -> None:
    with ProxyServer(doubled(batch_size=4)) as server:
        loader = DataLoader(Structures(server.proxy, make), 4, collate_fn=take, num_workers=workers, server=server)
        (samples,) = loader
        expected = [make(torch.tensor([2.0 * k]), k) for k in range(4)]
        assert repr_of(samples) == repr_of(expected)


def repr_of(samples: list[Any]) -> list[str]:
    return [repr([sample.image]) if isinstance(sample, Slotted) else repr(sample) for sample in samples]


def test_produce_data_fills_lists_dicts_and_objects_in_place_and_may_be_called_twice() -> None:
    with ProxyServer(doubled(batch_size=4)) as server:
        samples = [server.proxy(np.float32([k])) for k in range(3)]
        held = {"list": [samples[0], 5], "pair": Pair(samples[1], "x"), "named": Named(samples[2], samples[0])}
        found = server.produce_data(held)
        assert found is held and found["list"][0].tolist() == [0.0] and found["pair"].image.tolist() == [2.0]
        assert type(found["named"]) is Named and found["named"].image.tolist() == [4.0]
        assert server.produce_data(found) is found
        again = [samples[0]]
        assert server.produce_data(again)[0].tolist() == server.produce_data([samples[0]])[0].tolist() == [0.0]


class Stream(IterableDataset[Any]):
    def __init__(self, call: Any) -> None:
        self.call = call

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        own = range(7) if info is None else range(info.id, 7, info.num_workers)
        yield from ((self.call(np.float32([k])), k) for k in own)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [2, None])
def test_an_iterable_dataset(workers: int, batch_size: int | None) -> None:
    with ProxyServer(doubled()) as server:
        for _ in range(2):
            ours = list(DataLoader(Stream(server.proxy), batch_size, num_workers=workers, server=server))
            stock = StockLoader(Stream(lambda value: 2 * torch.tensor(value)), batch_size, num_workers=workers)
            assert list(map(str, ours)) == list(map(str, stock))


def test_the_proxy_says_which_inputs_it_takes() -> None:
    with ProxyServer(spelled("cpu")) as server:
        for call in (lambda: server.proxy(1, 2), lambda: server.proxy(a=1), lambda: server.proxy(a=1, c=2)):
            with raises(InputError, code="wrong-number") as caught:
                call()
            assert "server.proxy(a=..., b=...)" in str(caught.value)
        with pytest.raises(ValueError, match="too many positional arguments"):  # DALI's words
            server.proxy(1, 2)
        copy = pickle.loads(pickle.dumps(server.proxy))
        assert copy.input_names == ("a", "b") and copy.server == server.runs.key


def test_in_a_forked_child_a_server_and_its_pipeline_say_whose_they_are() -> None:
    with ProxyServer(doubled()) as server:
        batch = default_collate([server.proxy(float(number)) for number in range(2)])
        uses: list[Callable[[], Any]] = [
            lambda: server.produce_data(batch),
            lambda: next(iter(DataLoader(Stream(server.proxy), 2, server=server))),
            lambda: ProxyServer(server.pipeline),
        ]

        def told() -> None:
            for use in uses:
                with raises(PipelineError, code="forked"):
                    use()

        assert in_fork(told) == 0
        assert server.produce_data(batch).flatten().tolist() == [0, 2]


def test_only_a_pipeline_with_inputs_makes_a_server() -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def no_inputs() -> Any:
        return fn.random.coin_flip()

    with pytest.raises(TypeError, match="DALI pipeline, got str$"):
        ProxyServer("a pipeline")
    with pytest.raises(TypeError, match="DALI pipeline, got function; call it"):
        ProxyServer(no_inputs)
    with pytest.raises(RuntimeError, match=r"has no inputs.*fn.external_source\(name=.*pipelines.training\(source="):
        ProxyServer(no_inputs())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": lambda: [np.zeros(1)]}, "input 'x' of the pipeline has a source of its own.* Leave out source="),
        ({"repeat_last": True}, "input 'x' of the pipeline has repeat_last=True.* leave it out"),
    ],
    ids=["source", "repeat_last"],
)
def test_an_input_that_the_proxy_cannot_feed_is_refused(arguments: Any, message: str) -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph() -> Any:
        return fn.external_source(name="x", **arguments)

    with pytest.raises(ValueError, match=message):
        ProxyServer(graph())


def test_decoded_images_where_bytes_are_declared_are_told_of_a_loader(folder: ImageFolder) -> None:
    pipeline = pipelines.training(source="proxy", size=32, batch_size=BATCH, num_threads=1, device_id=None)
    with ProxyServer(pipeline) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=decoded)
        with raises(InputError, code="wrong-kind") as caught:
            next(iter(DataLoader(dataset, BATCH, server=server)))
        assert "loader=read_bytes" in str(caught.value)


def test_an_encoded_image_is_no_input_of_a_pipeline_by_hand(folder: ImageFolder) -> None:
    pipeline = pipelines.training(source="proxy", size=32, batch_size=BATCH, num_threads=1, device_id=None)
    with ProxyServer(pipeline) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=EncodedImage.open)
        with raises(InputError, code="wrong-input", index=0) as caught:
            next(iter(DataLoader(dataset, BATCH, server=server)))
        assert "loader=read_bytes" in str(caught.value)


def decoded(path: str) -> np.ndarray[Any, Any]:
    return np.zeros((32, 32, 3), np.uint8)


SYNCHRONOUS = {
    "": {},
    "the old executor": {"exec_dynamic": False},
    "not pipelined": {"exec_dynamic": False, "exec_pipelined": False},
    "one output at a time": {"prefetch_queue_depth": 1},
}


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("arguments", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.timeout(60)
def test_a_pipeline_that_runs_in_the_calling_thread(arguments: dict[str, Any], workers: int) -> None:
    values = [np.float32([k]) for k in range(40)]
    with ProxyServer(doubled(exec_async=False, **arguments)) as server:
        loader = DataLoader(Inputs(server.proxy, values), 2, num_workers=workers, server=server, prefetch=4)
        for _ in range(2):
            assert torch.cat(list(loader))[:, 0].tolist() == [2.0 * k for k in range(40)]
        both = [iter(loader), iter(loader)]
        for at in range(20):
            for batches in both:
                assert next(batches)[:, 0].tolist() == [4.0 * at, 4.0 * at + 2]


def test_images_of_several_sizes_are_told_of_the_pipeline(folder: ImageFolder) -> None:
    pipeline = pipelines.rotation(source="proxy", batch_size=BATCH, num_threads=1, device_id=None)
    with ProxyServer(pipeline) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=read_bytes)
        for batch_size in (BATCH, 2 * BATCH):
            with pytest.raises(RuntimeError, match=r"of one size.* in the pipeline, with fn.resize\(.* or the size="):
                list(DataLoader(dataset, batch_size, server=server))


def used(images: Any) -> None:
    images.to("cpu")


@pytest.mark.parametrize(
    "use",
    [used, lambda images: images * 2, lambda images: images[0], len, torch.nn.Conv2d(3, 4, 1), np.asarray],
    ids=["to", "times", "row", "len", "a model", "numpy"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stock_loaders_batch_says_what_was_forgotten(use: Any, workers: int) -> None:
    with ProxyServer(doubled()) as server:
        for batch in StockLoader(Inputs(server.proxy, GOOD), 2, num_workers=workers):
            with pytest.raises((AttributeError, TypeError), match=r"server\.produce_data\(batch\).*server=server"):
                use(batch)
            assert server.produce_data(batch).tolist() == [[0, 2], [2, 4]]


@pytest.mark.parametrize("through", [[True, False], [False, True]], ids=["the first", "the second"])
def test_a_batch_of_which_some_went_through_the_proxy(through: list[bool]) -> None:
    with ProxyServer(doubled()) as server:
        dataset = Some(server.proxy, through)
        with pytest.raises((InputError, TypeError), match="all samples.* or .*none"):
            list(DataLoader(dataset, 2, server=server))


class Some(Inputs):
    def __getitem__(self, index: int) -> Any:
        return self.call(GOOD[index]) if self.values[index] else GOOD[index]


def test_the_server_goes_by_its_name() -> None:
    with ProxyServer(doubled()) as server:
        dataset: Any = Inputs(server.proxy, GOOD)
        with pytest.raises(TypeError, match=r"DataLoader\(dataset, ..., server=server\)"):
            DataLoader(server, dataset)


def test_the_help_of_a_server_is_ours() -> None:
    for thing in (ProxyServer, ProxyServer.__init__, ProxyServer.produce_data):
        assert thing.__doc__ and "DALIPipelineRunRef" not in thing.__doc__


def test_workers_that_read_paths_let_dali_read_the_files(folder: ImageFolder, photos: Path) -> None:
    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def graph() -> Any:
        encoded = fn.io.file.read(fn.external_source(name="paths"))
        return fn.resize(fn.decoders.image(encoded, output_type=types.RGB), size=[32, 32])

    with ProxyServer(graph()) as server:
        dataset = ImageFolder(folder.root, transform=server.proxy, loader=path_as_bytes)
        loader = DataLoader(dataset, BATCH, num_workers=1, server=server)
        assert_right(torch.cat([images for images, _ in loader]), range(48), folder)


def path_as_bytes(path: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(path.encode(), np.int8)


def test_a_pipeline_has_one_server(device: str) -> None:
    pipeline = resized(device)
    first = ProxyServer(pipeline)
    data = [np.frombuffer(jpeg_of((40, 30), k), np.uint8) for k in range(2)]
    lost = first.runs.submit([[data[0]]])
    second = ProxyServer(pipeline)
    kept = second.runs.submit([[data[1]]])
    for use in (lambda: first.runs.collect(lost), lambda: first.runs.submit([[data[0]]])):
        with raises(PipelineError, code="taken"):
            use()
    (images,) = second.runs.collect(kept)
    other = ProxyServer(resized(device))
    assert torch.equal(images, other.runs.collect(other.runs.submit([[data[1]]]))[0])


def test_a_server_over_a_pipeline_whose_server_is_gone_gets_nothing_of_its_runs(device: str) -> None:
    pipeline = resized(device)
    data = [np.frombuffer(jpeg_of((40, 30), k), np.uint8) for k in range(2)]
    ProxyServer(pipeline).runs.submit([[data[0]]])
    server = ProxyServer(pipeline)
    found = [server.runs.collect(server.runs.submit([[each]]))[0] for each in data]
    other = ProxyServer(resized(device))
    assert all(torch.equal(a, other.runs.collect(other.runs.submit([[each]]))[0]) for a, each in zip(found, data))


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_next_server_of_a_pipeline_draws_on(is_kept: bool, device: str) -> None:
    pipeline, one = spelled(device), [np.zeros(1, np.float32)]
    shifts = []
    for _ in range(3):
        server = ProxyServer(pipeline)
        server.runs.submit([one, one])
        first, _ = server.runs.collect(server.runs.submit([one, one]))
        shifts.append(first.item())
        server.runs.submit([one, one])
        if not is_kept:
            del server
    assert len(set(shifts)) == 3


def test_a_server_that_could_not_be_made_is_in_the_way_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, one = spelled("cpu"), [np.zeros(1, np.float32)]

    def fail(_: Any) -> None:
        raise PipelineError("no engines")

    with monkeypatch.context() as patched:
        patched.setattr(jpeg_engines, "build", fail)
        with pytest.raises(PipelineError) as failed:  # whose traceback holds the server
            ProxyServer(pipeline)
    server = ProxyServer(pipeline)
    assert len(server.runs.collect(server.runs.submit([one, one]))) == 2
    assert "no engines" in str(failed.value)


def test_a_pipeline_that_was_run_by_hand_may_be_served(device: str) -> None:
    pipeline, one = spelled(device), [np.zeros(1, np.float32)]
    for name in "ab":
        pipeline.feed_input(name, one)
    pipeline.run()
    server = ProxyServer(pipeline)
    first, second = server.runs.collect(server.runs.submit([one, one]))
    assert torch.equal(first, second) and 100 <= first.item() <= 200


def test_a_pipeline_that_was_deserialized_is_refused() -> None:
    with pytest.raises(RuntimeError, match="deserialized, and knows its inputs no more; give the server the one that"):
        ProxyServer(Pipeline.deserialize(resized("cpu").serialize()))
