"""A script for torchrun: loads its shard of a folder under each policy, in step with the others, and prints one line of
JSON. It also goes on from a checkpoint of rank 0.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Subset
from torchvision import transforms

from proxyloader import DataLoader, World

from .one_rank import Numbered

SAMPLES, BATCH = 47, 6


def main() -> None:
    by_environment = World.current()
    distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    world = World.current()
    assert world == by_environment
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset: Any = Subset(Numbered(sys.argv[1], transform), range(SAMPLES))

    def loader(policy: str, **arguments: Any) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_shards": "auto", "last_batch_policy": policy, "shuffle": True, "seed": 3}
        return DataLoader(dataset, BATCH, num_workers=1, device="cpu", **options | arguments)

    def step() -> None:
        distributed.all_reduce(torch.ones(1))  # which waits for all: steps that are not as many do not end

    told: dict[str, Any] = {"rank": world.shard_id, "ranks": world.num_shards}
    for policy in ("fill", "partial", "drop"):
        begun, epochs, states = loader(policy), [], []
        for _ in range(2):
            batches = []
            for _, indices in begun:
                step()
                batches.append(indices.tolist())
                states.append(begun.state_dict())
            epochs.append(batches)
        saved = [states[len(epochs[0]) + 1] if world.shard_id == 0 else None]  # after two batches of the second epoch
        distributed.broadcast_object_list(saved)
        resumed = loader(policy)
        resumed.load_state_dict(saved[0])  # type: ignore[arg-type]
        told[policy] = {"epochs": epochs, "left": [indices.tolist() for _, indices in resumed]}
    everything = loader("", num_shards=None, last_batch_policy=None, shuffle=False)
    told["unsharded"] = [index for _, indices in everything for index in indices.tolist()]
    print(json.dumps(told), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
