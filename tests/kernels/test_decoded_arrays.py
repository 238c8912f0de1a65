"""Images of arrays that simplejpeg and OpenCV decode: recorded if the arrays are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base
from torchvision.transforms import functional as TF
from torchvision.transforms.functional import to_tensor
from torchvision.transforms.v2.functional import to_image

from proxyloader.data.lazy_image import get_transformed
from proxyloader.data.lazy_tensor import LazyTensor
from proxyloader.make_dataset import photograph

from ..odd_formats import encoded
from ..undecoded import opened_late
from .test_pillow_calls import assert_exact

cv2, simplejpeg = pytest.importorskip("cv2"), pytest.importorskip("simplejpeg")

pytestmark = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 decodes at once")


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
    exif, path = Image.Exif(), tmp_path / "a.jpg"
    exif[Base.Orientation] = orientation
    path.write_bytes(encoded(photograph(3, size=(161, 123)), "JPEG", exif=exif))
    read, is_recorded = READ_ARRAYS[name]
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
