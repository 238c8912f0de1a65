"""Translation of torchvision and timm transforms to a frozen Plan, independent of files and DALI.

Importing this folder registers the rules for torchvision's classes.
"""

from . import augment, auto_augment, color, geometry, resize, type_conversion, warp

__all__ = ["augment", "auto_augment", "boxes", "chain", "color", "geometry", "plan", "random_numbers", "registry"]
__all__ += ["resize", "samples", "type_conversion", "warp"]
