"""A training script, run with a loop of its own diagnosed."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader as StockLoader

from ...data.dataset import length_of
from ...loader.dataloader import DataLoader
from .diagnosis import Diagnosis
from .loop import DiagnosedLoop


class Ended(BaseException):
    """Ends the script when all is measured. No ``except Exception`` of the script holds it up."""


class Watch:
    """Watches all loaders of a script. The loop over the largest one is diagnosed, and then the script is ended.

    Loops over smaller ones go on as they are. So does a loop that is left early, as ``next(iter(loader))``; the next
    one is diagnosed then.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_busy = False
        self.looped_over: list[int | None] = []
        self.result: Diagnosis | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the loaders that are made and looped over meanwhile."""
        with ExitStack() as stack:
            for kind in (StockLoader, DataLoader):
                stack.enter_context(_replaced(kind, "__iter__", self._iter_of(kind.__iter__)))
            stack.enter_context(_replaced(StockLoader, "__init__", self._init_of(StockLoader.__init__)))
            yield

    def _init_of(self, init: Callable[..., None]) -> Callable[..., None]:
        def noted(loader: Any, *arguments: Any, **named: Any) -> None:
            init(loader, *arguments, **named)
            if not _is_inner(loader):
                self._loaders.add(loader)

        return noted

    def _iter_of(self, begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(loader: Any) -> Any:
            if self._is_busy or self.result is not None or _is_inner(loader) or not self._is_largest(loader):
                return begin(loader)
            return self._diagnosed(loader)

        return watched

    def _is_largest(self, loader: Any) -> bool:
        self.looped_over.append(length_of(loader.dataset))
        return _samples(loader) >= max(map(_samples, self._loaders), default=0.0)  # it may be a copy of one

    def _diagnosed(self, loader: Any) -> Iterator[Any]:
        dataset = type(loader.dataset).__name__
        print(f"proxyloader: measures the loop over {dataset} for about {self._seconds:g} s", file=sys.stderr)
        self._is_busy = True  # until it ends, all loops are those of the diagnosis, or within the loop
        try:
            with DiagnosedLoop(loader, self._seconds) as loop:
                yield from loop
                self.result = loop.result
        finally:
            self._is_busy = False
        raise Ended


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _is_inner(loader: Any) -> bool:
    """Whether it is the loader of torch inside one of ours."""
    return type(loader).__module__.startswith("proxyloader.workers.")


def _samples(loader: Any) -> float:
    length = length_of(loader.dataset)
    return float("inf") if length is None else length


def diagnosed_script(script: Path, arguments: Sequence[str], seconds: float) -> Diagnosis:
    """Run a script, as ``python script arguments`` does, until the loop over its largest loader is diagnosed.

    Raises:
        FileNotFoundError: there is no such script.
        SystemExit: the script has ended by it, or by an error, which is printed.
        ValueError: the script has ended without that loop.
    """
    script.open().close()
    watch = Watch(seconds)
    path = os.path.abspath(script)  # Python's __file__ is absolute
    as_pythons = {"argv": [str(script), *arguments], "path": [str(script.parent), *sys.path]}
    with ExitStack() as stack:
        for name, value in as_pythons.items():
            stack.enter_context(_replaced(sys, name, value))
        try:
            with watch.watching():
                runpy.run_path(path, run_name="__main__")
        except Ended:
            pass
        except Exception as error:
            traceback.print_exception(type(error), error, _frames_of(path, error))
            raise SystemExit(1) from None
    gc.collect()  # the frames of the script, and with them its workers
    if watch.result is None:
        raise ValueError(f"{script} {_reason(watch)}. In a loop of your own, use proxyloader.diagnosis(loader)")
    return watch.result


def _frames_of(script: str, error: Exception) -> TracebackType | None:
    """Return the frames of an error without those before the script's; none of a script that Python cannot read."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__


def _reason(watch: Watch) -> str:
    if not watch.looped_over:
        return "looped over no DataLoader of torch or proxyloader in its own process"
    sizes = ", ".join(sorted(set(map(str, watch.looped_over))))
    return (
        "has ended before the loop over its largest DataLoader was diagnosed, or has left it early: it began "
        f"{len(watch.looped_over)} loops, over datasets of these sizes: {sizes}"
    )
