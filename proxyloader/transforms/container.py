"""Random containers: RandomApply, RandomChoice, RandomOrder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .params import version_of
from .plan import Branch, ImageState, OneOf, ParamRow, Size, Step, output_state
from .registry import container


@dataclass(frozen=True)
class RandomApply(Step):
    """RandomApply, and every class with a probability ``p``: draws whether to apply the inner steps, then their draws.

    Attributes:
        inner: the steps that are applied or not.
        p: the probability.
        closed: whether to apply them if the drawn number equals ``p``. Only RandomApply of v1 does.
    """

    inner: Branch
    p: float
    closed: bool = False

    @property
    def choice(self) -> OneOf:
        return OneOf(((), self.inner))

    @property
    def operations(self) -> tuple[Step, ...]:
        return (self.choice,)

    @property
    def params_doc(self) -> str:
        return f"whether it acts: torch.rand(1) {'<=' if self.closed else '<'} {self.p:g}"

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        drawn = torch.rand(1)
        return self.choice.take(int(drawn <= self.p if self.closed else drawn < self.p), size, row)

    def output_state(self, state: ImageState) -> ImageState:
        return self.choice.output_state(state)


@dataclass(frozen=True)
class RandomChoice(Step):
    """One of several transforms, with the probabilities ``p``."""

    choice: OneOf
    p: tuple[float, ...] | None
    version: str

    @property
    def operations(self) -> tuple[Step, ...]:
        return (self.choice,)

    @property
    def params_doc(self) -> str:
        return f"which one: {'random.choices' if self.version == 'v1' else 'torch.multinomial'}"

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        if self.version == "v1":
            chosen = random.choices(range(len(self.choice.branches)), weights=self.p)[0]
        else:
            chosen = int(torch.multinomial(torch.tensor(self.p), 1))
        return self.choice.take(chosen, size, row)

    def output_state(self, state: ImageState) -> ImageState:
        return self.choice.output_state(state)


@dataclass(frozen=True)
class RandomOrder(Step):
    """All of several transforms, in random order."""

    choice: OneOf
    version: str

    @property
    def operations(self) -> tuple[Step, ...]:
        return (self.choice,) * len(self.choice.branches)

    @property
    def params_doc(self) -> str:
        return f"an order: {'random.shuffle' if self.version == 'v1' else 'torch.randperm'}"

    def sample_params(self, size: Size, row: ParamRow) -> Size:
        order: list[int] = list(range(len(self.choice.branches)))
        if self.version == "v1":
            random.shuffle(order)
        else:
            order = torch.randperm(len(order)).tolist()
        for chosen in order:
            size = self.choice.take(chosen, size, row)
        return size

    def output_state(self, state: ImageState) -> ImageState:
        return output_state(self.operations, state)


@container(v1.RandomApply, v2.RandomApply, in_sequence=True)
def random_apply(transform: Any, branches: Sequence[Branch]) -> Step:
    (inner,) = branches
    return RandomApply(inner, float(transform.p), closed=version_of(transform) == "v1")


@container(v1.RandomChoice, v2.RandomChoice)
def random_choice(transform: Any, branches: Sequence[Branch]) -> Step:
    p = None if transform.p is None else tuple(map(float, transform.p))
    if p is not None and len(p) != len(branches):
        raise UnsupportedTransformError(
            f"p has {len(p)} probabilities for {len(branches)} transforms", code="invalid", argument="p"
        )
    return RandomChoice(_one_of(branches), p, version_of(transform))


@container(v1.RandomOrder, v2.RandomOrder)
def random_order(transform: Any, branches: Sequence[Branch]) -> Step:
    return RandomOrder(_one_of(branches), version_of(transform))


def _one_of(branches: Sequence[Branch]) -> OneOf:
    if not branches:
        raise UnsupportedTransformError("it holds no transforms; leave it out", argument="transforms")
    return OneOf(tuple(branches))
