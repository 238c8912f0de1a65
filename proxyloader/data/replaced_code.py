"""Replace the code of functions of other packages, because other modules may have imported these by their names."""

import functools
import logging
import pkgutil
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from ..errors import ImageError
from .deferral import active

log = logging.getLogger(__name__)

PACKAGES = frozenset({"PIL", "torchvision", "torchcodec"})


def find(*names: str) -> dict[str, Any]:
    """Return the objects with these names, such as "PIL.Image:new". Log the names that the installed versions lack."""
    found = {}
    for name in names:
        try:
            found[name] = pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            log.info("the installed packages have no %s, so images that need it are decoded in the workers", name)
    return found


def unless_handled(call: Callable[..., Any], handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``handle(call, ...)`` while calls are recorded. If this fails, it calls ``call``."""

    @functools.wraps(call)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if active() is not None:
            try:
                result = handle(call, *args, **kwargs)
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, ImageError):
                    raise  # Pillow could not load an image; if it is loaded again, Pillow returns it without pixels
                result = NotImplemented
            if result is not NotImplemented:
                return result
        return call(*args, **kwargs)

    return hooked


def code_patches(handlers: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements with which functions, by their names for ``find``, call ``unless_handled``."""
    for name, function in find(*handlers).items():
        yield from replacements(function, unless_handled(original(function), handlers[name]))


def kernel_patches(cls: type, handlers: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield v2's registry of each function in ``handlers``, by name, the class, and the replacement of its kernel."""
    for registry in find("torchvision.transforms.v2.functional._utils:_KERNEL_REGISTRY").values():
        for function, kernels in registry.items():
            if function.__name__ in handlers and cls in kernels:
                yield kernels, cls, unless_handled(kernels[cls], handlers[function.__name__])


def replacements(function: Any, hook: Callable[..., Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, name and replacement of each attribute with which a function calls ``hook``.

    ``torch.jit.script`` compiles the function that ``hook`` wraps.
    """
    if is_plain(function):
        yield function, "__code__", _code_of(hook)
        if function.__module__.startswith("torchvision."):
            yield function, "__script_if_tracing_wrapper", True
            yield function, "__original_fn", hook.__wrapped__  # type: ignore[attr-defined]


def is_plain(function: Any) -> bool:
    """Return whether to replace the code of a function: not if other code has wrapped or replaced the function."""
    is_plain = isinstance(function, FunctionType) and not function.__closure__
    return is_plain and function.__module__.partition(".")[0] in PACKAGES


def original(function: Any) -> Any:
    """Return a function that keeps its code when that of the given one is replaced."""
    if not is_plain(function):
        return function
    kept = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    functools.update_wrapper(kept, function)
    del kept.__wrapped__  # type: ignore[attr-defined]  # ``torch.jit.script`` would read the replaced code
    kept.__kwdefaults__ = function.__kwdefaults__
    return kept


def _code_of(hook: Callable[..., Any]) -> CodeType:
    """Return the code of a function that calls ``hook``, which is one of its constants."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        hook = "hook"
        return hook(*args, **kwargs)  # type: ignore[operator]

    code = hooked.__code__
    return code.replace(co_consts=tuple(hook if each == "hook" else each for each in code.co_consts))
