"""wrap() replaces only the transforms and loaders it must, in a copy of the user's dataset."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from proxyloader.data.compiled_transform import CompiledTransform, WorkerTransform
from timm.data import AugMixDataset, ImageDataset, create_dataset, create_transform
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.datasets.folder import pil_loader

from proxyloader import (
    DataLoader,
    EncodedImage,
    ImageError,
    InputError,
    UnsupportedTransformError,
    compile_transforms,
    wrap,
)
from proxyloader.data.dataset import collect_plans
from proxyloader.data.lazy_tensor import LazyTensor

from ..outcomes import raises
from ..undecoded import image_calls_in

TRANSFORM = transforms.Compose([transforms.Resize((20, 30)), transforms.ToTensor()])


def test_the_original_stays_and_the_copy_of_its_class_hands_out_bytes_and_drawn_numbers(folder: ImageFolder) -> None:
    folder.transform = TRANSFORM
    folder.note = "mine"
    before = copy.copy(folder.__dict__)
    wrapped = wrap(folder)
    assert folder.__dict__ == before and folder[0][0].shape == (3, 20, 30)
    assert type(wrapped) is ImageFolder and wrapped.note == "mine" and len(wrapped) == len(folder)
    assert all(getattr(wrapped, name) is getattr(folder, name) for name in ("classes", "samples", "targets"))
    folder.target_transform = str
    sample, target = wrap(folder)[5]
    assert isinstance(sample, LazyTensor) and target == "0"
    (call,) = image_calls_in(sample)
    encoded, row = call.inputs
    assert encoded.tobytes() == Path(folder.samples[5][0]).read_bytes()
    assert row.view(np.float64).tolist()[-2:] == [20, 30]
    assert call.source == folder.samples[5][0]
    assert wrap(wrapped).transform is wrapped.transform


def test_a_subset_with_its_own_getitem_is_left_alone(folder: ImageFolder) -> None:
    class Own(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            image, target = super().__getitem__(index)
            return image.sum(), target

        def __getitems__(self, indices: list[Any]) -> list[Any]:
            return [self[index] for index in indices]

    folder.transform = TRANSFORM
    own = Own(folder, [1])
    assert wrap(own) is own


def own_loader(path: str) -> Image.Image:
    return Image.new("RGB", (8, 8), "red")


def test_a_custom_loader_is_called_and_torchvisions_is_replaced_wherever_it_was_given(
    folder: ImageFolder,
) -> None:
    for loader, start in ((own_loader, b"P6\n8 8\n255\n\xff\x00\x00"), (pil_loader, None)):
        dataset = DatasetFolder(folder.root, loader, ("jpg",), transform=TRANSFORM)
        wrapped = wrap(dataset)
        assert (wrapped.loader is own_loader) == (loader is own_loader)
        (call,) = image_calls_in(wrapped[0])
        assert call.inputs[0].tobytes().startswith(start or Path(dataset.samples[0][0]).read_bytes())


class Photographs(Dataset[Any]):
    """The README's custom dataset."""

    def __init__(self, paths: list[str], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.transform(EncodedImage.open(self.paths[index])), index


class Calculates(Photographs):
    """Its transform is a property without a setter."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    @property
    def transform(self) -> Any:  # type: ignore[override]
        return TRANSFORM


@dataclass(frozen=True)
class Frozen(Photographs):
    paths: list[str]
    transform: Any


class Slotted(Photographs):
    __slots__ = ("paths", "transform")


def test_a_custom_dataset_opens_images_undecoded_and_needs_a_settable_transform(folder: ImageFolder) -> None:
    paths = [path for path, _ in folder.samples]
    for transform in (TRANSFORM, compile_transforms(TRANSFORM)):
        wrapped = wrap(Photographs(paths, transform))
        assert isinstance(wrapped[1][0], LazyTensor) and isinstance(wrapped.transform, CompiledTransform)
    assert len(collect_plans(wrap(Slotted(paths, TRANSFORM)))) == 1
    for dataset in (Calculates(paths), Frozen(paths, TRANSFORM)):
        with pytest.raises(TypeError, match=f"{type(dataset).__name__}.transform cannot be set .* ordinary attribute"):
            wrap(dataset)


class Sounds(Dataset[Any]):
    def transform(self, sound: Any) -> Any:
        return sound


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(3)), Sounds(), [1, 2, 3]], ids=type)
def test_datasets_without_images_are_returned_unchanged(dataset: Any) -> None:
    assert wrap(dataset) is dataset and collect_plans(dataset) == {}


def test_a_folder_without_a_transform_is_returned_and_a_custom_callable_is_refused(folder: ImageFolder) -> None:
    assert wrap(folder) is folder
    folder.transform = to_grey
    with raises(UnsupportedTransformError, position="transform", transform=f"{__name__}.to_grey"):
        wrap(folder)


def to_grey(image: Any) -> Any:
    return image


def test_the_wrapped_transform_says_which_inputs_it_takes() -> None:
    compiled = compile_transforms(TRANSFORM)
    with pytest.raises(
        ValueError, match=r"must be a PIL image, an EncodedImage, a uint8 array .* got Tensor\[3, 4, 4\]"
    ):
        compiled(torch.zeros(3, 4, 4))
    (call,) = image_calls_in(compiled(np.zeros((5, 4, 3), np.uint8)))
    assert call.inputs[0].tobytes().startswith(b"P6\n4 5\n")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # timm's reader leaves the closing of files to Python
class TestOfTimm:
    """timm's datasets keep their transform in ``.transform``, too."""

    @pytest.fixture
    def dataset(self, photos: Path) -> ImageDataset:
        transform = create_transform(24, is_training=True, interpolation="bilinear", color_jitter=None)
        return create_dataset("", root=str(photos), split="", transform=transform)

    def test_the_images_travel_encoded_unless_torchvision_or_another_mode_is_wanted(
        self, dataset: ImageDataset
    ) -> None:
        sample, target = wrap(dataset)[5]
        assert isinstance(sample, LazyTensor) and target == dataset.reader.samples[5][1]
        (call,) = image_calls_in(sample)
        assert call.inputs[0].tobytes() == Path(dataset.reader.samples[5][0]).read_bytes()
        assert not dataset.load_bytes and type(dataset[5][0]) is torch.Tensor
        wrapped = wrap(dataset, compile=WorkerTransform)
        assert not wrapped.load_bytes and wrapped[5][0].shape == (3, 24, 24)
        dataset.input_img_mode = "L"
        with raises(InputError, code="wrong-mode"):
            wrap(dataset)[5]

    def test_what_cannot_be_read_is_named_by_its_file(self, dataset: ImageDataset, tmp_path: Path) -> None:
        broken = tmp_path / "broken.jpg"
        broken.write_bytes(b"no image")
        dataset.reader.samples[2] = (str(broken), 0)
        loader = DataLoader(dataset, 4, on_error="skip", device="cpu")
        next(iter(loader))
        (unreadable,) = loader.errors
        assert (unreadable.index, unreadable.path) == (2, str(broken))
        with raises(ImageError, code="undecodable", index=2, path=str(broken)):
            next(iter(DataLoader(dataset, 4, device="cpu")))

    def test_one_that_opens_images_itself_gets_the_transform_alone_and_three_are_left(
        self, dataset: ImageDataset
    ) -> None:
        class Own(ImageDataset):
            def __getitem__(self, index: int) -> Any:
                return self.transform(Image.new("RGB", (30, 20))), index

        own = copy.copy(dataset)
        own.__class__ = Own
        wrapped = wrap(own)
        assert not wrapped.load_bytes and isinstance(wrapped[3][0], LazyTensor)
        dataset.transform = create_transform(24, is_training=True, separate=True, auto_augment="augmix-m3")
        mixed = AugMixDataset(dataset)
        assert wrap(mixed) is mixed and len(mixed[0][0]) == 2
