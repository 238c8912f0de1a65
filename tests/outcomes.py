"""What a loop meets, batch by batch, errors among it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import pytest

from proxyloader import ProxyLoaderError

E = TypeVar("E", bound=ProxyLoaderError)


@contextlib.contextmanager
def raises(kind: type[E], **fields: Any) -> Iterator[pytest.ExceptionInfo[E]]:
    """As ``pytest.raises``, of one of this package's errors with these fields, such as ``code="no-tensor"``."""
    with pytest.raises(kind) as caught:
        yield caught
    found, message = {name: getattr(caught.value, name) for name in fields}, str(caught.value)
    del caught  # this frame is among those that the exception came through
    assert found == fields, f"{found}: {message}"


def outcomes(batches: Iterable[Any]) -> list[Any]:
    """Every batch, and in the place of one that failed its exception, without the frames that it came through."""
    found: list[Any] = []
    iterator = iter(batches)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(without_frames(error))


def without_frames(error: BaseException) -> BaseException:
    """A kept exception keeps the frames it came through, and with them the loader and its workers."""
    chain = [error]
    for each in chain:
        each.__traceback__ = None
        chain += [more for more in (each.__cause__, each.__context__) if more is not None and more not in chain]
    return error
