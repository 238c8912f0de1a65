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


@dataclass(frozen=True)
class Preset:
    """The options that both presets have.

    Attributes:
        use_v2: torchvision's second version of all transforms.
        backend: what is cropped, augmented and so on: PIL images, or uint8 tensors.
    """

    use_v2: bool = False
    backend: Literal["pil", "tensor"] = "pil"
    interpolation: InterpolationMode = InterpolationMode.BILINEAR
    transforms: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        version = v2 if self.use_v2 else torchvision.transforms
        steps = self.on_levels(version, {"interpolation": self.interpolation})
        steps.insert(0 if self.backend == "tensor" else len(steps), version.PILToTensor())
        steps.append(v2.ToDtype(torch.float, scale=True) if self.use_v2 else version.ConvertImageDtype(torch.float))
        steps += [version.Normalize(MEAN, STD), *self.on_floats(version)]
        steps += [v2.ToPureTensor()] if self.use_v2 else []
        object.__setattr__(self, "transforms", version.Compose(steps))

    def on_levels(self, version: Any, how: Any) -> list[Any]:
        """The evaluation preset's."""
        return [version.Resize(RESIZE_PX, **how, antialias=True), version.CenterCrop(CROP_PX)]

    def on_floats(self, version: Any) -> list[Any]:
        return []

    def __call__(self, image: Any) -> torch.Tensor:
        made: torch.Tensor = self.transforms(image)
        return made

    def __str__(self) -> str:
        """The options that are not the default, as one gives them."""
        chosen = [type(self).__name__.lower(), "v2" if self.use_v2 else "v1", self.backend]
        return " ".join([*chosen, *["bicubic"] * (self.interpolation is BICUBIC)])


class Eval(Preset): ...


@dataclass(frozen=True)
class Train(Preset):
    """
    Attributes:
        auto_augment: "ra", "ta_wide", "augmix", a policy of AutoAugment, or None.
        random_erase: the probability of it.
    """

    auto_augment: str | None = None
    random_erase: float = 0.0
    ra_magnitude: int = 9
    augmix_severity: int = 3

    def on_levels(self, version: Any, how: Any) -> list[Any]:
        crop = version.RandomResizedCrop(CROP_PX, **how, antialias=True)
        return [crop, version.RandomHorizontalFlip(0.5), *self.augmentation(version, how)]

    def augmentation(self, version: Any, how: Any) -> list[Any]:
        if self.auto_augment is None:
            return []
        if self.auto_augment == "ra":
            return [version.RandAugment(magnitude=self.ra_magnitude, **how)]
        if self.auto_augment == "ta_wide":
            return [version.TrivialAugmentWide(**how)]
        if self.auto_augment == "augmix":
            return [version.AugMix(severity=self.augmix_severity, **how)]
        return [version.AutoAugment(AutoAugmentPolicy(self.auto_augment), **how)]

    def on_floats(self, version: Any) -> list[Any]:
        return [version.RandomErasing(self.random_erase)] if self.random_erase > 0 else []

    def __str__(self) -> str:
        erase = [f"--random-erase {self.random_erase:g}"] if self.random_erase else []
        augment = [f"--auto-augment {self.auto_augment}"] if self.auto_augment else []
        return " ".join([super().__str__(), *augment, *erase])


PRESETS: list[Preset] = [
    Train(),
    Train(use_v2=True, backend="tensor", random_erase=0.5),
    Train(backend="tensor", interpolation=BICUBIC, random_erase=0.1),
    Train(use_v2=True, interpolation=BICUBIC),
    Train(auto_augment="ra", random_erase=0.5),
    Train(auto_augment="ra", use_v2=True, backend="tensor", ra_magnitude=15),
    Train(auto_augment="ta_wide", backend="tensor", random_erase=0.1),
    Train(auto_augment="ta_wide", use_v2=True),
    Train(auto_augment="augmix", backend="tensor", augmix_severity=7),
    Train(auto_augment="augmix", use_v2=True, random_erase=0.5),
    Train(auto_augment="imagenet"),
    Train(auto_augment="imagenet", use_v2=True, backend="tensor", random_erase=0.1),
    Train(auto_augment="cifar10", backend="tensor"),
    Train(auto_augment="cifar10", use_v2=True, random_erase=0.5),
    Train(auto_augment="svhn", random_erase=0.1),
    Train(auto_augment="svhn", use_v2=True, backend="tensor"),
    Eval(),
    Eval(use_v2=True, backend="tensor"),
    Eval(backend="tensor", interpolation=BICUBIC),
    Eval(use_v2=True, interpolation=BICUBIC),
]
"""Any two options together at least once. Bicubic warps are refused, so ``--auto-augment`` is with bilinear ones."""

AUGMENTED_AND_ERASED = [each for each in PRESETS if isinstance(each, Train) and each.auto_augment and each.random_erase]
"""Each value of ``--auto-augment`` once, in all four of version and backend."""
