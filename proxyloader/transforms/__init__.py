"""Translation of torchvision and timm transforms to a frozen Plan, independent of files and DALI.

Importing this folder registers the rules for torchvision's classes.
"""

from . import augment as augment
from . import auto_augment as auto_augment
from . import color as color
from . import geometry as geometry
from . import resize as resize
from . import type_conversion as type_conversion
from . import warp as warp

__all__ = [
    "augment",
    "auto_augment",
    "chain",
    "color",
    "geometry",
    "plan",
    "random_numbers",
    "registry",
    "resize",
    "type_conversion",
    "warp",
]
"""Modules that other folders may import."""
