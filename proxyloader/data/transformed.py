"""Transformed: an image that is not decoded, and the transforms that were called on it. Runs where the dataset runs."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._random_state import drawing_from, states_now
from ..transforms.chain import START, START_AS_GREY, Chain
from ..transforms.plan import ParamRow, Plan, Size
from .encoded_image import EncodedImage
from .placeholders import ProxyInputs

Calls = tuple[tuple[Any, ...], "tuple[Any, ...] | None"]
"""Transforms that were called together, and the states of the generators before the first; None: they draw nothing."""


LIBRARIES = frozenset({"proxyloader", "torch", "torchvision", "PIL", "numpy"}) | sys.stdlib_module_names
"""Modules that use pixels because other code tells them to."""


class _PixelUses(threading.local):
    """How often this thread has decoded an image that was to be decoded late, and why.

    Without workers, loaders of several threads read in one process. A thread that the dataset starts counts apart.

    Attributes:
        why: why the first image of this batch was decoded, with "file:line" of the code outside of ``LIBRARIES`` that
            used its pixels; "" if that is not known, None if no image was decoded yet.
    """

    count: int = 0
    why: str | None = None

    def note(self) -> None:
        self.count += 1
        self.note_line()

    def note_why(self, why: str) -> None:
        if self.why is None:
            self.why = why

    def note_line(self) -> None:
        if self.why is None:  # once for a batch, as to look takes longer than to count
            line = _line_of_the_user()
            self.why = f"pixels are used at {line}" if line else ""


pixel_uses = _PixelUses()


def _line_of_the_user() -> str:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(("proxyloader.workers", "proxyloader.loader")):
            break  # what follows is the training loop, which asked for a batch and not for pixels
        if name.split(".")[0] not in LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


_in_thread = threading.local()


def is_making_values() -> bool:
    """Return whether this thread makes the values of an image, so that transforms are to do what they do without us."""
    return getattr(_in_thread, "is_on", False)


@contextlib.contextmanager
def _making_values() -> Iterator[None]:
    before, _in_thread.is_on = is_making_values(), True
    try:
        yield
    finally:
        _in_thread.is_on = before


class Transformed(ProxyInputs):
    """An image that is not decoded, with the parameters that transforms have drawn for it.

    DALI applies the steps of ``chain`` to the file. ``real`` has torchvision do the same, with the same random numbers.
    It also serves as the inputs of DALI's pipeline.

    Attributes:
        image: the image before all transforms.
        decode: returns that image as the stock loader's dataset would: as a PIL image, or a tensor. None if its values
            are not used in the worker.
        chain: the transforms, translated.
        calls: the transforms themselves.
        row: the parameters that were drawn.
        size: (height, width) after the transforms.
    """

    __slots__ = ("_real", "calls", "chain", "decode", "image", "row", "size")

    def __init__(
        self,
        image: EncodedImage,
        decode: Callable[[], Any] | None,
        chain: Chain = START,
        calls: tuple[Calls, ...] = (),
        row: ParamRow | None = None,
        size: Size | None = None,
    ) -> None:
        self.image, self.decode, self.chain, self.calls = image, decode, chain, calls
        self.row = ParamRow() if row is None else row
        self.size = (image.height, image.width) if size is None else size
        self._real: Any = None
        self.run = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Transformed, (self.image, self.decode, self.chain, self.calls, self.row, self.size)

    @classmethod
    def of(cls, image: EncodedImage, mode: str = "RGB") -> Transformed:
        """Return an image in mode RGB or L on which no transform was called yet, and which Pillow would decode."""
        if mode == "RGB":
            return cls(image, image.decoded)
        return cls(image, lambda: image.decoded().convert(mode), START_AS_GREY)

    @property
    def plan(self) -> Plan:
        return self.chain.plan

    @property
    def server(self) -> str:  # type: ignore[override]
        return self.chain.plan.key

    @property
    def source(self) -> str:  # type: ignore[override]
        return self.image.path

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:  # type: ignore[override]
        """Made when a batch is packed, as that takes less time there."""
        data = np.frombuffer(self.image.buffer, np.uint8)
        return (data, self.row.packed()) if self.row else (data,)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("", "") if self.row else ("",)

    @property
    def mode(self) -> str:
        """The mode of the PIL image, if it is one."""
        return "RGB" if self.chain.state.channels == 3 else "L"

    @property
    def is_made(self) -> bool:
        """Whether torchvision has made the image."""
        return self._real is not None

    def then(self, chain: Chain) -> Transformed:
        """Call the last transforms of a chain: draw their parameters."""
        row, size = self.row.copy(), self.size
        states = states_now(chain.draws_beside_torch) if chain.draws else None
        for step in chain.sampling_steps:
            size = step.sample_params(size, row)
        return Transformed(self.image, self.decode, chain, (*self.calls, (chain.transforms, states)), row, size)

    def real(self) -> Any:
        """Return what torchvision makes of the image that Pillow decodes: a PIL image, a tensor, or several tensors.

        Raises:
            ImageError: Pillow cannot decode the image.
        """
        if self._real is None:
            assert self.decode is not None
            pixel_uses.note()
            uses, image = pixel_uses.count, self.decode()
            pixel_uses.count = uses  # Pillow may have counted it, too
            with _making_values():
                for transforms, states in self.calls:
                    with contextlib.nullcontext() if states is None else drawing_from(states):
                        for transform in transforms:
                            image = transform(image)
            self._real = image
        return self._real

    def outputs(self) -> Sequence[Any]:
        """Return the tensors that ``real`` returns."""
        made = self.real()
        return made if isinstance(made, (list, tuple)) else (made,)
