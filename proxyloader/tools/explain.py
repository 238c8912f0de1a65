"""``explain``: the random numbers that each part of a transform draws, and what runs it."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torchvision.models
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import UnsupportedTransformError
from ..kernels.support import explain_obstacle
from ..transforms.nested import find_nested
from ..transforms.plan import Branch, ConstantParams, Step, plan_of
from ..transforms.registry import Part, is_holder, translate
from .files import as_text

MAX_REPR = 120  # maximum length of the ``repr`` of a transform


@dataclass(frozen=True)
class Row:
    """Translation of one transform.

    Attributes:
        position: such as ``transform.transforms[1]``. The last row is ``output``, if the whole transform is translated.
        transform: its ``repr`` in one line.
        drawn: random numbers drawn per image, and the function that draws them.
        refusal: why it is not translated, and an alternative; "" if it is. Later rows ignore it.
    """

    position: str
    transform: str
    drawn: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Explanation:
    """Translation of all parts of a transform, in the order of their application. ``str()`` returns a table.

    Attributes:
        rows: one row per part.
        on_gpu: why torchvision runs the transform in the workers on a GPU; "" if kernels run it.
        on_cpu: the same without a GPU; "" if DALI runs it.
        holder: class name of an object that calls the transforms itself, or "".
    """

    rows: tuple[Row, ...]
    on_gpu: str = ""
    on_cpu: str = ""
    holder: str = ""

    @property
    def refused(self) -> tuple[Row, ...]:
        """Rows of the parts that are not translated."""
        return tuple(row for row in self.rows if row.refusal)

    def __rich__(self) -> Table:
        table = Table(caption=self._caption(), caption_justify="left", show_header=False)
        table.add_column(max_width=24, overflow="fold", style="dim")
        table.add_column(ratio=1, overflow="fold")
        for row in self.rows:
            table.add_row(row.position, Text(row.transform, "bold"))
            if row.refusal:
                table.add_row("", Text(f"not translated: {row.refusal}", "red"), end_section=True)
                continue
            table.add_row("drawn for each image", Text(row.drawn or "nothing"), end_section=True)
        return table

    def __str__(self) -> str:
        return as_text(self)

    def _caption(self) -> str:
        if [row.transform for row in self.refused] == ["None"]:
            return "No transform: DataLoader loads such a dataset as torch.utils.data.DataLoader does."
        if self.refused:
            return (
                f"{len(self.refused)} part(s) are not translated. If they use pixels, they run in the workers, with "
                "all preceding parts. Tensor operations are recorded. Later rows are shown as if without them."
            )
        views = f" {self.holder} calls its transforms itself; each call gives an image." if self.holder else ""
        kernels = "CUDA kernels run it; pixels equal torchvision's, except for those of the decoder"
        dali = "DALI runs it; docs/fidelity.md bounds the differences of a resize"
        torchvision = "torchvision transforms the images in the workers: "
        return (
            f"It is translated.{views} On a GPU, {torchvision + self.on_gpu if self.on_gpu else kernels}. "
            f"Without a GPU, {torchvision + self.on_cpu if self.on_cpu else dali}."
        )


def explain(transform: Callable[..., Any]) -> Explanation:
    """Explain how each part of a torchvision transform is translated. ``print`` the result for a table.

    Args:
        transform: transform of a dataset: a Compose (v1 or v2), possibly nested, a single transform, or an object with
            transforms in its attributes.

    Returns:
        An Explanation with one row per part. Parts that are not translated do not raise an error; their rows give the
        reason.
    """
    holder = type(transform).__name__ if is_holder(transform) else ""
    nested = find_nested(transform) if holder else {"": transform}
    roots = [translate(inner, f"transform{suffix}") for suffix, inner in nested.items()]
    on_gpu, on_cpu = (
        next(filter(None, (explain_obstacle(root, has_kernels) for root in roots)), "") for has_kernels in (True, False)
    )
    return Explanation(tuple(row for root in roots for row in _explain_root(root)), on_gpu, on_cpu, holder)


def explain_named(name: str) -> int:
    """Print the table for a named transform. Return the exit status: 1 if a part is not translated."""
    explanation = explain(find(name))
    Console().print(explanation)
    return 1 if explanation.refused else 0


def _explain_root(root: Part) -> Iterator[Row]:
    """Yield the rows of all parts, and of the output if all parts are translated."""
    for part in root.on_the_way():
        yield from _explain_part(part)
    if root.refused:  # the output is unknown
        return
    try:
        state = plan_of(root.steps).output
    except UnsupportedTransformError as error:
        yield Row("output", "a PIL image", refusal=str(error))
        return
    height, width = state.size or ("H", "W")
    images = f"{state.images} images, each " if state.images > 1 else ""
    yield Row("output", f"{images}{state.dtype} ({state.channels}, {height}, {width})")


def _explain_part(part: Part) -> Iterator[Row]:
    """Yield the row of a part, and those of the parts that it applies at random."""
    shown, has_parts = _one_line(part), bool(part.inside)
    draws = "" if part.refusal else _describe_draws(part.steps if has_parts else _iter_draws(part.steps))
    yield Row(part.position, shown, draws, part.refusal)
    for inner in itertools.chain.from_iterable(branch.on_the_way() for branch in part.inside):
        yield from _explain_part(inner)


def _iter_draws(steps: Branch) -> Iterator[Step]:
    """Iterate over steps like ``iter_steps``, except for the inner steps of one with constant parameters."""
    for step in steps:
        yield step
        for branch in (*getattr(step, "branches", ()), step.operations):
            if branch != (step,) and not isinstance(step, ConstantParams):
                yield from _iter_draws(branch)


def _describe_draws(steps: Iterable[Step]) -> str:
    return "; ".join(dict.fromkeys(step.params_doc for step in steps if step.params_doc))


def _one_line(part: Part) -> str:
    """Return the ``repr`` of a transform in one line, or its name if it has inner transforms or no ``__repr__``."""
    shown = " ".join(repr(part.transform).split())
    if part.inside or " at 0x" in shown:
        return part.name
    if part.name.startswith(("v2.", "timm.")):
        shown = part.name.removesuffix(type(part.transform).__name__) + shown
    return shown if len(shown) <= MAX_REPR else f"{shown[: MAX_REPR - 3]}..."


def find(name: str) -> Any:
    """Return a transform by name: ``module:attribute``, torchvision weights, or a torchvision model for its default
    weights. Downloads nothing. Calls a function or class without arguments.

    Raises:
        ValueError: the name does not exist, or importing or calling it fails.
    """
    if ":" not in name:
        return _find_weights(name)
    module, _, path = name.partition(":")
    if os.path.isabs(module):
        folder, module = os.path.split(module)
        sys.path.insert(0, folder)
    module = module.removeprefix("./").removesuffix(".py").replace("/", ".")  # also accept ./train.py:transform
    if not module.strip(".") or not path:
        raise ValueError(f"name must be module:attribute, such as train:transform, got {name!r}")
    if os.getcwd() not in sys.path:  # as with python -m
        sys.path.insert(0, os.getcwd())
    obj = _call(f"importing {module!r}", importlib.import_module, module)
    for attribute in path.split("."):
        if not hasattr(obj, attribute):
            hint = _suggest(attribute, [name for name in dir(obj) if not name.startswith("_")])
            advice = ' It must be at module level, not below `if __name__ == "__main__":`' * inspect.ismodule(obj)
            raise ValueError(f"{name}: {module!r} has no attribute {attribute!r}.{hint}{advice}")
        obj = getattr(obj, attribute)
    if inspect.ismodule(obj):
        raise ValueError(f"{name} is a module, not a transform. Name one in it, such as {name}.transform")
    if isinstance(obj, torchvision.models.WeightsEnum):
        return obj.transforms()
    is_factory = inspect.isroutine(obj) or inspect.isclass(obj) or isinstance(obj, functools.partial)
    return _call(f"calling {path}()", obj) if is_factory else obj


def _find_weights(name: str) -> Any:
    models = {model: torchvision.models.get_model_weights(model) for model in torchvision.models.list_models()}
    weights = {f"{enum.__name__}.{entry}": enum[entry] for enum in models.values() for entry in enum.__members__}
    defaults = {key: enum.DEFAULT for model, enum in models.items() for key in (model, enum.__name__)}
    if obj := (weights | defaults).get(name):
        return obj.transforms()
    hint = _suggest(name, [*weights] if "." in name or name.endswith("_Weights") else [*models])
    advice = "Name your own as module:attribute, such as train:transform"
    raise ValueError(f"torchvision has no model or weights {name!r}.{hint} {advice}")


def _suggest(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _call(action: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call user code with an empty command line, and convert its errors to ValueError."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        return call(*arguments)
    except SystemExit as error:
        raise ValueError(
            f"{action} exited with {error}. Code that runs a script, such as the parsing of its command line, belongs "
            'below `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ValueError(f"{action} failed with {type(error).__name__}: {error}") from error
    finally:
        sys.argv = argv
