"""Messages from a worker to the main process. Each batch is one message, so images and labels stay together."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from ..data.bad_samples import UnreadableSample
from ..data.batch_memory import aligned
from ..errors import ProxyLoaderError
from ..kernels.programs import Schedule
from ..transforms.plan import Plan
from .arena import Arena, Memory
from .request_sampler import BatchRequest


@dataclass(frozen=True)
class PackedInput:
    """Locations of one input of a run in the memory of its batch."""

    dtype: str  # NumPy's name of it, such as "|u1"
    offsets: NDArray[np.int64]  # (N,), in bytes
    shapes: NDArray[np.int64]  # (N, ndim)

    def views(self, memory: Memory) -> NDArray[Any] | list[NDArray[Any]]:
        """Return one array (N, ...) if all samples have the same shape; otherwise N arrays."""
        dtype = np.dtype(self.dtype)
        if (self.shapes == self.shapes[0]).all():
            shape = (len(self.shapes), *map(int, self.shapes[0]))
            start = int(self.offsets[0])
            return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        ends = self.offsets + self.shapes.prod(axis=1) * dtype.itemsize
        arrays = [memory[start:end] for start, end in zip(self.offsets.tolist(), ends.tolist())]
        if dtype == np.uint8 and self.shapes.shape[1] == 1:  # files
            return arrays
        return [array.view(dtype).reshape(shape) for array, shape in zip(arrays, self.shapes.tolist())]


@dataclass(frozen=True)
class PackedRun:
    """The inputs of a pipeline run, in the order of the pipeline."""

    server: str
    inputs: tuple[PackedInput, ...]
    sources: tuple[str, ...]  # paths of the files
    schedule: Schedule | None = None  # launches of kernels; None: DALI does all
    span: tuple[int, int] = (0, 0)  # of the memory of the schedule in that of the batch

    def __len__(self) -> int:
        """Number of decoded images, or of samples of a hand-written pipeline."""
        return len(self.inputs[0].offsets)

    @property
    def files(self) -> NDArray[Any] | None:
        """Index of the decoded image of each image; None if each has its own."""
        return None if self.schedule is None else self.schedule.files

    def find_file(self, output: int, row: int) -> int:
        """Return the number of the decoded image, or of the sample, that an image was made from."""
        if self.schedule is None:
            return row
        number = sum(count for count, _ in self.schedule.outputs[:output]) + row
        return number if self.files is None else int(self.files[number])


class WorkerError(ExceptionWrapper):
    """An exception of a worker to be raised in the main process.

    A ``ProxyLoaderError`` is raised with the traceback of the worker as its cause, others as by torch.
    """

    def __init__(self, error: Exception, where: str) -> None:
        """Capture the exception being handled."""
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        self.error = error if isinstance(error, ProxyLoaderError) else None
        if isinstance(error, MemoryError):
            self.exc_type: Any = MemoryError  # NumPy's subclass cannot be created from a message
        try:
            ForkingPickler.dumps(self)
        except Exception:  # its class cannot be pickled
            self.exc_type, self.error = RuntimeError, None

    def exception(self) -> Exception:
        """Return the exception to raise, without a traceback, because its frames would keep it alive."""
        if self.error is not None:
            self.error.__cause__ = RuntimeError(f"{self.where}:\n{self.exc_msg}")
            return self.error
        try:
            self.reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            return error.with_traceback(None)
        raise AssertionError("unreachable")


@dataclass(repr=False, eq=False)
class PackedBatch:
    """A batch for the main process: image bytes and labels in one message. The slot of its request holds the bytes."""

    request: BatchRequest | None  # request answered by this batch; None for an iterable-style dataset
    size_bytes: int = 0  # total size of all runs
    blob: torch.Tensor | None = None  # bytes of the runs if they are not in the slot
    runs: tuple[PackedRun, ...] = ()  # runs whose outputs the content references
    content: Any = None  # the rest of the batch; if there are runs, pickled, with references in place of images
    objects: tuple[torch.Tensor, ...] = ()  # referenced by index in content, such as shared memory
    masks: tuple[int, tuple[int, ...]] | None = None  # their offset, and the size of each part
    collated: bool = True  # whether the content is a batch; otherwise samples for the collate_fn in the main process
    image_counts: tuple[int, int, int] = (0, 0, 0)  # decoded by DALI, by Pillow for DALI, produced by the worker
    bytes_read: int = 0  # bytes of the JPEGs that DALI decodes, and of all inputs of hand-written pipelines
    num_samples: int = 0  # number of readable samples
    decode_reason: str = ""  # why the worker decoded the first deferred image, if it did and that is known
    is_computed: bool = False  # whether the content has tensors computed from outputs of the runs
    has_fallen_back: bool = False  # whether the worker no longer defers decoding
    has_seen_images: bool = False  # whether the worker has created undecoded images so far
    samples: tuple[bytes, ...] = ()  # pickled separately, if some may have to be removed and the rest collated again
    indices: Sequence[Any] | None = None  # indices of the samples, if they differ from the request's
    unreadable: tuple[UnreadableSample, ...] = ()  # missing samples
    plans: tuple[Plan, ...] = ()  # plans of the runs, unless the loader knows them
    failure: WorkerError | Exception | None = None  # without workers, the exception itself
    worker: int = 0
    worker_state: dict[str, Any] | None = None  # state of the worker's dataset after this batch
    # On torch's queue, a batch has only the number of its request, None for an iterable-style dataset, and its pickle,
    # or where that is in the slot.
    number: int | None = None
    data: bytes | None = None
    span: tuple[int, int] | None = None
    # In the main process, until the training loop receives the batch:
    pipeline_runs: list[Any] = field(default_factory=list)  # submitted for ``runs``, in their order
    is_last: bool = True  # of the batches that are decoded together
    delays_request: bool = False  # whether a worker gets the next request when the training loop receives this batch
    has_arrived: bool = True  # False if an error occurred before

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the only run of the batch; None if it has another number of runs, or without kernels."""
        runs = () if self.failure is not None else self.runs
        return runs[0].schedule if len(runs) == 1 else None

    def memory(self, arena: Arena | None) -> Memory:
        """Return the memory of the runs and the masks, (bytes,) uint8."""
        if self.blob is not None:
            return self.blob.numpy()
        assert arena is not None and self.request is not None and self.request.slot is not None
        return arena.memory(self.request.slot)

    def read(self, run: PackedRun, arena: Arena | None) -> tuple[list[Any], Schedule | None]:
        """Return the arguments of ``RunQueue.submit`` for a run: its inputs, and the schedule of its kernels."""
        memory = self.memory(arena)
        inputs = [part.views(memory) for part in run.inputs]
        if run.schedule is not None:
            run.schedule.memory = memory[slice(*run.span)]
        return inputs, run.schedule

    @property
    def sample_indices(self) -> Sequence[Any] | None:
        """The dataset index of each sample in the batch; None for an IterableDataset."""
        if self.indices is not None:
            return self.indices
        return self.request.index_list() if self.request is not None else None

    def sent(self, worker_info: Any, state: Callable[[], dict[str, Any]], arena: Arena | None = None) -> PackedBatch:
        """Return what torch's queue gets. ``worker_info`` is torch's in a worker, and None in the main process.

        The batch is pickled before it is put on the queue, so that a pickling error is raised for its batch. If the
        batch has a slot, its pickle is stored there, so the message is short enough to be written to the pipe
        atomically. A killed worker cannot leave a partial message, for which the main process would wait forever.

        Without a slot, a batch is unpickled on arrival: unpickling may fetch memory from the worker, which may exit
        before the batch is used if the dataset is iterable-style.
        """
        request = self.request
        self.number = request.number if request is not None else None
        if worker_info is None:
            return self
        # The main process keeps the request.
        batch = dataclasses.replace(self, request=None, worker=worker_info.id, worker_state=state() or None)
        try:
            data = ForkingPickler.dumps(batch)
        except Exception as error:
            failure = WorkerError(error, "while sending a batch to the main process")
            data = ForkingPickler.dumps(PackedBatch(None, failure=failure, number=self.number))
        if arena is None or request is None or request.slot is None:
            return PackedBatch(None, number=self.number, data=bytes(data))
        start = aligned(batch.size_bytes)
        arena.memory(request.slot)[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return PackedBatch(None, number=self.number, span=(start, start + len(data)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state if state["data"] is None else vars(pickle.loads(state["data"])))

    def open(self, request: BatchRequest | None, arena: Arena | None) -> PackedBatch:
        """Return the batch, which answers this request."""
        batch = self
        if self.span is not None:
            assert arena is not None and request is not None and request.slot is not None
            batch = pickle.loads(arena.memory(request.slot)[slice(*self.span)].data)
        batch.request = request
        return batch

    def pin_memory(self, device: Any = None) -> PackedBatch:
        """Copy the tensors of a batch without images to pinned memory, in torch's pin-memory thread."""
        return dataclasses.replace(self, content=pin_memory(self.content, device))  # type: ignore[no-untyped-call]
