"""Train ResNet-50, or any model of torchvision, on ImageNet or on folders like it: on one GPU, on many, or on none.

It reads DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg. To have something to train on:

    proxyloader make-dataset data/train --images 2000
    proxyloader make-dataset data/val --images 400 --seed 1

Images come from one of four backends, and all else stays the same:

    pytorch     torch's DataLoader: workers decode with Pillow, torchvision transforms
    proxy       proxyloader.DataLoader: workers read, DALI decodes and transforms; pixels and crops are torchvision's
    dali        DALI's own reader and operators, without workers; crops and flips are DALI's
    synthetic   one batch again and again: what the model could do if images cost nothing

Launch it:

    SCRIPT=examples/imagenet/train.py

    # without a GPU, in one process, and in two
    python $SCRIPT data --arch resnet18 --size 64 --batch-size 32 --workers 1
    torchrun --nproc_per_node=2 $SCRIPT data --arch resnet18 --size 64 --batch-size 16 --workers 1
    # eight GPUs of one host
    torchrun --nproc_per_node=8 $SCRIPT DATA --amp float16 --channels-last --checkpoint-steps 500
    # it was stopped, in the middle of an epoch perhaps: the same line again, and
    torchrun --nproc_per_node=8 $SCRIPT DATA --amp float16 --channels-last --checkpoint-steps 500 --resume

Without --checkpoint-steps it saves after each epoch alone: what an interrupted epoch had done is lost, and in the first
one there is nothing to resume. Resumed, it ends with the weights of a run that was not stopped, on a CPU to the bit,
with the backends proxy, dali and synthetic; with pytorch the crops and flips are others, for nobody saves the random
numbers of its workers.

OUT/log.jsonl gets a line for each epoch: loss, top-1 and top-5, images per second, and how much of the time the loop
waited for images. Where that share is small, a faster backend does not help. If the epoch was resumed, its line is of
the part behind the resume alone.
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
SHARED = (
    "arch",
    "data_backend",
    "size",
    "auto_augment",
    "label_smoothing",
    "ema_decay",
    "amp",
    "seed",
)  # by a run and those that resume it
TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, help="folder with train/ and val/, each with one folder of images for a class")
    option("--data-backend", choices=BACKENDS, default="proxy", help="where images come from")
    archs = models.list_models(module=models)
    option("--arch", choices=archs, default="resnet50", metavar="NAME", help="of torchvision; --arch ? lists them")
    option("--epochs", type=int, default=90, help="times through the training images")
    option("--batch-size", type=int, default=256, help="images in a step of each process")
    option("--workers", type=int, default=8, help="processes beside each that fetch images (pytorch, proxy)")
    option("--threads", type=int, default=4, help="of DALI on the CPU, for each process (dali)")
    option(
        "--size", type=int, default=224, help="side of the square that the model sees, in pixels (inception_v3: 299)"
    )
    option("--auto-augment", choices=AUTO_AUGMENT, default="none", help="behind the crop and the flip")
    option("--lr", type=float, default=0.1, help="for 256 images in a step of all processes; scaled to what they are")
    option("--warmup-epochs", type=float, default=5, help="in which the learning rate rises; then it falls, a cosine")
    option("--momentum", type=float, default=0.9, help="of SGD")
    option("--weight-decay", type=float, default=5e-5, help="of SGD")
    option("--label-smoothing", type=float, default=0.1, help="of the loss")
    option(
        "--ema-decay",
        type=float,
        default=0.0,
        help="of the averaged weights that are validated; 0: none, 0.9999: usual",
    )
    option("--amp", choices=AMP, default="off", help="half precision: float16 needs loss scaling, bfloat16 does not")
    option("--loss-scale", type=float, default=65536.0, help="to begin with (float16)")
    option("--loss-scale-growth", type=float, default=2.0, help="factor, after so many good steps in a row:")
    option("--loss-scale-interval", type=int, default=2000, help="steps until the loss scale grows")
    option("--loss-scale-backoff", type=float, default=0.5, help="factor, after a step that overflowed")
    option("--channels-last", action="store_true", help="NHWC memory: faster convolutions with --amp on a GPU")
    option("--checkpoint-steps", type=int, default=0, help="save after so many steps, too; 0: after each epoch alone")
    option("--max-steps", type=int, default=0, help="save and end after so many steps of this run; 0: all epochs")
    option("--resume", action="store_true", help="go on where OUT/last.pt was saved")
    option("--out", type=Path, default=Path("runs/imagenet"), help="folder for last.pt, best.pt and log.jsonl")
    option("--seed", type=int, default=0, help="decides the first weights, the order of the images and their crops")
    args = parser.parse_args()
    args.data_type = AMP[args.amp] or torch.float32  # the backends give what the model wants
    args.memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return args


def check(args: argparse.Namespace) -> None:
    """What argparse lets pass; one sentence ends the script."""
    for name, (least, most) in RANGES.items():
        if not least <= getattr(args, name) <= most:
            allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
            sys.exit(f"{flag(name)} is {allowed}; got {getattr(args, name)}")
    for folder in (args.data / "train", args.data / "val"):
        if not folder.is_dir():
            sys.exit(f"{folder}: no such folder. `proxyloader make-dataset {folder}` makes one to try with")
    others = set(class_names(args, "train")) ^ set(class_names(args, "val"))
    if others:
        sys.exit(f"{args.data}: train/ and val/ hold other classes: {others}")
    last = args.out / "last.pt"
    if args.resume and not last.is_file():
        sys.exit(f"{last}: no checkpoint to go on from. Leave out --resume to begin, or set --out to its folder")
    if last.exists() and not args.resume:
        sys.exit(f"{last} is of a run before this. Give --resume to go on with that, or another --out to begin anew")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {args.out} cannot be a folder: {error.strerror}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def class_names(args: argparse.Namespace, part: str) -> list[str]:
    return sorted(folder.name for folder in (args.data / part).iterdir() if folder.is_dir())


# --- the processes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    size: int
    rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> float:
        """Over all processes."""
        return self.sum(value) / self.size

    def gather(self, value: Any) -> list[Any]:
        """Of all processes, by rank; the others than the first get nothing to use."""
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
    """As torchrun says in the environment; without it this process is alone."""
    there = [name for name in TORCHRUN if name in os.environ]
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing and {"WORLD_SIZE", "RANK"} & set(there):
        sys.exit(
            f"{', '.join(missing)}: not set in the environment, and {', '.join(there)} is. torchrun sets all of them: "
            "torchrun --nproc_per_node=GPUS examples/imagenet/train.py ..."
        )
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            sys.exit(f"{name} is {os.environ[name]!r} in the environment, and is to be a number, as torchrun sets it")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if gpus and local_rank >= gpus:
        sys.exit(f"LOCAL_RANK is {local_rank}, and this host has {gpus} GPUs. Give torchrun --nproc_per_node={gpus}")
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if missing:
        return World(1, 0, device)
    dist.init_process_group("nccl" if gpus else "gloo")
    return World(dist.get_world_size(), dist.get_rank(), device)


# --- the images ------------------------------------------------------------------------------------------------------
# Each backend gives two loaders of (images, labels) on the device, for training and for validation. In training each
# process takes as many full batches as any other; in validation all images are seen once, by one of them. With dali the
# last batch of an epoch is filled up with a repeated image.


def pytorch(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    def loader(dataset: ImageFolder, train: bool) -> Any:
        shards = torch.utils.data.DistributedSampler(dataset, world.size, world.rank, shuffle=train, seed=args.seed)
        sampler = shards if train else range(world.rank, len(dataset), world.size)  # shards repeats a few images
        return torch.utils.data.DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=train, **workers(args))

    train_set, val_set = folders(args)
    return loader(train_set, True), loader(val_set, False)


def proxy(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    how = {
        "seed": args.seed,
        "num_shards": proxyloader.World(world.size, world.rank),
        "device": world.device,
        "dtype": args.data_type,
        "memory_format": args.memory_format,
        **workers(args),
    }
    train_set, val_set = folders(args)
    return (
        proxyloader.DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **how),
        proxyloader.DataLoader(val_set, args.batch_size, **how),
    )


def dali(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    folders(args)  # raises if a folder has no images, which DALI reports in many lines
    how = {
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
    chance = {"seed": args.seed + world.rank, "augmentation": augment, "enable_checkpointing": True}
    training = functools.partial(pipelines.training, file_root=args.data / "train", **chance, **how)
    resize = args.size * 256 // 224
    validation = functools.partial(pipelines.validation, file_root=args.data / "val", resize=resize, **how)
    return DaliLoader(training, "FILL"), DaliLoader(validation, "PARTIAL")


class DaliLoader:
    """DALI's iterator, whose epochs can be resumed in the middle."""

    def __init__(self, pipeline: Callable[..., Any], last_batch: str) -> None:
        self.pipeline, self.last_batch = pipeline, last_batch
        self.load_state_dict({"checkpoint": None})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

        policy = LastBatchPolicy[self.last_batch]
        pipeline = self.pipeline(checkpoint=state["checkpoint"])
        how = {"reader_name": "Reader", "last_batch_policy": policy, "auto_reset": True}
        self.iterator = DALIClassificationIterator(pipeline, **how)

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
    return [batch] * max(1, len(train_set) // (args.batch_size * world.size)), None  # nothing to validate


BACKENDS = {"pytorch": pytorch, "proxy": proxy, "dali": dali, "synthetic": synthetic}


def folders(args: argparse.Namespace) -> tuple[ImageFolder, ImageFolder]:
    """With torchvision's transforms: crops and flips by chance for training, the centre for validation."""
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
    """The model and all that changes while it learns."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        torch.manual_seed(args.seed)  # the same weights in all processes
        self.args, self.world, self.device = args, world, world.device
        try:
            self.train_loader, self.val_loader = BACKENDS[args.data_backend](args, world)
        except FileNotFoundError as error:
            sys.exit(
                f"{args.data}: train/ and val/ are to hold a folder of images for each class, and none empty: {error}"
            )
        self.steps = len(self.train_loader)  # of an epoch
        if not self.steps:
            sys.exit(
                f"{args.data / 'train'}: not one batch of {args.batch_size} images for each of {world.size} processes. "
                "Lower --batch-size"
            )
        classes = class_names(args, "train")
        self.shared = {flag(name): getattr(args, name) for name in SHARED} | {"classes": classes}
        model = models.get_model(args.arch, num_classes=len(classes))
        self.bare = model.to(self.device, memory_format=args.memory_format)
        on_gpu = [self.device.index] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.bare, on_gpu) if world.size > 1 else self.bare
        average = get_ema_multi_avg_fn(args.ema_decay)
        self.ema = AveragedModel(self.bare, multi_avg_fn=average, use_buffers=True) if args.ema_decay else None
        self.loss = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
        self.lr = args.lr * args.batch_size * world.size / 256
        how = {"momentum": args.momentum, "weight_decay": args.weight_decay, "fused": True}
        self.optimizer = torch.optim.SGD(model.parameters(), self.lr, **how)
        for weight in model.parameters():
            # A fused step that overflows in float16 changes nothing. But in the first one torch makes the momentum of
            # memory as it is, and relies on that step to write it (torch 2.14); so it is made here.
            self.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            args.loss_scale,
            args.loss_scale_growth,
            args.loss_scale_backoff,
            args.loss_scale_interval,
            enabled=args.amp == "float16",
        )
        self.epoch = self.step = 0  # the next one
        self.steps_done = 0  # by this run
        self.best = 0.0

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, AMP[self.args.amp], enabled=self.args.amp != "off"):
            output = model(images)
        return getattr(output, "logits", output).float()  # Inception and GoogLeNet return their side heads too

    def batches(self, loader: Any, skip: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in itertools.islice(loader, skip, None):
            # What is there in this format already is not copied.
            images = images.to(self.device, self.args.data_type, True, memory_format=self.args.memory_format)
            yield images, labels.to(self.device, non_blocking=True)

    def set_lr(self) -> None:
        """Rises evenly in the warm-up, then falls as a cosine to 0."""
        done, warmup = self.epoch + self.step / self.steps, min(self.args.warmup_epochs, self.args.epochs / 5)
        falling = (done - warmup) / (self.args.epochs - warmup)
        share = (
            (done * self.steps + 1) / (warmup * self.steps + 1)
            if done < warmup
            else 0.5 + 0.5 * math.cos(math.pi * falling)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * share

    def train(self) -> dict[str, float]:
        """What is left of this epoch, or as much as this run may do; returns what is worth knowing of it."""
        self.model.train()
        begin, waited_s, images_seen = time.perf_counter(), 0.0, 0
        total, first = torch.zeros((), device=self.device), self.step
        resumes_itself = hasattr(self.train_loader, "load_state_dict")
        batches = self.batches(self.train_loader, 0 if resumes_itself else self.step)
        bar = tqdm(
            total=self.steps,
            initial=self.step,
            desc=f"epoch {self.epoch + 1}",
            unit="step",
            leave=False,
            disable=None if self.world.is_first else True,  # None: no bar where the output is no terminal
        )
        with bar:
            asked = time.perf_counter()
            for images, labels in batches:
                waited_s += time.perf_counter() - asked
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
                if self.step % 20 == 1:  # reading the loss waits for the GPU
                    bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
                every = self.args.checkpoint_steps
                if every and self.step % every == 0 and self.step < self.steps:
                    self.save("last.pt")
                if self.is_over and self.step < self.steps:
                    break
                asked = time.perf_counter()
        loss_mean = self.world.mean(total / (self.step - first))  # waits for the GPU, so the clock is read after it
        took_s = time.perf_counter() - begin
        return {
            "loss": loss_mean,
            "images": self.world.sum(torch.tensor(float(images_seen), device=self.device)),
            "images_per_s": images_seen * self.world.size / took_s,
            "waited": waited_s / took_s,
        }

    @property
    def is_over(self) -> bool:
        """This run has done as many steps as it may."""
        return 0 < self.args.max_steps <= self.steps_done

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Top-1 and top-5 accuracy in percent, of all processes together."""
        model = (self.ema.module if self.ema is not None else self.bare).eval()
        counts = torch.zeros(3, device=self.device)  # images, right at once, right among five
        for images, labels in self.batches(self.val_loader):
            logits = self.forward(model, images)
            is_right = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
            counts += torch.stack([torch.tensor(len(labels), device=self.device), is_right[:, 0].sum(), is_right.sum()])
        images, top1, top5 = (self.world.sum(count) for count in counts)
        return {"val_images": images, "top1": 100 * top1 / images, "top5": 100 * top5 / images}

    # --- checkpoints ---

    def save(self, name: str) -> None:
        """All that a run needs to go on from here, of all processes; the first one writes it."""
        loader = self.train_loader.state_dict() if hasattr(self.train_loader, "state_dict") else None
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        ranks = self.world.gather({"loader": loader, "random": [torch.get_rng_state(), *cuda]})
        if not self.world.is_first:
            return
        state = {name: getattr(self, name) for name in ("epoch", "step", "steps", "best", "shared")}
        state |= {name: part.state_dict() for name, part in self.parts().items()}
        state["ranks"] = ranks
        path = self.args.out / name
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # never half a checkpoint

    def load(self, path: Path) -> None:
        anew = "begin anew without --resume and with another --out"
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            saved, ranks = state["shared"], state["ranks"]
        except Exception as error:  # torch has many for what it cannot read
            best = "Put best.pt in its place to go on from the best epoch, or "
            sys.exit(
                f"{path} is damaged, or no checkpoint of this script ({type(error).__name__}). "
                f"{best + anew if path.with_name('best.pt').exists() else anew.capitalize()}"
            )
        others = [name for name, value in self.shared.items() if saved[name] != value]
        if others:
            was, now = (", ".join(f"{name} {of[name]!s:.60}" for name in others) for of in (saved, self.shared))
            sys.exit(f"{path} was saved with {was}, and this run has {now}. Give the same, or {anew}")
        if state["step"] and state["steps"] != self.steps:
            sys.exit(
                f"{path} was saved after {state['step']} of {state['steps']} steps of an epoch, which now has "
                f"{self.steps}. Give the same --batch-size, processes and data, or {anew}"
            )
        if len(ranks) != self.world.size:
            sys.exit(
                f"{path} was saved by {len(ranks)} processes, each with a state of its own, and these are "
                f"{self.world.size}. Start as many, or {anew}"
            )
        mine = ranks[self.world.rank]
        if hasattr(self.train_loader, "load_state_dict"):
            try:
                self.train_loader.load_state_dict(mine["loader"])
            except ValueError as error:  # of other data or another --size, say
                sys.exit(f"{path}: {error}; or {anew}")
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.epoch, self.step, self.best = state["epoch"], state["step"], state["best"]
        cuda = [torch.cuda.set_rng_state] if self.device.type == "cuda" else []
        for restore, random in zip([torch.set_rng_state, *cuda], mine["random"]):
            restore(random.cpu())  # dropout draws from it

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.bare, "optimizer": self.optimizer, "scaler": self.scaler}
        return parts | ({"ema": self.ema} if self.ema is not None else {})


class Log:
    """A line for each epoch: on the terminal, in log.jsonl, and in TensorBoard where that is installed."""

    def __init__(self, out: Path) -> None:
        self.file = (out / "log.jsonl").open("a")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.tensorboard = None
        else:
            self.tensorboard = SummaryWriter(out)

    def write(self, epoch: int, figures: dict[str, float]) -> None:
        print(f"epoch {epoch:3d}: " + ", ".join(f"{name} {value:,.4g}" for name, value in figures.items()), flush=True)
        self.file.write(json.dumps({"epoch": epoch, **figures}) + "\n")
        self.file.flush()
        if self.tensorboard is not None:
            for name, value in figures.items():
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
    while trainer.epoch < args.epochs and not trainer.is_over:
        start_epoch(trainer.train_loader, trainer.epoch)
        figures = trainer.train()
        if trainer.step == trainer.steps:
            figures |= trainer.validate() if trainer.val_loader is not None else {}
            trainer.epoch, trainer.step = trainer.epoch + 1, 0
            if log is not None:
                log.write(trainer.epoch, figures)
            if figures.get("top1", 0.0) > trainer.best:
                trainer.best = figures["top1"]
                trainer.save("best.pt")
        trainer.save("last.pt")
    if world.is_first and trainer.epoch < args.epochs:
        print(f"--max-steps {args.max_steps}: saved after {trainer.step} steps of epoch {trainer.epoch + 1}")
    elif world.is_first and not trainer.steps_done:
        print(f"{args.out / 'last.pt'}: all of its {trainer.epoch} epochs are done. More --epochs go on")
    if world.size > 1:
        dist.destroy_process_group()


def start_epoch(loader: Any, epoch: int) -> None:
    """Tell the sampler of torch's loader; the others count by themselves."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        sampler.set_epoch(epoch)


if __name__ == "__main__":
    main()
