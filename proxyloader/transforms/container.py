"""Random containers: RandomApply, RandomChoice, RandomOrder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from .params import version_of
from .plan import Branch, Draws, OneOf, ParamRow, Size, Step, Untranslatable
from .registry import container


@dataclass(frozen=True)
class RandomApply(Draws[OneOf]):
    """RandomApply, and every class with a probability ``p``: decide whether to apply the inner steps.

    Attributes:
        p: probability of the second of two branches; the first is empty.
        closed: whether to apply them if the random number equals ``p``, as only v1.RandomApply does.
    """

    p: float
    closed: bool = False
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        drawn = torch.rand(1)
        return self.step.take(int(drawn <= self.p if self.closed else drawn < self.p), size, row)


def at_random(transform: Any, *steps: Step, closed: bool = False) -> RandomApply:
    """Return the step that applies the inner steps with probability ``transform.p``."""
    return RandomApply(OneOf(((), steps)), float(transform.p), closed)


@dataclass(frozen=True)
class RandomChoice(Draws[OneOf]):
    """One of several transforms, with the probabilities ``p``."""

    p: tuple[float, ...] | None
    version: str
    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        if self.version == "v1":
            chosen = random.choices(range(len(self.step.branches)), weights=self.p)[0]
        else:
            chosen = int(torch.multinomial(torch.tensor(self.p), 1))
        return self.step.take(chosen, size, row)


@dataclass(frozen=True)
class RandomOrder(Step):
    """All of several transforms, in random order."""

    choice: OneOf
    version: str

    @property
    def operations(self) -> Branch:
        return (self.choice,) * len(self.choice.branches)

    draws: ClassVar[bool] = True

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        order = list(range(len(self.choice.branches)))
        if self.version == "v1":
            random.shuffle(order)
        else:
            order = torch.randperm(len(order)).tolist()
        for chosen in order:
            size = self.choice.take(chosen, size, row)
        return size


@container(v1.RandomApply, v2.RandomApply, in_sequence=True)
def random_apply(transform: Any, branches: Sequence[Branch]) -> Step:
    return at_random(transform, *sum(branches, ()), closed=version_of(transform) == "v1")


@container(v1.RandomChoice, v2.RandomChoice)
def random_choice(transform: Any, branches: Sequence[Branch]) -> Step:
    p = None if transform.p is None else tuple(map(float, transform.p))
    if p is not None and len(p) != len(branches):
        raise Untranslatable
    return RandomChoice(_one_of(branches), p, version_of(transform))


@container(v1.RandomOrder, v2.RandomOrder)
def random_order(transform: Any, branches: Sequence[Branch]) -> Step:
    return RandomOrder(_one_of(branches), version_of(transform))


def _one_of(branches: Sequence[Branch]) -> OneOf:
    if not branches:
        raise Untranslatable
    return OneOf(tuple(branches))
