"""What torchvision's training reference (``references/classification``, not installed with the package) makes of the
options of its command line: callables that keep a Compose in ``.transforms``, for PIL images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torchvision.transforms
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_PX, RESIZE_PX = 64, 80
BICUBIC = InterpolationMode.BICUBIC
AUGMENTATIONS = {"ra": "RandAugment", "ta_wide": "TrivialAugmentWide", "augmix": "AugMix"}


@dataclass(frozen=True)
class Preset:
    """The options of training, and those that evaluation has, too.

    Attributes:
        use_v2: torchvision's second version of all transforms.
        backend: what is cropped, augmented and so on: PIL images, or uint8 tensors.
        auto_augment: "ra", "ta_wide", "augmix", a policy of AutoAugment, or None.
        strength: other numbers of ``auto_augment``.
        random_erase: the probability of it.
    """

    use_v2: bool = False
    backend: Literal["pil", "tensor"] = "pil"
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
    auto_augment: str | None = None
    strength: tuple[tuple[str, int], ...] = ()
    random_erase: float = 0.0
    is_training: bool = True
    transforms: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        version = v2 if self.use_v2 else torchvision.transforms
        how: Any = {"interpolation": self.interpolation}
        steps = [version.Resize(RESIZE_PX, **how, antialias=True), version.CenterCrop(CROP_PX)]
        if self.is_training:
            crop = version.RandomResizedCrop(CROP_PX, **how, antialias=True)
            steps = [crop, version.RandomHorizontalFlip(0.5)]
        if self.auto_augment in AUGMENTATIONS:
            steps += [getattr(version, AUGMENTATIONS[self.auto_augment])(**dict(self.strength), **how)]
        elif self.auto_augment is not None:
            steps += [version.AutoAugment(AutoAugmentPolicy(self.auto_augment), **how)]
        steps.insert(0 if self.backend == "tensor" else len(steps), version.PILToTensor())
        steps.append(v2.ToDtype(torch.float, scale=True) if self.use_v2 else version.ConvertImageDtype(torch.float))
        steps.append(version.Normalize(MEAN, STD))
        steps += [version.RandomErasing(self.random_erase)] if self.random_erase else []
        steps += [v2.ToPureTensor()] if self.use_v2 else []
        object.__setattr__(self, "transforms", version.Compose(steps))

    def __call__(self, image: Any) -> torch.Tensor:
        made: torch.Tensor = self.transforms(image)
        return made

    def __str__(self) -> str:
        """The options that are not the default, as one gives them."""
        chosen = ["train" if self.is_training else "eval", "v2" if self.use_v2 else "v1", self.backend]
        chosen += ["bicubic"] * (self.interpolation is BICUBIC)
        chosen += [f"--auto-augment {self.auto_augment}"] if self.auto_augment else []
        return " ".join(chosen + ([f"--random-erase {self.random_erase:g}"] if self.random_erase else []))


PRESETS: list[Preset] = [
    Preset(),
    Preset(use_v2=True, backend="tensor", random_erase=0.5),
    Preset(backend="tensor", interpolation=BICUBIC, random_erase=0.1),
    Preset(use_v2=True, interpolation=BICUBIC),
    Preset(auto_augment="ra", random_erase=0.5),
    Preset(auto_augment="ra", use_v2=True, backend="tensor", strength=(("magnitude", 15),)),
    Preset(auto_augment="ta_wide", backend="tensor", random_erase=0.1),
    Preset(auto_augment="ta_wide", use_v2=True),
    Preset(auto_augment="augmix", backend="tensor", strength=(("severity", 7),)),
    Preset(auto_augment="augmix", use_v2=True, random_erase=0.5),
    Preset(auto_augment="imagenet"),
    Preset(auto_augment="imagenet", use_v2=True, backend="tensor", random_erase=0.1),
    Preset(auto_augment="cifar10", backend="tensor"),
    Preset(auto_augment="cifar10", use_v2=True, random_erase=0.5),
    Preset(auto_augment="svhn", random_erase=0.1),
    Preset(auto_augment="svhn", use_v2=True, backend="tensor"),
    Preset(is_training=False),
    Preset(is_training=False, use_v2=True, backend="tensor"),
    Preset(is_training=False, backend="tensor", interpolation=BICUBIC),
    Preset(is_training=False, use_v2=True, interpolation=BICUBIC),
]
"""Any two options together at least once. Bicubic warps are refused, so ``--auto-augment`` is with bilinear ones."""

AUGMENTED_AND_ERASED = [each for each in PRESETS if each.auto_augment and each.random_erase]
"""Each value of ``--auto-augment`` once, in all four of version and backend."""
