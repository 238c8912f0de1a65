"""A data set to try things with: an ImageFolder tree of JPEGs that look and weigh like photographs.

Three parts, in the order a file is made: ``photograph`` paints the picture, ``ODD_FORMATS`` are the unusual ways to
encode one, ``make_dataset`` writes the tree on all cores. Needs numpy and Pillow, and neither torch nor DALI.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import struct
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from operator import index as as_int
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.floating[Any]]  # float32 throughout
Encoder = Callable[[Image.Image], bytes]

MANIFEST = "dataset.json"
UNFINISHED = "dataset.json.part"
JPEG_QUALITY = 93
SMALLEST_SIDE_PX = 8

_FORMAT = 1  # raised when the same arguments begin to give other files
_PICTURES, _SHAPES, _TEXTURES = range(3)  # streams of random numbers
_TEXTURE_SIDE_PX = 512
_GOLDEN = (math.sqrt(5) - 1) / 2
_FIRST_ODD_INDEX = 10**9  # the odd files' pictures are the same for any number of images
_FILES_PER_PROCESS = 256  # a process takes about as long to start as to write these

log = logging.getLogger(__name__)


def photograph(
    index: int, *, size: tuple[int, int] = (500, 375), label: int | None = None, classes: int = 10, seed: int = 0
) -> Image.Image:
    """Paint one picture: textured soft shapes, one striped surface, uneven light, sensor noise.

    The surface tells the class: its hue is ``label / classes`` of the colour circle, and the direction of its stripes
    follows the label too. Place, scale, light and all else are drawn from ``seed`` and ``index``.

    Args:
        index: which picture; equal arguments give equal pixels.
        size: (width, height) in pixels.
        label: in ``range(classes)``; None deals it as ``make_dataset`` does, ``index % classes``.

    Returns:
        An RGB image of exactly ``size``.
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
    """A picture in the making: luma at full resolution, both chroma planes at half, as a camera's JPEG keeps them."""

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
        """(Cb, Cr) about 0, mostly muted, as an array that spreads over the chroma planes."""
        return _color(self.rng.uniform(0, 2 * math.pi)) * abs(self.rng.normal(0, 11))

    def window(self, texture: Plane, height: int = 0, width: int = 0) -> Plane:
        """Cut the picture's size, or another, out of a texture, at any place, mirrored or not."""
        top, left = self.rng.integers(_TEXTURE_SIDE_PX, size=2)
        down, right = self.rng.choice((-1, 1), size=2)
        return texture[top : top + (height or self.height), left : left + (width or self.width)][::down, ::right]

    def light(self, bumps: int) -> Plane:
        """Smooth and slow noise, standard deviation about 1, with up to this many bumps along the short side."""
        rates = self.rng.uniform(0.1, 1, (2, 4, 1)) * (2 * math.pi * bumps / self.short)
        phases = self.rng.uniform(0, 2 * math.pi, (2, 4, 1))
        down = np.cos(self.y.T * rates[0] + phases[0]).astype(np.float32)
        across = np.cos(self.x * rates[1] + phases[1]).astype(np.float32)
        light: Plane = down[0, :, None] * across[0]
        for wave in range(1, 4):
            light += down[wave, :, None] * across[wave]
        return light

    def material(self) -> Plane:
        """The luma of something: smooth as a sky, rough as grass, or between."""
        texture = self.textures[self.rng.integers(3)]
        return self.window(texture) * (self.detail * self.rng.uniform(16, 38)) + self.rng.uniform(50, 200)

    def hill(self) -> Plane:
        """A mask in 0..1 with an irregular, more or less soft edge: a hill, a cloud, foliage."""
        outline = self.light(int(self.rng.integers(1, 4))) + self.window(self.textures[0]) * 0.3
        return _mask((outline - self.rng.uniform(-0.3, 0.9)) * self.rng.uniform(2, 25))

    def ellipse(self, radius: float) -> Plane:
        """A mask in 0..1: an ellipse somewhere, ``radius`` in parts of the short side."""
        rng = self.rng
        angle, stretch = rng.uniform(0, math.pi), rng.uniform(1, 2.5)
        x = (self.x - rng.uniform(0.1, 0.9) * self.width) / (radius * self.short)
        y = (self.y - rng.uniform(0.1, 0.9) * self.height) / (radius * self.short)
        along = (x * math.cos(angle) + y * math.sin(angle)) / stretch
        across = y * math.cos(angle) - x * math.sin(angle)
        return _mask((1 - along * along - across * across) * rng.uniform(2, 15))

    def blot(self) -> Plane:
        """A mask in 0..1: about half of the picture, near its middle, with an irregular edge."""
        x = self.x / self.width - self.rng.uniform(0.35, 0.65)
        y = self.y / self.height - self.rng.uniform(0.35, 0.65)
        outline = 1 - 7 * (x * x + y * y) + self.light(2) * 0.5 + self.window(self.textures[0]) * 0.15
        return _mask(outline * self.rng.uniform(4, 20))

    def stripes(self, angle: float) -> Plane:
        """Waves in -1..1, square to ``angle``, a little bent."""
        per_px = 2 * math.pi * self.rng.uniform(5, 10) / self.short
        ramp = self.x * (per_px * math.cos(angle)) + self.y * (per_px * math.sin(angle))
        waves: Plane = np.sin(ramp + self.light(2) * 0.7 + self.rng.uniform(0, 2 * math.pi))
        return waves

    def paint(self, mask: Plane, luma: Plane, chroma: Plane) -> None:
        """Lay something over the picture where the mask is 1."""
        self.luma += (luma - self.luma) * mask
        self.chroma += (chroma - self.chroma) * mask[::2, ::2]

    def paint_class(self, label: int, classes: int) -> None:
        """Lay the striped surface that tells the class over about half of the picture."""
        rng = self.rng
        # Classes with neighbouring hues get directions far apart.
        stripes = self.stripes(math.pi * (label * _GOLDEN % 1) + rng.normal(0, 0.06))
        hue = 2 * math.pi * (label / classes + rng.normal(0, 0.1) / max(classes, 6))
        luma = self.material() * 0.75 + 32 + stripes * rng.uniform(8, 24)
        self.paint(self.blot(), luma, _color(hue) * (stripes[::2, ::2] * 0.2 + 0.8) * rng.uniform(24, 44))

    def develop(self) -> Image.Image:
        """Light the scene, add the sensor's noise, and make an RGB image of it."""
        light = 1 + self.light(1) * 0.13
        noise = self.rng.uniform(4, 8.5)
        # A tanh in place of a cut at 0 and 255: highlights and shadows fade as on film.
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
    """Smooth, natural (amplitude about 1/f, all octaves) and rough texture, then sensor noise. Made once a process."""
    rng = np.random.default_rng((seed, 0, _TEXTURES))
    smooth, natural, rough, grain = (np.tile(_noise(rng, power), (repeats, repeats)) for power in (1.5, 1.1, 0.82, 0.1))
    return smooth, natural, rough, grain


def _noise(rng: np.random.Generator, power: float) -> Plane:
    """Seamless noise of amplitude ``1 / frequency**power``, standard deviation 1, no wave longer than a third."""
    side = _TEXTURE_SIDE_PX
    waves = side * np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    gain = np.where(waves < 3, 0, np.maximum(waves, 1) ** -power)
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((side, side))) * gain, s=(side, side))
    noise /= noise.std()
    return noise.astype(np.float32)


def _save(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def _jpeg(image: Image.Image, *, subsampling: str = "4:2:0", **options: Any) -> bytes:
    return _save(image, "JPEG", quality=JPEG_QUALITY, subsampling=subsampling, **options)


def _cmyk(image: Image.Image) -> Image.Image:
    """To CMYK with about half of the black in K; Pillow's own conversion leaves K empty, which would hide a lost K."""
    rgb = np.asarray(image, np.float32)
    key = (255 - rgb.max(axis=2, keepdims=True)) / 2
    inks = np.concatenate([255 - 255 * rgb / (255 - key), key], axis=2)
    return Image.frombytes("CMYK", image.size, np.clip(inks.round(), 0, 255).astype(np.uint8).tobytes())


def _cmyk_jpeg(image: Image.Image) -> bytes:
    """As Adobe's programs and Pillow write it: inverted inks, behind an APP14 marker of transform 0."""
    return _save(_cmyk(image), "JPEG", quality=JPEG_QUALITY)


def _ycck_jpeg(image: Image.Image) -> bytes:
    """The inks as YCbCr, K beside them, transform 2. Pillow reads it and cannot write it, so its marker is patched."""
    *inks, key = _cmyk(image).split()
    planes = Image.merge("RGB", inks).convert("YCbCr").split()
    # Pillow inverts all it writes as CMYK. That is right for K, and undone here for the rest: a decoder inverts what
    # it makes of YCbCr by itself (libjpeg's ycck_cmyk_convert).
    inverted = [plane.point([255 - level for level in range(256)]) for plane in planes]
    data = bytearray(_save(Image.merge("CMYK", (*inverted, key)), "JPEG", quality=JPEG_QUALITY))
    data[_adobe_segment(data).stop - 1] = 2
    return bytes(data)


def _cmyk_jpeg_without_adobe(image: Image.Image) -> bytes:
    data = bytearray(_cmyk_jpeg(image))
    del data[_adobe_segment(data)]
    return bytes(data)


def _adobe_segment(data: bytearray) -> slice:
    start = data.index(b"\xff\xee\x00\x0eAdobe")
    return slice(start, start + 16)


def _orientation_6_jpeg(image: Image.Image) -> bytes:
    """The EXIF says to turn the picture by a quarter before it is shown."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return _jpeg(image, exif=exif.tobytes())


def _thumbnail_jpeg(image: Image.Image) -> bytes:
    """A small JPEG inside the EXIF, so that a frame header of another size stands before the picture's own."""
    small = image.copy()
    small.thumbnail((160, 120))
    thumbnail = _jpeg(small)
    # TIFF: directory 0 at byte 8 (orientation 1), directory 1 at 26 (it is a JPEG, at byte 68, so many bytes).
    header = struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<HHHIII", 1, 0x0112, 3, 1, 1, 26)
    entries = (0x0103, 3, 1, 6), (0x0201, 4, 1, 68), (0x0202, 4, 1, len(thumbnail))
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return _jpeg(image, exif=b"Exif\0\0" + header + directory + bytes(4) + thumbnail)


def _with_alpha(image: Image.Image) -> Image.Image:
    """Clear at one side, opaque at the other."""
    image = image.copy()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def _grey_16_bit(image: Image.Image) -> Image.Image:
    # 251 and not 257: the low byte then differs from the high one, as in a scanner's file.
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 251)


ODD_FORMATS: dict[str, Encoder] = {
    "odd_cmyk.jpg": _cmyk_jpeg,
    "odd_cmyk_without_adobe.jpg": _cmyk_jpeg_without_adobe,
    "odd_ycck.jpg": _ycck_jpeg,
    "odd_rgb.jpg": lambda image: _save(image, "JPEG", quality=JPEG_QUALITY, keep_rgb=True),
    "odd_grey.jpg": lambda image: _save(image.convert("L"), "JPEG", quality=JPEG_QUALITY),
    "odd_progressive.jpg": lambda image: _jpeg(image, progressive=True),
    "odd_444.jpg": lambda image: _jpeg(image, subsampling="4:4:4"),
    "odd_422.jpg": lambda image: _jpeg(image, subsampling="4:2:2"),
    "odd_orientation_6.jpg": _orientation_6_jpeg,
    "odd_thumbnail.jpg": _thumbnail_jpeg,
    "odd_zeros_behind.jpg": lambda image: _jpeg(image) + bytes(64),
    "odd_restart_intervals.jpg": lambda image: _jpeg(image, restart_marker_blocks=5),
    "odd_two_pictures.jpg": lambda image: _save(
        image, "MPO", quality=JPEG_QUALITY, save_all=True, append_images=[image.resize((64, 48))]
    ),
    "odd_gif.jpg": lambda image: _save(image, "GIF"),
    "odd_png.jpg": lambda image: _save(image, "PNG"),
    "odd_rgb.png": lambda image: _save(image, "PNG"),
    "odd_palette.png": lambda image: _save(image.quantize(64), "PNG"),
    "odd_palette_transparent.png": lambda image: _save(image.quantize(64), "PNG", transparency=0),
    "odd_rgba.png": lambda image: _save(_with_alpha(image), "PNG"),
    "odd_grey_alpha.png": lambda image: _save(_with_alpha(image.convert("L")), "PNG"),
    "odd_grey_16_bit.png": lambda image: _save(_grey_16_bit(image), "PNG"),
    "odd_1_bit.png": lambda image: _save(image.convert("1"), "PNG"),
    "odd_rgb.tif": lambda image: _save(image, "TIFF"),
    "odd_lossy.webp": lambda image: _save(image, "WEBP", quality=JPEG_QUALITY),
    "odd_lossless.webp": lambda image: _save(image, "WEBP", lossless=True),
    "odd_rgb.bmp": lambda image: _save(image, "BMP"),
    "odd_rgb.ppm": lambda image: _save(image, "PPM"),
    "odd_grey.pgm": lambda image: _save(image.convert("L"), "PPM"),
}
"""File name -> encoder of an RGB image into that file's content. torchvision reads them all; a JPEG decoder sees them
differently or not at all. The names end as ``ImageFolder`` wants, which takes a GIF only under another name."""


@dataclass(frozen=True)
class _Recipe:
    """All that decides a data set's content. Goes to the processes that write it, and into its manifest.

    Its files are numbered: ``range(images)`` are the photographs, what follows are the odd formats.
    """

    images: int
    size: tuple[int, int]
    classes: int
    seed: int
    odd_formats: bool

    def __post_init__(self) -> None:
        if self.images < 1:
            raise ValueError(f"images={self.images}: there must be at least 1")
        if self.classes < 1:
            raise ValueError(f"classes={self.classes}: there must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")
        if min(self.size) < SMALLEST_SIDE_PX:
            raise ValueError(f"size={self.size}: must be (width, height), each at least {SMALLEST_SIDE_PX} px")

    def __len__(self) -> int:
        return self.images + (len(ODD_FORMATS) if self.odd_formats else 0)

    def manifest(self) -> dict[str, Any]:
        return {"made_by": "proxyloader.make_dataset", "format": _FORMAT, **asdict(self), "size": list(self.size)}

    def label(self, number: int) -> int:
        """Dealt round robin. A class that gets no photograph has no folder: ImageFolder refuses empty ones."""
        if number < self.images:
            return number % self.classes
        return (number - self.images) % min(self.classes, self.images)

    def path(self, number: int) -> str:
        odd = number - self.images
        name = f"img_{number:06d}.jpg" if odd < 0 else list(ODD_FORMATS)[odd]
        return f"class_{self.label(number):03d}/{name}"

    def content(self, number: int) -> bytes:
        odd = number - self.images
        encode = _jpeg if odd < 0 else list(ODD_FORMATS.values())[odd]
        index = number if odd < 0 else _FIRST_ODD_INDEX + odd
        size = self._size(index)
        return encode(photograph(index, size=size, label=self.label(number), classes=self.classes, seed=self.seed))

    def _size(self, index: int) -> tuple[int, int]:
        """Six in ten are of the size asked for; the others lie, stand or are square, and are near it."""
        rng = np.random.default_rng((self.seed, index, _SHAPES))
        (width, height), kind = self.size, rng.random()
        if kind < 0.6:
            return width, height
        if kind < 0.75:
            return height, width
        if kind < 0.85:
            return (width + height) // 2, (width + height) // 2
        width, height = (max(SMALLEST_SIDE_PX, round(side * rng.uniform(0.9, 1.1))) for side in self.size)
        return width, height


def make_dataset(
    root: str | os.PathLike[str],
    *,
    images: int = 1024,
    size: tuple[int, int] = (500, 375),
    classes: int = 10,
    seed: int = 0,
    odd_formats: bool = False,
    processes: int | None = None,
    progress: bool = True,
) -> Path:
    """Write a data set for ``torchvision.datasets.ImageFolder``: ``root/class_000/img_000000.jpg`` and so on.

    Makes it once: where the same data set already is, nothing is written, and one that was interrupted is completed.
    The same arguments give the same bytes for any number of processes (on one machine, with one version of numpy and
    Pillow). A larger ``images`` begins with the same files. A network learns the classes in a few epochs.

    With several processes, a script that calls this needs the ``if __name__ == "__main__":`` of ``multiprocessing``.

    Args:
        images: number of photographs: JPEG, 4:2:0, about 105 KB each at the default size. Labels are dealt round robin.
        size: (width, height) in pixels of most of them. Some stand, some are square, some a little larger or smaller.
        classes: number of classes; only the first ``images`` of them get a folder.
        seed: 0 or more.
        odd_formats: add the files of ``ODD_FORMATS``, spread over the classes.
        processes: None is one for each usable core, or fewer for a small data set; 1 works in the calling process.
        progress: show a bar, if stderr is a terminal.

    Returns:
        ``root``, as a Path.

    Raises:
        ValueError: an argument is out of its range.
        FileExistsError: ``root`` holds something else, or a data set made with other arguments.
    """
    width, height = size
    recipe = _Recipe(as_int(images), (as_int(width), as_int(height)), as_int(classes), as_int(seed), bool(odd_formats))
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes}: there must be at least 1, or None to choose by the number of cores")
    root = Path(root)
    if _is_complete(root, recipe):
        log.info("%s: already made, used as it is", root)
        return root
    manifest = json.dumps(recipe.manifest(), indent=2).encode() + b"\n"
    root.mkdir(parents=True, exist_ok=True)
    _write(root / UNFINISHED, manifest)
    for number in range(min(recipe.images, recipe.classes)):
        (root / recipe.path(number)).parent.mkdir(exist_ok=True)
    _write_files(root, recipe, processes or _default_processes(len(recipe)), progress)
    _write(root / MANIFEST, manifest)
    (root / UNFINISHED).unlink(missing_ok=True)
    log.info("%s: made %d images", root, len(recipe))
    return root


def _is_complete(root: Path, recipe: _Recipe) -> bool:
    """Whether all is there already; False where all or the rest is to be written. Raises where that must not be."""
    asked = recipe.manifest()
    advice = "Give another folder, or delete this one"
    if root.exists() and not root.is_dir():
        raise FileExistsError(f"{root}: is a file, and the data set needs a folder. {advice}")
    for name, kind in ((MANIFEST, "a data set"), (UNFINISHED, "an unfinished data set")):
        found = _read_manifest(root / name)
        if found == asked:
            return name == MANIFEST
        if found.get("made_by") == asked["made_by"]:
            differ = [key for key in asked if found.get(key) != asked[key]]
            theirs, ours = (", ".join(f"{key}={side.get(key)}" for key in differ) for side in (found, asked))
            raise FileExistsError(f"{root}: holds {kind} with {theirs}, and {ours} is asked for. {advice}")
    # Another process that has just begun here may have come as far as its first temporary file.
    entries = root.iterdir() if root.exists() else ()
    names = sorted(path.name for path in entries if not path.name.startswith(UNFINISHED))
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise FileExistsError(f"{root}: holds {len(names)} entries that make_dataset did not write ({shown}). {advice}")
    return False


def _read_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says; {} where there is none, or another program's."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_files(root: Path, recipe: _Recipe, processes: int, progress: bool) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        monitor_interval = 0  # else tqdm starts a thread that outlives the bar

    write, numbers = partial(_write_file, root, recipe), range(len(recipe))
    bar = Bar(total=len(recipe), desc=root.name, unit="image", disable=None if progress else True)
    with bar:
        if processes == 1:
            for number in numbers:
                write(number)
                bar.update()
            return
        # Not fork: the calling process may run threads (CUDA, DALI, a DataLoader's), which a fork breaks.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            try:
                for _ in pool.map(write, numbers, chunksize=max(1, min(16, len(recipe) // (4 * processes)))):
                    bar.update()
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"{root}: a process that writes images ended early. Killed for memory? Or called from a script "
                    'without `if __name__ == "__main__":`, or from stdin? Then use processes=1'
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)  # else an interrupt waits for all that is still to be written


def _write_file(root: Path, recipe: _Recipe, number: int) -> None:
    path = root / recipe.path(number)
    if not path.exists():
        _write(path, recipe.content(number))


def _write(path: Path, data: bytes) -> None:
    """All or nothing: what is there under its name is whole, so an interrupted data set needs only what is missing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_bytes(data)
    temporary.replace(path)


def _default_processes(files: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, math.ceil(files / _FILES_PER_PROCESS), 61)  # 61: what Windows can wait for
