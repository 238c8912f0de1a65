"""``explain``: run a transform or a dataset as a loader's worker does, and report what is recorded and what uses pixels."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import io
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torchvision.models
from PIL import Image
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset

from .._random_state import preserve_rng, seed_generators
from ..data import hooks
from ..data.deferral import MAX_UNUSED_SAMPLES, Deferral, deferring
from ..data.encoded_image import EncodedImage
from ..data.lazy_image import is_lazy
from ..data.lazy_tensor import LazyTensor, is_materialized
from ..data.placeholders import ProxySample
from ..data.recorded import Operation, flatten
from ..data.transformed import TransformedImage, find_caller, pixel_uses
from ..kernels.support import find_obstacle
from ..make_dataset import photograph
from ..transforms.plan import Branch, OneOf
from ..workers.packing import Packer
from .files import as_text

RUNS = 8
"""Number of runs, each with its own seed, because code may branch at random."""

ROUNDS = 5
"""Number of times that all runs are timed, unless they take long."""

MAX_TIME_US = 1e6
"""Time after which no other round is timed, in microseconds."""

MAX_SHOWN = 100
"""Maximum length of the ``repr`` of a transform."""

NO_JPEG = f"none of the first {MAX_UNUSED_SAMPLES} samples opens a JPEG that DALI decodes like Pillow"
NO_IMAGE = "no image is returned"


class Call(NamedTuple):
    """A call on an undecoded image that a worker recorded.

    Attributes:
        origin: the transform, or "file:line" of the code that called Pillow or torchvision.
        steps: what is done to the image, with the numbers of the first run, such as "Crop 17, 80, 294, 343".
        runs: number of runs that made the call, out of ``RUNS``.
    """

    origin: str
    steps: str
    runs: int = 1


@dataclass(frozen=True)
class Explanation:
    """What a worker does for an image, as observed in a few runs with different seeds. ``str()`` returns a table.

    Attributes:
        steps: the calls that a worker for a GPU recorded, in order. If pixels are used, they precede this.
        pixels: why a worker for a GPU decodes the image, with "file:line" of the code that uses its pixels; "" if it
            does not.
        operations: names of the torch operations that are replayed on the device after the transforms.
        output: dtype, shape and device of what is returned.
        on_gpu: what decodes and transforms the images if there is a GPU, and why.
        on_cpu: the same without a GPU.
        worker_us: microseconds that an image takes a worker for a GPU.
        stock_us: microseconds that it takes a worker of ``torch.utils.data.DataLoader``, which decodes it.
    """

    steps: tuple[Call, ...]
    pixels: str
    operations: tuple[str, ...]
    output: str
    on_gpu: str
    on_cpu: str
    worker_us: float
    stock_us: float

    def __rich__(self) -> Group:
        table = Table("recorded call", "steps, with the numbers of one image", box=box.SIMPLE_HEAD)
        for call in self.steps:
            chance = f" (in {call.runs} of {RUNS} runs)" if call.runs < RUNS else ""
            table.add_row(Text(call.origin), Text((call.steps or "none") + chance))
        facts = {"On a GPU": self.on_gpu, "Without a GPU": self.on_cpu, "Output": self.output}
        if self.operations:
            facts["Replayed on the device"] = ", ".join(self.operations)
        facts["Time per image"] = (
            f"{self.worker_us:,.0f} µs in a worker; {self.stock_us:,.0f} µs in a worker of torch.utils.data.DataLoader"
        )
        summary = Table.grid(padding=(0, 2))
        for label, text in facts.items():
            summary.add_row(Text(label, "bold"), Text(text, overflow="fold"))
        return Group(table, summary) if self.steps else Group(summary)

    def __str__(self) -> str:
        return as_text(self)


def explain(obj: Any) -> Explanation:
    """Explain what a loader's worker does with a transform or a dataset, by running it. ``print`` the result.

    The random generators of torch, NumPy and Python are restored afterwards. No GPU is required.

    Args:
        obj: a transform, which is any callable of a PIL image, or a map-style dataset. A transform gets a synthetic
            photograph of 500 x 375 pixels. A dataset is indexed with the first index that opens a JPEG. Pass the
            dataset to explain transforms of several inputs, such as an image and its target.

    Raises:
        TypeError: ``obj`` is neither, or a transform that requires more than an image.
        Exception: the transform or the dataset raised it.
    """
    if isinstance(obj, IterableDataset) or not (callable(obj) or hasattr(obj, "__getitem__")):
        raise TypeError(f"explain() takes a transform or a map-style dataset, got {obj!r}")
    is_dataset = isinstance(obj, Dataset) or not callable(obj)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        with preserve_rng():
            make = functools.partial(obj.__getitem__, _find_index(obj)) if is_dataset else _bind(obj)
            on_gpu, on_cpu = (_observe(make, has_gpu) for has_gpu in (True, False))
            return Explanation(
                steps=_merge([run.calls for run in on_gpu]),
                pixels=_explain_pixels(on_gpu),
                operations=tuple(dict.fromkeys(name for run in on_gpu for name in run.operations)),
                output=_join(list(dict.fromkeys(run.output for run in on_gpu)), " or ", 2),
                on_gpu=_describe_place(on_gpu, "CUDA kernels"),
                on_cpu=_describe_place(on_cpu, "DALI"),
                worker_us=_time(make, as_worker=True),
                stock_us=_time(make, as_worker=False),
            )
    finally:
        torch.set_num_threads(threads)


def explain_named(name: str) -> int:
    """Print the explanation of a named transform or dataset. Return the exit status: 1 if its pixels are used."""
    explanation = _call(f"running {name}", explain, find(name))
    Console().print(explanation)
    return 1 if explanation.pixels else 0


def _bind(transform: Callable[[Any], Any]) -> Callable[[], Any]:
    file = io.BytesIO()
    photograph(0).save(file, "JPEG", quality=90)

    def make() -> Any:
        try:
            return transform(Image.open(io.BytesIO(file.getvalue())).convert("RGB"))
        except TypeError as error:
            if "missing" in str(error) or "not subscriptable" in str(error):
                advice = "If the transform takes more than an image, pass the dataset that calls it to explain()"
                raise TypeError(f"{error}. {advice}") from error
            raise

    return make


def _find_index(dataset: Any) -> int:
    """Return the index of the first sample that opens a JPEG; 0 if there is none."""
    for index in range(MAX_UNUSED_SAMPLES):
        with _deferring(on_gpu=True), _Recorder() as recorder:
            try:
                dataset[index]
            except IndexError:
                if index == 0:
                    raise
                break
        if recorder.has_opened:
            return index
    return 0


# --- runs -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _deferring(on_gpu: bool) -> Iterator[None]:
    """Let images stay undecoded in this thread, as in a worker of a loader with or without a GPU."""
    deferral = Deferral(on_gpu, functools.partial(find_obstacle, has_kernels=on_gpu))
    hooks.hold(deferral)
    try:
        with deferring(deferral):
            yield
    finally:
        hooks.release(deferral)


class _Recorder:
    """Observes the calls recorded by this thread, as a profiler, so that workers need not report them.

    Attributes:
        calls: the recorded calls.
        has_opened: whether a JPEG has been opened that DALI can decode.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.has_opened = False

    def __enter__(self) -> _Recorder:
        self._previous = sys.getprofile()
        sys.setprofile(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._previous)

    def _observe(self, frame: Any, event: str, result: Any) -> None:
        if event != "return" or result is None:
            return
        if frame.f_code in (TransformedImage.apply.__code__, TransformedImage.note.__code__):
            for call in _iter_calls(frame.f_locals["self"], result, _name_caller(frame)):
                if self.calls and self.calls[-1].origin == call.origin:  # such as the crops of a TenCrop
                    call = call._replace(steps=f"{self.calls.pop().steps}; {call.steps}")
                self.calls.append(call)
        self.has_opened |= frame.f_code is EncodedImage.from_jpeg.__func__.__code__  # type: ignore[attr-defined]


def _name_caller(frame: Any) -> str:
    return find_caller(frame).removeprefix("by ").removeprefix("at ")


def _iter_calls(before: TransformedImage, after: TransformedImage, caller: str) -> Iterator[Call]:
    """Yield the transforms called on an image, or one call of a function."""
    chain, numbers = before.chain, after.row[len(before.row) :]
    if not after.chain.transforms:
        yield Call(caller, "; ".join(_describe_steps(after.chain.last_steps, numbers)))
    for transform in after.chain.transforms:
        continued = chain.then(transform)
        assert continued is not None
        chain, shown = continued, " ".join(repr(transform).split()).replace("( ", "(").replace(" )", ")")
        shown = type(transform).__name__ if " at 0x" in shown else shown
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 3]}..."
        yield Call(shown, "; ".join(_describe_steps(chain.last_steps, numbers)))
        numbers = numbers[sum(step.num_params for step in chain.last_steps) :]


def _describe_steps(steps: Branch, numbers: Sequence[float]) -> Iterator[str]:
    for step in steps:
        own, numbers = numbers[: step.num_params], numbers[step.num_params :]
        if isinstance(step, OneOf):
            yield from _describe_steps(step.branches[int(own[0])], own[1:])
        elif step.operations != (step,):
            yield from _describe_steps(step.operations, own)
        else:
            shown = _join([f"{round(each, 3):g}" for each in own], ", ", 8)
            yield f"{type(step).__name__} {shown}".strip()


class _Run(NamedTuple):
    """What one run did. ``pixels``: why the image was decoded; "" if it was not."""

    calls: list[Call]
    pixels: str
    operations: list[str]
    output: str


def _observe(make: Callable[[], Any], on_gpu: bool) -> list[_Run]:
    runs = []
    for seed in range(RUNS):
        with _deferring(on_gpu), _Recorder() as recorder:
            seed_generators(seed)
            count, pixel_uses.why = pixel_uses.count, None
            sample = make()
            used, why = pixel_uses.count > count, pixel_uses.why
        leaves = tree_leaves(sample)
        lazy = _find_lazy(leaves)
        nodes = list(_iter_nodes([each._node for each in lazy]))
        plans = [node.call.plan for node in nodes if isinstance(node, ProxySample)]  # type: ignore[attr-defined]
        why = next(filter(None, (find_obstacle(plan, on_gpu) for plan in plans)), why)
        if not used and not lazy and not any(map(is_lazy, leaves)):
            used, why = True, why or (NO_IMAGE if recorder.has_opened else NO_JPEG)
        operations = [
            node.name.split(".")[1].strip("_") for node in nodes if isinstance(node, Operation) and "." in node.name
        ]
        runs.append(_Run(recorder.calls, (why or "pixels are used") if used or why else "", operations, _show(sample)))
    return runs


def _find_lazy(leaves: list[Any]) -> list[LazyTensor]:
    """Return the tensors without values."""
    return [each for each in leaves if isinstance(each, LazyTensor) and not is_materialized(each)]


def _iter_nodes(nodes: Any) -> Iterator[Any]:
    """Yield outputs of DALI and the operations on them, in the order of their execution."""
    for node in flatten(nodes):
        if isinstance(node, Operation):
            yield from _iter_nodes((node.args, node.kwargs))
        yield node


def _show(value: Any) -> str:
    """Describe what a sample consists of."""
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return f"{kind} on {'cuda' if isinstance(value, LazyTensor) else value.device}"
    if isinstance(value, np.ndarray):
        return f"ndarray {value.dtype} {value.shape}"
    if isinstance(value, Image.Image):
        return f"PIL image {value.mode} {value.width} x {value.height}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_show(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        shown = _join([_show(each) for each in value], ", ", 5)
        return f"({shown})" if isinstance(value, tuple) else f"[{shown}]"
    return type(value).__name__


def _merge(runs: list[list[Call]]) -> tuple[Call, ...]:
    """Return the calls of all runs in order, each once, although some runs may skip calls."""
    merged: dict[Any, Call] = {}
    order: list[Any] = []
    for calls in runs:
        seen: Counter[str] = Counter()
        position = 0
        for call in calls:
            key = call.origin, seen[call.origin]
            seen[call.origin] += 1
            if key not in merged:
                order.insert(position, key)
                merged[key] = call._replace(runs=0)
            position, known = order.index(key) + 1, merged[key]
            merged[key] = Call(call.origin, known.steps or call.steps, known.runs + 1)
    return tuple(merged[key] for key in order)


def _join(parts: list[str], separator: str, limit: int) -> str:
    return separator.join(parts[:limit] + ["..."] * (len(parts) > limit))


def _explain_pixels(runs: list[_Run]) -> str:
    return next((run.pixels for run in runs if run.pixels), "")


def _describe_place(runs: list[_Run], fast: str) -> str:
    used = sum(bool(run.pixels) for run in runs)
    if not used:
        return fast
    some = "" if used == RUNS else f"{fast}, but for {used} of {RUNS} images, "
    return f"{some}the workers: {_explain_pixels(runs)}"


def _time(make: Callable[[], Any], as_worker: bool) -> float:
    """Return the median time of an image in microseconds."""
    find = functools.partial(find_obstacle, has_kernels=True)
    times = []
    for _ in range(ROUNDS):
        with _deferring(on_gpu=True) if as_worker else contextlib.nullcontext():
            start = time.perf_counter()
            samples = []
            for seed in range(RUNS):
                seed_generators(seed)
                samples.append(make())
            if as_worker:
                packer = Packer(list, None, RUNS, kernel_output=(None, False), find_obstacle=find)
                packer([_find_lazy(tree_leaves(sample)) for sample in samples])
            times.append((time.perf_counter() - start) / RUNS * 1e6)
        if sum(times) * RUNS > MAX_TIME_US:
            break
    return statistics.median(times)


# --- names ------------------------------------------------------------------------------------------------------------


def find(name: str) -> Any:
    """Return a transform or a dataset by name: ``module:attribute``, torchvision weights, or a torchvision model for
    its default weights. Downloads nothing. Calls a class, or a function that requires no arguments.

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
        raise ValueError(f"{name} is a module, not a transform or a dataset. Name one in it, such as {name}.transform")
    if isinstance(obj, torchvision.models.WeightsEnum):
        return obj.transforms()
    is_factory = inspect.isclass(obj) or (_is_function(obj) and not _has_required_arguments(obj))
    return _call(f"calling {path}()", obj) if is_factory else obj


def _is_function(obj: Any) -> bool:
    return inspect.isroutine(obj) or isinstance(obj, functools.partial)


def _has_required_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function needs arguments, such as the image of a transform."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        return True
    return False


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
