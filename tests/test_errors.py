"""The errors' codes and fields: which there are, and that they are the same in another process."""

from __future__ import annotations

import ast
import copy
import pickle
from errno import EMFILE, ENOENT
from typing import Any

import pytest

import proxyloader
from proxyloader import ImageError, InputError, MissingImageError, ProxyLoaderError

from .imports import PACKAGE

PUBLIC = [getattr(proxyloader, name) for name in proxyloader.__all__]
CLASSES = {each.__name__: each for each in PUBLIC if isinstance(each, type) and issubclass(each, ProxyLoaderError)}

ERRORS: dict[str, ProxyLoaderError] = {
    "base": ProxyLoaderError("why"),
    "image": ImageError("why", code="machine", index=3, path="a.jpg", reason="r", errno=EMFILE),
    "missing image": MissingImageError("why", code="unreadable", index=3, path="a.jpg", reason="r", errno=ENOENT),
    "unidentified": proxyloader.ForeignImageError("why", index=4, path="b.jpg"),
    "large": proxyloader.LargeImageError("why", code="too-large", index=(1, 2), path="c.jpg"),
    "input": InputError("why", code="wrong-mode", index=5),
    "pipeline": proxyloader.PipelineError("why", code="taken", indices=[4, 5]),
    "missing DALI": proxyloader.MissingDaliError("why"),
}


def seen(error: ProxyLoaderError) -> dict[str, Any]:
    return {"message": str(error), "args": error.args, "errno": getattr(error, "errno", None), **vars(error)}


def test_every_code_that_is_raised_is_one_of_its_class_and_none_is_there_for_nothing() -> None:
    calls = [
        node
        for module in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES
    ]
    raised = {
        (call.func.id, keyword.value.value)  # type: ignore[attr-defined]
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }
    assert raised
    assert [(name, code) for name, code in raised if code not in CLASSES[name].CODES] == []
    text = "\n".join(module.read_text() for module in PACKAGE.rglob("*.py") if module.name != "errors.py")
    others = [code for cls in CLASSES.values() for code in list(cls.CODES)[1:]]
    assert [code for code in others if f'"{code}"' not in text] == []


def test_the_usual_code_needs_no_word() -> None:
    assert {type(error) for error in ERRORS.values()} == set(CLASSES.values())
    assert [ImageError("x").code, InputError("x").code] == ["undecodable", "wrong-input"]
    assert InputError("x", code="wrong-mode").code == "wrong-mode"


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copied", "sent"])
def test_code_and_fields_stay(error: ProxyLoaderError, again: Any) -> None:
    found = again(error)
    assert type(found) is type(error)
    assert seen(found) == seen(error)


def test_a_place_stands_before_the_message_and_the_rest_stays() -> None:
    error = ERRORS["image"]
    located = error.at("dataset[7]", index=7)
    assert seen(located) == seen(error) | {"message": "dataset[7]: why", "args": ("dataset[7]: why",), "index": 7}
    assert str(error) == "why"
