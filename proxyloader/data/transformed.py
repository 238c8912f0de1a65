"""TransformedImage: an undecoded image and the transforms called on it. Runs where the dataset runs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .._random_state import get_rng_states, preserve_rng, set_rng_states
from ..transforms.chain import START, START_AS_GREY, Chain
from ..transforms.plan import Branch, ParamRow, Plan, Size, Untranslatable
from ..transforms.random_numbers import in_thread
from .deferral import materializing
from .encoded_image import EncodedImage
from .placeholders import ProxyInputs

Calls = tuple[tuple[Any, ...], "tuple[Any, ...] | None"]
"""Transforms called together, and the generator states before the first of them; None if they draw no numbers."""

LIBRARIES = frozenset({"proxyloader", "torch", "torchvision", "PIL", "numpy"}) | sys.stdlib_module_names
"""Modules that access pixels on behalf of other code."""

CALLS = ("__call__", "forward")  # methods that call a transform


class _PixelUses(threading.local):
    """Number of deferred images that this thread had to decode."""

    count: int = 0
    why: str | None = None  # why the first one of this batch was decoded; "" if unknown, None if there is none

    def add(self) -> None:
        self.count += 1
        self.explain()

    def explain(self, why: str = "", names_caller: bool = False) -> None:
        """Record the reason, by default the line that accesses the pixels."""
        if self.why is None:  # walking the stack is slow, so it happens once per batch
            caller = find_caller(sys._getframe(1)) if names_caller or not why else ""
            if caller:
                named = caller.removeprefix("by ") if caller.startswith("by ") else f"call {caller}"
                why = f"{named}: {why}" if why else f"pixels are used {caller}"
            self.why = why


pixel_uses = _PixelUses()


def find_caller(frame: FrameType | None) -> str:
    """Return what called a function, given its frame, such as "by ElasticTransform at train.py:12"; "" if unknown."""
    transform = ""
    for each, _ in traceback.walk_stack(frame):
        name = str(each.f_globals.get("__name__", ""))
        if name.startswith(("proxyloader.workers", "proxyloader.loader", "proxyloader.tools")):
            break  # the callers of these modules request batches, not pixels
        if name.split(".")[0] not in LIBRARIES:
            return f"{transform} at {each.f_code.co_filename}:{each.f_lineno}".lstrip()
        if not transform and name.startswith("torchvision.transforms.") and each.f_code.co_name in CALLS:
            transform = f"by {type(each.f_locals['self']).__name__}"
    return transform


@functools.lru_cache(maxsize=1)  # code may use the pixels of several crops of an image
def _decode(image: EncodedImage) -> Image.Image:
    """Return the decoded image, which must not be changed."""
    return image.decoded()


class TransformedImage(ProxyInputs):
    """An undecoded image, the transforms called on it, and the parameters they sampled."""

    __slots__ = ("calls", "chain", "decode", "image", "materialized", "row", "size")

    def __init__(
        self,
        image: EncodedImage,
        decode: Callable[[], Any] | None,
        chain: Chain = START,
        calls: tuple[Calls, ...] = (),
        row: ParamRow | None = None,
        size: Size | None = None,
    ) -> None:
        self.image = image  # before all transforms
        # Returns it as the stock loader's dataset would; None if the worker never needs its pixels.
        self.decode = decode
        self.chain, self.calls = chain, calls  # the translated transforms, and the transforms themselves
        self.row = ParamRow() if row is None else row  # the sampled parameters
        self.size = (image.height, image.width) if size is None else size  # (height, width) after the transforms
        self.materialized: Any = None  # what ``materialize`` returns, once it was called
        self.run = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TransformedImage, (self.image, self.decode, self.chain, self.calls, self.row, self.size)

    @classmethod
    def start(cls, image: EncodedImage, mode: str = "RGB") -> TransformedImage:
        """Return an image without transforms, as Pillow would decode it in mode RGB or L."""
        if mode == "RGB":
            return cls(image, functools.partial(_decode, image))
        return cls(image, lambda: _decode(image).convert(mode), START_AS_GREY)

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
    def file(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.image.buffer, np.uint8)

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:  # type: ignore[override]
        """The file and the parameters, created only when a batch is packed, which is faster."""
        return (self.file, self.row.packed()) if self.row else (self.file,)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("", "") if self.row else ("",)

    @property
    def mode(self) -> str:
        """Mode of the PIL image, if it is one."""
        return "RGB" if self.chain.state.channels == 3 else "L"

    @classmethod
    def sample(cls, image: EncodedImage, chain: Chain) -> TransformedImage:
        """Sample the parameters of a chain for an image whose pixels the worker never needs."""
        row, size = ParamRow(), (image.height, image.width)
        if chain.last.sample is not None:
            size = chain.last.sample(size, row)
        return cls(image, None, chain, (), row, size)

    def apply(self, chain: Chain) -> TransformedImage:
        """Apply the last transforms of a chain by sampling their parameters.

        Untranslatable: the image is too small, for example. No numbers have been drawn.
        """
        row, size, states, draws = self.row.copy(), self.size, None, chain.last.draws
        try:
            if draws:
                with in_thread.fastest if draws == "numbers" else in_thread.by_torch as state:
                    states = get_rng_states() if draws == "any" else (state,)
                    size = chain.last.sample(size, row)  # type: ignore[misc]
            elif chain.last.sample is not None:
                size = chain.last.sample(size, row)
        except Untranslatable:
            if states is not None:
                set_rng_states(states)
            raise
        return TransformedImage(self.image, self.decode, chain, (*self.calls, (chain.transforms, states)), row, size)

    def note(self, steps: Branch, numbers: Sequence[Any], size: Size, again: Callable[[Any], Any]) -> TransformedImage:
        """Append a call as steps with given parameters; an array, which may be the last one, stands for its position.

        ``size``: (height, width) after the call. ``again`` makes the same call on a decoded image.
        """
        row = self.row.copy()
        if numbers and isinstance(array := numbers[-1], np.ndarray):
            numbers = (*numbers[:-1], row.attach(array))
        row += numbers
        calls = *self.calls, ((again,), None)
        return TransformedImage(self.image, self.decode, self.chain.then_steps(steps), calls, row, size)

    def materialize(self) -> Any:
        """Return torchvision's result for the image that Pillow decodes. ImageError: Pillow cannot decode it."""
        if self.materialized is None:
            assert self.decode is not None
            pixel_uses.add()
            count, image = pixel_uses.count, self.decode()
            pixel_uses.count = count  # decoding a PIL image also counts
            self.materialized = _run(self.calls, image)
        return self.materialized

    def keeps_info(self, mode: str, size: tuple[int, int]) -> bool:
        """Return whether the last call preserves the ``info`` of a PIL image of this mode and (width, height)."""
        image = Image.new(mode, size)
        image.info["key"] = "value"
        return bool(_run(self.calls[-1:], image).info)


def _run(calls: tuple[Calls, ...], image: Any) -> Any:
    with materializing():
        for transforms, states in calls:
            with contextlib.nullcontext() if states is None else preserve_rng(states):
                for transform in transforms:
                    image = transform(image)
    return image
