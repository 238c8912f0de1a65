"""Create an ImageFolder of synthetic JPEGs that look, compress and decode like photos."""

from __future__ import annotations

import colorsys
import io
import json
import math
import os
from collections import deque
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from ._cores import usable_cores
from ._validation import check_int
from .tools.processes import in_processes

__all__ = ["make_dataset", "photograph"]

FORMAT = 3  # incremented when the same arguments yield different files
MANIFEST = "dataset.json"
MIN_SIDE_PX = 8


def make_dataset(
    root: str | os.PathLike[str],
    *,
    images: int = 1024,
    size: tuple[int, int] = (500, 375),
    classes: int = 10,
    seed: int = 0,
    progressive: float = 0.0,
    processes: int | None = None,
    progress: bool = True,
) -> Path:
    """Write a dataset for ``torchvision.datasets.ImageFolder``: ``root/class_000/img_000000.jpg`` and so on.

    Existing photos are kept, and missing ones are written, as after an interruption. The same arguments and versions of
    NumPy and Pillow produce the same bytes, for any number of processes. A dataset with more ``images`` starts with the
    same files. A network can learn the classes in a few epochs.

    With several processes, scripts need ``if __name__ == "__main__":``, as with ``multiprocessing``.

    Args:
        root: folder of the dataset. It is created if it does not exist.
        images: number of photos, as 4:2:0 JPEGs of about 100 KB each at the default size. Labels alternate.
        size: (width, height) of most photos, in pixels. Others are portraits, square, or up to 10 % larger or smaller.
        classes: number of classes. Only the first ``images`` classes get a folder.
        seed: random seed.
        progressive: share of progressive JPEGs, about 0.2 on the web.
        processes: number of processes. None: one per core, or fewer for a small dataset.
        progress: whether to show a progress bar if stderr is a terminal.

    Returns:
        ``root``, as a Path.

    Raises:
        ValueError: an argument is out of range.
        FileExistsError: ``root`` contains other files, or a dataset with other arguments.
    """
    for name, value, minimum in (("images", images, 1), ("classes", classes, 1), ("seed", seed, 0)):
        check_int(name, value, minimum)
    if len(size) != 2 or min(size) < MIN_SIDE_PX:
        raise ValueError(f"size must be (width, height) with sides >= {MIN_SIDE_PX}, got {tuple(size)}")
    if not 0 <= progressive <= 1:
        raise ValueError(f"progressive must be in [0, 1], got {progressive}")
    if processes is not None:
        check_int("processes", processes, 1, ", or None")
    root = Path(root)
    settings: dict[str, Any] = {"made_by": "proxyloader.make_dataset", "format": FORMAT, "images": images}
    settings |= {"size": list(size), "classes": classes, "seed": seed, "progressive": progressive}
    _claim(root, settings)
    for label in range(min(classes, images)):  # ImageFolder rejects empty folders
        (root / f"class_{label:03d}").mkdir(exist_ok=True)
    missing = [number for number in range(images) if not _path(root, number, classes).exists()]
    # Starting a process takes a second, as long as writing about 24 megapixels.
    processes = processes or min(usable_cores(), 1 + int(len(missing) * max(math.prod(size), 180_000) / 24e6))
    write = partial(_write_photo, root, size, classes, seed, progressive)
    deque(in_processes(root.name, write, missing, processes, chunk_size=8, progress=progress), maxlen=0)
    return root


def _claim(root: Path, settings: dict[str, Any]) -> None:
    """Create the folder with a file of its settings. Raise FileExistsError if it contains something else."""
    root.mkdir(parents=True, exist_ok=True)
    # List the files before reading one, as another process may be writing this dataset. Its first file is temporary.
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith(f"{MANIFEST}."))
    found = None
    with suppress(FileNotFoundError, ValueError):
        found = json.loads((root / MANIFEST).read_bytes())
    if isinstance(found, dict) and found.get("made_by") == settings["made_by"]:
        if keys := [key for key in settings if found.get(key) != settings[key]]:
            old, new = (", ".join(f"{key}={dataset.get(key)}" for key in keys) for dataset in (found, settings))
            raise FileExistsError(f"{root} contains a dataset with {old}, not {new}; choose another folder")
    elif names:
        raise FileExistsError(f"{root} contains other files ({', '.join(names[:3])}); choose another folder")
    else:
        _write(root / MANIFEST, json.dumps(settings, indent=2).encode() + b"\n")


def _path(root: Path, number: int, classes: int) -> Path:
    return root / f"class_{number % classes:03d}" / f"img_{number:06d}.jpg"


def _write_photo(root: Path, size: tuple[int, int], classes: int, seed: int, progressive: float, number: int) -> None:
    rng = np.random.default_rng((seed, number, 1))
    (width, height), kind = size, rng.random()
    if 0.6 <= kind < 0.75:
        width, height = height, width
    elif 0.75 <= kind < 0.85:
        width = height = (width + height) // 2
    elif kind >= 0.85:
        width, height = (max(MIN_SIDE_PX, round(side * rng.uniform(0.9, 1.1))) for side in size)
    file = io.BytesIO()
    image = photograph(number, size=(width, height), classes=classes, seed=seed)
    image.save(file, "JPEG", quality=QUALITY, subsampling="4:2:0", progressive=rng.random() < progressive)
    _write(_path(root, number, classes), file.getvalue())


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --- photographs ------------------------------------------------------------------------------------------------------

QUALITY = 93
TEXTURE_PX = 512


def photograph(index: int, *, size: tuple[int, int] = (500, 375), classes: int = 10, seed: int = 0) -> Image.Image:
    """Return an RGB image of soft textured shapes with uneven lighting and sensor noise.

    The hue and stripe direction of one large shape encode the class, ``index % classes``. Everything else depends on
    ``seed`` and ``index``. ``size`` is (width, height) in pixels.
    """
    rng, short = np.random.default_rng((seed, index, 0)), min(size)
    picture, roughness = Image.new("RGB", size, _color(rng)), Image.new("L", size, int(rng.integers(8, 46)))
    shapes = int(rng.integers(4, 8))
    for number in range(shapes):
        shows_class = number == shapes - 2
        mask = Image.new("L", size)
        radii = short * (rng.uniform(0.4, 0.5, 2) if shows_class else rng.uniform(0.08, 0.6, 2))
        center = size * (rng.uniform(0.35, 0.65, 2) if shows_class else rng.random(2))
        angles = np.sort(rng.uniform(0, 2 * math.pi, 12))
        outline = center + radii * np.stack([np.cos(angles), np.sin(angles)], 1) * rng.uniform(0.8, 1.2, (12, 1))
        ImageDraw.Draw(mask).polygon([(x, y) for x, y in outline.tolist()], 255)
        mask = mask.filter(ImageFilter.BoxBlur(short * rng.uniform(0.002, 0.02)))
        surface = _stripes(rng, size, index % classes, classes) if shows_class else _color(rng)
        picture.paste(surface, None, mask)
        roughness.paste(int(rng.integers(8, 46)), None, mask)
    pixels = np.asarray(picture, np.float32)
    x, y = (np.linspace(-0.2, 0.2, side, dtype=np.float32) for side in size)
    light = 1 + x * rng.uniform(-1, 1) + y[:, None] * rng.uniform(-1, 1)
    detail = np.asarray(roughness, np.float32) * _window(_textures(seed)[0], rng, size)
    grain = rng.uniform(4, 8) * _window(_textures(seed)[1], rng, size)
    pixels = 128 + 128 * np.tanh(((pixels + detail[..., None]) * light[..., None] - 128) / 105) + grain[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _color(rng: np.random.Generator) -> tuple[int, int, int]:
    """Return a random color, mostly muted."""
    red, green, blue = colorsys.hsv_to_rgb(rng.random(), min(1.0, abs(rng.normal(0, 0.25))), rng.uniform(40, 220))
    return int(red), int(green), int(blue)


def _stripes(rng: np.random.Generator, size: tuple[int, int], label: int, classes: int) -> Image.Image:
    """Return stripes that encode a class. Classes with similar hues get very different directions."""
    hue = int(255 * (label / classes + rng.normal(0, 0.1) / max(classes, 6))) % 256
    angle = math.pi * (label * (math.sqrt(5) - 1) / 2 % 1) + rng.normal(0, 0.06)
    x, y = np.arange(size[0], dtype=np.float32), np.arange(size[1], dtype=np.float32)[:, None]
    distance = (x * math.cos(angle) + y * math.sin(angle)) / min(size)
    stripes = np.sin(2 * math.pi * rng.uniform(5, 10) * distance) * rng.uniform(10, 30) + rng.uniform(110, 190)
    value = Image.fromarray(stripes.astype(np.uint8))
    hue_saturation = [Image.new("L", size, level) for level in (hue, int(rng.integers(90, 160)))]
    return Image.merge("HSV", [*hue_saturation, value]).convert("RGB")


def _window(texture: NDArray[np.float32], rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float32]:
    """Return a random window of a texture, tiled as needed and randomly mirrored."""
    rows, columns = (np.arange(side) + rng.integers(TEXTURE_PX) for side in (size[1], size[0]))
    window = texture.take(rows, 0, mode="wrap").take(columns, 1, mode="wrap")
    return window[:: rng.choice((-1, 1)), :: rng.choice((-1, 1))]


@lru_cache(maxsize=2)
def _textures(seed: int) -> list[NDArray[np.float32]]:
    """Return two seamless textures: one with the spectrum of photos, about 1 / frequency, and sensor noise."""
    rng, textures = np.random.default_rng((seed, 0, 2)), []
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_PX)[:, None], np.fft.rfftfreq(TEXTURE_PX)) * TEXTURE_PX
    for power in (1.15, 0.1):
        gain = np.where(frequency < 3, 0, np.maximum(frequency, 1) ** -power)
        noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((TEXTURE_PX, TEXTURE_PX))) * gain)
        textures.append((noise / noise.std()).astype(np.float32))
    return textures
