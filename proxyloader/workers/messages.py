"""Messages from a worker to the main process. One batch is one message, so that images and labels cannot part."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from ..data.bad_samples import UnreadableSample
from ..errors import ProxyLoaderError
from ..transforms.plan import Plan
from .arena import Arena, Memory
from .request_sampler import BatchRequest

ALIGNMENT_BYTES = 64


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
        if self.shapes.shape[1] == 1 and dtype == np.uint8:  # encoded images, of which there are many
            return [memory[start:end] for start, end in spans]
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
class WorkerError:
    """An exception on its way to the main process.

    Attributes:
        wrapper: torch's, for exceptions of the user's code: re-raised with its type, as a stock loader does.
        error: one of ours; its message says all there is to say, and the worker's traceback is its cause. Or, where
            there are no workers, the exception itself, which has come from nowhere else.
    """

    wrapper: ExceptionWrapper | None
    error: Exception | None

    @classmethod
    def caught(cls, where: str) -> WorkerError:
        """Of the exception that is being handled."""
        error = sys.exc_info()[1]
        wrapper: Any = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
        if isinstance(error, MemoryError):
            wrapper.exc_type = MemoryError  # numpy's own is not made of a message
        failure = cls(wrapper, error if isinstance(error, ProxyLoaderError) else None)
        try:
            ForkingPickler.dumps(failure)
        except Exception:  # of a class that only the worker can see
            wrapper.exc_type = RuntimeError
            failure = cls(wrapper, None)
        return failure

    def reraise(self) -> None:
        if self.wrapper is None:
            error = self.error
            object.__setattr__(self, "error", None)
            try:
                assert error is not None
                raise error
            finally:
                del error  # it would hold this frame, and the frame it
        # Tracebacks that begin here: the frames behind would hold the exception itself, and the loader, for ever.
        if self.error is not None:
            cause = RuntimeError(f"{self.wrapper.where}:\n{self.wrapper.exc_msg}")
            raise copy.copy(self.error).with_traceback(None) from cause
        try:
            self.wrapper.reraise()  # type: ignore[no-untyped-call]
        except BaseException as error:
            raise error.with_traceback(None) from error.__cause__


@dataclass(frozen=True)
class PackedBatch:
    """One batch as it travels: pixels' bytes and labels in one message, so that nothing can be mispaired.

    Attributes:
        request: that it answers; its slot holds the runs' bytes. None for an iterable-style dataset.
        size_bytes: of all runs together.
        blob: the runs' bytes where they are not in the slot.
        runs: pipeline runs whose outputs the content refers to.
        content: the rest of the batch. Pickled where there are runs, with references in place of images.
        kept: tensors that the content refers to, where it does not leave the process.
        collated: the content is a batch; else it is the list of samples, for the collate_fn of the main process.
        batched: it is of a list of samples, not of one.
        samples: each sample pickled by itself, for a batch that must be put together anew without some of them.
        indices: of the samples, where they are not those of the request.
        unreadable: samples that are missing in it.
        damaged: indices of samples whose JPEG is not whole.
        plans: of its runs, where the loader did not know them before.
        failure: what the worker met instead.
        worker, worker_state: the worker's number, and the state of its dataset after this batch, where that has one.
    """

    request: BatchRequest | None
    size_bytes: int = 0
    blob: torch.Tensor | None = None
    runs: tuple[PackedRun, ...] = ()
    content: Any = None
    kept: tuple[torch.Tensor, ...] = ()
    collated: bool = True
    batched: bool = True
    samples: tuple[bytes, ...] = ()
    indices: Sequence[Any] | None = None
    unreadable: tuple[UnreadableSample, ...] = ()
    damaged: tuple[Any, ...] = ()
    plans: tuple[Plan, ...] = ()
    failure: WorkerError | None = None
    worker: int = 0
    worker_state: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"PackedBatch({self.request}, runs={list(self.runs)}, failure={self.failure is not None})"

    def memory(self, arena: Arena | None) -> Memory:
        """Where the runs' bytes are, (bytes,) uint8."""
        if self.blob is not None:
            return self.blob.numpy()
        assert arena is not None and self.request is not None and self.request.slot is not None
        return arena.memory(self.request.slot, self.size_bytes)

    @property
    def is_empty(self) -> bool:
        """None of its samples could be read."""
        return self.indices is not None and not self.indices


@dataclass(frozen=True)
class BatchMessage:
    """A packed batch on torch's queue.

    It is pickled before it gets there, so that what cannot be pickled is an error of its batch. And where there is a
    slot the pickle lies there, too: then the message is so short that a pipe takes it whole or not at all, and a worker
    that is killed leaves no half of one behind, for which the main process would wait for ever.

    Attributes:
        number: of the request that it answers; None for a stream.
        data: the pickle; None: it lies in the slot, from ``start`` to ``end``.
        opened: what the pickle holds, from its arrival on. It may refer to memory that its worker has to hand over, and
            a stream's worker may be gone when the batch's turn comes.
    """

    number: int | None
    data: bytes | None = None
    start: int = 0
    end: int = 0
    opened: PackedBatch | None = None

    @classmethod
    def of(cls, batch: PackedBatch, arena: Arena | None = None) -> BatchMessage:
        """In the worker."""
        request = batch.request
        number = request.number if request is not None else None
        batch = dataclasses.replace(batch, request=None)  # the main process has kept it
        try:
            data = ForkingPickler.dumps(batch)
        except Exception:
            batch = PackedBatch(None, failure=WorkerError.caught("when a batch was to be sent to the main process"))
            data = ForkingPickler.dumps(batch)
        if arena is None or request is None or request.slot is None:
            return cls(number, bytes(data))
        start = aligned(batch.size_bytes)
        arena.memory(request.slot, start + len(data))[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return cls(number, None, start, start + len(data))

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.number, self.data, self.start, self.end)

    def open(self, request: BatchRequest | None, arena: Arena | None) -> PackedBatch:
        """In the main process."""
        batch = self.opened
        if batch is None:
            assert arena is not None and request is not None and request.slot is not None
            batch = pickle.loads(arena.memory(request.slot, self.end)[self.start : self.end].data)
        return dataclasses.replace(batch, request=request)

    def pin_memory(self, device: Any = None) -> BatchMessage:
        """What torch's thread for page-locked memory does to batches without images."""
        batch = self.open(None, None)
        content = pin_memory(batch.content, device)  # type: ignore[no-untyped-call]
        return dataclasses.replace(self, opened=dataclasses.replace(batch, content=content))


def _arrived(number: int | None, data: bytes | None, start: int, end: int) -> BatchMessage:
    return BatchMessage(number, None, start, end, None if data is None else pickle.loads(data))


def aligned(size_bytes: int) -> int:
    """The next offset in a batch's memory at which something may begin."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
