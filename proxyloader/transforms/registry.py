"""The table from torchvision classes to rules, and the walk through a Compose that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchvision.transforms import Compose as ComposeV1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .plan import ImageState, Plan, Step, plan_of

Rule = Callable[[Any, ImageState], tuple[Step, ...]]
"""Takes a transform and the state of the image before it; returns its steps. Raises UnsupportedTransformError with
the reason; position and class are added here."""

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


def plan_for(transform: Any) -> Plan:
    """Translate a torchvision transform (v1 or v2) into a plan.

    Args:
        transform: a Compose, nested at will, one transform, or a callable object whose ``.transforms`` is a Compose
            (as in torchvision's training reference).

    Raises:
        UnsupportedTransformError: something in it is not translated; names the position and the class.
    """
    state = ImageState()
    steps: list[Step] = []
    for position, part in _flat(transform, ""):
        where = f"transform{position}: {_describe(part)}"
        if type(part) not in RULES:
            raise UnsupportedTransformError(f"{where} is not translated to DALI. {_suggestion()}")
        try:
            made = RULES[type(part)](part, state)
        except UnsupportedTransformError as error:
            raise UnsupportedTransformError(f"{where}: {error}") from None
        for step in made:
            state = step.state_after(state)
        steps.extend(made)
    return plan_of(tuple(steps))


def _flat(transform: Any, position: str) -> Iterator[tuple[str, Any]]:
    """Every transform that is no container, with its position, as ``.transforms[1]``."""
    inner = getattr(transform, "transforms", None)
    if type(transform) in (ComposeV1, v2.Compose):
        for k, part in enumerate(transform.transforms):
            yield from _flat(part, f"{position}.transforms[{k}]")
    elif type(transform) not in RULES and type(inner) in (ComposeV1, v2.Compose) and callable(transform):
        yield from _flat(inner, f"{position}.transforms")
    else:
        yield position, transform


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
    names = ", ".join(sorted({cls.__name__ for cls in RULES}))
    return f"Translated are: Compose, {names}. Leave it out, or use torch.utils.data.DataLoader for this dataset"
