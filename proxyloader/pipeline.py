"""From a Plan to a DALI pipeline: a pure function of encoded bytes and drawn numbers. Nothing random happens in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._dali import Pipeline, fn, pipeline_def, types, upright
from .transforms.color import Grayscale
from .transforms.convert import Normalize, ToFloat, ToTensor
from .transforms.geometry import Crop, Flip, Resize
from .transforms.plan import Plan, Step

INTERPOLATIONS = {
    "nearest": types.INTERP_NN,
    "bilinear": types.INTERP_LINEAR,
    "bicubic": types.INTERP_CUBIC,
}

FILTER_REACH = {"bilinear": 1, "bicubic": 2}
"""How far a filter reaches to each side, in pixels of the smaller image."""

EXACT_EDGES_BELOW = 128
"""Images resized to a side shorter than this, in pixels, get edges as torchvision makes them. In larger ones the frame,
one pixel wide (two where bicubic), is a few levels off, which is too little to spend half as much CPU time again on."""

PILLOW_LUMA = [19595 / 65536, 38470 / 65536, 7471 / 65536]
TORCH_LUMA = [0.2989, 0.587, 0.114]
"""What red, green and blue count for in a grey image, to the last digit."""


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs, apart from what it computes.

    Attributes:
        batch_size: most images that one run takes.
        device_id: CUDA ordinal, or None for the CPU.
        num_threads: DALI's CPU threads; None: the cores of this process on the CPU, at most 4 of them beside a GPU.
        prefetch_queue_depth: runs that DALI prepares memory for.
        hw_decoder_load: share of the JPEGs, 0 to 1, that go to the GPU's JPEG engine where it has one.
    """

    batch_size: int
    device_id: int | None = None
    num_threads: int | None = None
    prefetch_queue_depth: int = 2
    hw_decoder_load: float = 1.0

    @property
    def threads(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        cores = len(os.sched_getaffinity(0))
        return cores if self.device_id is None else min(4, cores)


def build_pipeline(plan: Plan, options: PipelineOptions) -> Pipeline:
    """Build the DALI pipeline of a plan.

    Its inputs are ``images``, (bytes,) uint8 each, and, where the plan draws anything, ``draws``, (columns,) float32.
    Its output is a batch of tensors (C, H, W), float32 or uint8, on ``options.device_id`` or the CPU.
    """

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=options.batch_size,
        num_threads=options.threads,
        device_id=options.device_id,
        prefetch_queue_depth=options.prefetch_queue_depth,
        exec_dynamic=True,
    )
    def proxyloader_plan() -> Any:
        images = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        draws = fn.external_source(name="draws", no_copy=True, ndim=1, dtype=types.FLOAT) if plan.columns else None
        return _Graph(options, images, draws).output_of(plan.steps)

    pipeline = proxyloader_plan()
    pipeline.build()
    return pipeline


class _Graph:
    """The graph while it is built.

    The values of the image at this point are ``node * scale``. The multiplication, the conversion to float, a mirror
    and the change of layout are put off as long as possible, because one operator, CropMirrorNormalize, does them all.
    """

    def __init__(self, options: PipelineOptions, encoded: Any, draws: Any) -> None:
        self._options, self._encoded, self._draws = options, encoded, draws
        self._column = 0
        self._node: Any = None  # (H, W, C); None: not decoded yet
        self._scale: float | None = None  # None: the values are uint8
        self._mirror: Any = None
        self._channels = 3

    def output_of(self, steps: tuple[Step, ...]) -> Any:
        last = steps[-1]
        for step in steps[:-1] if isinstance(last, Normalize) else steps:
            OPERATORS[type(step)](self, step)
        if isinstance(last, Normalize):
            return self._normalized(last.mean, last.std, "CHW")
        if self._scale is not None:
            return self._normalized((0.0,) * self._channels, (1.0,) * self._channels, "CHW")
        self._settle_mirror()
        return fn.transpose(self._decoded(), perm=[2, 0, 1])

    def crop(self, step: Crop) -> None:
        box = fn.cast(self._drawn(4), dtype=types.INT32)
        start, shape = box[0:2], box[2:4]
        region = {"start": start, "shape": shape, "axes": [0, 1]}
        if self._node is None and self._mirror is None and step.region.inside and self._options.device_id is None:
            # On the CPU only what the crop needs is decoded. The pixels are the same, but for crops one pixel wide at
            # the side of a 4:2:0 image, which are a few levels off. On the engines it saves nothing.
            self._node = fn.decoders.image_slice(self._encoded, **region, **self._decoder("decoders__ImageSlice"))
            return
        self._settle()
        if not step.region.inside:
            region |= {"out_of_bounds_policy": "pad", "fill_values": list(step.fill)}
        self._node = fn.slice(self._decoded(), **region)

    def resize(self, step: Resize) -> None:
        size = self._drawn(2)
        self._settle()
        how = {"size": size, "interp_type": INTERPOLATIONS[step.interpolation], "antialias": step.antialias}
        side = min(step.target) if step.target else step.shorter or step.max_size or 0
        if step.antialias and step.interpolation in FILTER_REACH and side < EXACT_EDGES_BELOW:
            self._resize_with_exact_edges(FILTER_REACH[step.interpolation], size, how)
        else:
            self._node = fn.resize(self._decoded(), **how)

    def _resize_with_exact_edges(self, reach: int, size: Any, how: dict[str, Any]) -> None:
        """Where the filter reaches beyond the image, Pillow and torch leave that part of it out; DALI repeats the edge.

        So zeros are put around the image, and a channel of ones beside its colours; resized alike, it is the sum of the
        weights that fell inside, which the colours are divided by.
        """
        node, colors = self._decoded(), self._channels
        pad: dict[str, Any] = {"out_of_bounds_policy": "pad"}
        shape = node.shape(dtype=types.INT32)[0:2]
        around = fn.cast(reach * (shape / size + 1), dtype=types.INT32)
        node = fn.slice(node, start=[0], shape=[colors + 1], axes=[2], fill_values=[0.0] * colors + [1.0], **pad)
        node = fn.slice(node, start=-around, shape=shape + 2 * around, axes=[0, 1], fill_values=[0.0], **pad)
        start, end = (fn.cast(corner, dtype=types.FLOAT) for corner in (around, around + shape))
        sums: Any = fn.resize(node, roi_start=start, roi_end=end, dtype=types.FLOAT, **how)
        node = sums[:, :, :colors] / sums[:, :, colors:]
        self._node = fn.cast(node, dtype=types.UINT8) if self._scale is None else node

    def flip(self, step: Flip) -> None:
        wanted = fn.cast(self._drawn(1)[0], dtype=types.INT32)
        if step.axis == "vertical":
            self._node = fn.flip(self._decoded(), horizontal=0, vertical=wanted)
        else:
            self._settle_mirror()
            self._mirror = wanted

    def grayscale(self, step: Grayscale) -> None:
        if self._channels == 3:
            weights = PILLOW_LUMA if step.kind == "pil" else TORCH_LUMA
            # On a uint8 tensor torchvision cuts off where DALI rounds, so a half is taken off, and a little less: what
            # was a whole number, to four digits, stays one.
            less = 0.49995 if step.kind == "tensor" and self._scale is None else 0.0
            dtype = types.UINT8 if self._scale is None else types.FLOAT
            self._node = fn.coord_transform(self._decoded(), M=weights, T=-less, dtype=dtype)
        if step.channels == 3:
            self._node = fn.cat(self._node, self._node, self._node, axis=2)
        self._channels = step.channels

    def to_tensor(self, step: ToTensor) -> None:
        """The layout changes at the very end."""

    def to_float(self, step: ToFloat) -> None:
        self._scale = 1 / 255 if step.scale else 1.0

    def normalize(self, step: Normalize) -> None:
        self._node = self._normalized(step.mean, step.std, "HWC")

    def _drawn(self, count: int) -> Any:
        """The next ``count`` of the drawn numbers; each step takes its own, in order."""
        self._column += count
        return self._draws[self._column - count : self._column]

    def _decoder(self, operator: str = "decoders__Image") -> dict[str, Any]:
        # Chosen for equality with Pillow: libjpeg's upsampling, and no rotation by EXIF.
        chosen: dict[str, Any] = {
            "output_type": types.RGB,
            "jpeg_fancy_upsampling": True,
            **upright(operator),
        }
        if self._options.device_id is None:
            return chosen | {"device": "cpu"}
        return chosen | {"device": "mixed", "hw_decoder_load": self._options.hw_decoder_load}

    def _decoded(self) -> Any:
        if self._node is None:
            self._node = fn.decoders.image(self._encoded, **self._decoder())
        return self._node

    def _settle_mirror(self) -> None:
        if self._mirror is not None:
            self._node, self._mirror = fn.flip(self._decoded(), horizontal=self._mirror), None

    def _settle(self) -> None:
        """Do what was put off, before an operator that depends on it."""
        if self._scale is not None and self._scale != 1:
            self._node = self._normalized((0.0,) * self._channels, (1.0,) * self._channels, "HWC")
        elif self._scale is not None:
            self._node = fn.cast(self._decoded(), dtype=types.FLOAT)
        self._settle_mirror()

    def _normalized(self, mean: Sequence[float], std: Sequence[float], layout: str) -> Any:
        scale = self._scale or 1.0
        mirrored = {} if self._mirror is None else {"mirror": self._mirror}
        node = fn.crop_mirror_normalize(
            self._decoded(),
            dtype=types.FLOAT,
            output_layout=layout,
            mean=[value / scale for value in mean],
            std=[value / scale for value in std],
            **mirrored,
        )
        self._scale, self._mirror = 1.0, None
        return node


OPERATORS: dict[type[Step], Callable[[_Graph, Any], None]] = {
    Crop: _Graph.crop,
    Resize: _Graph.resize,
    Flip: _Graph.flip,
    Grayscale: _Graph.grayscale,
    ToTensor: _Graph.to_tensor,
    ToFloat: _Graph.to_float,
    Normalize: _Graph.normalize,
}
"""How each step of a plan is said in DALI. ``tests/test_pipeline.py`` holds the table to the steps that exist."""
