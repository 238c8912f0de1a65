"""The table from torchvision classes to rules, and the walk through a Compose that uses it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchvision.transforms import Compose as ComposeV1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .plan import Branch, ImageState, Plan, Step, plan_of, state_after
from .refusals import reason_against

Rule = Callable[[Any, ImageState], tuple[Step, ...]]
"""Takes a transform and the state of the image before it; returns its steps. Raises UnsupportedTransformError with
the reason; position and class are added here."""

COMPOSES = (ComposeV1, v2.Compose)

RULES: dict[type, Rule] = {}
"""Keyed by exact class: a subclass may do anything."""


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Register a rule for torchvision classes. A class has one rule."""

    def register(function: Rule) -> Rule:
        for cls in classes:
            if cls in RULES:
                raise ValueError(f"{cls.__module__}.{cls.__name__} has a rule already: {RULES[cls].__name__}")
            RULES[cls] = function
        return function

    return register


Container = Callable[[Any, Sequence[Branch]], Step]
"""Takes a transform that holds others, and the steps of each of those; returns the step that does with them what the
transform does."""

CONTAINERS: dict[type, tuple[Container, bool]] = {}
"""By exact class, and whether its transforms follow one upon the other."""


def container(*classes: type, in_sequence: bool = False) -> Callable[[Container], Container]:
    """Register torchvision classes that keep other transforms in ``.transforms``."""

    def register(function: Container) -> Container:
        for cls in classes:
            CONTAINERS[cls] = function, in_sequence
        return function

    return register


@dataclass(frozen=True)
class Part:
    """One transform, where it stands, and what became of it.

    Attributes:
        position: such as ``transform.transforms[1]``.
        transform: torchvision's object, or whatever stands there.
        state: of the image before it.
        steps: of it and of those ``inside``. What is refused has none, as if it were left out.
        inside: the transforms that it holds.
        refusal: why it is not translated, and what to do; "" where it is.
    """

    position: str
    transform: Any
    state: ImageState
    steps: Branch = ()
    inside: tuple[Part, ...] = ()
    refusal: str = ""

    def __iter__(self) -> Iterator[Part]:
        """What it holds, in order, and itself."""
        for part in self.inside:
            yield from part
        yield self

    @property
    def name(self) -> str:
        """Of its class, as users write it."""
        return _name(self.transform)


def plan_for(transform: Any) -> Plan:
    """Translate a torchvision transform (v1 or v2) into a plan.

    Args:
        transform: a Compose, nested at will, one transform, or a callable object whose ``.transforms`` is a Compose
            (as in torchvision's training reference).

    Raises:
        UnsupportedTransformError: something in it is not translated; names the position and the class.
    """
    translated = translate(transform)
    for part in translated:
        if part.refusal:
            raise UnsupportedTransformError(f"{part.position}: {part.name}: {part.refusal}")
    return plan_of(translated.steps)


def translate(transform: Any, position: str = "transform", state: ImageState | None = None) -> Part:
    """As ``plan_for``, but nothing is raised: what is refused says so in its part, and the others are translated."""
    state = state or ImageState()
    inner = getattr(transform, "transforms", None)
    if any(cls.__module__.startswith("timm.") for cls in type(transform).__mro__):
        missing = _learn_timm()
        if missing:
            return Part(position, transform, state, refusal=missing)
    if type(transform) in COMPOSES:
        return _sequence(transform, transform.transforms, position, state)
    if type(transform) in CONTAINERS:
        make, in_sequence = CONTAINERS[type(transform)]
        if in_sequence:
            inside = _sequence(transform, transform.transforms, position, state).inside
            branches = [sum((part.steps for part in inside), ())]
        else:
            parts = enumerate(transform.transforms)
            inside = tuple(translate(part, f"{position}.transforms[{k}]", state) for k, part in parts)
            branches = [part.steps for part in inside]
        return _checked(lambda: (make(transform, branches),), transform, position, state, inside)
    if type(transform) in RULES:
        return _checked(lambda: RULES[type(transform)](transform, state), transform, position, state)
    if type(inner) in COMPOSES and callable(transform):
        whole = translate(inner, f"{position}.transforms", state)
        return Part(position, transform, state, whole.steps, (whole,))
    return Part(position, transform, state, refusal=reason_against(transform, [*COMPOSES, *CONTAINERS, *RULES]))


@functools.cache
def _learn_timm() -> str:
    """Import the rules of timm's classes, which import timm. Returns why that cannot be done, or ""."""
    try:
        for name in ("timm", "timm_auto"):
            importlib.import_module(f".{name}", __package__)
    except (ImportError, AttributeError) as error:
        return f"the oldest timm whose transforms are translated is 1.0.16, and the installed one is another ({error})"
    return ""


def _sequence(transform: Any, transforms: Iterable[Any], position: str, state: ImageState) -> Part:
    inside: list[Part] = []
    before = state
    for k, each in enumerate(transforms):
        inside.append(translate(each, f"{position}.transforms[{k}]", state))
        state = state_after(inside[-1].steps, state)
    return Part(position, transform, before, sum((part.steps for part in inside), ()), tuple(inside))


def _checked(
    make: Callable[[], Branch], transform: Any, position: str, state: ImageState, inside: tuple[Part, ...] = ()
) -> Part:
    """With the steps that ``make`` gives, unless it refuses to, or they cannot stand here."""
    try:
        steps = make()
        state_after(steps, state)
    except UnsupportedTransformError as error:
        return Part(position, transform, state, inside=inside, refusal=str(error))
    return Part(position, transform, state, steps, inside)


def _name(transform: Any) -> str:
    cls = transform if isinstance(transform, type) else type(transform)
    if cls.__module__.startswith("torchvision.transforms.v2"):
        return f"v2.{cls.__name__}"
    if cls.__module__.startswith("torchvision.transforms"):
        return cls.__name__
    named = transform if hasattr(transform, "__qualname__") else cls  # a function has a name of its own
    return f"{named.__module__}.{named.__qualname__}"
