"""Runs a transform as torchvision does and as we do, on the same images under the same seed, and says how far apart
both are, in levels of 255."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image
from torchvision.transforms import v2

from proxyloader import EncodedImage, compile_transforms
from proxyloader._random_state import preserve_rng
from proxyloader.dali import jpeg_engines
from proxyloader.dali.operators import PipelineOptions
from proxyloader.dali.output_format import OutputFormat
from proxyloader.dali.plan_server import PlanServer
from proxyloader.dali.program_server import ProgramServer, get_decoder
from proxyloader.data.compiled_transform import find_compiled
from proxyloader.kernels.launcher import get_launcher
from proxyloader.kernels.operations import get_missing_kernel
from proxyloader.make_dataset import photograph
from proxyloader.transforms.color import Grayscale
from proxyloader.transforms.plan import OneOf, Plan, Step
from proxyloader.transforms.type_conversion import Normalize, ToFloat

from .odd_formats import ODD_FORMATS, encoded, jpeg
from .undecoded import image_calls_in

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
        images[name] = ODD_FORMATS[encoder](photograph(20 + k, size=(131 + k, 91 + k)))
    return images


def jpeg_of(size: tuple[int, int], index: int = 0) -> bytes:
    return jpeg(photograph(index, size=size))


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

each_kind = pytest.mark.parametrize("kind", ["pil", "uint8", "float"])
"""What a transform is given: a PIL image, a uint8 tensor, or a float tensor of 0 to 1."""

TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
BEFORE = {"a PIL image": [], "a uint8 tensor": [v2.ToImage()], "a float tensor": TO_FLOAT}
of_each_kind = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
"""As ``each_kind``, of v2's images where it is a tensor: the transforms that make it, for ``as_image``."""


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
        gpu_mean: on a GPU, before it decodes, where that is closer.
    """

    mean: float
    p999: float
    max: float
    gpu_mean: float | None = None

    def on(self, device: str) -> Bound:
        """The GPU's JPEG engine is up to 1 level off Pillow; its CUDA decoder, for what no engine decodes, 3."""
        if device == "cpu":
            return replace(self, gpu_mean=None)
        mean = self.mean if self.gpu_mean is None else self.gpu_mean
        return Bound(mean + 0.1, self.p999 + (1 if engines_decode() else 2), self.max + 3)


def engines_decode() -> bool:
    """A GPU's do, what they can; else CUDA does, which rounds otherwise: there are none, or others use them up."""
    return not jpeg_engines.are_disabled(0) and _engines_work()


@functools.lru_cache
def _engines_work() -> bool:
    return jpeg_engines._measure_error(0) < jpeg_engines.MAX_MEAN_ERROR


EXACT = Bound(0, 0, 0)

BILINEAR = Bound(0.2, 1, 2)
"""Pillow rounds values half-way between two levels up, DALI to the even one; and that in two passes."""

BICUBIC = Bound(0.1, 1, 4)
"""As bilinear, with fewer values half-way."""

LARGE_BILINEAR = Bound(0.2, 2, 16)
"""From EXACT_EDGES_BELOW on DALI repeats the edge where torchvision shortens the filter: outermost pixels differ."""

LARGE_BICUBIC = Bound(0.3, 5, 16, gpu_mean=0.1)
"""As LARGE_BILINEAR, in a frame two pixels wide; where the image grows, as many times wider. A CPU resizes in one pass,
without Pillow's rounding between two."""


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
    transform: Callable[[Any], Any],
    device: str,
    files: Images | None = None,
    *,
    seed: int = 0,
    times: int = 1,
    inner: int = 0,
) -> Outputs:
    """Run both, and hold what must always agree: shapes, dtypes, and the states that the generators are left in.

    Args:
        files: the images; all of them where not given.
        times: how often all of them are drawn for, one batch after the other.
        inner: leave out a frame of so many pixels.
    """
    files = images() if files is None else files
    pictures = [opened(data) for data in files.values()]
    seed_all(seed)
    with _one_thread():
        stock = [transform(picture) for _ in range(times) for picture in pictures]
    states = generator_states()
    ours = run_ours(transform, device, files, seed=seed, times=times)
    with _one_thread():
        differ = [
            name for name, a, b in zip(files, stock, run_late(transform, files, seed=seed)) if not torch.equal(a, b)
        ]
    assert not differ, f"who asks for the values of {', '.join(differ)} gets others"
    assert generator_states() == states, "a generator was left in another state"
    for name, a, b in zip(itertools.cycle(files), stock, ours):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert isinstance(a, torch.Tensor), name
    frame = slice(inner, -inner or None)
    level = _level(the_plan(compile_transforms(transform)))
    return Outputs([a[:, frame, frame] for a in stock], [b.cpu()[:, frame, frame] for b in ours], level)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def generator_states() -> dict[str, object]:
    """Of torch, Python and numpy, as they can be compared."""
    name, words, *rest = np.random.get_state()
    of_numpy = name, np.asarray(words).tobytes(), *rest
    return {"torch's": torch.get_rng_state().numpy().tobytes(), "Python's": random.getstate(), "numpy's": of_numpy}


def the_plan(compiled: Any) -> Plan:
    """Of what ``compile_transforms`` gives for a transform, or for an object that holds one."""
    (each,) = find_compiled(compiled)
    return each.plan


def _level(plan: Plan) -> torch.Tensor:
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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On images this small, torch's threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_ours(transform: Any, device: str, files: Images, *, seed: int = 0, times: int = 1) -> list[torch.Tensor]:
    """Draw in the order of the images, as one worker does, and run all as one batch; so many times over."""
    compiled = compile_transforms(transform)
    seed_all(seed)
    server = server_of(the_plan(compiled), device, len(files))
    outputs: list[torch.Tensor] = []
    for _ in range(times):
        calls = image_calls_in([compiled(EncodedImage.from_bytes(data)) for data in files.values()])
        (output,) = server.collect(server.submit([list(arrays) for arrays in zip(*(call.inputs for call in calls))]))
        outputs += output
    return outputs


def run_late(transform: Any, files: Images, *, seed: int = 0) -> list[torch.Tensor]:
    """The tensors whose values are made when they are asked for. The generators are left as they are."""
    compiled = compile_transforms(transform)
    with preserve_rng():
        seed_all(seed)
        return [compiled(EncodedImage.from_bytes(data)) for data in files.values()]


def drawn_alike(stock: Callable[[], Any], ours: Callable[[], Any], seeds: int = 200) -> Iterator[tuple[Any, Any]]:
    """What both give from the same states of torch's generator, which they leave in the same state."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        wanted, state = stock(), torch.get_rng_state()
        torch.manual_seed(seed)
        found = ours()
        assert torch.equal(torch.get_rng_state(), state), f"the generator was left in another state from seed {seed}"
        yield wanted, found


Done = tuple[type[Step], tuple[float, ...]]
"""The kind of operation, and the numbers that it takes."""


def taken(steps: Sequence[Step], row: Sequence[float]) -> Iterator[Done]:
    """What a row of drawn numbers says is done."""
    at = 0
    for operation in (each for step in steps for each in step.operations):
        numbers = row[at : at + operation.num_params]
        at += operation.num_params
        if isinstance(operation, OneOf):
            yield from taken(operation.branches[int(numbers[0])], numbers[1:])
        else:
            yield type(operation), tuple(numbers)


@functools.lru_cache(maxsize=8)  # building a pipeline is what takes long on a GPU
def server_of(plan: Plan, device: str, batch_size: int) -> PlanServer | ProgramServer:
    """The server of a plan, as a loader has it; the same again for an equal one, as of a v1 and a v2 transform."""
    options = PipelineOptions(batch_size, device_id=None if device == "cpu" else 0, num_threads=2)
    if device == "cuda" and not get_missing_kernel(plan):
        launcher = get_launcher(0, getattr(torch, plan.output.dtype), channels_last=False)
        assert launcher is not None
        return ProgramServer(get_decoder(options), plan, launcher, OutputFormat())
    return PlanServer(plan, options, OutputFormat())


def assert_nearly_exact_but_for(
    kind: type[Step], transform: Any, device: str, files: Images, *, bound: Bound, times: int
) -> None:
    """Images to which no step of this kind is done are within the mean and the percentile of ``bound``."""
    differences = run(transform, device, files, times=times).differences()
    plan, others = the_plan(compile_transforms(transform)), []
    seed_all(0)
    for difference, data in zip(differences, itertools.cycle(files.values())):
        width, height = opened(data).size
        if kind not in {each for each, _ in taken(plan.steps, plan.sample_params(height, width))}:
            others.append(difference.ravel())
    everything, allowed = np.concatenate(others), bound.on(device)
    assert len(others) > 6
    assert everything.mean() <= allowed.mean and np.quantile(everything, 0.999) <= allowed.p999


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
