"""From worker to main process: requests that lend memory, an arena that holds it, batches packed into it.

NOTE [ The way of a slot ]
The main process owns the arena. Its sampler lends a free slot with every request; the request travels to a worker on
torch's index queue; the worker writes the batch's bytes into the slot, marks it ready, and sends back a PackedBatch
that says where they lie. The main process feeds DALI views of the slot, and when DALI has finished with the batch the
slot is free again. One side writes at a time, so there is no lock. Where no slot is free, or a batch is larger than
one, the bytes travel in torch's shared memory instead: slower, never wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate, get_worker_info

from .errors import ImageError, InputError, ProxyLoaderError
from .sample import ProxyBatch, ProxyCall, ProxySample

ALIGNMENT_BYTES = 64
PAGE_BYTES = mmap.PAGESIZE
LARGE_TENSOR_BYTES = 1 << 18
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h

Memory = NDArray[np.uint8]


class Reader(Protocol):
    """Whoever reads a slot: the runs of its batch."""

    def was_read(self) -> bool:
        """The slot may be written to."""

    def wait_until_read(self) -> None:
        """Wait for the GPU, if that is all there is to wait for."""


class Arena:
    """Memory in slots, one for each batch on its way; shared with the workers by a file descriptor.

    It is an anonymous file (``memfd_create``), so the size of ``/dev/shm`` does not matter. Pages cost memory from the
    first write on: a slot may be generous.

    Args:
        slots: how many.
        slot_bytes: size of each, rounded up to whole pages.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("proxyloader")
        os.ftruncate(fd, PAGE_BYTES + slots * slot_bytes)
        self._map(fd, slots, slot_bytes)
        self._free = deque(range(slots))
        self._read_by: deque[tuple[int, Reader]] = deque()

    def _map(self, fd: int, slots: int, slot_bytes: int) -> None:
        self._fd: int | None = fd
        self.slots, self.slot_bytes = slots, slot_bytes
        self.wanted_bytes = slot_bytes  # what the largest batch so far would have needed
        memory = np.frombuffer(mmap.mmap(fd, PAGE_BYTES + slots * slot_bytes), np.uint8)
        self._ready, self._memory = memory[:slots], memory[PAGE_BYTES:]

    def __repr__(self) -> str:
        return f"Arena({self.slots} slots of {self.slot_bytes} bytes)"

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        fd, self._fd = getattr(self, "_fd", None), None
        if fd is not None:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only while a worker process is being started (spawn, forkserver): DupFd hands the descriptor over.
        return _attach_arena, (DupFd(self._fd), self.slots, self.slot_bytes)  # type: ignore[no-untyped-call]

    def lend(self) -> int | None:
        """Take a free slot; None where there is none. Main process."""
        self._take_back()
        if not self._free and self._read_by:
            # The training loop runs ahead of the GPU; here it waits for it, instead of piling up work.
            self._read_by[0][1].wait_until_read()
            self._take_back()
        if not self._free:
            return None
        slot = self._free.popleft()
        self._ready[slot] = 0
        return slot

    def give_back(self, slot: int | None, reader: Reader | None = None) -> None:
        """Make a slot free again, as soon as ``reader`` has finished with it. Main process."""
        if slot is not None and (reader is None or reader.was_read()):
            self._free.append(slot)
        elif slot is not None and reader is not None:
            self._read_by.append((slot, reader))

    def _take_back(self) -> None:
        for _ in range(len(self._read_by)):
            self.give_back(*self._read_by.popleft())

    def memory(self, slot: int) -> Memory:
        """The bytes of a slot, (slot_bytes,) uint8."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def mark_ready(self, slot: int) -> None:
        """Say that the slot's batch is on its way. Worker."""
        self._ready[slot] = 1

    def is_ready(self, slot: int) -> bool:
        """Whether the slot's batch is on its way: asking torch for it now will not wait long. Main process."""
        return bool(self._ready[slot])


def _attach_arena(fd: Any, slots: int, slot_bytes: int) -> Arena:
    arena = Arena.__new__(Arena)
    arena._map(fd.detach(), slots, slot_bytes)
    arena._close()  # the mapping is enough for a worker
    return arena


@dataclass(frozen=True)
class Request:
    """What a sampler yields to a worker, and what comes back with the batch.

    Attributes:
        number: counts a loader's requests.
        indices: of the batch's samples; or one index where batching is off.
        slot: that the worker may write to; None: there was none.
    """

    number: int
    indices: Any
    slot: int | None


class RequestSampler:
    """A batch sampler over another one, or over a sampler where batching is off, that lends a slot with each batch.

    torch advances it in the thread that iterates over the loader, as it does with a stock loader's.
    """

    def __init__(self, sampler: Iterable[Any], arena: Arena | None) -> None:
        self._sampler, self._arena = sampler, arena
        self._unanswered: dict[int, Request] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Request]:
        # torch begins an epoch when the workers have let go of the one before.
        if self._arena is not None:
            for request in self._unanswered.values():
                self._arena.give_back(request.slot)
        self._unanswered.clear()
        for indices in self._sampler:
            slot = self._arena.lend() if self._arena is not None else None
            request = Request(next(self._numbers), indices, slot)
            self._unanswered[request.number] = request
            yield request

    def answered(self, request: Request) -> None:
        """Note that the batch has come back; the slot now belongs to whoever has the batch."""
        del self._unanswered[request.number]

    def has_ready_batch(self, in_order: bool) -> bool:
        """Whether torch will give the next batch without waiting for a worker (as far as their slots tell)."""
        requests = itertools.islice(self._unanswered.values(), 1 if in_order else None)
        return any(r.slot is None or self._arena is None or self._arena.is_ready(r.slot) for r in requests)


@dataclass(frozen=True)
class PackedInput:
    """Where one input of a run lies in its batch's memory.

    Attributes:
        dtype: numpy's short name.
        offsets: (N,) int64, in bytes.
        shapes: (N, ndim) int64.
    """

    dtype: str
    offsets: NDArray[np.int64]
    shapes: NDArray[np.int64]

    def views(self, memory: Memory) -> NDArray[Any] | list[NDArray[Any]]:
        """The input as one array (N, ...) where all samples have one shape, else as a list of N arrays."""
        dtype = np.dtype(self.dtype)
        if (self.shapes == self.shapes[0]).all():
            shape = (len(self.shapes), *map(int, self.shapes[0]))
            start = int(self.offsets[0])
            return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        ends = self.offsets + self.shapes.prod(axis=1) * dtype.itemsize
        spans = zip(self.offsets.tolist(), ends.tolist())
        if self.shapes.shape[1] == 1:
            return [memory[start:end].view(dtype) for start, end in spans]
        shapes = self.shapes.tolist()
        return [memory[start:end].view(dtype).reshape(shape) for (start, end), shape in zip(spans, shapes)]


@dataclass(frozen=True)
class PackedRun:
    """One run of one pipeline: its inputs, in the pipeline's order, and the files they came from."""

    server: str
    inputs: tuple[PackedInput, ...]
    sources: str

    def __len__(self) -> int:
        return len(self.inputs[0].offsets)

    def __repr__(self) -> str:
        return f"PackedRun({len(self)} samples for {self.server})"


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the main process.

    Attributes:
        wrapper: torch's, for exceptions of the user's code: re-raised with its type, as a stock loader does.
        error: one of ours; its message says all there is to say, and the worker's traceback is its cause.
    """

    wrapper: ExceptionWrapper
    error: ProxyLoaderError | None

    @classmethod
    def caught(cls, where: str) -> Failure:
        """Of the exception that is being handled."""
        error = sys.exc_info()[1]
        ours = type(error)(str(error)) if isinstance(error, ProxyLoaderError) else None
        return cls(ExceptionWrapper(where=where), ours)

    def reraise(self) -> None:
        if self.error is not None:
            raise self.error from RuntimeError(f"{self.wrapper.where}:\n{self.wrapper.exc_msg}")
        self.wrapper.reraise()


@dataclass(frozen=True)
class PackedBatch:
    """One batch as it travels: pixels' bytes and labels in one message, so that nothing can be mispaired.

    Attributes:
        request: that it answers; its slot holds the runs' bytes. None for an iterable-style dataset.
        blob: the runs' bytes where they are not in the slot.
        runs: pipeline runs whose outputs the content refers to.
        content: the rest of the batch. Pickled where there are runs, with references in place of images.
        collated: the content is a batch; else it is the list of samples, for the collate_fn of the main process.
        failure: what the worker met instead.
    """

    request: Request | None
    blob: torch.Tensor | None = None
    runs: tuple[PackedRun, ...] = ()
    content: Any = None
    collated: bool = True
    failure: Failure | None = None

    def __repr__(self) -> str:
        return f"PackedBatch({self.request}, runs={list(self.runs)}, failure={self.failure is not None})"


# --- worker ----------------------------------------------------------------------------------------------------------


class Packer:
    """Turns a list of samples into a PackedBatch.

    Args:
        collate_fn: of the loader; runs here where it is torch's own or the samples hold no images.
        arena: of the loader, or None.
        run_size: most samples that a pipeline takes at once.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], arena: Arena | None, run_size: int) -> None:
        self._collate_fn, self._arena, self._run_size = collate_fn, arena, run_size
        self._collate_here = collate_fn is default_collate

    def __call__(self, samples: Any, request: Request | None = None) -> PackedBatch:
        """
        Args:
            samples: what the dataset gave: a list of samples, or one sample where batching is off.
            request: that asked for them; its slot is written to.
        """
        content = self._collate_fn(samples) if self._collate_here else samples
        pickler = _ContentPickler(self._run_size)
        data = pickler.dumps(content)
        if not pickler.runs:
            content = content if self._collate_here else self._collate_fn(samples)
            return PackedBatch(request, content=content)
        slot = request.slot if request is not None else None
        writer = _Writer(self._arena.memory(slot) if self._arena is not None and slot is not None else None)
        runs = tuple(_pack_run(calls, writer) for calls in pickler.runs)
        return PackedBatch(request, writer.blob(), runs, data, self._collate_here)


class PackedDataset(torch.utils.data.Dataset[PackedBatch]):
    """What torch's workers see in the place of the user's map-style dataset: takes requests, gives packed batches."""

    def __init__(self, dataset: Any, packer: Packer, arena: Arena | None, batched: bool) -> None:
        self.dataset, self._packer, self._arena, self._batched = dataset, packer, arena, batched

    def __getitems__(self, request: Request) -> PackedBatch:
        try:
            return self._packer(self._fetch(request.indices), request)
        except Exception:
            info = get_worker_info()
            if info is None:
                raise
            # As a value, so that the slot comes back with it.
            return PackedBatch(request, failure=Failure.caught(f"in DataLoader worker process {info.id}"))
        finally:
            if self._arena is not None and request.slot is not None:
                self._arena.mark_ready(request.slot)

    def _fetch(self, indices: Any) -> Any:
        if not self._batched:
            return self._sample(indices)
        if getattr(self.dataset, "__getitems__", None) and not isinstance(self.dataset, torch.utils.data.Subset):
            return self.dataset.__getitems__(indices)
        return [self._sample(index) for index in indices]

    def _sample(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except ImageError as error:
            raise ImageError(f"dataset[{index}]: {error}") from error.__cause__


def set_up_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """torch's ``worker_init_fn`` for every worker: shows the user's dataset, and ends the worker with its parent."""
    info = get_worker_info()
    if isinstance(info.dataset, PackedDataset):
        # A user's code asks get_worker_info() for the dataset it gave to the loader.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    _keep_freed_memory()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True, name="proxyloader-watch").start()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _keep_freed_memory() -> None:
    """Let malloc keep a batch's memory for the next batch, which saves most of the time that reading files takes."""
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)


def _end_with_parent(parent_pid: int) -> None:
    # torch's own watchdog ends the loop of a worker whose parent was killed, but the process then waits for a queue
    # that nobody reads, and stays for ever. A worker of a forkserver has that for a parent: ask for the trainer, too.
    trainer = multiprocessing.parent_process()
    while os.getppid() == parent_pid and (trainer is None or trainer.is_alive()):
        time.sleep(1.0)
    os._exit(1)


class _ContentPickler:
    """Pickles a batch, sets images aside as calls grouped into runs, and leaves references in their place."""

    def __init__(self, run_size: int) -> None:
        self.runs: list[list[ProxyCall]] = []
        self._run_size = run_size
        self._open: dict[str, int] = {}  # server -> the run that takes its next single sample
        self._rows: dict[int, tuple[int, int]] = {}  # id of a call -> (run, row)
        self._batches: dict[int, Any] = {}  # id of a ProxyRun -> its run, or the (run, row) of each sample

    def dumps(self, content: Any) -> bytes:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.place = self._place
        pickler.dump(content)
        return buffer.getvalue()

    def _place(self, proxy: ProxyBatch | ProxySample) -> tuple[int, Any]:
        if isinstance(proxy, ProxySample):
            return proxy.output, self._row_of(proxy.call)
        if id(proxy.run) not in self._batches:
            self._batches[id(proxy.run)] = self._place_batch(proxy.run.calls)
        return proxy.output, self._batches[id(proxy.run)]

    def _place_batch(self, calls: Sequence[ProxyCall]) -> Any:
        rows = {id(call): (len(self.runs), row) for row, call in enumerate(calls)}
        distinct = len(rows) == len(calls) and self._rows.keys().isdisjoint(rows)
        if distinct and len(calls) <= self._run_size and all(call.server == calls[0].server for call in calls):
            self._rows.update(rows)
            self.runs.append(list(calls))
            return len(self.runs) - 1
        return [self._row_of(call) for call in calls]

    def _row_of(self, call: ProxyCall) -> tuple[int, int]:
        if id(call) not in self._rows:
            run = self._open.get(call.server)
            if run is None or len(self.runs[run]) == self._run_size:
                run = self._open[call.server] = len(self.runs)
                self.runs.append([])
            self._rows[id(call)] = run, len(self.runs[run])
            self.runs[run].append(call)
        return self._rows[id(call)]


class _Pickler(ForkingPickler):
    place: Callable[[ProxyBatch | ProxySample], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.place(obj) if isinstance(obj, (ProxyBatch, ProxySample)) else None

    def reducer_override(self, obj: Any) -> Any:
        # Labels are cheaper by value than as a shared file that is opened for each of them.
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.nbytes < LARGE_TENSOR_BYTES:
            try:
                return restore_tensor, (obj.detach().numpy(), obj.requires_grad)
            except (TypeError, RuntimeError):  # bfloat16, sparse: numpy has no such thing
                pass
        return NotImplemented


def restore_tensor(array: NDArray[Any], requires_grad: bool) -> torch.Tensor:
    return torch.from_numpy(array).requires_grad_(requires_grad)


class _Writer:
    """Puts arrays one after the other into a slot; when it is full, and without one, into memory of its own."""

    def __init__(self, slot: Memory | None) -> None:
        self._slot, self._at = slot, 0
        self._overflow: list[tuple[int, NDArray[Any]]] = []

    def add(self, array: NDArray[Any], align: bool = True) -> int:
        """Write an array; returns its offset in bytes."""
        if align:
            self._at = -(-self._at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        start, self._at = self._at, self._at + array.nbytes
        if self._slot is None or self._at > len(self._slot):
            self._overflow.append((start, array))
        else:
            self._slot[start : self._at] = array.reshape(-1).view(np.uint8)
        return start

    def blob(self) -> torch.Tensor | None:
        """All that was written, as one tensor, where the slot was too small."""
        if not self._overflow:
            return None
        blob = torch.empty(self._at, dtype=torch.uint8)
        memory, first = blob.numpy(), self._overflow[0][0]
        if self._slot is not None:
            memory[:first] = self._slot[:first]
        for start, array in self._overflow:
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return blob


def _pack_run(calls: Sequence[ProxyCall], writer: _Writer) -> PackedRun:
    inputs = []
    for position, arrays in enumerate(zip(*(call.inputs for call in calls))):
        kinds = {(array.dtype.str, array.ndim) for array in arrays}
        if len(kinds) > 1:
            found = ", ".join(sorted(f"{np.dtype(dtype)} with {ndim} dimensions" for dtype, ndim in kinds))
            raise InputError(f"input {position} of the pipeline differs within a batch: {found}. DALI takes one kind")
        one_shape = all(array.shape == arrays[0].shape for array in arrays)
        offsets = [writer.add(array, align=not one_shape or k == 0) for k, array in enumerate(arrays)]
        shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), -1)
        inputs.append(PackedInput(arrays[0].dtype.str, np.array(offsets, np.int64), shapes))
    return PackedRun(calls[0].server, tuple(inputs), "\n".join(call.source for call in calls))


# --- main process ----------------------------------------------------------------------------------------------------


class ContentUnpickler(pickle.Unpickler):
    """Reads a packed batch's content, with decoded images in the place of references.

    Args:
        data: the content.
        resolve: gives the image or the batch for a reference (output, place or list of places).
        pin: put tensors into page-locked memory, as a stock loader with ``pin_memory`` does.
    """

    def __init__(self, data: bytes, resolve: Callable[[int, Any], Any], pin: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve, self._pin = resolve, pin

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(*pid)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _restore_pinned_tensor if self._pin and found is restore_tensor else found


def _restore_pinned_tensor(array: NDArray[Any], requires_grad: bool) -> torch.Tensor:
    return restore_tensor(array, requires_grad).pin_memory()
