"""Build a DALI pipeline from a Plan whose steps do not need kernels: crop, resize, flip, conversion, normalization.

The pipeline is a pure function of encoded bytes and sampled parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._cores import cores_of_process, usable_cores
from ..transforms.geometry import Crop, Flip
from ..transforms.plan import Plan, Step
from ..transforms.resize import Resize
from ..transforms.type_conversion import Normalize, ToFloat
from . import jpeg_engines
from .api import OperatorConcurrency, Pipeline, decoder_arguments, fn, pipeline_def, types

INTERPOLATIONS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}

LARGE_PIXELS = 1_200_000
"""Minimum mean number of pixels of large photos. With CUDA decoding, CPU threads read the scans of smaller JPEGs, up to
DALI's ``hybrid_huffman_threshold`` of a million pixels. See ``benchmarks/results/engine_shares.txt``."""

MANY_CORES = 12  # with which decoding large photos on CUDA is worth its CPU time
MANY_PROGRESSIVE = 0.02  # share of JPEGs from which DALI needs more threads to read their scans


@dataclass(frozen=True)
class PipelineOptions:
    """Execution options of a pipeline, which do not affect what it computes."""

    batch_size: int  # maximum number of images per run
    device_id: int | None = None  # CUDA ordinal; None: CPU
    num_threads: int | None = None  # number of DALI's CPU threads; None: automatic
    prefetch_queue_depth: int = 2  # number of runs for which DALI allocates memory
    hw_decoder_load: float | None = None  # share of JPEGs, in [0, 1], for the GPU's JPEG engines; None: automatic
    channels_last: bool = False  # whether images are returned as (H, W, C)

    @property
    def engine_share(self) -> float:
        return 1.0 if self.hw_decoder_load is None else self.hw_decoder_load

    @property
    def wants_engines(self) -> bool:
        return self.device_id is not None and self.engine_share > 0

    @property
    def threads(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        # On the CPU, another thread helps because most wait for the last images at the end of each operator.
        return usable_cores() + 1 if self.device_id is None else min(4, usable_cores())

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


class Graph:
    """The image after some of the steps."""

    def __init__(self, options: PipelineOptions, encoded: Any, params: Any) -> None:
        self.node: Any = None  # (H, W, 3); None before the image is decoded
        # Mean and std of a conversion to float, (values - mean) / std, that is still to be applied. It is deferred,
        # because the same operator normalizes and changes the layout.
        self.pending: tuple[list[float], list[float]] | None = None
        self._options, self._encoded, self._params, self._column = options, encoded, params, 0

    def add(self, step: Step) -> None:
        """Append a step. ToTensor only changes the layout, which is that of the output."""
        if isinstance(step, Crop):
            self._crop(step)
        elif isinstance(step, Resize):
            how = {"interp_type": INTERPOLATIONS[step.interpolation], "antialias": step.antialias}
            self.node = fn.resize(self._materialize(), size=self._take_params(2), **how)
        elif isinstance(step, Flip):
            wanted = fn.cast(self._take_params(1)[0], dtype=types.INT32)
            axes = {"horizontal": 0, "vertical": wanted} if step.axis == "vertical" else {"horizontal": wanted}
            self.node = fn.flip(self._decoded(), **axes)
        elif isinstance(step, ToFloat):
            self.pending = [0.0] * 3, [255.0 if step.scale else 1.0] * 3
        elif isinstance(step, Normalize):
            means, stds = self.pending or ([0.0] * 3, [1.0] * 3)
            means = [mean + added * std for mean, added, std in zip(means, step.mean, stds)]
            self.pending = means, [std * factor for std, factor in zip(stds, step.std)]

    def output(self) -> Any:
        """Return the image, (C, H, W) or (H, W, C)."""
        if self.pending is not None:
            return self._materialize("HWC" if self._options.channels_last else "CHW")
        return self._decoded() if self._options.channels_last else fn.transpose(self._decoded(), perm=[2, 0, 1])

    def _take_params(self, count: int) -> Any:
        """Return the next ``count`` parameters. Steps consume their columns in order."""
        self._column += count
        return self._params[self._column - count : self._column]

    def _crop(self, step: Crop) -> None:
        box = fn.cast(self._take_params(4), dtype=types.INT32)
        region = {"start": box[0:2], "shape": box[2:4], "axes": [0, 1]}
        if self.node is None and step.inside and self._options.device_id is None:
            # On the CPU, only the crop is decoded. The pixels are the same, except in crops one pixel wide at the side
            # of a 4:2:0 image, which differ by a few levels. On an H200, whose engines decode whole images, decoding
            # only the crop takes seven times as long (benchmarks/results/parts.jsonl).
            self.node = fn.decoders.image_slice(self._encoded, **region, **self._decoder("decoders__ImageSlice"))
            return
        if not step.inside:
            region |= {"out_of_bounds_policy": "pad", "fill_values": list(step.fill)}
        self.node = fn.slice(self._materialize(), **region)

    def _decoder(self, operator: str = "decoders__Image") -> dict[str, Any]:
        return decoder_arguments(operator, self._options.device_id, self._options.engine_share)

    def _decoded(self) -> Any:
        if self.node is None:
            self.node = fn.decoders.image(self._encoded, **self._decoder())
        return self.node

    def _materialize(self, layout: str = "HWC") -> Any:
        """Apply the pending conversion, and return the node, which then is the image."""
        if self.pending is not None:
            (mean, std), self.pending = self.pending, None
            self.node = fn.crop_mirror_normalize(
                self._decoded(), dtype=types.FLOAT, output_layout=layout, mean=mean, std=std
            )
        return self._decoded()


def build_pipeline(plan: Plan, options: PipelineOptions) -> Pipeline:
    """Build the pipeline of a plan.

    Its inputs are ``images``, (bytes,) uint8 each, and, if the plan has parameters, ``draws``, float32. Its output is a
    batch of tensors (C, H, W), or (H, W, C) with ``options.channels_last``, floating-point or uint8, on
    ``options.device_id`` or the CPU.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is not enough memory, on the GPU or on the CPU.
    """

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=options.batch_size,
        num_threads=options.threads,
        device_id=options.device_id,
        prefetch_queue_depth=options.prefetch_queue_depth,
        exec_dynamic=True,
        # Several threads launch the operators of a GPU. On a CPU, DALI runs one operator at a time.
        concurrency=OperatorConcurrency.FULL,
    )
    def proxyloader_plan() -> Any:
        images = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        draws = fn.external_source(name="draws", no_copy=True, ndim=1, dtype=types.FLOAT) if plan.num_params else None
        graph = Graph(options, images, draws)
        for step in plan.steps:
            graph.add(step)
        return graph.output()

    pipeline = proxyloader_plan()
    jpeg_engines.build(pipeline)
    return pipeline
