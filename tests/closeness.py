"""How close an image of a whole plan must be to torchvision's, and how close it is."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from proxyloader.transforms.color import Grayscale
from proxyloader.transforms.plan import Branch, Plan, Step
from proxyloader.transforms.type_conversion import Normalize, ToFloat

DECODED_MEAN, DECODED_P999 = 2.0, 24.0
"""Allowed beside the tolerances of the steps, in levels. Tolerances are those of a batch, and one image may be further
off: the frame of an image of a few pixels is most of it. A GPU's decoders are up to 3 levels off, and adjustments of
colours multiply that."""

CUT_FACTOR = 2.0
"""How much more is allowed in the mean where a step cuts at a level."""

MOST_LEVELS = 255.0


class Difference(NamedTuple):
    """A difference of images in levels of 255, found or allowed.

    Attributes:
        mean: over all values.
        p999: 99.9th percentile of the values.
    """

    mean: float
    p999: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} in the mean, {self.p999:.1f} at the 99.9th percentile"

    def is_within(self, bound: Difference) -> bool:
        """Return whether both numbers are within the bound. NaN is not."""
        return self.mean <= bound.mean and self.p999 <= bound.p999


def difference_of(ours: NDArray[np.float32], stock: NDArray[np.float32]) -> Difference:
    """Return the difference of two images in levels, (C, H, W). Images of several shapes differ infinitely."""
    if ours.shape != stock.shape:
        return Difference(math.inf, math.inf)
    off = np.abs(ours - stock)
    return Difference(float(off.mean()), float(np.quantile(off, 0.999)))


def bound_of(plan: Plan) -> Difference:
    """Return how far an image of a plan may be from torchvision's: what its steps state, added up.

    The percentile is bounded by the sum of the largest differences. It is not bounded, as it is 255, where a step
    states no more than a mean, or cuts at a level.
    """
    mean, most, cuts = _sum_of(plan.steps)
    mean = (DECODED_MEAN + mean) * (CUT_FACTOR if cuts else 1)
    return Difference(mean, MOST_LEVELS if cuts else min(DECODED_P999 + most, MOST_LEVELS))


def _sum_of(steps: Branch) -> tuple[float, float, bool]:
    """Return the sums of the means and of the largest differences, and whether a step cuts at a level."""
    found = [_of_step(step) for step in steps]
    return sum(mean for mean, _, _ in found), sum(most for _, most, _ in found), any(cuts for _, _, cuts in found)


def _of_step(step: Step) -> tuple[float, float, bool]:
    parts = [] if step.operations == (step,) else [_sum_of(step.operations)]
    branches = [_sum_of(branch) for branch in getattr(step, "branches", ())]
    own = step.closeness.mean, step.closeness.max, step.cuts
    worst = [max(column) for column in zip((0.0, 0.0, False), *branches)]
    mean, most, cuts = zip(own, worst, *parts)
    return sum(mean), sum(most), any(cuts)


def levels_of(values: torch.Tensor, plan: Plan) -> NDArray[np.float32]:
    """Return the values of an output image of a plan, (C, H, W), in levels of 255, (C, H, W) float32."""
    level, zero = torch.ones(1), torch.zeros(1)  # of each channel: the size of a level, and the value of level 0
    for step in plan.steps:
        if isinstance(step, ToFloat) and step.scale:
            level, zero = level / 255, zero / 255
        elif isinstance(step, Normalize):
            std = torch.tensor(step.std)
            level, zero = level / std, (zero - torch.tensor(step.mean)) / std
        elif isinstance(step, Grayscale):
            level, zero = level.amax(0, keepdim=True), zero.mean(0, keepdim=True)
    made: NDArray[np.float32] = ((values.float() - zero.view(-1, 1, 1)) / level.view(-1, 1, 1)).numpy()
    return made
