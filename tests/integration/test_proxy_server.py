"""ProxyServer with hand-written pipelines beyond the roads of ``test_faults_*.py``: what it takes, says and refuses."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch.experimental import proxy as upstream
from torch.utils.data import DataLoader as StockLoader, default_collate
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, InputError, PipelineError, ProxyServer, pipelines
from proxyloader.dali import jpeg_engines

from ..compare import jpeg_of
from ..faults import in_fork
from ..outcomes import outcomes, raises
from .roads import Mapped, Produced, Road, assert_batches_match, on_roads, on_servers, picture_pipeline, read_bytes
from .test_torch_contract_samples import Frozen, Pair

BATCH = 8


def pipeline_of(
    names: Iterable[str], compute: Callable[..., Any], batch_size: int = 2, device: str = "cpu", **arguments: Any
) -> Any:
    """What is computed from inputs of these names."""

    @pipeline_def(batch_size=batch_size, num_threads=1, device_id=0 if device == "cuda" else None, **arguments)
    def graph() -> Any:
        return compute(*(fn.external_source(name=name, no_copy=True) for name in names))

    return graph()


def doubled(batch_size: int = 2, **arguments: Any) -> Any:
    return pipeline_of("x", lambda x: 2 * x, batch_size, **arguments)


def shifted(device: str) -> Any:
    """Two inputs, two outputs, from one random shift: the sum and the difference, and the same shift in both."""

    def compute(a: Any, b: Any) -> Any:
        shift = fn.random.uniform(range=[100, 200], dtype=types.FLOAT)
        first, second = a + b + shift, a - b + shift
        return (first.gpu(), second.gpu()) if device == "cuda" else (first, second)

    return pipeline_of("ab", compute, BATCH, device, seed=3)


def made(proxy: Any, make: Callable[[Any, int], Any], size: int) -> Mapped:
    return Mapped(functools.partial(make, proxy), range(size))


def loader_of(server: ProxyServer, stock: bool, *arguments: Any, **options: Any) -> Any:
    if stock:
        return Produced(StockLoader(*arguments, **options), server)
    return DataLoader(*arguments, server=server, **options)


either_loader = pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])


@on_roads("server")
def test_upstreams_own_loader_takes_our_server(road: Road) -> None:
    assert_batches_match(upstream.DataLoader(road.server, road.dataset(), batch_size=4, num_workers=1))


class HoldsServer(ImageFolder):
    server: Any

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return self.server.proxy(read_bytes(path)), target


@pytest.mark.parametrize("workers", [0, 1])
@on_servers
def test_a_dataset_may_hold_the_server_itself(road: Road, workers: int) -> None:
    method = "fork" if workers else None
    dataset = road.dataset(HoldsServer, server=road.server)
    assert_batches_match(road.loader(dataset, num_workers=workers, multiprocessing_context=method))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_server_that_is_copied_points_to_its_proxy(copied: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled; pass server\.proxy to the dataset"):
        copied(ProxyServer(doubled()))


NUMBERS: dict[str, Callable[[int], Any]] = {
    "array": np.array,
    "float_of_numpy": np.float32,
    "tensor": torch.tensor,
    "of_python": int,
    "truth": bool,
    "with_a_dimension": lambda k: np.array([k]),
    "transposed": lambda k: np.arange(k, k + 6).reshape(2, 3).T,
}


def in_all_forms(proxy: Any, index: int) -> Any:
    return proxy(**{name: make(index) for name, make in NUMBERS.items()})


def as_arrays(proxy: Any, index: int) -> Any:
    return proxy(**{name: np.asarray(make(index), order="C") for name, make in NUMBERS.items()})


def one_more() -> Any:
    return pipeline_of(NUMBERS, lambda *inputs: tuple(each + 1 for each in inputs), 4)


@pytest.fixture(scope="module")
def as_upstream_gives_them() -> list[Any]:
    """Upstream's server takes five seconds to end, so it is asked once."""
    with upstream.DALIServer(one_more()) as server:  # which takes nothing but arrays on a CPU
        return list(upstream.DataLoader(server, made(server.proxy, as_arrays, 6), batch_size=4, num_workers=1))


@either_loader
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_numbers_get_no_dimension_of_their_own_as_with_upstreams_server(
    as_upstream_gives_them: list[Any], method: str | None, stock: bool
) -> None:
    expected = as_upstream_gives_them
    assert [tuple(output.shape) for output in expected[0]] == [(4,)] * 5 + [(4, 1), (4, 3, 2)]
    arguments: dict[str, Any] = dict(num_workers=int(bool(method)), multiprocessing_context=method)
    with ProxyServer(one_more()) as server:
        found = list(loader_of(server, stock, made(server.proxy, in_all_forms, 6), 4, **arguments))
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected):
        for name, output, other in zip(NUMBERS, ours, theirs):
            assert (output.dtype, output.shape) == (other.dtype, other.shape), name
            assert torch.equal(output, other), name


OTHER_SECONDS = {5: np.float32([0]), 12: np.int32([[0]])}


def twice(proxy: Any, index: int) -> Any:
    return proxy(first=np.int32([index]), second=OTHER_SECONDS.get(index, np.int32([index]))), index


@either_loader
def test_a_second_input_that_is_refused_does_not_shift_the_first(stock: bool) -> None:
    pipeline = pipeline_of(["first", "second"], lambda *both: fn.cat(*both), 4, exec_dynamic=True)
    with ProxyServer(pipeline) as server:
        loader = loader_of(server, stock, made(server.proxy, twice, 48), 4, num_workers=1)
        for at, batch in enumerate(outcomes(loader)):
            if at in (1, 3):
                assert isinstance(batch, InputError), f"batch {at} is {batch!r}"
            else:
                pairs, numbers = batch
                assert pairs.tolist() == [[number, number] for number in range(4 * at, 4 * at + 4)]
                assert numbers.tolist() == list(range(4 * at, 4 * at + 4))


def of_five(place: Any) -> Any:
    start = fn.stack(place)
    return fn.slice(types.Constant([10, 11, 12, 13, 14], device="cpu"), start=start, shape=[1], axes=[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_number_that_the_pipeline_fails_on_is_left_out_alone(workers: int) -> None:
    with ProxyServer(pipeline_of(["place"], of_five, 4)) as server:
        # The last is behind the end.
        places = made(server.proxy, lambda proxy, index: (proxy(np.int32(index)), index), 6)
        loader = DataLoader(places, 4, num_workers=workers, server=server, on_error="skip")
        assert [(found.tolist(), places.tolist()) for found, places in loader] == [
            ([[10], [11], [12], [13]], [0, 1, 2, 3]),
            ([[14]], [4]),
        ]
    assert [error.index for error in loader.errors] == [5]


def with_its_shift(proxy: Any, index: int) -> Any:
    outputs = proxy(a=np.float32([index, index]), b=np.float32([1, 2]))
    return {"index": index, "outputs": outputs, "name": f"n{index}"}


@either_loader
def test_a_deterministic_servers_draws_follow_from_the_batches_that_loops_had(stock: bool, device: str) -> None:
    found = []
    for workers in (0, 1, 3):
        with ProxyServer(shifted(device), deterministic=True) as server:
            dataset = made(server.proxy, with_its_shift, 24)
            loader = loader_of(server, stock, dataset, 2, num_workers=workers)
            batches = [batch for _ in range(3) for batch in itertools.islice(loader, 3)]
        for batch in batches:
            first, second = batch["outputs"]
            # (a + b + shift) - (a - b + shift) is 2 b only if both have the same shift
            assert torch.allclose((first - second).cpu(), torch.tensor([2.0, 4.0]).expand(len(first), 2), atol=1e-3)
            assert batch["name"] == [f"n{k}" for k in batch["index"].tolist()]
        found.append(torch.stack([batch["outputs"][0].cpu() for batch in batches]))
    assert all(torch.equal(found[0], other) for other in found[1:])


GOOD = [np.float32([k, k + 1]) for k in range(2)]


def good(proxy: Any, index: int) -> Any:
    return proxy(GOOD[index])


def test_produce_data_fills_lists_dicts_and_objects_in_place() -> None:
    with ProxyServer(doubled(batch_size=4)) as server:
        samples = [server.proxy(np.float32([k])) for k in range(3)]
        held = {"list": [samples[0], 5], "pair": Frozen(samples[1], "x"), "named": Pair(samples[2], samples[0])}
        found = server.produce_data(held)
        assert found is held and found["list"][0].tolist() == [0.0] and found["pair"].image.tolist() == [2.0]
        assert type(found["named"]) is Pair and found["named"].image.tolist() == [4.0]


def test_the_proxy_says_which_inputs_it_takes() -> None:
    with ProxyServer(shifted("cpu")) as server:
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
            lambda: next(iter(DataLoader(made(server.proxy, good, 2), 2, server=server))),
            lambda: ProxyServer(server.pipeline),
        ]

        def told() -> None:
            for use in uses:
                with raises(PipelineError, code="forked"):
                    use()

        assert in_fork(told) == 0
        assert server.produce_data(batch).flatten().tolist() == [0, 2]


def test_images_in_the_place_of_bytes_are_refused(folder: ImageFolder) -> None:
    pipeline = pipelines.training(source="proxy", size=32, batch_size=BATCH, num_threads=1, device_id=None)
    with ProxyServer(pipeline) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=lambda path: np.zeros((32, 32, 3), np.uint8))
        with raises(InputError, code="wrong-kind", index=None) as caught:
            next(iter(DataLoader(dataset, BATCH, server=server)))
        assert "loader=read_bytes" in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [
        *(lambda images: images.to("cpu"), lambda images: images * 2, lambda images: images[0]),
        *(len, torch.nn.Conv2d(3, 4, 1), np.asarray),
    ],
    ids=["to", "times", "row", "len", "a model", "numpy"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stock_loaders_batch_says_what_was_forgotten(use: Any, workers: int) -> None:
    with ProxyServer(doubled()) as server:
        for batch in StockLoader(made(server.proxy, good, 2), 2, num_workers=workers):
            with pytest.raises((AttributeError, TypeError), match=r"server\.produce_data\(batch\).*server=server"):
                use(batch)
            assert server.produce_data(batch).tolist() == [[0, 2], [2, 4]]


@pytest.mark.parametrize("gone", [0, 1], ids=["the first", "the second"])
def test_a_batch_of_which_some_went_through_the_proxy(gone: int) -> None:
    with ProxyServer(doubled()) as server:
        dataset = made(server.proxy, lambda proxy, index: proxy(GOOD[0]) if index == gone else GOOD[1], 2)
        with pytest.raises((InputError, TypeError), match="all samples.* or .*none"):
            list(DataLoader(dataset, 2, server=server))


def read_and_decoded(paths: Any) -> Any:
    images = fn.resize(fn.decoders.image(fn.io.file.read(paths), output_type=types.RGB), size=[32, 32])
    return fn.crop_mirror_normalize(images, dtype=types.FLOAT, mean=[0.0], std=[255.0])


@on_roads("server")
def test_workers_that_read_paths_let_dali_read_the_files(road: Road) -> None:
    with ProxyServer(pipeline_of(["paths"], read_and_decoded, BATCH)) as road.server:
        as_bytes: Any = lambda path: np.frombuffer(path.encode(), np.int8)  # noqa: E731
        dataset = road.dataset(loader=as_bytes, transform=road.server.proxy)
        assert_batches_match(road.loader(dataset, num_workers=1))


# --- one pipeline, and one server after the other ---------------------------------------------------------------------

JPEGS = [np.frombuffer(jpeg_of((40, 30), k), np.uint8) for k in range(2)]
ONE = [np.zeros(1, np.float32)]


def made_by(server: ProxyServer, *inputs: Any) -> Any:
    return server.runs.collect(server.runs.submit(inputs))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_pipeline_has_one_server_which_gets_nothing_of_anothers_runs(is_kept: bool, device: str) -> None:
    pipeline = picture_pipeline(device)
    first = ProxyServer(pipeline)
    lost = first.runs.submit([[JPEGS[0]]])
    if not is_kept:
        del first
    second, other = ProxyServer(pipeline), ProxyServer(picture_pipeline(device))
    if is_kept:
        for use in (lambda: first.runs.collect(lost), lambda: first.runs.submit([[JPEGS[0]]])):
            with raises(PipelineError, code="taken"):
                use()
    assert all(torch.equal(made_by(second, [each])[0], made_by(other, [each])[0]) for each in (*JPEGS[::-1], JPEGS[1]))


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_next_server_of_a_pipeline_draws_on(is_kept: bool, device: str) -> None:
    pipeline, shifts = shifted(device), []
    for _ in range(3):
        server = ProxyServer(pipeline)
        server.runs.submit([ONE, ONE])
        shifts.append(made_by(server, ONE, ONE)[0].item())
        server.runs.submit([ONE, ONE])
        if not is_kept:
            del server
    assert len(set(shifts)) == 3


def test_a_server_that_could_not_be_made_is_in_the_way_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = shifted("cpu")

    def fail(_: Any) -> None:
        raise PipelineError("no engines")

    with monkeypatch.context() as patched:
        patched.setattr(jpeg_engines, "build", fail)
        with pytest.raises(PipelineError) as failed:  # whose traceback holds the server
            ProxyServer(pipeline)
    assert len(made_by(ProxyServer(pipeline), ONE, ONE)) == 2
    assert "no engines" in str(failed.value)


def test_a_pipeline_that_was_run_by_hand_may_be_served(device: str) -> None:
    pipeline = shifted(device)
    for name in "ab":
        pipeline.feed_input(name, ONE)
    pipeline.run()
    first, second = made_by(ProxyServer(pipeline), ONE, ONE)
    assert torch.equal(first, second) and 100 <= first.item() <= 200
