"""The plan of a transform, and how it draws."""

from __future__ import annotations

from typing import Any

from proxyloader.transforms.plan import ImageState, ParamRow, Plan, Translation, plan_of
from proxyloader.transforms.registry import translate


def translation_of(transform: Any) -> Translation:
    """TypeError, ValueError: a part of the transform has no equivalent steps."""
    return translate(transform, ImageState())[0]


def plan_for(transform: Any) -> Plan:
    return plan_of(translation_of(transform).steps)


def has_plan(transform: Any) -> bool:
    try:
        return bool(plan_for(transform))
    except (TypeError, ValueError):
        return False


def draw(translation: Translation, height: int, width: int) -> list[float]:
    """The parameters of an image of that size, without arrays."""
    row = ParamRow()
    if translation.sample is not None:
        translation.sample((height, width), row)
    return row
