"""Rules that translate torchvision's and timm's classes to steps."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torchvision.transforms import transforms as v1, v2

from .plan import ImageState, OneOf, ParamRow, Size, Translation, Untranslatable, Version, in_sequence, output_state
from .random_numbers import bernoulli

Rule = Callable[[Any, ImageState], Translation]
"""Function that takes a transform and the state of the image before it, and translates it. It raises Untranslatable, or
another ValueError or TypeError, if there are no equivalent steps; torchvision's code then runs."""

COMPOSES = (v1.Compose, v2.Compose)
CONTAINERS = frozenset({*COMPOSES, v1.RandomApply, v2.RandomApply})
"""Classes with inner transforms in ``.transforms``."""

ALWAYS_PLAIN = frozenset({v1.Normalize, v1.CenterCrop, v1.RandomCrop, v1.RandomResizedCrop})
"""Classes of v1 that return a plain tensor for any ``tv_tensors.Image``. RandomErasing keeps the class; others may."""

IMAGE_CONVERSIONS = frozenset({v2.ToImage, v2.ToDtype, v2.Normalize})
"""Classes of v2 with rules that leave boxes, masks, and tensors beside an image as they are."""

RULES: dict[type, Rule] = {}  # by exact class, because subclasses may behave differently


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Register a rule for classes of torchvision or timm."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(classes, function))
        return function

    return register


def translate(transform: Any, state: ImageState) -> tuple[Translation, ImageState]:
    """Translate a transform of an image in this state. Return also the state after it. Raises the errors of a Rule."""
    if is_changed(transform):
        raise Untranslatable
    if type(transform) in COMPOSES:
        parts = []
        for each in transform.transforms:
            part, state = translate(each, state)
            parts.append(part)
        return in_sequence(parts), state
    may_keep_class = version_of(transform) == "v1" and type(transform) not in (*ALWAYS_PLAIN, v1.RandomErasing)
    if type(transform) not in RULES or (may_keep_class and state.kind == "tensor" and not state.pure):
        raise Untranslatable
    translation = RULES[type(transform)](transform, state)
    after = output_state(translation.steps, state)
    if isinstance(transform, v2.ToImage) or not _keeps_class(transform):
        after = replace(after, pure=not isinstance(transform, v2.ToImage))
    return translation, after


def _keeps_class(transform: Any) -> bool:
    """Return whether a transform keeps the class ``tv_tensors.Image``."""
    keeps = isinstance(transform, (v2.Transform, *COMPOSES, v1.RandomErasing))
    return (
        keeps
        and not isinstance(transform, v2.ToPureTensor)
        and all(map(_keeps_class, getattr(transform, "transforms", ())))
    )


def version_of(transform: Any) -> Version:
    return "v2" if isinstance(transform, v2.Transform) else "v1"


def at_random(transform: Any, inner: Translation, closed: bool = False) -> Translation:
    """Return the translation of a class that applies the inner steps with probability ``transform.p``.

    ``closed``: whether it applies them if the random number equals ``p``, as only v1.RandomApply does.
    """
    p, choice = float(transform.p), OneOf(((), inner.steps))

    def sample(size: Size, row: ParamRow) -> Size:
        is_applied = bernoulli(p, closed)
        return choice.take(is_applied, inner.sample if is_applied else None, size, row)

    return Translation((choice,), sample, inner.draws or "numbers")


@rule(v1.RandomApply, v2.RandomApply)
def random_apply(transform: Any, state: ImageState) -> Translation:
    inner, _ = translate(v1.Compose(transform.transforms), state)
    return at_random(transform, inner, closed=version_of(transform) == "v1")


def is_changed(transform: Any, inside: bool = True) -> bool:
    """Return whether torch uses more than the class has: hooks, or methods and constants set on the instance.

    ``inside``: or more than those of the transforms that it contains.
    """
    own = getattr(transform, "__dict__", {})
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks") or has_global_hooks():
        return True
    if not _names_of(type(transform)).isdisjoint(own):  # type: ignore[arg-type]
        return True
    return inside and type(transform) in CONTAINERS and any(map(is_changed, transform.transforms))


@functools.cache
def _names_of(cls: Any) -> frozenset[str]:
    return frozenset(dir(cls))


def has_global_hooks() -> bool:
    """Return whether torch calls hooks of all modules."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


@functools.cache
def load_timm_rules() -> None:
    """Import the rules for timm, which import timm. Versions before 1.0.16 have none."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module(".timm", __package__)
