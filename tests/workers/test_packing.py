"""A batch survives the way: arrays byte for byte, everything else as pickle has it, images where they were."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader
from proxyloader.data.placeholders import ProxyInputs, ProxySample
from proxyloader.errors import ImageError, InputError
from proxyloader.workers.arena import Arena
from proxyloader.workers.messages import WorkerError
from proxyloader.workers.packing import ContentUnpickler, Packer
from proxyloader.workers.request_sampler import BatchRequest


def sample(*arrays: Any, server: str = "s", output: int = 0) -> ProxySample:
    return ProxySample(ProxyInputs(server, tuple(map(np.ascontiguousarray, arrays))), output)


def unpacked(packer: Packer, samples: Any, arena: Arena | None = None) -> tuple[Any, Any]:
    """The packed batch after its way, and its content with (run, row, output) in the images' places."""
    slot = arena.lend() if arena is not None else None
    batch = pickle.loads(pickle.dumps(packer(samples, BatchRequest(0, 0, [0], True, slot))))
    return batch, ContentUnpickler(batch.content, lambda output, place: (place, output), kept=batch.kept).load()


def inputs_of(batch: Any, arena: Arena | None) -> list[list[Any]]:
    memory = batch.memory(arena)
    return [[list(part.views(memory)) for part in run.inputs] for run in batch.runs]


arrays = st.lists(
    hnp.arrays(
        st.sampled_from(["uint8", "float32", "int64"]).map(np.dtype), st.tuples(st.integers(0, 40), st.integers(1, 3))
    ),
    min_size=1,
    max_size=6,
)


@given(arrays=arrays, slot_bytes=st.sampled_from([None, 1, 4096, 1 << 20]))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_arrive_as_they_left_in_a_slot_beside_it_and_where_it_is_too_small(
    arrays: list[Any], slot_bytes: int | None
) -> None:
    arrays = [array for array in arrays if array.dtype == arrays[0].dtype]
    arena = Arena(1, slot_bytes) if slot_bytes else None
    packer = Packer(default_collate, arena, 256)
    rows = [np.float32([k, -k]) for k in range(len(arrays))]
    batch, content = unpacked(packer, [(sample(a, row), k) for k, (a, row) in enumerate(zip(arrays, rows))], arena)
    assert content[0] == (0, 0) and content[1].tolist() == list(range(len(arrays)))
    (found, found_rows) = inputs_of(batch, arena)[0]
    for ours, theirs in zip(found, arrays):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    assert np.array_equal(found_rows, rows)


def test_without_a_slot_a_batch_travels_in_memory_of_its_own() -> None:
    arena = Arena(1, 4096)
    packer = Packer(default_collate, arena, 256)
    batch = packer([sample(np.arange(3000)), sample(np.arange(2))], BatchRequest(0, 0, [0, 1], True, None))
    assert batch.blob is not None and batch.blob.nbytes > 4096
    assert [len(array) for array in inputs_of(batch, arena)[0][0]] == [3000, 2]


def test_each_sample_can_be_kept_by_itself_for_a_batch_that_loses_some() -> None:
    samples = [(sample(k), k, f"n{k}") for k in range(3)]
    batch, _ = unpacked(Packer(default_collate, None, 2, keep_samples=True), samples)
    found = [ContentUnpickler(data, lambda _, place: place, kept=batch.kept).load() for data in batch.samples]
    assert found == [((0, 0), 0, "n0"), ((0, 1), 1, "n1"), ((1, 0), 2, "n2")]
    assert Packer(default_collate, None, 2)(samples).samples == ()


def test_samples_without_images_are_collated_in_the_worker_and_not_searched_for_them() -> None:
    batch = Packer(list, None, 4, has_images=False)([lambda: 1])  # which cannot be pickled
    assert batch.content[0]() == 1
    batch = Packer(default_collate, None, 4)([(1, "a"), (2, "b")])
    assert batch.runs == () and batch.content[0].tolist() == [1, 2] and list(batch.content[1]) == ["a", "b"]
    assert Packer(len, None, 4)([1, 2, 3]).content == 3


def test_samples_with_placeholders_wait_for_the_users_collate_fn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProxySample, "any_created", True)
    batch, content = unpacked(Packer(len, None, 4), [(sample(1), "a"), (sample(2), "b")])
    assert not batch.collated and content == [(((0, 0), 0), "a"), (((0, 1), 0), "b")]


def test_calls_are_sorted_into_runs_by_server_and_size_and_each_is_sent_once() -> None:
    calls = [ProxyInputs("s", (np.float32([k]),)) for k in range(3)]
    samples = [(ProxySample(call, 0), ProxySample(call, 1)) for call in calls]
    batch, content = unpacked(Packer(default_collate, None, 4), samples)
    assert len(batch.runs) == 1 and content == [(0, 0), (0, 1)]
    samples = [(sample(k), sample(10 + k)) for k in range(3)]
    batch, content = unpacked(Packer(default_collate, None, 4), samples)
    assert [len(run) for run in batch.runs] == [3, 3] and content == [(0, 0), (1, 0)]
    samples = [sample(k, server="ab"[k % 2]) for k in range(4)]
    batch, content = unpacked(Packer(default_collate, None, 4), samples)
    assert [run.server for run in batch.runs] == ["a", "b"]
    assert content == ([(0, 0), (1, 0), (0, 1), (1, 1)], 0)
    once = sample(7)
    batch, content = unpacked(Packer(default_collate, None, 2), [sample(1), sample(2), sample(3)])
    assert [len(run) for run in batch.runs] == [2, 1] and content == ([(0, 0), (0, 1), (1, 0)], 0)
    batch, content = unpacked(Packer(default_collate, None, 4), [once, once])
    assert [len(run) for run in batch.runs] == [1] and content == ([(0, 0), (0, 0)], 0)


TENSORS = [
    torch.arange(5),
    torch.ones(2, 3, requires_grad=True),
    torch.tensor(3.0),
    torch.zeros(0),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(300_000),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.arange(12).reshape(3, 4).t(),
    torch.tensor([True, False]),
    torch.rand(3, 5)[:1, 4],
    torch.ones(1).expand(1, 1).as_strided((1, 1), (0, 0)),
    torch.rand(3, 5)[:0, 4],
]


class BesideTensors(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, _ = super().__getitem__(index)
        return image, TENSORS[index]


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_beside_the_images_arrive_as_they_left(photos: Path, workers: int) -> None:
    dataset = Subset(BesideTensors(str(photos), transforms.ToTensor()), range(len(TENSORS)))
    loader = DataLoader(dataset, len(TENSORS), collate_fn=list, num_workers=workers, translate="all", device="cpu")
    ((*samples,),) = loader
    for (_, found), tensor in zip(samples, TENSORS, strict=True):
        assert (found is tensor) == (workers == 0)  # in the process of the loader, as with torch's
        assert found.dtype == tensor.dtype and found.requires_grad == tensor.requires_grad
        assert torch.equal(found, tensor)
    assert loader.stats().images_by_dali == len(TENSORS)


def test_inputs_of_several_kinds_in_a_batch_are_refused_with_what_was_found() -> None:
    calls = [ProxyInputs("s", (np.zeros(1), array), names=("a", "b")) for array in (np.uint8([1]), np.float32([1]))]
    with pytest.raises(
        InputError, match="input 'b' must have one dtype .* per batch, got float32 with 1 .*, uint8 with"
    ):
        Packer(default_collate, None, 4)(list(map(ProxySample, calls)))


def test_our_errors_keep_their_message_and_others_are_re_raised_as_torch_does() -> None:
    def caught(error: Exception) -> WorkerError:
        try:
            raise error
        except Exception as raised:
            return pickle.loads(pickle.dumps(WorkerError.caught(raised, "in worker 3")))  # type: ignore[no-any-return]

    with pytest.raises(ImageError, match=r"^dataset\[3\]: x$") as ours:
        raise caught(ImageError("dataset[3]: x")).exception()
    assert "in worker 3" in str(ours.value.__cause__)
    with pytest.raises(KeyError, match="in worker 3"):
        raise caught(KeyError("k")).exception()
