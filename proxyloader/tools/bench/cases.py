"""Benchmark cases: functions that take settings and yield loops over batches. Run in a child process.

For classification, all cases crop at random, resize to 224, flip and normalize; ``tasks.py`` has the other tasks. DALI
pipelines use default arguments, except tuned ones and the number of prefetched batches. Other packages are imported
when their case runs.
"""

import functools
import importlib
import importlib.util
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy
from nvidia.dali.plugin.pytorch.experimental import proxy
from PIL import Image
from torch.utils.data import DataLoader as StockLoader, Dataset, RandomSampler, Subset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.ops import box_convert, clip_boxes_to_image, remove_small_boxes

from ..._cores import usable_cores
from ...data.recorded import map_leaves
from ...loader.dataloader import DataLoader
from . import FRAMES, tasks
from .config import CROP_PX, MEAN, STD, BenchConfig, make_transform

Batch = tuple[Any, Any]
Loops = Iterator[Iterator[Batch]]
"""Endless iterator of loops over batches: images (N, 3, H, W) and labels (N,), or the images and targets of a task."""

PREFETCH_BATCHES = 3  # of a DALI pipeline with tuned settings

EXAMPLE: dict[str, Any] = dict(random_area=[0.1, 1.0], random_aspect_ratio=[0.8, 1.25], num_attempts=100)
EXAMPLE_MEMORY: dict[str, Any] = dict(preallocate_width_hint=5980, preallocate_height_hint=6430)
EXAMPLE_MEMORY |= dict(device_memory_padding=211025920, host_memory_padding=140544512)
"""Arguments of the decoder in NVIDIA's ImageNet example: for the crop, and for the memory of a GPU."""


class OwnDataset(Dataset[Any]):
    """A typical custom dataset, which opens files with Pillow and calls its transform."""

    def __init__(self, root: str, transform: Any) -> None:
        self.samples, self.augment = ImageFolder(root).samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.augment(Image.open(path).convert("RGB")), label


def hugging_face(root: str, transform: Any) -> Any:
    """Return a Hugging Face dataset with ``set_transform``. A batch is a dict of images and labels."""
    datasets = importlib.import_module("datasets")
    paths, labels = zip(*ImageFolder(root).samples)
    dataset = datasets.Dataset.from_dict({"image": list(paths), "label": list(labels)})
    dataset = dataset.cast_column("image", datasets.Image())
    dataset.set_transform(functools.partial(_transform_rows, transform))
    return dataset


def _transform_rows(transform: Any, rows: dict[str, Any]) -> dict[str, Any]:
    return {"image": [transform(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}


DATASETS: dict[str, Callable[[str, Any], Any]] = {"OwnDataset": OwnDataset, "HuggingFace": hugging_face}
"""Functions that create a dataset from the root of an ImageFolder and a transform."""


def torch_loader(config: BenchConfig) -> Loops:
    pin_memory = config.on_gpu and not config.use_defaults
    return loop_forever(config, StockLoader(samples(config), pin_memory=pin_memory, **loader_arguments(config)))


def upstream_proxy(config: BenchConfig) -> Loops:
    pipeline = dali_pipeline(config, lambda: [fn.io.file.read(fn.external_source(name="images", no_copy=True))])
    server = proxy.DALIServer(pipeline)
    server.start_thread()
    dataset = repeat_dataset(config, ImageFolder(config.root, server.proxy, loader=_path_to_array))
    return loop_forever(config, proxy.DataLoader(server, dataset, **loader_arguments(config)))


def _path_to_array(path: str) -> Any:
    return np.frombuffer(path.encode(), np.uint8)


def proxyloader(config: BenchConfig) -> Loops:
    threads, load = ("auto" if value is None else value for value in config.tuning[1:])
    options: dict[str, Any] = {"device": config.device, "num_threads": threads, "hw_decoder_load": load}
    options |= {"targets_on_device": not config.use_defaults, **loader_arguments(config), **config.format}
    loader: DataLoader[Any] = DataLoader(samples(config), **options)
    if config.use_defaults or config.task == "classification":
        return loop_forever(config, loader)
    return (((_move(images, config.device), targets) for images, targets in loader) for _ in itertools.count())


def synthetic(config: BenchConfig) -> Loops:
    images = torch.randn(config.batch_size, 3, CROP_PX, CROP_PX)
    batch = to_device(config, (images, torch.randint(1000, (config.batch_size,))))
    return loop_forever(config, [batch] * math.ceil(config.images * config.passes / config.batch_size))


def samples(config: BenchConfig, open_image: Callable[[str], Any] = pil_loader, transformed: bool = True) -> Any:
    """Return the dataset of a task; for classification, one of ``DATASETS`` or an ImageFolder with an augmentation."""
    if config.task != "classification":
        kind, transform = tasks.Clips if config.task == "clips" else tasks.Photographs, tasks.PIPELINES[config.added]
        return repeat_dataset(config, kind(config.root, config.added, open_image, transform if transformed else None))
    make, augmentation = (DATASETS[config.added], "") if config.added in DATASETS else (ImageFolder, config.added)
    return repeat_dataset(config, make(config.root, make_transform(augmentation)))


def repeat_dataset(config: BenchConfig, dataset: Any) -> Any:
    # Unlike ConcatDataset, Subset forwards __getitems__, which Hugging Face datasets implement.
    return dataset if config.passes == 1 else Subset(dataset, config.passes * [*range(len(dataset))])


def loader_arguments(config: BenchConfig) -> dict[str, Any]:
    """Return the arguments common to all loaders with workers."""
    workers = config.tuning.workers or 0
    persistent = {"persistent_workers": True} if config.persistent_workers and workers > 0 else {}
    collate = tasks.collate_lists if config.task == "detection" else None
    return dict(batch_size=config.batch_size, shuffle=True, num_workers=workers, collate_fn=collate, **persistent)


def to_device(config: BenchConfig, batch: Any) -> Batch:
    """Move a batch to the device. For classification, convert the images to the configured format."""
    if config.task != "classification":
        return tuple(_move(part, config.device) for part in batch)
    images, labels = batch.values() if isinstance(batch, dict) else batch
    if images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    images = images.to(config.device, non_blocking=True, **config.format)
    return images, labels.to(config.device, non_blocking=True).flatten().long()


def _move(value: Any, device: str) -> Any:
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf, value)


def loop_forever(config: BenchConfig, loader: Any) -> Loops:
    while True:
        yield (to_device(config, batch) for batch in loader)


def iterator(config: BenchConfig) -> Loops:
    files: dict[str, Any] = {"file_root": config.root, "random_shuffle": True, "pad_last_batch": True}
    pipeline = dali_pipeline(config, lambda: fn.readers.file(name="Reader", **files))
    policy = LastBatchPolicy.PARTIAL
    batches = DALIClassificationIterator(pipeline, reader_name="Reader", auto_reset=True, last_batch_policy=policy)
    while True:
        passes = itertools.chain.from_iterable(itertools.repeat(batches, config.passes))
        yield (to_device(config, batch) for (batch,) in passes)


def dali_pipeline(config: BenchConfig, source: Callable[[], Any]) -> Any:
    """Return a typical pipeline that is equivalent to the transform, or that of NVIDIA's example."""
    decoder: dict[str, Any] = {"device": "mixed" if config.on_gpu else "cpu", "output_type": types.RGB}
    if config.on_gpu and config.tuning.hw_decoder_load is not None:
        decoder["hw_decoder_load"] = config.tuning.hw_decoder_load
    prefetch = {} if config.use_defaults else {"exec_dynamic": True, "prefetch_queue_depth": PREFETCH_BATCHES}
    resources = {"num_threads": config.tuning.threads or usable_cores(), "device_id": 0 if config.on_gpu else None}

    @pipeline_def(batch_size=config.batch_size, **resources, **prefetch)  # type: ignore[untyped-decorator,unused-ignore]
    def graph() -> Any:
        encoded, *labels = source()
        if config.case == NVIDIA:
            decoder.update(EXAMPLE | (EXAMPLE_MEMORY if config.on_gpu else {}))
            images = fn.decoders.image_random_crop(encoded, **decoder)
            images = fn.resize(images, resize_x=CROP_PX, resize_y=CROP_PX, interp_type=types.INTERP_TRIANGULAR)
        else:
            images = fn.decoders.image(encoded, **decoder)
            images = fn.random_resized_crop(images, size=CROP_PX, interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16 if config.dtype == "float16" else types.FLOAT,
            output_layout="HWC" if config.channels_last else "CHW",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(),
        )
        return images, *(label.gpu() if config.on_gpu else label for label in labels)

    return graph()


# --- other packages ---------------------------------------------------------------------------------------------------


def _read(path: str) -> torch.Tensor:  # torch cannot send the result of torchvision's read_file to another process
    return torch.from_numpy(np.fromfile(path, np.uint8))


def _decode(path: str, device: str = "cpu") -> Any:
    return tv_tensors.Image(decode_jpeg(_read(path), ImageReadMode.RGB, device))


def spdl(config: BenchConfig, decodes_on_gpu: bool = False) -> Loops:
    torch.set_num_threads(1)  # as in torch's workers
    dataset = samples(config, functools.partial(_decode, device=config.device if decodes_on_gpu else "cpu"))
    arguments, builder = loader_arguments(config), importlib.import_module("spdl.pipeline").PipelineBuilder()
    threads = arguments["num_workers"] or 1
    builder.add_source(RandomSampler(dataset), continuous=True).pipe(dataset.__getitem__, concurrency=threads)
    builder.aggregate(config.batch_size).pipe(arguments["collate_fn"] or default_collate)
    if config.on_gpu:
        builder.pipe(importlib.import_module("spdl.io").transfer_tensor_h2d, executor=ThreadPoolExecutor(1))
    return loop_forever(config, builder.add_sink(PREFETCH_BATCHES).build(num_threads=threads + 1, max_failures=0))


def dataloader_rs(config: BenchConfig) -> Loops:
    torch.set_num_threads(1)  # as in torch's workers
    package, dataset = importlib.import_module("dataloader_rs"), samples(config, _decode)
    methods = {"__len__": lambda _: len(dataset), "__getitem__": lambda _, index: dataset[index]}
    arguments = loader_arguments(replace(config, persistent_workers=False))
    collate = arguments["collate_fn"] or default_collate
    pin: Callable[[Any], Any] = pin_memory if config.on_gpu else tuple
    arguments["collate_fn"] = lambda batch: pin(collate(batch))
    return loop_forever(config, package.PyDataloader(type("Samples", (package.PyDataset,), methods)(), **arguments))


def kornia(config: BenchConfig) -> Loops:
    arguments = loader_arguments(config) | {"collate_fn": tasks.collate_lists}
    loader = StockLoader(samples(config, _read, transformed=False), **arguments)
    while True:
        yield (to_device(config, _augment(config, *batch)) for batch in loader)


def _augment(config: BenchConfig, files: Any, targets: Any) -> Any:
    """Decode images with torchvision, and transform them and their targets with Kornia, all on the device."""
    augmentation, task = importlib.import_module("kornia.augmentation"), config.task
    files, frames = ([*itertools.chain(*files)], FRAMES) if task == "clips" else ([*files], 1)
    decoded, batch = decode_jpeg(files, ImageReadMode.RGB, config.device), list[Any]()
    sequence: Any = None
    for start, target in zip(range(0, len(files), frames), _move(targets, config.device)):
        images = torch.stack(decoded[start : start + frames]).float() / 255
        fields = target if task == "detection" else {"masks": target[None]} if task == "segmentation" else {}
        names = {name: key for name, key in (("boxes", "bbox_xyxy"), ("masks", "mask")) if name in fields}
        if not sequence or config.added != "hflip":  # the others have sizes of their own
            steps = _kornia_steps(augmentation, config.added, *images.shape[-2:])
            sequence = augmentation.AugmentationSequential(*steps, data_keys=["input", *names.values()])
        outputs = sequence(images, *(fields[name].as_subclass(torch.Tensor)[None] for name in names))
        images, *others = outputs if names else [outputs]
        fields = fields | {name: other[0] for name, other in zip(names, others)}
        if task == "detection":
            fields["boxes"] = clip_boxes_to_image(fields["boxes"], images.shape[-2:])
            kept = remove_small_boxes(fields["boxes"], 1)
            fields |= {name: fields[name][kept] for name in ("labels", *names)}
        if config.added == "detr":
            limits = torch.tensor([*images.shape[:-3:-1]] * 2, device=config.device)
            fields["boxes"] = box_convert(fields["boxes"], "xyxy", "cxcywh") / limits
        target = fields["masks"][0].long() if task == "segmentation" else fields or target
        batch.append((images if task == "clips" else images[0], target))
    return (loader_arguments(config)["collate_fn"] or default_collate)(batch)


def _kornia_steps(augmentation: Any, pipeline: str, height: int, width: int) -> list[Any]:
    """Return the augmentations of an image, with sizes drawn as in ``tasks.PIPELINES``."""
    flip, normalize = augmentation.RandomHorizontalFlip(same_on_batch=True), augmentation.Normalize(MEAN, STD)
    resize = functools.partial(augmentation.Resize, antialias=True, align_corners=False)
    crop = functools.partial(augmentation.RandomCrop, pad_if_needed=True)
    side = random.choice(tasks.SHORT_SIDES)
    if pipeline == "multiscale":
        return [resize(side), flip]
    if pipeline.startswith("lsj"):
        scale = random.uniform(*tasks.JITTER_SCALE) * tasks.JITTER_PX / max(height, width)
        return [resize((int(scale * height), int(scale * width))), crop(tasks.SQUARE), flip]
    if pipeline == "detr":
        size = random.randint(*tasks.DETR_CROP), random.randint(*tasks.DETR_CROP)
        cut = [resize(random.choice(tasks.DETR_SIDES)), crop(size)] if random.random() < 0.5 else []
        return [flip, *cut, resize(side), normalize]
    if pipeline == "segmentation":
        size = tasks.SEGMENTATION_PX, tasks.SEGMENTATION_PX
        return [resize(random.randint(*tasks.SEGMENTATION_SIDES)), flip, crop(size), normalize]
    if pipeline == "clips":
        return [augmentation.RandomResizedCrop((CROP_PX, CROP_PX), same_on_batch=True), flip, normalize]
    return [flip]


class Case(NamedTuple):
    """A way to load the images, and the fields of ``Tuning`` that it supports. If it prefetches, it prepares batches of
    the next loop before that starts."""

    loops: Callable[[BenchConfig], Loops]
    description: str
    tuned: tuple[str, ...] = ()
    prefetches: bool = False
    requirement: str = ""
    lacks: Mapping[str, str] = {}

    def obstacle(self, config: BenchConfig) -> str:
        """Return why the case cannot run; empty if it can."""
        module = self.requirement.split("==")[0].replace("-", "_")
        if module and importlib.util.find_spec(module) is None:
            return f"not installed: pip install {self.requirement}"
        return self.lacks.get(config.added, "") or self.lacks.get(config.device, "")


OURS, NVIDIA = "proxyloader", "nvidia-example"
FEW, FEW_WORKERS = "proxyloader-4-workers", 4
DALI = ("threads", "hw_decoder_load")
NO_GPU, NO_IOU_CROP = {"cpu": "requires a GPU"}, {"ssd": "Kornia has no RandomIoUCrop"}
CROPS_ONLY = "DALI's file reader and iterator, with the graph of NVIDIA's ImageNet example, which decodes only crops"

CASES = {
    "torch": Case(torch_loader, "torch's DataLoader, with torchvision transforms in the workers", ("workers",)),
    "upstream-proxy": Case(upstream_proxy, "DALI's own proxy; DALI reads the files", ("workers", *DALI)),
    NVIDIA: Case(iterator, CROPS_ONLY, DALI, prefetches=True),
    "iterator": Case(
        iterator, "DALI's file reader and iterator, as in examples/dali_iterator.py", DALI, prefetches=True
    ),
    OURS: Case(proxyloader, "proxyloader.DataLoader", ("workers", *DALI), prefetches=True),
    "synthetic": Case(synthetic, "the same random batch in every step, to measure the model alone"),
    FEW: Case(proxyloader, "proxyloader.DataLoader with 4 workers", ("workers", *DALI), prefetches=True),
    "spdl": Case(spdl, "SPDL's threads, with torchvision's transforms", ("workers",), True, "spdl==0.8.0"),
    "spdl-gpu": Case(
        functools.partial(spdl, decodes_on_gpu=True), "the same on the GPU", ("workers",), True, "spdl==0.8.0", NO_GPU
    ),
    "dataloader-rs": Case(
        dataloader_rs, "dataloader-rs's threads, with the same", ("workers",), False, "dataloader-rs==0.2.0"
    ),
    "kornia": Case(kornia, "torch's workers, Kornia on the device", ("workers",), False, "kornia==0.9.0", NO_IOU_CROP),
}
"""Cases by name, in the order of the report. The packages after ``FEW`` decode with torchvision."""
CLASSIFICATION_CASES = ["torch", "upstream-proxy", NVIDIA, "iterator", OURS, "synthetic"]
TASK_CASES = ["torch", OURS, FEW, "spdl", "spdl-gpu", "dataloader-rs", "kornia"]
