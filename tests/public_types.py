"""What a type checker says of the public names. mypy reads this file; nothing runs it."""

from __future__ import annotations

import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from typing_extensions import assert_type

from proxyloader import DataLoader, LastBatchPolicy, LoaderStats, ProxyServer, ShardedSampler, World, explain, wrap
from proxyloader.data.bad_samples import UnreadableSamples
from proxyloader.tools.explain import Explanation


def of_a_loader(dataset: ImageFolder, server: ProxyServer) -> None:
    loader: DataLoader[tuple[torch.Tensor, torch.Tensor]] = DataLoader(
        dataset, 256, shuffle=True, num_workers=8, multiprocessing_context="spawn", last_batch_policy="drop"
    )
    assert_type(loader.errors, UnreadableSamples)
    assert_type(loader.stats(), LoaderStats)
    assert_type(loader.stats().as_dict(), dict[str, float])
    assert_type(loader.device, "str | int | torch.device | None")
    assert_type(loader.seed, "int | None")
    assert_type(loader.server, "ProxyServer | None")
    assert_type(len(loader), int)
    DataLoader(dataset, last_batch_policy=LastBatchPolicy.FILL, server=server)
    DataLoader(dataset, on_error="ignore")  # type: ignore[arg-type]
    DataLoader(dataset, server="a server")  # type: ignore[arg-type]
    DataLoader(dataset, shufle=True)  # type: ignore[arg-type]


def of_the_rest(dataset: ImageFolder, transform: transforms.Compose) -> None:
    assert_type(len(wrap(dataset)), int)
    assert_type(explain(transform), Explanation)
    assert_type(World.current().num_shards, int)
    assert_type(len(ShardedSampler(dataset, 2, 0)), int)
