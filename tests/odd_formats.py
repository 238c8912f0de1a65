"""Unusual encodings that torchvision reads all the same."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

Encoder = Callable[[Image.Image], bytes]

JPEG_QUALITY = 93


def jpeg(image: Image.Image, *, subsampling: str = "4:2:0", **options: Any) -> bytes:
    """The ordinary way, as cameras and ImageNet have it; ``options`` are those of Pillow's JPEG writer."""
    return encoded(image, "JPEG", quality=JPEG_QUALITY, subsampling=subsampling, **options)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def _cmyk(image: Image.Image) -> Image.Image:
    """To CMYK with about half of the black in K; Pillow's own conversion leaves K empty, which would hide a lost K."""
    rgb = np.asarray(image, np.float32)
    key = (255 - rgb.max(axis=2, keepdims=True)) / 2
    inks = np.concatenate([255 - 255 * rgb / (255 - key), key], axis=2)
    return Image.frombytes("CMYK", image.size, np.clip(inks.round(), 0, 255).astype(np.uint8).tobytes())


def _cmyk_jpeg(image: Image.Image) -> bytes:
    """As Adobe's programs and Pillow write it: inverted inks, behind an APP14 marker of transform 0."""
    return encoded(_cmyk(image), "JPEG", quality=JPEG_QUALITY)


def _ycck_jpeg(image: Image.Image) -> bytes:
    """The inks as YCbCr, K beside them, transform 2. Pillow reads it and cannot write it, so its marker is patched."""
    *inks, key = _cmyk(image).split()
    planes = Image.merge("RGB", inks).convert("YCbCr").split()
    # Pillow inverts all it writes as CMYK. That is right for K, and undone here for the rest: a decoder inverts what
    # it makes of YCbCr by itself (libjpeg's ycck_cmyk_convert).
    inverted = [plane.point([255 - level for level in range(256)]) for plane in planes]
    data = bytearray(encoded(Image.merge("CMYK", (*inverted, key)), "JPEG", quality=JPEG_QUALITY))
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
    return jpeg(image, exif=exif.tobytes())


def _thumbnail_jpeg(image: Image.Image) -> bytes:
    """A small JPEG inside the EXIF, so that a frame header of another size stands before the picture's own."""
    small = image.copy()
    small.thumbnail((160, 120))
    thumbnail = jpeg(small)
    # TIFF: directory 0 at byte 8 (orientation 1), directory 1 at 26 (it is a JPEG, at byte 68, so many bytes).
    header = struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<HHHIII", 1, 0x0112, 3, 1, 1, 26)
    entries = (0x0103, 3, 1, 6), (0x0201, 4, 1, 68), (0x0202, 4, 1, len(thumbnail))
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return jpeg(image, exif=b"Exif\0\0" + header + directory + bytes(4) + thumbnail)


def _with_alpha(image: Image.Image) -> Image.Image:
    """Clear at one side, opaque at the other."""
    image = image.copy()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


ODD_FORMATS: dict[str, Encoder] = {
    "odd_cmyk.jpg": _cmyk_jpeg,
    "odd_cmyk_without_adobe.jpg": _cmyk_jpeg_without_adobe,
    "odd_ycck.jpg": _ycck_jpeg,
    "odd_rgb.jpg": lambda image: encoded(image, "JPEG", quality=JPEG_QUALITY, keep_rgb=True),
    "odd_grey.jpg": lambda image: encoded(image.convert("L"), "JPEG", quality=JPEG_QUALITY),
    "odd_progressive.jpg": lambda image: jpeg(image, progressive=True),
    "odd_444.jpg": lambda image: jpeg(image, subsampling="4:4:4"),
    "odd_422.jpg": lambda image: jpeg(image, subsampling="4:2:2"),
    "odd_orientation_6.jpg": _orientation_6_jpeg,
    "odd_thumbnail.jpg": _thumbnail_jpeg,
    "odd_zeros_behind.jpg": lambda image: jpeg(image) + bytes(64),
    "odd_restart_intervals.jpg": lambda image: jpeg(image, restart_marker_blocks=5),
    "odd_two_pictures.jpg": lambda image: encoded(
        image, "MPO", quality=JPEG_QUALITY, save_all=True, append_images=[image.resize((64, 48))]
    ),
    "odd_gif.jpg": lambda image: encoded(image, "GIF"),
    "odd_png.jpg": lambda image: encoded(image, "PNG"),
    "odd_rgb.png": lambda image: encoded(image, "PNG"),
    "odd_palette.png": lambda image: encoded(image.quantize(64), "PNG"),
    "odd_palette_transparent.png": lambda image: encoded(image.quantize(64), "PNG", transparency=0),
    "odd_rgba.png": lambda image: encoded(_with_alpha(image), "PNG"),
    "odd_grey_alpha.png": lambda image: encoded(_with_alpha(image.convert("L")), "PNG"),
    # 251 and not 257: the low byte then differs from the high one, as in a scanner's file.
    "odd_grey_16_bit.png": lambda image: encoded(Image.fromarray(np.uint16(image.convert("L")) * 251), "PNG"),
    "odd_1_bit.png": lambda image: encoded(image.convert("1"), "PNG"),
    "odd_rgb.tif": lambda image: encoded(image, "TIFF"),
    "odd_lossy.webp": lambda image: encoded(image, "WEBP", quality=JPEG_QUALITY),
    "odd_lossless.webp": lambda image: encoded(image, "WEBP", lossless=True),
    "odd_rgb.bmp": lambda image: encoded(image, "BMP"),
    "odd_rgb.ppm": lambda image: encoded(image, "PPM"),
    "odd_grey.pgm": lambda image: encoded(image.convert("L"), "PPM"),
}
"""File name -> encoder of an RGB image into that file's content. torchvision reads them all; a JPEG decoder sees them
differently or not at all. The names end as ``ImageFolder`` wants, which takes a GIF only under another name."""
