"""Small tensors of a target are sent as bytes, and arrive as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision import tv_tensors

from proxyloader.workers import packing
from proxyloader.workers.packing import LARGE_TENSOR_BYTES, ContentUnpickler

FRAME = torch.arange(24).reshape(4, 6)
ANGLED: dict[str, Any] = {"format": "CXCYWHR", "canvas_size": (30, 40), "clamping_mode": "hard"}

SMALL: dict[str, Any] = {
    "labels": torch.tensor([3, 1, 2]),
    "a flag": torch.tensor(True),
    "nothing": torch.empty(0, 4),
    "a column": FRAME[1:2, :1],
    "an empty column": FRAME[:0, 4],
    "strides of 0": FRAME[:1, 0].as_strided((1, 1), (0, 0)),
    "bfloat16": FRAME.bfloat16(),
    "complex": torch.view_as_complex(FRAME.reshape(-1, 2).float()).conj(),
    "a parameter of no module": torch.ones(2, requires_grad=True),
    "boxes": tv_tensors.BoundingBoxes(torch.rand(3, 4), format="XYWH", canvas_size=(30, 40)),  # type: ignore[call-overload]
    "no boxes": tv_tensors.BoundingBoxes(torch.empty(0, 4), format="XYXY", canvas_size=(3, 4)),  # type: ignore[call-overload]
    "masks": tv_tensors.Mask(FRAME.bool()),
    "an image": tv_tensors.Image(torch.ones(3, 4, 5)),
    "a clip": tv_tensors.Video(torch.ones(2, 3, 4, 5)),
}
if hasattr(tv_tensors, "KeyPoints"):
    SMALL["keypoints"] = tv_tensors.KeyPoints(torch.rand(3, 2), canvas_size=(30, 40))
    SMALL["angled boxes"] = tv_tensors.BoundingBoxes(torch.rand(3, 5), **ANGLED)


class OwnBoxes(tv_tensors.TVTensor):
    """A class with a state that its pickle need not have."""


LARGE: dict[str, Any] = {
    "large": torch.zeros(LARGE_TENSOR_BYTES + 1, dtype=torch.uint8),
    "large masks": tv_tensors.Mask(torch.zeros(LARGE_TENSOR_BYTES + 1, 1, dtype=torch.uint8)),
    "strided": FRAME.T,
    "strided masks": tv_tensors.Mask(FRAME.T),
    "an own class": torch.rand(3).as_subclass(OwnBoxes),
    "boxes with gradients": tv_tensors.Mask(torch.rand(3, 4), requires_grad=True),
}


@pytest.fixture(autouse=True)
def _in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "get_worker_info", object)


def sent(content: Any) -> tuple[Any, list[Any]]:
    """What arrives, and the tensors that were not sent as bytes."""
    pickler = packing._ContentPickler(packing.Packer(list, None, 1))
    data = pickler.pickle(content)
    loaded = ContentUnpickler(data, lambda pid: None, False, pickler.objects, torch.device("cpu")).load()
    return loaded, pickler.objects


@pytest.mark.parametrize("name", SMALL)
def test_small_tensor_is_sent_by_value(name: str) -> None:
    tensor = SMALL[name]
    (found, other), objects = sent([tensor, {"the same": tensor}])
    assert not objects and found is other["the same"]
    assert type(found) is type(tensor) and vars(found) == vars(tensor) and found.requires_grad is tensor.requires_grad
    assert (found.dtype, found.shape, found.is_contiguous()) == (tensor.dtype, tensor.shape, True)
    assert torch.equal(found.as_subclass(torch.Tensor), tensor.as_subclass(torch.Tensor))
    assert found.data_ptr() % 64 == 0


@pytest.mark.parametrize("name", LARGE)
def test_other_tensors_are_sent_in_shared_memory(name: str) -> None:
    found, objects = sent({"target": LARGE[name]})
    assert found["target"] is LARGE[name] is objects[0]


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_in_the_process_of_the_loader_a_tensor_stays_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "get_worker_info", lambda: None)
    tensor = (SMALL | LARGE)[name]
    assert sent(tensor)[0] is tensor
