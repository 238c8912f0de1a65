"""``explain``: run a transform or a dataset as a worker does, and report what is recorded and what uses pixels."""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import operator
import os
import statistics
import sys
import timeit
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .._random_state import preserve_rng, seed_generators
from ..data import hooks
from ..data.deferral import MAX_UNUSED_SAMPLES, Deferral
from ..data.encoded_image import EncodedImage
from ..data.lazy_image import is_lazy
from ..data.lazy_tensor import LazyTensor, is_materialized
from ..data.placeholders import ProxyBatch, ProxySample
from ..data.recorded import Operation, flatten
from ..data.transformed import LIBRARIES, TransformedImage, find_caller, pixel_uses
from ..kernels.operations import find_obstacle
from ..make_dataset import photograph
from ..transforms.plan import Branch, OneOf
from ..workers.packing import Packer

RUNS, ROUNDS = 8, 3
"""Number of runs, each with its own seed, because code may branch at random; and how often all of them are timed."""

NO_JPEG = f"none of the samples read (at most {MAX_UNUSED_SAMPLES}) opens a JPEG that DALI decodes like Pillow"
NO_IMAGE = "no image is returned"


@dataclass(frozen=True)
class Explanation:
    """What workers do for an image, observed in a few runs with different seeds. ``str()`` returns a report."""

    #: The calls that a worker for a GPU records before any pixels are used, in order, each with what it does to the
    #: image and its numbers, such as "RandomHorizontalFlip(p=0.5): Flip 1".
    steps: tuple[str, ...]
    pixels: str  #: why a worker for a GPU decodes the image, with file and line of the code that uses pixels; or ""
    operations: tuple[str, ...]  #: names of the torch operations that are replayed on the GPU
    output: str  #: dtype, shape and device of what is returned
    on_gpu: str  #: what decodes and transforms the images with a GPU, and why
    on_cpu: str  #: the same without a GPU
    worker_us: float  #: microseconds per image in a worker for a GPU
    stock_us: float  #: the same in a worker of ``torch.utils.data.DataLoader``, which decodes the image

    def __str__(self) -> str:
        rest = "" if self.pixels else ", if a GPU does the rest"
        times = f"{self.worker_us:,.0f} µs in a worker{rest}; {self.stock_us:,.0f} µs with torch"
        sections = {
            "Recorded": self.steps,
            "Replayed on the GPU": self.operations,
            "Output": [self.output],
            "With a GPU": [self.on_gpu],
            "Without a GPU": [self.on_cpu],
            "Time per image": [times],
        }
        return "\n".join("\n  ".join([label, *lines]) for label, lines in sections.items() if lines)


def explain(obj: Any) -> Explanation:
    """Explain what a worker does with a transform or a dataset, by running it. ``print`` the result for a report.

    This requires no GPU, and restores the generators of torch, NumPy and Python.

    Args:
        obj: a transform, which is any callable of a PIL image, or a map-style dataset. A transform gets a synthetic
            photograph of 500 x 375 pixels. Of a dataset, the first sample that opens a JPEG is read. Pass the dataset
            if its transform takes more than an image, such as an image and its target.

    Raises:
        TypeError: ``obj`` is neither, or a transform that takes more than an image.
        Exception: the transform or the dataset raised it; IndexError if the dataset is empty.
    """
    is_dataset = isinstance(obj, Dataset) or (hasattr(obj, "__getitem__") and not callable(obj))
    if isinstance(obj, (IterableDataset, str)) or not (is_dataset or callable(obj)):
        advice = ". Pass loader.dataset" if isinstance(obj, DataLoader) else ""
        raise TypeError(f"explain() takes a transform or a map-style dataset, got {obj!r}{advice}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        with preserve_rng():
            get = functools.partial(obj.__getitem__, _find_index(obj)) if is_dataset else _apply_to_photograph(obj)
            calls, pixels, operations, outputs = zip(*[_observe(get, seed, on_gpu=True) for seed in range(RUNS)])
            _, pixels_without_gpu, *_ = zip(*[_observe(get, seed, on_gpu=False) for seed in range(RUNS)])
            packer = Packer(list, None, RUNS, kernel_output=(None, False))
            with _deferred(on_gpu=True):
                worker_us = _time(lambda: packer([_find_lazy(get()) for _ in range(RUNS)]))
            return Explanation(
                steps=tuple(_merge(calls)),
                pixels=next(filter(None, pixels), ""),
                operations=tuple(dict.fromkeys(itertools.chain(*operations))),
                output=shorten(" or ".join(dict.fromkeys(outputs)), 240, placeholder=" ..."),
                on_gpu=_describe_place(pixels, "CUDA kernels"),
                on_cpu=_describe_place(pixels_without_gpu, "DALI"),
                worker_us=worker_us,
                stock_us=_time(lambda: [get() for _ in range(RUNS)]),
            )
    finally:
        torch.set_num_threads(threads)


def _apply_to_photograph(transform: Callable[[Any], Any]) -> Callable[[], Any]:
    file = io.BytesIO()
    photograph(0).save(file, "JPEG", quality=90)

    def get() -> Any:
        try:
            return transform(Image.open(io.BytesIO(file.getvalue())).convert("RGB"))
        except TypeError as error:
            advice = "If the transform takes anything but a PIL image, explain the dataset that calls it"
            raise TypeError(f"{str(error).rstrip('.')}. {advice}") from error

    return get


def _find_index(dataset: Any) -> int:
    """Return the index of the first sample that opens a JPEG; 0 if there is none."""
    for index in range(MAX_UNUSED_SAMPLES):
        with contextlib.suppress(*[IndexError] * (index > 0)), _deferred(on_gpu=True), _watching() as (_, opened):
            dataset[index]
        if opened:
            return index
    return 0


def _deferred(on_gpu: bool) -> contextlib.AbstractContextManager[None]:
    """Let images stay undecoded in this thread, as in a worker of a loader with or without a GPU."""
    return hooks.deferred(Deferral(on_gpu, functools.partial(find_obstacle, has_kernels=on_gpu)))


@contextlib.contextmanager
def _watching() -> Iterator[tuple[list[tuple[str, str]], list[Any]]]:
    """Collect origin and steps of each recorded call, and the undecoded JPEGs that are opened.

    This is a profiler of this thread, so that workers need not report what they do.
    """
    calls: list[tuple[str, str]] = []
    opened: list[Any] = []
    previous = sys.getprofile()
    recorders = TransformedImage.apply.__code__, TransformedImage.note.__code__
    opener = EncodedImage.from_jpeg.__func__.__code__  # type: ignore[attr-defined]

    def watch(frame: Any, event: str, result: Any) -> None:
        if event != "return" or result is None:  # None: an error, or no JPEG
            return
        if frame.f_code is opener:
            opened.append(result)
        elif frame.f_code in recorders:
            calls.extend(_iter_calls(frame.f_locals["self"], result, find_caller(frame)))

    sys.setprofile(watch)
    try:
        yield calls, opened
    finally:
        sys.setprofile(previous)


def _iter_calls(before: TransformedImage, after: TransformedImage, caller: str) -> Iterator[tuple[str, str]]:
    """Yield origin and steps of the transforms called on an image, or of one call of Pillow."""
    chain: Any = before.chain
    numbers = after.row[len(before.row) :]
    for transform in after.chain.transforms or (None,):
        if transform is None:
            chain, origin = after.chain, caller.removeprefix("by ").removeprefix("at ")
        else:
            chain = chain.then(transform)
            origin = shorten(repr(transform), 100, placeholder=" ...").replace("( ", "(").replace(" )", ")")
            origin = type(transform).__name__ if " at 0x" in origin else origin
        yield origin, "; ".join(_describe_steps(chain.last.steps, numbers))
        numbers = numbers[sum(step.num_params for step in chain.last.steps) :]


def _describe_steps(steps: Branch, numbers: Sequence[float]) -> Iterator[str]:
    for step in steps:
        own, numbers = numbers[: step.num_params], numbers[step.num_params :]
        if isinstance(step, OneOf):
            yield from _describe_steps(step.branches[int(own[0])], own[1:])
        else:
            shown = ", ".join([f"{round(each, 3):g}" for each in own[:8]] + ["..."] * (len(own) > 8))
            yield f"{step.title} {shown}".strip()


def _merge(runs: Iterable[list[tuple[str, str]]]) -> Iterator[str]:
    """Yield the calls of all runs, each once, in the order of their mean position."""
    found: defaultdict[Any, list[tuple[int, str]]] = defaultdict(list)
    for calls in runs:
        origins = [origin for origin, _ in calls]
        for position, (origin, steps) in enumerate(calls):
            found[origin, origins[:position].count(origin)].append((position, steps))  # it may be called repeatedly
    for (origin, _), places in sorted(found.items(), key=lambda item: statistics.mean(next(zip(*item[1])))):
        steps = next((steps for _, steps in places if steps), "none")
        yield f"{origin}: {steps}" + f" (in {len(places)} of {RUNS} runs)" * (len(places) < RUNS)


def _observe(get: Callable[[], Any], seed: int, on_gpu: bool) -> tuple[list[tuple[str, str]], str, list[str], str]:
    """Return the recorded calls, why the image was decoded ("" if it was not), the replayed operations, and the output
    of one run."""
    seed_generators(seed)
    before, pixel_uses.why = pixel_uses.count, None
    with _deferred(on_gpu), _watching() as (calls, opened):
        sample = get()
    nodes = list(_iter_nodes([each._node for each in _find_lazy(sample)]))
    images = [node.call for node in nodes if isinstance(node, ProxySample)]
    images += [call for node in nodes if isinstance(node, ProxyBatch) for call in node.run.calls]  # of a stack
    plans = [call.plan for call in images]  # type: ignore[attr-defined]
    if pixel_uses.count > before:
        pixels = pixel_uses.why or "pixels are used"
    elif plans or any(map(is_lazy, tree_leaves(sample))):
        pixels = next(filter(None, (find_obstacle(plan, on_gpu) for plan in plans)), "")
    else:
        pixels = pixel_uses.why or (NO_IMAGE if opened else NO_JPEG)
    names = [node.name.removeprefix("aten.").split(".")[0].strip("_") for node in nodes if isinstance(node, Operation)]
    return calls, pixels, names, str(tree_map(_describe, sample)).replace('"', "").replace("'", "")


def _find_lazy(sample: Any) -> list[LazyTensor]:
    """Return the tensors without values."""
    return [each for each in tree_leaves(sample) if isinstance(each, LazyTensor) and not is_materialized(each)]


def _iter_nodes(nodes: Any) -> Iterator[Any]:
    """Yield outputs of DALI and the operations on them, in the order of their execution."""
    for node in flatten(nodes):
        yield from _iter_nodes((node.args, node.kwargs)) if isinstance(node, Operation) else ()
        yield node


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Image.Image):
        return f"PIL image {leaf.mode} {leaf.width} x {leaf.height}"
    is_late = isinstance(leaf, LazyTensor) and not is_materialized(leaf)
    device = f" on the {'device' if is_late else 'CPU'}" if isinstance(leaf, torch.Tensor) else ""
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return f"{leaf.dtype} {tuple(leaf.shape)}{device}".removeprefix("torch.") if is_array else type(leaf).__name__


def _describe_place(pixels: Iterable[str], best: str) -> str:
    if not (reasons := list(filter(None, pixels))):
        return best
    others = f"{best}; for {len(reasons)} of {RUNS} images " if len(reasons) < RUNS else ""
    return f"{others}the workers: {reasons[0]}"


def _time(run: Callable[[], Any]) -> float:
    """Return the median time of an image in microseconds."""
    return statistics.median(timeit.repeat(run, lambda: seed_generators(0), number=1, repeat=ROUNDS)) / RUNS * 1e6


# --- the command ------------------------------------------------------------------------------------------------------


def explain_named(name: str) -> int:
    """Print the explanation of ``module:attribute``. Return the exit status: 1 if pixels are used."""
    with patch.object(sys, "argv", sys.argv[:1]):  # the module may parse it
        obj = find(name)
        try:
            explanation = explain(obj)
        except Exception as error:
            raise RuntimeError(f"{name}: {type(error).__name__}{_find_line(error)}: {error}") from error
    print(explanation)
    return 1 if explanation.pixels else 0


def _find_line(error: BaseException) -> str:
    """Return where the user's code raised an error, such as " at train.py:12"; "" if it did not."""
    found = ""
    for each in (error.__cause__, error):  # ``explain`` may have added advice
        for frame, line in traceback.walk_tb(None if each is None else each.__traceback__):
            if str(frame.f_globals.get("__name__")).split(".")[0] not in LIBRARIES:
                found = f" at {frame.f_code.co_filename}:{line}"
    return found


def find(name: str) -> Any:
    """Return a transform or a dataset named ``module:attribute``. Calls a class, or a function without arguments.

    ValueError: the name does not exist, or is a class that requires arguments.
    """
    path, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"the name must be module:attribute, such as train:transform, got {name!r}")
    folder, module = os.path.split(path.removesuffix(".py"))
    sys.path.insert(0, os.path.abspath(folder))  # as if Python ran the file
    try:
        obj = operator.attrgetter(attribute)(importlib.import_module(module))
    except AttributeError as error:
        advice = 'It must be at module level, not below `if __name__ == "__main__":`'
        raise ValueError(f"{name}: {error}. {advice}") from error
    if is_factory := inspect.isclass(obj):
        try:
            inspect.signature(obj).bind()
        except TypeError as error:
            advice = "Name an instance, or a function that returns one"
            raise ValueError(f"{name} cannot be created: {error}. {advice}") from error
        except ValueError:  # it has no signature
            pass
    if inspect.isroutine(obj) or isinstance(obj, functools.partial):
        with contextlib.suppress(TypeError, ValueError):  # it takes arguments, such as the image of a transform
            is_factory = inspect.signature(obj).bind() is not None
    return obj() if is_factory else obj
