"""The plan of a transform."""

from __future__ import annotations

from typing import Any

from proxyloader.transforms.plan import ImageState, Plan, plan_of
from proxyloader.transforms.registry import translate


def plan_for(transform: Any) -> Plan:
    """Translate a transform. TypeError, ValueError: a part of it has no equivalent steps."""
    return plan_of(translate(transform, ImageState())[0])


def has_plan(transform: Any) -> bool:
    try:
        return bool(plan_for(transform))
    except (TypeError, ValueError):
        return False
