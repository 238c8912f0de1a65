"""The table from torchvision classes to rules, and the walk through a Compose that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchvision.transforms import Compose as ComposeV1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .plan import Branch, ImageState, Plan, Step, plan_of, state_after

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


def plan_for(transform: Any) -> Plan:
    """Translate a torchvision transform (v1 or v2) into a plan.

    Args:
        transform: a Compose, nested at will, one transform, or a callable object whose ``.transforms`` is a Compose
            (as in torchvision's training reference).

    Raises:
        UnsupportedTransformError: something in it is not translated; names the position and the class.
    """
    return plan_of(_translated(transform, "transform", ImageState()))


def _translated(transform: Any, position: str, state: ImageState) -> Branch:
    """The steps of a transform at a position such as ``transform.transforms[1]``, for an image in a state."""
    inner = getattr(transform, "transforms", None)
    if type(transform) in COMPOSES:
        return _in_sequence(transform.transforms, position, state)
    if type(transform) in CONTAINERS:
        make, in_sequence = CONTAINERS[type(transform)]
        if in_sequence:
            branches = [_in_sequence(transform.transforms, position, state)]
        else:
            parts = enumerate(transform.transforms)
            branches = [_translated(part, f"{position}.transforms[{k}]", state) for k, part in parts]
        return _checked(lambda: (make(transform, branches),), transform, position, state)
    if type(transform) not in RULES and type(inner) in COMPOSES and callable(transform):
        return _translated(inner, f"{position}.transforms", state)
    if type(transform) not in RULES:
        raise UnsupportedTransformError(
            f"{position}: {_describe(transform)} is not translated to DALI. {_suggestion()}"
        )
    return _checked(lambda: RULES[type(transform)](transform, state), transform, position, state)


def _in_sequence(transforms: Iterable[Any], position: str, state: ImageState) -> Branch:
    steps: list[Step] = []
    for k, part in enumerate(transforms):
        made = _translated(part, f"{position}.transforms[{k}]", state)
        state = state_after(made, state)
        steps.extend(made)
    return tuple(steps)


def _checked(make: Callable[[], Branch], transform: Any, position: str, state: ImageState) -> Branch:
    """What ``make`` returns; what it refuses, and steps that cannot stand here, are named by position and class."""
    try:
        made = make()
        state_after(made, state)
    except UnsupportedTransformError as error:
        raise UnsupportedTransformError(f"{position}: {_describe(transform)}: {error}") from None
    return made


def _describe(transform: Any) -> str:
    if isinstance(transform, type):
        return f"the class {transform.__qualname__}, where an instance, {transform.__qualname__}(...), is expected,"
    cls = type(transform)
    if cls.__module__.startswith("torchvision.transforms.v2"):
        return f"v2.{cls.__name__}"
    if cls.__module__.startswith("torchvision.transforms"):
        return cls.__name__
    named = transform if hasattr(transform, "__qualname__") else cls  # a function has a name of its own
    return f"{named.__module__}.{named.__qualname__}"


def _suggestion() -> str:
    names = ", ".join(sorted({cls.__name__ for cls in [*RULES, *CONTAINERS]}))
    return f"Translated are: Compose, {names}. Leave it out, or use torch.utils.data.DataLoader for this dataset"
