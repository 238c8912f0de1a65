"""wrap() reads the user's own dataset, whose images are not decoded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset, create_transform
from torch.utils.data import ChainDataset, DataLoader as StockLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, wrap
from proxyloader.data.lazy_tensor import LazyTensor, is_materialized

from ..side_by_side import assert_as_torch

TRANSFORM = transforms.Compose([transforms.RandomCrop((20, 30)), transforms.ToTensor()])


def test_an_image_is_late_with_the_content_of_its_file_and_is_torchvisions_when_used(folder: ImageFolder) -> None:
    wrapped = wrap(folder)
    assert len(wrapped) == len(folder) and wrapped.classes is folder.classes and folder.transform is None
    image, label = wrapped[5]
    assert type(image) is Image.Image and label == folder[5][1]
    assert image.encoded == Path(folder.samples[5][0]).read_bytes()
    assert np.array_equal(image, folder[5][0])
    with pytest.raises(AttributeError, match="encoded"):  # decoded
        _ = image.encoded


def test_a_transform_returns_a_late_tensor_with_its_own_draws(folder: ImageFolder) -> None:
    folder.transform = TRANSFORM
    torch.manual_seed(3)
    expected, state = folder[5][0], torch.get_rng_state()
    torch.manual_seed(3)
    tensor, _ = pickle.loads(pickle.dumps(wrap(Subset(folder, [5]))))[0]
    assert isinstance(tensor, LazyTensor) and not is_materialized(tensor) and tensor.shape == (3, 20, 30)
    assert tensor.encoded == Path(folder.samples[5][0]).read_bytes()
    assert torch.equal(tensor, expected) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_read_a_wrapped_dataset_as_the_dataset(folder: ImageFolder, workers: int) -> None:
    folder.transform = TRANSFORM
    torch.manual_seed(0)
    expected = list(StockLoader(folder, 12, num_workers=workers))
    for kind, options in ((StockLoader, {}), (DataLoader, {"device": "cpu"})):
        torch.manual_seed(0)
        loader: Any = kind(wrap(folder), 12, num_workers=workers, **options)  # type: ignore[operator]
        for (images, labels), (stock, stock_labels) in zip(loader, expected, strict=True):
            assert torch.allclose(images, stock, rtol=0, atol=1e-7) and torch.equal(labels, stock_labels)


@pytest.mark.parametrize("dataset", [ChainDataset([]), 3], ids=["a stream", "a number"])
def test_what_has_no_samples_by_index_is_an_error(dataset: Any) -> None:
    with pytest.raises(TypeError, match="dataset must be a map-style dataset, got (ChainDataset|int)"):
        wrap(dataset)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # timm's reader leaves the closing of files to Python
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_batches_of_a_dataset_of_timm_are_torchs(photos: Path, mode: str) -> None:
    of_timm = create_transform(24, is_training=True, interpolation="bilinear", color_jitter=None)
    dataset = create_dataset("", root=str(photos), split="", transform=of_timm if mode == "RGB" else TRANSFORM)
    dataset.input_img_mode = mode
    assert_as_torch(lambda kind: kind(dataset, 4))
