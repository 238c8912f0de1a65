"""``proxyloader bench``: compare the throughput of this loader with other ways to load the same images.

This file does not import torch, so that the command line can list the choices.
"""

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "thumbnails": {"size": (96, 96)},
    "imagenet": {"size": (500, 375)},
    "web": {"size": (500, 375), "progressive": 0.2},
    "camera": {"size": (3000, 2000)},
    "coco": {"size": (640, 480)},
}
"""Arguments of ``make_dataset``."""

AUGMENTATIONS = {
    "ColorJitter": (0.4, 0.4, 0.4, 0.1),
    "RandAugment": (),
    "TrivialAugmentWide": (),
    "AutoAugment": (),
    "AugMix": (),
}
"""Transforms of torchvision with their arguments."""

FRAMES = 16  # of a clip
TASKS = {
    "classification": (),
    "detection": ("hflip", "multiscale", "lsj", "lsj-masks", "detr", "ssd"),
    "segmentation": ("segmentation",),
    "clips": ("clips",),
}
"""Pipelines of each task."""
