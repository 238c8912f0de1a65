"""FileReaderLoader: DALI's readers and iterators with the interface of a DataLoader, without workers. Main process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from .._validation import check_int
from ..dali import api
from ..data.distributed import Auto
from ..data.sharded_sampler import LastBatchPolicy
from .arguments import check_reader_options, is_transform
from .epochs import ReaderEpochs, ReaderLoop
from .pipeline_factory import GivenPipeline, PipelineFactory, PipelineFunction
from .plan_pipeline import plan_without_chance, transformed
from .sources import READER_NAME, Reader, Root, world_of


def as_torch(outputs: dict[str, torch.Tensor]) -> Any:
    """Return the outputs as a tuple, or a single one by itself. Class numbers in "label" become (N,) int64."""
    first, label = next(iter(outputs.values())), outputs.get("label")
    fits = label is not None and label.numel() == len(first)  # one number for each sample
    if label is not None and fits and not label.is_floating_point() and label.dtype is not torch.bool:
        outputs["label"] = label.reshape(-1).to(first.device, torch.int64)
    found = tuple(outputs.values())
    return found if len(found) > 1 else found[0]


STYLES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {"torch": as_torch, "dali": lambda outputs: [outputs]}


class FileReaderLoader:
    """A loader whose batches DALI reads, decodes and augments, with its own reader, operators and iterator.

    It has no Python dataset and no workers, and needs less CPU time than ``DataLoader``. Labels and random numbers come
    from DALI. ``FileReaderLoader.from_pipeline`` takes a pipeline that was built elsewhere.

    Args:
        root: the data. For the file reader a folder with ``root/class/image.jpg``, for tfrecord and webdataset one or
            several files, for caffe2 (LMDB) and numpy a folder. None: ``reader_options`` names the data, with
            ``file_list`` or ``files``. The files are listed when the loader is built, and again after a loop that was
            left early, so they must not change. DALI reads whole files. ``DataLoader`` reads only what an image needs.
        pipeline: ``pipelines.training``, ``pipelines.validation``, or a function made by ``@pipeline_def`` with an
            argument ``source``, in which ``encoded, labels = source()`` adds the reader to the graph. Or a torchvision
            transform without random numbers, as for validation. Its pixels are then those of ``DataLoader``.
        batch_size: number of samples in a batch.
        shuffle: DALI's ``random_shuffle``: each sample is drawn from the next ``initial_fill`` (1024) samples of a list
            that was shuffled once. The order of an epoch depends on the epochs before it, and on where loops were left.
        reader: "file", "tfrecord", "webdataset", "caffe2" or "numpy".
        reader_options: more arguments of that reader in ``nvidia.dali.fn.readers``. For webdataset ``ext`` names the
            parts of a sample, by default ["jpg;jpeg;png", "cls"]. The part cls is a label in digits, and other parts
            are returned as bytes. For tfrecord ``features`` names the image and the label, by default
            ("image/encoded", "image/class/label"), or the image alone. The file reader keeps only 32 bits of each label
            in its ``file_list``.
        num_shards: number of processes that share the data. Each reads one shard, and the next shard in each epoch,
            unless ``reader_options={"stick_to_shard": True}``. "auto" uses ``World.current()``. Default: the process
            reads all data.
        shard_id: index of this process's first shard, from 0. Default: the rank of the process.
        last_batch_policy: "partial" returns each sample once in an epoch, and shards may differ by one batch. "fill"
            repeats the last sample to fill the last batch. "drop" leaves out a last batch that is not full. With "fill"
            and "drop" all shards have the same number of batches. DALI's ``LastBatchPolicy`` is accepted as well.
        auto_reset: whether ``next(loader)`` begins the next epoch after the end of one, or ``reset()`` must be called.
            A ``for`` loop always begins an epoch.
        style: "torch" returns the outputs as a tuple, or a single output by itself. An output that is named "label" and
            has one integer for each sample is returned as (N,) int64 on the device of the images. "dali" returns
            ``[{"data": ..., "label": ...}]``, as DALI's iterators do.
        output_map: names of the pipeline's outputs. None: "data" for one output, "data" and "label" for two.
        device: a CUDA device or "cpu". None: a GPU if there is one.
        num_threads: number of DALI's CPU threads. None: on the CPU, the number of cores plus one; on a GPU, at most 4.
        seed: seed of DALI's random numbers. Two runs with the same seed and the same loops return the same batches.
            None: drawn from torch's default generator. Loading a state requires the same seed.
        prefetch: number of batches that DALI prepares ahead.
        graph_options: further arguments of ``pipeline``, such as ``size=192``; or ``enable_checkpointing=False``, for
            an operator that does not support checkpoints.

    Raises:
        FileNotFoundError: ``root`` does not exist, or has nothing that can be read.
        UnsupportedTransformError: ``pipeline`` is a transform that draws random numbers, returns several images, or is
            not translated.
        TypeError, ValueError: an argument is invalid.
        PipelineError: the reader cannot read the data, or the pipeline cannot be built, as for ``ProxyServer``.

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
            pipeline, graph_options = transformed, {"plan": plan_without_chance(pipeline), **graph_options}
        check_reader_options(reader_options)
        world, options = world_of(num_shards, shard_id), dict(reader_options or {})
        sticks = bool(options.pop("stick_to_shard", False))
        source = Reader(root, reader, shuffle, world.num_shards, world.shard_id, True, sticks, options)
        factory = PipelineFunction(source, pipeline, graph_options, batch_size, device, num_threads, seed, prefetch)
        self._set_up(factory, last_batch_policy, auto_reset, style, output_map)

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
        """Return a loader over a pipeline that was built elsewhere.

        Give the reader ``pad_last_batch=True``, as DALI's iterators separate epochs only then. A pipeline has one
        loader. A later loader takes the pipeline over, and restarts it if it was left in the middle of an epoch.

        Args:
            pipeline: a pipeline with a reader, as ``fn.readers.file(name="Reader", ...)``.
            reader_name: name of the reader that sets the length of an epoch.
            last_batch_policy, auto_reset, style, output_map: as for the class.

        Raises:
            TypeError: ``pipeline`` is not a DALI pipeline.
            ValueError: the pipeline has no reader of this name, has inputs that must be fed, or was left in the middle
                of an epoch and cannot be restarted; or another argument is invalid.
        """
        loader = cls.__new__(cls)
        loader._set_up(GivenPipeline(pipeline, reader_name), last_batch_policy, auto_reset, style, output_map)
        return loader

    def _set_up(self, factory: PipelineFactory, policy: Any, auto_reset: bool, style: str, output_map: Any) -> None:
        if style not in STYLES:
            raise ValueError(f"style is one of {', '.join(STYLES)}, got {style!r}")
        self._epochs = ReaderEpochs(factory, LastBatchPolicy.of(policy), output_map, STYLES[style])
        self._auto_reset = auto_reset
        self._own_loop: ReaderLoop | None = None  # the loop of next(loader)

    @property
    def batch_size(self) -> int:
        with self._epochs.lock:
            return self._epochs.batch_size

    @property
    def pipeline(self) -> api.Pipeline:
        """The DALI pipeline."""
        return self._epochs.pipeline

    @property
    def output_map(self) -> list[str]:
        """The names of the pipeline's outputs."""
        return list(self._epochs.output_map)

    def __len__(self) -> int:
        """Number of batches of the current epoch, or of the next one between epochs."""
        return len(self._epochs)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. This ends a loop in progress, as a pipeline reads one epoch at a time."""
        return self._epochs.begin()

    def __next__(self) -> Any:
        """Return the next batch of the epoch of ``next(loader)``, and begin one if necessary, as DALI's iterators do.

        Threads that share an epoch should share one ``iter(loader)``. With ``auto_reset``, a thread that calls
        ``next(loader)`` after the end of the epoch begins another one.
        """
        with self._epochs.lock:
            loop = self._own_loop
            if loop is None or loop.has_failed or (loop.is_over and self._auto_reset):
                loop = self._own_loop = self._epochs.begin()
        return next(loop)

    def reset(self) -> None:
        """Let ``next(loader)`` begin a new epoch, also in the middle of one."""
        self._own_loop = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop, which determines its shard and DALI's random numbers.

        By default the loader counts its loops. All processes must then run the same number of loops, or some would read
        the same shard. With ``shuffle=True`` the order differs from that after the preceding epochs. To restore that
        order, use ``load_state_dict``.

        Raises:
            ValueError: ``epoch`` is not an integer of at least 0, or the loader was made by ``from_pipeline``.
        """
        check_int("epoch", epoch, 0)
        if isinstance(self._epochs.factory, GivenPipeline):
            raise ValueError("set_epoch is for pipelines that FileReaderLoader builds; this one was given")
        with self._epochs.lock:
            if epoch != self._epochs.next_epoch:
                self._own_loop = None
                self._epochs.open(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop, with DALI's checkpoint of the pipeline. ``torch.save`` can save it.

        Raises:
            ValueError: the pipeline was built without ``enable_checkpointing=True``.
        """
        with self._epochs.lock:
            return self._epochs.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop continue where ``state_dict`` was called, with bit-identical remaining batches.

        Raises:
            ValueError: the argument is no such state, or the state of a loader with other arguments or another number
                of samples; or this loader was made by ``from_pipeline``.
        """
        if isinstance(self._epochs.factory, GivenPipeline):
            raise ValueError(
                "this loader was given its pipeline, which cannot go to another place in the data by itself: build the "
                "pipeline with checkpoint=state['checkpoint'], and make the loader from that"
            )
        with self._epochs.lock:
            self._epochs.load_state_dict(state_dict)
            self._own_loop = None

    def close(self) -> None:
        """Free the pipeline with its threads and GPU memory. Batches that were returned stay valid."""
        with self._epochs.lock:
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
        return f"FileReaderLoader({self._epochs})"
