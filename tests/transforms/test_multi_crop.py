"""FiveCrop and TenCrop: several images of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import EncodedImage, UnsupportedTransformError, compile_transforms
from proxyloader.data.lazy_tensor import get_sample

from .. import compare
from ..outcomes import raises
from ..undecoded import image_calls_in

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
LARGE_ENOUGH = {"but": ("tiny", "one pixel high", "one pixel wide")}

EXACT_ONES = {
    "v1, PIL images": v1.Compose([v1.FiveCrop(20), v2.ToImage()]),
    "v2, PIL images": v2.Compose([v2.TenCrop((20, 15)), v2.PILToTensor()]),
    "v1, plain tensors": v1.Compose([v1.PILToTensor(), v1.TenCrop(20, vertical_flip=True)]),
    "v2, images": v2.Compose([v2.ToImage(), v2.FiveCrop((21, 17))]),
    "all of the smallest image": v2.Compose([v2.CenterCrop(25), v2.TenCrop(25), v2.ToImage()]),
    "behind a random crop": v2.Compose([v2.RandomCrop((28, 26)), v2.TenCrop(9), v2.ToImage()]),
    "behind a flip": v1.Compose([v1.RandomHorizontalFlip(), v1.FiveCrop(9), v2.ToImage()]),
    "cropped again": v2.Compose([v2.FiveCrop(20), v2.CenterCrop(11), v2.Pad(2), v2.ToImage()]),
    "as floats": v2.Compose([v2.ToImage(), v2.FiveCrop(20), TO_FLOAT]),
    "as floats before": v1.Compose([v1.ToTensor(), v1.FiveCrop(20)]),
    "normalised": v2.Compose([v2.FiveCrop(20), v2.ToImage(), TO_FLOAT, v2.Normalize([0.5] * 3, [0.2] * 3)]),
    "grey": v2.Compose([v2.FiveCrop(20), v2.ToImage(), v2.Grayscale(3)]),
    "resized": v2.Compose([v2.FiveCrop(30), v2.Resize(20), v2.ToImage()]),
}


def views(transform: Any, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All images of all files, torchvision's and ours."""
    files = compare.lossless(**LARGE_ENOUGH)
    torch.manual_seed(1)
    theirs = [list(transform(compare.opened(data))) for data in files.values()]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    compiled = compile_transforms(transform)
    samples = [compiled(EncodedImage.from_bytes(data)) for data in files.values()]
    calls = image_calls_in(samples)
    assert torch.equal(torch.get_rng_state(), state), "the generator was left in another state"
    for stock, late in zip(theirs, samples, strict=True):
        assert [get_sample(each).output for each in late] == list(range(len(stock)))  # type: ignore[union-attr]
        assert all(map(torch.equal, stock, late))  # what the worker gets that asks for values
    server = compare.server_of(compiled.plan, device, len(files))
    inputs = zip(*(call.inputs for call in calls))
    ours = server.collect(server.submit([list(arrays) for arrays in inputs]))
    return [torch.stack(each) for each in zip(*theirs)], [each.cpu() for each in ours]


@pytest.mark.parametrize("transform", EXACT_ONES.values(), ids=EXACT_ONES)
def test_they_are_torchvisions_one_by_one(transform: Any, device: str) -> None:
    for a, b in zip(*views(transform, device), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-5 if a.is_floating_point() else 0)


def test_crops_larger_than_the_image_are_an_error_as_with_torchvision() -> None:
    transform = v1.Compose([v1.FiveCrop(31), v2.ToImage()])
    small = compare.images("small")["small"]
    with pytest.raises(ValueError):
        transform(compare.opened(small))
    with pytest.raises(ValueError, match=r"\(31, 31\) is larger than the image size \(30, 40\)"):
        compile_transforms(transform)(EncodedImage.from_bytes(small))


@pytest.mark.parametrize(
    ("transforms", "at", "name"),
    [
        ([v2.FiveCrop(9), v2.RandomCrop(9), v2.ToImage()], 1, "v2.RandomCrop"),
        ([v2.FiveCrop(9), v2.RandomApply([v2.Pad(1)]), v2.ToImage()], 1, "v2.RandomApply"),
        ([v2.FiveCrop(9), v1.ToTensor()], 1, "ToTensor"),
        ([v1.FiveCrop(9), v1.Lambda(list)], 1, "Lambda"),
        ([v2.FiveCrop(9), v2.Lambda(list)], 1, "v2.Lambda"),
        ([v1.FiveCrop(9), list], 1, "builtins.list"),
        ([v1.ToTensor(), v2.FiveCrop(9), v2.Normalize([0.5], [0.1])], 2, "v2.Normalize"),
        ([v2.ToImage(), v1.CenterCrop(9), v2.FiveCrop(5), TO_FLOAT], 3, "v2.ToDtype"),
        ([v2.FiveCrop(9), v2.PILToTensor(), TO_FLOAT], 2, "v2.ToDtype"),
        ([v2.FiveCrop(9), v2.ToImage(), v2.ToPureTensor(), TO_FLOAT], 3, "v2.ToDtype"),
        ([v2.FiveCrop(9), v2.TenCrop(7), v2.ToImage()], 1, "v2.TenCrop"),
        ([v2.RandomApply([v2.FiveCrop(9)]), v2.ToImage()], 0, "v2.RandomApply"),
        ([v2.RandomChoice([v2.FiveCrop(9)]), v2.ToImage()], 0, "v2.RandomChoice"),
    ],
)
def test_what_torchvision_does_otherwise_or_not_at_all_is_refused(transforms: list[Any], at: int, name: str) -> None:
    where = {"position": f"transform.transforms[{at}]", "transform": name}
    with raises(UnsupportedTransformError, code="several-images", **where):
        compile_transforms(v2.Compose(transforms))
