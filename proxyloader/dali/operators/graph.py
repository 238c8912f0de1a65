"""Construction of the DALI graph of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from numpy.typing import NDArray

from ..._cores import cores_of_process, usable_cores
from ...transforms.plan import Branch, ParamRow, Step
from ...transforms.type_conversion import Normalize
from ..api import decoder_arguments, fn, split, types

S = TypeVar("S", bound=Step)

LARGE_PIXELS = 1_200_000
"""Minimum mean number of pixels of large photos. With CUDA decoding, CPU threads read the scans of smaller JPEGs, up to
DALI's ``hybrid_huffman_threshold`` of a million pixels. See ``benchmarks/results/engine_shares.txt``."""

MANY_CORES = 12
"""Minimum number of cores with which decoding large photos on CUDA is worth its CPU time."""

MANY_PROGRESSIVE = 0.02
"""Minimum share of progressive JPEGs for which DALI needs more threads to read their scans."""


@dataclass(frozen=True)
class PipelineOptions:
    """Execution options of a pipeline, which do not affect what it computes.

    Attributes:
        batch_size: maximum number of images per run.
        device_id: CUDA ordinal, or None for the CPU.
        num_threads: number of DALI's CPU threads. None: automatic, see ``threads``.
        prefetch_queue_depth: number of runs for which DALI allocates memory.
        hw_decoder_load: share of JPEGs, in [0, 1], decoded by the GPU's JPEG engines, if it has any. None: automatic,
            see ``engine_share``.
        float16: whether floating-point images are returned as float16, rounded once.
        channels_last: whether images are returned as (H, W, C).
    """

    batch_size: int
    device_id: int | None = None
    num_threads: int | None = None
    prefetch_queue_depth: int = 2
    hw_decoder_load: float | None = None
    float16: bool = False
    channels_last: bool = False

    @property
    def engine_share(self) -> float:
        """``hw_decoder_load``, or 1.0 if it is None."""
        return 1.0 if self.hw_decoder_load is None else self.hw_decoder_load

    @property
    def wants_engines(self) -> bool:
        """Whether to decode with JPEG engines, if the GPU has any."""
        return self.device_id is not None and self.engine_share > 0

    @property
    def threads(self) -> int:
        """``num_threads``. If it is None, at most 4 on a GPU, or the number of cores plus one on the CPU.

        The additional thread helps because most threads wait for the last images at the end of each operator.
        """
        if self.num_threads is not None:
            return self.num_threads
        cores = usable_cores()
        return cores + 1 if self.device_id is None else min(4, cores)

    def for_files_of(self, mean_pixels: float, progressive: float) -> PipelineOptions:
        """Return the options for JPEGs with a mean number of pixels and a share of progressive ones.

        With many cores, JPEG engines and CUDA together decode large JPEGs faster. CUDA decodes progressive ones, but
        DALI's threads do most of the work. Nothing changes on the CPU, or if ``num_threads`` or ``hw_decoder_load`` is
        set.
        """
        is_set = self.num_threads is not None or self.hw_decoder_load is not None
        cores = cores_of_process()
        is_large = mean_pixels >= LARGE_PIXELS and cores >= MANY_CORES
        if self.device_id is None or is_set or not (is_large or progressive >= MANY_PROGRESSIVE):
            return self
        share = 0.65 if is_large else None  # 0.65 is DALI's default
        return replace(self, hw_decoder_load=share, num_threads=min(16, cores))


@dataclass(eq=False, repr=False)
class Graph:
    """State of the graph after some of the steps.

    The image at this point is ``node * scale``. Scaling, conversion to float, mirroring and layout changes are deferred
    as long as possible, because one operator, CropMirrorNormalize, does all of them.

    Attributes:
        options: options of the pipeline.
        encoded: the encoded images, one-dimensional.
        row: the sampled parameters: the columns, followed by the arrays.
        num_params: number of columns.
        branch_path: the splits leading to this branch, as (predicate, side).
        column: index of the next column.
        node: (H, W, C), or None before the image is decoded.
        scale: factor of floating-point values. None: the values are uint8.
        mirror: a node that is 1 for images to mirror, or None.
        channels: 3 or 1.
        views: the graphs of the images if there are several per input. Later steps are added to each of them.
        reached: the node after each step.
        constants: constant nodes by value and split.
    """

    options: PipelineOptions
    encoded: Any
    row: Any
    num_params: int
    branch_path: tuple[tuple[Any, int], ...] = ()
    column: int = 0
    node: Any = None
    scale: float | None = None
    mirror: Any = None
    channels: int = 3
    views: list[Graph] = field(default_factory=list)
    reached: list[Any] = field(default_factory=list)
    constants: dict[Any, Any] = field(default_factory=dict)

    def outputs(self, steps: Branch) -> list[Any]:
        """Return the tensors after all steps, (C, H, W) or (H, W, C): one, or one per view."""
        last = steps[-1]
        self.add(steps[:-1] if isinstance(last, Normalize) else steps)
        return [each._output(last) for each in self.views or [self]]

    def _output(self, last: Step) -> Any:
        layout = "HWC" if self.options.channels_last else "CHW"
        dtype = types.FLOAT16 if self.options.float16 else types.FLOAT
        if isinstance(last, Normalize):
            return self.normalized(last.mean, last.std, layout, dtype)
        if self.scale is not None:
            return self.normalized((0.0,) * self.channels, (1.0,) * self.channels, layout, dtype)
        if self.options.device_id is not None and (self.mirror is not None or layout == "CHW"):
            return fn.crop_mirror_normalize(self.decoded(), dtype=types.UINT8, output_layout=layout, **self.mirrored)
        self.apply_mirror()
        return self.decoded() if self.options.channels_last else fn.transpose(self.decoded(), perm=[2, 0, 1])

    def add(self, steps: Branch) -> None:
        for step in steps:
            for operation in step.operations:
                self._add(operation)
            self.reached.append(self.views[0].node if self.views else self.node)

    def _add(self, operation: Step) -> None:
        if not self.views:
            OPERATORS[type(operation)](self, operation)
        else:  # all views use the same columns
            for view in self.views:
                view.column = self.column
                view._add(operation)
            self.column = self.views[0].column

    def apply_branch(self, branch: Branch, node: Any) -> Graph:
        """Return the graph after the steps of a branch that applies to all images, with the next columns."""
        part = self.branch(node, self.row, self.column)
        part.add(branch)
        self.column = part.column
        return part

    def branch(self, node: Any, row: Any, column: int, branch_path: tuple[tuple[Any, int], ...] = ()) -> Graph:
        """Return the graph of a branch at this point; this graph must be materialized.

        ``column`` is the first column of the branch, and ``branch_path`` has the additional splits leading to it.
        """
        path = self.branch_path + branch_path
        return replace(self, encoded=None, row=row, branch_path=path, column=column, node=node, views=[], reached=[])

    def take_params(self, count: int) -> Any:
        """Return the next ``count`` columns, or None for 0. Steps consume their columns in order."""
        self.column += count
        return self.row[self.column - count : self.column] if count else None

    def array(self, first_block: Any, shape: Any) -> Any:
        """Return an array attached to the row, float32 (H, W, C), on the device of the image.

        ``first_block``, the index of its first block, is a column of the row; ``shape`` is (3,) int32.
        """
        flat = self.attached(first_block, shape[0:1] * shape[1:2] * shape[2:3])
        return self.placed(fn.reshape(flat, shape=shape, layout="HWC"))

    def placed(self, node: Any) -> Any:
        """Move a CPU node to the device of the images."""
        return node if self.options.device_id is None else node.gpu()

    def attached(self, first_block: Any, count: Any) -> Any:
        """Return ``count``, (1,) int32, numbers attached to the row, starting at a block, on the CPU."""
        start = self.num_params + fn.cast(first_block, dtype=types.INT32) * ParamRow.BLOCK
        return fn.slice(self.row, start=fn.reshape(start, shape=[1]), shape=count, axes=[0])

    def constant(self, array: NDArray[Any]) -> Any:
        """Return an array that is the same for every image.

        DALI copies it for each image of the batch, so it must be split for branches as well. Each constant is created
        only once, because DALI merges equal constants and then fails for branches on a GPU ("Graph inconsistency
        detected").
        """
        key: Any = array.dtype.str, array.shape, array.tobytes()
        if key not in self.constants:
            self.constants[key] = types.Constant(array)
        node = self.constants[key]
        for predicate, side in self.branch_path:
            key = key, predicate.name
            if key not in self.constants:
                self.constants[key] = split(node, predicate)
            node = self.constants[key][side]
            key = key, side
        return node

    def decoder(self, operator: str = "decoders__Image") -> dict[str, Any]:
        return decoder_arguments(operator, self.options.device_id, self.options.engine_share)

    def decoded(self) -> Any:
        if self.node is None:
            self.node = fn.decoders.image(self.encoded, **self.decoder())
        return self.node

    @property
    def mirrored(self) -> dict[str, Any]:
        """Arguments of CropMirrorNormalize for the deferred mirror."""
        return {} if self.mirror is None else {"mirror": self.mirror}

    def apply_mirror(self) -> None:
        if self.mirror is not None:
            self.node, self.mirror = fn.flip(self.decoded(), horizontal=self.mirror), None

    def materialize(self) -> Any:
        """Apply the deferred conversion and mirror, and return the node, which then holds the image."""
        if self.scale is not None and self.scale != 1:
            self.node = self.normalized((0.0,) * self.channels, (1.0,) * self.channels, "HWC")
        elif self.scale is not None:
            self.node = fn.cast(self.decoded(), dtype=types.FLOAT)
        self.apply_mirror()
        return self.decoded()

    def normalized(self, mean: Sequence[float], std: Sequence[float], layout: str, dtype: Any = types.FLOAT) -> Any:
        """Apply the deferred mirror and return (values - ``mean``) / ``std`` as floats."""
        scale = self.scale or 1.0
        node = fn.crop_mirror_normalize(
            self.decoded(),
            dtype=dtype,
            output_layout=layout,
            mean=[value / scale for value in mean],
            std=[value / scale for value in std],
            **self.mirrored,
        )
        self.scale, self.mirror = 1.0, None
        return node


OPERATORS: dict[type[Step], Callable[[Graph, Any], None]] = {}
"""Functions that add steps to a graph, by class of step. ``tests/dali/test_build.py`` checks that none is missing."""


def operator(kind: type[S]) -> Callable[[Callable[[Graph, S], None]], Callable[[Graph, S], None]]:
    """Register the function that adds a class of steps to a graph."""

    def register(function: Callable[[Graph, S], None]) -> Callable[[Graph, S], None]:
        OPERATORS[kind] = function
        return function

    return register
