"""Chain: transforms called one after the other on the same image, translated together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torchvision.transforms import Grayscale, PILToTensor

from .plan import Branch, ImageState, Plan, Translation, in_sequence, output_state, plan_of
from .registry import COMPOSES, CONTAINERS, RULES, has_global_hooks, is_changed, load_timm_rules, translate

Classes = frozenset[type]

MAX_CHAINS = 1024
"""Maximum number of cached chains. A full cache is cleared, because a dataset may create a transform with new arguments
for every image."""

_next: dict[tuple[Chain, Any], Chain | None] = {}
"""The chain that continues another one, by this other one and the settings of the transform; None if that is not
translated."""

_along: dict[tuple[Chain, int, int, Classes | None], tuple[Snapshot, Chain, int]] = {}
"""The result of ``Chain.along``, by the chain, the id of the Compose, ``begin`` and ``only``."""

_MISSING = object()
_MODULE_ATTRIBUTES = frozenset({*vars(torch.nn.Module()), "transforms"})
_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


@dataclass(eq=False)
class Chain:
    """Transforms called one after the other, as steps."""

    steps: Branch  # of all transforms
    state: ImageState  # after all steps
    last: Translation  # of the last call: of one transform, or of all transforms in a Compose
    transforms: tuple[Any, ...] = ()  # of the last call, as they were when first called with their settings
    num_recorded: int = 0  # number of the first steps that end with a recorded call; see ``then_steps``

    def __reduce__(self) -> tuple[Any, ...]:
        last = Translation(self.last.steps)  # functions are not pickled, and numbers are drawn only once
        return Chain, (self.steps, self.state, last, self.transforms, self.num_recorded)

    def then(self, transform: Any) -> Chain | None:
        """Return the continuation with a transform in its current state; None if it is not translated."""
        key = self, settings_of(transform)
        found = _next.get(key, _MISSING)
        if found is _MISSING:
            found = self._extend(transform)
            if len(_next) >= MAX_CHAINS:
                _next.clear()
            if not has_global_hooks():  # these prevent a translation as long as they exist
                _next[key] = found
        return cast("Chain | None", found)

    def _extend(self, transform: Any) -> Chain | None:
        if type(transform) not in RULES:
            return None
        try:
            transform = copy.deepcopy(transform)  # a dataset may change it before torchvision runs it
            last, state = translate(transform, self.state)
        except (TypeError, ValueError, RuntimeError):  # torchvision does not check all arguments in constructors
            return None
        return Chain(self.steps + last.steps, state, last, (transform,), self.num_recorded)

    def through(self, transform: Any) -> Chain | None:
        """Return the continuation with a transform, or with all in a Compose. None if one of them is not translated."""
        if type(transform) not in COMPOSES:
            return (self._extensions(transform) or (None,))[-1]
        found = self.along(transform)
        return None if found is None or found[1] < len(transform.transforms) else found[0]

    def along(self, compose: Any, begin: int = 0, only: Classes | None = None) -> tuple[Chain, int] | None:
        """Return the continuation with transforms of a Compose from index ``begin`` on, and the index where it ends.

        It ends before a transform that is not translated, or not of the classes in ``only``. None if that is the first
        one, or if the Compose has a hook.
        """
        key = self, id(compose), begin, only
        found = _along.get(key)
        if found is not None and not has_global_hooks() and found[0].is_current():
            return found[1:]
        if type(compose.transforms) not in (list, tuple) or is_changed(compose, inside=False):
            return None
        added: list[Chain] = []
        end = begin
        for part in compose.transforms[begin:]:
            is_allowed = only is None or type(part) in only
            if not is_allowed or (more := (added[-1] if added else self)._extensions(part)) is None:
                break
            added, end = added + more, end + 1
        if not added:
            return None
        transforms = tuple(transform for each in added for transform in each.transforms)
        translation = in_sequence([each.last for each in added])
        whole = Chain(added[-1].steps, added[-1].state, translation, transforms, self.num_recorded)
        if len(_along) >= MAX_CHAINS:
            _along.clear()
        snapshot = Snapshot(compose, compose.transforms[begin:end])  # keeps the compose and thus its id alive
        _along[key] = snapshot, whole, end
        return whole, end

    def _extensions(self, transform: Any) -> list[Chain] | None:
        """Return the continuations with a transform, or with each one in a Compose. None if one is not translated."""
        if is_changed(transform) or (parts := _compose_parts(transform)) is None:
            return None
        chains = [self]
        for part in parts:
            if (after := chains[-1].then(part)) is None:
                return None
            chains.append(after)
        return chains[1:]

    def find_obstacle(self, compose: Any, find: Callable[[Plan], str]) -> str:
        """Return the first transform of a Compose that has an obstacle, and the obstacle; "" if none is known to."""
        chain: Chain | None = self
        for part in _compose_parts(compose) or ():
            chain = None if chain is None or is_changed(part) else chain.then(part)
            if chain is not None and (why := find(chain.partial_plan)):
                return f"{type(part).__name__}: {why}"
        return ""

    @functools.lru_cache(maxsize=4 * MAX_CHAINS)  # noqa: B019
    def then_steps(self, steps: Branch) -> Chain:
        """Return the continuation with a recorded call, whose parameters are given."""
        whole, state = self.steps + steps, output_state(steps, self.state)
        is_pil = self.state.kind == state.kind == "pil"
        return Chain(whole, state, Translation(steps), (), len(whole) if is_pil else self.num_recorded)

    @functools.cached_property
    def plan(self) -> Plan:
        return plan_of(self.steps)

    @functools.cached_property
    def partial_plan(self) -> Plan:
        """The plan of the steps since the last recorded call. It may end in a PIL image.

        The kernels of these steps do not depend on the steps of PIL images before them.
        """
        return Plan(self.steps[self.num_recorded :], self.state)


def settings_of(transform: Any) -> Any:
    """Return a key that is equal for transforms of the same class with equal attributes.

    It keeps objects that it compares by identity alive, so that their ids cannot be reused.
    """
    kind, own = type(transform), getattr(transform, "__dict__", {})
    inside = tuple(map(settings_of, transform.transforms)) if kind in CONTAINERS else ()
    has_tensors = own.get("_parameters") or own.get("_buffers")  # such as Normalize(nn.Parameter(mean), std)
    if has_tensors or (kind not in RULES and kind not in CONTAINERS):
        return _Identity(transform)
    return kind, inside, *[_value_key(value) for name, value in own.items() if name not in _MODULE_ATTRIBUTES]


def _value_key(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is list or kind is tuple:
        return tuple(map(_value_key, value))
    if kind is dict:
        return tuple((key, _value_key(each)) for key, each in value.items())
    if kind is torch.Tensor:
        return repr(value.tolist()), value.dtype, value.requires_grad  # NumPy lacks some dtypes
    return value.tobytes() if kind is np.ndarray else _Identity(value)


@dataclass(eq=False, slots=True)
class _Identity:
    """Key that compares an object by identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


class Snapshot:
    """A Compose and some of its transforms, as they were. Faster to compare than ``settings_of``."""

    def __init__(self, compose: Any, transforms: Iterable[Any]) -> None:
        self._plain: list[Any] = []
        self._with_arrays: list[tuple[Any, Any]] = []  # for which == is elementwise
        for part in (compose, *(part for each in transforms for part in _flatten(each))):
            if any(isinstance(value, (torch.Tensor, np.ndarray)) for value in vars(part).values()):
                self._with_arrays.append((part, settings_of(part)))
            else:
                self._plain.append(part)
        self._before = [_copy_value(vars(part)) for part in self._plain]

    def is_current(self) -> bool:
        try:
            # One comparison, as this runs for every image.
            same = [*map(vars, self._plain)] == self._before
            return same and all(settings_of(part) == before for part, before in self._with_arrays)
        except Exception:  # an attribute is not comparable anymore
            return False


def _flatten(transform: Any) -> list[Any]:
    """Return all objects with attributes that determine what a transform does."""
    inside = transform.transforms if type(transform) in CONTAINERS else ()
    held = [inside] if isinstance(inside, torch.nn.Module) else []
    own = [transform] if hasattr(transform, "__dict__") else []
    return [*own, *held, *(each for part in inside for each in _flatten(part))]


def _copy_value(value: Any) -> Any:
    """Return a copy of mutable values that are compared by content; return other values unchanged."""
    if isinstance(value, dict):
        return {key: _copy_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_copy_value, value))
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


# Chains before any transform: of an RGB PIL image, of an RGB tensor, uint8 (3, H, W), and of a PIL image in mode L, to
# which Pillow converts RGB like Grayscale.
START = Chain((), ImageState(), Translation())
START_AS_TENSOR = cast(Chain, START.then(PILToTensor()))
START_AS_GREY = cast(Chain, START.then(Grayscale(1)))


def _compose_parts(transform: Any) -> list[Any] | None:
    """Return the transforms that a Compose calls, including those of nested ones, or a single transform.

    None if one of them cannot continue a chain with any settings.
    """
    if type(transform).__module__.startswith("timm."):
        load_timm_rules()
    if type(transform) not in COMPOSES:
        return [transform] if type(transform) in RULES else None
    if type(transform.transforms) not in (list, tuple):
        return None
    found = list(map(_compose_parts, transform.transforms))
    return None if None in found else [part for parts in found if parts is not None for part in parts]
