"""A script for torchrun: loads its share of a folder and prints one line of JSON. It sets no device.

With a second argument, it loads until process 1 kills itself.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader


class Numbered(ImageFolder):
    """The index comes in the place of the class."""

    def __getitem__(self, index: int) -> tuple[object, int]:
        return super().__getitem__(index)[0], index


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = Numbered(sys.argv[1], transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()]))
    sampler: DistributedSampler[object] = DistributedSampler(dataset, ranks, rank, shuffle=True, seed=3)
    device = None if torch.cuda.is_available() else "cpu"
    loader = DataLoader(dataset, 5, sampler=sampler, num_workers=1, device=device)
    if sys.argv[2:]:
        dist.init_process_group("gloo")
        for step, _ in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
            if rank == 1 and step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [(images, indices.tolist()) for images, indices in loader]
        epochs.append([index for _, indices in batches for index in indices])
        devices = sorted({str(images.device) for images, _ in batches})
    sharded = DataLoader(dataset, 5, shuffle=True, num_shards="auto", last_batch_policy="fill", device=device)
    shards = [[indices.tolist() for _, indices in sharded] for _ in range(2)]
    others = [k for k in range(torch.cuda.device_count()) if k != int(os.environ["LOCAL_RANK"])]
    touched = [k for k in others if torch._C._cuda_hasPrimaryContext(k)]
    told = {"rank": rank, "epochs": epochs, "shards": shards, "devices": devices, "touched": touched}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
