"""Hooks: the places of Pillow, torchvision and timm where an undecoded image is met. Runs where the dataset runs.

NOTE [ Intercepted transform calls ]
While images stay undecoded, ``Image.open`` returns an undecoded image for a JPEG, ``torchvision.io`` a LazyTensor, and
``__call__`` of the classes that are translated is exchanged. A transform that is called on an undecoded image draws its
parameters, and returns an undecoded image or tensor. Each further transform goes on with that, so a Compose need not be
known. A transform that is not translated gets the image as it is, and what it does with the pixels is done to those of
the stock loader.

The hooks are installed while a Deferral holds them: in a worker until it gives up, in the main process while a loader
without workers defers. There they do nothing outside of the thread that fetches a batch.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .called_transforms import call_patches
from .deferral import Deferral
from .lazy_decoding import operator_patches
from .lazy_image import patch_opener

_lock = threading.RLock()
_holders: weakref.WeakSet[Deferral] = weakref.WeakSet()  # of this process, whose classes the hooks are in
_undo: list[Callable[[], None]] = []


def hold(deferral: Deferral) -> None:
    """Install the hooks, unless they are installed, until the deferral releases them or is gone."""
    with _lock:
        if not _is_held():
            _undo.append(patch_opener())
            exchanged = [*operator_patches(), *call_patches()]  # all of them first: a class may inherit another's
            for each in exchanged:
                _undo.append(_exchanged(*each))
        _holders.add(deferral)
        weakref.finalize(deferral, _undo_unless_held).atexit = False


def release(deferral: Deferral) -> None:
    with _lock:
        _holders.discard(deferral)
        _undo_unless_held()


def _is_held() -> bool:
    return any(True for _ in _holders)  # whose length counts those that are gone


def _exchanged(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Set an attribute. Return a function that undoes it, unless somebody else has set another one since."""
    was_inherited, before = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if was_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def _undo_unless_held() -> None:
    with _lock:
        while _undo and not _is_held():
            _undo.pop()()


def _forget_parent() -> None:
    """A forked child begins without the parent's deferrals."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    _holders.clear()
    _undo_unless_held()


os.register_at_fork(after_in_child=_forget_parent)
