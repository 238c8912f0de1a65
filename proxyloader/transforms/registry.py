"""Rules that translate torchvision's and timm's classes to steps."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.nn.modules.module import _global_forward_hooks as _global_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as _global_pre_hooks
from torchvision.transforms import Compose as ComposeV1
from torchvision.transforms import v2

from .plan import Branch, ImageState, Step, Untranslatable, output_state

Rule = Callable[[Any, ImageState], Branch]
"""Function that takes a transform and the state of the image before it, and returns its steps. It raises
Untranslatable, or another ValueError or TypeError, if there are none; torchvision's code then runs."""

COMPOSES = (ComposeV1, v2.Compose)

_METHODS = frozenset({"forward", "get_params", "make_params", "_get_params", "transform", "_transform"})
"""Methods of torchvision's classes that a transform may have of its own."""

RULES: dict[type, Rule] = {}
"""Rules by exact class, because subclasses may behave differently."""


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Register a rule for classes of torchvision or timm, or of a test. Each class has only one."""

    def register(function: Rule) -> Rule:
        for cls in classes:
            if cls in RULES:
                raise ValueError(f"{cls.__module__}.{cls.__name__} already has a rule: {RULES[cls].__name__}")
            RULES[cls] = function
        return function

    return register


Container = Callable[[Any, Sequence[Branch]], Step]
"""Function that takes a transform with inner transforms, and the steps of each of them. It returns one step for the
whole transform."""

CONTAINERS: dict[type, tuple[Container, bool]] = {}
"""Containers by exact class, and whether the inner transforms are applied in sequence."""


def container(*classes: type, in_sequence: bool = False) -> Callable[[Container], Container]:
    """Register torchvision classes with inner transforms in ``.transforms``."""

    def register(function: Container) -> Container:
        CONTAINERS.update(dict.fromkeys(classes, (function, in_sequence)))
        return function

    return register


def translate(transform: Any, state: ImageState) -> tuple[Branch, ImageState]:
    """Return the steps of a transform of an image in this state, and the state after it.

    Raises:
        TypeError, ValueError: the transform, with its arguments and in this place, has no equivalent steps.
    """
    steps = _translate(transform, state)
    after = output_state(steps, state)
    # Only v2 classes keep the class ``tv_tensors.Image``, except for ToPureTensor.
    kinds = {type(each) for each in iter_inside(transform)} - {*COMPOSES}
    keeps_class = all(issubclass(kind, v2.Transform) and not issubclass(kind, v2.ToPureTensor) for kind in kinds)
    return steps, after if keeps_class else replace(after, pure=True)


def _translate(transform: Any, state: ImageState) -> Branch:
    kind = type(transform)
    if is_changed(transform):
        raise Untranslatable
    if kind in COMPOSES:
        return sum(_inside(transform, state), ())
    if kind in CONTAINERS:
        make, in_sequence = CONTAINERS[kind]
        return (make(transform, _inside(transform, state, in_sequence)),)
    if kind not in RULES:
        raise Untranslatable
    return RULES[kind](transform, state)


def _inside(transform: Any, state: ImageState, in_sequence: bool = True) -> list[Branch]:
    """Return the steps of the inner transforms, each with the state of the image before it."""
    branches: list[Branch] = []
    for each in transform.transforms:
        steps, after = translate(each, state)
        branches.append(steps)
        state = after if in_sequence else state
    return branches


def iter_inside(transform: Any) -> Iterator[Any]:
    """Yield a transform and, recursively, its inner transforms."""
    yield transform
    if type(transform) in COMPOSES or type(transform) in CONTAINERS:
        for each in transform.transforms:
            yield from iter_inside(each)


def is_changed(transform: Any) -> bool:
    """Return whether torch calls more than the methods of the class: hooks, or methods set on the instance."""
    own = getattr(transform, "__dict__", {})
    has_hooks = own.get("_forward_hooks") or own.get("_forward_pre_hooks") or _global_hooks or _global_pre_hooks
    return bool(has_hooks) or not _METHODS.isdisjoint(own)


@functools.cache
def load_timm_rules() -> None:
    """Import the rules for timm, which import timm. Versions before 1.0.16 have none."""
    try:
        for name in ("timm", "timm_auto_augment"):
            importlib.import_module(f".{name}", __package__)
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
        if not str(missing).startswith("timm"):  # an error of this package
            raise
