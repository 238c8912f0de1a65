"""A script: trainers of two processes, which are forked when these are imported. Each prints one line of JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import distributed
from torch.utils.data import DistributedSampler

import proxyloader

from ..side_by_side import assert_same
from .test_trainers import KINDS, OURS, Net, lightning_module, lightning_trainer, loader_of, loss_of


def main() -> None:
    gc.freeze()  # else each process looks at all that is imported when it ends
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            of_rank(rank)
            return
    assert [os.waitpid(each, 0)[1] for each in ranks] == [0, 0]


def of_rank(rank: int) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "", "MASTER_PORT": ""}  # by which Lightning knows it
    distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
    cases = {"lightning": by_lightning, "fabric": by_fabric, "FSDP2": by_fsdp}
    told: dict[str, Any] = {"rank": rank, "num_shards": by_lightning(OURS, num_shards="auto", seed=5)[0]}
    with pytest.raises(ValueError, match="use_distributed_sampler=False"):
        lightning_trainer(lightning, max_epochs=1, devices=2, strategy="ddp").fit(
            lightning_module(lightning), loader_of(OURS, Path(sys.argv[2]), num_shards="auto")
        )
    for name in sys.argv[3:]:
        theirs, ours = (cases[name](kind) for kind in KINDS)
        assert_same(ours[1:], theirs[1:], name)
        told[name] = ours[0]
        assert ours[0] == theirs[0]
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once, as both write to one pipe
    distributed.destroy_process_group()


def by_lightning(kind: Any, **options: Any) -> Any:
    """The samples of two epochs, and the images."""
    lightning.seed_everything(4)
    module = lightning_module(lightning)
    trainer = lightning_trainer(lightning, max_epochs=2, devices=2, strategy="ddp", use_distributed_sampler=not options)
    trainer.fit(module, loader_of(kind, Path(sys.argv[2]), **options))
    assert isinstance(trainer.train_dataloader, proxyloader.DataLoader) == (kind is OURS)
    return [list(chain(*module.numbers[k : k + 3])) for k in (0, 3)], module.net.seen


def by_fabric(kind: Any) -> Any:
    torch.manual_seed(4)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = Net()
    module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = fabric.setup_dataloaders(loader_of(kind, Path(sys.argv[2])))
    return epochs_of(module, optimizer, loader, fabric.backward), net.seen


def by_fsdp(kind: Any) -> Any:
    """A plain loop with a DistributedSampler."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(4)
    sampler: Any = DistributedSampler(range(48), shuffle=True)  # type: ignore[arg-type]
    net = Net()
    fully_shard(net.layers)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = loader_of(kind, Path(sys.argv[2]), shuffle=None, sampler=sampler)
    return epochs_of(net, optimizer, loader, torch.Tensor.backward), net.seen


def epochs_of(net: Any, optimizer: Any, loader: Any, backward: Any) -> list[list[int]]:
    epochs: list[list[int]] = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for images, numbers in loader:
            backward(loss_of(net(images), numbers))
            optimizer.step()
            optimizer.zero_grad()
            epochs[-1] += numbers.tolist()
    return epochs
