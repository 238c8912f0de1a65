"""Train an image classifier from scratch on folders of images, on one GPU or on a CPU.

train_torchvision.py and train_proxyloader.py are the same script before and after the switch. They differ only in the
import of DataLoader:

    diff examples/train_torchvision.py examples/train_proxyloader.py

The images are in DATA/train/CLASS/ and DATA/val/CLASS/, the layout of ImageNet. To create synthetic ones:

    proxyloader make-dataset data/train --images 2000
    proxyloader make-dataset data/val --images 400 --seed 1

Usage, with either script:

    SCRIPT=examples/train_proxyloader.py

    # without a GPU: a small network and small images
    python $SCRIPT data --arch resnet18 --size 64 --epochs 10 --workers 2
    # one GPU
    python $SCRIPT data --epochs 90 --batch-size 256 --workers 8 --lr 0.1 --amp bfloat16 --channels-last
    # resume after an interruption
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
BAR = {"unit": " images", "leave": False, "disable": None}  # None: no bar unless the output is a terminal


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the docstring as it is, and the default of each option."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    option = parser.add_argument
    option("data", type=Path, help="folder with train/ and val/, each with one subfolder of images per class")
    option("--arch", choices=ARCHS, default="resnet50", metavar="NAME", help="torchvision model; --arch ? lists them")
    option("--epochs", type=int, default=10, help="number of epochs, over which the learning rate decays to 0")
    option("--batch-size", type=int, default=64, help="images per step, limited by the GPU's memory")
    option("--workers", type=int, default=4, help="worker processes; 0: load in the main process")
    option("--lr", type=float, default=0.025, help="peak learning rate; 0.1 is common for a batch size of 256")
    option("--size", type=int, default=224, help="height and width of the model's input, in pixels")
    option("--amp", choices=AMP, default="off", help="mixed precision: bfloat16 since Ampere, float16 on older GPUs")
    option("--channels-last", action="store_true", help="NHWC memory format: faster convolutions with --amp on a GPU")
    option("--resume", action="store_true", help="continue after the last epoch of OUT/last.pt")
    option("--out", type=Path, default=Path("runs/train"), help="folder for the checkpoints last.pt and best.pt")
    option("--seed", type=int, default=0, help="seed of the initial weights, the order and the crops")
    args = parser.parse_args()
    for name, least in {"epochs": 1, "batch_size": 1, "workers": 0, "size": 1, "lr": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def load_data(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of training and validation batches: (N, 3, size, size) float32 images, (N,) int64 labels."""
    for folder in (args.data / "train", args.data / "val"):
        if not folder.is_dir():
            sys.exit(f"{folder}: no such folder. `proxyloader make-dataset {folder}` creates one with synthetic images")
    augment = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip()]
    center = [transforms.Resize(args.size * 256 // 224), transforms.CenterCrop(args.size)]
    try:
        train_set = ImageFolder(args.data / "train", transforms.Compose([*augment, transforms.ToTensor(), NORMALIZE]))
        val_set = ImageFolder(args.data / "val", transforms.Compose([*center, transforms.ToTensor(), NORMALIZE]))
    except FileNotFoundError as error:
        sys.exit(f"{args.data}: train/ and val/ must contain one folder of images per class, none empty: {error}")
    if train_set.classes != val_set.classes:
        sys.exit(f"{args.data}: train/ and val/ differ in classes: {set(train_set.classes) ^ set(val_set.classes)}")
    if len(train_set) < args.batch_size:
        sys.exit(f"{args.data / 'train'}: {len(train_set)} images are fewer than one batch. Lower --batch-size")
    workers: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0, "pin_memory": True}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **workers)
    return train_loader, DataLoader(val_set, args.batch_size, **workers)


class Trainer:
    """The model and the rest of the training state."""

    def __init__(self, args: argparse.Namespace, classes: int, steps_per_epoch: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.layout = torch.channels_last if args.channels_last else torch.preserve_format
        self.amp = AMP[args.amp]
        model = models.get_model(args.arch, num_classes=classes)
        self.model = model.to(self.device, memory_format=self.layout)
        self.optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
        total, warmup = args.epochs * steps_per_epoch, min(5, args.epochs / 5) * steps_per_epoch
        # The scheduler's state does not include the function, so a run can be resumed with more epochs.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / total))
        )
        # The default of 65536 overflows in the first step, and the scheduler warns about skipped steps.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0, enabled=self.amp is torch.float16)
        self.arch, self.epoch, self.best = args.arch, 0, 0.0

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.amp, enabled=self.amp is not None):
            output = self.model(images)
        return getattr(output, "logits", output).float()  # Inception and GoogLeNet also return auxiliary outputs

    def train(self, loader: DataLoader, title: str) -> tuple[float, float]:
        """Train for one epoch. Return the mean loss and the images per second."""
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
                if step % 10 == 1:  # item() waits for the GPU
                    bar.set_postfix(loss=f"{total.item() / step:.3f}", refresh=False)
                bar.update(len(images))
        mean = total.item() / len(loader)  # waits for the GPU, so measure the time afterwards
        return mean, bar.total / (time.perf_counter() - start)

    @torch.inference_mode()
    def validate(self, loader: DataLoader, title: str) -> tuple[float, float]:
        """Return the top-1 and top-5 accuracy in percent."""
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
    """Save atomically, so that an interrupted run keeps the previous checkpoint."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: Path, arch: str, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        saved = state["arch"]
    except Exception as error:  # torch.load raises various exceptions
        sys.exit(f"{path} is not an intact checkpoint of this script ({type(error).__name__}). Remove --resume")
    if saved != arch:
        sys.exit(f"{path} is a checkpoint of {saved}. Pass --arch {saved} or a different --out")
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
            sys.exit(f"{last}: no checkpoint to resume from. Remove --resume to start a new run")
        trainer.load_state_dict(load_checkpoint(last, args.arch, trainer.device))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {args.out}: cannot create the folder: {error.strerror}")
    for epoch in range(trainer.epoch + 1, args.epochs + 1):
        torch.manual_seed(args.seed + epoch)  # so that a resumed run shuffles like an uninterrupted one
        title = f"epoch {epoch}/{args.epochs}"
        loss, rate = trainer.train(train_loader, title)
        top1, top5 = trainer.validate(val_loader, f"{title} validation")
        print(f"{title}: loss {loss:.4f}, {rate:.0f} images/s, top-1 {top1:.2f} %, top-5 {top5:.2f} %", flush=True)
        trainer.epoch, trainer.best = epoch, max(top1, trainer.best)
        save(trainer.state_dict(), last)
        if top1 == trainer.best:
            save(trainer.state_dict(), args.out / "best.pt")
    print(f"best top-1 {trainer.best:.2f} % in {trainer.epoch} epochs, checkpoints in {args.out}")


if __name__ == "__main__":
    main()
