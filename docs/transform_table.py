"""Generate the tables of docs/transforms.md from the translation rules: ``python docs/transform_table.py --write``.

The tables depend neither on the machine nor on the installed versions of torchvision and timm.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from timm.data import auto_augment
from torchvision import transforms as v1
from torchvision.transforms import v2

from proxyloader.transforms.chain import START
from proxyloader.transforms.plan import Branch, ConstantParams, Step
from proxyloader.transforms.registry import CONTAINERS, RULES, load_timm_rules
from proxyloader.transforms.unsupported import REFUSED, REFUSED_TIMM

PAGE = Path(__file__).with_name("transforms.md")
FLIP = v2.RandomHorizontalFlip()

ARGUMENTS: dict[str, dict[str, Any]] = {
    "CenterCrop": {"size": 224},
    "CenterCropOrPad": {"size": 224},
    "ColorJitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "ConvertImageDtype": {"dtype": torch.float32},
    "FiveCrop": {"size": 224},
    "GaussianBlur": {"kernel_size": 5},
    "ImageClassification": {"crop_size": 224},
    "Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3},
    "Pad": {"padding": 4},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 10},
    "RandomApply": {"transforms": [FLIP]},
    "RandomChoice": {"transforms": [FLIP]},
    "RandomCrop": {"size": 224},
    "RandomCropOrPad": {"size": 224},
    "RandomOrder": {"transforms": [FLIP]},
    "RandomPad": {"input_size": 224},
    "RandomPosterize": {"bits": 4},
    "RandomResize": {"min_size": 224, "max_size": 256},
    "RandomResizedCrop": {"size": 224},
    "RandomResizedCropAndInterpolation": {"size": 224},
    "RandomRotation": {"degrees": 10},
    "RandomShortestSize": {"min_size": 224},
    "RandomSolarize": {"threshold": 128},
    "Resize": {"size": 256},
    "ResizeKeepRatio": {"size": 224},
    "ScaleJitter": {"target_size": (224, 224)},
    "TenCrop": {"size": 224},
    "ToDtype": {"dtype": torch.float32, "scale": True},
    "TrimBorder": {"border_size": 4},
}
"""Arguments of the classes that require some."""

TIMM_ARGUMENTS: dict[str, dict[str, Any]] = {
    "AugMixAugment": {"ops": auto_augment.augmix_ops()},
    "AugmentOp": {"name": "Rotate"},
    "AutoAugment": {"policy": auto_augment.auto_augment_policy("v0")},
    "RandAugment": {"ops": auto_augment.rand_augment_ops()},
    "RandomErasing": {"device": "cpu"},
}
"""Arguments of timm's classes that differ from torchvision's."""


def update_tables(page: str) -> str:
    """Return the page with regenerated tables between their comments."""
    tables = {"translated": build_translated_table, "refused": build_refused_table}
    for name, table in tables.items():
        before, after = f"<!-- table of docs/transform_table.py: {name} -->\n", "<!-- end of the table -->\n"
        head, old = page.split(before)
        _, tail = old.split(after, 1)
        page = f"{head}{before}\n{table()}\n\n{after}{tail}"
    return page


def group_translated_classes() -> list[list[type]]:
    """Return the classes with rules, grouped by name and package."""
    load_timm_rules()
    classes = sorted({*CONTAINERS, *RULES}, key=lambda cls: (_is_timm(cls), cls.__name__, _get_version(cls)))
    return [list(group) for _, group in itertools.groupby(classes, key=lambda cls: (_is_timm(cls), cls.__name__))]


def build_translated_table() -> str:
    rows = [("Transform", "Version", "Random parameters")]
    for classes in group_translated_classes():
        versions = ", ".join(_get_version(cls) for cls in classes)
        rows.append((f"`{classes[0].__name__}`", versions, describe_draws(classes[-1]) or "none"))
    return _format_table(rows)


def build_refused_table() -> str:
    rows = [("Transform", "Version", "Reason and next step")]
    rows += [(f"`{name}`", "torchvision", reason) for name, reason in sorted(REFUSED.items())]
    rows += [(f"`{name}`", "timm", reason) for name, reason in sorted(REFUSED_TIMM.items())]
    return _format_table(rows)


@functools.cache
def describe_draws(cls: type) -> str:
    """Return the random parameters of a class, and the functions that draw them."""
    arguments = TIMM_ARGUMENTS.get(cls.__name__, {}) if _is_timm(cls) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # v2.ToTensor is deprecated
        try:
            transform = cls(**(arguments or ARGUMENTS.get(cls.__name__, {})))
        except TypeError as error:
            raise TypeError(f"{error}: add {cls.__name__} to ARGUMENTS in docs/transform_table.py") from None
    to_float = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    starts = [START, START.then(v1.ToTensor()), START.through(to_float)]
    chain = next((chain for start in starts if start is not None and (chain := start.then(transform))), None)
    if chain is None:
        raise ValueError(f"{transform} with its ARGUMENTS is not supported")
    steps = chain.last_steps if cls in CONTAINERS else _iter_draws(chain.last_steps)
    return "; ".join(dict.fromkeys(step.params_doc for step in steps if step.params_doc))


def _iter_draws(steps: Branch) -> Iterator[Step]:
    """Iterate over steps like ``iter_steps``, except for the inner steps of one with constant parameters."""
    for step in steps:
        yield step
        for branch in (*getattr(step, "branches", ()), step.operations):
            if branch != (step,) and not isinstance(step, ConstantParams):
                yield from _iter_draws(branch)


def _is_timm(cls: type) -> bool:
    return cls.__module__.startswith("timm.")


def _get_version(cls: type) -> str:
    if _is_timm(cls):
        return "timm"
    return "v2" if cls.__module__.startswith("torchvision.transforms.v2") else "v1"


def _format_table(rows: Iterable[tuple[str, ...]]) -> str:
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)


def _escape(cell: str) -> str:
    """Escape Markdown's column separators and emphasis."""
    return re.sub(r"([|*]|_(?=_)|(?<=_)_)", r"\\\1", cell)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE} instead of printing the page")
    page = update_tables(PAGE.read_text())
    PAGE.write_text(page) if parser.parse_args().write else print(page, end="")
