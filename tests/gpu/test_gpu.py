"""What only a GPU can get wrong: streams, events, memory that is used again too early, and the JPEG engine's pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader, Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader
from proxyloader.dali.build import LARGE_PIXELS, PipelineOptions
from proxyloader.dali.device import cuda_ordinal
from proxyloader.make_dataset import make_dataset

from ..compare import engines_decode

TRAIN = transforms.Compose(
    [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)
VALIDATION = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
DECODE = transforms.Compose([transforms.CenterCrop((380, 380)), transforms.PILToTensor()])


@pytest.fixture(scope="module")
def large_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 photographs of about 500 x 375."""
    return make_dataset(tmp_path_factory.mktemp("large") / "set", images=512, progress=False)


def sums(batches: Any) -> torch.Tensor:
    return torch.cat([images.double().sum((1, 2, 3)).cpu() for images, _ in batches])


@pytest.mark.parametrize("transform", [TRAIN, VALIDATION], ids=["train", "validation"])
def test_full_size_batches_are_those_of_the_stock_loader(large_photos: Path, transform: Any) -> None:
    dataset = ImageFolder(str(large_photos), transform)
    found = []
    for loader_class in (StockLoader, DataLoader):
        torch.manual_seed(2)
        loader = loader_class(dataset, 128, shuffle=True, num_workers=4)
        found.append([(images.cpu(), labels) for _ in range(2) for images, labels in loader])
    for (theirs, stock_labels), (ours, labels) in zip(*found):
        assert torch.equal(labels, stock_labels)
        difference = 255 * (ours - theirs).abs()
        assert difference.mean() <= 0.5
        assert difference.flatten().kthvalue(int(0.999 * difference.numel())).values <= (2 if engines_decode() else 3)


def test_the_jpeg_engine_is_within_one_level_of_pillow_and_cuda_within_three(large_photos: Path) -> None:
    dataset = ImageFolder(str(large_photos), DECODE)
    loaders = StockLoader(dataset, 128, num_workers=4), DataLoader(dataset, 128, num_workers=4)
    for (theirs, _), (ours, _) in zip(*loaders):
        assert (ours.cpu().int() - theirs.int()).abs().max() <= (1 if engines_decode() else 3)


@pytest.mark.alone
def test_the_engines_decode_batches_of_all_sizes_whichever_comes_first(large_photos: Path) -> None:
    dataset = ImageFolder(str(large_photos), DECODE)
    whole = torch.cat([images for images, _ in DataLoader(dataset, 128, num_workers=4)])
    for sizes in ([1, 2, 128, 1, 128, 3, 249], [3, 128, 64, 128, 128, 61]):
        batches = [each.tolist() for each in torch.arange(512).split(sizes)]
        parts = []
        for images, _ in DataLoader(dataset, batch_sampler=batches, num_workers=4):
            torch.cuda._sleep(20_000_000)  # the GPU is still busy with a batch when the pipeline is built again
            parts.append(images)
        assert torch.equal(torch.cat(parts), whole)  # CUDA's pixels are others


def test_large_photographs_are_decoded_right_by_engines_and_cuda(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "set", images=24, size=(1500, 1000), progress=False)
    dataset = ImageFolder(str(root), DECODE)
    assert sum(image.width * image.height for image, _ in ImageFolder(str(root))) / 24 >= LARGE_PIXELS
    loader = DataLoader(dataset, 8, num_workers=2)
    for (theirs, _), (ours, _) in zip(StockLoader(dataset, 8, num_workers=2), loader, strict=True):
        assert (ours.cpu().int() - theirs.int()).abs().max() <= 3
    (server,) = loader._servers.queues.values()
    wanted = PipelineOptions(8, 0).for_files_of(LARGE_PIXELS, 0.0) if engines_decode() else PipelineOptions(8, 0)
    assert server.pipeline.num_threads == wanted.threads
    decoders = [each for each in server.pipeline._ops if "hw_decoder_load" in each._op._init_args]
    assert [each._op._init_args["hw_decoder_load"] for each in decoders] == [wanted.engine_share]


def test_progressive_photographs_are_decoded_by_cuda_with_more_threads(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "set", images=48, size=(300, 200), progressive=0.5, progress=False)
    dataset = ImageFolder(str(root), DECODE)
    loader = DataLoader(dataset, 24, num_workers=2)
    for (theirs, _), (ours, _) in zip(StockLoader(dataset, 24, num_workers=2), loader, strict=True):
        assert (ours.cpu().int() - theirs.int()).abs().max() <= 3
    (server,) = loader._servers.queues.values()
    assert server.pipeline.num_threads == PipelineOptions(24, 0).for_files_of(1.0, 0.5).threads
    assert loader.stats().images_by_dali == 48


def test_batches_may_be_used_on_another_stream_by_torchs_rules(large_photos: Path) -> None:
    dataset = ImageFolder(str(large_photos), VALIDATION)
    expected = sums(DataLoader(dataset, 32, num_workers=0))
    side, found = torch.cuda.Stream(), []
    for images, _ in DataLoader(dataset, 32, num_workers=4):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            found.append(images.double().sum((1, 2, 3)))
        images.record_stream(side)
        del images
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(found).cpu(), expected)


def test_a_loop_on_a_stream_of_its_own(large_photos: Path) -> None:
    dataset = ImageFolder(str(large_photos), VALIDATION)
    expected = sums(DataLoader(dataset, 32, num_workers=0))
    with torch.cuda.stream(torch.cuda.Stream()):
        found = sums(DataLoader(dataset, 32, num_workers=4))
    assert torch.equal(found, expected)


def test_two_loaders_side_by_side(large_photos: Path) -> None:
    """They share a decoder. Leaving one of them early does not change the other."""
    datasets = [ImageFolder(str(large_photos), transform) for transform in (VALIDATION, DECODE)]
    expected = [sums(DataLoader(dataset, 64, num_workers=0)) for dataset in datasets]
    loaders = [DataLoader(dataset, 32, num_workers=2, persistent_workers=True) for dataset in datasets]
    for _ in range(2):
        pairs = list(zip(*loaders))
        assert torch.equal(sums(a for a, _ in pairs), expected[0])
        assert torch.equal(sums(b for _, b in pairs), expected[1])
        next(iter(loaders[0]))
        assert torch.equal(sums(loaders[1]), expected[1])
    first, second = (next(iter(loader._servers.queues.values())) for loader in loaders)
    assert first.pipeline is second.pipeline


@pytest.mark.parametrize("moves", ["dataset", "collate_fn"])
def test_images_may_be_moved_without_workers(large_photos: Path, moves: str) -> None:
    def move(image: Any) -> Any:
        moved = image.to("cuda")
        assert moved.is_cuda and torch.randn_like(moved).is_cuda and (moved * 2)[0].device.type == "cuda"
        return moved

    def collate(samples: Any) -> Any:
        images, labels = default_collate(samples)
        return move(images), labels

    steps = transforms.Compose([*TRAIN.transforms, move]) if moves == "dataset" else TRAIN
    dataset = Subset(ImageFolder(str(large_photos), steps), range(64))
    found = []
    for loader_class in (StockLoader, DataLoader):
        torch.manual_seed(2)
        loader = loader_class(dataset, 16, shuffle=True, collate_fn=collate if moves == "collate_fn" else None)
        found.append(
            [(images.cpu(), labels, images.device, torch.rand(1, device="cuda").item()) for images, labels in loader]
        )
    assert loader.stats().images_by_dali == 64  # type: ignore[attr-defined]
    for (theirs, *stock), (ours, *others) in zip(*found, strict=True):
        assert (ours - theirs).abs().mean() <= 0.5 / 255
        assert torch.equal(stock[0], others[0]) and stock[1:] == others[1:]


def test_decoding_on_the_cpu_can_be_asked_for_beside_a_gpu(large_photos: Path) -> None:
    dataset = ImageFolder(str(large_photos), DECODE)
    images, _ = next(iter(DataLoader(dataset, 16, device="cpu")))
    stock, _ = next(iter(StockLoader(dataset, 16)))
    assert images.device.type == "cpu" and torch.equal(images, stock)


def test_the_local_rank_counts_where_no_device_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        for rank in ("", "x", "0", "99"):
            monkeypatch.setenv(name, rank)
            assert cuda_ordinal(None) == 0
