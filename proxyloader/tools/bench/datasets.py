"""The images in datasets of other kinds than ImageFolder. Runs in a child process."""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import Food101, ImageFolder


class OwnDataset(Dataset[Any]):
    """A dataset as users write it: it opens its files with Pillow, and has its transform under a name of its own."""

    def __init__(self, root: str, transform: Any) -> None:
        self.samples, self.augment = ImageFolder(root).samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.augment(Image.open(path).convert("RGB")), label


def hugging_face(root: str, transform: Any) -> Any:
    """A dataset of Hugging Face's ``datasets``, with ``set_transform``. A batch is a dict of images and labels."""
    datasets = importlib.import_module("datasets")
    paths, labels = zip(*ImageFolder(root).samples)
    dataset = datasets.Dataset.from_dict({"image": list(paths), "label": list(labels)})
    dataset = dataset.cast_column("image", datasets.Image())
    dataset.set_transform(functools.partial(_transformed, transform))
    return dataset


def _transformed(transform: Any, rows: dict[str, Any]) -> dict[str, Any]:
    return {"image": [transform(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}


def food101(root: str, transform: Any) -> Food101:
    """torchvision's Food101, with the names of the images in place of its own."""
    folder = ImageFolder(root)
    listed: dict[str, list[str]] = {name: [] for name in folder.classes}
    for path, label in folder.samples:
        listed[folder.classes[label]].append(f"{folder.classes[label]}/{Path(path).stem}")
    with tempfile.TemporaryDirectory() as base:
        for name in ("images", "meta"):
            (Path(base) / "food-101" / name).mkdir(parents=True)
        (Path(base) / "food-101" / "meta" / "train.json").write_text(json.dumps(listed))
        dataset = Food101(base, transform=transform)
    dataset._image_files = [Path(path) for path, _ in folder.samples]
    return dataset


DATASETS: dict[str, Callable[[str, Any], Any]] = {
    "OwnDataset": OwnDataset,
    "HuggingFace": hugging_face,
    "Food101": food101,
}
"""By name: functions of the root of an ImageFolder and a transform."""
