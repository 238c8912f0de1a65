"""Photographs with boxes, masks and keypoints, and code that transforms them together, as in many repositories."""

from __future__ import annotations

import math
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode, functional as TF, transforms as v1, v2
from torchvision.transforms.v2 import functional as F2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GRAY = (123, 117, 104)


class Scene(NamedTuple):
    """A photograph and what is in it. ``folder`` has a label map of each photograph, as a PNG."""

    path: Path
    folder: Path
    number: int

    @property
    def image(self) -> Any:
        return Image.open(self.path).convert("RGB")

    @property
    def boxes(self) -> torch.Tensor:
        """Up to four boxes, in XYXY."""
        generator, (width, height) = np.random.default_rng(self.number), self.image.size
        corners = generator.uniform(0, 0.6, (1 + self.number % 4, 2))
        ends = corners + generator.uniform(0.1, 0.4, corners.shape)
        return torch.from_numpy(np.concatenate([corners, ends], 1) * ([width, height] * 2)).float()

    @property
    def target(self) -> dict[str, Any]:
        boxes = self.boxes
        return {"boxes": boxes, "labels": torch.arange(1, 1 + len(boxes)), "image_id": self.number}

    @property
    def masks(self) -> torch.Tensor:
        """A mask of each box."""
        width, height = self.image.size
        x, y = torch.arange(width), torch.arange(height)[:, None]
        return torch.stack([(a <= x) & (x < c) & (b <= y) & (y < d) for a, b, c, d in self.boxes]).to(torch.uint8)

    @property
    def label_map(self) -> Any:
        return Image.open(self.folder / f"{self.path.stem}.png")

    @property
    def other(self) -> Scene:
        """One that is drawn."""
        return self._replace(path=random.choice(sorted(self.path.parent.glob("*.jpg"))))

    def save_label_map(self) -> Scene:
        labels = (self.masks * self.target["labels"][:, None, None]).amax(0).numpy()
        Image.fromarray(labels.astype(np.uint8)).save(self.folder / f"{self.path.stem}.png")
        return self


# --- images and boxes, with torchvision's functions -------------------------------------------------------------------


def flip(image: Any, target: dict[str, Any]) -> Any:
    if torch.rand(1) < 0.5:
        image, width = TF.hflip(image), TF.get_image_size(image)[0]
        target["boxes"][:, [0, 2]] = width - target["boxes"][:, [2, 0]]
        if "masks" in target:
            target["masks"] = target["masks"].flip(-1)
    return image, target


def resize(image: Any, target: dict[str, Any], height: int, width: int) -> Any:
    target["boxes"] = target["boxes"] * torch.tensor([width / image.width, height / image.height] * 2)
    if "masks" in target:
        target["masks"] = TF.resize(target["masks"], [height, width], Mode.NEAREST)
    return TF.resize(image, [height, width]), target


def crop(image: Any, target: dict[str, Any], region: tuple[int, int, int, int]) -> Any:
    top, left, height, width = region
    shifted = (target["boxes"] - torch.tensor([left, top] * 2)).reshape(-1, 2, 2)
    target["boxes"] = torch.min(shifted, torch.tensor([width, height])).clamp(min=0).reshape(-1, 4)
    if "masks" in target:
        target["masks"] = TF.crop(target["masks"], *region)
    return TF.crop(image, *region), target


def finished(image: Any, target: Any) -> Any:
    return TF.normalize(TF.convert_image_dtype(TF.pil_to_tensor(image), torch.float), MEAN, STD), target


def large_scale_jitter(scene: Scene) -> Any:
    image, target = scene.image, {**scene.target, "masks": scene.masks}
    scale = random.uniform(0.3, 2.0) * min(96 / image.width, 96 / image.height)
    image, target = resize(image, target, int(image.height * scale), int(image.width * scale))
    if max(image.size) > 96:
        region = v1.RandomCrop.get_params(image, (min(96, image.height), min(96, image.width)))
        image, target = crop(image, target, region)
    padding = [0, 0, 96 - image.width, 96 - image.height]
    if any(padding):
        image, target["masks"] = TF.pad(image, padding, GRAY), TF.pad(target["masks"], padding)
    return finished(*flip(image, target))


def shorter_side(image: Any, target: Any, side: int, longest: int = 140) -> Any:
    scale = min(side / min(image.size), longest / max(image.size))
    return resize(image, target, round(image.height * scale), round(image.width * scale))


def detr(scene: Scene) -> Any:
    image, target = flip(scene.image, scene.target)
    if random.random() < 0.6:
        image, target = shorter_side(image, target, random.choice([60, 80, 100]), 1000)
        size = random.randint(40, image.height), random.randint(40, image.width)
        image, target = crop(image, target, v1.RandomCrop.get_params(image, size))
    image, target = shorter_side(image, target, random.choice(range(64, 112, 8)))
    target["boxes"] = target["boxes"] / torch.tensor([*image.size] * 2)
    return TF.normalize(TF.to_tensor(image), MEAN, STD), target


def ssd(scene: Scene) -> Any:
    image, target = scene.image, scene.target
    for jitter in (v1.ColorJitter(brightness=0.2), v1.ColorJitter(contrast=(0.5, 1.5)), v1.ColorJitter(hue=0.05)):
        image = jitter(image) if torch.rand(1) < 0.5 else image
    if torch.rand(1) < 0.5:
        image = TF.to_pil_image(TF.to_tensor(image)[..., torch.randperm(3), :, :])
    if torch.rand(1) < 0.5:
        (width, height), scale = image.size, 1 + float(torch.rand(1))
        left, top = int((scale - 1) * width / 2), int((scale - 1) * height / 3)
        image = TF.pad(image, [left, top, int(width * scale) - width - left, int(height * scale) - height - top], GRAY)
        target["boxes"] += torch.tensor([left, top] * 2)
    return finished(*flip(image, target))


DECODERS = "cv2", "simplejpeg", "torchcodec.decoders"


def by_other_decoders(scene: Scene) -> Any:
    cv2, simplejpeg, decoders = (sys.modules[name] for name in DECODERS)
    content = scene.path.read_bytes()
    if scene.number % 3 == 0:
        image = Image.fromarray(simplejpeg.decode_jpeg(content))
    elif scene.number % 3 == 1:
        image = Image.fromarray(cv2.cvtColor(cv2.imread(str(scene.path)), cv2.COLOR_BGR2RGB))
    else:
        image = TF.to_pil_image(decoders.decode_image(content))
    return TF.to_tensor(ImageOps.equalize(image.resize((48, 40)))), scene.number


# --- images and label maps --------------------------------------------------------------------------------------------


def as_labels(label_map: Any) -> torch.Tensor:
    return torch.as_tensor(np.array(label_map), dtype=torch.int64)


def segmentation_reference(scene: Scene) -> Any:
    image, labels, size = scene.image, scene.label_map, random.randint(60, 200)
    image, labels = TF.resize(image, size), TF.resize(labels, size, Mode.NEAREST)
    if random.random() < 0.5:
        image, labels = TF.hflip(image), TF.hflip(labels)
    if min(image.size) < 96:
        padding = [0, 0, max(96 - image.width, 0), max(96 - image.height, 0)]
        image, labels = TF.pad(image, padding, fill=0), TF.pad(labels, padding, fill=255)
    region = v1.RandomCrop.get_params(image, (96, 96))
    return finished(TF.crop(image, *region), as_labels(TF.crop(labels, *region)))


def segmentation_by_pillow(scene: Scene) -> Any:
    image, labels, short = scene.image, scene.label_map, random.randint(64, 128)
    if random.random() < 0.5:
        image, labels = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, labels))
    size = [math.ceil(side * short / min(image.size)) for side in image.size]
    image, labels = image.resize(size, Image.Resampling.BICUBIC), labels.resize(size, Image.Resampling.NEAREST)
    x, y = (random.randint(0, side - 64) for side in size)
    image, labels = (each.crop((x, y, x + 64, y + 64)) for each in (image, labels))
    return TF.normalize(TF.to_tensor(Blur()(image)), MEAN, STD), as_labels(labels)


def label_map_v2(*transforms: Any) -> Callable[[Scene], Any]:
    kinds = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    whole = v2.Compose([*transforms, v2.ToImage(), v2.ToDtype(kinds, scale=True), v2.Normalize(MEAN, STD)])
    return lambda scene: whole(scene.image, tv_tensors.Mask(scene.label_map))


# --- v2's transforms of images, boxes, masks and keypoints ------------------------------------------------------------

END = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
SANE = [v2.SanitizeBoundingBoxes(), v2.ToPureTensor()]
FLIP, CENTER = v2.RandomHorizontalFlip(), v2.CenterCrop(64)
SHORTEST = v2.RandomShortestSize([64, 80, 96], max_size=120)
FILLS: Any = {Image.Image: GRAY, tv_tensors.Image: GRAY, "others": 0}
ZOOM_OUT, MASK_FILL = v2.RandomZoomOut(FILLS), {tv_tensors.Mask: 255, "others": 0}
WITHOUT_RULES = v2.Compose([
    v2.ToImage(), v2.Lambda(F2.vflip), v2.RandomPhotometricDistort(), v2.Pad(3, padding_mode="edge"), v2.RandomCrop(48),
    END[1], v2.Normalize(MEAN, STD), v2.ToPureTensor(),
])  # fmt: skip
WARP = v2.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), interpolation=Mode.BILINEAR)


def joint_v2(*transforms: Any, masks: bool = False, format: str = "XYXY", points: bool = False) -> Any:
    whole = v2.Compose(transforms)

    def change(scene: Scene) -> Any:
        size, boxes, centered = scene.image.size[::-1], scene.boxes, "CXCYWH" if format.endswith("R") else format
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)  # type: ignore[call-overload]
        boxes = F2.convert_bounding_box_format(boxes, new_format=tv_tensors.BoundingBoxFormat[centered])
        if format.endswith("R"):
            turned = torch.cat([boxes, torch.linspace(0, 80, len(boxes))[:, None]], 1)
            boxes = tv_tensors.BoundingBoxes(turned, format=format, canvas_size=size)  # type: ignore[call-overload]
        target = {**scene.target, "boxes": boxes}
        if masks:
            target["masks"] = tv_tensors.Mask(scene.masks)
        if points:
            target["points"] = tv_tensors.KeyPoints(scene.boxes.reshape(-1, 2, 2), canvas_size=size)
        return whole(scene.image, target)

    return change


# --- several images ---------------------------------------------------------------------------------------------------


class Blur:
    def __call__(self, image: Any) -> Any:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))) if random.random() < 0.5 else image


class Solarize:
    def __call__(self, image: Any) -> Any:
        return ImageOps.solarize(image) if random.random() < 0.2 else image


def view(size: int, scale: tuple[float, float], *more: Any) -> Any:
    start = [v1.RandomResizedCrop(size, scale, interpolation=Mode.BICUBIC), v1.RandomHorizontalFlip()]
    jitter = v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
    return v1.Compose([*start, jitter, v1.RandomGrayscale(0.2), *more, v1.ToTensor(), v1.Normalize(MEAN, STD)])


def views(*crops: Any) -> Callable[[Scene], Any]:
    def change(scene: Scene) -> Any:
        image = scene.image
        return [crop(image) for crop in crops], scene.number

    return change


GLOBAL, LOCAL = view(48, (0.4, 1.0), Blur(), Solarize()), view(24, (0.05, 0.4), Blur())


def mixed_up(scene: Scene) -> Any:
    one, two = (TF.to_tensor(TF.resize(each.image, [64, 64])) for each in (scene, scene.other))
    share = float(np.random.beta(8, 8))
    return share * one + (1 - share) * two, share


def copied_and_pasted(scene: Scene) -> Any:
    one, two = (TF.pil_to_tensor(TF.resize(each.image, [64, 64])) for each in (scene, scene.other))
    masks = TF.resize(scene.masks, [64, 64], Mode.NEAREST)
    return torch.where(masks.amax(0).bool(), one, two), {"masks": masks}


PIPELINES: dict[str, Callable[[Scene], Any]] = {
    "large-scale jitter by hand": large_scale_jitter, "DETR": detr, "SSD by hand": ssd,
    "segmentation reference": segmentation_reference, "segmentation by Pillow": segmentation_by_pillow,
    "mixed up": mixed_up, "copied and pasted": copied_and_pasted, "DINO": views(GLOBAL, GLOBAL, LOCAL, LOCAL, LOCAL),
    "boxes and masks": joint_v2(v2.RandomResizedCrop((72, 72)), v2.ColorJitter(0.2, 0.2), *END, *SANE, masks=True),
    "shortest size": joint_v2(SHORTEST, FLIP, *END, *SANE),
    "SSD": joint_v2(v2.RandomPhotometricDistort(), ZOOM_OUT, v2.RandomIoUCrop(), FLIP, *END, *SANE),
    "SSD of tensors": joint_v2(
        v2.ToImage(), v2.RandomPhotometricDistort(), ZOOM_OUT, v2.RandomIoUCrop(), FLIP, END[1], *SANE),
    "without rules": lambda scene: (WITHOUT_RULES(scene.image), scene.number),
    "SSDlite": joint_v2(v2.RandomIoUCrop(), v2.RandomVerticalFlip(), *END, v2.SanitizeBoundingBoxes(), format="XYWH"),
    "large-scale jitter": joint_v2(
        v2.ScaleJitter((96, 96)), v2.RandomCrop(96, pad_if_needed=True, fill=114), FLIP, *END, *SANE, masks=True),
    "warped": joint_v2(WARP, v2.RandomPerspective(), CENTER, *END, v2.ClampBoundingBoxes(), format="CXCYWH"),
    "label map": label_map_v2(v2.RandomResize(60, 200), FLIP, v2.RandomCrop(96, pad_if_needed=True, fill=MASK_FILL)),
    "blurred label map": label_map_v2(v2.RandomOrder([v2.RandomRotation(9), FLIP]), v2.GaussianBlur(3), CENTER),
}  # fmt: skip
if hasattr(tv_tensors, "KeyPoints"):
    PIPELINES["keypoints"] = joint_v2(FLIP, WARP, v2.Resize((64, 48)), *END, v2.Normalize(MEAN, STD), points=True)
    PIPELINES["rotated boxes"] = joint_v2(FLIP, v2.RandomAffine(20), *END, v2.ClampBoundingBoxes(), format="CXCYWHR")


# --- torchvision's datasets, wrapped for v2 ---------------------------------------------------------------------------


def voc(scenes: list[Scene], root: Path) -> None:
    home = root / "VOCdevkit" / "VOC2012"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (home / name).mkdir(parents=True)
    (home / "ImageSets/Main/train.txt").write_text("\n".join(scene.path.stem for scene in scenes))
    for scene in scenes:
        shutil.copy(scene.path, home / "JPEGImages")
        sides = [
            [f"<{name}>{int(x)}</{name}>" for name, x in zip(("xmin", "ymin", "xmax", "ymax"), b)] for b in scene.boxes
        ]
        objects = [f"<object><name>bird</name><bndbox>{''.join(each)}</bndbox></object>" for each in sides]
        text = "<size><width>{}</width><height>{}</height></size>".format(*scene.image.size) + "".join(objects)
        (home / "Annotations" / f"{scene.path.stem}.xml").write_text(f"<annotation>{text}</annotation>")
