"""Samples that cannot be read may be left out or replaced: with their labels, counted and named."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
import shutil
import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader as StockLoader, DistributedSampler, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, read_image

from proxyloader import DataLoader, ImageError, PipelineError, ProxyLoaderError, ProxyServer, World

from ..hostile_jpegs import HUFFMAN, declaring, with_bytes
from ..numbered import read_numbers, spell_dataset
from ..outcomes import outcomes, raises
from ..undecoded import unchecked
from .roads import TRANSFORM, Stream, picture_pipeline, read_bytes

SIZE, BATCH, BAD = 24, 4, 9  # the bad sample is in the third batch


def a_device_without_end(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("These are not the pixels you are looking for.\n" * 50)


def cut_in_the_scan(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: 2 * len(data) // 3])


def too_many_pixels(path: Path) -> None:
    path.write_bytes(declaring(60_000, 60_000)(path.read_bytes()))


def broken_tables(path: Path) -> None:
    """With counts of Huffman codes that cannot be."""
    path.write_bytes(with_bytes(HUFFMAN, slice(1, 17), b"\xff" * 16)(path.read_bytes()))


class OpensItself(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.transform(Image.open(path).convert("RGB")), label, index


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # as the names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def a_pipe(path: Path) -> None:
    """A pipe that a picture is written to each time that it is opened."""
    data = next(each for each in path.parent.iterdir() if each.is_file()).read_bytes()
    os.mkfifo(path)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            path.write_bytes(data)

    threading.Thread(target=write, daemon=True).start()


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": a_pipe,
    "a socket": a_socket,
    "a directory": Path.mkdir,
    "a device without end": link_to("/dev/zero"),
    "a device of random bytes": link_to("/dev/urandom"),
    "an empty device": link_to("/dev/null"),
    "a file of the system": link_to("/proc/self/status"),
    "a file without permission": lambda path: path.touch(0),  # which the root user may read: it is empty
    "a link to itself": lambda path: path.symlink_to(path),
    "a file as a directory": lambda path: path.symlink_to(f"{__file__}/a.jpg"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Pillow leaves files open
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [ImageFolder, OpensItself])
@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_ends_as_under_torch(name: str, kind: Any, workers: int, photos: Path, tmp_path: Path) -> None:
    dataset = kind(shutil.copytree(photos, tmp_path / "set"), TRANSFORM)
    path, seen = Path(dataset.samples[BAD][0]), []
    for loader in (StockLoader, DataLoader):
        path.rmdir() if path.is_dir() else path.unlink()
        NO_FILES[name](path)
        seen.append(outcomes(loader(dataset, BATCH, num_workers=workers)))
    for theirs, ours in zip(*seen, strict=True):
        assert isinstance(ours, type(theirs)), (ours, theirs)
        if isinstance(theirs, Exception):
            assert workers or ours.errno == theirs.errno, (ours, theirs)
    assert isinstance(seen[0][BAD // BATCH], Exception) == (name != "a pipe")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prefetch=0), "prefetch must be an integer >= 1, got 0"),
        (dict(prefetch=1.5), "prefetch must be an integer"),
        (dict(num_threads=0), "num_threads must be an integer >= 1, or 'auto', got 0"),
        (dict(num_threads=5000), "num_threads must be at most 1024, or 'auto', got 5000"),
        (dict(on_error="ignore"), "on_error must be one of 'raise', 'skip', 'replace', got 'ignore'"),
        *((dict(seed=seed), f"seed must be an integer >= 0, got {seed!r}") for seed in (-1, 1.5, "x")),
        (dict(hw_decoder_load=2), r"hw_decoder_load must be in \[0, 1\] or 'auto', got 2"),
        (dict(translate="no"), "translate must be True or False, got 'no'"),
        (dict(device="meta"), "device must be a CUDA device .* or 'cpu', got 'meta'"),
        *((dict(device=device), "device (is a|must be a) ") for device in ("gpu", "mps", "cuda:x")),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_told_what_is_allowed(folder: ImageFolder, arguments: dict[str, Any], message: str) -> None:
    folder.transform = TRANSFORM
    with pytest.raises(ValueError, match=message):
        DataLoader(folder, **arguments)


@pytest.mark.parametrize(
    "device", ["cuda:63", 63, torch.device("cuda", 63), *([] if torch.cuda.is_available() else ["cuda"])]
)
@pytest.mark.parametrize("translate", [True, False])
def test_a_gpu_that_is_not_there_is_refused_at_once(folder: ImageFolder, device: Any, translate: bool) -> None:
    folder.transform = TRANSFORM
    message = rf"device='{torch.device(device)}', but the number of CUDA devices is \d+. Omit device to use a GPU"
    for dataset in (folder, [torch.zeros(3)]):
        with pytest.raises(ValueError, match=message):
            DataLoader(dataset, device=device, translate=translate)
        loader = DataLoader(dataset, device="cpu", translate=translate)
        loader.device = device
        with pytest.raises(ValueError, match=message):
            iter(loader)


FOUND_BY_THE_WORKER, FOUND_BY_DALI = text, broken_tables


@pytest.fixture
def spelled(tmp_path: Path) -> Numbered:
    """24 pictures that spell their index; each sample is (image, label, index)."""
    return Numbered(str(spell_dataset(tmp_path / "set", SIZE)), TRANSFORM)


class Numbered(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label, index


def stream_of(dataset: ImageFolder) -> Stream:
    return Stream([path for path, _ in dataset.samples], TRANSFORM, unchecked)


def damage(dataset: ImageFolder, how: Callable[[Path], None], *indices: int) -> list[str]:
    if how is FOUND_BY_DALI:
        dataset.loader = unchecked
    for index in indices:
        how(Path(dataset.samples[index][0]))
    return [dataset.samples[index][0] for index in indices]


def numbers_of(batches: list[Any], dataset: ImageFolder) -> list[list[int]]:
    """The numbers that the pictures spell, having checked that labels and indices say the same."""
    for images, labels, indices in batches:
        assert read_numbers(images, white=1.0) == indices.tolist()
        assert labels.tolist() == [dataset.targets[index] for index in indices]
    return [indices.tolist() for _, _, indices in batches]


WAYS = pytest.mark.parametrize(
    "how",
    [FOUND_BY_THE_WORKER, FOUND_BY_DALI, Path.unlink, empty, cut_in_the_scan, a_device_without_end, too_many_pixels],
    ids=lambda how: how.__name__,
)
EITHER = pytest.mark.parametrize("how", [FOUND_BY_THE_WORKER, FOUND_BY_DALI], ids=["by the worker", "by DALI"])


class ReadByTorchvision(Numbered):
    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return read_image(path, ImageReadMode.RGB), label, index


DEPRECATED = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")


@DEPRECATED
@pytest.mark.parametrize("translate", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_torchvision_cannot_read_is_omitted(spelled: Numbered, workers: int, translate: bool, device: str) -> None:
    for index, how in {5: Path.unlink, 6: empty, 23: text}.items():
        damage(spelled, how, index)
    dataset = ReadByTorchvision(spelled.root)
    dataset.samples = spelled.samples  # with those that are missing
    loader = DataLoader(dataset, BATCH, num_workers=workers, on_error="skip", device=device, translate=translate)
    batches = list(loader)
    assert [index for *_, indices in batches for index in indices.tolist()] == [*range(5), *range(7, 23)]
    for images, _, indices in batches:
        assert read_numbers(images, white=255) == indices.tolist()
    assert [error.index for error in loader.errors] == [5, 6, 23]
    assert spelled.samples[5][0] in loader.errors[0].reason
    replacing = DataLoader(dataset, BATCH, num_workers=workers, on_error="replace", device=device, translate=translate)
    found = [index for *_, indices in replacing for index in indices.tolist()]
    assert found == [*range(5), 7, 7, *range(7, 23), 0]


class Lists(Numbered):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@WAYS
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "collate_fn"),
    [
        *((Numbered, default_collate), (Numbered, lambda samples: default_collate(samples))),
        *((Lists, default_collate), (OpensItself, default_collate)),
    ],
    ids=["", "own collate_fn", "read at once", "opens itself"],
)
def test_a_sample_leaves_with_its_label_or_is_the_next_that_can_be_read_with_its_own(
    spelled: Numbered, how: Any, workers: int, kind: Any, collate_fn: Any, device: str
) -> None:
    spelled = kind(spelled.root, TRANSFORM)
    named = list(zip((5, 6, 23), damage(spelled, how, 5, 6, 23)))
    arguments: dict[str, Any] = dict(num_workers=workers, collate_fn=collate_fn, device=device)
    loader = DataLoader(spelled, BATCH, on_error="skip", **arguments)
    for _ in range(2):
        found = numbers_of(list(loader), spelled)
        assert found == [[0, 1, 2, 3], [4, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]
    assert [(error.index, error.path) for error in loader.errors] == named and loader.errors.total == 6
    assert len(loader) == 6
    replacing = DataLoader(spelled, BATCH, on_error="replace", **arguments)
    found[1], found[5] = [4, 7, 7, 7], [20, 21, 22, 0]
    assert numbers_of(list(replacing), spelled) == found
    assert sorted({error.index for error in replacing.errors}) == [5, 6, 23]
    if kind is OpensItself:
        return
    raising = DataLoader(spelled, BATCH, persistent_workers=workers > 0, **arguments)
    for _ in range(2):  # the loader is as good as new afterwards
        batches = outcomes(raising)
        both = [f"dataset[{index}]" in str(batches[1]) and path in str(batches[1]) for index, path in named[:2]]
        assert both == [True, how is FOUND_BY_DALI]
        for error, (index, path) in ((batches.pop(5), named[2]), (batches.pop(1), named[0])):
            assert isinstance(error, ImageError) and isinstance(error, OSError), error
            assert (error.index, error.path) == (index, path) and error.reason
            assert all(part in str(error) for part in (path, f"dataset[{index}]", error.reason))
        assert numbers_of(batches, spelled) == [found[k] for k in (0, 2, 3, 4)]
    all_or_first = named if how is FOUND_BY_DALI else named[::2]
    assert [(error.index, error.path) for error in raising.errors] == all_or_first


@EITHER
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_loses_all_its_samples_is_left_out(spelled: Numbered, how: Any, workers: int, device: str) -> None:
    damage(spelled, how, 8, 9, 10, 11)
    loader = DataLoader(spelled, BATCH, num_workers=workers, on_error="skip", device=device)
    assert [batch[0] for batch in numbers_of(list(loader), spelled)] == [0, 4, 12, 16, 20]
    single = DataLoader(spelled, None, num_workers=workers, on_error="skip", device=device)
    assert [index for _, _, index in single] == [*range(8), *range(12, 24)]


@EITHER
@pytest.mark.parametrize("workers", [0, 2])
def test_processes_take_equal_steps_whatever_is_skipped(spelled: Numbered, how: Any, workers: int, device: str) -> None:
    damage(spelled, how, 3, 16, 17, 18, 19, 20)
    found = []
    for sharing in (
        *(dict(num_shards=World(2, k), last_batch_policy="drop") for k in range(2)),
        *(dict(sampler=DistributedSampler(spelled, 2, k, shuffle=False)) for k in range(2)),
    ):
        options: Any = dict(num_workers=workers, on_error="skip", device=device, **sharing)
        found.append(numbers_of(list(DataLoader(spelled, BATCH, **options)), spelled))
    assert found[0] == [[0, 1, 2], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert found[1] == [[12, 13, 14, 15], [21], [21, 22, 23]]
    assert [len(batches) for batches in found] == [3] * 4


@EITHER
def test_an_epoch_without_a_readable_sample_is_an_error(
    spelled: Numbered, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    paths = damage(spelled, how, *range(SIZE))
    loader = DataLoader(spelled, BATCH, num_workers=1, on_error="skip", device="cpu")
    with raises(ImageError, code="none-readable", index=0, path=paths[0]):
        list(loader)
    assert len(loader.errors) == SIZE
    loader = DataLoader(spelled, BATCH, num_workers=1, on_error="replace", device="cpu")
    refused, *_ = outcomes(loader)
    assert isinstance(refused, ImageError) and "the last error was for dataset[23]" in str(refused)
    assert (refused.code, refused.index, refused.path) == ("none-readable", 0, paths[0])
    assert (loader.errors[0].index, loader.errors[0].path) == (0, paths[0])
    assert "is replaced by" not in caplog.text


def test_each_sample_is_one_line_in_the_log_of_all_epochs(spelled: Numbered, caplog: pytest.LogCaptureFixture) -> None:
    paths = damage(spelled, text, 3) + damage(spelled, broken_tables, 4)
    loader = DataLoader(spelled, BATCH, num_workers=1, persistent_workers=True, on_error="skip", device="cpu")
    with caplog.at_level(logging.WARNING, "proxyloader"):
        for _ in range(3):
            list(loader)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for index, path, line in zip((3, 4), paths, lines):
        assert line.startswith(f"dataset[{index}] is skipped: {path}: ")
    assert [(error.index, error.path) for error in loader.errors] == [(3, paths[0]), (4, paths[1])]
    assert loader.errors.total == 6 and loader.errors[0].reason in lines[0]


def test_the_log_ends_before_it_gets_long(spelled: Numbered, caplog: pytest.LogCaptureFixture) -> None:
    damage(spelled, Path.unlink, *range(23))
    loader = DataLoader(spelled, BATCH, on_error="skip", device="cpu")
    with caplog.at_level(logging.WARNING, "proxyloader"):
        list(loader)
    assert len(caplog.records) == 21 and "loader.errors" in caplog.records[-1].getMessage()
    assert len(loader.errors) == 23


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_stays_keeps_the_crops_that_a_seed_gave_it(spelled: Numbered, on_error: Any, workers: int) -> None:
    spelled.transform = transforms.Compose([transforms.RandomResizedCrop(24), transforms.ToTensor()])
    arguments: dict[str, Any] = dict(num_workers=workers, seed=3, device="cpu")
    whole = {
        int(index): image for images, _, i in DataLoader(spelled, BATCH, **arguments) for index, image in zip(i, images)
    }
    damage(spelled, text, 2)
    damage(spelled, broken_tables, 13)
    found = list(DataLoader(spelled, BATCH, on_error=on_error, **arguments))
    for images, labels, indices in found:
        assert labels.tolist() == [spelled.targets[index] for index in indices]
        assert all(torch.equal(image, whole[int(index)]) for image, index in zip(images, indices))
    expected = (
        [k for k in range(24) if k not in (2, 13)]
        if on_error == "skip"
        else [0, 1, 3, *range(3, 13), 14, *range(14, 24)]
    )
    assert [index for _, _, indices in found for index in indices.tolist()] == expected


def test_the_users_random_numbers_go_on_as_if_nothing_had_been_replaced(spelled: Numbered) -> None:
    spelled.transform = transforms.Compose([transforms.RandomResizedCrop(24), transforms.ToTensor()])
    damage(spelled, broken_tables, 2)
    states = []
    for on_error in ("skip", "replace"):
        torch.manual_seed(0)
        list(DataLoader(spelled, BATCH, num_workers=1, on_error=on_error, device="cpu"))  # type: ignore[arg-type]
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class PastesTheNext(OpensItself):
    def __getitem__(self, index: int) -> Any:
        path, after = (self.samples[k][0] for k in (index, (index + 1) % len(self)))
        with Image.open(path) as image, Image.open(after) as second:
            image.paste(second)
            return self.transform(image.convert("RGB")), self.samples[index][1], index


def test_the_file_is_named_whose_pixels_pillow_could_not_read(spelled: Numbered) -> None:
    paths = damage(spelled, cut_in_the_scan, 5)
    loader = DataLoader(PastesTheNext(spelled.root, TRANSFORM), BATCH, on_error="skip", device="cpu")
    assert len([*loader]) == SIZE // BATCH
    assert [(each.index, each.path) for each in loader.errors] == [(4, paths[0]), (5, paths[0])]


class OpensByHandle(Numbered):
    """As torchvision's own ``pil_loader``."""

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return TRANSFORM(Image.open(file).convert("RGB")), label, index


@pytest.mark.parametrize("how", [text, cut_in_the_scan, empty])
def test_a_file_that_the_dataset_has_opened_is_named(spelled: Numbered, how: Callable[[Path], None]) -> None:
    dataset = OpensByHandle(spelled.root, TRANSFORM)
    (path,) = damage(dataset, how, BAD)
    loader = DataLoader(dataset, BATCH, on_error="skip")
    assert sum(len(labels) for _, labels, _ in loader) == len(dataset) - 1
    assert [(each.index, each.path) for each in loader.errors] == [(BAD, path)]


class Fails(Numbered):
    """Has at one index an error that has nothing to do with the file there."""

    error: Exception | Callable[[str], Any]

    def __getitem__(self, index: int) -> Any:
        if index != 5:
            return super().__getitem__(index)
        if isinstance(self.error, Exception):
            raise self.error
        return self.error(self.samples[index][0]), 0, index


def multiply_what_does_not_fit(path: str) -> Any:
    return torch.ones(2) @ torch.ones(3)


def forget_to_convert(path: str) -> Any:
    """The others of the batch are in RGB."""
    return TRANSFORM(Image.open(path).convert("L"))


def read_without_descriptors(path: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        read_image(__file__)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@DEPRECATED
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize(
    "error",
    [
        KeyError("mine"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EIO, "Input/output error"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        ConnectionResetError("by peer"),
        OSError("of a library that reads from a network"),
        SyntaxError("of a module that the dataset imports"),
        MemoryError("mine"),
        multiply_what_does_not_fit,
        forget_to_convert,
        read_without_descriptors,
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", repr(value)),
)
def test_faults_of_the_program_and_of_the_machine_are_never_skipped(
    spelled: Numbered, on_error: Any, error: Exception | Callable[[str], Any]
) -> None:
    dataset = Fails(spelled.root, TRANSFORM)
    dataset.error = error
    loader = DataLoader(dataset, BATCH, num_workers=1, on_error=on_error, device="cpu")
    found = outcomes(loader)
    raised = found.pop(1)
    assert isinstance(raised, type(error) if isinstance(error, Exception) else RuntimeError)
    assert error is not forget_to_convert or "RGB" in str(raised)
    assert numbers_of(found, spelled) == [[k, k + 1, k + 2, k + 3] for k in (0, 8, 12, 16, 20)]
    assert len(loader.errors) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Pillow leaves the file open
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("opens_itself", [False, True], ids=["", "opens itself"])
def test_errors_of_the_disk_are_raised_as_by_torch(
    spelled: Numbered, on_error: Any, workers: int, opens_itself: bool
) -> None:
    path = spelled.samples[9][0]
    Path(path).unlink()
    Path(path).symlink_to("/proc/self/mem")  # EIO: nothing is mapped at its start
    dataset = OpensItself(spelled.root, TRANSFORM) if opens_itself else spelled
    stock = outcomes(StockLoader(dataset, BATCH, num_workers=workers))
    loader = DataLoader(dataset, BATCH, num_workers=workers, on_error=on_error, device="cpu")
    ours = outcomes(loader)
    assert [isinstance(each, OSError) for each in ours] == [isinstance(each, OSError) for each in stock]
    assert isinstance(error := ours.pop(2), OSError) and "Input/output error" in str(error)
    if not opens_itself:
        assert isinstance(error, ImageError)
        assert workers == 0 or "in DataLoader worker process" in str(error.__cause__)
        assert (error.code, error.index, error.path, error.errno) == ("machine", 9, path, errno.EIO)
    assert numbers_of(ours, spelled) == [[k, k + 1, k + 2, k + 3] for k in (0, 4, 12, 16, 20)]


class TwoViews(Numbered):
    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        other = self.samples[(index + 1) % len(self.samples)][0]
        return self.transform(self.loader(path)), self.transform(self.loader(other)), label, index


def test_a_sample_with_two_images_goes_when_one_of_them_is_lost(spelled: Numbered, device: str) -> None:
    damage(spelled, broken_tables, 5)
    loader = DataLoader(TwoViews(spelled.root, TRANSFORM), BATCH, num_workers=1, on_error="skip", device=device)
    first, second, _, indices = list(loader)[1]
    assert indices.tolist() == [6, 7]
    assert read_numbers(first, white=1.0) == [6, 7] and read_numbers(second, white=1.0) == [7, 8]


@pytest.mark.parametrize("batch_size", [BATCH, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_which_has_no_next_sample_does_without_what_dali_cannot_decode(
    spelled: Numbered, workers: int, batch_size: int | None, request: pytest.FixtureRequest
) -> None:
    # As where another process trains with this one. There is none, so nothing can be sent.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    request.addfinalizer(torch.distributed.destroy_process_group)
    damage(spelled, FOUND_BY_DALI, 5, 8, 9, 10, 11)
    loader = DataLoader(stream_of(spelled), batch_size, num_workers=workers, on_error="skip", device="cpu")
    found: list[int] = []
    for images, numbers in loader:
        assert read_numbers(images.reshape(-1, 3, 32, 32), white=1.0) == torch.as_tensor(numbers).flatten().tolist()
        found += torch.as_tensor(numbers).flatten().tolist()
    assert sorted(found) == [k for k in range(SIZE) if k not in (5, 8, 9, 10, 11)]
    assert loader.errors[0].index is None and loader.errors[0].path.endswith("00005.jpg")
    with pytest.raises(ValueError, match="on_error='replace' requires a map-style dataset"):
        DataLoader(stream_of(spelled), BATCH, on_error="replace")


class NamedSamples(Numbered):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(int(key.removeprefix("n")))


def test_only_numbers_have_a_next(spelled: Numbered) -> None:
    damage(spelled, text, 5)
    dataset = NamedSamples(spelled.root, TRANSFORM)
    names = [f"n{k}" for k in range(SIZE)]
    skipped = list(DataLoader(dataset, BATCH, sampler=names, on_error="skip", device="cpu"))
    assert numbers_of(skipped, spelled)[1] == [4, 6, 7]
    with raises(ProxyLoaderError, code="no-next-sample"):
        list(DataLoader(dataset, BATCH, sampler=names, on_error="replace", device="cpu"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hand_written_pipeline_loses_the_samples_that_it_fails_on(
    spelled: Numbered, workers: int, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(spelled, text, 5)
    damage(spelled, broken_tables, 6, 12)
    with ProxyServer(picture_pipeline(device)) as server:
        dataset = Numbered(spelled.root, transform=server.proxy, loader=read_bytes)
        arguments: dict[str, Any] = dict(num_workers=workers, server=server)
        loader = DataLoader(dataset, BATCH, on_error="skip", **arguments)
        for at, (images, labels, indices) in enumerate(loader):
            assert read_numbers(images, white=1.0) == indices.tolist()
            assert len(labels) == len(indices) == (2 if at == 1 else 3 if at == 3 else 4)
        assert sorted(error.index for error in loader.errors) == [5, 6, 12]
        lines = [line for line in caplog.messages if line.startswith("dataset[5] is skipped: ")]
        failure = "the pipeline failed on this sample: fn.decoders.image: "
        assert len(lines) == 1 and failure in lines[0] and "\n" not in lines[0]
        (error,) = [error for error in loader.errors if error.index == 5]
        assert error.path == "" and error.reason in lines[0]
        replaced = list(DataLoader(dataset, BATCH, on_error="replace", **arguments))
        assert [i.tolist() for _, _, i in replaced][:2] == [[0, 1, 2, 3], [4, 7, 7, 7]]
        assert read_numbers(replaced[1][0], white=1.0) == [4, 7, 7, 7]
        error = outcomes(DataLoader(dataset, BATCH, **arguments))[1]
        assert isinstance(error, PipelineError) and (error.code, error.indices) == ("failed", [4, 5, 6, 7])


def bombs_of(kind: Any, dataset: Numbered, workers: int) -> tuple[list[Any], list[str]]:
    """What becomes of each sample, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = outcomes(kind(dataset, 1, num_workers=workers))
    bombs = [each for each in found if isinstance(each, Image.DecompressionBombError)]
    said = [str(each.message) for each in caught if issubclass(each.category, Image.DecompressionBombWarning)]
    return [str(each).partition("Image size")[2].partition(",")[0] for each in bombs], said


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("kind", [Numbered, OpensItself])
@pytest.mark.parametrize("limit", [None, 60_000, 59_999, 30_000, 29_999])
def test_the_limit_of_pixels_is_pillows(
    spelled: Numbered, kind: Any, format: str, limit: int | None, workers: int, pillows_settings: None
) -> None:
    dataset = kind(spelled.root, TRANSFORM)
    dataset.samples = dataset.samples[:4]
    Image.new("RGB", (300, 200)).save(dataset.samples[2][0], format)
    Image.MAX_IMAGE_PIXELS = limit
    ours, theirs = (
        bombs_of(each, dataset, workers) for each in (functools.partial(DataLoader, device="cpu"), StockLoader)
    )
    assert ours == theirs
    assert len(theirs[0]) == (limit == 29_999)
    assert len(theirs[1]) == (not workers and limit in (59_999, 30_000))


def test_a_warning_of_pillows_limit_may_be_made_an_error(spelled: Numbered, pillows_settings: None) -> None:
    Image.MAX_IMAGE_PIXELS = 10
    for format in ("JPEG", "PNG"):
        Image.new("RGB", (3, 5)).save(spelled.samples[0][0], format)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with pytest.raises(Image.DecompressionBombWarning):
                next(iter(DataLoader(spelled, 1, device="cpu")))
