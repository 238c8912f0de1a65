"""The audit: right pictures raise no alarm, wrong ones do, and batches are the same with and without it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import IterableDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from proxyloader import Audit, AuditError, DataLoader, ProxyServer, compile_transforms
from proxyloader.dali.plan_server import PlanServer
from proxyloader.loader.audit import MOST_SAVED

from ..integration.roads import next_error, picture_folder, picture_pipeline, read_bytes
from ..integration.test_same_batches import DECODE, MEAN, STD, TRAIN, TRAIN_V2, VALIDATION
from ..reference_presets import PRESETS, Eval, Train

COMPARED = re.compile(r"audit: ([\d,]+) images compared so far, ([\d,]+) beyond their bound")


@pytest.fixture(autouse=True)
def log_of_the_package(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "proxyloader"):
        yield


def counts(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int]]:
    """(images compared, images beyond their bound) of each line that tells."""
    found = (COMPARED.search(record.getMessage()) for record in caplog.records)
    return [(int(each[1].replace(",", "")), int(each[2].replace(",", ""))) for each in found if each]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def epochs_of(loader: Any, epochs: int = 1) -> list[Any]:
    torch.manual_seed(5)
    return [(images.cpu().clone(), labels.tolist()) for _ in range(epochs) for images, labels in loader]


# --- right pictures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "start"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.exhaustive)]
)
def test_batches_are_the_same_with_and_without_an_audit(
    folder: ImageFolder, workers: int, start: str | None, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.transform = TRAIN
    how: dict[str, Any] = dict(shuffle=True, num_workers=workers, multiprocessing_context=start, device=device)
    how["persistent_workers"] = workers > 0
    without = epochs_of(DataLoader(folder, 10, **how), 2)
    audited = epochs_of(DataLoader(folder, 10, **how, audit=Audit(1.0, "raise")), 2)
    assert [labels for _, labels in audited] == [labels for _, labels in without]
    assert all(torch.equal(images, others) for (images, _), (others, _) in zip(audited, without))
    assert counts(caplog) == [(48, 0)]
    assert warnings_in(caplog) == []


FIRST_FOUR = [TRAIN, VALIDATION, TRAIN_V2, DECODE]
OTHERS = [
    transforms.Compose([transforms.Grayscale(1), transforms.Resize(72), transforms.ToTensor()]),
    v2.Compose([v2.RandomResizedCrop(150), v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize([99.0], [50.0])]),
    transforms.Compose([transforms.Resize(64), transforms.RandomPerspective(0.5, 1), transforms.ToTensor()]),
    Train(auto_augment="ra", random_erase=0.5),
    Eval(use_v2=True),
]


def the_rest_of(presets: list[Any]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.exhaustive) for each in presets if each not in OTHERS]


@pytest.mark.parametrize("transform", [*FIRST_FOUR, *OTHERS, *the_rest_of(PRESETS)], ids=str)
def test_right_pictures_raise_no_alarm(
    folder: ImageFolder, transform: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.transform = compile_transforms(transform)  # DALI does it on a CPU, too, where torchvision is faster
    loader = DataLoader(folder, 16, device=device, audit=Audit(1.0, "raise"), collate_fn=list)
    assert sum(map(len, loader)) == 48
    assert counts(caplog) == [(48, 0)]


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [(torch.float16, torch.channels_last), (torch.bfloat16, torch.contiguous_format)],
    ids=["float16, channels last", "bfloat16"],
)
def test_images_are_compared_in_the_format_of_the_loader(
    folder: ImageFolder, dtype: Any, memory_format: Any, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.transform = TRAIN
    loader = DataLoader(folder, 24, device=device, dtype=dtype, memory_format=memory_format, audit=1.0)
    assert all(images.dtype == dtype for images, _ in loader)
    assert counts(caplog) == [(48, 0)]


def test_all_images_of_one_are_compared(folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder.transform = v2.Compose([v2.FiveCrop(48), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    loader = DataLoader(folder, 48, device="cpu", audit=Audit(1.0, "raise", tmp_path))
    next(iter(loader))
    plant(monkeypatch, channels_swapped, output=4)
    with pytest.raises(AuditError, match=re.escape("dataset[0]")):
        next(iter(loader))


# --- wrong pictures --------------------------------------------------------------------------------------------------


def of_another_sample(images: torch.Tensor) -> torch.Tensor:
    return images.roll(1, 0)


def lower_half_grey(images: torch.Tensor) -> torch.Tensor:
    made = images.clone()
    made[..., images.shape[-2] // 2 :, :] = images.float().mean().to(images.dtype)
    return made


def shifted_by_8_rows(images: torch.Tensor) -> torch.Tensor:
    return images.roll(8, -2)


def channels_swapped(images: torch.Tensor) -> torch.Tensor:
    return images.flip(1)


def a_stripe_of_another(images: torch.Tensor) -> torch.Tensor:
    """Two rows of pixels, as of a damaged file."""
    made = images.clone()
    made[..., 40:42, :] = images.roll(1, 0)[..., 40:42, :]
    return made


def not_numbers(images: torch.Tensor) -> torch.Tensor:
    return images * float("nan")


FAULTS = [of_another_sample, lower_half_grey, shifted_by_8_rows, channels_swapped, a_stripe_of_another, not_numbers]


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[torch.Tensor], torch.Tensor], output: int = 0) -> None:
    """Have DALI's pictures be wrong from now on."""
    collect = PlanServer.collect

    def collected(server: PlanServer, run: Any) -> Any:
        found = collect(server, run)
        found[output] = fault(found[output])
        return found

    monkeypatch.setattr(PlanServer, "collect", collected)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("transform", [TRAIN, VALIDATION], ids=["train", "validation"])
def test_wrong_pictures_are_found(
    folder: ImageFolder,
    fault: Any,
    transform: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder.transform = transform
    plant(monkeypatch, fault)
    list(DataLoader(folder, 16, device="cpu", audit=Audit(1.0, folder=tmp_path)))
    assert counts(caplog) == [(48, 48)]
    *told, _ = warnings_in(caplog)
    assert len(told) == len(list(tmp_path.iterdir())) == MOST_SAVED
    assert told[-1].endswith(f"{MOST_SAVED} were saved; the next ones are only counted")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_alarm_stops_the_loop_at_its_batch_with_both_pictures_saved(
    folder: ImageFolder, workers: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder.transform = VALIDATION
    plant(monkeypatch, shifted_by_8_rows)
    loader = DataLoader(
        folder, 4, num_workers=workers, device=device, audit=Audit(1.0, "raise", tmp_path), sampler=[9, 8, 7, 6, 5, 4]
    )
    batches = iter(loader)
    error = next_error(batches)
    assert isinstance(error, AuditError)
    assert (error.code, error.index, error.path) == ("audit", 9, folder.samples[9][0])
    assert re.search(r"dataset\[9\] \(.*\): .* differs from the stock loader's by [\d.]+ in the mean", str(error))
    (images, _) = next(iter(StockLoader(folder, sampler=[9])))
    stock = (images[0] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)) * 255
    pictures = {path.name: np.asarray(Image.open(path)) for path in Path(error.folder).iterdir()}
    assert sorted(pictures) == ["difference.png", "ours.png", "stock.png"]
    assert np.array_equal(pictures["stock.png"], stock.round().byte().permute(1, 2, 0).numpy())
    assert Path(error.folder).parent == tmp_path
    off = np.abs(np.roll(pictures["stock.png"], 8, 0).astype(int) - pictures["ours.png"])
    assert off.mean() < 1
    second = next_error(batches)
    assert isinstance(second, AuditError) and second.index == 5


def test_what_is_found_later_is_told_after_its_epoch(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.transform = TRAIN
    loader = DataLoader(folder, 48, device="cpu", audit=Audit(1.0, folder=tmp_path))
    assert len(epochs_of(loader, 2)) == 2
    assert counts(caplog) == [(48, 0)]
    plant(monkeypatch, channels_swapped)
    assert len(epochs_of(loader, 1)) == 1
    assert counts(caplog) == [(48, 0), (144, 48)]


def test_pictures_of_other_sizes_are_found(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder.transform = DECODE
    plant(monkeypatch, lambda images: images[..., :-1])
    with pytest.raises(AuditError, match="by inf in the mean") as caught:
        next(iter(DataLoader(folder, 4, device="cpu", audit=Audit(1.0, "raise", tmp_path))))
    assert {path.name for path in Path(caught.value.folder).iterdir()} == {"ours.png", "stock.png"}


def test_the_sample_is_named_rightly_where_others_were_left_out(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder.transform = TRAIN
    folder.samples[0] = folder.samples[1] = (str(tmp_path / "missing.jpg"), 0)
    plant(monkeypatch, channels_swapped)
    loader = DataLoader(folder, 8, device="cpu", on_error="skip", audit=Audit(1.0, "raise", tmp_path / "found"))
    with pytest.raises(AuditError) as caught:
        next(iter(loader))
    assert (caught.value.index, caught.value.path) == (2, folder.samples[2][0])


class Repeats(ImageFolder):
    """Gives each sample that it is asked for twice."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices for _ in range(2)]


def test_a_sample_has_no_index_where_a_dataset_returns_another_number(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plant(monkeypatch, channels_swapped)
    loader = DataLoader(Repeats(folder.root, TRAIN), 8, device="cpu", audit=Audit(1.0, folder=tmp_path))
    images, _ = next(iter(loader))
    assert len(images) == 16
    found = [warning for warning in warnings_in(caplog) if "differs from" in warning]
    assert len(found) == 16 and all("audit: a sample (" in warning for warning in found)


class Stream(IterableDataset[Any]):
    def __init__(self, folder: ImageFolder) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        return (self.folder.transform(Image.open(path).convert("RGB")) for path, _ in self.folder.samples[:4])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_of_a_stream_is_named_by_its_file(
    folder: ImageFolder, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder.transform = TRAIN
    plant(monkeypatch, channels_swapped)
    loader = DataLoader(Stream(folder), 4, num_workers=workers, device="cpu", audit=Audit(1.0, "raise", tmp_path))
    error = next_error(iter(loader))
    assert isinstance(error, AuditError) and str(error).startswith("a sample (")
    assert (error.index, error.path) == (None, folder.samples[0][0])


def test_an_alarm_comes_also_where_pictures_cannot_be_saved(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder.transform = TRAIN
    (tmp_path / "a_file").touch()
    plant(monkeypatch, channels_swapped)
    with pytest.raises(AuditError, match="The pictures could not be saved") as caught:
        next(iter(DataLoader(folder, 4, device="cpu", audit=Audit(1.0, "raise", tmp_path / "a_file" / "audit"))))
    assert caught.value.folder == ""


def test_pictures_are_saved_in_the_users_cache_by_default(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.transform = TRAIN
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plant(monkeypatch, channels_swapped)
    next(iter(DataLoader(folder, 1, device="cpu", audit=1)))
    ((folder_of_it,), (told,)) = list((tmp_path / "proxyloader" / "audit").iterdir()), warnings_in(caplog)
    assert str(folder_of_it) in told and folder.samples[0][0] in told


# --- nothing to compare, and arguments -------------------------------------------------------------------------------


def test_a_loader_that_has_nothing_to_compare_says_so_once(
    folder: ImageFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.transform = transforms.Compose([transforms.Resize(48), transforms.ColorJitter(0.5), transforms.ToTensor()])
    loader = DataLoader(folder, 24, device="cpu", audit=1.0, collate_fn=list)
    assert loader.backend.startswith("torch: on a CPU torchvision is faster")
    assert [len(list(loader)) for _ in range(2)] == [2, 2]
    assert sum("the first batch has nothing to compare" in each for each in warnings_in(caplog)) == 1
    assert counts(caplog) == []


def test_what_is_left_to_the_batches_is_not_compared(folder: ImageFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.transform = transforms.Compose(
        [transforms.CenterCrop(48), transforms.ToTensor(), transforms.Lambda(torch.neg)]
    )
    loader = DataLoader(folder, 24, device="cpu", unsupported="batch", audit=Audit(1.0, "raise"))
    assert all(images.max() <= 0 for images, _ in loader)
    assert sum("nothing to compare" in each for each in warnings_in(caplog)) == 1


def test_what_goes_through_a_server_is_not_compared(
    photos: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ProxyServer(picture_pipeline(device)) as server:
        dataset = picture_folder(photos, server.proxy, read_bytes)
        assert len(list(DataLoader(dataset, 4, server=server, audit=1.0))) == 12
    assert sum("nothing to compare" in each for each in warnings_in(caplog)) == 1


@pytest.mark.parametrize("audit", [-0.1, 1.5, True, "0.1", None, float("nan")])
def test_an_audit_is_a_share_or_an_audit(folder: ImageFolder, audit: Any) -> None:
    with pytest.raises(ValueError, match="audit is a share of the images, from 0 to 1, or a proxyloader.Audit; got"):
        DataLoader(folder, audit=audit)


def test_an_audit_checks_what_is_to_be_done() -> None:
    with pytest.raises(ValueError, match="on_difference is one of 'log', 'raise'; got 'stop'"):
        Audit(0.5, "stop")  # type: ignore[arg-type]
