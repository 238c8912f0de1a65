"""Train ResNet-50, or any torchvision model, on ImageNet or on folders with the same layout, with or without GPUs.

The images are in DATA/train/CLASS/ and DATA/val/CLASS/. To create synthetic ones:

    proxyloader make-dataset data/train --images 2000
    proxyloader make-dataset data/val --images 400 --seed 1

Images come from one of four backends, which share the training code:

    pytorch     torch's DataLoader: workers decode with Pillow and transform with torchvision
    proxy       proxyloader.DataLoader: workers read, DALI decodes and transforms, with torchvision's crops and flips
    dali        DALI's own reader and operators, without workers, with DALI's crops and flips
    synthetic   one repeated batch, an upper bound for the throughput

Usage:

    SCRIPT=examples/imagenet/train.py

    # without a GPU, in one and in two processes
    python $SCRIPT data --arch resnet18 --size 64 --batch-size 32 --workers 1
    torchrun --nproc-per-node=2 $SCRIPT data --arch resnet18 --size 64 --batch-size 16 --workers 1
    # eight GPUs in one host
    torchrun --nproc-per-node=8 $SCRIPT DATA --amp float16 --channels-last --checkpoint-steps 500
    # resume after an interruption
    torchrun --nproc-per-node=8 $SCRIPT DATA --amp float16 --channels-last --checkpoint-steps 500 --resume

Without --checkpoint-steps, the script saves only after each epoch, and loses the progress of an interrupted one. With
the backends proxy, dali and synthetic, a resumed run ends with the weights of an uninterrupted one (bit-exact on a
CPU). With pytorch, its crops and flips differ, because the random states of the workers are not saved.

Each epoch appends a line to OUT/log.jsonl: loss, top-1 and top-5 accuracy, images per second, and the fraction of time
that the loop waited for images. If this fraction is small, a faster backend does not help. The line of a resumed epoch
covers only the part after the resume.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models, transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

import proxyloader
from proxyloader import pipelines

AMP = {"off": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
AUTO_AUGMENT = {
    "none": [],
    "autoaugment": [transforms.AutoAugment()],
    "randaugment": [transforms.RandAugment()],
    "trivialaugment": [transforms.TrivialAugmentWide()],
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
RANGES = {
    **dict.fromkeys(("epochs", "batch_size", "threads", "size"), (1, math.inf)),
    **dict.fromkeys(("workers", "checkpoint_steps", "max_steps", "warmup_epochs"), (0, math.inf)),
    **dict.fromkeys(("lr", "weight_decay"), (0, 1000)),
    "seed": (0, 2**63 - 1),
    **dict.fromkeys(("label_smoothing", "ema_decay", "momentum"), (0, 1)),
    **dict.fromkeys(("loss_scale", "loss_scale_interval"), (1, math.inf)),
    "loss_scale_growth": (1.001, math.inf),
    "loss_scale_backoff": (0.001, 0.999),
}
RESUMED = ("arch", "data_backend", "size", "auto_augment", "label_smoothing", "ema_decay", "amp", "seed")
"""Options that must not change when a run is resumed."""

TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, help="folder with train/ and val/, each with one subfolder of images per class")
    option("--data-backend", choices=BACKENDS, default="proxy", help="source of the images")
    archs = models.list_models(module=models)
    option("--arch", choices=archs, default="resnet50", metavar="NAME", help="torchvision model; --arch ? lists them")
    option("--epochs", type=int, default=90, help="number of epochs")
    option("--batch-size", type=int, default=256, help="images per step and process")
    option("--workers", type=int, default=8, help="worker processes per process (pytorch, proxy)")
    option("--threads", type=int, default=4, help="DALI's CPU threads per process (dali)")
    option("--size", type=int, default=224, help="height and width of the model's input, in pixels (inception_v3: 299)")
    option("--auto-augment", choices=AUTO_AUGMENT, default="none", help="augmentation after the crop and the flip")
    option(
        "--lr", type=float, default=0.1, help="learning rate for a total batch size of 256, scaled to the actual one"
    )
    option("--warmup-epochs", type=float, default=5, help="epochs of linear warm-up before the cosine decay")
    option("--momentum", type=float, default=0.9, help="momentum of SGD")
    option("--weight-decay", type=float, default=5e-5, help="weight decay of SGD")
    option("--label-smoothing", type=float, default=0.1, help="label smoothing of the loss")
    option("--ema-decay", type=float, default=0.0, help="decay of the averaged weights to validate, 0: do not average")
    option("--amp", choices=AMP, default="off", help="mixed precision; only float16 scales the loss")
    option("--loss-scale", type=float, default=65536.0, help="initial loss scale (float16)")
    option("--loss-scale-growth", type=float, default=2.0, help="growth factor of the loss scale")
    option("--loss-scale-interval", type=int, default=2000, help="steps without overflow until the loss scale grows")
    option("--loss-scale-backoff", type=float, default=0.5, help="factor of the loss scale after an overflow")
    option("--channels-last", action="store_true", help="NHWC memory format: faster convolutions with --amp on a GPU")
    option("--checkpoint-steps", type=int, default=0, help="steps between checkpoints; 0: save only after each epoch")
    option("--max-steps", type=int, default=0, help="steps of this run after which to save and exit; 0: no limit")
    option("--resume", action="store_true", help="continue from OUT/last.pt")
    option("--out", type=Path, default=Path("runs/imagenet"), help="folder for last.pt, best.pt and log.jsonl")
    option("--seed", type=int, default=0, help="seed of the initial weights, the order and the crops")
    args = parser.parse_args()
    args.data_type = AMP[args.amp] or torch.float32  # dtype of the batches
    args.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return args


def check(args: argparse.Namespace) -> None:
    """Exit if options or folders are invalid in ways that argparse does not check."""
    for name, (least, most) in RANGES.items():
        if not least <= getattr(args, name) <= most:
            allowed = f">= {least}" if most == math.inf else f"in [{least}, {most}]"
            sys.exit(f"{flag(name)} must be {allowed}, got {getattr(args, name)}")
    for folder in (args.data / "train", args.data / "val"):
        if not folder.is_dir():
            sys.exit(f"{folder}: no such folder. `proxyloader make-dataset {folder}` creates one with synthetic images")
    if difference := set(class_names(args, "train")) ^ set(class_names(args, "val")):
        sys.exit(f"{args.data}: train/ and val/ differ in classes: {difference}")
    last = args.out / "last.pt"
    if args.resume and not last.is_file():
        sys.exit(f"{last}: no checkpoint to resume from. Remove --resume, or set --out to the folder of a checkpoint")
    if last.exists() and not args.resume:
        sys.exit(f"{last} belongs to an earlier run. Pass --resume to continue it, or a different --out")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {args.out}: cannot create the folder: {error.strerror}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def class_names(args: argparse.Namespace, part: str) -> list[str]:
    return sorted(folder.name for folder in (args.data / part).iterdir() if folder.is_dir())


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process and the number of processes that train together."""

    size: int
    rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> float:
        """Return the mean over all processes."""
        return self.sum(value) / self.size

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank. The result is valid only in the first process."""
        values = [value] * self.size
        if self.size > 1:
            dist.gather_object(value, values if self.is_first else None)
        return values

    def sum(self, value: Tensor) -> float:
        value = value.clone()
        if self.size > 1:
            dist.all_reduce(value)
        return value.item()


def join_world() -> World:
    """Initialize torch.distributed from torchrun's environment variables, or return a single process."""
    present = [name for name in TORCHRUN if name in os.environ]
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing and {"WORLD_SIZE", "RANK"} & set(present):
        sys.exit(
            f"the environment has {', '.join(present)}, but not {', '.join(missing)}. torchrun sets all of them: "
            "torchrun --nproc-per-node=GPUS examples/imagenet/train.py ..."
        )
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            sys.exit(f"the environment variable {name} must be an integer, got {os.environ[name]!r}")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if gpus and local_rank >= gpus:
        sys.exit(f"LOCAL_RANK is {local_rank}, but this host has {gpus} GPUs. Pass --nproc-per-node={gpus} to torchrun")
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if missing:
        return World(1, 0, device)
    dist.init_process_group("nccl" if gpus else "gloo")
    return World(dist.get_world_size(), dist.get_rank(), device)


# --- images ----------------------------------------------------------------------------------------------------------
# Each backend returns the loaders for training and validation. In training, all processes take the same number of full
# batches; dali repeats an image to fill the last one. In validation, each image is loaded once.


def pytorch(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    def loader(dataset: ImageFolder, train: bool) -> Any:
        shards = torch.utils.data.DistributedSampler(dataset, world.size, world.rank, shuffle=train, seed=args.seed)
        sampler = shards if train else range(world.rank, len(dataset), world.size)  # the sampler repeats images
        return torch.utils.data.DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=train, **workers(args))

    train_set, val_set = folders(args)
    return loader(train_set, True), loader(val_set, False)


def proxy(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    options = {
        "seed": args.seed,
        "num_shards": proxyloader.World(world.size, world.rank),
        "device": world.device,
        "dtype": args.data_type,
        "memory_format": args.memory_format,
        **workers(args),
    }
    train_set, val_set = folders(args)
    return (
        proxyloader.DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **options),
        proxyloader.DataLoader(val_set, args.batch_size, **options),
    )


def dali(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    folders(args)  # raises a clearer error than DALI if a folder has no images
    options = {
        "batch_size": args.batch_size,
        "num_threads": args.threads,
        "device_id": world.device.index,
        "num_shards": world.size,
        "shard_id": world.rank,
        "pad_last_batch": True,
        "size": args.size,
        "dtype": "float16" if args.amp == "float16" else "float32",  # DALI has no bfloat16
    }
    augment = None if args.auto_augment == "none" else args.auto_augment
    random_options = {"seed": args.seed + world.rank, "augmentation": augment, "enable_checkpointing": True}
    training = functools.partial(pipelines.training, file_root=args.data / "train", **random_options, **options)
    resize = args.size * 256 // 224
    validation = functools.partial(pipelines.validation, file_root=args.data / "val", resize=resize, **options)
    return DaliLoader(training, "FILL"), DaliLoader(validation, "PARTIAL")


class DaliLoader:
    """DALI's iterator with a state_dict, to resume in the middle of an epoch."""

    def __init__(self, pipeline: Callable[..., Any], last_batch: str) -> None:
        self.pipeline, self.last_batch = pipeline, last_batch
        self.load_state_dict({"checkpoint": None})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

        policy = LastBatchPolicy[self.last_batch]
        pipeline = self.pipeline(checkpoint=state["checkpoint"])
        options = {"reader_name": "Reader", "last_batch_policy": policy, "auto_reset": True}
        self.iterator = DALIClassificationIterator(pipeline, **options)

    def state_dict(self) -> dict[str, Any]:
        return {"checkpoint": self.iterator.checkpoints()[0]}

    def __len__(self) -> int:
        return len(self.iterator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for (batch,) in self.iterator:
            if len(batch["label"]):  # a smaller shard may end with an empty batch
                yield batch["data"], batch["label"].squeeze(1).long()


def synthetic(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    train_set, _ = folders(args)
    classes = len(train_set.classes)
    images = torch.randn(args.batch_size, 3, args.size, args.size, device=world.device, dtype=args.data_type)
    batch = images.to(memory_format=args.memory_format), torch.randint(classes, (args.batch_size,), device=world.device)
    return [batch] * max(1, len(train_set) // (args.batch_size * world.size)), None  # no validation


BACKENDS = {"pytorch": pytorch, "proxy": proxy, "dali": dali, "synthetic": synthetic}


def folders(args: argparse.Namespace) -> tuple[ImageFolder, ImageFolder]:
    """Return the datasets, with random crops and flips for training and center crops for validation."""
    augment = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip()]
    augment += AUTO_AUGMENT[args.auto_augment]
    center = [transforms.Resize(args.size * 256 // 224), transforms.CenterCrop(args.size)]
    to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return (
        ImageFolder(args.data / "train", transforms.Compose([*augment, *to_tensor])),
        ImageFolder(args.data / "val", transforms.Compose([*center, *to_tensor])),
    )


def workers(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,
        "pin_memory": torch.cuda.is_available(),
    }


# --- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """The model and the rest of the training state."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        torch.manual_seed(args.seed)  # the same initial weights in all processes
        self.args, self.world, self.device = args, world, world.device
        try:
            self.train_loader, self.val_loader = BACKENDS[args.data_backend](args, world)
        except FileNotFoundError as error:
            sys.exit(f"{args.data}: train/ and val/ must contain one folder of images per class, none empty: {error}")
        self.steps = len(self.train_loader)  # per epoch
        if not self.steps:
            sys.exit(
                f"{args.data / 'train'}: fewer than one batch of {args.batch_size} images for each of {world.size} "
                "processes. Lower --batch-size"
            )
        classes = class_names(args, "train")
        self.config = {flag(name): getattr(args, name) for name in RESUMED} | {"classes": classes}
        model = models.get_model(args.arch, num_classes=len(classes))
        self.bare = model.to(self.device, memory_format=args.memory_format)
        on_gpu = [self.device.index] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.bare, on_gpu) if world.size > 1 else self.bare
        average = get_ema_multi_avg_fn(args.ema_decay)
        self.ema = AveragedModel(self.bare, multi_avg_fn=average, use_buffers=True) if args.ema_decay else None
        self.loss = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
        self.lr = args.lr * args.batch_size * world.size / 256
        options = {"momentum": args.momentum, "weight_decay": args.weight_decay, "fused": True}
        self.optimizer = torch.optim.SGD(model.parameters(), self.lr, **options)
        for weight in model.parameters():
            # torch 2.14 does not initialize the momentum, and a fused step that overflows does not write it.
            self.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            args.loss_scale,
            args.loss_scale_growth,
            args.loss_scale_backoff,
            args.loss_scale_interval,
            enabled=args.amp == "float16",
        )
        self.epoch = self.step = 0  # the next ones
        self.steps_done = 0  # in this run
        self.best = 0.0

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, AMP[self.args.amp], enabled=self.args.amp != "off"):
            output = model(images)
        return getattr(output, "logits", output).float()  # Inception and GoogLeNet also return auxiliary outputs

    def batches(self, loader: Any, skip: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in itertools.islice(loader, skip, None):
            # Copies nothing if the images already have this device, dtype and format.
            images = images.to(self.device, self.args.data_type, True, memory_format=self.args.memory_format)
            yield images, labels.to(self.device, non_blocking=True)

    def set_lr(self) -> None:
        """Set the learning rate: linear warm-up, then cosine decay to 0."""
        done, warmup = self.epoch + self.step / self.steps, min(self.args.warmup_epochs, self.args.epochs / 5)
        progress = (done - warmup) / (self.args.epochs - warmup)
        factor = (
            (done * self.steps + 1) / (warmup * self.steps + 1)
            if done < warmup
            else 0.5 + 0.5 * math.cos(math.pi * progress)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor

    def train(self) -> dict[str, float]:
        """Train for the rest of this epoch, or until ``--max-steps``. Return metrics."""
        self.model.train()
        start, waited_s, images_seen = time.perf_counter(), 0.0, 0
        total, first = torch.zeros((), device=self.device), self.step
        is_stateful = hasattr(self.train_loader, "load_state_dict")
        batches = self.batches(self.train_loader, 0 if is_stateful else self.step)
        bar = tqdm(
            total=self.steps,
            initial=self.step,
            desc=f"epoch {self.epoch + 1}",
            unit="step",
            leave=False,
            disable=None if self.world.is_first else True,  # None: no bar unless the output is a terminal
        )
        with bar:
            requested = time.perf_counter()
            for images, labels in batches:
                waited_s += time.perf_counter() - requested
                self.set_lr()
                loss = self.loss(self.forward(self.model, images), labels)
                self.optimizer.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if self.ema is not None:
                    self.ema.update_parameters(self.bare)
                self.step, self.steps_done = self.step + 1, self.steps_done + 1
                total, images_seen = total + loss.detach(), images_seen + len(images)
                if self.step % 20 == 1:  # item() waits for the GPU
                    bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
                every = self.args.checkpoint_steps
                if every and self.step % every == 0 and self.step < self.steps:
                    self.save("last.pt")
                if self.is_done and self.step < self.steps:
                    break
                requested = time.perf_counter()
        loss_mean = self.world.mean(total / (self.step - first))  # waits for the GPU, so measure the time after
        elapsed_s = time.perf_counter() - start
        return {
            "loss": loss_mean,
            "images": self.world.sum(torch.tensor(float(images_seen), device=self.device)),
            "images_per_s": images_seen * self.world.size / elapsed_s,
            "waited": waited_s / elapsed_s,
        }

    @property
    def is_done(self) -> bool:
        """Whether this run has reached ``--max-steps``."""
        return 0 < self.args.max_steps <= self.steps_done

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Return the top-1 and top-5 accuracy over all processes, in percent."""
        model = (self.ema.module if self.ema is not None else self.bare).eval()
        counts = torch.zeros(3, device=self.device)  # images, top-1 hits, top-5 hits
        for images, labels in self.batches(self.val_loader):
            logits = self.forward(model, images)
            is_hit = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
            counts += torch.stack([torch.tensor(len(labels), device=self.device), is_hit[:, 0].sum(), is_hit.sum()])
        images, top1, top5 = (self.world.sum(count) for count in counts)
        return {"val_images": images, "top1": 100 * top1 / images, "top5": 100 * top5 / images}

    # --- checkpoints ---

    def save(self, name: str) -> None:
        """Save the state of all processes. The first process writes the file."""
        loader = self.train_loader.state_dict() if hasattr(self.train_loader, "state_dict") else None
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        ranks = self.world.gather({"loader": loader, "random": [torch.get_rng_state(), *cuda]})
        if not self.world.is_first:
            return
        state = {name: getattr(self, name) for name in ("epoch", "step", "steps", "best", "config")}
        state |= {name: part.state_dict() for name, part in self.parts().items()}
        state["ranks"] = ranks
        path = self.args.out / name
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)  # atomic

    def load(self, path: Path) -> None:
        new_run = "start a new run without --resume and with a different --out"
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            saved, ranks = state["config"], state["ranks"]
        except Exception as error:  # torch.load raises various exceptions
            best = "Replace it with best.pt to continue from the best epoch, or "
            sys.exit(
                f"{path} is not an intact checkpoint of this script ({type(error).__name__}). "
                f"{best + new_run if path.with_name('best.pt').exists() else new_run.capitalize()}"
            )
        changed = [name for name, value in self.config.items() if saved[name] != value]
        if changed:
            was, now = (", ".join(f"{name} {each[name]!s:.60}" for name in changed) for each in (saved, self.config))
            sys.exit(f"{path} was saved with {was}, but this run has {now}. Use the same options, or {new_run}")
        if state["step"] and state["steps"] != self.steps:
            sys.exit(
                f"{path} was saved after {state['step']} of {state['steps']} steps of an epoch, which now has "
                f"{self.steps}. Use the same --batch-size, number of processes and data, or {new_run}"
            )
        if len(ranks) != self.world.size:
            sys.exit(
                f"{path} was saved by {len(ranks)} processes, each with its own state, but there are now "
                f"{self.world.size}. Start as many, or {new_run}"
            )
        mine = ranks[self.world.rank]
        if hasattr(self.train_loader, "load_state_dict"):
            try:
                self.train_loader.load_state_dict(mine["loader"])
            except ValueError as error:  # a different dataset, for example
                sys.exit(f"{path}: {error}; or {new_run}")
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.epoch, self.step, self.best = state["epoch"], state["step"], state["best"]
        cuda = [torch.cuda.set_rng_state] if self.device.type == "cuda" else []
        for restore, random in zip([torch.set_rng_state, *cuda], mine["random"]):
            restore(random.cpu())  # used by dropout

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.bare, "optimizer": self.optimizer, "scaler": self.scaler}
        return parts | ({"ema": self.ema} if self.ema is not None else {})


class Log:
    """Writes a line per epoch to the terminal, to log.jsonl, and to TensorBoard if it is installed."""

    def __init__(self, out: Path) -> None:
        self.file = (out / "log.jsonl").open("a")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.tensorboard = None
        else:
            self.tensorboard = SummaryWriter(out)

    def write(self, epoch: int, metrics: dict[str, float]) -> None:
        print(f"epoch {epoch:3d}: " + ", ".join(f"{name} {value:,.4g}" for name, value in metrics.items()), flush=True)
        self.file.write(json.dumps({"epoch": epoch, **metrics}) + "\n")
        self.file.flush()
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, epoch)


def main() -> None:
    args = parse_args()
    check(args)
    world = join_world()
    trainer = Trainer(args, world)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        trainer.load(args.out / "last.pt")
    log = Log(args.out) if world.is_first else None
    while trainer.epoch < args.epochs and not trainer.is_done:
        start_epoch(trainer.train_loader, trainer.epoch)
        metrics = trainer.train()
        if trainer.step == trainer.steps:
            metrics |= trainer.validate() if trainer.val_loader is not None else {}
            trainer.epoch, trainer.step = trainer.epoch + 1, 0
            if log is not None:
                log.write(trainer.epoch, metrics)
            if metrics.get("top1", 0.0) > trainer.best:
                trainer.best = metrics["top1"]
                trainer.save("best.pt")
        trainer.save("last.pt")
    if world.is_first and trainer.epoch < args.epochs:
        print(f"--max-steps {args.max_steps}: saved after {trainer.step} steps of epoch {trainer.epoch + 1}")
    elif world.is_first and not trainer.steps_done:
        print(f"{args.out / 'last.pt'}: all {trainer.epoch} epochs are done. Raise --epochs to continue")
    if world.size > 1:
        dist.destroy_process_group()


def start_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of torch's sampler. The other loaders count epochs themselves."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        sampler.set_epoch(epoch)


if __name__ == "__main__":
    main()
