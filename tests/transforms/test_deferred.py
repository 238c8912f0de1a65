"""``unsupported="batch"``: what is not translated, called on whole batches."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import InputError, UnsupportedTransformError, compile_transforms
from proxyloader.transforms.deferred import DeferredTransforms
from proxyloader.transforms.registry import plan_for

from ..outcomes import raises


def doubled(images: torch.Tensor) -> torch.Tensor:
    return 2 * images


TO_TENSOR = [v1.CenterCrop(8), v1.ToTensor()]
BATCH = torch.rand(5, 3, 8, 8)


def rest_of(*transforms: Any) -> DeferredTransforms:
    rest = plan_for(v1.Compose(transforms), rest=True).rest
    assert rest is not None
    return rest


def test_it_begins_with_the_first_that_is_not_translated() -> None:
    normalize = v1.Normalize([0.5] * 3, [0.5] * 3)
    rest = rest_of(*TO_TENSOR, v1.Compose([v1.RandomHorizontalFlip(), doubled]), normalize)
    assert rest.transforms == (doubled, normalize) and rest.position == "transform.transforms[2].transforms[1]"
    torch.testing.assert_close(rest(BATCH), normalize(2 * BATCH))


def test_the_plan_holds_what_stands_before() -> None:
    before = [*TO_TENSOR, v1.RandomHorizontalFlip()]
    plan = plan_for(v1.Compose([*before, doubled]), rest=True)
    assert (plan.steps, plan.output) == (plan_for(v1.Compose(before)).steps, plan_for(v1.Compose(before)).output)


def test_without_any_the_plan_is_the_usual_one() -> None:
    assert plan_for(v1.Compose(TO_TENSOR), rest=True) == plan_for(v1.Compose(TO_TENSOR))


def test_a_container_with_one_that_is_not_translated_is_called_as_a_whole() -> None:
    container = v1.RandomApply([v1.RandomHorizontalFlip(), doubled], p=1)
    assert rest_of(*TO_TENSOR, container).transforms == (container,)


def test_its_key_is_the_same_for_the_same_objects_and_for_no_others() -> None:
    def key(*transforms: Any) -> str:
        return plan_for(v1.Compose([*TO_TENSOR, *transforms]), rest=True).key

    first, second = v1.Lambda(doubled), v1.Lambda(doubled)
    assert key(first) == key(first) != key(second) != key(second, first)
    assert key(first).startswith(plan_for(v1.Compose(TO_TENSOR)).key)


def test_a_worker_gets_the_key_alone() -> None:
    compiled = compile_transforms(v1.Compose([*TO_TENSOR, lambda images: 3 * images]), unsupported="batch")
    there = pickle.loads(pickle.dumps(compiled))
    assert there.plan.key == compiled.plan.key and there.plan.rest.transforms == ()


@pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
def test_linear_transformations_are_torchvisions(version: Any) -> None:
    whitening = version.LinearTransformation(torch.rand(192, 192), torch.rand(192))
    found = rest_of(*TO_TENSOR, whitening)(BATCH)
    torch.testing.assert_close(found, torch.stack([whitening(image) for image in BATCH]))


def test_tensors_that_a_transform_keeps_go_where_the_images_are(device: str) -> None:
    whitening = v1.LinearTransformation(torch.eye(192), torch.ones(192))
    found = rest_of(*TO_TENSOR, whitening)(BATCH.to(device))
    assert found.device.type == device and whitening.mean_vector.device.type == "cpu"
    torch.testing.assert_close(found.cpu(), BATCH - 1, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [lambda images: images[:2], lambda images: images.mean(), lambda images: [images]],
    ids=["fewer", "one", "list"],
)
def test_what_gives_no_image_for_each_is_an_error(wrong: Any) -> None:
    with raises(InputError, code="wrong-output"):
        rest_of(*TO_TENSOR, wrong)(BATCH)


@pytest.mark.parametrize(
    ("transforms", "why"),
    [
        ([doubled, *TO_TENSOR], "images are no tensors yet there"),
        ([v1.ToTensor(), doubled], "images differ in size there"),
        ([v1.Resize(9), v1.ToTensor(), doubled], "images differ in size there"),
        ([v1.PILToTensor(), v2.FiveCrop(9), doubled], "there are several images of one there"),
    ],
    ids=["before the tensor", "of any size", "of one side", "several"],
)
def test_where_there_is_no_batch_it_is_refused_as_ever_and_says_why(transforms: list[Any], why: str) -> None:
    where = {"code": "no-batch", "position": f"transform.transforms[{transforms.index(doubled)}]"}
    with raises(UnsupportedTransformError, **where) as caught:
        compile_transforms(v1.Compose(transforms), unsupported="batch")
    assert why in caught.value.reason
    with raises(UnsupportedTransformError, code="no-batch", transform="Lambda") as caught:
        compile_transforms(v1.Compose([v1.Lambda(doubled), *transforms]), unsupported="batch")
    assert "Do it on the batches" not in caught.value.reason  # which would not be true
