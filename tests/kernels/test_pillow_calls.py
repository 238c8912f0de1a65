"""Calls of Pillow on undecoded images: recorded, with the stock loader's draws, and done by kernels bit for bit."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from PIL.ExifTags import Base
from PIL.ImageOps import autocontrast, equalize
from timm.data import auto_augment as timm
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode, functional as TF, transforms as v1, v2
from torchvision.transforms.functional import pil_to_tensor, to_tensor
from torchvision.transforms.v2 import functional as F2
from torchvision.transforms.v2.functional import horizontal_flip_image, to_image

from proxyloader.data import hooks
from proxyloader.data.deferral import Deferral, current
from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.lazy_image import get_transformed
from proxyloader.data.lazy_tensor import LazyImageTensor, LazyTensor, find_transformed, is_materialized
from proxyloader.data.transformed import pixel_uses

from ..compare import generator_states, picture, seed_all
from ..odd_formats import encoded
from ..undecoded import get_encoded, image_calls_in, opened_late
from .test_operations import run_programs

MODES = pytest.mark.parametrize("mode", ["RGB", "L"])
BILINEAR, BICUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
WARM = (1.1, 0, 0, 5, 0, 1, 0, 0, 0, 0, 0.9, -5)
OWN = ImageFilter.Kernel((3, 3), (0, 1, 2, 3, 5, 4, 1, 1, 2), offset=3)
QUAD = [[0, 0], [99, 0], [99, 99], [0, 99]], [[4, 5], [90, 2], [95, 97], [2, 90]]
COEFFICIENTS = (1, 0.1, -3, 0.05, 0.9, 2, 0.0004, 0.0007)


def photo(mode: str = "RGB", orientation: int = 6) -> bytes:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    return encoded(picture(3, (161, 123)).convert(mode), "JPEG", quality=90, exif=exif, dpi=(72, 72))


FILES = {mode: photo(mode) for mode in ("RGB", "L")}


def opened(mode: str) -> Image.Image:
    return Image.open(io.BytesIO(FILES[mode]))


def of(image: Any, *steps: Callable[[Any], Any]) -> Any:
    for step in steps:
        image = step(image)
    return image


def pasted(size: tuple[int, int], color: Any, box: Any) -> Callable[[Any], Any]:
    def paste(image: Any) -> Any:
        canvas = Image.new(image.mode, size, color)
        canvas.paste(image, box)
        return canvas

    return paste


CALLS: dict[str, Callable[[Any], Any]] = {
    "crop": lambda i: i.crop((3, 4, 50, 60)),
    "crop of floats": lambda i: i.crop((3.5, 4.5, np.float32(50.2), 60)),
    "crop beyond": lambda i: i.crop((-5, -6, i.width + 4, 90)),
    "crop of all": lambda i: i.crop((0, 0, *i.size)),
    "crop without a box": lambda i: i.crop(),
    "resize": lambda i: i.resize((60, 50)),
    "resize, nearest": lambda i: i.resize((60, 200), Image.Resampling.NEAREST),
    "resize, nearest, box": lambda i: i.resize([70, 30], Image.Resampling.NEAREST, (3.3, 5, 99.9, 80)),
    "resize, bilinear": lambda i: i.resize((np.int64(60), 200), BILINEAR),
    "resize, Lanczos": lambda i: i.resize((60, 50), Image.Resampling.LANCZOS),
    "resize, box": lambda i: i.resize((61, 52), Image.Resampling.BOX),
    "resize, Hamming": lambda i: i.resize((63, 54), Image.Resampling.HAMMING),
    "resize of a box": lambda i: i.resize((64, 48), BICUBIC, box=(10.5, 20.25, 110.5, 101)),
    "resize to the same size": lambda i: i.resize(i.size),
    "resize of a box to the same size": lambda i: i.resize(i.size, BILINEAR, (1, 2, 101, 93)),
    "resize with a gap that does nothing": lambda i: i.resize((100, 90), BICUBIC, reducing_gap=2.0),
    "resize to a column": lambda i: i.resize((1, 300), BILINEAR),
    **{f"transpose {k}": lambda i, k=k: i.transpose(k) for k in range(7)},
    "rotate": lambda i: i.rotate(20),
    "rotate, expand": lambda i: i.rotate(-33.3, BILINEAR, expand=True, fillcolor=77),
    "rotate around": lambda i: i.rotate(15, BICUBIC, center=(9, 5), translate=(3, -4)),
    "rotate by 90": lambda i: i.rotate(90, expand=True),
    "rotate by 180": lambda i: i.rotate(180),
    "rotate by 360": lambda i: i.rotate(360),
    "transform, affine": lambda i: i.transform((70, 90), Image.Transform.AFFINE, np.array([1, 0.1, -4, 0.05, 1, 3])),
    "transform, bicubic": lambda i: i.transform(i.size, 0, (1, 0.1, -4, 0.05, 1, 3), BICUBIC, fillcolor=9),
    "transform, extent": lambda i: i.transform((50, 40), Image.Transform.EXTENT, (10, 20, 150.5, 100), BILINEAR),
    "transform, perspective": lambda i: i.transform(i.size, Image.Transform.PERSPECTIVE, COEFFICIENTS, BICUBIC),
    "transform, perspective, size": lambda i: i.transform((99, 180), Image.Transform.PERSPECTIVE, COEFFICIENTS),
    "convert to L": lambda i: i.convert("L"),
    "convert to L and RGB": lambda i: i.convert("L").convert("RGB"),
    "convert later": lambda i: i.resize((30, 40)).convert("L").convert("RGB"),
    "convert by a matrix": lambda i: i.convert("RGB").convert("RGB", WARM),
    "convert by a matrix to L": lambda i: i.convert("RGB").convert("L", (0.3, 0.6, 0.1, 7)),
    "getchannel": lambda i: i.convert("RGB").getchannel("G"),
    "getchannel of grey": lambda i: i.convert("L").getchannel(0),
    "split": lambda i: i.resize((70, 60)).split()[-1],
    "merge": lambda i: Image.merge("RGB", i.convert("RGB").resize((60, 50)).split()[::-1]),
    "merge of getchannel": lambda i: Image.merge("RGB", [i.convert("RGB").getchannel(c) for c in (2, "R", 2)]),
    "draft of the same size": lambda i: (i.draft(None, (100, 100)), i.rotate(9))[1],
    "TF.gaussian_blur": lambda i: TF.gaussian_blur(i, 3, 0.7),
    "F2.gaussian_blur": lambda i: F2.gaussian_blur(i, [3, 3], [0.8]),
    "F2.permute_channels": lambda i: F2.permute_channels(i.convert("RGB"), [1, 2, 0]),
    "F2.erase": lambda i: F2.erase(i, 3, 4, 20, 30, torch.tensor(9)),
    "Gaussian blur": lambda i: i.filter(ImageFilter.GaussianBlur(1.3)),
    "Gaussian blur, by a class": lambda i: i.filter(ImageFilter.GaussianBlur),
    "Gaussian blur along x": lambda i: i.filter(ImageFilter.GaussianBlur((2.2, 0))),
    "Gaussian blur of 0": lambda i: i.filter(ImageFilter.GaussianBlur(0)),
    "box blur": lambda i: i.filter(ImageFilter.BoxBlur((2.5, 1))),
    **{f"{name}": lambda i, name=name: i.filter(getattr(ImageFilter, name))
       for name in ("SMOOTH", "SMOOTH_MORE", "SHARPEN", "DETAIL", "EMBOSS", "BLUR", "EDGE_ENHANCE_MORE", "CONTOUR")},
    "own kernel": lambda i: i.filter(OWN),
    "point by a function": lambda i: i.point(lambda v: v * 1.3 - 3),
    "point by a table": lambda i: i.point([255 - v // 2 for v in range(256)] * len(i.getbands())),
    "point by an array": lambda i: i.point(np.arange(256 * len(i.getbands())) % 251),
    "Brightness": lambda i: ImageEnhance.Brightness(i).enhance(0.4),
    "Contrast": lambda i: ImageEnhance.Contrast(i).enhance(1.6),
    "Color": lambda i: ImageEnhance.Color(i).enhance(np.float64(1.8)),
    "Color, none": lambda i: ImageEnhance.Color(i).enhance(0),
    "Sharpness": lambda i: ImageEnhance.Sharpness(i).enhance(2.5),
    "Contrast, unchanged": lambda i: ImageEnhance.Contrast(i).enhance(1.0),
    "autocontrast": ImageOps.autocontrast,
    "autocontrast, by its name": lambda i: autocontrast(i),
    "equalize": ImageOps.equalize,
    "equalize, by its name": lambda i: equalize(i),
    "posterize": lambda i: ImageOps.posterize(i, 3),
    "solarize": lambda i: ImageOps.solarize(i, 100),
    "invert": ImageOps.invert,
    "ImageChops.invert": ImageChops.invert,
    "mirror and flip": lambda i: ImageOps.flip(ImageOps.mirror(i)),
    "grayscale": ImageOps.grayscale,
    "expand": lambda i: ImageOps.expand(i, (3, 4, 5, 6), 99),
    "ImageOps.crop": lambda i: ImageOps.crop(i, 12),
    "ImageOps.pad": lambda i: ImageOps.pad(i, (90, 90), centering=(0.2, 0.7)),
    "ImageOps.fit": lambda i: ImageOps.fit(i, (64, 64), BILINEAR),
    "exif_transpose": lambda i: ImageOps.exif_transpose(i),
    "pasted": pasted((200, 180), 114, (20, 30)),
    "pasted in part": pasted((90, 80), "gray", (-20, -30)),
    "pasted into a box": pasted((180, 160), 0, (3, 5, 164, 128)),
    "pasted into an image of None": pasted((170, 130), None, None),
    "pasted as another mode": lambda i: of(Image.new("L", (170, 130)), lambda n: (n.paste(i, (1, 2)), n)[1]),
    "TF.resized_crop": lambda i: TF.resized_crop(i, 10, 20, 80, 70, [64, 64], Mode.BICUBIC),
    "TF.pad": lambda i: TF.pad(i, [5, 6, 7, 8], fill=3),
    **{f"TF.pad, {mode}": lambda i, mode=mode: TF.pad(i, [5, 60, 7, 8], padding_mode=mode)
       for mode in ("edge", "reflect", "symmetric")},
    "TF.affine": lambda i: TF.affine(i, 10, [5, 6], 1.1, [3, 4], Mode.BILINEAR, fill=9),
    "TF.perspective": lambda i: TF.perspective(i, *QUAD, Mode.BICUBIC),
    "TF.adjust_hue": lambda i: TF.adjust_hue(i, -0.2),
    "TF.to_grayscale, 3": lambda i: TF.to_grayscale(i, 3),
    "TF, the others": lambda i: of(i, lambda i: TF.adjust_brightness(i, 1.2), lambda i: TF.adjust_contrast(i, 0.7),
                                   lambda i: TF.adjust_saturation(i, 1.5), lambda i: TF.adjust_sharpness(i, 0.4),
                                   TF.autocontrast, lambda i: TF.posterize(i, 5), TF.invert, TF.hflip, TF.vflip),
    "v2": lambda i: of(i, lambda i: F2.resize(i, [70]), lambda i: F2.pad(i, [3], fill=1), F2.horizontal_flip,
                       lambda i: F2.adjust_hue(i, hue_factor=0.1), lambda i: F2.rotate(i, 9), F2.equalize),
}  # fmt: skip
"""Calls that are recorded."""

OF_PIXELS: dict[str, Callable[[Any], Any]] = {
    "thumbnail": lambda i: (i.thumbnail((20, 20)), i)[1],
    "draft": lambda i: (i.draft("L", (40, 30)), i)[1],
    "reduce": lambda i: i.reduce(2),
    "resize with a gap": lambda i: i.resize((20, 20), reducing_gap=2.0),
    "MESH": lambda i: i.transform((9, 9), Image.Transform.MESH, [((0, 0, 9, 9), (0, 0, 0, 9, 9, 9, 9, 0))]),
    "median": lambda i: i.filter(ImageFilter.MedianFilter(3)),
    "large blur": lambda i: i.filter(ImageFilter.GaussianBlur(90)),
    "autocontrast with a cutoff": lambda i: ImageOps.autocontrast(i, cutoff=2),
    "equalize with a mask": lambda i: ImageOps.equalize(i, mask=Image.new("L", i.size, 255)),
    "HSV": lambda i: i.convert("RGB").convert("HSV"),
    "palette": lambda i: i.convert("P"),
    "merge of another image's": lambda i: Image.merge("RGB", [*i.convert("RGB").split()[:2], i.convert("L")]),
    "merge of a mirrored one": lambda i: Image.merge("RGB", [
        *i.convert("RGB").split()[:2], i.convert("RGB").transpose(0).getchannel(2)]),
    "composite": lambda i: Image.composite(i, i.transpose(0), i.convert("L")),
    "pasted twice": lambda i: (n := pasted((300, 300), 7, (0, 0))(i), n.paste(i, (99, 99)))[0],
    "pasted with a mask": lambda i: (n := Image.new("RGB", i.size), n.paste(i, None, i.convert("L")))[0],
    "pasted outside": lambda i: (n := Image.new(i.mode, (9, 9), 5), n.paste(3, (2, 2, 5, 5)))[0],
    "drawn on a new image": lambda i: (n := Image.new("L", (30, 30), 5), ImageDraw.Draw(n).line((0, 0, 9, 9), 9))[0],
    "drawn": lambda i: (i.load(), ImageDraw.Draw(i).line((0, 0, 20, 20), 255), i)[2],
    "blend": lambda i: Image.blend(i, i.transpose(0), 0.3),
    "blend of the degenerate image": lambda i: Image.blend(ImageEnhance.Sharpness(i).degenerate, i.transpose(0), 0.3),
    "degenerate images": lambda i: [each(i).degenerate for each in (
        ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, ImageEnhance.Sharpness)],
    "changed behind an enhancer": lambda i: (i := i.copy(), e := ImageEnhance.Contrast(i), i.putpixel((0, 0), 9),
                                             e.enhance(1.5))[3],
    "an empty image": lambda i: i.crop((5, 5, 5, 9)),
    "array": np.asarray,
    "resize to iterator": lambda i: i.resize(side // 2 for side in i.size),
    "resize to iterator, reduced": lambda i: i.resize((side // 8 for side in i.size), reducing_gap=2.0),
    "table of iterator": lambda i: i.point(map(int, [*range(256)] * len(i.getbands()))),
    "filter of function": lambda i: i.filter(lambda: ImageFilter.GaussianBlur(2)),
    "kept enhancer": lambda i: [ImageEnhance.Contrast(i).degenerate],
    "pickle": lambda i: pickle.loads(pickle.dumps(i.crop((1, 2, 40, 50)))),
}  # fmt: skip
"""Calls that use pixels."""

WRONG: dict[str, Callable[[Any], Any]] = {
    "crop to the left": lambda i: i.crop((50, 4, 3, 60)),
    "crop of three": lambda i: i.crop((50, 4, 3)),
    "resize to 0": lambda i: i.resize((0, 5)),
    "resize to floats": lambda i: i.resize((5.5, 5)),
    "resize by what": lambda i: i.resize((5, 5), 77),
    "resize of a box beyond": lambda i: i.resize((5, 5), box=(0, 0, 999, 9)),
    "reducing_gap": lambda i: i.resize((5, 5), reducing_gap=0.5),
    "transpose": lambda i: i.transpose(9),
    "transform by Lanczos": lambda i: i.transform((5, 5), 0, (1, 0, 0, 0, 1, 0), 1),
    "transform without data": lambda i: i.transform((5, 5), 0),
    "transform by five numbers": lambda i: i.transform((5, 5), 0, (1, 0, 0, 0, 1)),
    "color": lambda i: i.rotate(5, fillcolor="no color"),
    "convert": lambda i: i.convert("no mode"),
    "matrix": lambda i: i.convert("RGB", (1, 2)),
    "filter": lambda i: i.filter(3),
    "table of 5": lambda i: i.point([1] * 5),
    "table of words": lambda i: i.point(["a"] * 768),
    "enhance by a word": lambda i: ImageEnhance.Brightness(i).enhance("2"),
    "hue": lambda i: TF.adjust_hue(i, 0.7),
    "grey": lambda i: TF.to_grayscale(i, 2),
    "pasted into another size": pasted((20, 20), 0, (0, 0, 5, 5)),
    "pasted at floats": pasted((20, 20), 0, (0.5, 0)),
    "new of what": lambda i: Image.new(i.mode, (5, 5), "no color"),
    "new of a negative size": lambda i: Image.new(i.mode, (-5, 5)),
    "arguments": lambda i: i.crop(1, 2, 3),
}


def seen(image: Any) -> Any:
    """What a user sees of an image without its pixels, or of its kind."""
    if not isinstance(image, Image.Image):
        return type(image)
    return type(image), image.mode, image.size, image.info, dict(image.getexif()), getattr(image, "format", None)


def assert_exact(late: Any, stock: Any) -> None:
    """Check that an image or a tensor is undecoded, and that both torchvision and kernels compute stock's."""
    if isinstance(late, Image.Image):
        assert seen(late) == seen(stock)
        assert get_transformed(late) is not None, "it is decoded"
        late, stock = pil_to_tensor(late), pil_to_tensor(stock.copy())
    assert isinstance(late, torch.Tensor) and not is_materialized(late), "it is decoded"
    (transformed,) = image_calls_in(late)
    assert torch.equal(transformed.materialize(), stock)
    (found,) = run_programs([transformed])
    assert torch.equal(found, stock), f"{(found != stock).sum()} values of {stock.numel()} differ"
    pickle.loads(pickle.dumps(transformed.plan))


@MODES
@pytest.mark.parametrize("name", CALLS)
def test_call_is_recorded(name: str, mode: str) -> None:
    stock = CALLS[name](opened(mode))
    with opened_late():
        image, count = opened(mode), pixel_uses.count
        result = CALLS[name](image)
        assert pixel_uses.count == count and (result is image or get_encoded(image.convert("RGB")) is not None)
        is_of_array = mode == "L" and name.startswith(("TF.", "F2."))  # stock's shares memory with it
        assert is_of_array or result is image or result.readonly == stock.readonly
        assert_exact(result, stock)
        copied = result.copy()
        copied.putpixel((0, 0), tuple(255 - level for level in np.atleast_1d(copied.getpixel((0, 0))).tolist()))
        assert copied.tobytes() != stock.tobytes() and result.tobytes() == stock.tobytes()


@MODES
@pytest.mark.parametrize("name", OF_PIXELS)
def test_call_that_uses_pixels_gets_pillows(name: str, mode: str) -> None:
    def pixels(value: Any) -> Any:
        if isinstance(value, list):
            return [pixels(each) for each in value]
        return (seen(value), value.tobytes()) if isinstance(value, Image.Image) else value.tolist()

    stock = OF_PIXELS[name](opened(mode))
    with opened_late():
        assert pixels(OF_PIXELS[name](opened(mode))) == pixels(stock)


@MODES
@pytest.mark.parametrize("name", WRONG)
def test_error_is_pillows(name: str, mode: str) -> None:
    def outcome() -> Any:
        try:
            return seen(WRONG[name](opened(mode).convert(mode)))
        except Exception as error:
            return type(error), str(error)

    stock = outcome()
    with opened_late():
        assert outcome() == stock


# Pipelines: steps that are called one after the other, with their own draws -------------------------------------------


def at_random(p: float, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda image: step(image) if random.random() < p else image


def uniform(step: Callable[[Any, float], Any], low: float, high: float) -> Callable[[Any], Any]:
    return lambda image: step(image, random.uniform(low, high))


class OwnBlur:
    """As in DINO, SimCLR and MoCo."""

    def __init__(self, p: float = 0.5, low: float = 0.1, high: float = 2.0) -> None:
        self.p, self.low, self.high = p, low, high

    def __call__(self, image: Any) -> Any:
        if random.random() > self.p:
            return image
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(self.low, self.high)))


def random_crop(image: Any, size: int = 64) -> Any:
    """As in the reference for segmentation: pads, then crops."""
    short = max(0, size - min(image.size))
    image = TF.pad(image, (0, 0, short, short), fill=0)
    return TF.crop(image, *v1.RandomCrop.get_params(image, (size, size)))


def letterboxed(image: Any, side: int = 96) -> Any:
    scale = side / max(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), BILINEAR)
    canvas = Image.new(image.mode, (side, side), (114, 114, 114) if image.mode == "RGB" else 114)
    canvas.paste(small, ((side - small.width) // 2, (side - small.height) // 2))
    return canvas


BY_TIMM: list[Callable[[Any], Any]] = [
    timm.auto_contrast, timm.equalize, timm.invert,
    *(uniform(each, 0.1, 1.9) for each in (timm.brightness, timm.color, timm.contrast, timm.sharpness)),
    *(uniform(lambda i, x, f=f: f(i, x, fillcolor=9, resample=BICUBIC), -0.3, 0.3)  # type: ignore[misc]
      for f in (timm.shear_x, timm.shear_y, timm.translate_x_rel, timm.translate_y_rel, timm.rotate)),
    lambda i: timm.posterize(i, 4), lambda i: timm.solarize(i, 99), lambda i: timm.solarize_add(i, 40),
    lambda i: timm.gaussian_blur(i, 1.5), lambda i: timm.desaturate(i, 0.4), uniform(timm.gaussian_blur_rand, 1, 5),
]  # fmt: skip

JITTER = v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
BY_CLASS = v1.RandomResizedCrop(64, scale=(0.4, 1.0), interpolation=Mode.BICUBIC)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

PIPELINES: dict[str, list[Callable[[Any], Any]]] = {
    "functionals": [lambda i: TF.resized_crop(i, *v1.RandomResizedCrop.get_params(i, [0.1, 1], [0.7, 1.3]), [64, 64]),
                    at_random(0.5, TF.hflip), to_tensor],
    "DINO, global": [BY_CLASS, v1.RandomHorizontalFlip(), JITTER, v1.RandomGrayscale(0.2), OwnBlur(0.9),
                     at_random(0.2, ImageOps.solarize), v1.ToTensor()],
    "DINO, in a Compose": [v1.Compose([BY_CLASS, JITTER, OwnBlur(1.0), v1.ToTensor()])],
    "a reference for segmentation": [lambda i: TF.resize(i, [random.randint(50, 150)]), at_random(0.5, TF.hflip),
                                     random_crop, pil_to_tensor],
    "letterbox": [letterboxed, to_tensor],
    "timm's functions by hand": [lambda i: of(i, *random.sample(BY_TIMM, 6)), to_tensor],
    "timm's functions behind a class": [BY_CLASS, lambda i: of(i, *random.choices(BY_TIMM, k=2)),
                                        v1.RandomHorizontalFlip(), v1.PILToTensor()],
    "EXIF": [ImageOps.exif_transpose, lambda i: i.resize((90, 80)), ImageOps.exif_transpose, to_tensor],
    "grey": [lambda i: i.convert("L"), uniform(lambda i, x: i.rotate(x, BILINEAR), -9, 9), OwnBlur(1.0),
             lambda i: ImageEnhance.Contrast(i).enhance(1.7), to_tensor],
    "grey and back": [lambda i: i.crop((9, 9, 99, 99)), ImageOps.grayscale, lambda i: i.convert("RGB"),
                      v1.ColorJitter(0.5, 0.5), lambda i: TF.to_grayscale(i, 3), to_tensor],
    "gamma": [uniform(lambda i, x: i.point(lambda v: 255 * (v / 255) ** x), 0.7, 1.5), ImageOps.mirror, to_tensor],
    "mixed with classes": [v1.Pad(4), lambda i: TF.adjust_brightness(i, 1.2), JITTER, OwnBlur(),
                           v1.RandomRotation(20), lambda i: i.crop((5, 5, 90, 95)), v1.RandomCrop(64), v1.ToTensor(),
                           v1.RandomErasing(1.0)],
    "mixed with classes of v2": [v2.ColorJitter(0.4, 0.4), lambda i: ImageOps.fit(i, (64, 64)),
                                 v2.RandomHorizontalFlip(), v2.ToImage(), TO_FLOAT],
    "classes without a rule": [v1.Pad(0, padding_mode="constant"), v2.Lambda(TF.vflip), v2.Lambda(OwnBlur(1.0)),
                               v1.Lambda(letterboxed), v2.PILToTensor()],
    "quarter turns": [lambda i: i.rotate(random.choice([0, 90, 180, 270]), expand=True), lambda i: i.resize((50, 60)),
                      lambda i: i.transpose(5), to_tensor],
}  # fmt: skip


def run_pipeline(steps: list[Callable[[Any], Any]], mode: str, seed: int) -> Iterator[Any]:
    """Yield what each step returns, and the states of the generators after it."""
    seed_all(seed)
    image: Any = opened(mode)
    for step in steps:
        image = step(image)
        yield image, generator_states()


@MODES
@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_stays_undecoded(name: str, mode: str) -> None:
    for seed in range(4):
        stock = list(run_pipeline(PIPELINES[name], mode, seed))
        with opened_late():
            count = pixel_uses.count
            late = list(run_pipeline(PIPELINES[name], mode, seed))
            assert pixel_uses.count == count
            for (ours, state), (theirs, stocks_state) in zip(late, stock, strict=True):
                assert seen(ours) == seen(theirs)
                assert state == stocks_state
            assert_exact(late[-1][0], stock[-1][0])


# Around the calls -----------------------------------------------------------------------------------------------------


def test_arguments_may_change_after_the_call() -> None:
    box, table, blur = [1, 2, 50, 60], [255 - v for v in range(256)] * 3, ImageFilter.GaussianBlur(1.5)
    matrix = np.array([1, 0.1, 0, 0, 1, 0.5])

    def make(image: Any) -> Any:
        return image.crop(box).point(table).filter(blur).transform((40, 40), Image.Transform.AFFINE, matrix)

    stock = make(opened("RGB"))
    with opened_late():
        late = make(opened("RGB"))
        box[0], table[:], blur.radius, matrix[:] = 30, [0] * 768, 9, 0
        assert_exact(late, stock)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_function_of_point_is_called_as_often_as_by_pillow(on_gpu: bool) -> None:
    calls: list[int] = []
    with opened_late(on_gpu):
        late = opened("RGB").point(lambda v: calls.append(v) or v // 2)
        late.tobytes()
        assert calls == list(range(256))
        Image.new("L", (9, 9)).point(lambda v: calls.append(v) or v // 2)
    assert calls == [*range(256)] * 2


def test_function_of_filter_is_called_as_often_as_by_pillow() -> None:
    calls: list[int] = []
    with opened_late():
        opened("RGB").filter(lambda: calls.append(1) or ImageFilter.SMOOTH()).tobytes()
    assert calls == [1]


def test_enhancer_may_outlive_the_hooks() -> None:
    with opened_late():
        kept = ImageEnhance.Contrast(opened("RGB"))
    assert kept.enhance(0.5).tobytes() == ImageEnhance.Contrast(opened("RGB")).enhance(0.5).tobytes()


def test_function_that_another_library_has_wrapped_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Image.new
    monkeypatch.setattr(Image, "new", lambda *args: new(*args))
    with opened_late():
        image = pasted((200, 180), 114, (20, 30))(opened("RGB"))
        assert get_transformed(image) is None and get_transformed(opened("RGB").rotate(9)) is not None


def test_function_that_a_user_has_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [0.1, 1], [0.7, 1.3]
    with opened_late():
        assert v1.RandomResizedCrop.get_params(opened("RGB"), *arguments) != (1, 2, 30, 40)
    monkeypatch.setattr(v1.RandomResizedCrop, "get_params", staticmethod(lambda img, scale, ratio: (1, 2, 30, 40)))
    with opened_late():
        assert v1.RandomResizedCrop.get_params(opened("RGB"), *arguments) == (1, 2, 30, 40)


@pytest.mark.parametrize("why", ["without a GPU", "in a stock loader", "without a kernel"])
def test_calls_use_pixels(why: str) -> None:
    context: Any = contextlib.nullcontext() if why == "in a stock loader" else opened_late(why != "without a GPU")
    with context:
        if why == "without a kernel":
            current().find_obstacle = lambda plan: "there is no kernel"  # type: ignore[union-attr]
        pixel_uses.why = None
        image = opened("RGB").convert("RGB")
        resized = image.resize((60, 50))
        assert get_transformed(image) is None and get_transformed(resized) is None
        if why != "in a stock loader":
            assert f"{__file__}:" in str(pixel_uses.why)


def test_dali_runs_the_calls_that_it_has_without_a_gpu() -> None:
    with opened_late(False):
        image = TF.hflip(opened("RGB").convert("RGB").crop((1, 2, 60, 50)))
        plan = find_transformed(TF.normalize(TF.to_tensor(image), (0.5,) * 3, (0.2,) * 3)).plan  # type: ignore[arg-type,union-attr]
    assert [type(step).__name__ for step in plan.steps] == ["Crop", "Flip", "ToTensor", "ToFloat", "Normalize"]


@pytest.mark.parametrize("change", [v1.RandomCrop(40), v1.RandomHorizontalFlip(1.0), v1.ColorJitter(0.2)])
def test_a_copy_has_its_own_info(change: Any) -> None:
    with opened_late():
        image = opened("RGB").convert("RGB")
        changed = change(image)
        copied = changed.copy()
        changed.info["new"] = 1
        assert "new" not in image.info and "new" not in copied.info


def test_hooks_are_undone() -> None:
    kernels = F2._utils._KERNEL_REGISTRY[F2.horizontal_flip]  # type: ignore[attr-defined]
    of_pillow = [Image.new, Image.merge, ImageChops.invert, equalize, autocontrast]
    functions = [*of_pillow, to_tensor, pil_to_tensor, to_image, TF.to_pil_image, horizontal_flip_image]

    def hooked() -> list[Any]:
        methods = [Image.Image.crop, Image.Image.paste, ImageEnhance.Color.__init__, ImageEnhance.Color.enhance]
        return [*(each.__code__ for each in functions), *methods, kernels[tv_tensors.Image]]

    with opened_late():
        pass
    before = hooked()
    with opened_late():
        assert not any(now is then for now, then in zip(hooked(), before))
        with opened_late():
            pass
        assert not any(now is then for now, then in zip(hooked(), before))
    assert all(now is then for now, then in zip(hooked(), before, strict=True))
    assert not hasattr(horizontal_flip_image, "__original_fn")


def test_hooks_stay_if_an_earlier_holder_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = Deferral(False, lambda plan: "")
    hooks.hold(earlier)
    hooks.release(earlier)
    cycle: list[Any] = [earlier]
    cycle.append(cycle)
    del earlier, cycle
    patch = hooks._patch
    monkeypatch.setattr(hooks, "_patch", lambda *each: (patch(*each), gc.collect(0))[0])
    with opened_late():
        assert get_encoded(opened("RGB")) is not None


def test_equal_sequences_share_a_plan_whatever_their_numbers() -> None:
    def sequence(seed: int) -> Any:
        seed_all(seed)
        image = opened("RGB").crop((0, 0, random.randint(50, 99), 90)).rotate(random.uniform(1, 9))
        image = ImageEnhance.Contrast(image).enhance(random.random())
        return get_transformed(image.point([random.randrange(256) for _ in range(768)]).resize((30, 40)))

    with opened_late():
        first, second = sequence(0), sequence(1)
        assert first.chain is second.chain and first.row != second.row
        assert get_transformed(opened("RGB").crop((0, 0, 9, 9))).chain is not first.chain  # type: ignore[union-attr]


def test_several_crops_decode_their_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    decode = EncodedImage.decoded
    monkeypatch.setattr(EncodedImage, "decoded", lambda self: decoded.append(self.size) or decode(self))
    with opened_late():
        image = opened("RGB").convert("RGB")
        crops = [image.crop((k, 0, 50 + k, 50)) for k in range(5)]
        stock = [opened("RGB").crop((k, 0, 50 + k, 50)) for k in range(5)]
        assert [np.asarray(each).tolist() for each in crops] == [np.asarray(each).tolist() for each in stock]
    assert len(decoded) == 6  # ``stock`` is late as well, of five images
    source = weakref.ref(get_encoded(image))  # type: ignore[arg-type]
    del image, crops
    gc.collect()
    assert source() is None


def test_tensor_of_decoded_image_belongs_to_the_loader() -> None:
    """So that it arrives on the same device as those of undecoded images. A mask does not."""

    def is_lazy(tensor: Any) -> bool:  # ``type`` compares as torch's
        return any(type(tensor) is kind for kind in (LazyTensor, LazyImageTensor))

    with opened_late():
        decoded = opened("RGB").convert("RGB")
        decoded.putpixel((0, 0), (1, 2, 3))
        for function in (to_tensor, pil_to_tensor, to_image):
            assert is_lazy(function(decoded))
            assert not is_lazy(function(Image.fromarray(np.eye(9, dtype=np.uint8))))
            with pytest.raises(TypeError):
                function("no image")
