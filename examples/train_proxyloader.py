"""Train an image classifier from scratch on folders of images, on one GPU or on a CPU.

train_torchvision.py and train_proxyloader.py are one script before and after the swap. They differ in one line, the
import of DataLoader:

    diff examples/train_torchvision.py examples/train_proxyloader.py

It reads DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, as ImageNet is kept. To have something to train on:

    proxyloader make-dataset data/train --images 2000
    proxyloader make-dataset data/val --images 400 --seed 1

Launch it, either of the two:

    SCRIPT=examples/train_proxyloader.py

    # without a GPU: a small net, small images
    python $SCRIPT data --arch resnet18 --size 64 --epochs 10 --workers 2
    # one GPU
    python $SCRIPT data --epochs 90 --batch-size 256 --workers 8 --lr 0.1 --amp bfloat16 --channels-last
    # it was stopped: the same line again, and
    python $SCRIPT data --epochs 90 --batch-size 256 --workers 8 --lr 0.1 --amp bfloat16 --channels-last --resume
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models, transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

# isort: split
from proxyloader import DataLoader

ARCHS = models.list_models(module=models)
AMP = {"off": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of ImageNet
BAR = {"unit": " images", "leave": False, "disable": None}  # None: no bar where the output is no terminal


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every option with its default."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, help="folder with train/ and val/, each with one folder of images for a class")
    option("--arch", choices=ARCHS, default="resnet50", metavar="NAME", help="of torchvision; --arch ? lists them")
    option("--epochs", type=int, default=10, help="times through the training images; the learning rate ends near 0")
    option("--batch-size", type=int, default=64, help="images in a step; as many as the GPU's memory takes")
    option("--workers", type=int, default=4, help="processes that fetch images; 0 fetches them between the steps")
    option("--lr", type=float, default=0.025, help="highest learning rate; 0.1 is usual for a batch of 256")
    option("--size", type=int, default=224, help="side of the square that the model sees, in pixels")
    option("--amp", choices=AMP, default="off", help="half precision: bfloat16 from Ampere on, float16 on older GPUs")
    option("--channels-last", action="store_true", help="NHWC memory: faster convolutions with --amp on a GPU")
    option("--resume", action="store_true", help="go on behind the last epoch of OUT/last.pt")
    option("--out", type=Path, default=Path("runs/train"), help="folder for last.pt and best.pt, the checkpoints")
    option("--seed", type=int, default=0, help="decides the first weights, the order of the images and their crops")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch_size": 1, "workers": 0, "size": 1, "lr": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} is {least} or more; got {getattr(args, name)}")
    return args


def load_data(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Batches of (N, 3, size, size) float32 images and (N,) int64 labels, for training and for validation."""
    for folder in (args.data / "train", args.data / "val"):
        if not folder.is_dir():
            sys.exit(f"{folder}: no such folder. `proxyloader make-dataset {folder}` makes one to try with")
    augment = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip()]
    center = [transforms.Resize(args.size * 256 // 224), transforms.CenterCrop(args.size)]
    try:
        train_set = ImageFolder(args.data / "train", transforms.Compose([*augment, transforms.ToTensor(), NORMALIZE]))
        val_set = ImageFolder(args.data / "val", transforms.Compose([*center, transforms.ToTensor(), NORMALIZE]))
    except FileNotFoundError as error:
        sys.exit(f"{args.data}: train/ and val/ are to hold a folder of images for each class, and none empty: {error}")
    if train_set.classes != val_set.classes:
        sys.exit(f"{args.data}: train/ and val/ hold other classes: {set(train_set.classes) ^ set(val_set.classes)}")
    if len(train_set) < args.batch_size:
        sys.exit(f"{args.data / 'train'}: {len(train_set)} images are less than one batch. Lower --batch-size")
    workers: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0, "pin_memory": True}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **workers)
    return train_loader, DataLoader(val_set, args.batch_size, **workers)


class Trainer:
    """A model and all that changes while it learns."""

    def __init__(self, args: argparse.Namespace, classes: int, steps_per_epoch: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.layout = torch.channels_last if args.channels_last else torch.preserve_format
        self.amp = AMP[args.amp]
        model = models.get_model(args.arch, num_classes=classes)
        self.model = model.to(self.device, memory_format=self.layout)
        self.optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
        total, warmup = args.epochs * steps_per_epoch, min(5, args.epochs / 5) * steps_per_epoch
        # A function is not in the scheduler's state, so a run can be resumed with more epochs.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / total))
        )
        # torch begins with 65536, which overflows in the first step; the scheduler warns of a step left out.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0, enabled=self.amp is torch.float16)
        self.arch, self.epoch, self.best = args.arch, 0, 0.0

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            output = self.model(images)
        return getattr(output, "logits", output).float()  # Inception and GoogLeNet return their side heads too

    def train(self, loader: DataLoader, title: str) -> tuple[float, float]:
        """One epoch; returns the mean loss and images per second."""
        self.model.train()
        start, total = time.perf_counter(), torch.zeros((), device=self.device)
        with tqdm(total=len(loader) * loader.batch_size, desc=title, **BAR) as bar:
            for step, (images, labels) in enumerate(loader, 1):
                images = images.to(self.device, non_blocking=True, memory_format=self.layout)
                labels = labels.to(self.device, non_blocking=True)
                loss = nn.functional.cross_entropy(self.forward(images), labels)
                self.optimizer.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                total += loss.detach()
                if step % 10 == 1:  # reading the loss waits for the GPU
                    bar.set_postfix(loss=f"{total.item() / step:.3f}", refresh=False)
                bar.update(len(images))
        mean = total.item() / len(loader)  # waits for the GPU, so the clock is read after it
        return mean, bar.total / (time.perf_counter() - start)

    @torch.inference_mode()
    def validate(self, loader: DataLoader, title: str) -> tuple[float, float]:
        """Top-1 and top-5 accuracy in percent."""
        self.model.eval()
        hits = torch.zeros(5, device=self.device)
        with tqdm(total=len(loader.dataset), desc=title, **BAR) as bar:
            for images, labels in loader:
                images = images.to(self.device, non_blocking=True, memory_format=self.layout)
                labels = labels.to(self.device, non_blocking=True)
                logits = self.forward(images)
                ranked = logits.topk(min(5, logits.shape[1])).indices
                hits[: ranked.shape[1]] += (ranked == labels.unsqueeze(1)).sum(0)
                bar.update(len(images))
        hits *= 100 / len(loader.dataset)
        return hits[0].item(), hits.sum().item()

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler", "scaler")}
        return parts | {"arch": self.arch, "epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.epoch, self.best = state["epoch"], state["best"]


def save(state: dict[str, Any], path: Path) -> None:
    """All or nothing: a run that is killed here leaves the checkpoint of the epoch before."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def checkpoint(path: Path, arch: str, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        saved = state["arch"]
    except Exception as error:  # torch has many for what it cannot read
        sys.exit(
            f"{path} is damaged, or no checkpoint of this script ({type(error).__name__}). Begin anew, without --resume"
        )
    if saved != arch:
        sys.exit(f"{path} is of a {saved}: give --arch {saved}, or another --out")
    return state


def main() -> None:
    args = parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    train_loader, val_loader = load_data(args)
    images, classes = len(train_loader.dataset), len(train_loader.dataset.classes)
    trainer = Trainer(args, classes, len(train_loader))
    print(f"{args.arch} on {trainer.device}, {images} images of {classes} classes", flush=True)
    last = args.out / "last.pt"
    if args.resume:
        if not last.is_file():
            sys.exit(f"{last}: no checkpoint to resume from. Without --resume, one is begun")
        trainer.load_state_dict(checkpoint(last, args.arch, trainer.device))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {args.out} cannot be a folder: {error.strerror}")
    for epoch in range(trainer.epoch + 1, args.epochs + 1):
        torch.manual_seed(args.seed + epoch)  # so a resumed run shuffles as one that was never stopped
        title = f"epoch {epoch}/{args.epochs}"
        loss, rate = trainer.train(train_loader, title)
        top1, top5 = trainer.validate(val_loader, f"{title} validation")
        print(f"{title}: loss {loss:.4f}, {rate:.0f} images/s, top-1 {top1:.2f} %, top-5 {top5:.2f} %", flush=True)
        trainer.epoch, trainer.best = epoch, max(top1, trainer.best)
        save(trainer.state_dict(), last)
        if top1 == trainer.best:
            save(trainer.state_dict(), args.out / "best.pt")
    print(f"best top-1 {trainer.best:.2f} % in {trainer.epoch} epochs; checkpoints in {args.out}")


if __name__ == "__main__":
    main()
