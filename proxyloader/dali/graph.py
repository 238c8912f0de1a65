"""The DALI graph of a plan whose steps do not need kernels: crop, resize, flip, conversion and normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..transforms.geometry import Crop, Flip
from ..transforms.plan import Branch, Step
from ..transforms.resize import Resize
from ..transforms.type_conversion import Normalize, ToFloat, ToTensor
from .api import decoder_arguments, fn, types

if TYPE_CHECKING:
    from .build import PipelineOptions

INTERPOLATIONS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}


class Graph:
    """State of the graph after some of the steps.

    The image at this point is ``node * scale``. Scaling, conversion to float, mirroring and layout changes are deferred
    as long as possible, because one operator, CropMirrorNormalize, does all of them.

    Attributes:
        node: (H, W, 3), or None before the image is decoded.
        scale: factor of floating-point values. None: the values are uint8.
        mirror: a node that is 1 for images to mirror, or None.
    """

    def __init__(self, options: PipelineOptions, encoded: Any, params: Any) -> None:
        self.node: Any = None
        self.scale: float | None = None
        self.mirror: Any = None
        self._options, self._encoded, self._params, self._column = options, encoded, params, 0

    def output(self, steps: Branch) -> Any:
        """Return the tensor after all steps, (C, H, W) or (H, W, C)."""
        *others, last = steps
        for step in others if isinstance(last, Normalize) else steps:
            STEPS[type(step)](self, step)
        layout = "HWC" if self._options.channels_last else "CHW"
        if isinstance(last, Normalize):
            return self.normalized(last.mean, last.std, layout)
        if self.scale is not None:
            return self.normalized((0.0,) * 3, (1.0,) * 3, layout)
        image = self.materialize()
        return image if self._options.channels_last else fn.transpose(image, perm=[2, 0, 1])

    def take_params(self, count: int) -> Any:
        """Return the next ``count`` parameters. Steps consume their columns in order."""
        self._column += count
        return self._params[self._column - count : self._column]

    def crop(self, step: Crop) -> None:
        box = fn.cast(self.take_params(4), dtype=types.INT32)
        region = {"start": box[0:2], "shape": box[2:4], "axes": [0, 1]}
        if self.node is None and self.mirror is None and step.inside and self._options.device_id is None:
            # On the CPU, only the crop is decoded. The pixels are the same, except in crops one pixel wide at the side
            # of a 4:2:0 image, which differ by a few levels. On an H200, whose engines decode whole images, decoding
            # only the crop takes seven times as long (benchmarks/results/parts.jsonl).
            self.node = fn.decoders.image_slice(self._encoded, **region, **self._decoder("decoders__ImageSlice"))
            return
        if not step.inside:
            region |= {"out_of_bounds_policy": "pad", "fill_values": list(step.fill)}
        self.node = fn.slice(self.materialize(), **region)

    def resize(self, step: Resize) -> None:
        how = {"interp_type": INTERPOLATIONS[step.interpolation], "antialias": step.antialias}
        self.node = fn.resize(self.materialize(), size=self.take_params(2), **how)

    def flip(self, step: Flip) -> None:
        wanted = fn.cast(self.take_params(1)[0], dtype=types.INT32)
        if step.axis == "vertical":
            self.node = fn.flip(self.decoded(), horizontal=0, vertical=wanted)
        else:
            self.apply_mirror()
            self.mirror = wanted

    def to_tensor(self, step: ToTensor) -> None:
        """The layout changes only in the output."""

    def to_float(self, step: ToFloat) -> None:
        self.scale = 1 / 255 if step.scale else 1.0

    def normalize(self, step: Normalize) -> None:
        self.node = self.normalized(step.mean, step.std, "HWC")

    def _decoder(self, operator: str = "decoders__Image") -> dict[str, Any]:
        return decoder_arguments(operator, self._options.device_id, self._options.engine_share)

    def decoded(self) -> Any:
        if self.node is None:
            self.node = fn.decoders.image(self._encoded, **self._decoder())
        return self.node

    def apply_mirror(self) -> None:
        if self.mirror is not None:
            self.node, self.mirror = fn.flip(self.decoded(), horizontal=self.mirror), None

    def materialize(self) -> Any:
        """Apply the deferred conversion and mirror, and return the node, which then holds the image."""
        if self.scale is not None and self.scale != 1:
            self.node = self.normalized((0.0,) * 3, (1.0,) * 3, "HWC")
        elif self.scale is not None:
            self.node = fn.cast(self.decoded(), dtype=types.FLOAT)
        self.apply_mirror()
        return self.decoded()

    def normalized(self, mean: Sequence[float], std: Sequence[float], layout: str) -> Any:
        """Apply the deferred mirror and return (values - ``mean``) / ``std`` as floats."""
        scale = self.scale or 1.0
        node = fn.crop_mirror_normalize(
            self.decoded(),
            dtype=types.FLOAT,
            output_layout=layout,
            mean=[value / scale for value in mean],
            std=[value / scale for value in std],
            **({} if self.mirror is None else {"mirror": self.mirror}),
        )
        self.scale, self.mirror = 1.0, None
        return node


STEPS: dict[type[Step], Callable[[Graph, Any], None]] = {
    Crop: Graph.crop,
    Resize: Graph.resize,
    Flip: Graph.flip,
    ToTensor: Graph.to_tensor,
    ToFloat: Graph.to_float,
    Normalize: Graph.normalize,
}
