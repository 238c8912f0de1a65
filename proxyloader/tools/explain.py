"""Explain a transform part by part: what is sampled, which DALI operators do it, how close it is."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchvision.models
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import MissingDaliError, UnsupportedTransformError
from ..transforms.nested import find_nested
from ..transforms.plan import EXACT, Branch, ConstantParams, Step, Tolerance, iter_steps, plan_of
from ..transforms.registry import Part, is_holder, translate

WIDTH = 120
"""Of ``str(explanation)``, in characters."""

LONGEST_POSITION = 24
"""That is shown in one line, in characters."""

LONGEST = 120
"""Most characters of a transform's own words."""


@dataclass(frozen=True)
class Row:
    """What becomes of one transform.

    Attributes:
        position: where it stands, such as ``transform.transforms[1]``; ``output`` for the last row, which is there
            where nothing before it is refused.
        transform: what stands there, as it shows itself, in one line.
        drawn: which numbers are drawn for each image, and which function of torchvision, torch or Python draws them.
        operators: the DALI operators that join the graph with it, by their names in ``fn``. Where there are none, later
            ones do its work, if there is any. None: not known, as DALI is not installed.
        closeness: how far the pixels may be from torchvision's, in levels of 255.
        refusal: why it is not translated, and what to do; "" where it is. The rows after it stand as if it were left
            out.
    """

    position: str
    transform: str
    drawn: str = ""
    operators: tuple[str, ...] | None = ()
    closeness: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Explanation:
    """The rows in the order of the images' way. ``str()`` draws them one below the other, 120 characters wide.

    Attributes:
        rows: one for each part.
        slow_on_cpu: without a GPU the loader leaves all of it to torchvision, which is faster at it there.
        holder: the class of an object that holds transforms and calls them, as its own code says; "" where there is
            none.
    """

    rows: tuple[Row, ...]
    slow_on_cpu: bool = False
    holder: str = ""

    @property
    def refused(self) -> tuple[Row, ...]:
        """The rows for which the loader refuses the transform; none: it is translated."""
        return tuple(row for row in self.rows if row.refusal)

    def __rich__(self) -> Table:
        table = Table(caption=self._caption(), caption_justify="left", show_header=False)
        table.add_column(max_width=LONGEST_POSITION, overflow="fold", style="dim")
        table.add_column(ratio=1, overflow="fold")
        for row in self.rows:
            table.add_row(row.position, Text(row.transform, "bold"))
            if row.refusal:
                table.add_row("", Text(f"refused: {row.refusal}", "red"), end_section=True)
                continue
            names = ("not known: DALI is missing",) if row.operators is None else row.operators
            table.add_row("drawn for each image", Text(row.drawn or "nothing"))
            table.add_row("DALI operators", Text(", ".join(names) or "none of its own"))
            table.add_row("off, in levels of 255", Text(row.closeness), end_section=True)
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def _caption(self) -> str:
        if not self.refused:
            on_cpu = " (Without a GPU torchvision does all of it, in the workers: it is faster at some of this there.)"
            views = f" {self.holder} says how often it is called; each time gives an image." if self.holder else ""
            return "It is translated." + views + (on_cpu if self.slow_on_cpu else "")
        if [row.transform for row in self.refused] == ["None"]:
            return "There is none: DataLoader loads a dataset without a transform as torch.utils.data.DataLoader does."
        several = f"{len(self.refused)} parts are" if len(self.refused) > 1 else "One part is"
        return f"{several} refused, so DataLoader raises UnsupportedTransformError. The rest as if left out."


def explain(transform: Callable[..., Any]) -> Explanation:
    """Say what becomes of each part of a torchvision transform; ``print`` it for a table.

    Args:
        transform: what ``dataset.transform`` is: a Compose (v1 or v2), nested at will, one transform, or an object that
            holds such in its attributes and calls them.

    Returns:
        An Explanation, whose ``rows`` are one for each part, those that are refused too, with the reason and what to
        do. Nothing is raised for them.
    """
    holder = type(transform).__name__ if is_holder(transform) else ""
    held = find_nested(transform) if holder else {"": transform}
    wholes = [translate(each, f"transform{at}") for at, each in held.items()]
    slow = any(step.slow_on_cpu for whole in wholes for step in iter_steps(whole.steps))
    return Explanation(tuple(row for whole in wholes for row in _rows_of(whole)), slow, holder)


def _rows_of(whole: Part) -> Iterator[Row]:
    """Of all its parts, and of what comes out."""
    device_id = 0 if torch.cuda.is_available() else None
    parts = list(whole.on_the_way())
    *operators, of_output = _operators([part.steps for part in parts], device_id)
    for part, names in zip(parts, operators):
        yield from _rows(part, names, device_id)
    if not any(part.refusal for part in whole):  # else nobody knows what comes out
        yield _output(whole, of_output)


def _operators(branches: list[Branch], device_id: int | None) -> list[tuple[str, ...] | None]:
    """Those of each branch, and those of the output."""
    try:
        from ..dali.build import operators_of
    except MissingDaliError:
        return [None] * (len(branches) + 1)
    steps = [step for branch in branches for step in branch]
    found = iter(operators_of(tuple(steps), device_id) if steps else [[]])
    joined = [tuple(dict.fromkeys(name for _ in branch for name in next(found))) for branch in branches]
    return [*joined, tuple(next(found))]


def _rows(part: Part, operators: tuple[str, ...] | None, device_id: int | None) -> list[Row]:
    """Of a part and of those that it holds, among which chance decides."""
    inside: list[Row] = []
    for each in itertools.chain.from_iterable(each.on_the_way() for each in part.inside):
        inside += _rows(each, _operators_of_branch(each, device_id), device_id)
    shown = _in_one_line(part)
    if part.refusal:
        return [Row(part.position, shown, refusal=part.refusal), *inside]
    if not inside:
        return [Row(part.position, shown, _drawn(_drawing(part.steps)), operators, _closeness(part.steps))]
    of_those = {name for row in inside for name in row.operators or ()} - {"split", "merge"}
    its_own = None if operators is None else tuple(name for name in operators if name not in of_those)
    return [Row(part.position, shown, _drawn(part.steps), its_own, "as what it holds"), *inside]


def _operators_of_branch(part: Part, device_id: int | None) -> tuple[str, ...] | None:
    try:
        from ..dali.build import operators_of_branch
    except MissingDaliError:
        return None
    return tuple(operators_of_branch(part.steps, part.state, device_id))


def _output(whole: Part, operators: tuple[str, ...] | None) -> Row:
    try:
        state = plan_of(whole.steps).output
    except UnsupportedTransformError as error:
        return Row("output", "a PIL image", refusal=str(error))
    height, width = state.size or ("H", "W")
    shown = f"{state.dtype} ({state.channels}, {height}, {width})"
    shown = shown if state.images == 1 else f"{state.images} images, each {shown}"
    return Row("output", shown, "", operators, str(EXACT))


def _drawing(steps: Branch) -> Iterator[Step]:
    """As ``iter_steps``, but what a step with fixed numbers is made of draws none."""
    for step in steps:
        yield step
        for branch in (*getattr(step, "branches", ()), step.operations):
            if branch != (step,) and not isinstance(step, ConstantParams):
                yield from _drawing(branch)


def _drawn(steps: Iterable[Step]) -> str:
    return "; ".join(dict.fromkeys(step.params_doc for step in steps if step.params_doc))


def _closeness(steps: Branch) -> str:
    """Of each kind of step that is not exact."""
    names: dict[Tolerance, list[str]] = {}
    for step in iter_steps(steps):
        if step.closeness not in (None, EXACT) and type(step).__name__ not in names.setdefault(step.closeness, []):
            names[step.closeness].append(type(step).__name__)
    return "; ".join(f"{', '.join(kinds)}: {closeness}" for closeness, kinds in names.items()) or str(EXACT)


def _in_one_line(part: Part) -> str:
    """As the transform shows itself; where it holds others, or says nothing of itself, by its name alone."""
    shown = " ".join(repr(part.transform).split())
    if part.inside or " at 0x" in shown:
        return part.name
    if part.name.startswith(("v2.", "timm.")):
        shown = part.name.removesuffix(type(part.transform).__name__) + shown
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


# --- the transform that a name stands for -----------------------------------------------------------------------------


def find(name: str) -> Any:
    """The transform of a name.

    Args:
        name: ``module:attribute``, where the attribute is a transform, or a function or class that makes one when
            called without arguments; or of weights of torchvision, as ``ResNet50_Weights.IMAGENET1K_V2``, or of a
            model, ``resnet50``, for those weights that are its default. Nothing is downloaded.

    Raises:
        ValueError: there is no such thing, or it fails when it is imported or called; says where.
    """
    return _of_module(name) if ":" in name else _of_weights(name)


def _of_module(name: str) -> Any:
    module_name, _, path = name.partition(":")
    # ./train.py:transform is meant well
    module_name = module_name.removeprefix("./").removesuffix(".py").replace("/", ".")
    if not module_name.strip(".") or not path:
        raise ValueError(f"{name!r}: a module and an attribute of it are expected, such as train:transform")
    if os.getcwd() not in sys.path:  # a command that is installed does not look there, as `python -m` does
        sys.path.insert(0, os.getcwd())
    found = _tried(f"importing {module_name!r}", importlib.import_module, module_name)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            near = _nearest(attribute, [each for each in dir(found) if not each.startswith("_")])
            raise ValueError(f"{name}: there is no {attribute!r} in {module_name!r}. {near}")
        found = getattr(found, attribute)
    if isinstance(found, torchvision.models.WeightsEnum):
        return found.transforms()
    makes_one = inspect.isroutine(found) or inspect.isclass(found) or isinstance(found, functools.partial)
    return _tried(f"calling {path}()", found) if makes_one else found


def _of_weights(name: str) -> Any:
    if "." in name or name.endswith("_Weights"):
        cls, _, member = name.partition(".")
        member = member or "DEFAULT"
        enums = {
            each.__name__: each for each in map(torchvision.models.get_model_weights, torchvision.models.list_models())
        }
        if cls in enums and member in enums[cls].__members__:
            return enums[cls][member].transforms()
        known = [f"{each}.{entry}" for each in enums for entry in enums[each].__members__]
    else:
        known = torchvision.models.list_models()
        if name in known:
            return torchvision.models.get_model_weights(name).DEFAULT.transforms()
    raise ValueError(
        f"torchvision has no weights or model {name!r}. {_nearest(name, known)} "
        "For a transform of your own: module:attribute, such as train:transform"
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"There is {', '.join(near)}." if near else "Nothing there is spelled alike."


def _tried(doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What the user's own code gives; whatever it raises becomes a ValueError. It sees no command line."""
    ours, sys.argv = sys.argv, sys.argv[:1]
    try:
        return call(*arguments)
    except SystemExit as error:
        raise ValueError(
            f"{doing} ended the program (SystemExit: {error}). What a script does when it is run, its command line "
            'above all, belongs behind `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ValueError(f"{doing} failed with {type(error).__name__}: {error}") from error
    finally:
        sys.argv = ours
