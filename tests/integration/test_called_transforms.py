"""Transforms that a dataset of one's own calls in its own way: met there, and made by DALI, as the stock loader's."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader as StockLoader, Dataset
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import AutoAugment, transforms as v1, v2

from proxyloader import DataLoader

from ..compare import jpeg_of, opened, seed_all
from ..side_by_side import Failed, assert_as_torch, by_dali, epochs, tried
from ..undecoded import opened_late

TRANSFORM = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CROP, FLIP, TO_TENSOR = v1.RandomCrop(40), v1.RandomVerticalFlip(), v1.ToTensor()
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Paths(Dataset[Any]):
    of: Callable[[Any], Any] = staticmethod(lambda image: image)

    def __init__(self, root: str | Path) -> None:
        self.samples = ImageFolder(str(root)).samples

    def __len__(self) -> int:
        return len(self.samples)

    def opened(self, index: int) -> Any:
        return Image.open(self.samples[index][0]).convert("RGB")

    def __getitem__(self, index: int) -> Any:
        return self.of(self.opened(index)), self.samples[index][1]


def by(of: Callable[[Any], Any], base: type[Paths] = Paths) -> Any:
    return type(getattr(of, "__name__", "Dataset"), (base,), {"of": staticmethod(of)})


def one_by_one(image: Any) -> Any:
    return NORMALIZE(TO_TENSOR(FLIP(CROP(image))))


OneByOne = by(one_by_one)


def mirrored(image: Any, *labels: Any) -> Any:
    flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else image
    return (flipped, *labels) if labels else flipped


AMONG_FUNCTIONS = v1.Compose([ImageOps.exif_transpose, CROP, FLIP, mirrored, FLIP, TO_TENSOR, NORMALIZE, torch.neg])


def among_functions(image: Any) -> Any:
    return AMONG_FUNCTIONS(image)


class WithLabels(Paths):
    """Transforms both."""

    compose: Any

    def __getitem__(self, index: int) -> Any:
        return self.compose(self.opened(index), self.samples[index][1])


class LabelsAmongFunctions(WithLabels):
    compose = v2.Compose(
        [v2.RandomCrop(32), mirrored, v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32)]
    )


class ShortensItsCompose(Paths):
    """A transform that removes another one from the Compose that calls it."""

    def __getitem__(self, index: int) -> Any:
        compose = v1.Compose([CROP, lambda image: compose.transforms.pop(2) and image, FLIP, TO_TENSOR, NORMALIZE])
        return compose(self.opened(index)), self.samples[index][1]


def passes_an_image_on(image: Any) -> Any:
    """v2's transforms go on from an image of tv_tensors."""
    tensor = v2.functional.to_image(CROP(image))
    assert isinstance(tensor, tv_tensors.Image)
    return v2.ToDtype(torch.float32, scale=True)(v2.RandomHorizontalFlip()(tensor))


def catches(image: Any) -> Any:
    try:
        return TO_TENSOR(v1.RandomCrop((110, 150))(image))
    except ValueError:
        return torch.zeros(3, 110, 150)


class ATransformPerImage(Paths):
    """With more plans than a loader builds pipelines for."""

    def __getitem__(self, index: int) -> Any:
        image = v1.Pad(2, fill=index)(v1.Resize((30 + index, 40))(self.opened(index)))
        return TO_TENSOR(v1.CenterCrop(44)(image)), index


class ChangesSettings(Paths):
    """Other settings for each image, of transforms that stay: set again after the call, and one changed in place."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.crop = v1.RandomResizedCrop(32, scale=(0.1, 0.2))
        self.flip = v1.RandomApply([v1.RandomHorizontalFlip(0.2)])
        self.normalize = v1.Normalize([0.5] * 3, [0.25] * 3)
        self.augmentation = v1.Compose([self.crop, self.flip, v1.ToTensor(), self.normalize])

    def __getitem__(self, index: int) -> Any:
        self.crop.scale = (0.2 + index / 100, 0.9)
        self.flip.transforms[0].p = index / 48
        self.normalize.mean[0] = index / 10
        image = getattr(self, "transform", self.augmentation)(self.opened(index))
        self.crop.scale, self.normalize.mean[0] = (0.01, 0.02), 99.0
        return image, index


class ChangesItsTransform(ChangesSettings):
    """It is the ``.transform``, which is translated before the workers start."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.transform = self.augmentation


class ChangesAndUses(ChangesSettings):
    """Two settings in turn, and values that are used when they have changed."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index % 2)
        return image, float(image.mean()), label


class ChangesItsCompose(Paths):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.inner, self.called = v1.Compose([]), 0
        self.augmentation = v1.Compose([CROP, self.inner, TO_TENSOR])

    def of(self, image: Image.Image) -> Any:
        self.called += 1
        self.augmentation.transforms[0] = v1.CenterCrop(40) if self.called % 2 else CROP
        self.inner.transforms[:] = [FLIP, v1.RandomHorizontalFlip()][: self.called % 3]
        return self.augmentation(image)


def stacked_values(samples: list[Any]) -> Any:
    """Uses the values when the whole batch was read."""
    return torch.from_numpy(np.stack([image.numpy() for image, _ in samples])), [label for _, label in samples]


def loader_over(dataset_class: Any, photos: Path, workers: int, **arguments: Any) -> Any:
    return lambda kind: kind(dataset_class(str(photos)), 8, shuffle=True, num_workers=workers, **arguments)


@pytest.mark.parametrize(
    "kind",
    [
        *(passes_an_image_on, catches, among_functions),
        *(LabelsAmongFunctions, ShortensItsCompose),
        *(ATransformPerImage, ChangesSettings, ChangesItsTransform, ChangesAndUses, ChangesItsCompose),
    ],
    ids=lambda kind: kind.__name__,
)
@WORKERS
def test_whoever_makes_them_batches_are_the_stock_loaders(photos: Path, kind: Any, workers: int, device: str) -> None:
    dataset_class = kind if isinstance(kind, type) else by(kind)
    arguments = {"collate_fn": stacked_values} if kind is ChangesItsCompose else {}
    assert_as_torch(loader_over(dataset_class, photos, workers, **arguments), device=device)


@WORKERS
def test_a_transform_in_a_collate_fn_is_met(photos: Path, workers: int, device: str) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([TRANSFORM(image) for image, _ in samples]), [label for _, label in samples]

    build = loader_over(Paths, photos, workers, collate_fn=collate)
    assert_as_torch(build, by_dali if workers else epochs, device=device)


@WORKERS
def test_a_transform_of_one_image_alone_gets_no_pipeline(photos: Path, workers: int, device: str) -> None:
    loader = DataLoader(ATransformPerImage(photos), 8, num_workers=workers, device=device)
    assert len(list(loader)) == 6 and loader.stats().images_by_workers == 48
    assert loader._servers.queues == {} and loader.backend.startswith("torch: the workers have produced all")


@WORKERS
def test_the_default_dtype_is_that_of_the_call(photos: Path, workers: int) -> None:
    dataset = by(TRANSFORM)(photos)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for kind in (StockLoader, DataLoader):
                assert {images.dtype for images, _ in kind(dataset, 8, num_workers=workers)} == {dtype}
    finally:
        torch.set_default_dtype(torch.float32)


class UsesAllValues(OneByOne):  # type: ignore[misc,valid-type]
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, float(image.mean()), label


@WORKERS
def test_an_image_whose_values_were_used_is_made_once(photos: Path, workers: int, device: str) -> None:
    """So the values that the dataset has seen are those of the batch, to the bit."""
    assert_as_torch(loader_over(UsesAllValues, photos, workers), device=device)
    for images, means, _ in DataLoader(UsesAllValues(photos), 8, num_workers=workers, device=device):
        assert [float(image.mean()) for image in images.cpu()] == means.tolist()


def inverted(module: Any, given: Any, made: Any) -> Any:
    return 1 - made


def upside_down(module: Any, given: Any, made: Any) -> Any:
    return v2.functional.vertical_flip(made) if isinstance(module, v1.RandomCrop) else made


def hooked(how: str) -> Any:
    """A transform that inverts its images by what torch calls beside it."""
    crop, last = v1.RandomCrop(40), v2.ToDtype(torch.float32, scale=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ToImage(), last])
    if how == "hook of a part":
        last.register_forward_hook(inverted)
    elif how == "hook":
        transform.register_forward_hook(inverted)
    elif how == "hook before":
        transform.register_forward_pre_hook(lambda module, given: tuple(v2.functional.invert(each) for each in given))
    elif how == "parameters":
        crop.get_params = lambda image, size: (1, 2, *size)  # type: ignore[method-assign]
    elif how == "forward":
        forward = transform.forward
        transform.forward = lambda *given: 1 - forward(*given)  # type: ignore[method-assign]
    return transform


@pytest.mark.parametrize("how", ["hook", "hook before", "hook of a part", "hook of all", "forward", "parameters"])
def test_what_torch_calls_beside_a_transform_is_called(photos: Path, how: str) -> None:
    is_global = how == "hook of all"
    with register_module_forward_hook(upside_down) if is_global else contextlib.nullcontext():
        for dataset_class in (by(hooked(how)), lambda root: ImageFolder(root, hooked(how))):
            assert_as_torch(loader_over(dataset_class, photos, 0))


def test_a_hook_of_all_modules_that_is_removed_leaves_images_undecoded(photos: Path) -> None:
    def load() -> Any:
        loader = loader_over(by(lambda image: v2.functional.to_image(image.crop((3, 5, 40, 41)))), photos, 0)(
            DataLoader
        )
        return len(list(loader)) and loader.stats()

    with register_module_forward_hook(lambda *_: None):
        load()
    assert load().images_by_workers == 0


@pytest.mark.parametrize(
    "compose",
    [
        v2.Compose([CROP, TO_TENSOR]),
        v2.Compose([v1.Compose([v2.RandomCrop(40)]), v2.ToImage()]),
        v2.RandomApply([CROP], 1.0),
        v1.Compose([v2.RandomCrop(40), v2.ToImage()]),
        v2.Compose([v2.RandomCrop(40), lambda image, label: (image,), v2.RandomHorizontalFlip(), v2.ToImage()]),
    ],
    ids=["parts of v1", "a Compose of v1 inside", "a part of v1 inside", "a Compose of v1", "dropped by a part"],
)
def test_a_label_that_torchvision_does_not_take_is_its_error(photos: Path, compose: Any) -> None:
    """As v2 gives its parts both, and those of v1 take an image alone."""
    assert_as_torch(loader_over(type("Dataset", (WithLabels,), {"compose": compose}), photos, 0))


class Iterated(list[Any]):
    """Whose length is not known before."""

    __len__ = None  # type: ignore[assignment]


class OddComposes(Paths):
    """The parts come from elsewhere; or what the Compose returns is no image."""

    def __getitem__(self, index: int) -> Any:
        image, of_parts = self.opened(index), v1.Compose(Iterated([CROP, TO_TENSOR]))
        of_parts.mean = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
        size = v1.Compose([lambda image: torch.tensor(image.size)])(image)
        assert type(size) is torch.Tensor
        return of_parts(image), size, v1.Compose([])(image).size


def test_any_compose_is_called_as_torch_calls_it(photos: Path, device: str) -> None:
    assert_as_torch(loader_over(OddComposes, photos, 0), by_dali, device=device)


CLASS_KEPT = [
    *(
        v1.RandomErasing(0.0),
        v1.RandomErasing(1.0),
        v1.ColorJitter(),
        v1.ColorJitter(0.3),
        v1.RandomHorizontalFlip(0.0),
    ),
    *(v1.RandomHorizontalFlip(1.0), v1.Resize((48, 64)), v1.Resize(30), v1.ConvertImageDtype(torch.uint8)),
    *(v1.CenterCrop((48, 64)), v1.RandomCrop((48, 64)), v1.RandomResizedCrop((48, 64)), AutoAugment()),
    v1.Compose([v1.ConvertImageDtype(torch.float32), v1.Normalize([0.5], [0.5])]),
]


@pytest.mark.parametrize("to_tensor", [v1.PILToTensor(), v2.ToImage(), v2.Compose([v1.PILToTensor(), v2.ToImage()])])
@pytest.mark.parametrize("transform", [*CLASS_KEPT, v2.ToImage(), v2.Compose([v2.ToImage()])])
def test_a_tensor_is_of_the_class_that_torchvision_returns(to_tensor: Any, transform: Any) -> None:
    for seed in range(3):
        seed_all(seed)
        theirs = transform(to_tensor(opened(jpeg_of((64, 48), 0))))
        with opened_late():
            seed_all(seed)
            ours = transform(to_tensor(opened(jpeg_of((64, 48), 0))))
            assert isinstance(ours, tv_tensors.Image) is isinstance(theirs, tv_tensors.Image)
            assert torch.equal(ours, theirs)


def test_an_empty_image_is_left_to_torchvision() -> None:
    with opened_late():
        empty = opened(jpeg_of((64, 48), 0)).crop((10, 10, 10, 15))
        assert v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])(empty).shape == (3, 5, 0)


def test_a_transform_of_videos_leaves_an_image_unchanged() -> None:
    with opened_late():
        image = v2.functional.to_image(opened(jpeg_of((64, 48), 0)))
        sample = {"image": image, "video": tv_tensors.Video(torch.zeros(4, 3, 5, 5))}
        shapes = {name: each.shape for name, each in v2.UniformTemporalSubsample(1)(sample).items()}
    assert shapes == {"image": (3, 48, 64), "video": (1, 3, 5, 5)}


def test_a_compose_that_returns_none_is_called_once() -> None:
    seen: list[Any] = []
    with opened_late():
        assert v1.Compose([CROP, seen.append])(opened(jpeg_of((64, 48), 0))) is None
    assert len(seen) == 1


@pytest.mark.parametrize(
    "last",
    [v2.ToPureTensor(), v1.Normalize([0.5], [0.5]), v2.Normalize([0.5], [0.5])],
    ids=["ToPureTensor", "of v1", "of v2"],
)
def test_an_image_is_of_torchs_class(photos: Path, last: Any) -> None:
    transform = v2.Compose([v2.RandomCrop(40), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), last])
    for dataset in (by(transform), lambda root: ImageFolder(root, transform)):

        def plain_or_image(samples: list[Any]) -> Any:
            return [(isinstance(image, tv_tensors.Image), image.shape) for image, _ in samples]

        assert_as_torch(loader_over(dataset, photos, 0, collate_fn=plain_or_image))


def test_the_loader_says_what_it_has_met(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "proxyloader"):
        loader = DataLoader(OneByOne(photos), 8, num_workers=1, persistent_workers=True, device="cpu")
        assert loader.backend == "DALI on cpu, if the dataset calls transforms on JPEGs"
        for _ in range(2):
            list(loader)
    assert loader.backend.startswith("DALI on cpu: ") and "Normalize" in loader.backend
    assert repr(loader) == f"<proxyloader.DataLoader of one_by_one, 48 samples: {loader.backend}>"
    begun, counted = [record.getMessage() for record in caplog.records]
    assert "one_by_one, 48 samples: DALI on cpu" in begun
    assert "one_by_one, 48 samples" in counted and "images decoded by DALI: 48" in counted
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


# --- what looks at the type of an image -------------------------------------------------------------------------------

BY_TYPE = {Image.Image: 200, JpegImageFile: 150, tv_tensors.Image: 100, torch.Tensor: 50, "others": 0}
WITH_TYPES: dict[str, Any] = {
    "AugMix": v2.AugMix(fill=BY_TYPE),
    "AutoAugment": v2.AutoAugment(fill=BY_TYPE),
    "ElasticTransform": v2.ElasticTransform(fill=BY_TYPE),
    "Pad": v2.Pad(5, fill=BY_TYPE),
    "RandomAffine": v2.RandomAffine((20, 20), fill=BY_TYPE),
    "RandomCrop": v2.RandomCrop(50, pad_if_needed=True, fill=BY_TYPE),
    "RandomPerspective": v2.RandomPerspective(p=1.0, fill=BY_TYPE),
    "RandomRotation": v2.RandomRotation((20, 20), fill=BY_TYPE),
    "RandomZoomOut": v2.RandomZoomOut(p=1.0, fill=BY_TYPE),
    "ToDtype of an image": v2.ToDtype({tv_tensors.Image: torch.float64, "others": None}, scale=True),
    "ToDtype of a tensor": v2.ToDtype({torch.Tensor: torch.float64, "others": None}, scale=True),
}
STARTS: dict[str, list[Any]] = {
    "a file": [],
    "an image": [v2.CenterCrop(40)],
    "a tv_tensors.Image": [v2.CenterCrop(40), v2.ToImage()],
    "a flipped tv_tensors.Image": [v2.CenterCrop(40), v2.ToImage(), v2.RandomHorizontalFlip(0.5)],
    "a pure tensor": [v2.CenterCrop(40), v2.PILToTensor()],
}


class ByType(Dataset[Any]):
    def __init__(self, root: Path, transforms: list[Any], beside: str = "") -> None:
        self.samples = ImageFolder(str(root)).samples[:2]
        self.transform, self.beside = v2.Compose(transforms), beside

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(Path(self.samples[index][0]).read_bytes()))
        if not self.beside:
            return (self.transform(image),)
        mask = tv_tensors.Mask(torch.ones(image.height, image.width, dtype=torch.uint8))
        return self.transform(image, mask if self.beside == "a mask" else torch.tensor(index))


def as_tensor(image: Any) -> torch.Tensor:
    return image if isinstance(image, torch.Tensor) else v1.PILToTensor()(image)


def samples_by(kind: Any, photos: Path, transforms: list[Any], beside: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [as_tensor(part) for sample in kind(ByType(photos, transforms, beside), batch_size=None) for part in sample]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", WITH_TYPES)
def test_what_is_given_by_type_is_that_of_the_class_that_torchvision_has(photos: Path, name: str, start: str) -> None:
    transforms = [*STARTS[start], WITH_TYPES[name]]
    for beside in ("", "a mask", "a label"):
        ours, stock = (tried(samples_by, kind, photos, transforms, beside) for kind in (DataLoader, StockLoader))
        if isinstance(stock, Failed):  # as AutoAugment does of a mask
            assert ours == stock
            continue
        assert [each.dtype for each in ours] == [each.dtype for each in stock]
        assert all(map(torch.equal, ours, stock))


TYPES = (Image.Image, JpegImageFile, tv_tensors.Image, torch.Tensor)


@functools.singledispatch
def type_code(image: Any) -> int:
    return -1


for _code, _type in enumerate(TYPES):
    type_code.register(_type, lambda image, code=_code: code)

LOOKUPS: dict[str, Any] = {
    "a dict": lambda x: BY_TYPE[type(x)],
    "equality": lambda x: [type(x) == cls for cls in TYPES],  # noqa: E721
    "a set": lambda x: len({type(x), *TYPES}),
    "isinstance": lambda x: [isinstance(x, cls) for cls in TYPES],
    "issubclass": lambda x: [issubclass(type(x), cls) for cls in (*TYPES, tv_tensors.TVTensor)],
    "__class__": lambda x: [x.__class__ is cls for cls in TYPES],
    "identity of a PIL image": lambda x: [type(x) is cls for cls in (Image.Image, JpegImageFile)],
    "singledispatch": type_code,
    "its name": lambda x: str(type(x)),
    "a pickled type": lambda x: BY_TYPE[pickle.loads(pickle.dumps(type(x)))],
    "a pickled image": lambda x: BY_TYPE[type(pickle.loads(pickle.dumps(x)))],
    "a copy": lambda x: BY_TYPE[type(copy.deepcopy(x))],
    "repr": lambda x: repr(x)[:20],
    "a clone": lambda x: BY_TYPE[type(x.clone())] if isinstance(x, torch.Tensor) else BY_TYPE[type(x.copy())],
    "a result": lambda x: BY_TYPE[type(x + 1)] if isinstance(x, torch.Tensor) else BY_TYPE[type(x.resize((9, 9)))],
    "after a change": lambda x: (
        BY_TYPE[type(x.add_(1))] if isinstance(x, torch.Tensor) else BY_TYPE[type(x.load() and x)]
    ),
    "a flipped one": lambda x: BY_TYPE[type(v2.functional.horizontal_flip(x))],
    "as an image": lambda x: BY_TYPE[type(tv_tensors.Image(x))],
    "wrapped": lambda x: BY_TYPE[type(tv_tensors.wrap(as_tensor(x) + 1, like=tv_tensors.Image(x)))],
    "pure": lambda x: BY_TYPE[type(v2.ToPureTensor()(x))],
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_code_that_looks_up_a_type_finds_torchvisions(photos: Path, name: str, start: str) -> None:
    found = []
    for kind in (DataLoader, StockLoader):
        torch.manual_seed(0)
        dataset = ByType(photos, [*STARTS[start], LOOKUPS[name]])
        found.append(list(kind(dataset, batch_size=None)))
    assert found[0] == found[1]


class Scaled(ImageFolder):
    weight: Any

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] * self.weight


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_depends_on_a_parameter_has_its_gradient(photos: Path, workers: int) -> None:
    """In a worker torch refuses to make a batch of such samples."""
    found: list[Any] = []
    for kind in (DataLoader, StockLoader):
        dataset = Scaled(str(photos), v1.Compose([v1.CenterCrop(32), v1.PILToTensor()]))
        dataset.weight = torch.tensor(2.0, requires_grad=True)
        try:
            batch = next(iter(kind(dataset, 4, num_workers=workers)))
        except RuntimeError as error:
            assert "automatic differentiation" in str(error)
            found.append(None)
            continue
        assert batch.grad_fn is not None
        (batch**2).sum().backward()
        found.append((batch.detach(), dataset.weight.grad))
    assert found[0] == found[1] if workers else all(map(torch.equal, found[0], found[1]))


@pytest.mark.parametrize("wrapped", [torch.as_tensor, torch.nn.Parameter], ids=["a tensor", "a Parameter"])
def test_a_learnable_normalization_has_its_gradient(photos: Path, wrapped: Any) -> None:
    mean = torch.tensor([0.5, 0.4, 0.3], requires_grad=True)
    transform = v1.Compose([v1.CenterCrop(32), v1.ToTensor(), v1.Normalize(wrapped(mean), [0.2, 0.3, 0.4])])
    batches = [next(iter(kind(ImageFolder(str(photos), transform), 4)))[0] for kind in (DataLoader, StockLoader)]
    assert batches[0].requires_grad and torch.allclose(*batches, atol=1e-6)
