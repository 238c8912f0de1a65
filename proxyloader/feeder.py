"""The feeder: keeps DALI fed with packed batches, hands out finished ones in order.

NOTE [ Who waits for what ]
All of it runs in the thread that iterates, at each ``next()``: batches that workers have ready are submitted until
``prefetch`` + 1 are under way, then the oldest is collected and handed out, and the others go on in DALI's threads
while the model trains. ``next()`` waits for a worker only when nothing is under way, and for DALI only for the oldest
batch. So there is no thread to stop, the sampler and torch's generators are used where a stock loader uses them, and
an error stays with its batch.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.pin_memory import pin_memory

from .arena import Memory
from .errors import ImageError, InputError, PipelineError
from .packing import ContentUnpickler, PackedBatch, PackedRun
from .road import Road
from .sample import EncodedImage

if TYPE_CHECKING:  # importing the server imports DALI
    from .server import Outputs, ProxyServer, Ticket


@dataclass(eq=False)
class _Fed:
    """A batch under way: what came from the worker, and a ticket for each of its runs; or what went wrong."""

    batch: PackedBatch | None = None
    tickets: list[Ticket] = field(default_factory=list)
    error: Exception | None = None

    def was_read(self) -> bool:
        return all(ticket.was_read() for ticket in self.tickets)

    def wait_until_read(self) -> None:
        for ticket in self.tickets:
            ticket.wait_until_read()


class Feeder:
    """The iterator of a DataLoader.

    Args:
        batches: torch's iterator over the road's workers.
        road: where they come from.
        servers: by the key that runs name them with.
        collate_fn: for batches that come as lists of samples.
        prefetch: most decoded batches that wait.
        pin: put CPU tensors into page-locked memory.
    """

    def __init__(
        self,
        batches: Iterator[PackedBatch],
        road: Road,
        servers: Mapping[str, ProxyServer],
        collate_fn: Callable[[Any], Any],
        prefetch: int,
        pin: bool,
    ) -> None:
        self._fed: deque[_Fed] = deque()
        self._batches: Iterator[PackedBatch] | None = batches
        self._road, self._servers, self._collate_fn = road, servers, collate_fn
        # In the calling thread nothing is gained by decoding ahead, and random numbers would be drawn too early.
        self._ahead = prefetch if road.workers.num_workers else 0
        self._pin = pin
        road.user = weakref.ref(self)

    def __iter__(self) -> Feeder:
        return self

    def __len__(self) -> int:
        return len(self._road.requests) if self._road.requests is not None else len(self._road.workers)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Forget the batches under way and let the workers go. An iterator that is dropped does it by itself."""
        while self._fed:
            fed = self._fed.popleft()
            for ticket in fed.tickets:
                ticket.abandoned = True
            self._give_back_slot(fed)
        self._batches = None

    def __next__(self) -> Any:
        while self._should_feed():
            self._feed()
        if not self._fed:
            raise StopIteration
        fed = self._fed.popleft()
        try:
            return self._finished(fed)
        finally:
            self._give_back_slot(fed)

    def _should_feed(self) -> bool:
        if self._batches is None:
            return False
        if self._road.user is None or self._road.user() is not self:
            raise RuntimeError(
                "a newer iterator of this DataLoader has taken its persistent workers; finish one before the next "
                "begins, or use persistent_workers=False"
            )
        if not self._fed:
            return True
        if len(self._fed) > self._ahead or self._fed[-1].error is not None:
            return False
        requests = self._road.requests
        return requests is None or requests.has_ready_batch(self._road.in_order)

    def _feed(self) -> None:
        """Take the next batch from the workers and start its runs."""
        assert self._batches is not None
        fed = _Fed()
        try:
            fed.batch = next(self._batches)
            if self._road.requests is not None and fed.batch.request is not None:
                self._road.requests.answered(fed.batch.request)
            self._submit(fed.batch, fed.tickets)
        except StopIteration:
            self._batches = None
            return
        except Exception as error:
            self._road.broken |= fed.batch is None
            fed.error = error
        self._fed.append(fed)

    def _submit(self, batch: PackedBatch, tickets: list[Ticket]) -> None:
        if batch.failure is not None:
            batch.failure.reraise()
        if not batch.runs:
            return
        memory = self._memory(batch)
        for run in batch.runs:
            if run.server not in self._servers:
                raise InputError(
                    "a sample was made by the proxy of another server than the loader's; "
                    "give the loader the server whose proxy the dataset calls: DataLoader(dataset, server=server)"
                )
            tickets.append(self._servers[run.server].submit([part.views(memory) for part in run.inputs]))

    def _memory(self, batch: PackedBatch) -> Memory:
        arena = self._road.arena
        if batch.blob is None:
            assert arena is not None and batch.request is not None and batch.request.slot is not None
            return arena.memory(batch.request.slot)
        if arena is not None:
            arena.wanted_bytes = max(arena.wanted_bytes, batch.blob.nbytes)
        return batch.blob.numpy()

    def _give_back_slot(self, fed: _Fed) -> None:
        if self._road.arena is not None and fed.batch is not None and fed.batch.request is not None:
            self._road.arena.give_back(fed.batch.request.slot, fed)

    # --- finished batches -------------------------------------------------------------------------------------------

    def _finished(self, fed: _Fed) -> Any:
        if fed.error is not None:
            error, fed.error = fed.error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        batch = fed.batch
        assert batch is not None
        if not batch.runs:
            return pin_memory(batch.content) if self._pin else batch.content  # type: ignore[no-untyped-call]
        outputs = [self._collected(batch, run, ticket) for run, ticket in zip(batch.runs, fed.tickets)]
        content = ContentUnpickler(batch.content, functools.partial(_resolve, outputs), self._pin).load()
        return content if batch.collated else self._collate_fn(content)

    def _collected(self, batch: PackedBatch, run: PackedRun, ticket: Ticket) -> Outputs:
        server = self._servers[run.server]
        try:
            return server.collect(ticket)
        except PipelineError as error:
            if run.server not in self._road.plans:
                raise PipelineError(f"{_samples_of(batch)}: {error}") from error
        # DALI does not say reliably which image it stumbled over. Pillow knows, or can read them all.
        images = self._decoded_by_pillow(batch, run)
        rest = [part.views(self._memory(batch)) for part in run.inputs[1:]]
        return server.collect(server.submit([images, *rest]))

    def _decoded_by_pillow(self, batch: PackedBatch, run: PackedRun) -> list[NDArray[np.uint8]]:
        images, sources = run.inputs[0].views(self._memory(batch)), run.sources.split("\n")
        decoded, failures = [], []
        for row, (image, source) in enumerate(zip(images, sources)):
            try:
                decoded.append(np.frombuffer(EncodedImage.by_pillow(image.tobytes(), source).data, np.uint8))
            except ImageError as error:
                failures.append(f"{_samples_of(batch, row if len(images) == len(run) else None)}: {error}")
        if failures:
            raise ImageError("; ".join(failures))
        return decoded


def _samples_of(batch: PackedBatch, row: int | None = None) -> str:
    indices = batch.request.indices if batch.request is not None else None
    if indices is None:
        return "a batch of an IterableDataset"
    one_image_each = len(batch.runs) == 1 and isinstance(indices, Sequence) and len(indices) == len(batch.runs[0])
    if row is not None and one_image_each:
        return f"dataset[{indices[row]}]"
    return f"in the batch of dataset indices {indices}"


def _resolve(outputs: list[Outputs], output: int, place: Any) -> Any:
    """The tensor that a reference stands for: a run's whole output, one row of it, or rows gathered from several."""
    if isinstance(place, int):
        found = outputs[place][output]
        return found if isinstance(found, torch.Tensor) else _stacked(found)
    if isinstance(place, tuple):
        run, row = place
        return outputs[run][output][row]
    return _stacked([outputs[run][output][row] for run, row in place])


def _stacked(images: Sequence[torch.Tensor]) -> torch.Tensor:
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise RuntimeError(
            f"the images of a batch must be of one size to be stacked; these are {shapes[0]}, {shapes[1]}"
            f"{', ...' if len(shapes) > 2 else ''} (C, H, W). Add a Resize to (height, width) or a crop to the "
            "transform, or give the loader a collate_fn that takes images of several sizes"
        )
    return torch.stack(list(images))
