"""Datasets and transforms of the tasks other than classification, written as by their users.

Transforms are torchvision's v2, as in its detection references, or functions by hand: those of its segmentation
references and of DETR (arXiv:2005.12872). They take PIL images or tensors.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.ops import box_convert
from torchvision.transforms import RandomCrop, v2
from torchvision.transforms.functional import convert_image_dtype, normalize, pil_to_tensor
from torchvision.transforms.v2 import functional as F

from . import FRAMES
from .config import CROP_PX, MEAN, STD

SHORT_SIDES, LONG_SIDE = range(480, 801, 32), 1333
DETR_SIDES, DETR_CROP = (400, 500, 600), (384, 600)
JITTER_PX, JITTER_SCALE = 1024, (0.1, 2.0)
SEGMENTATION_PX, SEGMENTATION_SIDES = 480, (260, 1040)  # half and twice a base size of 520
GRAY, IGNORED = [123, 117, 104], 255
Sample = tuple[Any, Any]


def size_of(path: str) -> Any:
    with Image.open(path) as image:
        return image.size


class Photographs(Dataset[Sample]):
    """Photographs with labelled polygons, as in COCO's files, from which boxes and masks are made.

    A sample is an image and a dict, or for segmentation an image and a mask of labels, which the transform may change.
    """

    def __init__(self, root: str, pipeline: str, open_image: Callable[[str], Any], transform: Any) -> None:
        self.pipeline, self.open_image, self.transform = pipeline, open_image, transform
        self.files = [path for path, _ in ImageFolder(root).samples]
        self.shapes = [make_shapes(index, size_of(path)) for index, path in enumerate(self.files)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image, (size, polygons, labels) = self.open_image(self.files[index]), self.shapes[index]
        if self.pipeline == "segmentation":
            target: Any = tv_tensors.Mask(draw_mask(size, zip(polygons, labels)))
        else:
            corners = torch.from_numpy(np.concatenate([polygons.min(1), polygons.max(1)], 1))
            boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size[::-1])
            target = {"image_id": index, "boxes": boxes, "labels": torch.tensor(labels)}
            if self.pipeline == "lsj-masks":
                target["masks"] = tv_tensors.Mask(torch.stack([draw_mask(size, [(each, 1)]) for each in polygons]))
        return self.transform(image, target) if self.transform else (image, target)


def make_shapes(index: int, size: tuple[int, int]) -> tuple[tuple[int, int], Any, list[int]]:
    """Return ``size``, one to five random polygons, (N, 12, 2) float32 in pixels, and their labels."""
    rng = np.random.default_rng(index)
    angles = np.sort(rng.uniform(0, 2 * np.pi, (rng.integers(1, 6), 12)))
    centers, radii = rng.uniform(0.2, 0.8, (len(angles), 1, 2)), rng.uniform(0.05, 0.2, (len(angles), 1, 2))
    polygons = (centers + radii * np.stack([np.cos(angles), np.sin(angles)], 2)) * size
    return size, polygons.astype(np.float32), rng.integers(1, 91, len(angles)).tolist()


def draw_mask(size: tuple[int, int], shapes: Iterable[tuple[Any, int]]) -> torch.Tensor:
    """Return an (H, W) uint8 mask with a value for each polygon."""
    mask = Image.new("L", size)
    for polygon, value in shapes:
        ImageDraw.Draw(mask).polygon(polygon.ravel().tolist(), value)
    return torch.from_numpy(np.array(mask))


class Clips(Dataset[Sample]):
    """Clips of 16 photographs of the same size, each from a file, with their numbers as labels."""

    def __init__(self, root: str, pipeline: str, open_image: Callable[[str], Any], transform: Any) -> None:
        self.open_image, self.transform, sizes = open_image, transform, defaultdict(list)
        for path, _ in ImageFolder(root).samples:
            sizes[size_of(path)].append(path)
        self.clips = [each[k : k + FRAMES] for each in sizes.values() for k in range(0, len(each) - FRAMES + 1, FRAMES)]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Sample:
        frames = [self.open_image(path) for path in self.clips[index]]
        return torch.stack(self.transform(frames)) if self.transform else frames, index


def collate_lists(samples: list[Sample]) -> tuple[Any, ...]:
    return tuple(zip(*samples))


def to_float(image: Any) -> Any:
    image = image if isinstance(image, torch.Tensor) else pil_to_tensor(image)
    return normalize(convert_image_dtype(image), MEAN, STD)


def segmentation(image: Any, mask: Any) -> Sample:
    """Resize at random, flip, pad and crop: an image (3, 480, 480) float32 and a mask (480, 480) int64."""
    side = random.randint(*SEGMENTATION_SIDES)
    image, mask = F.resize(image, [side]), F.resize(mask, [side])
    if random.random() < 0.5:
        image, mask = F.hflip(image), F.hflip(mask)
    bottom, right = (max(0, SEGMENTATION_PX - side) for side in F.get_size(image))
    if bottom or right:
        image, mask = F.pad(image, [0, 0, right, bottom]), F.pad(mask, [0, 0, right, bottom], fill=IGNORED)
    box = RandomCrop.get_params(image, (SEGMENTATION_PX, SEGMENTATION_PX))
    return to_float(F.crop(image, *box)), F.crop(mask, *box).long()


def detr(image: Any, target: dict[str, Any]) -> Sample:
    """Flip, and in half of the cases resize and crop; resize. Boxes become relative centers and sizes."""
    boxes, labels = target["boxes"].as_subclass(torch.Tensor), target["labels"]
    if random.random() < 0.5:
        image, width = F.hflip(image), F.get_size(image)[1]
        boxes = torch.tensor([width, 0, width, 0]) + torch.tensor([-1, 1, -1, 1]) * boxes[:, [2, 1, 0, 3]]
    if random.random() < 0.5:
        image, boxes = resize_short(image, boxes, random.choice(DETR_SIDES))
        size = [random.randint(DETR_CROP[0], min(side, DETR_CROP[1])) for side in F.get_size(image)]
        top, left, *_ = box = RandomCrop.get_params(image, size)
        image, boxes = F.crop(image, *box), boxes - torch.tensor([left, top] * 2)
        boxes = boxes.clamp(min=0).minimum(torch.tensor(size[::-1] * 2))
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
        boxes, labels = boxes[kept], labels[kept]
    image, boxes = resize_short(image, boxes, random.choice(SHORT_SIDES))
    boxes = box_convert(boxes, "xyxy", "cxcywh") / torch.tensor(F.get_size(image)[::-1] * 2)
    return to_float(image), {"image_id": target["image_id"], "boxes": boxes, "labels": labels}


def resize_short(image: Any, boxes: torch.Tensor, side: int) -> Sample:
    """Resize an image, and its boxes, to a shorter side, or less if the longer one would exceed ``LONG_SIDE``."""
    height, width = F.get_size(image)
    scale = min(side / min(height, width), LONG_SIDE / max(height, width))
    size = [round(scale * height), round(scale * width)]
    return F.resize(image, size), boxes * torch.tensor([size[1] / width, size[0] / height] * 2)


FLIP, IMAGE = v2.RandomHorizontalFlip(), [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
END = [*IMAGE, v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
FILL = {Image.Image: GRAY, tv_tensors.Image: GRAY, "others": 0}
SQUARE = (JITTER_PX, JITTER_PX)
JITTER = [v2.ScaleJitter(SQUARE, JITTER_SCALE), v2.RandomCrop(SQUARE, pad_if_needed=True, fill=FILL), FLIP, *END]

PIPELINES: dict[str, Callable[..., Any]] = {
    "hflip": v2.Compose([FLIP, *END]),
    "multiscale": v2.Compose([v2.RandomShortestSize([*SHORT_SIDES], LONG_SIDE), FLIP, *END]),
    "lsj": v2.Compose(JITTER),
    "lsj-masks": v2.Compose(JITTER),
    "detr": detr,
    "ssd": v2.Compose([v2.RandomPhotometricDistort(), v2.RandomZoomOut(FILL), v2.RandomIoUCrop(), FLIP, *END]),
    "segmentation": segmentation,
    "clips": v2.Compose([v2.RandomResizedCrop(CROP_PX), FLIP, *IMAGE, v2.Normalize(MEAN, STD), v2.ToPureTensor()]),
}
"""Transforms by the names in ``TASKS``."""
