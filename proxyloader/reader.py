"""FileReaderLoader: DALI's own readers and iterators behind the face of a DataLoader. No workers. Main process.

NOTE [ Epochs of a reader ]
DALI's iterators keep epochs apart only if the reader pads its last batch, so ours always does (``pad_last_batch``).
The iterator then cuts the padding off (PARTIAL) or leaves it (FILL). With DROP it loses count of padded batches where
shards differ by one sample, and begins the next epoch with one of them (DALI 2.4); so DROP is done here, as FILL of
which the last batch is not handed out. And DALI cannot leave an epoch half way: what its threads have read ahead would
be in the next one. So after a ``break`` the pipeline is built anew, on the shard that is next and with another seed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from . import _dali, forks
from .arguments import at_least
from .device import check_device, cuda_ordinal
from .errors import PipelineError
from .pipeline import PipelineOptions
from .reader_arguments import are_class_numbers, check_pipeline_function, is_transform, named, names_of, what_failed
from .seeding import seed_for
from .sharding import LastBatchPolicy
from .sources import READER_NAME, Reader, Root
from .transformed import plan_without_chance, transformed
from .world import Auto, World

log = logging.getLogger("proxyloader")

STYLES = ("torch", "dali")

Built = Callable[..., _dali.Pipeline]
"""From the number of an epoch to the pipeline that begins with it; and, to go on in it, from DALI's checkpoint."""

STATE_VERSION = 1


class FileReaderLoader:
    """Batches read, decoded and augmented by DALI alone: its reader, its operators, its iterator.

    Without a Python dataset and without workers, it needs less of the CPU than ``DataLoader``; in exchange, labels and
    what is random are DALI's. To build the pipeline yourself: ``FileReaderLoader.from_pipeline``.

    Args:
        root: what is read; for the file reader a folder ``root/class/image.jpg``, for tfrecord and webdataset a file or
            several, for caffe, caffe2 (LMDB) and numpy a folder. None: ``reader_options`` says it (``file_list``).
        pipeline: ``pipelines.training``, ``pipelines.validation``, or a function of your own made by
            ``@pipeline_def`` that takes ``source``: ``encoded, labels = source()`` adds the reader to its graph. Or a
            torchvision transform without chance, as for validation, whose pixels are then those of ``DataLoader``.
        batch_size: samples in a batch.
        shuffle: DALI's ``random_shuffle``: samples are picked at random among the next ``initial_fill`` (1024) of a
            list that was shuffled once.
        reader: "file", "tfrecord", "webdataset", "caffe", "caffe2" or "numpy".
        reader_options: more arguments of that reader in ``nvidia.dali.fn.readers``.
        num_shards: how many processes share the data; this one reads its shard, and another shard in each epoch, unless
            ``reader_options={"stick_to_shard": True}``. "auto" takes ``World.current()``. By default it reads all.
        shard_id: which of them this is, from 0; by default its rank.
        last_batch_policy: "partial": each sample once in an epoch; shards may differ by one batch. "fill": the last
            batch is filled up with its last sample. "drop": the last batch is left out if it is not full. With these
            two all shards have as many batches. Also DALI's ``LastBatchPolicy``.
        auto_reset: for ``next(loader)``: whether the next epoch begins by itself, or with ``reset()``. A ``for`` loop
            always begins one.
        style: "torch": what the pipeline gives, as a tuple; what is named "label" and is a whole number for each sample
            as (N,) int64, on the device of the images. "dali": as DALI's iterators, ``[{"data": ..., "label": ...}]``.
        output_map: names of the pipeline's outputs; None: "data", "label".
        device: CUDA device, "cpu", or None: a GPU where there is one.
        num_threads: DALI's CPU threads.
        seed: the same gives the same batches; None: drawn from torch's default generator. (Needed to load a state.)
        prefetch: batches that DALI prepares ahead.
        graph_options: all else goes to ``pipeline``, such as ``size=192``; or ``enable_checkpointing=False``, where an
            operator has no checkpoints.

    Raises:
        FileNotFoundError: ``root`` is not there, or nothing in it can be read.
        UnsupportedTransformError: ``pipeline`` is a transform that draws random numbers, or is not translated.
        TypeError, ValueError: what an argument should be, and is not.

    Source: ``nvidia.dali.plugin.pytorch.DALIClassificationIterator``, ``DALIGenericIterator``.
    """

    def __init__(
        self,
        root: Root | None,
        pipeline: Callable[..., _dali.Pipeline],
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
        options = dict(reader_options or {})
        moves = not options.pop("stick_to_shard", False)
        if options.get("shuffle_after_epoch"):
            raise ValueError(
                "reader_options has shuffle_after_epoch, with which orders depend on how many epochs were read to "
                "their end: processes that differ in that would read the same samples. Use shuffle=True"
            )
        world = World(1, 0) if num_shards is None else World.of(num_shards, "auto" if shard_id is None else shard_id)
        if num_shards is not None:
            world.check_processes()
        elif shard_id is not None:
            raise ValueError(f"shard_id={shard_id!r} needs num_shards, the number of processes, or 'auto'")
        described = Reader(root, reader, shuffle, world.num_shards, world.shard_id, True, not moves, options)
        ordinal = cuda_ordinal(device)
        threads = PipelineOptions(batch_size, ordinal, num_threads).threads
        seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed

        def built(epoch: int, checkpoint: bytes | None = None) -> _dali.Pipeline:
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

        told = {"seed": seed, "num_shards": world.num_shards, "shard_id": world.shard_id, "batch_size": batch_size}
        self._set_up(built, READER_NAME, last_batch_policy, auto_reset, style, output_map, told)

    @classmethod
    def from_pipeline(
        cls,
        pipeline: _dali.Pipeline,
        reader_name: str = READER_NAME,
        *,
        last_batch_policy: Any = "partial",
        auto_reset: bool = True,
        style: Literal["torch", "dali"] = "torch",
        output_map: Sequence[str] | None = None,
    ) -> FileReaderLoader:
        """A loader over a pipeline of your own, which has a reader of that name: ``fn.readers.file(name="Reader")``.

        Give the reader ``pad_last_batch=True``: DALI's iterators keep epochs apart only then.

        Raises:
            TypeError, ValueError: it is no pipeline, or has no such reader; and as the class.
        """
        if not isinstance(pipeline, _dali.Pipeline):
            raise TypeError(
                f"from_pipeline takes a nvidia.dali.Pipeline, got {named(pipeline)}. "
                "Call the function that makes it, with batch_size, num_threads and device_id"
            )

        def built(epoch: int, checkpoint: bytes | None = None) -> _dali.Pipeline:
            if checkpoint is not None:
                raise ValueError(
                    "this loader was given its pipeline, which cannot go to another place in the data by itself: build "
                    "the pipeline with checkpoint=state['checkpoint'], and make the loader from that"
                )
            if epoch:
                seed = None if pipeline.seed is None else seed_for(pipeline.seed, "pipeline", epoch)
                _dali.rebuild(pipeline, seed)
            return pipeline

        loader = cls.__new__(cls)
        loader._set_up(built, reader_name, last_batch_policy, auto_reset, style, output_map, {})
        return loader

    def _set_up(
        self,
        built: Built,
        reader_name: str,
        last_batch_policy: Any,
        auto_reset: bool,
        style: str,
        output_map: Sequence[str] | None,
        told: dict[str, Any],
    ) -> None:
        if style not in STYLES:
            raise ValueError(f"style is one of {', '.join(STYLES)}, got {style!r}")
        self._policy = _dali.LastBatchPolicy[LastBatchPolicy.of(last_batch_policy).name]
        self._built, self._reader_name, self._auto_reset, self._style = built, reader_name, auto_reset, style
        self._told = told  # what a state must agree with
        self._is_given = not told
        self._epoch = 0  # the one that is under way, or comes next
        self._turn = 0  # of the loop whose batches are handed out
        self._own_turn: int | None = None  # of next(loader)
        self._given, self._ended = 0, False
        self._goes_on = False  # the next loop, in the middle of an epoch
        self._is_broken = False
        self._pipeline: _dali.Pipeline | None = None
        self._open(output_map)
        forks.watch(self)

    def _open(self, output_map: Sequence[str] | None, checkpoint: bytes | None = None) -> None:
        """Build the pipeline, and DALI's iterator over it."""
        pipeline = self._built(self._epoch, checkpoint)
        try:
            pipeline.build()
        except RuntimeError as error:
            if "No files found" not in str(error):
                raise
            raise FileNotFoundError(
                "there is no file that DALI takes for an image by its ending: .jpg, .jpeg, .png, .webp, .bmp, ... "
                "For others give reader_options={'file_filters': ['*']}"
            ) from error
        readers = pipeline.reader_meta()
        if self._reader_name not in readers:
            raise ValueError(
                f"the pipeline has no reader named {self._reader_name!r}; it has {', '.join(readers) or 'none'}. "
                f"Name it: fn.readers.file(name={self._reader_name!r}, ...), or give the name as reader_name"
            )
        self._meta = readers[self._reader_name]
        self._first_epoch = self._epoch  # of this pipeline, which is on the shard that it says
        self.output_map = names_of(output_map, pipeline.num_outputs)
        padded = bool(self._meta["pad_last_batch"])
        if not padded and self._epoch == 0:
            log.warning(
                "the reader %r does not pad its last batch, so epochs run into each other: "
                "give it pad_last_batch=True for epochs in which each sample comes once",
                self._reader_name,
            )
        drops = self._policy is _dali.LastBatchPolicy.DROP
        how = {
            "reader_name": self._reader_name,
            "auto_reset": True,
            # See NOTE [ Epochs of a reader ].
            "last_batch_policy": _dali.LastBatchPolicy.FILL if drops and padded else self._policy,
            "prepare_first_batch": False,
        }
        if self.output_map == ["data", "label"]:
            self._batches: Any = _dali.DALIClassificationIterator(pipeline, **how)
        else:
            self._batches = _dali.DALIGenericIterator(pipeline, self.output_map, **how)
        self._pipeline, self._at_start, self._is_broken = pipeline, True, False

    @property
    def batch_size(self) -> int:
        return int(self.pipeline.max_batch_size)

    @property
    def pipeline(self) -> _dali.Pipeline:
        """The DALI pipeline."""
        if self._pipeline is None:
            raise RuntimeError(
                "this FileReaderLoader was closed, or belongs to the process that this one was forked from"
            )
        return self._pipeline

    def __len__(self) -> int:
        """How many batches the epoch has that is under way, or comes next."""
        samples, shards = int(self._meta["epoch_size"]), int(self._meta["number_of_shards"])
        if self._policy is _dali.LastBatchPolicy.DROP:
            return samples // shards // self.batch_size
        if self._policy is _dali.LastBatchPolicy.FILL:
            return math.ceil(math.ceil(samples / shards) / self.batch_size)
        moved = 0 if self._meta["stick_to_shard"] else self._epoch - self._first_epoch
        shard = (int(self._meta["shard_id"]) + moved) % shards
        in_shard = (shard + 1) * samples // shards - shard * samples // shards
        return math.ceil(in_shard / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. A loop that was under way ends: one pipeline cannot read two at once."""
        return _Loop(self, self._begin())

    def __next__(self) -> Any:
        """The next batch of the epoch that ``next`` has begun, as with DALI's iterators."""
        if self._own_turn is None:
            self._own_turn = self._begin()
        try:
            return self._next(self._own_turn)
        except StopIteration:
            if self._auto_reset:
                self._own_turn = None
            raise

    def reset(self) -> None:
        """Let ``next(loader)`` begin an epoch, also in the middle of one."""
        self._own_turn = None

    def _begin(self) -> int:
        """Begin an epoch, and a turn that it belongs to. See NOTE [ Epochs of a reader ]."""
        self.pipeline  # noqa: B018  raises where there is none
        if not self._at_start and not self._goes_on:
            self._leave_epoch()
        self._given = self._given if self._goes_on else 0
        self._turn, self._ended, self._goes_on = self._turn + 1, False, False
        return self._turn

    def _leave_epoch(self) -> None:
        """Come to the start of the next epoch from the middle of one."""
        moves = int(self._meta["number_of_shards"]) > 1 and not self._meta["stick_to_shard"]
        if not (self._is_given and moves):
            self._go_to(self._epoch + 1)
        elif self._is_broken:
            raise RuntimeError(
                "an epoch failed, and a pipeline that was given cannot go to its next shard by itself: build it anew, "
                "give its reader stick_to_shard=True, or let FileReaderLoader(root, function) build it"
            )
        else:
            log.warning(
                "the loop was left early, and the reader of a pipeline that was given comes to its next shard at an "
                "epoch's end alone: what is left is read and thrown away. stick_to_shard=True avoids that"
            )
            with contextlib.suppress(StopIteration):
                while True:
                    next(self._batches)
            self._epoch += 1

    def _go_to(self, epoch: int) -> None:
        self._batches = self._pipeline = None  # or two would be in memory
        self._epoch = epoch
        self._open(self.output_map)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next loop is, as for a ``DistributedSampler``. Without it the loader counts its loops: in
        all processes alike, then, or they would read the same shard.

        Raises:
            ValueError: it is no whole number, or less than 0; or the pipeline was given.
        """
        at_least("epoch", epoch, 0)
        if self._is_given:
            raise ValueError("set_epoch is for pipelines that FileReaderLoader builds; this one was given")
        if epoch != (self._epoch if self._at_start or self._goes_on else self._epoch + 1):
            self._go_to(epoch)
            self._turn, self._own_turn, self._goes_on = self._turn + 1, None, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, with DALI's own checkpoint of the pipeline. Can be pickled (``torch.save``).

        Raises:
            ValueError: the pipeline was built without ``enable_checkpointing=True``.
        """
        if not _dali.keeps_checkpoints(self.pipeline):
            raise ValueError("the pipeline keeps no checkpoints; build it with enable_checkpointing=True")
        (checkpoint,) = self._batches.checkpoints()
        here = {"epoch": self._epoch, "first_epoch": self._first_epoch, "batches": 0 if self._ended else self._given}
        return {"version": STATE_VERSION, **self._told, **here, "checkpoint": checkpoint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop go on where ``state_dict`` was called: with the batches that were left, bit for bit.

        Raises:
            ValueError: it is no such state, or that of a loader with another seed, batch size or shard; or this loader
                was made by ``from_pipeline``.
        """
        wanted = {"version": STATE_VERSION, **self._told}
        known = {"epoch", "first_epoch", "batches", "checkpoint", *wanted}
        if not isinstance(state_dict, dict) or not known <= state_dict.keys():
            raise ValueError(
                f"load_state_dict takes what state_dict of a FileReaderLoader gave, got {type(state_dict)}"
            )
        others = [f"{name}={state_dict[name]!r}" for name, value in wanted.items() if state_dict[name] != value]
        if others:
            raise ValueError(
                f"the state was saved by a loader with {', '.join(others)}, and this one has "
                f"{', '.join(f'{name}={wanted[name]!r}' for name in wanted)}. Give it the same arguments"
            )
        self._batches = self._pipeline = None  # or two would be in memory
        self._epoch = state_dict["first_epoch"]
        self._open(self.output_map, state_dict["checkpoint"])
        self._epoch, self._given = state_dict["epoch"], state_dict["batches"]
        self._turn, self._own_turn, self._ended = self._turn + 1, None, False
        self._goes_on = True

    def _next(self, turn: int) -> Any:
        if turn != self._turn:
            raise RuntimeError(
                "another loop over this FileReaderLoader has begun, and its pipeline reads one epoch at a time. "
                "For two loops at once build two loaders"
            )
        if self._ended:
            raise StopIteration
        if self._is_broken:
            raise RuntimeError(
                "this loop failed, or was interrupted, in the middle of a batch; begin a new one: iter(loader)"
            )
        self.pipeline  # noqa: B018  raises where there is none
        self._at_start = False
        try:
            while True:
                (batch,) = next(self._batches)
                self._given += 1
                if self._policy is _dali.LastBatchPolicy.DROP and self._given > len(self):
                    continue  # the next one ends the epoch
                if len(batch[self.output_map[0]]):  # a shard that is smaller than others ends with an empty one
                    return self._in_style(batch)
        except StopIteration:
            self._epoch += 1
            self._at_start = self._ended = True
            raise
        except BaseException as error:
            # DALI's iterator may have lost count, and no epoch after this one would be right.
            self._is_broken, self._own_turn = True, None
            if isinstance(error, (RuntimeError, AssertionError)):
                raise PipelineError(what_failed(error)) from error
            raise

    def _in_style(self, batch: dict[str, torch.Tensor]) -> Any:
        if self._style == "dali":
            return [batch]
        outputs = [batch[name] for name in self.output_map]
        for at, name in enumerate(self.output_map):
            if name == "label" and are_class_numbers(outputs[at], len(outputs[0])):
                outputs[at] = outputs[at].reshape(-1).to(outputs[0].device, torch.int64)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def close(self) -> None:
        """Free the pipeline: its threads, its memory on a GPU. What was handed out stays."""
        self._batches = self._pipeline = None
        self._built = _closed

    def __enter__(self) -> FileReaderLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        read = f"{self._meta['epoch_size']} samples, shard {self._meta['shard_id']} of {self._meta['number_of_shards']}"
        state = "closed" if self._pipeline is None else f"{len(self)} batches of {self.batch_size}"
        return f"FileReaderLoader({read}; {state}; {self._policy.name.lower()})"

    # --- around a fork: see NOTE [ Forks ] in forks.py --------------------------------------------------------------

    def hold_still(self) -> bool:
        """DALI reads ahead whatever is asked of it, so it says that runs were under way."""
        return self._pipeline is not None

    def go_on(self) -> None: ...

    def forget_in_child(self) -> None:
        if self._pipeline is not None:
            _dali.forget_in_child(self._pipeline)
            self.close()


class _Loop:
    """One epoch of a loader."""

    def __init__(self, loader: FileReaderLoader, turn: int) -> None:
        self._loader: FileReaderLoader | None = loader
        self._turn = turn

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        if self._loader is None:
            raise StopIteration
        try:
            return self._loader._next(self._turn)
        except StopIteration:
            self._loader = None  # a loop that has ended keeps no pipeline
            raise


def _closed(epoch: int) -> _dali.Pipeline:
    raise AssertionError("closed")
