"""``explain``: the random numbers that each part of a transform draws, and what runs it."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torchvision.models


class Explanation: ...


def explain(transform: Any) -> Any:
    raise NotImplementedError


def explain_named(name: str) -> int:
    raise NotImplementedError


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
