"""A lazily decoded image behaves like Pillow's in every visible way, and is decoded when its pixels are used."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image, ImageDraw, ImageOps, JpegImagePlugin
from PIL.ExifTags import Base
from torchvision import transforms
from torchvision.transforms import functional as F

from proxyloader.data.encoded_image import EncodedImage
from proxyloader.data.lazy_image import create_lazy_image, get_transformed

from ..compare import picture
from ..faults import in_thread
from ..odd_formats import encoded
from ..undecoded import get_encoded, opened_late

PHOTO = picture(0, (61, 43))


def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    return encoded(PHOTO.convert(mode), "JPEG", quality=90, **options)


def outcome(do: Callable[[], Any]) -> Any:
    """A comparable form of the result, or the error."""
    try:
        return seen(do())
    except Exception as error:
        return type(error), str(error)


def seen(value: Any) -> Any:
    """A comparable form of a value; of an image, everything that a user can see."""
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes(), value.format, sorted(map(str, value.info)), value.readonly
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [seen(each) for each in value] if isinstance(value, (list, tuple)) else value


def late(data: bytes) -> Image.Image:
    with opened_late():
        return Image.open(io.BytesIO(data))


def drawn_on(image: Image.Image) -> Image.Image:
    ImageDraw.Draw(image).line((0, 0, 20, 20), 255)
    return image


def in_place(method: str, *args: Any) -> Callable[[Image.Image], Any]:
    return lambda image: (getattr(image, method)(*args), image)[1]


def in_palette(image: Image.Image) -> Any:
    image = image.convert("L")
    image.putpalette([level for k in range(256) for level in (k, 255 - k, abs(128 - k))])
    return image


def by_pixel_access(image: Image.Image) -> Any:
    pixels = image.load()
    pixels[1, 2] = pixels[5, 6]
    return image


class Another(Image.Image):
    pass


def of_another_class(image: Any) -> Any:
    image.__class__ = Another
    return type(image), image, image.size, sorted(image.info)


PILLOWS = [
    image for mode in ("RGB", "L") for file in [Image.open(io.BytesIO(jpeg(mode)))] for image in (file, file.copy())
]
"""Images that are not decoded late."""

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda image: image,
    "load": lambda image: (image.load(), image)[1],
    "pixel access": by_pixel_access,
    "resize": lambda image: image.resize((10, 12)),
    "crop": lambda image: image.crop((1, 2, 30, 40)),
    "getpixel": lambda image: image.getpixel((3, 3)),
    "copy": lambda image: image.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "transpose": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "RGB": lambda image: image.convert("RGB"),
    "L": lambda image: image.convert("L"),
    "no mode": lambda image: image.convert(),
    "P": lambda image: image.convert("P", palette=Image.Palette.ADAPTIVE, colors=8),
    "asarray": np.asarray,
    "thumbnail": in_place("thumbnail", (20, 20)),
    "draft": lambda image: (image.draft("L", (20, 20)), image)[1],
    "putpixel": in_place("putpixel", (2, 3), 7),
    "paste": in_place("paste", 9, (1, 1, 5, 5)),
    "draw": drawn_on,
    "palette": lambda image: in_palette(image).convert("RGB"),
    "palette, nearest": lambda image: (in_palette(image).resize((20, 20), 0), in_palette(image).mode),
    "palette, crop": lambda image: in_palette(image).crop((1, 2, 30, 40)).convert("RGB"),
    "palette, new": lambda image: in_palette(Image.new("L", image.size, 7)).convert("RGB"),
    "blend": lambda image: Image.blend(image, image.transpose(Image.Transpose.FLIP_TOP_BOTTOM), 0.3),
    "exif_transpose": lambda image: ImageOps.exif_transpose(image),
    "exif": lambda image: dict(image.getexif()),
    "equal": lambda image: (image == image.copy(), image == 3),
    "equal to Pillow's": lambda image: [(image == each, each == image, image != each) for each in PILLOWS],
    "readonly": lambda image: (image.readonly, image.convert("RGB").readonly, image.readonly),
    "class": lambda image: (image.__class__, image.copy().__class__),
    "another class": lambda image: [of_another_class(image.copy()), of_another_class(image)],
    "attributes": lambda image: (image.size, image.width, image.height, image.mode, image.getbands(), image.getbbox()),
    "torchvision": transforms.Compose([transforms.Resize(32), transforms.CenterCrop(30)]),
    "pil_to_tensor": lambda image: F.pil_to_tensor(image).tolist(),
    "close": lambda image: (image.close(), image.size)[1],
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_result_of_pillows_image(name: str, mode: str) -> None:
    data = jpeg(mode)
    assert seen(OPERATIONS[name](late(data))) == seen(OPERATIONS[name](Image.open(io.BytesIO(data))))


REPEATABLE = [name for name in OPERATIONS if name not in ("close", "P", "another class")]


@given(st.lists(st.sampled_from(REPEATABLE), min_size=1, max_size=5), st.sampled_from(["RGB", "L"]))
def test_any_operations_one_after_the_other_do_so(names: list[str], mode: str) -> None:
    def run(image: Any) -> Any:
        found = []
        for name in names:
            result = OPERATIONS[name](image)
            found.append(seen(result))
            image = result if isinstance(result, Image.Image) else image
        return found

    data = jpeg(mode)
    assert outcome(lambda: run(late(data))) == outcome(lambda: run(Image.open(io.BytesIO(data))))


def turned(image: Image.Image) -> Any:
    exif = image.getexif()
    before = dict(exif), image.getexif() is exif
    exif[Base.Orientation] = 6
    return before, dict(image.getexif()), image.info.get("exif"), ImageOps.exif_transpose(image)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'


@pytest.mark.parametrize("first", [lambda image: image, lambda image: image.convert("RGB"), Image.Image.copy])
@pytest.mark.parametrize("data", ["none", "EXIF", "XMP", "EXIF behind the scan"])
def test_exif_data_is_what_pillow_finds(data: str, first: Callable[[Any], Any]) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = 3
    options: dict[str, dict[str, Any]] = {"EXIF": {"exif": exif}, "XMP": {"xmp": XMP}}
    file = jpeg(**options.get(data, {}))
    if data == "EXIF behind the scan":
        file = file[:-2] + b"\xff\xe1\0\x08Exif\0\0" + file[-2:]
    assert seen(turned(first(late(file)))) == seen(turned(first(Image.open(io.BytesIO(file)))))


class TestWhatIsDecoded:
    @pytest.mark.parametrize(
        "use",
        [
            lambda image: image,
            lambda image: image.convert("RGB"),
            lambda image: image.convert("RGB").copy().convert("RGB"),
            lambda image: ImageOps.exif_transpose(image),
            lambda image: (image.load(), image.size, image.getexif(), image.info, image)[-1],
        ],
        ids=["as opened", "converted", "converted and copied", "transposed by EXIF", "loaded, and looked at"],
    )
    def test_is_nothing_if_no_pixel_is_used(self, use: Callable[[Any], Any]) -> None:
        data = jpeg()
        encoded = get_encoded(use(late(data)))
        assert encoded is not None and encoded.data == data and encoded.size == (61, 43)

    @pytest.mark.parametrize("mode", ["RGB", "L"])
    def test_an_image_in_mode_l_and_a_grey_jpeg_that_is_converted_stay_encoded(self, mode: str) -> None:
        image, stock = late(jpeg(mode)).convert("L").copy(), Image.open(io.BytesIO(jpeg(mode)))
        transformed = get_transformed(image)
        assert get_encoded(image) is None and transformed is not None
        assert transformed.image.data == jpeg(mode) and transformed.mode == image.mode == "L"
        assert seen(transformed.materialize()) == seen(image) == seen(stock.convert("L"))
        converted = late(jpeg(mode)).convert("RGB")
        assert get_encoded(converted) is not None and seen(converted) == seen(stock.convert("RGB"))

    def test_a_changed_image_no_longer_stands_for_its_file_but_its_copies_do(self) -> None:
        image = late(jpeg())
        copied, converted = image.copy(), image.convert("RGB")
        for changed in (image, converted):
            changed.putpixel((0, 0), (1, 2, 3))
            assert get_encoded(changed) is None and changed.getpixel((0, 0)) == (1, 2, 3)
        assert get_encoded(copied) is not None and copied.getpixel((0, 0)) != (1, 2, 3)

    @pytest.mark.parametrize("kind", ["PNG", "CMYK", "several pictures", "tiny"])
    def test_is_what_dali_would_decode_differently(self, kind: str) -> None:
        file, image = io.BytesIO(), PHOTO.resize((4, 4)) if kind == "tiny" else PHOTO
        if kind == "several pictures":
            image.save(file, "MPO", save_all=True, append_images=[image.rotate(90)])
        else:
            image.convert("CMYK" if kind == "CMYK" else "RGB").save(file, "PNG" if kind == "PNG" else "JPEG")
        opened, stock = late(file.getvalue()), Image.open(file)
        assert get_encoded(opened.convert("RGB")) is None
        assert seen(opened) == seen(stock)
        assert getattr(opened, "n_frames", 1) == getattr(stock, "n_frames", 1)

    def test_an_uncompressed_image_is_read_as_such(self) -> None:
        assert create_lazy_image(EncodedImage.from_bytes(encoded(PHOTO, "PNG"))).tobytes() == PHOTO.tobytes()


class TestFiles:
    def test_a_file_is_closed_where_pillow_closes_it_and_an_image_outlives_its_with_block(self, tmp_path: Path) -> None:
        path, users = tmp_path / "a.jpg", io.BytesIO(jpeg())
        path.write_bytes(jpeg())
        with opened_late():
            Image.open(users).convert("RGB")
            with Image.open(path) as left:
                converted = left.convert("RGB")
            image = Image.open(path)
        file = image.fp
        assert not file.closed and not users.closed
        image.load()
        assert file.closed and image.fp is None and image.filename == str(path)
        path.unlink()
        assert seen(image) == seen(Image.open(users))
        assert get_encoded(converted) is not None and seen(converted) == seen(Image.open(users).convert("RGB"))
        assert np.array_equal(np.asarray(left), np.asarray(converted))

    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_errors_equal_pillows_and_occur_at_the_same_place(self, tmp_path: Path) -> None:
        data = jpeg()
        cut = data[: len(data) // 2]

        for content, use in [
            (cut, lambda open_it: open_it().convert("RGB")),
            (cut, lambda open_it: open_it().load()),
            (b"", lambda open_it: open_it()),
            (data[:100], lambda open_it: open_it()),
            (data, lambda open_it: (image := open_it(), image.close(), image.load())),
        ]:
            path = tmp_path / "a.jpg"
            path.write_bytes(content)
            used = functools.partial(use, functools.partial(Image.open, path))
            with opened_late():
                found = outcome(used)
            assert found == outcome(used)


class Own(JpegImagePlugin.JpegImageFile): ...


def test_images_are_pillows_own_outside_the_context_in_other_threads_and_where_another_library_opens_jpegs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened() -> Image.Image:
        return Image.open(io.BytesIO(jpeg()))

    with opened_late():
        assert get_transformed(opened()) and get_transformed(opened().convert("RGB"))
        with opened_late():
            pass
        assert get_transformed(opened())
        assert in_thread(lambda: get_transformed(opened())) is None
        monkeypatch.setitem(Image.OPEN, "JPEG", (Own, Image.OPEN["JPEG"][1]))
        assert type(opened()) is Own
    monkeypatch.undo()
    assert get_transformed(opened()) is None
