"""FileReaderLoader: DALI's readers and iterators with the interface of a DataLoader. No workers. Main process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from .._validation import check_int
from ..dali import api
from ..data.distributed import Auto
from ..data.sharded_sampler import LastBatchPolicy
from .arguments import check_reader_options, is_transform
from .epochs import ReaderEpochs
from .loops import ReaderLoops
from .pipeline_factory import GivenPipeline, PipelineFactory, PipelineFunction
from .plan_pipeline import plan_without_chance, transformed
from .sources import READER_NAME, Root, sharded_reader

STYLES = ("torch", "dali")


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
            pipeline, graph_options = transformed, {"plan": plan_without_chance(pipeline), **graph_options}
        check_reader_options(reader_options)
        source = sharded_reader(root, reader, shuffle, num_shards, shard_id, reader_options or {})
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
        """A loader over a pipeline of your own, which has a reader of that name: ``fn.readers.file(name="Reader")``.

        Give the reader ``pad_last_batch=True``: DALI's iterators keep epochs apart only then. A pipeline has one
        loader; a later one takes it over, and begins it anew where it was left in the middle of an epoch.

        Raises:
            TypeError, ValueError: it is no pipeline, has no such reader, is to be fed by hand, or was left in the
                middle of an epoch and cannot begin anew; and as the class.
        """
        loader = cls.__new__(cls)
        loader._set_up(GivenPipeline(pipeline, reader_name), last_batch_policy, auto_reset, style, output_map)
        return loader

    def _set_up(self, factory: PipelineFactory, policy: Any, auto_reset: bool, style: str, output_map: Any) -> None:
        if style not in STYLES:
            raise ValueError(f"style is one of {', '.join(STYLES)}, got {style!r}")
        self._epochs = ReaderEpochs(factory, LastBatchPolicy.of(policy), output_map)
        self._loops = ReaderLoops(self._epochs, auto_reset, style)

    @property
    def batch_size(self) -> int:
        with self._loops.lock:
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
        return len(self._loops)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. A loop that was under way ends: one pipeline cannot read two at once."""
        return self._loops.begin_loop()

    def __next__(self) -> Any:
        """The next batch of the epoch that ``next`` has begun, as with DALI's iterators.

        Where threads share an epoch let them share a loop, ``iter(loader)``: with ``auto_reset`` this begins another
        epoch for a thread that asks once more behind the end.
        """
        return self._loops.next_of_own()

    def reset(self) -> None:
        """Let ``next(loader)`` begin an epoch, also in the middle of one."""
        self._loops.end_own()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next loop is: which shard it reads, and what DALI draws. Without it the loader counts its
        loops: in all processes alike, then, or they would read the same shard. (With ``shuffle=True`` the epoch has
        another order than after the epochs before it; ``load_state_dict`` brings that back.)

        Raises:
            ValueError: it is no whole number, or less than 0; or the pipeline was given.
        """
        check_int("epoch", epoch, 0)
        self._epochs.factory.check_set_epoch()
        with self._loops.lock:
            if epoch != self._epochs.next_epoch:
                self._epochs.go_to(epoch)
                self._loops.end_all()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, with DALI's own checkpoint of the pipeline. Can be pickled (``torch.save``).

        Raises:
            ValueError: the pipeline was built without ``enable_checkpointing=True``.
        """
        with self._loops.lock:
            return self._epochs.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop go on where ``state_dict`` was called: with the batches that were left, bit for bit.

        Raises:
            ValueError: it is no such state, or that of a loader with other arguments or another number of samples; or
                this loader was made by ``from_pipeline``.
        """
        self._epochs.factory.check_load_state_dict()
        with self._loops.lock:
            self._epochs.load_state_dict(state_dict)
            self._loops.end_all()

    def close(self) -> None:
        """Free the pipeline: its threads, its memory on a GPU. What was handed out stays."""
        with self._loops.lock:
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
