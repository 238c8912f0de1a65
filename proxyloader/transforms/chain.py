"""Chain: transforms called one after the other on the same image, translated together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torchvision.transforms import Grayscale, PILToTensor, RandomChoice, RandomOrder

from ..lifetime import cached_property
from .plan import Branch, ImageState, Plan, Step, iter_steps, output_state, plan_of
from .registry import COMPOSES, CONTAINERS, RULES, is_changed, iter_inside, load_timm_rules, translate

MAX_CHAINS = 1024
"""Maximum number of cached chains. A full cache is cleared, because a dataset may create a transform with new arguments
for every image."""

_next: dict[tuple[Chain, Any], Chain | None] = {}
"""The chain that continues another one, by this other one and the settings of the transform."""

_through: dict[tuple[Chain, int], tuple[Snapshot, Chain]] = {}
"""The same for a whole Compose, by its id."""

_MISSING = object()
"""Marks a transform that has not continued a chain yet. None marks one that is not translated."""


class Chain:
    """Transforms called one after the other, as steps.

    Attributes:
        steps: steps of all transforms.
        last_steps: steps of the last call: of one transform, or of all transforms in a Compose.
        state: state of the image after all steps.
        transforms: transforms of the last call, as they were when first called with their settings.
        num_recorded: number of the first steps that end with a recorded call; see ``then_steps``.
        draws_beside_torch: whether one of these may also draw from Python's and NumPy's generators.
        draws: whether one of these draws random numbers.
        sampling_steps: their steps that have parameters or change the size of the image.
    """

    def __init__(
        self,
        steps: Branch,
        last_steps: Branch,
        state: ImageState,
        draws_beside_torch: bool = False,
        transforms: tuple[Any, ...] = (),
        num_recorded: int = 0,
    ) -> None:
        self.steps, self.last_steps, self.state, self.num_recorded = steps, last_steps, state, num_recorded
        self.draws_beside_torch, self.transforms = draws_beside_torch, transforms

    def then(self, transform: Any) -> Chain | None:
        """Return the continuation with a transform in its current state; None if it is not translated."""
        key = self, settings_of(transform)
        found = _next.get(key, _MISSING)
        if found is _MISSING:
            if len(_next) >= MAX_CHAINS:
                _next.clear()
            found = _next[key] = self._extend(_frozen_copy(transform))
        return cast("Chain | None", found)

    def through(self, compose: Any) -> Chain | None:
        """Return the continuation with all transforms of a Compose in its current state.

        None if it is empty or has a transform that is not translated, or if multiple images would be PIL images.
        """
        found = _through.get((self, id(compose)))
        if found is not None and found[0].is_current():
            return found[1]
        chain, beside, transforms = self, False, ()
        for part in _compose_parts(compose) or ():
            after = None if is_changed(part) else chain.then(part)
            if after is None:
                return None
            chain, transforms = after, (*transforms, *after.transforms)
            beside |= chain.draws and chain.draws_beside_torch
        if chain is self:
            return None
        last_steps = chain.steps[len(self.steps) :]
        whole = Chain(chain.steps, last_steps, chain.state, beside, transforms, self.num_recorded)
        if len(_through) >= MAX_CHAINS:
            _through.clear()
        _through[self, id(compose)] = Snapshot(compose), whole  # the snapshot keeps the compose and thus its id alive
        return whole

    def find_obstacle(self, compose: Any, find: Callable[[Plan], str]) -> str:
        """Return the first transform of a Compose that has an obstacle, and the obstacle; "" if none is known to."""
        chain: Chain | None = self
        for part in _compose_parts(compose) or ():
            chain = None if chain is None or is_changed(part) else chain.then(part)
            if chain is not None and (why := find(chain.partial_plan)):
                return f"{type(part).__name__}: {why}"
        return ""

    def then_steps(self, steps: Branch) -> Chain:
        """Return the continuation with a recorded call, whose parameters are given."""
        return _then_steps(self, steps)

    @cached_property
    def plan(self) -> Plan:
        """The plan of all steps."""
        return plan_of(self.steps)

    @cached_property
    def draws(self) -> bool:
        return any(step.draws for step in iter_steps(self.last_steps))

    @cached_property
    def sampling_steps(self) -> Branch:
        return tuple(step for step in self.last_steps if type(step).sample_params is not Step.sample_params)

    @cached_property
    def partial_plan(self) -> Plan:
        """The plan of the steps since the last recorded call. It may end in a PIL image.

        The kernels of these steps do not depend on the steps of PIL images before them.
        """
        return Plan(self.steps[self.num_recorded :], self.state)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self.draws_beside_torch, self.transforms, self.num_recorded
        return Chain, (self.steps, self.last_steps, self.state, *settings)

    def _extend(self, transform: Any) -> Chain | None:
        try:
            steps, state = translate(transform, self.state)
        except (TypeError, ValueError):  # torchvision does not check all arguments in constructors
            return None
        beside = any(map(draws_beside_torch, iter_inside(transform)))
        return Chain(self.steps + steps, steps, state, beside, (transform,), self.num_recorded)


@functools.lru_cache(maxsize=4 * MAX_CHAINS)
def _then_steps(chain: Chain, steps: Branch) -> Chain:
    whole, state = chain.steps + steps, replace(output_state(steps, chain.state), size=None)
    is_pil = chain.state.kind == state.kind == "pil"
    return Chain(whole, steps, state, num_recorded=len(whole) if is_pil else chain.num_recorded)


def draws_beside_torch(transform: Any) -> bool:
    """Return whether a transform may also draw from Python's or NumPy's generator. Most in torchvision do not."""
    own = type(transform).__module__.startswith("torchvision.")
    return not own or type(transform) in (RandomChoice, RandomOrder)


def settings_of(transform: Any) -> Any:
    """Return a key that is equal for transforms of the same class with equal attributes.

    It keeps objects that it compares by identity alive, so that their ids cannot be reused.
    """
    kind = type(transform)
    if kind in CONTAINERS:
        return kind, tuple(map(settings_of, transform.transforms)), _attribute_keys(transform)
    own = vars(transform)
    has_tensors = own.get("_parameters") or own.get("_buffers")  # such as Normalize(nn.Parameter(mean), std)
    return (kind, _attribute_keys(transform)) if kind in RULES and not has_tensors else _Identity(transform)


def _attribute_keys(transform: Any) -> tuple[Any, ...]:
    return tuple([_value_key(value) for name, value in vars(transform).items() if name not in _MODULE_ATTRIBUTES])


_MODULE_ATTRIBUTES = frozenset({*vars(torch.nn.Module()), "transforms"})


def _value_key(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is list or kind is tuple:
        return tuple(map(_value_key, value))
    if kind is dict:
        return tuple((key, _value_key(each)) for key, each in value.items())
    if kind is torch.Tensor:
        return value.detach().numpy().tobytes(), value.dtype, value.requires_grad
    if kind is np.ndarray:
        return value.tobytes()
    return _Identity(value)


_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


class _Identity:
    """Key that compares an object by identity."""

    __slots__ = ("_object",)

    def __init__(self, object: Any) -> None:
        self._object = object

    def __hash__(self) -> int:
        return id(self._object)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._object is other._object


class Snapshot:
    """A transform and its inner ones, with copies of their attributes. Faster to compare than ``settings_of``."""

    def __init__(self, transform: Any) -> None:
        self._plain: list[Any] = []
        self._before: list[dict[str, Any]] = []  # their attributes
        self._with_arrays = []
        for each in _flatten(transform):
            copied = _copy_value(vars(each))
            if arrays := {name: value for name, value in copied.items() if _has_arrays(value)}:
                self._with_arrays.append((each, copied, arrays))
            else:
                self._plain.append(each)
                self._before.append(copied)

    def is_current(self) -> bool:
        try:
            # One comparison, as this runs for every image.
            same = [*map(vars, self._plain)] == self._before
            return same and all(_equal(vars(each), *before) for each, *before in self._with_arrays)
        except Exception:  # an attribute is not comparable anymore
            return False


def _has_arrays(value: Any) -> bool:
    """Return whether an attribute contains tensors or arrays, for which ``==`` is elementwise."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, (torch.Tensor, np.ndarray)) or any(map(_has_arrays, inside))


def _equal(now: dict[str, Any], before: dict[str, Any], arrays: dict[str, Any]) -> bool:
    if now.keys() != before.keys() or any(_value_key(now[name]) != _value_key(value) for name, value in arrays.items()):
        return False
    return all(now[name] == value for name, value in before.items() if name not in arrays)


def _flatten(transform: Any) -> list[Any]:
    if isinstance(transform, torch.nn.Sequential):
        return [transform, *(each for part in transform for each in _flatten(part))]
    if type(transform) not in COMPOSES and type(transform) not in CONTAINERS:
        return [transform] if hasattr(transform, "__dict__") else []
    inside = transform.transforms
    held = [inside] if isinstance(inside, torch.nn.ModuleList) else []
    return [transform, *held, *(each for part in inside for each in _flatten(part))]


def _copy_value(value: Any) -> Any:
    """Return a copy of mutable values that are compared by content; return other values unchanged."""
    if isinstance(value, dict):
        return {key: _copy_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_copy_value, value))
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _frozen_copy(transform: Any) -> Any:
    """Return a copy, because a dataset may change the attributes before torchvision runs the transform."""
    holds_others = type(transform) in CONTAINERS or type(transform) in COMPOSES
    if type(transform) not in RULES and not holds_others:
        return transform
    made = copy.copy(transform)
    vars(made).update(_copy_value(vars(transform)))
    if holds_others:
        inside = list(map(_frozen_copy, transform.transforms))
        is_module = isinstance(transform.transforms, torch.nn.ModuleList)
        made.transforms = torch.nn.ModuleList(inside) if is_module else inside
    return made


START = Chain((), (), ImageState())
"""Chain of an RGB PIL image before any transform."""

START_AS_TENSOR = cast(Chain, START.then(PILToTensor()))
"""Chain of an RGB tensor, uint8 (3, H, W), before any transform."""


START_AS_GREY = cast(Chain, START.then(Grayscale(1)))
"""Chain of a PIL image in mode L before any transform. Pillow converts RGB to L like Grayscale."""


def classes_with_rules() -> tuple[type, ...]:
    """Return the classes that may continue a chain."""
    return (*RULES, *CONTAINERS)


def _compose_parts(transform: Any) -> list[Any] | None:
    """Return the transforms that a Compose calls, including those of nested ones, or a single transform.

    None if one of them cannot continue a chain with any settings.
    """
    if type(transform).__module__.startswith("timm."):
        load_timm_rules()
    if type(transform) not in COMPOSES:
        return [transform] if type(transform) in RULES or type(transform) in CONTAINERS else None
    inside = transform.transforms
    if type(inside) not in (list, tuple) or is_changed(transform):
        return None
    parts: list[Any] = []
    for each in inside:
        found = _compose_parts(each)
        if found is None:
            return None
        parts += found
    return parts
