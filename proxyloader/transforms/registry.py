"""Registry of rules for torchvision classes, and translation of a Compose with these rules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchvision.transforms import Compose as ComposeV1
from torchvision.transforms import v2

from ..errors import UnsupportedTransformError
from .nested import find_nested
from .plan import Branch, ImageState, Plan, Step, iter_steps, output_state, plan_of
from .unsupported import CALLS_BY_ITSELF, HAS_HOOKS, TAKES_ALL, TAKES_ONE, missing_rule_error

Rule = Callable[[Any, ImageState], Branch]
"""Function that takes a transform and the state of the image before it, and returns its steps. It raises
UnsupportedTransformError with the reason and the code. The caller adds the position and the class."""

COMPOSES = (ComposeV1, v2.Compose)

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


@dataclass(frozen=True)
class Part:
    """One transform, its position, and its translation.

    Attributes:
        position: its position, such as ``transform.transforms[1]``.
        transform: the transform, or any other object at this position.
        state: state of the image before it.
        steps: steps of the transform and of those ``inside``, without rejected ones.
        inside: its inner transforms.
        error: the exception that ``plan_for`` raises for it; None if it is translated.
    """

    position: str
    transform: Any
    state: ImageState
    steps: Branch = ()
    inside: tuple[Part, ...] = ()
    error: UnsupportedTransformError | None = None

    @property
    def refusal(self) -> str:
        """Reason why the transform is not translated, with advice; "" if it is translated."""
        return self.error.reason if self.error is not None else ""

    @property
    def name(self) -> str:
        """Class name of the transform, as users write it."""
        return _name(self.transform)

    @property
    def refused(self) -> Part | None:
        """The first rejected part among this part and those inside; None if all are translated."""
        return next((part for part in self if part.error), None)

    def on_the_way(self) -> Iterator[Part]:
        """Yield the parts applied to an image in sequence, with each Compose replaced by its parts."""
        if self.error or type(self.transform) not in COMPOSES:
            yield self
        else:
            for each in self.inside:
                yield from each.on_the_way()

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts inside, in order, then this part."""
        for part in self.inside:
            yield from part
        yield self


def plan_for(transform: Any, position: str = "transform") -> Plan:
    """Translate a torchvision transform (v1 or v2) to a plan.

    Args:
        transform: a Compose, possibly nested, or one transform.
        position: position of the transform, for messages.

    Raises:
        UnsupportedTransformError: a part is not translated. The error has its position and class.
    """
    translated = translate(transform, position)
    refused = translated.refused
    if refused is not None:
        assert refused.error is not None
        try:
            raise refused.error
        finally:  # the traceback keeps this frame alive, and thus its callers and their loader
            del translated, refused
    try:
        return plan_of(translated.steps)
    except UnsupportedTransformError as error:
        raise error.at(position, position=position) from None


def translate(transform: Any, position: str = "transform", state: ImageState | None = None) -> Part:
    """Translate like ``plan_for``, but store errors in the rejected parts instead of raising them."""
    state = state or ImageState()
    inside: tuple[Part, ...] = ()
    try:
        if is_changed(transform) and type(transform) in _known_classes():
            raise UnsupportedTransformError(HAS_HOOKS, code="unsupported-class")
        if type(transform) in COMPOSES:
            inside = _parts(transform, position, state)
            return Part(position, transform, state, sum((part.steps for part in inside), ()), inside)
        _check_before(transform, state)
        if type(transform) in CONTAINERS:
            make, in_sequence = CONTAINERS[type(transform)]
            inside = _parts(transform, position, state, in_sequence)
            steps: Branch = (make(transform, [part.steps for part in inside]),)
        elif type(transform) in RULES:
            steps = RULES[type(transform)](transform, state)
        elif is_holder(transform):
            raise UnsupportedTransformError(CALLS_BY_ITSELF, code="wrong-place")
        else:
            raise missing_rule_error(transform, _known_classes())
        _check_steps(steps, state)
    except (TypeError, ValueError) as error:
        if not isinstance(error, UnsupportedTransformError):  # arguments not checked by torchvision's constructors
            error = UnsupportedTransformError(f"invalid arguments ({type(error).__name__}: {error})", code="invalid")
        return Part(position, transform, state, inside=inside, error=_located(error, _name(transform), position))
    return Part(position, transform, state, steps, inside)


def _check_before(transform: Any, state: ImageState) -> None:
    """Import timm's rules if needed. Raise UnsupportedTransformError if the transform is not allowed here."""
    if any(cls.__module__.startswith("timm.") for cls in type(transform).__mro__) and (missing := load_timm_rules()):
        raise UnsupportedTransformError(missing, code="unsupported-class")
    if state.images > 1 and (not isinstance(transform, v2.Transform) or type(transform) is v2.Lambda):
        name = type(transform).__name__
        known = name != "Lambda" and hasattr(v2, name)
        raise UnsupportedTransformError(TAKES_ONE.format(name=name) if known else TAKES_ALL, code="several-images")


def is_changed(transform: Any) -> bool:
    """Return whether torch calls more than the method of the class: hooks, or a ``forward`` set on the instance."""
    own = getattr(transform, "__dict__", {})
    return "forward" in own or bool(own.get("_forward_hooks") or own.get("_forward_pre_hooks"))


def is_holder(transform: Any) -> bool:
    """Return whether the object is user-defined and calls transforms that it holds; see ``nested.py``."""
    cls = type(transform)
    if cls.__module__.startswith("torch.") or any(base in _known_classes() for base in cls.__mro__):
        return False
    return bool(find_nested(transform))


def _known_classes() -> set[type]:
    return {*COMPOSES, *CONTAINERS, *RULES}


@functools.cache
def load_timm_rules() -> str:
    """Import the rules for timm, which import timm. Return the reason why timm cannot be used, or ""."""
    try:
        for name in ("timm", "timm_auto_augment"):
            importlib.import_module(f".{name}", __package__)
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
        if not str(missing).startswith("timm"):  # an error of this package
            raise
        return f"timm 1.0.16 or newer is required, but another version is installed ({error})"
    return ""


def _parts(transform: Any, position: str, state: ImageState, in_sequence: bool = True) -> tuple[Part, ...]:
    """Return the inner parts of a transform, each with the state of the image before it."""
    inside: list[Part] = []
    for k, each in enumerate(transform.transforms):
        inside.append(translate(each, f"{position}.transforms[{k}]", state))
        if in_sequence:
            state = state_after(inside[-1])
    return tuple(inside)


def _located(error: UnsupportedTransformError, name: str, position: str) -> UnsupportedTransformError:
    return error.at(f"{position}: {name}", transform=name, position=position)


def state_after(part: Part) -> ImageState:
    """Return the state after a part. Only v2 classes keep the class ``tv_tensors.Image``, except for ToPureTensor."""
    state = output_state(part.steps, part.state)
    kinds = {type(each.transform) for each in part} - {*COMPOSES}
    keeps_class = all(issubclass(kind, v2.Transform) and not issubclass(kind, v2.ToPureTensor) for kind in kinds)
    return state if keeps_class else replace(state, pure=True)


def _check_steps(steps: Branch, state: ImageState) -> None:
    """Raise UnsupportedTransformError if the steps do not support the state of the images before them."""
    output_state(steps, state)
    if state.images == 1 or not steps:
        return
    if state.kind == "tensor" and state.pure:
        raise UnsupportedTransformError(
            "torchvision transforms only the first of several plain tensors; convert them with v2.ToImage()",
            code="several-images",
        )
    if any(step.params_doc for step in iter_steps(steps)):
        raise UnsupportedTransformError(
            "an earlier transform returns multiple images; put random transforms before it", code="several-images"
        )


def _name(transform: Any) -> str:
    cls = transform if isinstance(transform, type) else type(transform)
    if cls.__module__.startswith("torchvision.transforms.v2"):
        return f"v2.{cls.__name__}"
    if cls.__module__.startswith("torchvision.transforms"):
        return cls.__name__
    named = transform if hasattr(transform, "__qualname__") else cls  # a function has its own name
    return f"{named.__module__}.{named.__qualname__}"
