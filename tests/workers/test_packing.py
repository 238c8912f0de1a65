"""Packing preserves a batch: arrays byte for byte, other content as with pickle, images in their places."""

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
from proxyloader.errors import InputError
from proxyloader.workers.arena import Arena
from proxyloader.workers.packing import ContentUnpickler, Packer
from proxyloader.workers.request_sampler import BatchRequest

arrays = st.lists(
    hnp.arrays(
        st.sampled_from(["uint8", "float32", "int64"]).map(np.dtype), st.tuples(st.integers(0, 40), st.integers(1, 3))
    ),
    min_size=1,
    max_size=6,
)


@given(arrays=arrays, slot_bytes=st.sampled_from([None, 1, 4096, 1 << 20]))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_are_preserved_in_a_slot_without_one_and_if_it_is_too_small(
    arrays: list[Any], slot_bytes: int | None
) -> None:
    arrays = [array for array in arrays if array.dtype == arrays[0].dtype]
    arena = Arena(1, slot_bytes) if slot_bytes else None
    rows = [np.float32([k, -k]) for k in range(len(arrays))]
    calls = [ProxyInputs("s", (np.ascontiguousarray(array), row)) for array, row in zip(arrays, rows)]
    samples = [(ProxySample(call, 0), k) for k, call in enumerate(calls)]
    request = BatchRequest(0, 0, [0], True, arena.acquire() if arena is not None else None)
    batch: Any = pickle.loads(pickle.dumps(Packer(default_collate, arena, 256)(samples, request)))
    content = ContentUnpickler(batch.content, lambda place: place, False, batch.objects, torch.device("cpu")).load()
    assert content[0] == (0, 0) and content[1].tolist() == list(range(len(arrays)))
    memory = batch.memory(arena)
    found, found_rows = (list(part.views(memory)) for part in batch.runs[0].inputs)
    for ours, theirs in zip(found, arrays):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    assert np.array_equal(found_rows, rows)


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
def test_tensors_beside_the_images_are_preserved(photos: Path, workers: int) -> None:
    dataset = Subset(BesideTensors(str(photos), transforms.ToTensor()), range(len(TENSORS)))
    loader = DataLoader(dataset, len(TENSORS), collate_fn=list, num_workers=workers, device="cpu")
    ((*samples,),) = loader
    for (_, found), tensor in zip(samples, TENSORS, strict=True):
        assert (found is tensor) == (workers == 0)  # in the process of the loader, as with torch's
        assert found.dtype == tensor.dtype and found.requires_grad == tensor.requires_grad
        assert torch.equal(found, tensor)
    assert loader.stats().images_by_dali == len(TENSORS)


def test_mixed_kinds_of_input_in_a_batch_are_refused() -> None:
    calls = [ProxyInputs("s", (np.zeros(1), array), names=("a", "b")) for array in (np.uint8([1]), np.float32([1]))]
    with pytest.raises(
        InputError, match="input 'b' must have one dtype .* per batch, got float32 with 1 .*, uint8 with"
    ):
        Packer(default_collate, None, 4)(list(map(ProxySample, calls)))
