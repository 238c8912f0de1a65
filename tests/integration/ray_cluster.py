"""A script: a Ray cluster on this machine, whose processes load shares of a folder. Prints one line of JSON."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import ray.train.torch
from PIL import Image
from torch.utils.data import IterableDataset
from torchvision import transforms

from proxyloader import DataLoader, World

from .one_rank import Numbered

RANKS, BATCH = 2, 5
TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])


def loader_of(root: str, **arguments: Any) -> Any:
    dataset = Numbered(root, TRANSFORM)
    return DataLoader(dataset, BATCH, shuffle=True, seed=3, num_workers=1, device="cpu", **arguments)


@ray.remote
class Rank:
    """A process that is asked for its batches, and goes on from a state."""

    def __init__(self, root: str, rank: int, ranks: int, state: Any = None) -> None:
        self.loader = loader_of(root, num_shards=World(ranks, rank))
        if state is not None:
            self.loader.load_state_dict(state)
        self.batches = iter(self.loader)

    def take(self, batches: int | None = None) -> list[int]:
        return numbers_of(itertools.islice(self.batches, batches))

    def state(self) -> Any:
        return self.loader.state_dict()


def killed_and_restarted(root: str) -> dict[str, Any]:
    """One of two actors is killed in mid-epoch. A new one takes its place, or three take the place of both."""
    ranks = [Rank.remote(root, rank, RANKS) for rank in range(RANKS)]
    before = ray.get([rank.take.remote(2) for rank in ranks])
    states = ray.get([rank.state.remote() for rank in ranks])
    ray.kill(ranks[1])
    anew = Rank.remote(root, 1, RANKS, states[1])
    after = ray.get([ranks[0].take.remote(), anew.take.remote()])
    others = [Rank.remote(root, rank, 3, states[0]) for rank in range(3)]
    by_three = ray.get([rank.take.remote() for rank in others])
    for rank in (ranks[0], anew, *others):
        ray.kill(rank)
    return {"before": before, "after": after, "by_three": by_three}


class Rows(IterableDataset[Any]):
    """The rows of a shard of Ray Data, which hold the bytes of a file and its path."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        for row in self.shard.iter_rows():
            image = Image.open(io.BytesIO(row["bytes"])).convert("RGB")
            yield TRANSFORM(image), Path(row["path"]).name


def train(config: dict[str, Any]) -> None:
    """In a process of Ray Train."""
    rank = ray.train.get_context().get_world_rank()
    loader = loader_of(config["root"], num_shards="auto")
    prepared = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False)
    rows = DataLoader(Rows(ray.train.get_dataset_shard("train")), BATCH, device="cpu")
    told = {
        "epochs": [numbers_of(prepared) for _ in range(2)],
        "names": [name for _, names in rows for name in names],
        "backends": [loader.backend, rows.backend],
    }
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(told))
    ray.train.report({})


def trained(root: str, folder: str) -> list[Any]:
    paths = [str(path) for path in sorted(Path(root).rglob("*.jpg"))]
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"root": root, "folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(storage_path=folder),
        datasets={"train": ray.data.read_binary_files(paths, include_paths=True)},
    )
    trainer.fit()
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def numbers_of(batches: Any) -> list[int]:
    return [number for _, numbers in batches for number in numbers.tolist()]


def main(root: str, folder: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    told = {"actors": killed_and_restarted(root), "train": trained(root, folder)}
    ray.shutdown()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
