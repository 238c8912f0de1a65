"""torchvision's datasets of boxes and masks: batches, and what happens to faulty ones, are the stock loader's."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from torch.utils.data import DataLoader as StockLoader, Subset
from torchvision import tv_tensors
from torchvision.datasets import (
    Cityscapes,
    CocoDetection,
    VOCDetection,
    VOCSegmentation,
    wrap_dataset_for_transforms_v2 as wrap,
)
from torchvision.transforms import functional as TF, v2

from proxyloader import DataLoader, ImageError
from proxyloader.make_dataset import photograph

from ..integration.test_unreadable import broken_tables, text, unchecked
from ..odd_formats import ODD_FORMATS, jpeg
from ..outcomes import outcomes
from .scenes import END, FLIP, SANE, SHORTEST, Scene, voc
from .test_joint_pipelines import assert_equal, assert_same_batches, scenes, together

__all__ = ["scenes"]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

FILES = {name: ODD_FORMATS[f"odd_{name}"] for name in ("grey.jpg", "cmyk.jpg", "progressive.jpg", "rgb.png", "422.jpg")}
FILES |= {f"{number}.jpg": jpeg for number in range(7)}
BY_PILLOW = 2
"""Number of files that are no RGB or grayscale JPEG."""


def objects(width: int, height: int) -> list[dict[str, Any]]:
    """Annotations of every kind: polygons, both run-length encodings, a crowd, and a box without an area."""
    mask = np.zeros((height, width), np.uint8, order="F")
    mask[height // 5 : height // 2, width // 4 : width // 2] = 1
    bits = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(bits)) + 1
    counts = np.diff([0, *changes.tolist(), bits.size]).tolist()
    compressed = coco_mask.encode(mask)
    bbox = coco_mask.toBbox(compressed).tolist()
    triangle = [width * 0.5, height * 0.5, width * 0.9, height * 0.55, width * 0.6, height * 0.95]
    found: list[dict[str, Any]] = [
        {"segmentation": [triangle, [2, 3, 20, 3, 20, 30, 2, 30]], "bbox": [2, 3, width * 0.9 - 2, height * 0.95 - 3]},
        {"segmentation": {"counts": compressed["counts"].decode(), "size": [height, width]}, "bbox": bbox},
        {"segmentation": {"counts": counts, "size": [height, width]}, "bbox": bbox, "iscrowd": 1},
        {"segmentation": [[5, 6, 5, 40, 5, 6]], "bbox": [5, 6, 0, 34]},
    ]
    return [{"iscrowd": 0, "area": each["bbox"][2] * each["bbox"][3]} | each for each in found]


@pytest.fixture(scope="module")
def coco_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in the format of COCO, of which each fifth one has no annotations."""
    root = tmp_path_factory.mktemp("coco")
    images, annotations = [], []
    for number, (name, encoder) in enumerate(FILES.items()):
        photo = photograph(number, size=(150 - 3 * number, 100 + 2 * number))
        (root / name).write_bytes(encoder(photo))
        images.append({"id": 7 * number, "file_name": name, "width": photo.width, "height": photo.height})
        for k, each in enumerate(objects(*photo.size)[: number % 5]):
            numbers = {"id": len(annotations) + 1, "image_id": 7 * number, "category_id": 3 * k + 1}
            annotations.append(each | numbers)
    categories = [{"id": 3 * k + 1, "name": str(k)} for k in range(4)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations.json").write_text(json.dumps(content))
    return root


def coco(root: Path, kind: type[CocoDetection] = CocoDetection, **transforms: Any) -> Any:
    return kind(str(root), str(root / "annotations.json"), **transforms)


def wrapped(root: Path, *transforms: Any, keys: Any = "all", **how: Any) -> Any:
    return wrap(coco(root, transforms=v2.Compose(transforms), **how), keys)


def with_boxes(dataset: Any) -> Any:
    return Subset(dataset, [k for k, image in enumerate(dataset.ids) if dataset.coco.getAnnIds(image)])


def by_hand(image: Any, annotations: Any) -> Any:
    """As in torchvision's references for detection and in DETR: without crowds, with masks."""
    (width, height), kept = image.size, [each for each in annotations if not each["iscrowd"]]
    boxes = torch.tensor([each["bbox"] for each in kept], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    masks = [torch.zeros(0, height, width, dtype=torch.bool)]
    for each in kept:
        encoded = each["segmentation"]
        encoded = [encoded] if isinstance(encoded, dict) else coco_mask.frPyObjects(encoded, height, width)
        masks.append(torch.from_numpy(coco_mask.decode(encoded)).any(2)[None])
    masks, sound = torch.cat(masks), (boxes[:, 2:] > boxes[:, :2]).all(1)
    if random.random() < 0.5:
        image, masks = TF.hflip(image), masks.flip(-1)
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    target = {"boxes": boxes[sound], "masks": masks[sound], "labels": [each["category_id"] for each in kept]}
    return TF.to_tensor(image), target


PADDED = v2.Pad(3), v2.RandomVerticalFlip(), FLIP
COCO: dict[str, Callable[[Path], Any]] = {
    "all keys": lambda root: wrapped(root, *PADDED, *END),
    "default keys": lambda root: wrapped(root, *PADDED, *END, v2.ToPureTensor(), keys=None),
    "sanitized": lambda root: with_boxes(wrapped(root, *PADDED, *END, *SANE, keys=("boxes", "labels", "masks"))),
    "cropped": lambda root: with_boxes(wrapped(root, v2.RandomIoUCrop(), *END, SANE[0], keys=("boxes", "labels"))),
    "by hand": lambda root: coco(root, transforms=by_hand),
    "image alone": lambda root: coco(root, transform=v2.Compose([FLIP, *END])),
    "Pillow": lambda root: coco(root, transforms=lambda image, target: (TF.pil_to_tensor(image), len(target))),
}  # fmt: skip


@pytest.mark.parametrize("workers", [2, 0])
@pytest.mark.parametrize("name", COCO)
def test_coco_without_a_gpu(coco_root: Path, name: str, workers: int) -> None:
    assert_same_batches(COCO[name](coco_root), bound=1e-6, num_workers=workers)  # floats may be rounded otherwise


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("workers", [2, 0])
@pytest.mark.parametrize("name", COCO)
def test_coco(coco_root: Path, name: str, workers: int) -> None:
    dataset = COCO[name](coco_root)
    stats = assert_same_batches(dataset, num_workers=workers).stats()
    assert stats.images_by_dali >= len(dataset) - BY_PILLOW and stats.images_by_workers <= BY_PILLOW


# --- VOC and Cityscapes -----------------------------------------------------------------------------------------------

KINDS = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}


def voc_segmentation(scenes: list[Scene], root: Path) -> None:
    """Add label maps with a palette to ``voc``."""
    home = root / "VOCdevkit" / "VOC2012"
    for name in ("SegmentationClass", "ImageSets/Segmentation"):
        (home / name).mkdir(parents=True)
    shutil.copy(home / "ImageSets/Main/train.txt", home / "ImageSets/Segmentation")
    for scene in scenes:
        label_map = Image.fromarray(np.asarray(scene.label_map))
        label_map.putpalette(range(256 * 3 >> 2))
        label_map.save(home / "SegmentationClass" / f"{scene.path.stem}.png")


def label_maps(image: Any, labels: Any) -> Any:
    return TF.to_tensor(TF.hflip(image)), torch.from_numpy(np.array(TF.hflip(labels)))


@pytest.mark.usefixtures("emulated_gpu")
def test_voc(scenes: list[Scene], tmp_path: Path) -> None:
    voc(scenes, tmp_path)
    voc_segmentation(scenes, tmp_path)
    both = v2.Compose([FLIP, SHORTEST, v2.RandomCrop(64, pad_if_needed=True), v2.ToImage(), v2.ToDtype(KINDS, True)])
    for dataset in (
        VOCDetection(str(tmp_path), transforms=lambda image, target: (TF.to_tensor(image), target)),
        wrap(VOCDetection(str(tmp_path), transforms=v2.Compose([SHORTEST, *END])), "all"),
        VOCSegmentation(str(tmp_path), transforms=label_maps),
        wrap(VOCSegmentation(str(tmp_path), transforms=both)),
    ):
        loader = assert_same_batches(dataset)
        assert loader.stats().images_by_dali == len(scenes), loader.backend


@pytest.mark.usefixtures("emulated_gpu")
def test_cityscapes(scenes: list[Scene], tmp_path: Path) -> None:
    """PNGs, which Pillow decodes in the worker."""
    for folder in ("leftImg8bit/train/ulm", "gtFine/train/ulm"):
        (tmp_path / folder).mkdir(parents=True)
    for scene in scenes:
        scene.image.save(tmp_path / f"leftImg8bit/train/ulm/{scene.number}_leftImg8bit.png")
        labels, targets = np.asarray(scene.label_map), tmp_path / "gtFine/train/ulm"
        Image.fromarray(labels).save(targets / f"{scene.number}_gtFine_labelIds.png")
        instances = np.where(labels > 1, labels.astype(np.uint16) * 1000 + labels, labels)
        Image.fromarray(instances.astype(np.uint16)).save(targets / f"{scene.number}_gtFine_instanceIds.png")
        polygons = {"objects": [{"label": "car", "polygon": scene.boxes.tolist()}]}
        (targets / f"{scene.number}_gtFine_polygons.json").write_text(json.dumps(polygons))
    joint = v2.Compose([FLIP, SHORTEST, *END])
    assert_same_batches(wrap(Cityscapes(str(tmp_path), target_type="semantic", transforms=joint)))
    alone: Any = {"transform": v2.Compose([v2.RandomCrop(50), *END])}
    alone["target_transform"] = lambda target: (target[0], torch.tensor(np.array(target[1]).astype(int)))
    loader = assert_same_batches(Cityscapes(str(tmp_path), target_type=["polygon", "instance"], **alone))
    assert loader.stats().images_by_pillow == len(scenes), loader.backend


# --- faults -----------------------------------------------------------------------------------------------------------

BATCH, BAD = 4, 9
FILE = list(FILES)[BAD]
FLIPPED = v2.RandomHorizontalFlip(1), *END


class Unchecked(CocoDetection):
    """DALI is the first to decode the JPEG that is damaged."""

    def _load_image(self, id: int) -> Any:
        name = self.coco.loadImgs(id)[0]["file_name"]
        return unchecked(f"{self.root}/{name}") if name == FILE else super()._load_image(id)


@pytest.fixture(params=["cpu", "emulated GPU"])
def either_device(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu":
        request.getfixturevalue("emulated_gpu")
    return str(request.param)


@pytest.mark.parametrize("workers", [2, 0])
@pytest.mark.parametrize(("how", "kind"), [(text, CocoDetection), (broken_tables, Unchecked)], ids=["text", "tables"])
def test_damaged_image(coco_root: Path, how: Any, kind: Any, workers: int, either_device: str, tmp_path: Path) -> None:
    samples = list(wrapped(coco_root, *FLIPPED))
    dataset = wrapped(shutil.copytree(coco_root, tmp_path / "set"), *FLIPPED, kind=kind)
    path = tmp_path / "set" / FILE
    how(path)
    batches = [[*range(start, start + BATCH)] for start in range(0, len(samples), BATCH)]
    options: Any = dict(batch_size=BATCH, collate_fn=together, num_workers=workers)
    for on_error, instead in (("skip", []), ("replace", [BAD + 1]), ("raise", None)):
        loader = DataLoader(dataset, on_error=on_error, **options)
        for batch, indices in zip(outcomes(loader), batches, strict=True):
            if BAD in indices:
                if instead is None:
                    assert isinstance(batch, OSError), batch
                    assert kind is CocoDetection or (isinstance(batch, ImageError) and batch.path == str(path))
                    continue
                place = indices.index(BAD)
                indices = [*indices[:place], *instead, *indices[place + 1 :]]
            assert_equal(batch, together([samples[index] for index in indices]))
        assert instead is None or [(each.index, each.path) for each in loader.errors] == [(BAD, str(path))]


def test_sample_without_the_boxes_that_a_transform_requires(coco_root: Path, either_device: str) -> None:
    dataset = wrapped(coco_root, *FLIPPED, SANE[0])
    theirs, ours = (outcomes(kind(dataset, BATCH, collate_fn=together)) for kind in (StockLoader, DataLoader))
    assert [type(batch) for batch in ours] == [type(batch) for batch in theirs]
    assert any(isinstance(batch, ValueError) for batch in ours)
