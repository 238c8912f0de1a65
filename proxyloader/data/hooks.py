"""Install and remove the hooks in Pillow, torchvision and timm. Runs where the dataset runs.

NOTE [ Intercepted transform calls ]
While images stay undecoded, ``Image.open`` returns an undecoded image for a JPEG, and ``torchvision.io`` a LazyTensor.
Calling a transform with a rule on it samples its parameters and returns an undecoded image or tensor, which the next
transform extends. Other transforms run, and their calls are recorded: NOTE [ Recorded calls ] in ``pillow_calls.py``.

The hooks stay installed while a Deferral holds them: in a worker until deferring stops, and in the main process while a
loader without workers defers. There, they affect only the thread that fetches batches.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .called_transforms import call_patches
from .deferral import Deferral, deferring
from .lazy_decoding import decoder_patches
from .lazy_image import opener_patches
from .lazy_mask import mask_patches
from .pillow_calls import pillow_patches
from .tensor_calls import tensor_patches

_lock = threading.RLock()
_holders: weakref.WeakSet[Deferral] = weakref.WeakSet()  # process-wide, because the hooks are set on classes
_undo: list[Callable[[], None]] = []
_INHERITED = object()


def hold(deferral: Deferral) -> None:
    """Install the hooks until the deferral releases them or is garbage-collected."""
    with _lock:
        is_first = not list(_holders)  # its length includes garbage-collected objects
        _holders.add(deferral)  # at once, because the finalizer of an earlier one may run meanwhile
        if is_first:
            # Before installing any, because classes inherit from each other.
            patches = [*opener_patches(), *decoder_patches(), *pillow_patches(), *tensor_patches(), *call_patches()]
            _undo.extend(_patch(*each) for each in (*patches, *mask_patches()))
        weakref.finalize(deferral, _undo_unless_held).atexit = False


def release(deferral: Deferral) -> None:
    with _lock:
        _holders.discard(deferral)
        _undo_unless_held()


@contextlib.contextmanager
def deferred(deferral: Deferral) -> Iterator[None]:
    """Defer decoding in this thread."""
    was_held = deferral in _holders
    hold(deferral)
    try:
        with deferring(deferral):
            yield
    finally:
        if not was_held:
            release(deferral)


def _patch(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Set an attribute, or an item. Return a function that restores it, unless other code has replaced it since."""
    if isinstance(owner, dict):
        item, owner[name] = owner[name], replacement
        return lambda: None if owner.get(name) is not replacement else owner.update({name: item})
    previous = owner.__code__ if name == "__code__" else vars(owner).get(name, _INHERITED)
    setattr(owner, name, replacement)

    def undo() -> None:
        if getattr(owner, name) is replacement:
            if previous is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

    return undo


def _undo_unless_held() -> None:
    with _lock:
        while _undo and not list(_holders):
            _undo.pop()()


def _reset_in_child() -> None:
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    _holders.clear()
    _undo_unless_held()


os.register_at_fork(after_in_child=_reset_in_child)
