"""Custom objects that hold transforms and call them, such as TwoCropsTransform."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from proxyloader import EncodedImage, InputError, UnsupportedTransformError, compile_transforms
from proxyloader.data.compiled_transform import compile_for_loader, find_compiled
from proxyloader.data.lazy_tensor import LazyTensor
from proxyloader.transforms.nested import find_nested, replace_nested

from .. import compare
from ..outcomes import raises
from ..undecoded import image_calls_in

CROP = v1.Compose([v1.RandomResizedCrop(20), v1.ToTensor()])
FLIP = v2.Compose([v2.CenterCrop(15), v2.RandomHorizontalFlip(), v2.ToImage()])


class TwoCrops:
    """As MoCo's and SimCLR's."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        return [self.transform(image), self.transform(image)]


class MultiCrop:
    """As DINO's: large views and small ones."""

    def __init__(self) -> None:
        self.large = CROP, v1.Compose([v1.RandomResizedCrop(24), v1.RandomGrayscale(0.5), v1.ToTensor()])
        self.small = {"transform": FLIP, "count": 3}
        self.pair = TwoCrops(FLIP)

    def __call__(self, image: Any) -> Any:
        small = [self.small["transform"](image) for _ in range(self.small["count"])]
        return {"large": [transform(image) for transform in self.large], "small": small, "pair": self.pair(image)}


class Module(torch.nn.Module):
    """As the presets of torchvision's training reference may be, with a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.views = torch.nn.ModuleList([FLIP, v2.ToImage()])

    def forward(self, image: Any) -> Any:
        return tuple(view(image) for view in self.views)


class OneOfTwo:
    """Draws with a generator of its own choice."""

    def __init__(self) -> None:
        self.transforms = [v1.Compose([each, v1.ToTensor()]) for each in (v1.RandomCrop(12), v1.Resize((12, 12)))]

    def __call__(self, image: Any) -> Any:
        return self.transforms[int(random.random() < 0.5)](image.convert("RGB"))


class Twice(v2.Transform):
    """Derived from the base of v2's classes, which has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.view = FLIP

    def forward(self, image: Any) -> Any:
        return self.view(image), self.view(image)


HOLDERS = [TwoCrops(CROP), MultiCrop(), Module(), OneOfTwo(), Twice(), TwoCrops(TwoCrops(FLIP))]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: type(holder).__name__)
def test_their_code_calls_the_compiled_transforms_in_the_same_order(holder: Any) -> None:
    """So the numbers that are drawn are those that torchvision draws, and so is what comes out."""
    data = compare.images("landscape")["landscape"]
    compare.seed_all(2)
    theirs = [holder(compare.opened(data)) for _ in range(5)]
    states = compare.generator_states()
    compiled = compile_transforms(holder)
    compare.seed_all(2)
    ours = [compiled(EncodedImage.from_bytes(data)) for _ in range(5)]
    assert compare.generator_states() == states
    plans = {each.plan.key: each.plan for each in find_compiled(compiled)}
    for a, b in zip(tree_leaves(theirs), tree_leaves(ours), strict=True):
        assert isinstance(b, LazyTensor) and (b.dtype, b.shape) == (a.dtype, a.shape)
        (call,) = image_calls_in(b)
        assert plans[call.server].output.dtype == str(a.dtype).removeprefix("torch.")
        assert plans[call.server].output.size in (None, tuple(a.shape[1:]))
        assert torch.equal(b, a)


def test_the_original_and_compiled_transforms_are_kept() -> None:
    for holder in HOLDERS:
        before = find_nested(holder)
        compiled = compile_transforms(holder)
        assert type(compiled) is type(holder) and find_compiled(compiled)
        assert all(a is b for a, b in zip(find_nested(holder).values(), before.values(), strict=True))
        again = pickle.loads(pickle.dumps(compiled))  # as it reaches workers that are spawned
        assert [each.plan for each in find_compiled(again)] == [each.plan for each in find_compiled(compiled)]
    compiled = compile_transforms(CROP)
    two = TwoCrops(compiled)
    assert compile_transforms(two) is two and find_compiled(two) == [compiled]
    mixed = MultiCrop()
    mixed.large = (compiled, CROP)
    assert find_compiled(compile_transforms(mixed))[0] is compiled
    for holder in (*HOLDERS, len, CROP, 3):
        assert replace_nested(holder, lambda _, transform: transform) is holder


def test_a_transform_is_named_by_where_it_is_held() -> None:
    assert list(find_nested(MultiCrop())) == [".large[0]", ".large[1]", ".small['transform']", ".pair.transform"]
    assert list(find_nested(Module())) == [".views.0", ".views.1"]
    assert find_nested(CROP) == find_nested(TwoCrops) == find_nested(len) == find_nested(lambda: CROP) == {}
    two = TwoCrops(CROP)
    two.myself = two  # type: ignore[attr-defined]
    assert list(find_nested(two)) == [".transform"]


class Wrong(TwoCrops):
    def __init__(self) -> None:
        super().__init__(CROP)
        self.flip = v1.RandomHorizontalFlip()


@pytest.mark.parametrize(
    ("transform", "position", "code"),
    [
        (Wrong(), "transform.flip", "no-tensor"),
        (TwoCrops(v2.Compose([FLIP, v2.ToPILImage()])), "transform.transform.transforms[1]", "unsupported-class"),
        (TwoCrops([v1.Pad(2), v1.ToTensor()]), "transform.transform[0]", "no-tensor"),
        (v1.Compose([TwoCrops(CROP)]), "transform.transforms[0]", "wrong-place"),
        (lambda image: [CROP(image), CROP(image)], "transform", "unsupported-class"),
    ],
    ids=["part of a transform", "refused inside", "parts in a list", "inside a Compose", "function"],
)
def test_unsupported_nesting_is_refused_with_its_position(transform: Any, position: str, code: str) -> None:
    with raises(UnsupportedTransformError, code=code, position=position):
        compile_transforms(transform)


class Chained(TwoCrops):
    def __call__(self, image: Any) -> Any:
        return self.transform(self.transform(image))


def test_chained_transforms_are_torchvisions_in_a_loader_and_refused_if_compiled_by_the_user() -> None:
    data, chained = compare.images("small")["small"], Chained(v2.Compose([*FLIP.transforms, v2.RandomCrop(9)]))
    with raises(InputError, code="wrong-input"):
        compile_transforms(Chained(FLIP))(EncodedImage.from_bytes(data))
    compiled = compile_for_loader(chained, has_fallback=True)
    draws = compare.drawn_alike(
        lambda: chained(compare.opened(data)), lambda: compiled(EncodedImage.from_bytes(data)), seeds=5
    )
    assert all(torch.equal(a, b) for a, b in draws)
