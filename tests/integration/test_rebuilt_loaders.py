"""Libraries build a loader anew, from its attributes or its signature, with a sampler of theirs. What they get works,
and is set as the one that they were given."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ProxyServer, World

from .roads import picture_folder, picture_pipeline, read_bytes

TRANSFORM = transforms.Compose([transforms.RandomCrop(64), transforms.Resize(32), transforms.ToTensor()])
OURS = {
    "device": "cpu",
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
    "seed": 7,
    "on_error": "skip",
    "check_scans": False,
    "translate": False,
    "prefetch": 3,
    "num_threads": 2,
    "hw_decoder_load": 0.5,
}


def public_attributes(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def by_all_attributes(loader: Any) -> Any:
    """As ignite does, for a batch sampler that it can set back."""
    given = public_attributes(loader)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
        del given[name]
    return type(loader)(**given, batch_sampler=BatchSampler(loader.sampler, loader.batch_size, loader.drop_last))


def by_what_is_not_default(loader: Any) -> Any:
    """As Lightning does, for a sampler that deals samples out to processes."""
    attributes = public_attributes(loader) | {"multiprocessing_context": loader.multiprocessing_context}
    arguments = inspect.signature(type(loader)).parameters
    given = {name: value for name, value in attributes.items() if value is not arguments[name].default}
    return type(loader)(**given | {"sampler": loader.sampler, "batch_sampler": None, "shuffle": False})


def by_the_arguments(loader: Any) -> Any:
    """Whatever the constructor takes and the loader has."""
    names = set(inspect.signature(type(loader)).parameters) - {"batch_sampler"}
    return type(loader)(**{name: getattr(loader, name) for name in names if hasattr(loader, name)})


WAYS = [by_all_attributes, by_what_is_not_default, by_the_arguments]


def batches_of(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return [(images.clone(), labels.tolist()) for images, labels in loader]


def assert_equal_batches(found: list[Any], expected: list[Any]) -> None:
    assert [labels for _, labels in found] == [labels for _, labels in expected]
    assert all(torch.equal(images, others) for (images, _), (others, _) in zip(found, expected))


PLAIN = {"num_workers": 2, "prefetch_factor": 3, "drop_last": True, "in_order": True, "timeout": 30}
SHARD = {"num_shards": World(2, 1), "seed": 5, "device": "cpu"}
LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch's, used": (StockLoader, PLAIN),
    "plain, used": (DataLoader, PLAIN),
    "with options of ours": (DataLoader, OURS | {"num_workers": 2}),
    **{policy: (DataLoader, SHARD | {"last_batch_policy": policy}) for policy in ("fill", "partial", "drop")},
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_rebuilt_loader_is_set_as_the_one_before_and_gives_its_batches(photos: Path, name: str) -> None:
    kind, arguments = LOADERS[name]
    for rebuilt in WAYS:
        loader = kind(ImageFolder(str(photos), TRANSFORM), 7, shuffle=True, **arguments)
        if "used" in name:
            batches_of(loader)
        again = rebuilt(loader)
        if arguments.keys() >= OURS.keys():
            assert {option: getattr(again, option) for option in OURS} == OURS
        expected = batches_of(loader)
        if "num_shards" in arguments:
            assert sum(len(labels) for _, labels in expected) in (21, 24, 28)
            again.set_epoch(0)  # the sampler is shared
        found = batches_of(again)
        assert_equal_batches(found, expected)
        assert found[0][0].dtype == arguments.get("dtype", torch.float32)


@pytest.mark.parametrize("rebuilt", WAYS)
def test_a_rebuilt_loader_has_the_server_of_the_one_before(spelled_root: Path, rebuilt: Any) -> None:
    with ProxyServer(picture_pipeline("cpu")) as server:
        loader = DataLoader(picture_folder(spelled_root, server.proxy, read_bytes), 4, server=server)
        assert_equal_batches(batches_of(rebuilt(loader)), batches_of(loader))


def test_every_public_attribute_is_an_argument(photos: Path) -> None:
    loader = DataLoader(ImageFolder(str(photos), TRANSFORM), 16, num_workers=1, device="cpu")
    list(loader)
    assert public_attributes(loader).keys() <= inspect.signature(DataLoader).parameters.keys()
