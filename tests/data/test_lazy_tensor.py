"""LazyTensor: recorded operations give the results of the real tensor, and reading a value returns the real one."""

from __future__ import annotations

import copy
import functools
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import functional as v1_functional, transforms as v1, v2
from torchvision.transforms.v2 import functional as v2_functional

from proxyloader.data.lazy_tensor import LazyTensor, is_materialized
from proxyloader.workers.packing import ContentUnpickler, Packer, _ContentPickler

from .. import compare

FLOAT = v1.Compose([v1.RandomResizedCrop((8, 10)), v1.RandomHorizontalFlip(), v1.ToTensor()])
WHOLE = v1.Compose([v1.RandomCrop((8, 10)), v1.PILToTensor()])
FILES = ("landscape", "portrait", "small")


def both(transform: Any = FLOAT, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Lazy tensors, and what torchvision makes of the same images."""
    files = compare.images(*FILES)
    torch.manual_seed(seed)
    real = [transform(compare.opened(data)) for data in files.values()]
    torch.manual_seed(seed)
    late = compare.undecoded(transform, files)
    assert all(isinstance(each, LazyTensor) and not is_materialized(each) for each in late)
    return late, real


def replayed(content: Any) -> Any:
    """What arrives in the main process, where DALI's images are exactly torchvision's."""
    pickler = _ContentPickler(Packer(list, None, 256))
    data = pickler.pickle(content)

    @functools.cache
    def found(output: int, run: int, row: int | None = None) -> torch.Tensor:
        """One tensor for all that refers to it."""
        images = [call.materialize() for call in pickler.runs[run][output]]  # type: ignore[attr-defined]
        return torch.stack(images) if row is None else images[row].clone()

    def resolve(place: Any) -> torch.Tensor:
        return torch.stack([found(*each) for each in place]) if isinstance(place, list) else found(*place)

    return ContentUnpickler(data, resolve, False, pickler.objects, torch.device("cpu")).load()


def strides_of(tensor: torch.Tensor) -> list[int]:
    """But of dimensions of size 1, where a stride means nothing, and torch's meta device gives others at times."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Same form, same values to the bit, NaN included."""
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor), where
        if not isinstance(b, torch.Tensor):
            assert a == b, where
            continue
        assert (a.shape, a.dtype, strides_of(a)) == (b.shape, b.dtype, strides_of(b)), where
        found, expected = (t.float() if t.dtype is torch.bfloat16 else t for t in (a, b))  # numpy has no bfloat16
        assert found.numpy().tobytes() == expected.numpy().tobytes(), f"{where}: {a}, and torch's is {b}"


def assert_replayed(ours: Any, theirs: Any) -> None:
    """The same in the main process, and then in the worker."""
    assert_same(replayed(ours), theirs)
    assert_same(ours, theirs)


def on_each(do: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Results of a function for a lazy tensor and for the real one."""
    (late, *_), (real, *_) = both()
    return do(late), do(real)


def assert_same_form(ours: Any, theirs: Any) -> None:
    """Shape, dtype and strides are known without values."""
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert isinstance(a, LazyTensor) and not is_materialized(a)
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        assert a.is_contiguous() == b.is_contiguous() and len(a.size()) == a.ndim == b.dim()


OTHER = torch.linspace(0.1, 1.4, 240).reshape(3, 8, 10)
MASK = OTHER > 0.7

PURE: dict[str, Callable[[Any, Any, int], Any]] = {
    **{name: lambda x, y, n, call=call: call(x) for name, call in {"neg": torch.neg, "clone": torch.clone}.items()},
    "add": lambda x, y, n: x + y,
    "mul": lambda x, y, n: x * (n + 0.5),
    "from": lambda x, y, n: n - x,
    "maximum": lambda x, y, n: torch.maximum(x, y),
    "compared": lambda x, y, n: x > n / 4,
    "where": lambda x, y, n: torch.where(x > y, x, y),
    "cast": lambda x, y, n: x.to([torch.float32, torch.float64, torch.float16, torch.int64][n % 4]),
    "channel": lambda x, y, n: x[n % len(x)],
    "window": lambda x, y, n: x[..., n % 3 :],
    "steps": lambda x, y, n: x[:: n % 2 + 1],
    "new axis": lambda x, y, n: x.unsqueeze(n % (x.ndim + 1)),
    "indices": lambda x, y, n: x[[0, -1, n % len(x)]],
    "flip": lambda x, y, n: x.flip(n % x.ndim),
    "transpose": lambda x, y, n: x.transpose(0, n % x.ndim),
    "permute": lambda x, y, n: x.permute(*range(x.ndim)[1:], 0),
    "unbind": lambda x, y, n: x.unbind(0)[-1],
    "detach": lambda x, y, n: x.detach(),
    "reshape": lambda x, y, n: x.reshape(-1),
    "view": lambda x, y, n: x.contiguous().view(len(x), -1),  # of other strides torch alone refuses it
    "expand": lambda x, y, n: x[None].expand(2, *x.shape),
    "contiguous": lambda x, y, n: x.contiguous(),
    "chunk": lambda x, y, n: x.chunk(2)[-1],
    "cat": lambda x, y, n: torch.cat([x, y]),
    "stack": lambda x, y, n: torch.stack([x, y], n % 2),
    "sum": lambda x, y, n: x.sum(n % x.ndim),
    "mean": lambda x, y, n: x.mean(),
    "max": lambda x, y, n: x.max(n % x.ndim)[n % 2],
    "sort": lambda x, y, n: x.sort(n % x.ndim)[0],
}
"""Operations that need no values, of a tensor, another one and a number."""

RECORDED: dict[str, Callable[[Any], Any]] = {
    **{f"{name}, of a program": lambda x, do=do: do(x, OTHER, 2) for name, do in PURE.items()},
    "by a tensor": lambda x: x * OTHER + OTHER,
    "by a channel's": lambda x: x * torch.tensor([0.2, 0.4, 0.9]).reshape(3, 1, 1),
    "by numpy's number": lambda x: x * np.float64(0.3),
    "addcmul": lambda x: torch.addcmul(x, OTHER, OTHER, value=0.1),
    "compared twice": lambda x: (x > 0.2) & (x < 0.6) | MASK,
    "reshape with a copy": lambda x: x.permute(1, 2, 0).reshape(-1, 3),
    "unfold": lambda x: x.unfold(2, 4, 3),
    "channels_last": lambda x: x[None].to(memory_format=torch.channels_last),
    "iterated": list,
    "pad": lambda x: F.pad(x, (1, 2, 3, 0), value=0.7),
    "mean of axes": lambda x: x.mean((1, 2), keepdim=True),
    "to bytes": lambda x: (x * 255).to(torch.uint8),
    "bfloat16": lambda x: x.to("cpu", torch.bfloat16),
    "scatter": lambda x: x.scatter(0, torch.zeros(1, 8, 10, dtype=torch.long), 0.5),
    "erased": lambda x: v1_functional.erase(x, 1, 2, 3, 4, torch.tensor(0.5)),
    "normalised": lambda x: v1_functional.normalize(x, [0.5] * 3, [0.2] * 3),
    "turned by torchvision": v1_functional.hflip,
    "as floats": v2_functional.to_dtype,
}
"""Operations that need no values."""

CHANGES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: operator.iadd(x, OTHER),
    "clamp_": lambda x: x.clamp_(0.4, 0.6),
    "copy_": lambda x: x.copy_(OTHER),
    "masked_fill_": lambda x: x.masked_fill_(MASK, 2),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "with an argument of their own": lambda x: x.mul_(x),
    "relu": lambda x: F.relu(x, inplace=True),
    "a channel": lambda x: x.__setitem__(0, 0.5),
    "a tensor": lambda x: x.__setitem__((slice(None), 3), OTHER[:, 3]),
    "itself": lambda x: x.__setitem__(0, x[1]),
    "a mask": lambda x: x.__setitem__(MASK, 7),
    "a mask of its own": lambda x: x.__setitem__(x > 0.5, 7),
    "an ellipsis": lambda x: x.__setitem__((..., 4), 1.5),
    "all": lambda x: x.__setitem__(slice(None), OTHER),
    "data": lambda x: setattr(x, "data", 2 * x),
    "data of zeros": lambda x: setattr(x, "data", torch.zeros_like(x)),
    "data of data": lambda x: setattr(x, "data", x.data.clamp(0.4, 0.6)),
}


def into_a_batch(x: Any) -> torch.Tensor:
    batch = torch.zeros(2, 3, 8, 10)
    batch[0] = x
    batch[1] += x
    return batch


WITH_VALUES: dict[str, Callable[[Any], Any]] = {
    "in a list": lambda x: torch.tensor([x.mean(), 2.0, x[0, 1, 2]]),
    "in a list, in the old way": lambda x: [torch.Tensor([x.mean(), x.std()]), torch.FloatTensor([x[0, 0, 0]])],
    "in a list, as an array": lambda x: torch.asarray([x.mean(), x.std()]),
    "in a list, as another": lambda x: [x.new_tensor([x.mean()]), torch.ones(1).new_tensor([x.mean()])],
    "normalised by itself": lambda x: v1_functional.normalize(x, [x.mean()] * 3, [x.std()] * 3),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:, :4]]).to_padded_tensor(0.0),
    "nested, jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged).values(),
    "item": lambda x: x.max().item(),
    "int": lambda x: int(x.sum()),
    "tolist": torch.Tensor.tolist,
    "contains": lambda x: 0.5 in x,
    "format": lambda x: f"{x.mean():.3f}",
    "a mask": lambda x: x[x > 0.5],
    "nonzero": lambda x: (x > 0.5).nonzero(),
    "numpy": lambda x: x.numpy().sum().item(),
    "asarray of another dtype": lambda x: np.asarray(x, dtype=np.float64).tolist(),
    "a function of numpy's": lambda x: np.stack([x, x]).tolist(),
    "out of torch's": lambda x: torch.add(x, 1, out=torch.empty(3, 8, 10)),
    "out of ours": lambda x: torch.add(OTHER, 1, out=x),
    "into a tensor": lambda x: torch.zeros(3, 8, 10).copy_(x),
    "into a batch": into_a_batch,
    "pad_sequence": lambda x: torch.nn.utils.rnn.pad_sequence([x[:2], x]),
    "conv": lambda x: F.conv2d(x[None], torch.ones(1, 3, 3, 3)),
    "interpolate": lambda x: F.interpolate(x[None], size=(4, 5), mode="bilinear"),
    "pool": lambda x: F.avg_pool2d(x, 2),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "conjugate": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * torch.fft.fft2(x).conj()).real,
    "sparse": lambda x: (x > 0.5).to_sparse().indices(),
    "to PIL": lambda x: v1_functional.to_pil_image(x).tobytes(),
    "tv_tensors": lambda x: tv_tensors.Image(x).as_subclass(torch.Tensor),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "repr": repr,
}


@pytest.mark.parametrize("transform", [FLOAT, WHOLE], ids=["float", "uint8"])
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_operation_gives_the_result_of_the_real_tensor(name: str, transform: Any) -> None:
    (late, *_), (real, *_) = both(transform)
    try:
        theirs = RECORDED[name](real)
    except Exception as error:
        assert transform is WHOLE
        with pytest.raises(type(error)):
            replayed(RECORDED[name](late))
        return
    ours = RECORDED[name](late)
    assert_same_form(ours, theirs)
    assert not is_materialized(late)
    assert_replayed(ours, theirs)
    assert_same(late, real)


@pytest.mark.parametrize("name", CHANGES)
def test_in_place_operations_and_assignments_are_recorded(name: str) -> None:
    (late, *_), (real, *_) = both()
    for image in (late, real):
        changed = CHANGES[name](image)
        assert changed is image or changed is None  # of an assignment
    if changed is not None:
        assert_same_form(late, real)
    assert_replayed(late, real)


def test_arguments_that_change_later_keep_their_recorded_values() -> None:
    def used_and_changed(image: Any) -> list[Any]:
        other, index = torch.ones(3, 8, 10), torch.tensor([2, 0])
        parts = [image * other, image[index], image + 0]
        other.zero_()
        index.fill_(1)
        return [*parts, image.mul_(2)]

    assert_replayed(*on_each(used_and_changed))


LONG_CHAINS: dict[str, tuple[int, Callable[[Any, int], Any]]] = {
    "many steps": (300, lambda x, _: x * 1.001 + 0.0001),
    "of itself": (45, lambda x, _: x + x),  # a search that goes twice through what is used twice would never end
    "assigned": (300, lambda x, k: (x.__setitem__((0, k % 8, k % 10), k), x)[1]),
}


@pytest.mark.parametrize(("count", "step"), LONG_CHAINS.values(), ids=LONG_CHAINS)
def test_long_chains_of_operations_are_replayed(count: int, step: Callable[[Any, int], Any]) -> None:
    late, real = both()
    made, expected = ([functools.reduce(step, range(count), each) for each in images] for images in (late, real))
    assert_same(replayed(made), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WITH_VALUES)
def test_reading_values_returns_the_real_ones(name: str) -> None:
    (late, *_), (real, *_) = both()
    ours, theirs = WITH_VALUES[name](late), WITH_VALUES[name](real)
    assert_same(ours, theirs)
    assert_same(late, real)
    assert_same(replayed(late), real)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum()


def own_gradient_of_a_function(x: Any, weight: Any) -> Any:
    x.requires_grad_()
    (Product.apply(x, weight).sum() + (x * x).sum()).backward()  # type: ignore[no-untyped-call]
    return x.grad


def by_a_step(x: Any, weight: Any) -> Any:
    optimizer = torch.optim.SGD([x.requires_grad_()], lr=0.1)
    (x * weight).sum().backward()
    optimizer.step()
    return x


def of_what_was_seen(x: Any, weight: Any) -> Any:
    y = x.requires_grad_()
    product = x * weight
    seen = [y is x, x.requires_grad, x.is_leaf, x.grad_fn is None, product.is_leaf, x.detach().requires_grad]
    return torch.tensor(seen) * product.sum()


WITH_GRADIENT: dict[str, Callable[[Any, Any], Any]] = {
    "times": lambda x, weight: x * weight,
    "several": lambda x, weight: [x * weight, x, 1 - x + weight],
    "in place": lambda x, weight: x.mul_(weight),
    "an item": lambda x, weight: (x.__setitem__(0, weight), x)[1],
    "through a view": lambda x, weight: (x[1].mul_(weight), x)[1],
    "collated": lambda x, weight: default_collate([x * weight, x]),
    "a loss": lambda x, weight: F.mse_loss(torch.ones(3, 8, 10) * weight, x),
    "no_grad": torch.no_grad()(operator.mul),
    "partly no_grad": lambda x, weight: torch.no_grad()(operator.add)(x, weight) * weight,
    "a leaf": lambda x, weight: x.requires_grad_(),
    "no leaf": lambda x, weight: x.requires_grad_(False) * 2,
    "a leaf by an attribute": lambda x, weight: (setattr(x, "requires_grad", True), x * weight)[1],
    "a copied leaf": lambda x, weight: copy.deepcopy(x.requires_grad_()),
    "a leaf of a copy": lambda x, weight: x.clone().requires_grad_() * weight,
    "its own gradient": lambda x, w: ((x.requires_grad_() * x * w).sum().backward(), x.grad)[1],
    "its own gradient of a Function": own_gradient_of_a_function,
    "an optimizer": by_a_step,
    "attributes": of_what_was_seen,
    "a Function": Product.apply,
    "behind a Function": lambda x, weight: Product.apply(x, weight) * 2,
    "vmap": lambda x, weight: torch.func.vmap(lambda row: row * weight)(x),
    "func.grad": lambda x, weight: torch.func.grad(lambda y: (y * y).sum())(x),
    "a checkpoint": lambda x, weight: checkpoint(torch.mul, x, weight, use_reentrant=False),
    "an image": lambda x, weight: tv_tensors.Image(x).requires_grad_() * weight,
    "a flipped image": lambda x, weight: v2_functional.horizontal_flip(tv_tensors.Image(x * weight)),
    "a transform": lambda x, weight: v1.Normalize([0.5] * 3, [0.5] * 3)(x * weight),
}


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradients_equal_those_of_the_real_tensor(name: str) -> None:
    (late, *_), (real, *_) = both()
    found = []
    for image in (late, real):
        weight = torch.tensor(1.7, requires_grad=True)
        result = WITH_GRADIENT[name](image, weight)
        result = tree_leaves(replayed(result) if image is late else result)
        assert all(type(each) in (torch.Tensor, tv_tensors.Image) for each in result)
        graph = [(each.requires_grad, each.is_leaf) for each in result]
        for each in result:
            if each.requires_grad:
                (each**2).sum().backward(retain_graph=True)
        leaves = [each.grad for each in result if each.is_leaf]
        found.append((graph, [each for each in (weight.grad, *leaves) if each is not None], result))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert_same([each.detach() for each in found[0][2]], [each.detach() for each in found[1][2]])


def test_direct_access_to_memory_is_an_error() -> None:
    (late, *_), _ = both()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="translate=False"):
        late.data_ptr()


def test_wrapping_as_a_tv_tensor_gives_an_image() -> None:
    to_image = v2.Compose([v2.Resize((8, 10)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    (late, *_), (real, *_) = both(to_image)
    used = late + 1
    used.numpy()
    for x in (late * 2, torch.ones(2), used):
        wrapped = tv_tensors.wrap(x, like=late)
        assert isinstance(wrapped, tv_tensors.Image) and isinstance(wrapped, LazyTensor)
        assert isinstance(replayed(wrapped), tv_tensors.Image)
    assert_same(tv_tensors.wrap(late * 2, like=late), real * 2)
    assert_same(tv_tensors.wrap(torch.ones(2), like=late), torch.ones(2))


def test_after_a_move_the_device_and_the_draws_are_torchs() -> None:
    def moved(image: torch.Tensor) -> Any:
        there = image.to("meta")  # on which torch draws nothing
        torch.manual_seed(0)
        torch.randn_like(there)
        results = there[0], there * 2, torch.stack([there, there]), there.as_subclass(tv_tensors.Image)
        return [each.device for each in results], there.is_meta, torch.rand(1).item()

    (late, *_), (real, *_) = both()
    assert moved(late) == moved(real)


def test_a_recorded_operation_may_change_the_strides() -> None:
    (late, *_), (real, *_) = both(WHOLE)
    by_hand = lambda x: (x.float() / 255).masked_fill(torch.zeros(x.shape[-2:], dtype=torch.bool), 0)  # noqa: E731
    noted = by_hand(late)
    _ = late.sum().item()  # its values have the strides of an array of Pillow's
    assert replayed([noted])[0].stride() == by_hand(real).stride()


class OwnTensor(torch.Tensor):
    pass


class OwnImage(tv_tensors.Image):
    pass


class Tagged(torch.Tensor):
    """As of MONAI and fastai."""

    @staticmethod
    def __new__(cls, values: Any, tag: str) -> Any:
        return torch.as_tensor(values).as_subclass(cls)

    def __init__(self, values: Any, tag: str) -> None:
        self.tag = tag


OF_OWN_CLASS: dict[str, Callable[[Any], Any]] = {
    "as_subclass": lambda x: x.as_subclass(OwnTensor),
    "after an operation": lambda x: (x * 2).as_subclass(OwnTensor)[0],
    "with attributes": lambda x: Tagged(x, "a"),
    "of tv_tensors.Image": OwnImage,
    "operation with one": lambda x: x + torch.ones(1).as_subclass(OwnTensor),
    "operation of one": lambda x: torch.ones(1).as_subclass(OwnTensor) * x,
}


@pytest.mark.parametrize("name", OF_OWN_CLASS)
def test_a_class_of_the_users_is_kept(name: str) -> None:
    (late, *_), (real, *_) = both()
    ours, stock = OF_OWN_CLASS[name](late), OF_OWN_CLASS[name](real)
    assert type(ours) is type(stock) and vars(ours).get("tag") == vars(stock).get("tag")
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-6)


def test_arrays_and_tensors_of_the_values_share_the_memory() -> None:
    (late, *_), (real, *_) = both()
    for image in (late, real):
        image.numpy()[0] = 4
        image.add_(1)
        image.detach().numpy()[1] = 9
    assert_same(late, real)
    assert_same(replayed(late), real)


def saved_and_loaded(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "copies", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), saved_and_loaded]
)
def test_copies_have_the_values(copies: Callable[[Any], Any]) -> None:
    (late, *_), (real, *_) = both()
    assert_same(copies({"a": [late, 1 - late]})["a"], [real, 1 - real])
    assert_same([late, 1 - late], [real, 1 - real])


def test_copies_of_tv_tensors_keep_their_class_and_unknown_strides_are_reshaped() -> None:
    ours, theirs = both(v2.Compose([v2.CenterCrop(32), v2.ToImage()]))
    copied = copy.deepcopy(ours[0])
    assert isinstance(copied, tv_tensors.Image) and not is_materialized(copied)
    assert_same(replayed([copied]), theirs[:1])
    for copies in copy.copy, lambda x: pickle.loads(pickle.dumps(x)):
        (late, *_), (real, *_) = both()
        copied = copies(tv_tensors.Image(late))
        assert isinstance(copied, tv_tensors.Image)
        assert_same(copied, real)
    image = v2_functional.to_image(v1_functional.to_pil_image(torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)))
    told = LazyTensor(torch.empty(3, 4, 4, dtype=torch.uint8, device="meta"), image.as_subclass(torch.Tensor))
    assert not image.is_contiguous() and told.is_contiguous()
    assert_same(told.reshape(-1) + 0, image.reshape(-1) + 0)


def test_it_looks_like_a_tensor() -> None:
    (late, *_), (real, *_) = both()
    assert isinstance(late, torch.Tensor) and torch.is_tensor(late) and late.is_floating_point()
    assert (late.numel(), len(late), late.nbytes, late.element_size()) == (240, 3, 960, 4)
    assert not late.requires_grad and late.is_leaf and late.layout is torch.strided
    assert late.size(1) == 8 and late.data.shape == real.shape and hash(late) is not None
    assert not is_materialized(late)
    assert repr(late) == repr(real) and str(late) == str(real)


class TestBatches:
    @pytest.mark.parametrize("transform", [FLOAT, WHOLE], ids=["float", "uint8"])
    @pytest.mark.parametrize(
        "collate",
        [
            default_collate,
            torch.stack,
            torch.cat,
            lambda images: torch.stack([image * 2 - 1 for image in images]),
            lambda images: torch.stack([(image.float() - 0.5) / torch.ones(3, 1, 1) for image in images]),
            lambda images: torch.stack([images[0], images[1].flip(2), images[2] + 1]),
            lambda images: torch.stack([images[0], images[0]]),
            lambda images: torch.stack(images, -1),
            lambda images: torch.stack([image.float().mean() for image in images]),
            lambda images: default_collate([(image, image + 1) for image in images]),
            lambda images: default_collate([images[0], images[1].clone(), torch.zeros_like(images[2])]),
            lambda images: torch.cat([image[None] for image in images]).contiguous(),
            lambda images: torch.stack([image.float().mean((1, 2)) * OTHER[:, :3, 0] for image in images]),
            lambda images: torch.stack([image.float().mean() * torch.tensor(2.0).double() for image in images]),
            lambda images: torch.stack([image[0] * OTHER for image in images]),
        ],
        ids=range(15),
    )
    def test_equal_those_of_the_real_tensors(self, transform: Any, collate: Any) -> None:
        late, real = both(transform)
        ours, theirs = collate(late), collate(real)
        assert_same_form(ours, theirs)
        assert_same(replayed(ours), list(theirs) if isinstance(theirs, list) else theirs)
        assert_same(ours, theirs)

    def test_dtypes_may_differ_but_sizes_may_not_and_some_values_may_be_known(self) -> None:
        late, real = both()
        found = [torch.stack([a, b.half(), c.double()]) for a, b, c in (late, real)]
        assert_same(replayed(found[0]), found[1])
        late, real = both()
        for images in (late, real):
            with pytest.raises(RuntimeError):
                default_collate([images[0], images[1][:, :3]])
        late, real = both()
        assert late[1].sum().item() == real[1].sum().item()
        assert_same(replayed(default_collate(late)), torch.stack(real))
        assert_same(replayed(default_collate([late[0], real[1], late[2]])), torch.stack(real))

    @pytest.mark.parametrize("mixing", [v2.MixUp, v2.CutMix], ids=lambda cls: cls.__name__)
    def test_mixing_equals_torchvisions(self, mixing: Any) -> None:
        late, real = both()
        found = []
        for images in (late, real):
            torch.manual_seed(4)
            batch = default_collate([(image, k) for k, image in enumerate(images)])
            found.append([*mixing(num_classes=3)(*batch), torch.rand(1)])
        assert not is_materialized(found[0][0])
        assert_replayed(found[0], found[1])


RANDOM: dict[str, Callable[[Any], Any]] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 0, 9),
    "bernoulli": lambda x: x.bernoulli(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_().mul_(2),
    "randperm": lambda x: x[torch.randperm(3)],
    "RandomErasing": lambda x: v1.RandomErasing(1.0, value="random")(x),
    "ColorJitter": lambda x: v2.ColorJitter(0.4, 0.4, 0.4, 0.1)(x),
    "RandomResizedCrop": lambda x: v1.RandomResizedCrop(4)(x),
    "a generator of its own": lambda x: x.clone().normal_(generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_functions_draw_the_same_numbers(name: str) -> None:
    def drawn(image: Any) -> list[Any]:
        torch.manual_seed(11)
        return [RANDOM[name](image), torch.rand(3), image]

    assert_replayed(*on_each(drawn))


# --- programs --------------------------------------------------------------------------------------------------------

Step = tuple[str, int, int, int]
"""An operation, the tensors that it takes, and a number."""


def small(made: torch.Tensor) -> torch.Tensor:
    """Of a size that a program may go on with."""
    return made if 0 < made.numel() < 5000 and made.ndim < 6 else made.reshape(-1)[:7]


def assigned(x: torch.Tensor, y: Any, n: int) -> torch.Tensor:
    index = [n % len(x), slice(n % 3, None, 2), ..., (slice(None), n % 3), [0, -1], None][n % 6]
    x[index] = y
    return x


PROGRAM: dict[str, Callable[[Any, Any, int], Any]] = {
    **PURE,
    "mask": lambda x, y, n: x[x > n / 4],
    "noise": lambda x, y, n: x + torch.rand_like(x.float()),
    "dropout": lambda x, y, n: F.dropout(x, 0.5),
    "add_": lambda x, y, n: x.add_(y),
    "mul_": lambda x, y, n: x.mul_(n),
    "clamp_": lambda x, y, n: x.clamp_(0, n),
    "copy_": lambda x, y, n: x.copy_(y),
    "zero_": lambda x, y, n: x.zero_(),
    "squeeze_": lambda x, y, n: x.squeeze_(),
    "transpose_": lambda x, y, n: x.transpose_(0, n % x.ndim),
    "uniform_": lambda x, y, n: x.uniform_(),
    "view changed": lambda x, y, n: x[n % len(x)].mul_(3),
    "assigned": assigned,
    "number assigned": lambda x, y, n: assigned(x, n, n),
    "read": lambda x, y, n: float(x.double().sum()),
    "asked": lambda x, y, n: bool((x > n / 4).any()),
    "numpy": lambda x, y, n: x.numpy().copy().tolist(),
    "array changed": lambda x, y, n: x.numpy().fill(n),
    "forgotten": lambda x, y, n: None,
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(PROGRAM)), st.integers(0, 99), st.integers(0, 99), st.integers(0, 5)),
    min_size=1,
    max_size=30,
)


def run(program: list[Step], images: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors that a program leaves, and what it has read."""
    tensors, read = list(images), []
    torch.manual_seed(7)
    for name, first, second, number in program:
        x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
        try:
            made = PROGRAM[name](x, y, number)
        except Exception as error:
            read.append(type(error))
            continue
        if name == "forgotten" and len(tensors) > 2:
            del tensors[first % len(tensors)]
        elif isinstance(made, torch.Tensor) and len(tensors) < 12:
            tensors.append(small(made))
        else:
            read.append(None if isinstance(made, torch.Tensor) else made)
    return tensors, [*read, torch.rand(2).tolist()]


@given(program=programs, is_float=st.booleans())
@settings(max_examples=200)
def test_any_program_gives_what_it_gives_on_real_tensors(program: list[Step], is_float: bool) -> None:
    late, real = both(FLOAT if is_float else WHOLE)
    ours, read = run(program, late)
    theirs, theirs_read = run(program, real)
    assert repr(read) == repr(theirs_read)
    assert_replayed(ours, theirs)


def test_assigning_a_tensor_to_overlapping_parts_of_itself_is_refused_as_by_torch() -> None:
    for image in both()[0][0], both()[1][0]:
        batch = torch.stack([image, image])
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            batch[[0, -1]] = batch


@pytest.mark.parametrize("index", [[0, -1], torch.tensor([0, 2]), (slice(None), [0])], ids=["list", "tensor", "tuple"])
def test_assigning_another_dtype_by_a_list_is_refused_as_by_torch(index: Any) -> None:
    for image in both(WHOLE)[0][0], both(WHOLE)[1][0]:
        image[0] = image[1].float()  # which torch converts
        with pytest.raises(RuntimeError, match="requires the source and destination dtypes match"):
            image[index] = image[0, 0, :1].float()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[[3, 1, 0]],
    "index of an unused result": lambda x: x[torch.tensor([0, -4])].mul_(2) and None,
    "index_select": lambda x: x.index_select(1, torch.tensor([8])),
    "gather": lambda x: x.gather(0, torch.full((1, 8, 10), 3)),
    "take": lambda x: x.take(torch.tensor([240])),
    "and": lambda x: x & 3,
    "cast in place": lambda x: x.int().mul_(0.5),
    "round": lambda x: (x > 0.5).round(),
}
"""Torch refuses them on a CPU, and never on the meta device."""


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_torch_refuses_is_refused_at_once(name: str) -> None:
    (late, *_), (real, *_) = both()
    for image in (real, late):
        with pytest.raises((IndexError, RuntimeError)):
            REFUSED[name](image)


def into_channel(x: torch.Tensor) -> torch.Tensor:
    x[1].fill_diagonal_(9.0)
    return x


def given_other_data(x: torch.Tensor) -> torch.Tensor:
    x.data = x[:1].half()
    return x


def added_to_its_alias(x: torch.Tensor) -> torch.Tensor:
    grey = x[:1]
    alias = grey.as_subclass(torch.Tensor)
    alias.add_(grey)
    return grey


BY_STORAGE: list[Callable[[Any], Any]] = [
    *(into_channel, given_other_data, added_to_its_alias, lambda x: x[1].storage_offset()),
    *(lambda x: x.as_strided((3,), (1,), 5), lambda x: torch.stack([x, x + 1])[1].as_strided((3,), (1,), 250)),
]


@pytest.mark.parametrize("use", BY_STORAGE)
def test_what_depends_on_the_place_in_memory_is_that_of_the_real_tensor(use: Callable[[Any], Any]) -> None:
    for late, real in zip(*both()):
        ours, theirs = use(late), use(real)
        assert_same(replayed([ours])[0] if isinstance(ours, LazyTensor) else ours, theirs)
