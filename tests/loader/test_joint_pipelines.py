"""Detection, segmentation, keypoints and code by hand: batches are the stock loader's, of images left undecoded."""

from __future__ import annotations

import functools
import io
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, ImageStat
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms as v1, tv_tensors
from torchvision.transforms import functional as TF, v2
from torchvision.transforms.functional import to_tensor

from proxyloader import DataLoader

from ..compare import seed_all
from ..integration.roads import Mapped
from .scenes import DECODERS, PIPELINES, Scene, by_other_decoders

NEAREST, LANCZOS = v2.InterpolationMode.NEAREST, v2.InterpolationMode.LANCZOS
for_gpu = pytest.mark.usefixtures("emulated_gpu")

IMAGES = {"mixed up": 2, "copied and pasted": 2}
"""Number of images of a sample, unless it is one."""


@pytest.fixture(scope="module")
def scenes(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Scene]:
    folder = tmp_path_factory.mktemp("scenes")
    paths = [shutil.copy(path, folder / f"{k}.jpg") for k, path in enumerate(sorted(photos.rglob("*.jpg"))[:8])]
    return [Scene(Path(path), folder, k).save_label_map() for k, path in enumerate(paths)]


def changed(scenes: list[Scene], change: Callable[[Scene], Any]) -> Mapped:
    """Each scene, and a number from each generator behind it."""
    return Mapped(lambda scene: (change(scene), torch.rand(1).item(), random.random(), np.random.rand()), scenes)


def together(batch: Any) -> Any:
    return tuple(zip(*batch))


def assert_equal(ours: Any, theirs: Any, bound: float = 0.0) -> None:
    """Same structure and values, or of images a mean difference within the bound."""
    (values, spec), (expected, expected_spec) = tree_flatten(ours), tree_flatten(theirs)
    assert spec == expected_spec
    for a, b in zip(values, expected, strict=True):
        assert type(a) is type(b)
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert vars(a) == vars(b)  # the format of boxes, for example
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and (a.is_contiguous() or not b.is_contiguous())
        assert all(getattr(a, name, None) == getattr(b, name, None) for name in ("format", "canvas_size"))
        is_image = b.ndim >= 3 and b.shape[-3] == 3
        assert torch.equal(a, b) or (
            is_image and (a.float() - b.float()).abs().mean() <= bound * (1 + 254 * (b > 9).any())
        )


def assert_same_batches(
    dataset: Any, collate_fn: Any = together, bound: float = 0.0, batch_size: int = 4, epochs: int = 1, **options: Any
) -> Any:
    """Epochs under the same seed are those of the stock loader. Return the other loader."""
    found = []
    for loader_class in (StockLoader, DataLoader):
        seed_all(3)
        how: dict[str, Any] = {"shuffle": True, "num_workers": 2} | options
        loader = loader_class(dataset, batch_size, collate_fn=collate_fn, **how)
        found.append([batch for _ in range(epochs) for batch in loader])
    assert_equal(found[1], found[0], bound)
    return loader


def assert_late(loader: Any, images: int) -> None:
    """The device has made all images, and no code has used pixels."""
    stats = loader.stats()
    assert (stats.images_by_dali, stats.images_by_pillow, stats.images_by_workers) == (images, 0, 0), loader.backend
    assert loader.backend.startswith("DALI on cuda: ") and list(loader._servers.queues) == ["kernels"]


@for_gpu
@pytest.mark.parametrize("workers", [2, 0])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline(scenes: list[Scene], name: str, workers: int) -> None:
    # The kernel sums a blur in another order than torch's convolution, so a few levels differ by 1.
    bound = 1e-5 * (name == "blurred label map")
    loader = assert_same_batches(changed(scenes, PIPELINES[name]), bound=bound, num_workers=workers)
    assert_late(loader, len(scenes) * IMAGES.get(name, 1))


SINGLE: dict[str, Callable[[Any], Any]] = {
    "draws without steps": lambda image: v1.PILToTensor()(v1.ColorJitter()(image).resize((9, 9))),
    "bfloat16": v1.Compose([v1.CenterCrop(50), v1.ToTensor(), v1.Normalize(*2 * [torch.ones(3).bfloat16()])]),
    "nearest box": lambda image: TF.pil_to_tensor(ImageOps.fit(image, (39, 27), 0, 0, (0.5, 0.3))),
    "dtypes of targets": lambda image: v2.Compose(
        [v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None}), v2.ToImage(), v2.CenterCrop(50)]
    )(image, tv_tensors.Mask(torch.ones(1, *image.size[::-1], dtype=torch.uint8))),
}


@for_gpu
@pytest.mark.parametrize("name", SINGLE)
def test_single_calls(scenes: list[Scene], name: str) -> None:
    assert_same_batches(changed(scenes, lambda scene: SINGLE[name](scene.image)))


@for_gpu
def test_without_workers_the_loop_gets_the_objects_of_the_dataset(scenes: list[Scene]) -> None:
    lock, key = threading.Lock(), object()
    samples = Mapped(lambda scene: {"locks": [lock], "key": key, "image": to_tensor(scene.image)}, scenes)
    loader = DataLoader(samples, 2, collate_fn=list)
    assert all(each["locks"] == [lock] and each["key"] is key for batch in loader for each in batch)
    assert_late(loader, len(scenes))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (k % 4)) for k, name in enumerate(PIPELINES)]
)
def test_pipeline_without_a_gpu(scenes: list[Scene], name: str) -> None:
    assert_same_batches(changed(scenes, PIPELINES[name]), bound=0.02)


@for_gpu
@pytest.mark.parametrize("workers", [2, 0])
def test_other_decoders(scenes: list[Scene], workers: int) -> None:
    for name in DECODERS:
        pytest.importorskip(name)
    assert_late(assert_same_batches(changed(scenes, by_other_decoders), num_workers=workers), len(scenes))


# --- any collate_fn ---------------------------------------------------------------------------------------------------


def images_of(batch: Any) -> list[torch.Tensor]:
    return [image for (image, _), *_ in batch]


def room_for(batch: Any) -> list[int]:
    return [len(batch), *(max(sides) for sides in zip(*(image.shape for image in images_of(batch))))]


def padded(batch: Any) -> Any:
    _, _, height, width = room_for(batch)
    return torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images_of(batch)])


def copied(batch: Any) -> Any:
    """As torchvision's references for segmentation do."""
    collated = images_of(batch)[0].new(*room_for(batch)).fill_(0)
    for image, place in zip(images_of(batch), collated):
        place[..., : image.shape[-2], : image.shape[-1]].copy_(image)
    return collated


def nested(batch: Any) -> Any:
    """As DETR does."""
    shape = room_for(batch)
    tensor, mask = torch.zeros(shape), torch.ones([shape[0], *shape[2:]], dtype=torch.bool)
    for image, place, hidden in zip(images_of(batch), tensor, mask):
        place[: image.shape[0], : image.shape[1], : image.shape[2]].copy_(image)
        hidden[: image.shape[1], : image.shape[2]] = False
    return {"images": tensor, "mask": mask, "targets": [target for (_, target), *_ in batch]}


def assigned(batch: Any, value: float = 0.5, **how: Any) -> torch.Tensor:
    canvas = torch.full(room_for(batch), value, **how)
    for k, image in enumerate(images_of(batch)):
        canvas[k, :, : image.shape[1], : image.shape[2]] = image
    return canvas


def read_before(batch: Any) -> Any:
    """What is computed from it does not change with what is written later, but its views do."""
    canvas = assigned(batch)
    half, channel = canvas / 2, canvas[:, 1]
    canvas[0, :, :9] = images_of(batch)[1][:, :9, :1]
    canvas[:, 1, 3] = 0.25
    return half, channel, canvas[:, :, ::3].permute(0, 2, 3, 1) / canvas.new_tensor([2, 3, 4])


def exported(batch: Any) -> Any:
    canvas, image = torch.zeros(3, 200, 200), images_of(batch)[0]
    array = canvas.numpy()
    canvas[:, : image.shape[1], : image.shape[2]] = image
    return array.sum().item(), canvas


def changed_after(batch: Any) -> Any:
    canvas = assigned(batch)
    canvas.mul_(2)
    canvas[:, 0] -= 1
    canvas[canvas > 1.5] = 0
    return canvas


def copied_to_another(batch: Any) -> Any:
    canvas, other = assigned(batch), assigned(batch, 0.125)
    other.copy_(canvas)
    other[:, :, :10] = canvas[:, :, 10:20]
    canvas[0].zero_()
    return other, canvas, canvas.half(), torch.stack([canvas, other]), canvas.sum(1).shape


def without_images(batch: Any) -> Any:
    heat = torch.zeros(4, 20, 20)
    heat[1, 3, 4] = 1
    heat[2].fill_(3)
    others = torch.empty(1, 2, 2).fill_(2), torch.zeros(0, 3, 3), images_of(batch)
    return heat, heat * 2, heat[2], heat.max().item(), *others


def of_another_size(batch: Any) -> Any:
    canvas, image = torch.zeros(3, 5, 5), images_of(batch)[0]
    with pytest.raises(RuntimeError, match="must match"):
        canvas.copy_(image)
    canvas[:, :5, :5] = image[:, :5, :5]
    return canvas


COLLATES: dict[str, Callable[[Any], Any]] = {
    "together": together, "list": list, "padded": padded, "copied": copied, "nested": nested, "assigned": assigned,
    "sequences": lambda batch: torch.cat([image.flatten(1).T for image in images_of(batch)]),
    "float16": functools.partial(assigned, dtype=torch.float16),
    "levels": functools.partial(assigned, value=7, dtype=torch.uint8),
    "read before": read_before, "copied to another": copied_to_another, "without images": without_images,
}  # fmt: skip
WITH_VALUES: dict[str, Callable[[Any], Any]] = {
    "exported": exported, "changed after": changed_after, "of another size": of_another_size,
}  # fmt: skip


@for_gpu
@pytest.mark.parametrize("name", [*COLLATES, *WITH_VALUES])
def test_collate_function(scenes: list[Scene], name: str) -> None:
    collate_fn = (COLLATES | WITH_VALUES)[name]
    loader = assert_same_batches(changed(scenes, PIPELINES["shortest size"]), collate_fn)
    if name in COLLATES:
        assert_late(loader, len(scenes))


# --- calls on one image -----------------------------------------------------------------------------------------------


def stored(image: Any) -> Any:
    image.resize((60, 50)).save(file := io.BytesIO(), "JPEG", quality=40)
    return to_tensor(Image.open(file).convert("RGB"))


def joint(transform: Any) -> Callable[[Any], Any]:
    def change(image: Any) -> Any:
        boxes, size = torch.tensor([[5.0, 6.0, 90.0, 80.0], [50.0, 50.0, 100.0, 99.0]]), image.size[::-1]
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)  # type: ignore[call-overload]
        changed, boxes = transform(image, boxes)
        return TF.pil_to_tensor(changed), boxes

    return change


JOINT = [
    v2.RandomRotation(10, expand=True), v2.Grayscale(3), v2.RandomPosterize(4, 1), v2.RandomSolarize(99, 1),
    v2.RandomEqualize(1), v2.RandomAutocontrast(1), v2.RandomInvert(1), v2.RandomAdjustSharpness(2, 1), v2.Pad(3),
    v2.RandomChannelPermutation(), v2.Resize(50, NEAREST), v2.Resize(90, LANCZOS), v2.Resize(60, max_size=70),
]  # fmt: skip
"""Those that no pipeline of scenes.py has."""
LATE_USES: list[Callable[[Any], Any]] = [
    *map(joint, JOINT),
    lambda i: [*map(to_tensor, TF.five_crop(i, 40)), *map(to_tensor, TF.ten_crop(i, 30))],
    lambda i: TF.pil_to_tensor(i)[:, :64, :64].unfold(1, 16, 16).unfold(2, 16, 16).flatten(1, 2).permute(1, 2, 3, 0),
    lambda i: (i.load(), i.info.get("dpi"), i.getbands(), i.tell(), dict(i.getexif()), to_tensor(i))[1:],
]  # fmt: skip
PIXEL_USES: list[Callable[[Any], Any]] = [
    joint(v2.GaussianBlur(3)), joint(v2.ElasticTransform()), stored,
    lambda i: (ImageStat.Stat(i).mean, i.histogram(), i.getextrema(), i.getpixel((1, 1)), to_tensor(i.convert("L"))),
    lambda i: (c := i.crop((0, 0, 9, 9)), int(np.asarray(c).sum()), to_tensor(c), to_tensor(ImageOps.invert(c)))[1:],
    lambda i: int(np.asarray(i)[0, 0, 0] > 100),
]  # fmt: skip
"""Each kind of use. ``tests/kernels`` and ``tests/data`` have all calls of Pillow, of torchvision and of torch."""


@for_gpu
@pytest.mark.parametrize("uses", [LATE_USES, PIXEL_USES], ids=["late", "of pixels"])
def test_calls_by_hand(scenes: list[Scene], uses: Any) -> None:
    def used(number: int) -> Any:
        return number, uses[number](Image.open(scenes[0].path)), torch.rand(1).item(), random.random()

    loader = assert_same_batches(Mapped(used, range(len(uses))), list, batch_size=1)
    if uses is LATE_USES:
        assert not loader.stats().images_by_workers, loader.backend
