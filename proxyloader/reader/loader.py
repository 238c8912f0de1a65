"""FileReaderLoader: DALI's readers and iterators with the interface of a DataLoader. No workers. Main process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from .. import _fork_safety
from .._random_state import seed_for
from .._validation import check_int, check_num_threads
from ..dali import api, executor
from ..dali.build import PipelineOptions
from ..dali.device import check_device, cuda_ordinal
from ..data.distributed import Auto, World
from ..data.sharded_sampler import LastBatchPolicy
from .arguments import are_class_numbers, as_called, check_pipeline_function, check_reader_options, is_transform, named
from .bad_files import find_bad_file
from .epochs import ReaderEpochs
from .plan_pipeline import plan_without_chance, transformed
from .sources import READER_NAME, Reader, Root

STYLES = ("torch", "dali")

STATE_VERSION = 2


def _nobody(error: Exception, *, batch: range) -> str:
    """Who is to blame in a pipeline that was given."""
    return ""


class FileReaderLoader:
    """Batches read, decoded and augmented by DALI alone: its reader, its operators, its iterator.

    Without a Python dataset and without workers, it needs less of the CPU than ``DataLoader``; in exchange, labels and
    what is random are DALI's. To build the pipeline yourself: ``FileReaderLoader.from_pipeline``.

    Args:
        root: what is read; for the file reader a folder ``root/class/image.jpg``, for tfrecord and webdataset a file or
            several, for caffe2 (LMDB) and numpy a folder. None: ``reader_options`` says it (``file_list``). What
            lies in it is listed when the loader is made, and again after a loop that was left early: leave it as it is.
            DALI reads each file as a whole, however large; ``DataLoader`` reads no more than an image needs.
        pipeline: ``pipelines.training``, ``pipelines.validation``, or a function of your own made by
            ``@pipeline_def`` that takes ``source``: ``encoded, labels = source()`` adds the reader to its graph. Or a
            torchvision transform without chance, as for validation, whose pixels are then those of ``DataLoader``.
        batch_size: samples in a batch.
        shuffle: DALI's ``random_shuffle``: samples are picked at random among the next ``initial_fill`` (1024) of a
            list that was shuffled once. The order of an epoch follows from those that were read before it, and from
            where loops were left.
        reader: "file", "tfrecord", "webdataset", "caffe2" or "numpy".
        reader_options: more arguments of that reader in ``nvidia.dali.fn.readers``. Of webdataset ``ext`` names the
            parts of a sample (["jpg;jpeg;png", "cls"]), of which cls is a label in digits and others come as bytes; of
            tfrecord ``features`` names image and label (("image/encoded", "image/class/label")), or the image alone.
            (The file reader keeps 32 bits of a label of its ``file_list``; larger ones it changes.)
        num_shards: how many processes share the data; this one reads its shard, and another shard in each epoch, unless
            ``reader_options={"stick_to_shard": True}``. "auto" takes ``World.current()``. By default it reads all.
        shard_id: which of them this is, from 0; by default its rank.
        last_batch_policy: "partial": each sample once in an epoch; shards may differ by one batch. "fill": the last
            batch is filled up with its last sample. "drop": the last batch is left out if it is not full. With these
            two all shards have as many batches. Also DALI's ``LastBatchPolicy``.
        auto_reset: for ``next(loader)``: whether the next epoch begins by itself, or with ``reset()``. A ``for`` loop
            always begins one.
        style: "torch": what the pipeline gives, as a tuple, or alone where it is one output; what is named "label" and
            is a whole number for each sample as (N,) int64, on the device of the images. "dali": as DALI's iterators,
            ``[{"data": ..., "label": ...}]``.
        output_map: names of the pipeline's outputs; None: "data", "label".
        device: CUDA device, "cpu", or None: a GPU where there is one.
        num_threads: DALI's CPU threads.
        seed: the same gives the same batches, in two runs whose loops are the same; None: drawn from torch's default
            generator. (Needed to load a state.)
        prefetch: batches that DALI prepares ahead.
        graph_options: all else goes to ``pipeline``, such as ``size=192``; or ``enable_checkpointing=False``, where an
            operator has no checkpoints.

    Raises:
        FileNotFoundError: ``root`` is not there, or nothing in it can be read.
        UnsupportedTransformError: ``pipeline`` is a transform that draws random numbers, or is not translated.
        TypeError, ValueError: what an argument should be, and is not.
        PipelineError: as ``ProxyServer``.

    Source: ``nvidia.dali.plugin.pytorch.DALIClassificationIterator``, ``DALIGenericIterator``.
    """

    def __init__(
        self,
        root: Root | None,
        pipeline: Callable[..., api.Pipeline],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        reader: str = "file",
        reader_options: Mapping[str, Any] | None = None,
        num_shards: int | Auto | None = None,
        shard_id: int | Auto | None = None,
        last_batch_policy: Any = "partial",
        auto_reset: bool = True,
        style: Literal["torch", "dali"] = "torch",
        output_map: Sequence[str] | None = None,
        device: Any = None,
        num_threads: int | None = None,
        seed: int | None = None,
        prefetch: int = 2,
        **graph_options: Any,
    ) -> None:
        if is_transform(pipeline):
            plan = plan_without_chance(pipeline)
            pipeline, graph_options = transformed, {"plan": plan, **graph_options}
        check_pipeline_function(pipeline, graph_options)
        check_device(device)
        check_int("batch_size", batch_size, 1)
        check_int("prefetch", prefetch, 1)
        if seed is not None:
            check_int("seed", seed, 0, ", or None")
        if num_threads is not None:
            check_num_threads(num_threads, ", or None")
        check_reader_options(reader_options)
        options = dict(reader_options or {})
        moves = not options.pop("stick_to_shard", False)
        world = World(1, 0) if num_shards is None else World.of(num_shards, "auto" if shard_id is None else shard_id)
        if num_shards is not None:
            world.check_processes()
        elif shard_id is not None:
            raise ValueError(f"shard_id={shard_id!r} needs num_shards, the number of processes, or 'auto'")
        described = Reader(root, reader, shuffle, world.num_shards, world.shard_id, True, not moves, options)
        ordinal = cuda_ordinal(device)
        threads = PipelineOptions(batch_size, ordinal, num_threads).threads
        seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed

        def built(epoch: int, checkpoint: bytes | None) -> api.Pipeline:
            shard = (world.shard_id + epoch * moves) % world.num_shards
            return pipeline(
                source=replace(described, shard_id=shard),
                batch_size=batch_size,
                num_threads=threads,
                device_id=ordinal,
                seed=seed_for(seed, "pipeline", world.shard_id, epoch),
                prefetch_queue_depth=prefetch,
                **{"enable_checkpointing": True, "checkpoint": checkpoint, **graph_options},
            )

        told = {
            "seed": seed,
            "num_shards": world.num_shards,
            "shard_id": world.shard_id,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "stick_to_shard": not moves,
            "last_batch_policy": LastBatchPolicy.of(last_batch_policy).value,
            "reader": reader,
            "pipeline": as_called(pipeline.__name__, graph_options),
        }
        blamed = partial(find_bad_file, source=described)
        self._set_up(built, READER_NAME, last_batch_policy, auto_reset, style, output_map, told, blamed)

    @classmethod
    def from_pipeline(
        cls,
        pipeline: api.Pipeline,
        reader_name: str = READER_NAME,
        *,
        last_batch_policy: Any = "partial",
        auto_reset: bool = True,
        style: Literal["torch", "dali"] = "torch",
        output_map: Sequence[str] | None = None,
    ) -> FileReaderLoader:
        """A loader over a pipeline of your own, which has a reader of that name: ``fn.readers.file(name="Reader")``.

        Give the reader ``pad_last_batch=True``: DALI's iterators keep epochs apart only then. A pipeline has one
        loader; a later one takes it over, and begins it anew where it was left in the middle of an epoch.

        Raises:
            TypeError, ValueError: it is no pipeline, has no such reader, is to be fed by hand, or was left in the
                middle of an epoch and cannot begin anew; and as the class.
        """
        if not isinstance(pipeline, api.Pipeline):
            raise TypeError(
                f"from_pipeline takes a nvidia.dali.Pipeline, got {named(pipeline)}. "
                "Call the function that makes it, with batch_size, num_threads and device_id"
            )

        def built(epoch: int, _: None) -> api.Pipeline:
            if epoch:
                seed = None if pipeline.seed is None else seed_for(pipeline.seed, "pipeline", epoch)
                executor.take_apart(pipeline, seed)
            return pipeline

        loader = cls.__new__(cls)
        loader._set_up(built, reader_name, last_batch_policy, auto_reset, style, output_map, {})
        return loader

    def _set_up(
        self,
        built: Callable[..., api.Pipeline],
        reader_name: str,
        last_batch_policy: Any,
        auto_reset: bool,
        style: str,
        output_map: Sequence[str] | None,
        told: dict[str, Any],
        blamed: Callable[..., str] = _nobody,
    ) -> None:
        if style not in STYLES:
            raise ValueError(f"style is one of {', '.join(STYLES)}, got {style!r}")
        policy = LastBatchPolicy.of(last_batch_policy)
        self._auto_reset, self._style = auto_reset, style
        self._told = told  # what a state must agree with; nothing of a pipeline that was given
        self._turn = _Turn()  # of the loop whose batches are handed out
        self._own_turn: _Turn | None = None  # of next(loader)
        self._loop: weakref.ref[_Loop] | None = None  # that was begun last
        self._lock = threading.RLock()  # of the epoch, which several threads may ask
        self._epochs = ReaderEpochs(built, reader_name, policy, output_map, is_given=not told, find_bad_file=blamed)
        _fork_safety.watch(self)

    @property
    def batch_size(self) -> int:
        with self._lock:
            return self._epochs.batch_size

    @property
    def pipeline(self) -> api.Pipeline:
        """The DALI pipeline."""
        return self._epochs.pipeline

    @property
    def output_map(self) -> list[str]:
        """Names of the pipeline's outputs."""
        return self._epochs.output_map

    def __len__(self) -> int:
        """How many batches the epoch has that is under way, or comes next."""
        with self._lock:
            was_left = self._own_turn is None and self._loop is not None and self._loop() is None
            return self._epochs.batches_of(self._epochs.next_epoch) if was_left else len(self._epochs)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. A loop that was under way ends: one pipeline cannot read two at once."""
        with self._lock:
            loop = _Loop(self, self._begin())
            self._loop = weakref.ref(loop)
            return loop

    def __next__(self) -> Any:
        """The next batch of the epoch that ``next`` has begun, as with DALI's iterators.

        Where threads share an epoch let them share a loop, ``iter(loader)``: with ``auto_reset`` this begins another
        epoch for a thread that asks once more behind the end.
        """
        with self._lock:
            turn = self._own_turn = self._own_turn or self._begin()
        try:
            return self._next(turn)
        except StopIteration:
            with self._lock:
                if self._auto_reset and turn is self._own_turn:  # else another thread has begun an epoch
                    self._own_turn = None
            raise

    def reset(self) -> None:
        """Let ``next(loader)`` begin an epoch, also in the middle of one."""
        self._own_turn = None

    def _begin(self) -> _Turn:
        """Begin an epoch, and a turn that it belongs to."""
        with self._lock:
            self._epochs.begin()
            self._turn = _Turn()
            return self._turn

    def _next(self, turn: _Turn) -> Any:
        took = False
        try:
            with self._lock:  # in the try, for Ctrl-C may come when it is given back
                if turn.is_over:  # as another thread has seen that shares the loop
                    raise StopIteration
                if turn is not self._turn:
                    raise RuntimeError(
                        "another loop over this FileReaderLoader has begun, and its pipeline reads one epoch at a "
                        "time. For two loops at once build two loaders"
                    )
                took = True
                try:
                    batch = self._epochs.next_batch()
                except StopIteration:
                    turn.is_over = True
                    raise
                return [batch] if self._style == "dali" else self._as_torch(batch)
        except StopIteration:
            raise
        except BaseException:
            if took and turn is self._turn:
                self._epochs.lose_batch()
                self._own_turn = None
            raise

    def _as_torch(self, batch: dict[str, torch.Tensor]) -> Any:
        outputs = [batch[name] for name in self.output_map]
        for at, name in enumerate(self.output_map):
            if name == "label" and are_class_numbers(outputs[at], len(outputs[0])):
                outputs[at] = outputs[at].reshape(-1).to(outputs[0].device, torch.int64)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next loop is: which shard it reads, and what DALI draws. Without it the loader counts its
        loops: in all processes alike, then, or they would read the same shard. (With ``shuffle=True`` the epoch has
        another order than after the epochs before it; ``load_state_dict`` brings that back.)

        Raises:
            ValueError: it is no whole number, or less than 0; or the pipeline was given.
        """
        check_int("epoch", epoch, 0)
        if self._epochs.is_given:
            raise ValueError("set_epoch is for pipelines that FileReaderLoader builds; this one was given")
        with self._lock:
            if epoch != self._epochs.next_epoch:
                self._epochs.go_to(epoch)
                self._end_loops()

    def _end_loops(self) -> None:
        """Those under way; the epoch is another."""
        self._turn, self._own_turn = _Turn(), None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, with DALI's own checkpoint of the pipeline. Can be pickled (``torch.save``).

        Raises:
            ValueError: the pipeline was built without ``enable_checkpointing=True``.
        """
        with self._lock:
            return {"version": STATE_VERSION, **self._told, **self._epochs.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop go on where ``state_dict`` was called: with the batches that were left, bit for bit.

        Raises:
            ValueError: it is no such state, or that of a loader with other arguments or another number of samples; or
                this loader was made by ``from_pipeline``.
        """
        if self._epochs.is_given:
            raise ValueError(
                "this loader was given its pipeline, which cannot go to another place in the data by itself: build the "
                "pipeline with checkpoint=state['checkpoint'], and make the loader from that"
            )
        wanted = {"version": STATE_VERSION, **self._told, "samples": self._epochs.samples}
        if not isinstance(state_dict, dict) or not {*ReaderEpochs.STATE, *wanted} <= state_dict.keys():
            raise ValueError(
                f"load_state_dict takes what state_dict of a FileReaderLoader gave, got {type(state_dict)}"
            )
        others = [name for name, value in wanted.items() if state_dict[name] != value]
        if others:
            saved, here = (", ".join(f"{name}={of[name]!r}" for name in others) for of in (state_dict, wanted))
            raise ValueError(
                f"the state was saved by a loader with {saved}, and this one has {here}. Give it the same arguments"
            )
        with self._lock:
            self._epochs.load_state_dict(state_dict)
            self._end_loops()

    def close(self) -> None:
        """Free the pipeline: its threads, its memory on a GPU. What was handed out stays."""
        with self._lock:
            self._epochs.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a FileReaderLoader cannot be pickled or copied, as DALI's pipeline cannot; make one in each process. "
            "Where it stands can: loader.state_dict()"
        )

    def __enter__(self) -> FileReaderLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FileReaderLoader({self._epochs.in_words()})"

    # --- around a fork: see NOTE [ Forks ] in _fork_safety.py --------------------------------------------------------

    def pause(self) -> bool:
        """DALI reads ahead whatever is asked of it, so it says that runs were under way."""
        return self._epochs.is_open

    def resume(self) -> None: ...

    def forget_in_child(self) -> None:
        self._lock = threading.RLock()  # the other is held for ever by a thread that is not here, perhaps
        if self._epochs.is_open:
            executor.forget_in_child(self.pipeline)
            self.close()

    def end(self) -> None:
        """The interpreter ends, and the pipeline before."""
        self._lock = threading.RLock()  # a thread that waits until Python ends may hold the other
        self.close()


class _Turn:
    """Whose batches are handed out: those of one loop, or of ``next(loader)`` in one epoch."""

    is_over = False
    """All of them were."""


class _Loop:
    """One epoch of a loader."""

    def __init__(self, loader: FileReaderLoader, turn: _Turn) -> None:
        self._loader: FileReaderLoader | None = loader
        self._turn = turn

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        if (loader := self._loader) is None:  # which another thread may set meanwhile
            raise StopIteration
        try:
            return loader._next(self._turn)
        except StopIteration:
            self._loader = None  # a loop that has ended keeps no pipeline
            raise
