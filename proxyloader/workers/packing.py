"""Pack the images of a batch into shared memory, and pickle the rest of the batch with references to them.

``Packer`` runs in the worker. ``ContentUnpickler`` runs in the main process and replaces the references with the
decoded images.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._tensor import _rebuild_from_type_v2
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn
from torchvision import tv_tensors

from ..data.batch_memory import aligned, batch_memory
from ..data.canvas import Canvas, Canvases
from ..data.deferral import Deferral
from ..data.lazy_mask import LazyMask, compute
from ..data.lazy_tensor import LazyImageTensor, LazyTensor, get_values, materialize, requires_grad
from ..data.placeholders import ProxyBatch, ProxyInputs, ProxySample, check_same_kind, contains
from ..data.recorded import Operation, OperationInput, compute_value
from ..data.transformed import TransformedImage, pixel_uses
from ..kernels.operations import build_schedule, get_output_kind
from ..transforms.chain import MAX_CHAINS
from ..transforms.plan import Plan
from .arena import Arena, Memory
from .masks import MaskPlace, MaskReader, MaskWriter, is_mask
from .messages import PackedBatch, PackedInput, PackedRun
from .request_sampler import BatchRequest

LARGE_TENSOR_BYTES = 1 << 18
TINY_TENSOR_BYTES = 1 << 12  # up to which the tensors of a batch share memory, which each of them keeps
SIZE_BYTES = 8

_TV_TENSORS = [each for each in vars(tv_tensors).values() if isinstance(each, type) and issubclass(each, torch.Tensor)]

TENSOR_TYPES = frozenset(map(id, (torch.Tensor, *_TV_TENSORS)))
"""Ids of the classes of tensors that may be sent by value. Undecoded images compare equal to some of these classes."""

PLAIN_TYPES = frozenset({str, int, float, bool, bytes, bytearray, type(None), dict, list, tuple, torch.Size})
"""Types that are neither images nor sent by reference, nor contain them in other ways than as elements."""

REPLACED_TYPES = ProxySample, ProxyBatch, OperationInput, torch.Tensor  # also lazy ones, and those to be moved
Run = list[list[ProxyInputs]]  # the calls of a run, by output; without kernels, all are in one
KernelOutput = tuple["torch.dtype | None", bool]  # dtype of floating-point images, and whether channels are last

MAX_NEW_PLANS = 8
"""Maximum number of plans that are unknown to the loader. Without kernels, torchvision transforms the images of further
plans, and the first single image of a plan, so that images with individual arguments do not each require a pipeline."""

MAX_CHANNELS = 4  # of an image
KERNELS = "kernels"  # key of the server of all images that kernels transform
INPUT = "input"  # marks references to arguments of operations, which have the dtype of the transform

# --- in the worker ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Packer:
    """Converts samples to a PackedBatch."""

    collate_fn: Callable[[Any], Any]  # the loader's; runs here unless there are placeholders and it is not torch's
    arena: Arena | None
    run_size: int  # maximum number of samples in a pipeline run
    batched: bool = True  # whether it packs lists of samples, not single samples
    keep_samples: bool = False  # whether to also pickle each sample separately, so that samples can be removed
    has_images: bool = True  # whether the loader has found transforms or has a server; others may still be called
    plans: Collection[str] = ()  # keys of the plans that the loader knows
    deferral: Deferral | None = None  # None: the images of the dataset are not deferred
    kernel_output: KernelOutput | None = None  # None: no kernels transform the images
    find_obstacle: Callable[[Plan], str] = lambda plan: ""  # why torchvision runs a plan; "" if it does not
    packs_masks: bool = False  # whether masks are restored on the device
    _new_plans: set[str] = field(default_factory=set, init=False)
    _single: set[str] = field(default_factory=set, init=False)  # plans with one image so far

    def __post_init__(self) -> None:
        self.begin_batch()

    def begin_batch(self) -> None:
        """Reset the counts for the next batch, before its samples are read."""
        self._pixel_uses, pixel_uses.why = pixel_uses.count, None

    def __call__(self, samples: Any, request: BatchRequest | None = None, num_samples: int = 1) -> PackedBatch:
        """Pack samples from the dataset. Writes the bytes to the slot of the request, if it has one."""
        if self.deferral is not None and not self.deferral.is_active:
            return PackedBatch(request, content=self.collate_fn(samples), num_samples=num_samples, has_fallen_back=True)
        has_placeholders = ProxySample.any_created and contains(samples, (ProxySample, ProxyBatch))
        collates = self.collate_fn is default_collate or not has_placeholders
        may_copy = self.deferral is not None and self.deferral.on_gpu and self.collate_fn is not default_collate
        with Canvases() if may_copy and LazyTensor.any_created else contextlib.nullcontext():
            content = self.collate_fn(samples) if collates else samples
        pickler = _ContentPickler(self)
        any_lazy = LazyTensor.any_created or LazyMask.any_created
        if self.has_images or has_placeholders or (any_lazy and contains(content, (LazyTensor, LazyMask))):
            data = pickler.pickle(content)
            if rejected := self._reject_plans(pickler.runs):
                pickler = _ContentPickler(self, rejected)
                data = pickler.pickle(content)
        samples = samples if self.batched else [samples]
        counts = self._count(pickler, samples, num_samples)
        if not pickler.runs and not pickler.is_computed and not pickler.places:
            return PackedBatch(request, content=content if collates else self.collate_fn(content), **counts)
        samples_alone = tuple(map(pickler.pickle, samples)) if self.keep_samples else ()
        slot = request.slot if request is not None and self.arena is not None else None
        layout, blob = _Layout(in_slot=slot is not None), None
        kernel_output = self.kernel_output
        if kernel_output is not None and pickler.is_computed:
            kernel_output = None, kernel_output[1]
        runs = tuple(_pack_run(*run, layout, kernel_output) for run in zip(pickler.runs, pickler.files))
        masks, sizes = pickler.masks.packed()
        packed_masks = (layout.add(masks), sizes) if pickler.places else None  # they may all be empty
        if self.arena is not None and slot is not None:
            layout.write(self.arena.memory_to_write(slot, layout.size_bytes))
        else:
            blob = torch.empty(layout.size_bytes, dtype=torch.uint8)
            layout.write(blob.numpy())
        return PackedBatch(
            request,
            size_bytes=layout.size_bytes,
            blob=blob,
            runs=runs,
            content=data,
            objects=tuple(pickler.objects),
            masks=packed_masks,
            collated=collates,
            is_computed=pickler.is_computed,
            samples=samples_alone,
            plans=tuple(plan for key, plan in _get_plans(pickler.runs).items() if key in self._new_plans),
            **counts,
        )

    def pack_alone(self, sample: Any) -> PackedBatch:
        """Pack one sample, with its memory."""
        same: dict[str, Any] = dict(kernel_output=self.kernel_output, find_obstacle=self.find_obstacle)
        return Packer(list, None, 1, packs_masks=self.packs_masks, **same)([sample])

    def _count(self, pickler: _ContentPickler, samples: Any, num_samples: int) -> dict[str, Any]:
        """Return the counts of the PackedBatch, and reset them for the next batch."""
        calls = _get_calls(pickler.runs)
        images = list({id(call.image): call.image for call in calls if isinstance(call, TransformedImage)}.values())
        sizes = [len(image.buffer) for image in images if image.header is not None]
        encoded = len(sizes)
        sizes += [array.nbytes for call in calls if not isinstance(call, TransformedImage) for array in call.inputs]
        used, why = pixel_uses.count - self._pixel_uses, pixel_uses.why or ""
        self.begin_batch()
        if self.deferral is not None:
            # Sending pixels to a GPU pays off. On a CPU, it does not if the dataset's code has decoded and used them.
            sends_pixels = bool(images) and (self.deferral.on_gpu or not used)
            # Results of transforms arrive on the GPU in all epochs, even if their values were used.
            is_for_gpu = self.deferral.on_gpu and pickler.is_computed
            self.deferral.record(num_samples, bool(sizes) or sends_pixels or is_for_gpu, bool(used))
        computed_only = len(samples) - len(calls) if pickler.is_computed else 0
        has_server = not all(isinstance(call, TransformedImage) for call in calls)  # which produces the samples
        by_worker = 0 if has_server else min(num_samples, max(used, computed_only))
        return {
            "num_samples": num_samples,
            "has_fallen_back": self.deferral is not None and not self.deferral.is_active,
            "has_seen_images": self.deferral is not None and self.deferral.has_seen_images,
            "image_counts": (encoded, len(images) - encoded, by_worker),
            "bytes_read": sum(sizes),
            "decode_reason": why,
        }

    def _reject_plans(self, runs: Sequence[Run]) -> set[str]:
        """Return the plans of a batch that torchvision runs, and record new plans of the others."""
        plans, rejected = _get_plans(runs), set()
        calls = [call.server for call in _get_calls(runs) if isinstance(call, TransformedImage)]
        unknown = Counter(plan for plan in calls if plan not in self.plans and plan not in self._new_plans)
        for plan, images in unknown.items():
            if why := self.find_obstacle(plans[plan]):
                pixel_uses.explain(why)  # the calls were checked one by one, not all of them together
                rejected.add(plan)
                continue
            is_single = images == 1 and len(calls) > 1 and plan not in self._single
            if not is_single and len(self._new_plans) < MAX_NEW_PLANS:
                self._new_plans.add(plan)
                continue
            if len(self._single) < MAX_CHAINS:
                self._single.add(plan)
            if self.kernel_output is None:
                pixel_uses.explain("only one image of a batch has these transforms")
                rejected.add(plan)
        return rejected


def _get_calls(runs: Sequence[Run]) -> list[ProxyInputs]:
    return [call for run in runs for output in run for call in output]


def _get_plans(runs: Sequence[Run]) -> dict[str, Plan]:
    return {call.server: call.plan for call in _get_calls(runs) if isinstance(call, TransformedImage)}


class _ContentPickler(ForkingPickler):
    """Pickles a batch with references in place of images, and groups the calls of the images into runs.

    torchvision transforms the images of plans in ``rejected``. With kernels, the others share runs.
    """

    def __init__(self, packer: Packer, rejected: Collection[str] = ()) -> None:
        self._buffer, self._tensors = io.BytesIO(), bytearray()
        super().__init__(self._buffer, pickle.HIGHEST_PROTOCOL)
        self._run_size, self._merges_plans = packer.run_size, packer.kernel_output is not None
        self._rejected = rejected
        self.runs: list[Run] = []
        self.files: list[dict[int, int]] = []  # of each run: number of a decoded image, by its id
        self.objects: list[Any] = []
        self.masks, self._packs_masks = MaskWriter(), packer.packs_masks
        self.places: dict[int, tuple[MaskPlace, Any]] = {}  # by id of masks, which are kept, as ids are used again
        self.is_computed = False  # whether there are tensors computed from images
        self._current_runs: dict[Any, int] = {}  # kind of run, another one for whole batches -> run for the next call
        self._rows: dict[int, tuple[int, int, int]] = {}  # id of a call -> (output, run, row)
        self._batches: dict[int, Any] = {}  # id of a ProxyInputBatch -> (output, run), or (output, run, row) of each
        self._stacks: dict[tuple[int, int], ProxyBatch] = {}  # id of a ProxyInputBatch, output -> its first stack

    def pickle(self, content: Any) -> bytes:
        """Return the size and the values of tiny tensors, and the pickle."""
        self.clear_memo()
        self._tensors.clear()
        self._buffer.seek(0)
        self._buffer.truncate()
        self.dump(content)
        return len(self._tensors).to_bytes(SIZE_BYTES, "little") + self._tensors + self._buffer.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to an image or object; None if the object itself is to be pickled.

        An object has a number, a mask has a MaskPlace, an image has (output, run, row), a batch has (output, run) or a
        list of images. As an argument of an operation, it has (INPUT, reference).
        """
        if type(obj) in PLAIN_TYPES:  # faster
            return None
        if isinstance(obj, LazyTensor):
            if isinstance(obj, LazyImageTensor) or isinstance(obj._node, torch.Tensor) or requires_grad(obj):
                return None
            obj = obj._node
        if isinstance(obj, (ProxyBatch, ProxySample)):
            return self._refer(obj) if self._needs_dali(obj) else None
        if isinstance(obj, OperationInput):
            return (INPUT, self._refer(obj.output)) if self._needs_dali(obj.output) else None
        if isinstance(obj, LazyMask) and not (self._packs_masks and is_mask(obj)):
            compute(obj, is_shared=get_worker_info() is not None)
        if self._packs_masks and is_mask(obj):
            if id(obj) not in self.places:
                self.places[id(obj)] = self.masks.add(obj), obj
            return self.places[id(obj)][0]
        by_reference = isinstance(obj, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage))
        if get_worker_info() is not None:
            by_reference = by_reference and _find_small_tensor(obj) is None
        elif isinstance(obj, (type, FunctionType)):  # nothing is sent, so that the loop gets the same objects
            by_reference = "<" in obj.__qualname__
        elif not isinstance(obj, Operation):
            by_reference = by_reference or not contains(obj, REPLACED_TYPES)
        if not by_reference:
            return None
        self.objects.append(obj)
        return len(self.objects) - 1

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Canvas) and not obj.has_images:
            self.is_computed = True  # the batch must not have the Canvas itself
            return torch.Tensor.as_subclass, (get_values(obj), torch.Tensor)
        if isinstance(obj, LazyTensor) and requires_grad(obj):
            materialize(obj)
            self.is_computed = True
            return computed, (get_values(obj),)
        if isinstance(obj, LazyImageTensor):
            return torch.Tensor.as_subclass, (obj.as_subclass(torch.Tensor), tv_tensors.Image)
        if isinstance(obj, (LazyTensor, ProxySample, ProxyBatch)):
            self.is_computed = True
            return computed, (self._recipe(obj),)
        if isinstance(obj, OperationInput):
            return torch.Tensor.as_subclass, (self._recipe(obj.output), torch.Tensor)
        if (tensor := _find_small_tensor(obj)) is None:
            return NotImplemented
        values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if values.stride() != (1,):  # for example, a single value of a column
            values = values.clone(memory_format=torch.contiguous_format)
        content: Any = values.view(torch.uint8).numpy().data
        if len(content) > TINY_TENSOR_BYTES:
            place: Any = bytearray(content)
        else:
            # Aligned like torch's own memory. Other frameworks copy what is not.
            self._tensors += bytes(aligned(len(self._tensors)) - len(self._tensors))
            place = len(self._tensors)
            self._tensors += content
        args = place, tensor.dtype, tuple(tensor.shape), tensor.requires_grad
        if tensor is obj:
            return restore_tensor, args
        return _rebuild_from_type_v2, (restore_tensor, type(obj), args, vars(obj))

    def _refer(self, proxy: ProxySample | ProxyBatch) -> Any:
        if isinstance(proxy, ProxySample):
            place: Any = self._assign_row(proxy.call)
        else:
            if (place := self._batches.get(id(proxy.run))) is None:
                place = self._batches[id(proxy.run)] = self._assign_batch(proxy.run.calls)
            if self._stacks.setdefault((id(proxy.run), proxy.output), proxy) is not proxy:
                place = list(map(self._assign_row, proxy.run.calls))  # another stack has its own memory
        # The first output of a call. Several outputs of a plan follow one another.
        places = [(output + proxy.output, *row) for output, *row in ([place] if isinstance(place, tuple) else place)]
        return places[0] if isinstance(place, tuple) else places

    def _needs_dali(self, proxy: ProxySample | ProxyBatch) -> bool:
        calls = [proxy.call] if isinstance(proxy, ProxySample) else proxy.run.calls
        is_rejected = bool(self._rejected) and any(call.server in self._rejected for call in calls)
        # torchvision has already transformed an image whose values were used.
        is_done = all(isinstance(call, TransformedImage) and call.materialized is not None for call in calls)
        return not is_rejected and not is_done

    def _recipe(self, value: LazyTensor | ProxySample | ProxyBatch) -> Any:
        """Return a value or operation that restores a tensor that is not an output of DALI."""
        if isinstance(value, ProxySample):  # the tensor that refers to it may be the pure one of an image
            return compute_value(value).as_subclass(torch.Tensor)
        if not isinstance(value, ProxyBatch):
            # With torch, an image (H, W, C) is contiguous if it is a view of (C, H, W).
            is_recorded = isinstance(value._node, Operation) and value._has_known_strides
            is_dense = is_recorded and value.ndim == 3 and value.shape[2] <= MAX_CHANNELS and value.is_contiguous()
            return Operation("aten.contiguous.default", (value._node,), {}) if is_dense else value._node
        samples = [ProxySample(call, value.output) for call in value.run.calls]
        if not any(map(self._needs_dali, samples)):
            return collate_tensor_fn([compute_value(sample) for sample in samples])  # into shared memory
        return Operation("aten.stack.default", (samples,), {})

    def _assign_batch(self, calls: Sequence[ProxyInputs]) -> Any:
        ids, kinds = set(map(id, calls)), set(map(self._get_kind, calls))
        is_new = len(ids) == len(calls) and self._rows.keys().isdisjoint(ids)
        if not is_new or len(kinds) > 1 or len(calls) > self._run_size:
            return [self._assign_row(call) for call in calls]
        # Without merging, each batch has a run of its own.
        run = self._find_run((kinds.pop(), "batch" if self._merges_plans else len(self.runs)), calls)
        output = len(self.runs[run])
        self.runs[run].append(list(calls))
        self._rows.update({id(call): (output, run, row) for row, call in enumerate(calls)})
        return output, run

    def _find_run(self, kind: Any, calls: Sequence[ProxyInputs]) -> int:
        """Return the current run of a kind after adding the files of calls, or a new one if they do not fit."""
        # With kernels, calls of the same image share its decoding.
        decoded = (call.image if self._merges_plans and isinstance(call, TransformedImage) else call for call in calls)
        files, run = list(map(id, decoded)), self._current_runs.get(kind)
        if run is None or len(self.files[run]) + len(set(files).difference(self.files[run])) > self._run_size:
            run = self._current_runs[kind] = len(self.runs)
            self.runs.append([])
            self.files.append({})
        for file in files:
            self.files[run].setdefault(file, len(self.files[run]))
        return run

    def _assign_row(self, call: ProxyInputs) -> tuple[int, int, int]:
        if id(call) not in self._rows:
            run = self._find_run(self._get_kind(call), [call])
            if not self.runs[run]:
                self.runs[run].append([])
            self._rows[id(call)] = 0, run, len(self.runs[run][0])
            self.runs[run][0].append(call)
        return self._rows[id(call)]

    def _get_kind(self, call: ProxyInputs) -> Any:
        """Return a key that is equal for calls that may share a run."""
        if self._merges_plans and isinstance(call, TransformedImage):
            return get_output_kind(call.plan)
        return call.server


def _find_small_tensor(obj: Any) -> torch.Tensor | None:
    """Return a tensor, without torchvision's class, if it is sent as bytes, like labels; otherwise None.

    Opening shared memory would cost more.
    """
    if id(type(obj)) not in TENSOR_TYPES:
        return None
    tensor: torch.Tensor = obj if type(obj) is torch.Tensor else obj.as_subclass(torch.Tensor)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return None
    # torch rejects tensors with a graph.
    is_small = tensor.grad_fn is None and tensor.nbytes <= LARGE_TENSOR_BYTES and tensor.is_contiguous()
    return tensor if is_small else None


def computed(tensor: torch.Tensor) -> torch.Tensor:  # from images
    return tensor


def restore_tensor(
    memory: Any, place: int | bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    """Return a small tensor from its bytes, or if it is tiny, from its place in the memory of those of the batch."""
    count = math.prod(shape)
    if isinstance(place, bytearray):
        device = memory.device if isinstance(memory, torch.Tensor) else "cpu"
        values = torch.frombuffer(place, dtype=dtype).to(device, copy=True)
    elif isinstance(memory, torch.Tensor):
        values = memory[place : place + count * dtype.itemsize].view(dtype)
    elif count:  # frombuffer rejects 0
        values = torch.frombuffer(memory, dtype=dtype, count=count, offset=place)
    else:
        values = torch.empty(0, dtype=dtype)
    values = values if len(shape) == 1 else values.view(shape)
    return values.requires_grad_() if requires_grad else values


class _Layout:
    """Assigns offsets to arrays, in a slot that may already contain files, or in separate memory."""

    def __init__(self, in_slot: bool) -> None:
        self._arrays: list[tuple[int, NDArray[Any]]] = []
        self._in_slot, self.size_bytes = in_slot, 0
        if in_slot:
            batch_memory.stop()
            self.size_bytes = batch_memory.used_bytes

    def add(self, array: NDArray[Any], align: bool = True) -> int:
        """Add an array. Return its offset in bytes."""
        start = aligned(self.size_bytes) if align else self.size_bytes
        self._arrays.append((start, array))
        self.size_bytes = start + array.nbytes
        return start

    def add_file(self, array: NDArray[Any]) -> int:
        """Add an array, unless it is already in the slot. Return its offset in bytes."""
        offset = batch_memory.find_offset(array) if self._in_slot else None
        return self.add(array) if offset is None else offset

    def write(self, memory: Memory) -> None:
        for start, array in self._arrays:
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def _pack_run(outputs: Run, numbered: dict[int, int], layout: _Layout, kernel_output: KernelOutput | None) -> PackedRun:
    calls = _get_calls([outputs])
    if kernel_output is None or not isinstance(calls[0], TransformedImage):
        sources = tuple(call.source for call in calls)
        columns = zip(*(call.inputs for call in calls))
        inputs = [_pack_input(name, arrays, layout) for name, arrays in zip(calls[0].names, columns)]
        return PackedRun(calls[0].server, tuple(inputs), sources)
    transformed = [call for call in calls if isinstance(call, TransformedImage)]
    images = [(call.plan, call.image.size[::-1], call.row.packed()) for call in transformed]
    if shares := len(numbered) < len(calls):
        numbers = np.array([numbered[id(call.image)] for call in transformed])
        _, first = np.unique(numbers, return_index=True)
    decoded = [transformed[row] for row in first] if shares else transformed
    schedule = build_schedule(images, *kernel_output, [*map(len, outputs)], numbers if shares else None)
    files, sources = _pack_input("", [call.file for call in decoded], layout), tuple(call.source for call in decoded)
    begin, size, schedule.memory = layout.add(schedule.memory), len(schedule.memory), None
    return PackedRun(KERNELS, (files,), sources, schedule, (begin, begin + size))


def _pack_input(name: str, arrays: Sequence[NDArray[Any]], layout: _Layout) -> PackedInput:
    check_same_kind(name, arrays)
    if all(array.shape == arrays[0].shape for array in arrays):  # stored contiguously
        offsets = [layout.add(array, align=k == 0) for k, array in enumerate(arrays)]
    else:
        offsets = [layout.add_file(array) for array in arrays]
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), -1)
    return PackedInput(arrays[0].dtype.str, np.array(offsets, np.int64), shapes)


# --- in the main process ---------------------------------------------------------------------------------------------


class ContentUnpickler(pickle.Unpickler):
    """Unpickles the content of a packed batch, with decoded images in place of the references.

    ``resolve`` returns the image or batch for a reference; see ``_ContentPickler.persistent_id``. ``convert`` returns
    images of 3 dimensions, or batches of 4, in the loader's format; None: nothing is converted.
    ``pin`` copies tensors to pinned memory, like a stock loader with ``pin_memory``. ``objects``: see PackedBatch.
    Tensors computed from images are moved to ``device``, and with ``moves`` all others, too. ``masks`` reads masks by
    place.
    """

    def __init__(
        self,
        data: bytes,
        resolve: Callable[[Any], Any],
        pin: bool,
        objects: Sequence[Any],
        device: torch.device,
        masks: MaskReader | None = None,
        moves: bool = False,
        convert: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> None:
        file = io.BytesIO(data)
        size = int.from_bytes(file.read(SIZE_BYTES), "little")
        tensors = torch.empty(size, dtype=torch.uint8, pin_memory=moves and device.type == "cuda")
        file.readinto(tensors.numpy().data)
        super().__init__(file)
        self._tensors = tensors.to(device, non_blocking=True) if moves else tensors.numpy()
        self._resolve, self._pin, self._objects, self._device, self._masks = resolve, pin, objects, device, masks
        self._moves, self._convert = moves, convert or (lambda images, ndim: images)

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            obj = self._objects[pid]
            if isinstance(obj, torch.Tensor) and self._moves:
                return obj.to(self._device, non_blocking=True)
            return obj.pin_memory() if self._pin and isinstance(obj, torch.Tensor) else obj
        if isinstance(pid, MaskPlace):
            assert self._masks is not None
            return self._masks.read(pid)
        if pid[0] == INPUT:
            return self._resolve(pid[1])
        return self._convert(self._resolve(pid), 3 if isinstance(pid, tuple) and len(pid) == 3 else 4)

    def find_class(self, module: str, name: str) -> Any:
        function = super().find_class(module, name)
        if function is computed:
            return lambda tensor: self._convert(tensor.to(self._device, non_blocking=True), 3)
        if function is restore_tensor:
            restore = functools.partial(restore_tensor, self._tensors)
            return (lambda *args: restore(*args).pin_memory()) if self._pin and not self._moves else restore
        return function
