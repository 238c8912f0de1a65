"""Compare the kernels with a Pillow that is newer than the tests, once, and keep the answer in the user's cache."""

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import functional as F

from ..transforms.augment import Kernel, PillowBlur
from ..transforms.auto_augment import Blend
from ..transforms.color import Adjustment, Grayscale, Matrix, hue_shift
from ..transforms.plan import OneOf, Step, plan_of
from ..transforms.resize import PILLOW_RELEASE, Resize, ResizeBox
from ..transforms.type_conversion import ToTensor
from ..transforms.warp import Affine, Perspective
from .compiler import cache_folder, keep
from .launcher import Launcher, get_launcher
from .operations import build_programs
from .programs import Jobs, Programs

log = logging.getLogger(__name__)

NEWEST_TESTED = 13, 0  # the newest release of Pillow that ``tests/kernels`` are known to pass with

SIZES = (64, 48), (90, 20), (20, 90)
TO, MATRIX = (50, 40), (0.9, 0.5, -7.3, -0.4, 0.8, 20.6)
AFFINE, COEFFICIENTS = Image.Transform.AFFINE, (*MATRIX, 0.004, -0.002)
BOX, WEIGHTS = (1.5, 2.25, 18.0, 19.5), (0.125, 0.25, 0, 0.5, -0.75, 0.3125, 0.1875, 0, 0.25)
MIX = (0.9, 0.2, -0.1, 3.5, 0, 1, 0, 0, 0.3, 0.3, 0.3, -9)
NEAREST, LANCZOS, BILINEAR, BICUBIC = map(Image.Resampling, range(4))

CHECKS: list[tuple[Step, Sequence[float], Callable[[Any], Any]]] = [
    (Resize("bilinear"), (21, 24), lambda image: image.resize((24, 21), BILINEAR)),
    (Resize("bicubic"), (40, 10), lambda image: image.resize((10, 40), BICUBIC)),
    (Resize("lanczos"), (9, 9), lambda image: image.resize((9, 9), LANCZOS)),
    (Affine("nearest", ()), (*TO, *MATRIX), lambda image: image.transform(TO[::-1], AFFINE, MATRIX, NEAREST)),
    (Affine("bilinear", ()), (*TO, *MATRIX), lambda image: image.transform(TO[::-1], AFFINE, MATRIX, BILINEAR)),
    (Affine("bicubic", ()), (*TO, *MATRIX), lambda image: image.transform(TO[::-1], AFFINE, MATRIX, BICUBIC)),
    (Perspective("bilinear", ()), (*TO, *COEFFICIENTS),
     lambda image: image.transform(TO[::-1], Image.Transform.PERSPECTIVE, COEFFICIENTS, BILINEAR)),
    (Perspective("bicubic", ()), (*TO, *COEFFICIENTS),
     lambda image: image.transform(TO[::-1], Image.Transform.PERSPECTIVE, COEFFICIENTS, BICUBIC)),
    (ResizeBox("hamming"), (*BOX, *TO), lambda image: image.resize(TO[::-1], Image.Resampling.HAMMING, BOX)),
    (Kernel(3), (9.0, *WEIGHTS), lambda image: image.filter(ImageFilter.Kernel((3, 3), WEIGHTS, 1.0, 9))),
    (PillowBlur(False), (1.5, 0.25), lambda image: image.filter(ImageFilter.BoxBlur((1.5, 0.25)))),
    (Matrix(3), MIX, lambda image: image.convert("RGB", MIX)),
    (Adjustment("brightness"), (1.7,), lambda image: F.adjust_brightness(image, 1.7)),
    (Adjustment("contrast"), (0.4,), lambda image: F.adjust_contrast(image, 0.4)),
    (Adjustment("saturation"), (1.7,), lambda image: F.adjust_saturation(image, 1.7)),
    (Adjustment("sharpness"), (1.7,), lambda image: F.adjust_sharpness(image, 1.7)),
    (Adjustment("hue"), (hue_shift(0.3, "pil"),), lambda image: F.adjust_hue(image, 0.3)),
    (Grayscale(3), (), lambda image: F.to_grayscale(image, 3)),
    (Adjustment("autocontrast"), (), F.autocontrast),
    (Adjustment("equalize"), (), F.equalize),
    (PillowBlur(True), (1.3, 1.3), lambda image: image.filter(ImageFilter.GaussianBlur(1.3))),
    (Blend((Adjustment("invert"),)), (0.3,), lambda image: Image.blend(image, ImageOps.invert(image), 0.3)),
]  # fmt: skip
"""Steps with arithmetic of Pillow, their parameters, and what Pillow makes of an image."""

Pixels = NDArray[np.uint8]


def find_differences(run: Callable[[Sequence[Pixels], Programs], Sequence[torch.Tensor]]) -> set[str]:
    """Return the titles of the steps that the kernels and the installed Pillow do differently.

    ``run`` runs a program for each image, and returns tensors (H, W, 3).
    """
    rng = np.random.default_rng(0)
    noise = [rng.integers(10, 240, (*size, 3), np.uint8) for size in SIZES]
    images, checks = zip(*((image, check) for image in noise for check in CHECKS))
    plan = plan_of((OneOf(tuple((step,) for step, *_ in CHECKS)), ToTensor()))
    rows = np.zeros((len(images), plan.num_params))
    for k, (_, numbers, _) in enumerate(checks):
        rows[k, : 1 + len(numbers)] = k % len(CHECKS), *numbers
    planned = [(plan, image.shape[:2], row.view(np.float32)) for image, row in zip(images, rows)]
    results = run(images, build_programs(planned))
    return {
        step.title
        for image, (step, _, change), result in zip(images, checks, results)
        if not np.array_equal(result, change(Image.fromarray(image)))
    }


def is_new() -> bool:
    """Return whether the installed Pillow is newer than the tests."""
    return PILLOW_RELEASE > NEWEST_TESTED


@functools.cache
def differing_steps(device_id: int) -> frozenset[str]:
    """Return what ``find_differences`` finds on a GPU, from the user's cache if it is there."""
    folders = (Path(__file__).parents[1] / name for name in ("kernels", "transforms"))
    sources = b"".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.*")))
    kept = cache_folder() / f"pillow-{PIL.__version__}-{hashlib.sha256(sources).hexdigest()[:32]}.txt"
    try:
        names = kept.read_text().split()
    except OSError:
        names = sorted(find_differences(functools.partial(_run_on_gpu, get_launcher(device_id))))
        keep(kept, " ".join(names).encode())
    if names:
        log.warning("the kernels leave out %s, which Pillow %s does differently", ", ".join(names), PIL.__version__)
    return frozenset(names)


def _run_on_gpu(launcher: Launcher, images: Sequence[Pixels], programs: Programs) -> list[torch.Tensor]:
    decoded = [torch.from_numpy(image).to(launcher.device) for image in images]
    schedule = Jobs(programs).schedule(3, torch.uint8, channels_last=True)
    addresses = [image.data_ptr() for image in decoded]
    outputs = launcher.run(schedule, addresses, torch.cuda.current_stream(launcher.device))
    return [image.permute(1, 2, 0).cpu() for output in outputs for image in output]
