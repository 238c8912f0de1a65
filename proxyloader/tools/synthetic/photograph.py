"""Synthetic photographs, which compress like real ones. They need only numpy and Pillow."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.floating[Any]]  # float32 throughout

_PICTURES, _TEXTURES = 0, 2  # streams of random numbers; 1 is make_dataset's
_TEXTURE_SIDE_PX = 512
_GOLDEN = (math.sqrt(5) - 1) / 2


def photograph(
    index: int, *, size: tuple[int, int] = (500, 375), label: int | None = None, classes: int = 10, seed: int = 0
) -> Image.Image:
    """Return one RGB picture: textured soft shapes, one striped surface, uneven light, sensor noise.

    The striped surface shows the class: its hue is ``label / classes`` of the colour circle, and the direction of its
    stripes depends on the label as well. All else is drawn from ``seed`` and ``index``, so equal arguments give equal
    pixels.

    Args:
        size: (width, height) in pixels.
        label: in ``range(classes)``. None: ``index % classes``, as in ``make_dataset``.
    """
    label = index % classes if label is None else label
    width, height = size
    rng = np.random.default_rng((seed, index, _PICTURES))
    scene = _Scene(rng, seed, height, width)
    for _ in range(rng.integers(2, 5)):
        scene.paint(scene.hill(), scene.material(), scene.any_color())
    for _ in range(rng.integers(1, 4)):
        scene.paint(scene.ellipse(rng.uniform(0.08, 0.25)), scene.material(), scene.any_color())
    scene.paint_class(label, classes)
    for _ in range(rng.integers(0, 3)):
        scene.paint(scene.ellipse(rng.uniform(0.04, 0.12)), scene.material(), scene.any_color())
    return scene.develop()


class _Scene:
    """A picture during its construction: luma at full resolution, chroma at half, as in the JPEG of a camera."""

    def __init__(self, rng: np.random.Generator, seed: int, height: int, width: int) -> None:
        self.rng, self.height, self.width, self.short = rng, height, width, min(height, width)
        self.textures = _textures(seed, 1 + math.ceil(max(height, width) / _TEXTURE_SIDE_PX))
        self.y = np.arange(height, dtype=np.float32).reshape(-1, 1)
        self.x = np.arange(width, dtype=np.float32).reshape(1, -1)
        self.detail = rng.uniform(0.7, 1.3)
        self.luma = self.material() + self.light(2) * 18
        self.chroma = np.empty((2, (height + 1) // 2, (width + 1) // 2), np.float32)
        self.chroma[:] = self.any_color()

    def any_color(self) -> Plane:
        """Return a random (Cb, Cr), mostly muted, as an array that broadcasts over the chroma planes."""
        return _color(self.rng.uniform(0, 2 * math.pi)) * abs(self.rng.normal(0, 11))

    def window(self, texture: Plane, height: int = 0, width: int = 0) -> Plane:
        """Return a random crop of a texture, of the size of the picture or another, which may be mirrored."""
        top, left = self.rng.integers(_TEXTURE_SIDE_PX, size=2)
        down, right = self.rng.choice((-1, 1), size=2)
        return texture[top : top + (height or self.height), left : left + (width or self.width)][::down, ::right]

    def light(self, bumps: int) -> Plane:
        """Return smooth noise, standard deviation about 1, with up to ``bumps`` bumps along the short side."""
        rates = self.rng.uniform(0.1, 1, (2, 4, 1)) * (2 * math.pi * bumps / self.short)
        phases = self.rng.uniform(0, 2 * math.pi, (2, 4, 1))
        down = np.cos(self.y.T * rates[0] + phases[0]).astype(np.float32)
        across = np.cos(self.x * rates[1] + phases[1]).astype(np.float32)
        light: Plane = down[0, :, None] * across[0]
        for wave in range(1, 4):
            light += down[wave, :, None] * across[wave]
        return light

    def material(self) -> Plane:
        """Return the luma of a material, between smooth, as a sky, and rough, as grass."""
        texture = self.textures[self.rng.integers(3)]
        return self.window(texture) * (self.detail * self.rng.uniform(16, 38)) + self.rng.uniform(50, 200)

    def hill(self) -> Plane:
        """Return a mask in 0..1 with an irregular edge of random softness, such as a hill, a cloud or foliage."""
        outline = self.light(int(self.rng.integers(1, 4))) + self.window(self.textures[0]) * 0.3
        return _mask((outline - self.rng.uniform(-0.3, 0.9)) * self.rng.uniform(2, 25))

    def ellipse(self, radius: float) -> Plane:
        """Return a mask in 0..1 of an ellipse at a random place, with ``radius`` as a share of the short side."""
        rng = self.rng
        angle, stretch = rng.uniform(0, math.pi), rng.uniform(1, 2.5)
        x = (self.x - rng.uniform(0.1, 0.9) * self.width) / (radius * self.short)
        y = (self.y - rng.uniform(0.1, 0.9) * self.height) / (radius * self.short)
        along = (x * math.cos(angle) + y * math.sin(angle)) / stretch
        across = y * math.cos(angle) - x * math.sin(angle)
        return _mask((1 - along * along - across * across) * rng.uniform(2, 15))

    def blot(self) -> Plane:
        """Return a mask in 0..1 of about half of the picture, near its centre, with an irregular edge."""
        x = self.x / self.width - self.rng.uniform(0.35, 0.65)
        y = self.y / self.height - self.rng.uniform(0.35, 0.65)
        outline = 1 - 7 * (x * x + y * y) + self.light(2) * 0.5 + self.window(self.textures[0]) * 0.15
        return _mask(outline * self.rng.uniform(4, 20))

    def stripes(self, angle: float) -> Plane:
        """Return waves in -1..1, perpendicular to ``angle``, slightly bent."""
        per_px = 2 * math.pi * self.rng.uniform(5, 10) / self.short
        ramp = self.x * (per_px * math.cos(angle)) + self.y * (per_px * math.sin(angle))
        waves: Plane = np.sin(ramp + self.light(2) * 0.7 + self.rng.uniform(0, 2 * math.pi))
        return waves

    def paint(self, mask: Plane, luma: Plane, chroma: Plane) -> None:
        """Paint luma and chroma over the picture where the mask is 1."""
        self.luma += (luma - self.luma) * mask
        self.chroma += (chroma - self.chroma) * mask[::2, ::2]

    def paint_class(self, label: int, classes: int) -> None:
        """Paint the striped surface that shows the class over about half of the picture."""
        rng = self.rng
        # Classes with similar hues get very different directions.
        stripes = self.stripes(math.pi * (label * _GOLDEN % 1) + rng.normal(0, 0.06))
        hue = 2 * math.pi * (label / classes + rng.normal(0, 0.1) / max(classes, 6))
        luma = self.material() * 0.75 + 32 + stripes * rng.uniform(8, 24)
        self.paint(self.blot(), luma, _color(hue) * (stripes[::2, ::2] * 0.2 + 0.8) * rng.uniform(24, 44))

    def develop(self) -> Image.Image:
        """Light the scene, add sensor noise, and return an RGB image."""
        light = 1 + self.light(1) * 0.13
        noise = self.rng.uniform(4, 8.5)
        # A tanh instead of clipping at 0 and 255, so highlights and shadows saturate gradually.
        luma = 128 + 128 * np.tanh((self.luma * light - 124) * (1 / 105))
        luma += self.window(self.textures[3]) * noise
        half = self.chroma.shape[1:]
        tint = self.window(self.textures[1], *half) * 2.5
        blue, red = (self.window(self.textures[3], *half) * (noise / 2) + 128 for _ in range(2))
        planes = luma, self.chroma[0] + blue + tint, self.chroma[1] + red - tint
        luma8, *chroma8 = (Image.fromarray(np.clip(plane, 0, 255).astype(np.uint8)) for plane in planes)
        full = (plane.resize(luma8.size, Image.Resampling.BILINEAR) for plane in chroma8)
        return Image.merge("YCbCr", (luma8, *full)).convert("RGB")


def _mask(height: Plane) -> Plane:
    mask: Plane = np.clip(height, 0, 1)
    return mask


def _color(angle: float) -> Plane:
    return np.asarray((math.cos(angle), math.sin(angle)), np.float32).reshape(2, 1, 1)


@lru_cache(maxsize=2)
def _textures(seed: int, repeats: int) -> tuple[Plane, Plane, Plane, Plane]:
    """Return a smooth, a natural (1/f amplitude) and a rough texture, and sensor noise. Cached in each process."""
    rng = np.random.default_rng((seed, 0, _TEXTURES))
    smooth, natural, rough, grain = (np.tile(_noise(rng, power), (repeats, repeats)) for power in (1.5, 1.1, 0.82, 0.1))
    return smooth, natural, rough, grain


def _noise(rng: np.random.Generator, power: float) -> Plane:
    """Return seamless noise of amplitude ``1 / frequency**power``, standard deviation 1, wavelengths up to a third."""
    side = _TEXTURE_SIDE_PX
    waves = side * np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    gain = np.where(waves < 3, 0, np.maximum(waves, 1) ** -power)
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((side, side))) * gain, s=(side, side))
    noise /= noise.std()
    return noise.astype(np.float32)
