"""Random augmentation is the same in every run, at no cost in speed; and batches stay what they are when kept."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import ProxyServer

from .observed import Counted, runs_under_way, wait_until_read
from .roads import BATCH, PICTURES, Road, assert_batches_match, assert_pictures_match

FLIPPED = transforms.Compose([transforms.Resize((32, 32)), transforms.RandomVerticalFlip(), transforms.ToTensor()])


class Jittered(ImageFolder):
    """Takes a different time for each picture, so that workers overtake each other."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(index * 37 % 5 / 1000)
        return super().__getitem__(index)


def dimmed_pipeline(device: str) -> Any:
    """Decodes, and makes each picture darker by a random factor that leaves it legible."""
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = device == "cuda"

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=0 if on_gpu else None, seed=11, exec_dynamic=True)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
        images = fn.resize(images, size=[32, 32]) * fn.random.uniform(range=[0.7, 1.0])
        return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=[0.0], std=[255.0])

    return graph()


def augmented(
    name: str, root: Path, device: str, deterministic: bool, kind: type[ImageFolder], **arguments: Any
) -> list[torch.Tensor]:
    """Two epochs of randomly augmented pictures, each checked, from a pipeline and a seed that are new."""
    with Road(name, root, device) as road:
        if road.server is not None:
            road.server = ProxyServer(dimmed_pipeline(device), deterministic)
        dataset = road.dataset(kind)
        if name == "compiled":
            dataset.transform = FLIPPED
        torch.manual_seed(23)
        loader = road.loader(dataset, **arguments)
        found = []
        for _ in range(2):
            batches = list(loader)
            assert torch.cat([numbers for _, numbers in batches]).tolist() == list(range(PICTURES))
            if name != "compiled":
                assert_batches_match(batches)
            found += [images.cpu() for images, _ in batches]
        return found


@functools.cache
def expected(name: str, root: Path, device: str) -> list[torch.Tensor]:
    """Without workers; or, where workers draw and so their number counts, with forked ones that do not overtake."""
    workers = dict(num_workers=2, persistent_workers=True) if name == "compiled" else {}
    return augmented(name, root, device, False, ImageFolder, **workers)


def assert_repeated(name: str, root: Path, device: str, deterministic: bool, start_method: str) -> None:
    found = augmented(
        name,
        root,
        device,
        deterministic,
        Jittered,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    first, again = expected(name, root, device), found
    assert len(first) == len(again) and all(map(torch.equal, first, again))
    epochs = torch.cat(found[: len(found) // 2]), torch.cat(found[len(found) // 2 :])
    assert not torch.equal(*epochs), "nothing random happened"


@pytest.mark.parametrize("name", ["server", "produced"])
def test_a_deterministic_server_repeats_its_random_augmentation_whatever_workers_do(
    name: str, start_method: str, spelled_root: Path, device: str
) -> None:
    assert_repeated(name, spelled_root, device, True, start_method)


@pytest.mark.parametrize("name", ["compiled", "server", "produced"])
def test_random_augmentation_repeats_itself_without_being_asked_to(
    name: str, start_method: str, spelled_root: Path, device: str
) -> None:
    assert_repeated(name, spelled_root, device, False, start_method)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", ""])
def test_a_deterministic_server_decodes_nothing_ahead_and_any_other_does(
    deterministic: bool, start_method: str, spelled_root: Path, device: str, tmp_path: Path
) -> None:
    with Road("server", spelled_root, device, deterministic=deterministic) as road:
        dataset = road.dataset(Counted)
        dataset.log = str(tmp_path / "read")
        loader = road.loader(
            dataset, num_workers=1, prefetch_factor=8, prefetch=3, multiprocessing_context=start_method
        )
        under_way = []
        for at, (images, numbers) in enumerate(loader):
            assert_pictures_match(images, numbers)
            under_way.append(runs_under_way(road, loader))
            wait_until_read(tmp_path / "read", min(BATCH * (at + 8), PICTURES))
        # After the first, all but the last three find three more batches under way.
        assert under_way[1:] == ([0] * 11 if deterministic else [3] * 8 + [2, 1, 0])


ROADS_AND_EXECUTORS: dict[str, Callable[[Path, str], Road]] = {
    "compiled": functools.partial(Road, "compiled"),
    "server": functools.partial(Road, "server"),
    "produced": functools.partial(Road, "produced"),
    "server, old executor": functools.partial(Road, "server", exec_dynamic=False),
    "produced, old executor": functools.partial(Road, "produced", exec_dynamic=False),
}


@pytest.mark.parametrize("kind", ROADS_AND_EXECUTORS)
def test_batches_kept_to_the_end_of_a_run_stay_what_they_were(kind: str, spelled_root: Path, device: str) -> None:
    with ROADS_AND_EXECUTORS[kind](spelled_root, device) as road:
        loader = road.loader(num_workers=2, persistent_workers=True)
        kept = [batch for _ in range(4) for batch in loader]
        assert_batches_match(kept, list(range(PICTURES)) * 4)
