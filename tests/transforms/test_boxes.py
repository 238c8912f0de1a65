"""RandomIoUCrop's crops drawn in NumPy are torchvision's, and so are its draws, and the boxes that a check keeps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from proxyloader.transforms import boxes as boxes_module

from ..compare import drawn_alike
from ..undecoded import opened_late

XYXY, THEIRS = tv_tensors.BoundingBoxFormat.XYXY, v2.RandomIoUCrop.make_params
FORMATS = tv_tensors.BoundingBoxFormat.XYXY, tv_tensors.BoundingBoxFormat.XYWH, tv_tensors.BoundingBoxFormat.CXCYWH


def boxes_of(xyxy: Any, size: tuple[int, int], format: Any = XYXY, dtype: torch.dtype = torch.float32) -> Any:
    boxes = torch.as_tensor(xyxy).reshape(-1, 4).to(dtype)
    boxes = F.convert_bounding_box_format(boxes, XYXY, format)
    return tv_tensors.BoundingBoxes(boxes, format=format, canvas_size=size)  # type: ignore[call-overload]


def random_boxes(rng: np.random.Generator, size: tuple[int, int], count: int) -> Any:
    sides = np.array(size[::-1])
    begins = rng.uniform(0, 0.8, (count, 2)) * sides
    return np.concatenate([begins, np.minimum(begins + rng.uniform(0, 0.7, (count, 2)) * sides, sides)], 1)


def inputs_of(boxes: Any, kind: str) -> list[Any]:
    height, width = boxes.canvas_size
    image = Image.new("RGB", (width, height)) if kind == "pil" else tv_tensors.Image(torch.zeros(3, height, width))
    return [image, boxes, tv_tensors.Mask(torch.zeros(1, height, width, dtype=torch.uint8))]


def results(make_params: Any, transform: Any, inputs: list[Any]) -> Any:
    params = dict(make_params(transform, inputs))
    mask = params.pop("is_within_crop_area", None)
    return params, {name: type(each) for name, each in params.items()}, mask is None or (mask.dtype, mask.tolist())


def ours(transform: Any, inputs: list[Any]) -> Any:
    params = boxes_module.make_params(THEIRS, transform, inputs)
    assert params is not NotImplemented
    return params


@pytest.mark.parametrize("arguments", [{}, {"min_scale": 0.1, "max_aspect_ratio": 5.0, "sampler_options": [0.05, 1.0]}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
def test_crops_are_torchvisions(format: Any, dtype: torch.dtype, arguments: Any) -> None:
    transform, rng, crops = v2.RandomIoUCrop(**arguments), np.random.default_rng(len(format.value)), 0
    for number in range(30):
        size = tuple(rng.integers(40, 900, 2).tolist())
        boxes = boxes_of(random_boxes(rng, size, number % 9), size, format, dtype)
        inputs = inputs_of(boxes, "pil" if number % 2 else "tensor")
        stock, mine = (functools.partial(results, draw, transform, inputs) for draw in (THEIRS, ours))
        for wanted, found in drawn_alike(stock, mine, seeds=2):
            assert found == wanted
            crops += bool(found[0])
    assert crops >= 12, "nearly all images were left as they are"


SIZE = 120, 160
INSIDE = [[20.0, 20.0, 100.0, 90.0], [30.0, 10.0, 50.0, 110.0]]


def odd_inputs() -> Iterator[Any]:
    nan, outside = [[float("nan"), 1.0, 2.0, 3.0]], [[-900.0, -900.0, 900.0, 900.0], [300.0, 300.0, 400.0, 400.0]]
    for name, boxes in {"none": [], "nan": nan, "outside": outside, "no area": [[50.0, 50.0, 50.0, 50.0]]}.items():
        yield pytest.param({}, boxes_of(boxes, SIZE), id=name)
    yield pytest.param({}, boxes_of(np.array(INSIDE) / 60, (2, 2)), id="empty crops")
    yield pytest.param({"min_scale": 0.0, "min_aspect_ratio": 0.0}, boxes_of(INSIDE, SIZE), id="any crops")
    yield pytest.param({"max_scale": 3.0}, boxes_of(INSIDE, SIZE), id="larger than the image")
    yield pytest.param({"trials": 1, "sampler_options": [0.9, 1]}, boxes_of(INSIDE, SIZE), id="one trial")
    yield pytest.param({"sampler_options": (-1, np.float64(0.3), 1)}, boxes_of(INSIDE, SIZE), id="other numbers")
    yield pytest.param({}, boxes_of(INSIDE, SIZE, dtype=torch.float16), id="float16")
    yield pytest.param({}, boxes_of(INSIDE, SIZE).requires_grad_(), id="gradients")


@pytest.mark.parametrize(("arguments", "boxes"), [*odd_inputs()])
def test_samples_of_odd_boxes_are_torchvisions(arguments: Any, boxes: Any) -> None:
    transform, inputs = v2.RandomIoUCrop(**arguments), inputs_of(boxes, "pil")

    def sample() -> Any:
        try:
            return str([each.tolist() for each in transform(*inputs)[1:]])  # NaN is unequal to itself
        except Exception as error:
            return type(error), str(error)

    def sample_late() -> Any:
        with opened_late():
            assert v2.RandomIoUCrop.make_params is not THEIRS
            return sample()

    assert all(found == wanted for wanted, found in drawn_alike(sample, sample_late, seeds=20))


def test_other_default_dtypes_are_left_to_torchvision() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        boxes = boxes_of(INSIDE, SIZE)
        assert boxes_module.make_params(THEIRS, v2.RandomIoUCrop(), inputs_of(boxes, "pil")) is NotImplemented
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_are_compared_with_torchvisions_first() -> None:
    def other(transform: Any, inputs: list[Any]) -> Any:
        torch.rand(1)
        return THEIRS(transform, inputs)

    state = torch.get_rng_state()
    assert boxes_module.draws_alike(THEIRS) and not boxes_module.draws_alike(other)
    inputs = inputs_of(boxes_of(INSIDE, SIZE), "pil")
    assert boxes_module.make_params(other, v2.RandomIoUCrop(), inputs) is NotImplemented
    assert torch.equal(torch.get_rng_state(), state)


def test_subclasses_draw_as_they_say() -> None:
    class Centered(v2.RandomIoUCrop):
        def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
            return {**super().make_params(flat_inputs), "top": 0}

    transform, inputs = Centered(), inputs_of(boxes_of(INSIDE, SIZE), "pil")
    with opened_late():
        assert transform.make_params(inputs)["top"] == 0


EDGES = [0.0, -0.0, -1e-7, 0.5, 1.0, 1.0000001, 20.0, 21.0, 29.999998, 30.0, 30.000002, 40.5, np.nan, np.inf]


@pytest.mark.parametrize("format, dtype", [(XYXY, torch.float32), (XYXY, torch.float64), (FORMATS[1], torch.float32)])
@pytest.mark.parametrize(
    "transform",
    [
        v2.SanitizeBoundingBoxes(),
        v2.SanitizeBoundingBoxes(1.1, 10.1),
        v2.SanitizeBoundingBoxes(1.0000001, 8.9999995),
        v2.RandomHorizontalFlip(1.0),
    ],
)
def test_changed_and_kept_boxes_are_torchvisions(format: Any, dtype: torch.dtype, transform: Any) -> None:
    values = torch.tensor([*itertools.product(EDGES, repeat=4)])
    for number in (len(values), 0):
        boxes = tv_tensors.BoundingBoxes(values[:number].to(dtype), format=format, canvas_size=(20, 30))  # type: ignore[call-overload]
        for kind in ("Tensor", "TVTensor"):
            with tv_tensors.set_return_type(kind):
                stock = transform({"boxes": boxes, "labels": torch.arange(number)})
                with opened_late():
                    ours = transform({"boxes": boxes, "labels": torch.arange(number)})
            assert torch.equal(ours["labels"], stock["labels"]) and bool(len(stock["labels"])) == bool(number)
            np.testing.assert_array_equal(ours["boxes"], stock["boxes"])
            assert [*map(type, ours.values())] == [*map(type, stock.values())] and ours["boxes"].canvas_size == (20, 30)


@pytest.mark.parametrize("least", [-2.0, 0.0, np.nan, 1 + 1e-9])
def test_boxes_of_any_least_size_are_torchvisions(least: float) -> None:
    boxes = tv_tensors.BoundingBoxes([*itertools.product(EDGES, repeat=4)], format=XYXY, canvas_size=(20, 30))  # type: ignore[call-overload]
    for limits in ((least, 1.0), (1.0, least), (least, least)):
        stock = F.sanitize_bounding_boxes(boxes, min_size=limits[0], min_area=limits[1])
        with opened_late():
            ours = F.sanitize_bounding_boxes(boxes, min_size=limits[0], min_area=limits[1])
        assert torch.equal(ours[1], stock[1]) and torch.equal(ours[0], stock[0])


def test_kept_boxes_and_labels_are_copies() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [9.0, 8.0], [10.0, 9.0]]).T  # not contiguous
    boxes = tv_tensors.BoundingBoxes(values, format=XYXY, canvas_size=(20, 30))  # type: ignore[call-overload]
    target = {"boxes": boxes, "labels": torch.arange(4)[::2], "scores": torch.ones(2, requires_grad=True), "id": 3}
    sanitize = v2.SanitizeBoundingBoxes(labels_getter=lambda target: (target["labels"], target["scores"]))
    stock = sanitize(target)
    with opened_late():
        ours = sanitize(target)
    assert ours.keys() == stock.keys() and [*map(type, ours.values())] == [*map(type, stock.values())]
    for name in ("boxes", "labels", "scores"):
        assert torch.equal(ours[name], stock[name]) and ours[name].stride() == stock[name].stride()
        assert ours[name].requires_grad == stock[name].requires_grad
        assert ours[name].data_ptr() != target[name].data_ptr()


def test_subclasses_select_as_they_say() -> None:
    class Shifted(v2.SanitizeBoundingBoxes):
        def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
            return super().transform(inpt, params) + 1 if isinstance(inpt, torch.Tensor) else inpt

    with opened_late():
        assert Shifted()({"boxes": boxes_of(INSIDE, SIZE), "labels": torch.zeros(len(INSIDE))})["labels"].all()


def test_without_a_crop_around_a_center_another_one_is_drawn() -> None:
    boxes = boxes_of([[1.0, 2.0, 50.0, 60.0], [100.0, 5.0, 150.0, 100.0]], (100, 150))
    transform, inputs = v2.RandomIoUCrop(sampler_options=[float("nan")]), inputs_of(boxes, "pil")
    for wanted, found in drawn_alike(lambda: THEIRS(transform, inputs), lambda: ours(transform, inputs), 20):
        assert {name: value for name, value in wanted.items() if name != "is_within_crop_area"}.items() <= found.items()
