"""Create an ImageFolder of synthetic JPEGs that look, compress and decode like photos."""

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
from PIL import Image, ImageColor, ImageDraw, ImageFilter

from ._cores import usable_cores
from ._validation import check_int
from .tools.processes import in_processes

__all__ = ["make_dataset", "photograph"]

FORMAT = 4  # incremented when the same arguments yield different files
MANIFEST = "dataset.json"
MIN_SIDE_PX = 8
QUALITY = 94
TEXTURE_PX = 512


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
        size: (width, height) of most photos, in pixels. Others are portraits, square, or up to 10% larger or smaller.
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
    found: Any = None
    with suppress(FileNotFoundError, ValueError):
        found = json.loads((root / MANIFEST).read_bytes())
    if isinstance(found, dict) and found.get("made_by") == settings["made_by"]:
        if found != settings:
            raise FileExistsError(f"{root} contains a dataset with other arguments: {found}; choose another folder")
    elif names:
        raise FileExistsError(f"{root} contains other files ({', '.join(names[:3])}); choose another folder")
    else:
        _write(root / MANIFEST, json.dumps(settings, indent=2).encode() + b"\n")


def _path(root: Path, number: int, classes: int) -> Path:
    return root / f"class_{number % classes:03d}" / f"img_{number:06d}.jpg"


def _write_photo(root: Path, size: tuple[int, int], classes: int, seed: int, progressive: float, number: int) -> None:
    rng = np.random.default_rng((seed, number, 1))
    square, scaled = [sum(size) // 2] * 2, [max(MIN_SIDE_PX, round(side * rng.uniform(0.9, 1.1))) for side in size]
    width, height = rng.choice([size, size[::-1], square, scaled], p=[0.6, 0.15, 0.1, 0.15]).tolist()
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


def photograph(index: int, *, size: tuple[int, int] = (500, 375), classes: int = 10, seed: int = 0) -> Image.Image:
    """Return an RGB image of soft textured ellipses with uneven lighting and sensor noise.

    The hue of one large ellipse encodes the class, ``index % classes``. Everything else depends on ``seed`` and
    ``index``. ``size`` is (width, height) in pixels.
    """
    rng, short = np.random.default_rng((seed, index, 0)), min(size)
    picture, roughness = Image.new("RGB", size, "gray"), Image.new("L", size, 24)
    for number in range(6):
        shows_class, mask = number == 4, Image.new("L", size)
        center = size * (rng.uniform(0.35, 0.65, 2) if shows_class else rng.random(2))
        radii = short * (rng.uniform(0.4, 0.5, 2) if shows_class else rng.uniform(0.08, 0.6, 2))
        hue = index % classes / classes + rng.normal(0, 0.01) if shows_class else rng.random()
        saturation = rng.uniform(40, 60) if shows_class else rng.uniform(0, 30)
        color = f"hsv({360 * (hue % 1):.0f}, {saturation:.0f}%, {rng.uniform(30, 85):.0f}%)"
        ImageDraw.Draw(mask).ellipse([*(center - radii), *(center + radii)], 255)
        mask = mask.filter(ImageFilter.BoxBlur(short * rng.uniform(0.002, 0.02)))
        picture.paste(ImageColor.getrgb(color), None, mask)
        roughness.paste(int(rng.integers(8, 46)), None, mask)
    x, y = (np.linspace(-0.2, 0.2, side, dtype=np.float32) for side in size)
    light = 1 + x * rng.uniform(-1, 1) + y[:, None] * rng.uniform(-1, 1)
    rows, columns = (np.arange(side) + rng.integers(TEXTURE_PX) for side in reversed(size))
    texture = _texture(seed).take(rows, 0, mode="wrap").take(columns, 1, mode="wrap")
    noise = rng.standard_normal(texture.shape, np.float32) * rng.uniform(5, 9)
    pixels = np.asarray(picture, np.float32) + (np.asarray(roughness, np.float32) * texture)[..., None]
    return Image.fromarray(np.clip(pixels * light[..., None] + noise[..., None], 0, 255).astype(np.uint8))


@lru_cache(maxsize=2)
def _texture(seed: int) -> NDArray[np.float32]:
    """Return a seamless texture with the spectrum of photos, about 1 / frequency."""
    noise = np.random.default_rng((seed, 0, 2)).standard_normal((TEXTURE_PX, TEXTURE_PX))
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_PX)[:, None], np.fft.rfftfreq(TEXTURE_PX)) * TEXTURE_PX
    gain = np.where(frequency < 3, 0, np.maximum(frequency, 1) ** -1.15)
    texture: NDArray[np.float64] = np.fft.irfft2(np.fft.rfft2(noise) * gain)
    texture /= texture.std()
    return texture.astype(np.float32)
