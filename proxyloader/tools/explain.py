"""Explain each part of a transform: its random numbers, its DALI operators, and its closeness to torchvision."""

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
"""Width of ``str(explanation)``, in characters."""

LONGEST_POSITION = 24
"""Maximum length of a position that is shown in one line, in characters."""

LONGEST = 120
"""Maximum length of the ``repr`` of a transform, in characters."""


@dataclass(frozen=True)
class Row:
    """Translation of one transform.

    Attributes:
        position: position of the transform, such as ``transform.transforms[1]``. The last row is ``output``, and exists
            only if no transform is refused.
        transform: ``repr`` of the transform, in one line.
        drawn: the random numbers of each image, and the function of torchvision, torch or Python that draws them.
        operators: the DALI operators that it adds to the graph, by their names in ``fn``. If it adds none, later
            operators do its work, if there is any. None: not known, as DALI is not installed.
        closeness: bound of the difference from torchvision's pixels, in levels of 255.
        refusal: why it is not translated, and what to do instead; "" if it is translated. Later rows are computed as if
            it were left out.
    """

    position: str
    transform: str
    drawn: str = ""
    operators: tuple[str, ...] | None = ()
    closeness: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Explanation:
    """Translation of all parts of a transform, in the order in which they are applied.

    ``str()`` returns a table that is 120 characters wide.

    Attributes:
        rows: one row for each part.
        slow_on_cpu: whether the loader leaves the whole transform to torchvision without a GPU, as that is faster.
        holder: name of the class of an object that holds transforms and calls them in its own code, or "".
    """

    rows: tuple[Row, ...]
    slow_on_cpu: bool = False
    holder: str = ""

    @property
    def refused(self) -> tuple[Row, ...]:
        """The rows of parts that are refused. If there are none, the transform is translated."""
        return tuple(row for row in self.rows if row.refusal)

    def __rich__(self) -> Table:
        table = Table(caption=self._caption(), caption_justify="left", show_header=False)
        table.add_column(max_width=LONGEST_POSITION, overflow="fold", style="dim")
        table.add_column(ratio=1, overflow="fold")
        for row in self.rows:
            table.add_row(row.position, Text(row.transform, "bold"))
            if row.refusal:
                table.add_row("", Text(f"not translated: {row.refusal}", "red"), end_section=True)
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
        return (
            f"{several} not translated. What uses pixels torchvision does in the workers, with all that comes "
            "before it. Operations on tensors are recorded. What follows is shown as if without it."
        )


def explain(transform: Callable[..., Any]) -> Explanation:
    """Explain how each part of a torchvision transform is translated. ``print`` the result for a table.

    Args:
        transform: the ``transform`` of a dataset: a Compose (v1 or v2), which may be nested, a single transform, or an
            object that holds transforms in its attributes and calls them.

    Returns:
        An Explanation with a row for each part. A refused part has a row with the reason and what to do instead, and
        raises no error.
    """
    holder = type(transform).__name__ if is_holder(transform) else ""
    held = find_nested(transform) if holder else {"": transform}
    wholes = [translate(each, f"transform{at}") for at, each in held.items()]
    slow = any(step.slow_on_cpu for whole in wholes for step in iter_steps(whole.steps))
    return Explanation(tuple(row for whole in wholes for row in _rows_of(whole)), slow, holder)


def _rows_of(whole: Part) -> Iterator[Row]:
    """Yield the rows of all parts, and of the output if no part is refused."""
    device_id = 0 if torch.cuda.is_available() else None
    parts = list(whole.on_the_way())
    *operators, of_output = _operators([part.steps for part in parts], device_id)
    for part, names in zip(parts, operators):
        yield from _rows(part, names, device_id)
    if not any(part.refusal for part in whole):  # otherwise the output is not known
        yield _output(whole, of_output)


def _operators(branches: list[Branch], device_id: int | None) -> list[tuple[str, ...] | None]:
    """Return the operators of each branch, followed by those of the output. Each is None without DALI."""
    try:
        from ..dali.build import operators_of
    except MissingDaliError:
        return [None] * (len(branches) + 1)
    steps = [step for branch in branches for step in branch]
    found = iter(operators_of(tuple(steps), device_id) if steps else [[]])
    joined = [tuple(dict.fromkeys(name for _ in branch for name in next(found))) for branch in branches]
    return [*joined, tuple(next(found))]


def _rows(part: Part, operators: tuple[str, ...] | None, device_id: int | None) -> list[Row]:
    """Return the row of a part, and those of the parts that it holds and applies at random."""
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
    """Iterate over steps as ``iter_steps``, but not over the parts of a step with fixed parameters."""
    for step in steps:
        yield step
        for branch in (*getattr(step, "branches", ()), step.operations):
            if branch != (step,) and not isinstance(step, ConstantParams):
                yield from _drawing(branch)


def _drawn(steps: Iterable[Step]) -> str:
    return "; ".join(dict.fromkeys(step.params_doc for step in steps if step.params_doc))


def _closeness(steps: Branch) -> str:
    """Return the bound of each kind of step that is not exact, or that all are exact."""
    names: dict[Tolerance, list[str]] = {}
    for step in iter_steps(steps):
        if step.closeness not in (None, EXACT) and type(step).__name__ not in names.setdefault(step.closeness, []):
            names[step.closeness].append(type(step).__name__)
    return "; ".join(f"{', '.join(kinds)}: {closeness}" for closeness, kinds in names.items()) or str(EXACT)


def _in_one_line(part: Part) -> str:
    """Return the ``repr`` of a transform in one line, or its name if it holds others or has only the default repr."""
    shown = " ".join(repr(part.transform).split())
    if part.inside or " at 0x" in shown:
        return part.name
    if part.name.startswith(("v2.", "timm.")):
        shown = part.name.removesuffix(type(part.transform).__name__) + shown
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


# --- finding a transform by name --------------------------------------------------------------------------------------


def find(name: str) -> Any:
    """Return the transform of a name.

    Args:
        name: ``module:attribute``, where the attribute is a transform, or a function or class that returns one when
            called without arguments. Or the name of weights of torchvision, such as
            ``ResNet50_Weights.IMAGENET1K_V2``. Or a model, such as ``resnet50``, for its default weights. Nothing is
            downloaded.

    Raises:
        ValueError: the name does not exist, or importing or calling it fails. The error says which.
    """
    return _of_module(name) if ":" in name else _of_weights(name)


def _of_module(name: str) -> Any:
    module_name, _, path = name.partition(":")
    # ./train.py:transform is accepted as well
    module_name = module_name.removeprefix("./").removesuffix(".py").replace("/", ".")
    if not module_name.strip(".") or not path:
        raise ValueError(f"{name!r}: a module and an attribute of it are expected, such as train:transform")
    if os.getcwd() not in sys.path:  # `python -m` adds it, an installed command does not
        sys.path.insert(0, os.getcwd())
    found = _tried(f"importing {module_name!r}", importlib.import_module, module_name)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            near = _nearest(attribute, [each for each in dir(found) if not each.startswith("_")])
            place = (
                ' It must be at module level, not below `if __name__ == "__main__":`, or a function or class there '
                "that makes it without arguments"
            )
            raise ValueError(
                f"{name}: there is no {attribute!r} in {module_name!r}. {near}{place * inspect.ismodule(found)}"
            )
        found = getattr(found, attribute)
    if isinstance(found, torchvision.models.WeightsEnum):
        return found.transforms()
    if inspect.ismodule(found):
        raise ValueError(f"{name} is a module; a transform in it is expected, such as {name}.transform")
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
    """Call code of the user with an empty command line, and raise its errors as ValueError."""
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
