"""Functions of torchvision on undecoded tensors: recorded, and done by kernels as torchvision does."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import (
    InterpolationMode as Mode,
    _functional_tensor as FT,
    functional as TF,
    transforms as v1,
    v2,
)
from torchvision.transforms.functional import hflip, pil_to_tensor, to_tensor
from torchvision.transforms.v2 import functional as F2
from torchvision.transforms.v2.functional import horizontal_flip, horizontal_flip_image, to_image

from proxyloader.data.lazy_image import get_transformed
from proxyloader.data.lazy_tensor import LazyTensor, get_values, is_materialized, materialize
from proxyloader.data.transformed import pixel_uses

from ..compare import generator_states, picture, seed_all
from ..odd_formats import encoded
from ..undecoded import image_calls_in, opened_late
from .test_operations import run_programs
from .test_pillow_calls import QUAD, assert_exact, of, opened, photo

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NOISE = torch.arange(3 * 20 * 30).reshape(3, 20, 30) / 99 - 7

STARTS: dict[str, Callable[[], Any]] = {
    "v1": lambda: pil_to_tensor(opened("RGB")),
    "v2": lambda: to_image(opened("RGB")),
    "grey": lambda: pil_to_tensor(opened("L")),
}
BOTH = [TF, F2]

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "hflip": lambda F, t: F.hflip(t),
    "vflip": lambda F, t: F.vflip(t),
    "crop": lambda F, t: F.crop(t, 3, 4, 50, 60),
    "crop beyond": lambda F, t: F.crop(t, -3, 100, 50, 90),
    "center_crop": lambda F, t: F.center_crop(t, [60, 70]),
    "center_crop beyond": lambda F, t: F.center_crop(t, [200, 51]),
    "resized_crop": lambda F, t: F.resized_crop(t, 3, 4, 50, 60, [40, 44]),
    "resized_crop to the same size": lambda F, t: F.resized_crop(t, 3, 4, 50, 60, [50, 60]),
    "resize": lambda F, t: F.resize(t, [60, 50]),
    "resize, edge": lambda F, t: F.resize(t, [60], max_size=70),
    "resize, bicubic": lambda F, t: F.resize(t, [60, 200], Mode.BICUBIC),
    "resize, nearest": lambda F, t: F.resize(t, [60, 200], Mode.NEAREST),
    "resize, exact": lambda F, t: F.resize(t, [60, 200], Mode.NEAREST_EXACT),
    "pad": lambda F, t: F.pad(t, [3, 4, 5, 6], 9),
    "pad, negative": lambda F, t: F.pad(t, [-3, 4, 5, -6]),
    **{f"pad, {mode}": lambda F, t, mode=mode: F.pad(t, [3, 40, 5, 6], padding_mode=mode)
       for mode in ("edge", "reflect", "symmetric")},
    "rotate": lambda F, t: F.rotate(t, 33),
    "rotate, bilinear": lambda F, t: F.rotate(t, 33, Mode.BILINEAR, True, fill=[9.0]),
    "rotate by 90": lambda F, t: F.rotate(t, 90, expand=True),
    "rotate by -90": lambda F, t: F.rotate(t, -90.0, expand=True),
    "rotate by 180": lambda F, t: F.rotate(t, 180),
    "rotate around": lambda F, t: F.rotate(t, 15, center=[9, 5]),
    "affine": lambda F, t: F.affine(t, 10, [5, 6], 1.1, [3.0, 4.0], Mode.BILINEAR, fill=[9.0]),
    "affine, nearest": lambda F, t: F.affine(t, -10, [5, 6], 0.9, [3.0], center=[3, 4]),
    "perspective": lambda F, t: F.perspective(t, *QUAD, Mode.BILINEAR, [3.0]),
    "adjust_brightness": lambda F, t: F.adjust_brightness(t, 1.3),
    "adjust_contrast": lambda F, t: F.adjust_contrast(t, 0.6),
    "adjust_gamma": lambda F, t: F.adjust_gamma(t, 1.37),
    "adjust_gamma, gain": lambda F, t: F.adjust_gamma(t, 0.71, 1.2),
    "adjust_sharpness": lambda F, t: F.adjust_sharpness(t, 1.7),
    "posterize": lambda F, t: F.posterize(t, 3),
    "solarize": lambda F, t: F.solarize(t, 99.5),
    "autocontrast": lambda F, t: F.autocontrast(t),
    "equalize": lambda F, t: F.equalize(t),
    "invert": lambda F, t: F.invert(t),
    "rgb_to_grayscale": lambda F, t: F.rgb_to_grayscale(t),
    "rgb_to_grayscale, 3": lambda F, t: F.rgb_to_grayscale(t, 3),
    "gaussian_blur": lambda F, t: F.gaussian_blur(t, [5, 7], [1.3, 1.3]),
    "gaussian_blur, default": lambda F, t: F.gaussian_blur(t, 3, 0.8),
    "erase": lambda F, t: F.erase(t, 3, 4, 20, 30, torch.tensor([7.6]).reshape(1, 1, 1)),
    "convert_image_dtype": lambda F, t: (F.convert_image_dtype)(t),
    "normalize": lambda F, t: F.normalize(F.convert_image_dtype(t), [0.4], [0.3]),
    "normalize in place": lambda F, t: F.normalize(F.convert_image_dtype(t), [0.4], [0.3], True),
    "to_pil_image": lambda F, t: F.to_pil_image(t),
    "to_pil_image of floats": lambda F, t: F.to_pil_image(F.hflip(F.convert_image_dtype(t))).rotate(5),
    "to_pil_image and more": lambda F, t: to_tensor(F.to_pil_image(F.hflip(t)).rotate(5)),
    "all": lambda F, t: of(t, lambda t: F.resize(t, [60]), lambda t: F.pad(t, [3]), F.hflip,
                           lambda t: F.crop(t, 1, 2, 50, 60), lambda t: F.adjust_contrast(t, 0.7),
                           F.convert_image_dtype, lambda t: F.normalize(t, [0.4], [0.3]), F.hflip),
    "floats": lambda F, t: of(F.convert_image_dtype(t), lambda t: F.crop(t, 3, 4, 90, 80), F.vflip,
                              lambda t: F.pad(t, [3]), lambda t: F.normalize(t, [0.4], [0.3]),
                              lambda t: F.erase(t, 3, 4, 20, 30, torch.tensor([-1.5]).reshape(1, 1, 1))),
}  # fmt: skip
"""Functions of v1 and v2 that are recorded."""

COLORED: dict[str, Callable[[Any, Any], Any]] = {
    "adjust_saturation": lambda F, t: F.adjust_saturation(t, 1.6),
    "adjust_hue": lambda F, t: F.adjust_hue(t, -0.2),
    "erase, colors": lambda F, t: F.erase(t, 3, 4, 20, 30, torch.tensor([1.0, 2, 3]).reshape(3, 1, 1), True),
    "erase, noise": lambda F, t: F.erase(F.convert_image_dtype(t), 3, 4, 20, 30, NOISE),
    "normalize": lambda F, t: F.normalize(F.convert_image_dtype(t), MEAN, torch.tensor(STD)),
}
OF_V2: dict[str, Callable[[Any, Any], Any]] = {
    "to_dtype": lambda F, t: F.to_dtype(t, torch.float32, scale=True),
    "to_dtype, unscaled": lambda F, t: F.to_dtype(t),
    "permute_channels": lambda F, t: F.permute_channels(t, [2, 0, 1]),
    "pad, colors": lambda F, t: F.pad(t, [3, 4, 5, 6], [1, 2, 3]),
    "elementwise, by kernels' names": lambda F, t: F.crop_image(F.horizontal_flip_image(t), 1, 2, 30, 40),
    "by its name": lambda F, t: horizontal_flip(horizontal_flip_image(t)),
    "v1, by its name": lambda F, t: hflip(t),
}


def cases() -> Iterator[Any]:
    """Each call with each version that has it, and each start that it takes."""
    calls = CALLS | {f"{name}, RGB": call for name, call in COLORED.items()}
    calls |= {f"{name}, v2": call for name, call in OF_V2.items()}
    for (name, change), F, start in itertools.product(calls.items(), BOTH, STARTS):
        is_colored, is_v2 = name not in CALLS, name.endswith(", v2")
        # v1 copies an image to erase it, which is recorded as torch's operations.
        is_copied = F is TF and start == "v2" and name.startswith(("erase", "rotate by 0"))
        if not ((is_colored and start == "grey") or (is_v2 and F is TF) or is_copied):
            yield pytest.param(change, F, start, id=f"{name}-{'TF' if F is TF else 'F2'}-{start}")


@pytest.mark.parametrize(("change", "F", "start"), list(cases()))
def test_call_is_recorded(change: Any, F: Any, start: str) -> None:
    stock = change(F, STARTS[start]())
    with opened_late():
        before = pixel_uses.count
        late = change(F, STARTS[start]())
        assert pixel_uses.count == before
        assert_recorded(late, stock)


def assert_recorded(late: Any, stock: Any) -> None:
    """Check that a result is undecoded, of stock's kind, and what stock's is."""
    if not isinstance(stock, torch.Tensor):
        assert_exact(late, stock)
        return
    assert type(late) == type(stock) and not is_materialized(late)  # noqa: E721
    (transformed,) = image_calls_in(late)
    (found,) = run_programs([transformed])
    if stock.is_floating_point():
        assert (found - stock).abs().max() <= 1e-6 * stock.abs().max()
    else:  # torch sums convolutions in an order of its own
        assert (found != stock).sum() <= 2 and (found.int() - stock.int()).abs().max() <= 1
    assert torch.equal(materialize(late), stock)
    pickle.loads(pickle.dumps(transformed.plan))


@pytest.mark.parametrize("F", BOTH, ids=["TF", "F2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda F, t: F.hflip(F.resize(t * 1, [40, 50])),
        lambda F, t: F.elastic_transform(t, torch.zeros(1, 123, 161, 2)),
        lambda F, t: F.adjust_hue(F.convert_image_dtype(t), 0.1),
        lambda F, t: F.pad(F.convert_image_dtype(t), [3], 0.5),
        lambda F, t: F.pad(F.convert_image_dtype(t, torch.float64), [3]),
        lambda F, t: F.gaussian_blur(t, [3, 3], [0.5, 0.9]),
        lambda F, t: F.resize(t, [60, 50], antialias=False),
        lambda F, t: F.crop(t, -60, -70, 60, 70),
        lambda F, t: F.crop(t, 300, 3, 10, 20),
        lambda F, t: F.erase(t, 3, 150, 20, 30, torch.tensor(7)),
        lambda F, t: F.normalize(F.normalize(F.convert_image_dtype(t), [0.5], [0.5]), [0.5], [0.5]),
        lambda F, t: F.five_crop(t, [40, 50])[3],
        lambda F, t: F.to_pil_image(F2.to_dtype(t)),
        lambda F, t: F.to_pil_image(F.normalize(F.convert_image_dtype(t), [0.1], [2])),
        lambda F, t: F.hflip(t[torch.tensor([2, 0, 0])]),
        lambda F, t: (o := torch.tensor([2, 1, 0]), F.pad(t[..., o, :, :], [3]), o.zero_())[1],
        lambda F, t: F.resize(F.to_pil_image(t, "YCbCr"), [50, 60]),
        lambda F, t: F.adjust_brightness(t[None], 1.3)[0],
        lambda F, t: F.rotate(t, 9, fill=[300.0]),
        lambda F, t: F.crop(t, 1, 2, 50, 40).mul_(0).sum() + t.sum(),
        lambda F, t: (F.normalize(f := F.convert_image_dtype(t), [0.5], [0.5], inplace=True), f)[1],
        lambda F, t: (v := t[:, 3:], F.erase(t, 3, 4, 20, 30, torch.tensor(7), True), v)[2],
        lambda F, t: F.erase(F.convert_image_dtype(t), 3, 4, 20, 30, torch.rand(3, 20, 30)),
        lambda F, t: F.perspective(t, *QUAD, Mode.BILINEAR).float().mean(),
        lambda F, t: F.hflip(F2.jpeg(F.vflip(t), 50)),
    ],
)
@pytest.mark.parametrize("start", ["v1", "v2"])
@pytest.mark.filterwarnings("ignore:The image decoding")
def test_result_is_torchvisions(change: Callable[[Any, Any], Any], F: Any, start: str) -> None:
    """Whether the call is recorded, replayed or computed."""
    found = []
    for context in (contextlib.nullcontext(), opened_late()):
        with context:
            seed_all(0)
            result = change(F, STARTS[start]())
            found.append(
                (materialize(result) if isinstance(result, torch.Tensor) else pil_to_tensor(result), generator_states())
            )
    (stock, before), (late, after) = found
    late = materialize(late)
    assert torch.equal(late, stock) and late.dtype == stock.dtype and before == after


WRONG: list[Callable[[Any, Any], Any]] = [
    lambda F, t: F.crop(t, 1.5, 2, 3, 4),
    lambda F, t: F.resize(t, [0, 5]),
    lambda F, t: F.resize(t, [5, 5], max_size=7),
    lambda F, t: F.pad(t, [1, 2, 3]),
    lambda F, t: F.pad(t, [500], padding_mode="reflect"),
    lambda F, t: F.pad(t, [3], padding_mode="no mode"),
    lambda F, t: F.rotate(t, 9, Mode.BICUBIC),
    lambda F, t: F.affine(t, 9, [1], 1.0, [0.0]),
    lambda F, t: F.adjust_brightness(t, -1),
    lambda F, t: F.adjust_hue(t, 0.7),
    lambda F, t: F.adjust_gamma(t, -1),
    lambda F, t: F.solarize(t, 300),
    lambda F, t: F.gaussian_blur(t, [4, 4]),
    lambda F, t: F.normalize(t, [0.5], [0.5]),
    lambda F, t: F.normalize(F.convert_image_dtype(t), [0.5], [0.0]),
    lambda F, t: F.rgb_to_grayscale(t, 2),
    lambda F, t: F.hflip(t, 2),
]


def test_class_of_the_result_is_torchvisions() -> None:
    for (name, change), F in itertools.product(CALLS.items(), BOTH):
        with tv_tensors.set_return_type("TVTensor"):
            stock = change(F, to_image(opened("RGB")))
            with opened_late():
                assert type(change(F, to_image(opened("RGB")))) == type(stock), name  # noqa: E721


@pytest.mark.parametrize("F", BOTH, ids=["TF", "F2"])
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_error_is_torchvisions(number: int, F: Any) -> None:
    with pytest.raises(Exception) as stock:
        WRONG[number](F, STARTS["v1"]())
    with opened_late(), pytest.raises(type(stock.value)) as late:
        WRONG[number](F, STARTS["v1"]())
    assert str(late.value) == str(stock.value)


TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

PIPELINES: dict[str, list[Callable[[Any], Any]]] = {
    "functionals of v2": [to_image, lambda t: F2.resize(t, [70, 80]), lambda t: F2.center_crop(t, [64, 64]),
                          lambda t: F2.adjust_saturation(t, random.uniform(0.5, 1.5)),
                          lambda t: F2.to_dtype(t, scale=True),
                          lambda t: F2.normalize(t, MEAN, STD, inplace=True), F2.horizontal_flip],
    "classes": [pil_to_tensor, v1.RandomHorizontalFlip(1.0), lambda t: TF.crop(t, 3, 4, 90, 100), v1.RandomCrop(64),
                v1.ColorJitter(0.4), v1.RandomRotation(20), v1.ConvertImageDtype(torch.float32),
                v1.Normalize(MEAN, STD)],
    "without rules": [to_image, v2.Lambda(F2.vflip), v2.RandomApply([v2.Lambda(F2.invert)]), v2.RandomZoomOut(p=1.0),
                      v2.ScaleJitter((80, 90)), v2.RandomPhotometricDistort(), v2.Pad(3, padding_mode="reflect"),
                      v2.RandomResize(50, 60), TO_FLOAT, v2.Normalize(MEAN, STD), v2.ToPureTensor()],
    "quarter turns": [to_image, lambda t: F2.rotate(t, random.choice([90, 180, 270]), expand=True), TO_FLOAT,
                      lambda t: F2.rotate(t, 90, expand=True)],
    "from Pillow and back": [lambda i: i.rotate(9), pil_to_tensor, lambda t: TF.hflip(t), v1.ToPILImage(),
                             lambda i: i.crop((5, 5, 90, 80)), v1.ColorJitter(0.4, 0.4), to_tensor],
    "blurred by torchvision": [lambda i: TF.pad(i, [3], padding_mode="symmetric"), v2.RandomErasing(1.0, value=7),
                               lambda i: TF.resize(i, [50]), to_tensor],
    "replayed in between": [to_tensor, lambda t: TF.hflip(t) * 2, v1.CenterCrop(40), lambda t: TF.pad(t, [2])],
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline(name: str) -> None:
    for seed in range(4):
        found = []
        for context in (contextlib.nullcontext(), opened_late()):
            with context:
                seed_all(seed)
                before = pixel_uses.count
                image = of(opened("RGB"), *PIPELINES[name])
                assert pixel_uses.count == before
                found.append((image, generator_states()))
        (stock, state), (late, our_state) = found
        assert state == our_state
        if name == "replayed in between":
            assert torch.equal(materialize(late), stock)
        else:
            with opened_late():
                assert_recorded(late, stock)


def test_crop_shares_memory_with_its_image() -> None:
    with opened_late():
        image = STARTS["v2"]()
        cropped = F2.crop(image, 3, 4, 50, 60)
        flipped = F2.hflip(cropped)
        cropped.mul_(0)
        assert not image[:, 3:53, 4:64].any() and image.any() and flipped.any()
        assert isinstance(get_values(cropped), tv_tensors.Image)


def test_change_in_place_reaches_the_views_of_an_image() -> None:
    with opened_late():
        image = STARTS["v1"]()
        view = image[:, 3:]
        F2.erase(image, 3, 4, 20, 30, torch.tensor(7), inplace=True)
        assert is_materialized(view) and (view[:, :20, 4:34] == 7).all()  # its record would be of the image before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "function",
    [TF.hflip, TF.adjust_hue, TF.normalize, TF.rotate, F2.resize_image, F2.crop, F2.jpeg_image, F2.to_dtype_image],
)
def test_functions_can_be_scripted(function: Any) -> None:
    with opened_late():
        scripted, image = torch.jit.script(function), torch.rand(3, 9, 9)
        if function is TF.hflip:
            assert torch.equal(scripted(image), image.flip(-1))


def test_missing_names_are_left_to_torchvision(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.delattr(F2, "horizontal_flip_image")
    monkeypatch.delattr(FT, "autocontrast")
    with caplog.at_level(logging.INFO), opened_late():
        assert_recorded(TF.hflip(STARTS["v1"]()), STARTS["v1"]().flip(-1))
        replayed = F2.horizontal_flip(STARTS["v2"]())
        assert not image_calls_in(replayed) and torch.equal(materialize(replayed), STARTS["v1"]().flip(-1))
    assert "horizontal_flip_image" in caplog.text


@pytest.mark.parametrize("orientation", range(10))
def test_torchcodec_is_deferred(orientation: int, tmp_path: Path) -> None:
    decoders = pytest.importorskip("torchcodec.decoders")
    content, path = photo(orientation=orientation), tmp_path / "a.jpg"
    path.write_bytes(content)
    for source in (content, path, str(path), torch.frombuffer(bytearray(content), dtype=torch.uint8)):
        for decode in (decoders.decode_image, functools.partial(decoders.decode_jpeg, mode="unchanged")):
            stock = F2.hflip(decode(source))
            with opened_late():
                late = F2.hflip(decode(source))
                if orientation != 1:
                    assert is_materialized(late) and torch.equal(materialize(late), stock)
                else:
                    assert_recorded(late, stock)
            with opened_late(on_gpu=False):
                late = decode(source)
                assert is_materialized(late) == (orientation != 1) and torch.equal(materialize(late), decode(source))


def test_torchcodec_decodes_what_is_no_rgb() -> None:
    decoders = pytest.importorskip("torchcodec.decoders")
    calls: list[Callable[[], Any]] = [
        lambda: decoders.decode_image(photo(orientation=1), mode="GRAY"),
        lambda: decoders.decode_image(photo("L", 1), mode="UNCHANGED"),
        lambda: decoders.decode_image(photo(orientation=1), output_dtype=torch.uint16),
        lambda: decoders.decode_image(encoded(picture(3), "PNG")),
        lambda: decoders.decode_jpeg([photo(orientation=1)])[0],
    ]
    for call in calls:
        stock = call()
        with opened_late():
            late = call()
            assert is_materialized(late) and torch.equal(materialize(late), stock)
    with opened_late():
        for wrong in ({"mode": "no mode"}, {"output_dtype": torch.float32}):
            with pytest.raises(ValueError, match="Invalid"):
                decoders.decode_image(photo(orientation=1), **wrong)
        with pytest.raises(TypeError):
            decoders.decode_jpeg(3)


# --- images of arrays that simplejpeg and OpenCV decode: recorded if the arrays are unchanged ------------------------

cv2: Any = importlib.import_module("cv2") if importlib.util.find_spec("cv2") else None


def by_simplejpeg(path: Path) -> Any:
    return simplejpeg.decode_jpeg(path.read_bytes())


def by_opencv(path: Path, *flags: int) -> Any:
    return cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), *flags or (1,))


def tensors_of(array: Any) -> list[Any]:
    """torchvision rejects reversed arrays."""
    return [to_image(array), to_tensor(array)] if min(array.strides) > 0 else []


READ_ARRAYS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "simplejpeg": (by_simplejpeg, True),
    "simplejpeg, by name": (lambda p: simplejpeg.decode_jpeg(p.read_bytes(), colorspace="RGB", min_width=161), True),
    "simplejpeg, scaled": (lambda p: simplejpeg.decode_jpeg(p.read_bytes(), min_width=80, min_height=60), False),
    "simplejpeg, grey": (lambda p: simplejpeg.decode_jpeg(p.read_bytes(), "GRAY")[..., 0], False),
    "simplejpeg, fast": (lambda p: simplejpeg.decode_jpeg(p.read_bytes(), fastdct=True), False),
    "simplejpeg, changed": (lambda p: (a := by_simplejpeg(p), a.__setitem__((9, 9, 1), 7))[0], False),
    "simplejpeg, mirrored": (lambda p: by_simplejpeg(p)[:, ::-1], False),
    "simplejpeg, a part": (lambda p: by_simplejpeg(p)[5:], False),
    "simplejpeg, BGR": (lambda p: by_simplejpeg(p)[..., ::-1], False),
    "OpenCV": (lambda p: cv2.cvtColor(cv2.imread(str(p)), cv2.COLOR_BGR2RGB), True),
    "OpenCV, by name": (lambda p: cv2.cvtColor(cv2.imread(str(p), flags=1), code=4), True),
    "OpenCV, reversed": (lambda p: by_opencv(p, 1 | 128)[:, :, ::-1], True),
    "OpenCV, from memory": (lambda p: cv2.cvtColor(by_opencv(p), cv2.COLOR_BGR2RGB), True),
    "OpenCV, BGR": (by_opencv, False),
    "OpenCV, grey": (lambda p: by_opencv(p, 0), False),
    "OpenCV, changed": (lambda p: (a := by_opencv(p), cv2.line(a, (0, 0), (9, 9), 7), cv2.cvtColor(a, 4))[2], False),
    "OpenCV, resized": (lambda p: cv2.resize(cv2.cvtColor(by_opencv(p), 4), (50, 60)), False),
    "none": (lambda p: np.array(Image.open(p)), False),
}  # fmt: skip


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("name", READ_ARRAYS)
def test_image_of_an_array_that_a_decoder_made(name: str, orientation: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(photo(orientation=orientation))
    read, is_recorded = READ_ARRAYS[name]
    if "OpenCV" in name:
        pytest.importorskip("cv2")
    stock, tensors = Image.fromarray(read(path)).resize((50, 60)), tensors_of(read(path))
    with opened_late():
        array = read(path)
        assert type(array) is np.ndarray
        image, late_tensors = Image.fromarray(array), tensors_of(array)
        late = image.resize((50, 60))
        if is_recorded and (orientation == 1 or "OpenCV" not in name or "reversed" in name):
            if array.flags.writeable:
                array[:] = 0
            assert image.info == {} and image.readonly == 0
            assert_exact(late, stock)
            for tensor, expected in zip(late_tensors, tensors, strict=True):
                assert type(tensor) == type(expected) and tensor.stride() == expected.stride()  # noqa: E721
                assert_exact(TF.hflip(tensor), TF.hflip(expected))
        else:
            assert get_transformed(late) is None and late.tobytes() == stock.tobytes()
            assert all(map(torch.equal, late_tensors, tensors))
            assert not any(isinstance(each, LazyTensor) for each in late_tensors)
