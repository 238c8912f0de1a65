"""Runs a transform as torchvision does and as we do, on the same images under the same seed, and says how far apart
both are, in levels of 255."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image
from torchvision.transforms import v2

from proxyloader._random_state import preserve_rng
from proxyloader.dali import jpeg_engines
from proxyloader.dali.build import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer, get_decoder
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.lazy_image import create_lazy_image
from proxyloader.data.transformed import pixel_uses
from proxyloader.kernels.operations import build_programs, build_schedule
from proxyloader.make_dataset import photograph
from proxyloader.transforms.color import Grayscale
from proxyloader.transforms.plan import Plan
from proxyloader.transforms.type_conversion import Normalize, ToFloat

from .kernels import emulation
from .odd_formats import ODD_FORMATS, encoded, jpeg
from .undecoded import image_calls_in, opened_late

Images = Mapping[str, bytes]

SHAPES = {
    "landscape": (160, 120),
    "portrait": (120, 160),
    "small": (40, 30),
    "tiny": (9, 7),
    "one pixel high": (64, 1),
    "one pixel wide": (1, 48),
    "large": (500, 375),
}
"""(width, height) of the 4:2:0 JPEGs among the test images."""

FORMATS = {
    "grey": "odd_grey.jpg",
    "4:2:2": "odd_422.jpg",
    "progressive": "odd_progressive.jpg",
    "PNG": "odd_rgb.png",
    "CMYK": "odd_cmyk.jpg",
}

FLOAT_ROUNDING = 2e-3
"""In levels, allowed beside every bound; 8e-6 in values of 0 to 1."""


@functools.lru_cache(maxsize=1)
def _all_images() -> Images:
    """Files that look like photographs, by what is special about them."""
    images = {name: jpeg_of(size, k) for k, (name, size) in enumerate(SHAPES.items())}
    for k, (name, encoder) in enumerate(FORMATS.items()):
        images[name] = ODD_FORMATS[encoder](picture(20 + k, (131 + k, 91 + k)))
    return images


def picture(index: int, size: tuple[int, int] = (500, 375)) -> Image.Image:
    """An RGB image that looks like a photograph."""
    return photograph(index, size=size)


def jpeg_of(size: tuple[int, int], index: int = 0) -> bytes:
    return jpeg(picture(index, size))


def images(*names: str, but: tuple[str, ...] = ()) -> Images:
    """The test images of these names; without names all, ``but`` those."""
    every = _all_images()
    return {name: every[name] for name in names or every if name not in but}


def many(*names: str, times: int = 4, of: Callable[..., Images] = images) -> Images:
    """Each image several times, as each time something else is drawn."""
    return {f"{name} {k}": data for name, data in of(*names).items() for k in range(times)}


@functools.lru_cache(maxsize=32)
def lossless(*names: str, but: tuple[str, ...] = ()) -> Images:
    """As :func:`images`, as PNGs: every device decodes them alike, so what is done to them afterwards is seen alone."""
    return {name: png_of(opened(data)) for name, data in images(*names, but=but).items()}


def png_of(image: Image.Image) -> bytes:
    return encoded(image, "PNG", compress_level=1)


THIN = ("one pixel high", "one pixel wide")

both_versions = pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])

TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
BEFORE = {"a PIL image": [], "a uint8 tensor": [v2.ToImage()], "a float tensor": TO_FLOAT}
of_each_kind = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
"""What a transform is given: a PIL image, or one of v2's as a tensor: the transforms that make it, for ``as_image``."""
of_levels = pytest.mark.parametrize("before", [[], [v2.ToImage()]], ids=["a PIL image", "a uint8 tensor"])
kinds_of_levels = pytest.mark.parametrize("kind", ["pil", "uint8"])
"""As ``of_levels``, for ``composed``."""


def composed(kind: str, *transforms: Any) -> v1.Compose:
    """Transforms of images of that kind. A tensor comes out: of bytes, where the kind is not float."""
    if kind == "pil":
        return v1.Compose([*transforms, v1.PILToTensor()])
    to_float = [v1.ConvertImageDtype(torch.float32)] if kind == "float" else []
    return v1.Compose([v1.PILToTensor(), *to_float, *transforms])


def as_image(*transforms: Any) -> v1.Compose:
    """Ends in a tensor, whatever it begins with; of a PIL image in whole levels."""
    return v1.Compose([*transforms, v2.ToImage()])


def opened(data: bytes) -> Image.Image:
    """As torchvision's ``pil_loader`` opens a file."""
    return Image.open(io.BytesIO(data)).convert("RGB")


@dataclass(frozen=True)
class Bound:
    """How far from torchvision a pixel may be, in levels of 255, where both decoded the same pixels.

    Attributes:
        mean: over all pixels and images.
        p999: 99.9th percentile.
        max: the worst pixel.
    """

    mean: float
    p999: float
    max: float

    def on(self, device: str) -> Bound:
        """The GPU's JPEG engine is up to 1 level off Pillow; its CUDA decoder, for what no engine decodes, 3."""
        if device != "cuda":
            return self
        return Bound(self.mean + 0.1, self.p999 + (1 if engines_decode() else 2), self.max + 3)


def engines_decode() -> bool:
    """A GPU's do, what they can; else CUDA does, which rounds otherwise: there are none, or others use them up."""
    return not jpeg_engines.are_disabled(0) and _engines_work()


@functools.lru_cache
def _engines_work() -> bool:
    return jpeg_engines._measure_error(0) < jpeg_engines.MAX_MEAN_ERROR


EXACT = Bound(0, 0, 0)

CLOSE = Bound(0.002, 1, 1)
"""Of blurs, and of the contrast, saturation and sharpness of tensors: see ``CLOSE`` in ``kernels/truth.py``."""

BY_DALI = Bound(0.3, 5, 16)
"""Of DALI's resize on a CPU, of photographs: it rounds once instead of after each side, values half-way between two
levels to the even one, and repeats the outermost pixels where torchvision shortens the filter."""


@dataclass(frozen=True)
class Outputs:
    """What came out, image by image, and what one level of 255 is in the values of each channel."""

    stock: list[torch.Tensor]
    ours: list[torch.Tensor]
    level: torch.Tensor

    def differences(self) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        """(C, H, W) for each image, in levels."""
        level = self.level.double().numpy()
        pairs = ((a.numpy(), b.numpy()) for a, b in zip(self.stock, self.ours))
        return [np.abs(np.subtract(a, b, dtype=np.float64)) / level for a, b in pairs]


def run(
    transform: Callable[[Any], Any], device: str, files: Images | None = None, *, seed: int = 0, times: int = 1
) -> Outputs:
    """Run both, and hold what must always agree: shapes, dtypes, and the states that the generators are left in.

    Args:
        files: the images; all of them where not given.
        times: how often all of them are drawn for, one batch after the other.
    """
    files = images() if files is None else files
    pictures = [opened(data) for data in files.values()]
    seed_all(seed)
    stock = [transform(picture) for _ in range(times) for picture in pictures]
    states = generator_states()
    ours, plans = run_ours(transform, device, files, seed=seed, times=times)
    late = run_late(transform, files, seed=seed)
    differ = [name for name, a, b in zip(files, stock, late) if not torch.equal(a, b)]
    assert not differ, f"who asks for the values of {', '.join(differ)} gets others"
    assert generator_states() == states, "a generator was left in another state"
    for name, a, b in zip(itertools.cycle(files), stock, ours):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert isinstance(a, torch.Tensor), name
    return Outputs(stock, [each.cpu() for each in ours], _level(*plans))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def generator_states() -> dict[str, object]:
    """Of torch, Python and numpy, as they can be compared."""
    name, words, *rest = np.random.get_state()
    of_numpy = name, np.asarray(words).tobytes(), *rest
    return {"torch's": torch.get_rng_state().numpy().tobytes(), "Python's": random.getstate(), "numpy's": of_numpy}


def _level(plan: Plan, *_: Plan) -> torch.Tensor:
    """What one level of 255 is in the values that come out, (channels or 1, 1, 1)."""
    level = torch.ones(1)
    for step in plan.steps:
        if isinstance(step, ToFloat) and step.scale:
            level = level / 255
        elif isinstance(step, Normalize):
            level = level / torch.tensor(step.std)
        elif isinstance(step, Grayscale):
            level = level.amax(0, keepdim=True)
    assert any(isinstance(step, ToFloat) for step in plan.steps) == (plan.output.dtype == "float32")
    return level.reshape(-1, 1, 1)


def run_ours(
    transform: Any, device: str, files: Images, *, seed: int = 0, times: int = 1
) -> tuple[list[torch.Tensor], list[Plan]]:
    """Draw in the order of the images, as one worker does, and run all as one batch; so many times over."""
    seed_all(seed)
    outputs: list[torch.Tensor] = []
    for _ in range(times):
        calls = image_calls_in(undecoded(transform, files, on_gpu=device != "dali"))
        assert len(calls) == len(files), f"{len(files) - len(calls)} images have pixels"
        outputs += run_calls(calls, device)
    return outputs, [call.plan for call in calls]


def run_calls(calls: Sequence[Any], device: str) -> list[torch.Tensor]:
    """What kernels make of the images on a GPU, or emulated on the "cpu", or DALI on the CPU, as "dali"."""
    if device == "dali":
        server = dali_server(calls[0].plan, len(calls))
        (output,) = server.collect(server.submit([list(arrays) for arrays in zip(*(call.inputs for call in calls))]))
        return list(output)
    planned = [(call.plan, call.image.size[::-1], call.row.packed()) for call in calls]
    if device == "cuda":
        gpu = get_decoder(PipelineOptions(len(calls), device_id=0, num_threads=2), len(calls))
        schedule = build_schedule(planned, None, False)
        (output,) = gpu.collect(gpu.submit([[call.file for call in calls]], schedule))
        return list(output)
    emulation.skip_without_compiler()
    images = [np.asarray(opened(call.image.data)) for call in calls]
    return emulation.run(images, build_programs(planned), "CHW", getattr(torch, calls[0].plan.output.dtype))


@functools.lru_cache(maxsize=8)  # building a pipeline takes long
def dali_server(plan: Plan, batch_size: int) -> PlanServer:
    return PlanServer(plan, PipelineOptions(batch_size, num_threads=2), OutputFormat())


def run_late(transform: Any, files: Images, *, seed: int = 0) -> list[torch.Tensor]:
    """The tensors whose values are made when they are asked for. The generators are left as they are."""
    with preserve_rng():
        seed_all(seed)
        return undecoded(transform, files)


def undecoded(transform: Any, files: Images, on_gpu: bool = True) -> list[Any]:
    """What the transform returns in a worker, where images are not decoded."""
    whole = transform if isinstance(transform, (v1.Compose, v2.Compose)) else v1.Compose([transform])
    pixel_uses.why = None  # as where a batch begins
    with opened_late(on_gpu):
        return [whole(create_lazy_image(EncodedImage.from_bytes(data))) for data in files.values()]


def drawn_alike(stock: Callable[[], Any], ours: Callable[[], Any], seeds: int = 200) -> Iterator[tuple[Any, Any]]:
    """What both give from the same states of torch's generator, which they leave in the same state."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        wanted, state = stock(), torch.get_rng_state()
        torch.manual_seed(seed)
        found = ours()
        assert torch.equal(torch.get_rng_state(), state), f"the generator was left in another state from seed {seed}"
        yield wanted, found


def assert_alike(transform: Any, device: str, files: Images | None = None, *, bound: Bound = EXACT, **how: int) -> None:
    """``transform`` gives the same with us, within ``bound``; ``how`` is that of ``run``."""
    outputs = run(transform, device, files, **how)
    differences = outputs.differences()
    everything = np.concatenate([difference.ravel() for difference in differences])
    assert not np.isnan(everything).any()
    allowed = bound.on(device)
    found = Bound(float(everything.mean()), float(np.quantile(everything, 0.999)), float(everything.max()))
    if any(getattr(found, name) > getattr(allowed, name) + FLOAT_ROUNDING for name in ("mean", "p999", "max")):
        names = images() if files is None else files
        named = zip(itertools.cycle(names), differences)
        parts = ", ".join(f"{name} {each.mean():.3f}/{each.max():.1f}" for name, each in named if each.size)
        raise AssertionError(f"{transform}\nis off by {found}\nallowed   {allowed}\nmean/max of each image: {parts}")
