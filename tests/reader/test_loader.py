"""FileReaderLoader: every sample once, equal steps, epochs kept apart, the readers by name, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import logging
import math
import os
import pickle
import shutil
import tarfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator
from PIL import ExifTags, Image
from torch.utils.data import DataLoader as StockLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from proxyloader import (
    DataLoader,
    FileReaderLoader,
    PipelineError,
    ProxyServer,
    UnsupportedTransformError,
    compile_transforms,
    pipelines,
)
from proxyloader.dali import jpeg_engines
from proxyloader.reader.sources import Reader

from ..faults import run_alone
from ..limits import WAIT_S
from ..outcomes import raises
from ..record_writers import write_caffe2, write_tar, write_tfrecord

SMALL = dict(resize=40, size=32, num_threads=2)


@pipeline_def(exec_dynamic=True)
def numbers(source: Callable[[], Any]) -> Any:
    """The first byte of each file, and its label."""
    content, labels = source()
    return content[0:1], labels


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 files in three class folders; each holds its number as one byte."""
    root = tmp_path_factory.mktemp("numbered")
    for k in range(23):
        folder = root / f"class{k // 8}"
        folder.mkdir(exist_ok=True)
        (folder / f"{k:02}.jpg").write_bytes(bytes([k]))
    return root


def numbers_in(root: Path, batch_size: int = 4, **others: Any) -> FileReaderLoader:
    return FileReaderLoader(root, numbers, batch_size, device="cpu", num_threads=1, **others)


def flat(batches: Iterator[Any] | FileReaderLoader) -> list[int]:
    return [int(number) for content, _ in batches for number in content]


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [pipelines.training, pipelines.validation])
def test_it_gives_images_and_labels_on_the_device(photos: Path, folder: ImageFolder, device: str, graph: Any) -> None:
    loader = FileReaderLoader(photos, graph, 10, device=device, size=32, num_threads=2)
    assert len(loader) == 5 and loader.batch_size == 10
    for _ in range(2):
        batches = list(loader)
        assert [len(images) for images, _ in batches] == [10, 10, 10, 10, 8]
        for images, labels in batches:
            assert images.shape[1:] == (3, 32, 32) and images.dtype == torch.float32
            assert labels.dtype == torch.int64 and labels.ndim == 1
            assert images.device.type == labels.device.type == device
        assert torch.cat([labels for _, labels in batches]).tolist() == folder.targets


def test_in_dalis_style_it_gives_what_dalis_iterator_gives(photos: Path, device: str) -> None:
    loader = FileReaderLoader(photos, pipelines.validation, 20, style="dali", device=device, **SMALL)
    batches = list(loader)
    assert [[sorted(one) for one in batch] for batch in batches] == 3 * [[["data", "label"]]]
    ((first,),) = batches[:1]
    assert first["data"].shape == (20, 3, 32, 32) and first["label"].shape == (20, 1)
    assert first["label"].dtype == torch.int32 and first["data"].device.type == device


@pytest.mark.parametrize("policy", ["partial", "fill", "drop"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("stick", [False, True], ids=["shards move", "shards stay"])
def test_what_the_policies_promise_holds_for_any_number_of_shards(
    numbered: Path, policy: str, shuffle: bool, stick: bool
) -> None:
    options = {"stick_to_shard": True} if stick else {}
    for shards, batch_size in itertools.product((1, 2, 3, 4), (1, 3, 4, 6, 11, 12)):
        loaders = [
            numbers_in(
                numbered,
                batch_size,
                shuffle=shuffle,
                num_shards=shards,
                shard_id=k,
                last_batch_policy=policy,
                reader_options=options,
                seed=1,
            )
            for k in range(shards)
        ]
        for _ in range(3):
            steps = [len(loader) for loader in loaders]
            found = [list(loader) for loader in loaders]
            assert [len(batches) for batches in found] == steps
            read = sorted(itertools.chain.from_iterable(map(flat, map(iter, found))))
            sizes = {len(content) for batches in found for content, _ in batches}
            if policy == "partial":
                assert read == list(range(23)) and 0 not in sizes
            else:
                assert len(set(steps)) == 1 and sizes <= {batch_size}
            if policy == "fill":
                assert set(read) == set(range(23))
            if policy == "drop":
                assert len(set(read)) == len(read) and steps[0] == 23 // shards // batch_size


def test_shards_move_from_one_epoch_to_the_next(numbered: Path) -> None:
    loader = numbers_in(numbered, num_shards=3, shard_id=1)
    epochs = [flat(loader) for _ in range(4)]
    assert epochs == [list(range(7, 15)), list(range(15, 23)), list(range(7)), list(range(7, 15))]
    assert len(loader) == 2 and sum(1 for _ in loader) == 2


def test_the_same_seed_gives_the_same_batches_and_another_one_others(photos: Path, device: str) -> None:
    def found(seed: int | None) -> torch.Tensor:
        loader = FileReaderLoader(
            photos, pipelines.training, 12, shuffle=True, seed=seed, device=device, size=32, num_threads=2
        )
        return torch.cat([images.cpu() for _ in range(2) for images, _ in loader])

    first = found(7)
    assert torch.equal(first, found(7)) and not torch.equal(first, found(8))
    assert not torch.equal(first[:48], first[48:])
    torch.manual_seed(3)
    drawn = found(None)
    torch.manual_seed(3)
    assert torch.equal(drawn, found(None))


def test_without_a_shuffle_samples_come_in_the_order_of_their_names(numbered: Path) -> None:
    assert flat(numbers_in(numbered)) == list(range(23))
    assert flat(numbers_in(numbered, shuffle=True)) != list(range(23))


# --- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["partial", "fill", "drop"])
def test_after_a_break_the_next_loop_is_a_whole_new_epoch(numbered: Path, policy: str) -> None:
    loader = numbers_in(numbered, shuffle=True, seed=0, last_batch_policy=policy)
    seen = []
    for stop in (0, 2, 4, None):
        batches = []
        for at, batch in enumerate(loader):
            batches.append(batch)
            if at == stop:
                break
        seen.append(flat(iter(batches)))
    assert len({tuple(numbers[:4]) for numbers in seen}) == 4
    if policy == "partial":
        assert sorted(seen[-1]) == list(range(23)) == sorted(flat(loader))
    assert len(flat(loader)) == {"partial": 23, "fill": 24, "drop": 20}[policy]


def test_after_a_break_shards_move_on_together(numbered: Path) -> None:
    loaders = [numbers_in(numbered, num_shards=3, shard_id=k) for k in range(3)]
    for _ in range(2):
        for loader in loaders:
            next(iter(loader))
        read = [flat(loader) for loader in loaders]
        assert sorted(itertools.chain(*read)) == list(range(23))
    assert read[0] == list(range(7)) and [len(loader) for loader in loaders] == [2, 2, 2]


def test_an_older_loop_is_told_that_a_new_one_has_begun(numbered: Path) -> None:
    loader = numbers_in(numbered)
    older = iter(loader)
    next(older)
    assert flat(loader) == list(range(23))
    with pytest.raises(RuntimeError, match="another loop over this FileReaderLoader has begun.*build two loaders"):
        next(older)


def test_a_loop_that_has_ended_stays_ended(numbered: Path) -> None:
    loader = numbers_in(numbered)
    loop = iter(loader)
    assert flat(loop) == list(range(23))
    assert list(loop) == [] and flat(loader) == list(range(23)) and list(loop) == []


@pytest.mark.parametrize("auto_reset", [True, False])
def test_next_goes_through_epochs_as_with_dalis_iterators(numbered: Path, auto_reset: bool) -> None:
    loader = numbers_in(numbered, 12, auto_reset=auto_reset)
    for _ in range(2):
        assert [len(next(loader)[0]) for _ in range(2)] == [12, 11]
        with pytest.raises(StopIteration):
            next(loader)
        if not auto_reset:
            with pytest.raises(StopIteration):
                next(loader)
            loader.reset()
    next(loader)
    loader.reset()
    assert next(loader)[0].flatten().tolist() == list(range(12))


def test_dropping_or_closing_a_loader_frees_its_pipeline(numbered: Path) -> None:
    loader = numbers_in(numbered)
    batches = iter(loader)
    content, _ = next(batches)
    freed = weakref.ref(loader.pipeline)
    gc.disable()
    try:
        del loader, batches
        assert freed() is None
    finally:
        gc.enable()
    assert content.flatten().tolist() == [0, 1, 2, 3]

    with numbers_in(numbered) as loader:
        batches = iter(loader)
        next(batches)
        freed = weakref.ref(loader.pipeline)
    assert freed() is None and "closed" in repr(loader)
    for use in (lambda: next(batches), lambda: iter(loader), lambda: next(loader)):
        with pytest.raises(RuntimeError, match="was closed"):
            use()


def test_workers_of_another_loader_may_be_forked_beside_it(numbered: Path) -> None:
    loader = numbers_in(numbered)
    batches = iter(loader)
    first = next(batches)
    assert len(list(StockLoader(range(8), 2, num_workers=2, multiprocessing_context="fork"))) == 4  # type: ignore[arg-type]
    assert flat(itertools.chain([first], batches)) == list(range(23))
    child = os.fork()
    if child == 0:
        try:
            loader.pipeline  # noqa: B018
        except RuntimeError as error:
            os._exit(7 if "forked from" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_may_share_a_loop(numbered: Path, threads: int) -> None:
    loader = numbers_in(numbered)
    for _ in range(5):
        batches, found = iter(loader), []

        def pull(batches: Any = batches, found: Any = found) -> None:
            found.extend(int(number) for data, _ in batches for number in data)

        pulling = [threading.Thread(target=pull) for _ in range(threads)]
        for thread in pulling:
            thread.start()
        for thread in pulling:
            thread.join(WAIT_S)
        assert sorted(found) == list(range(23))


def in_threads(*tasks: Callable[[], object]) -> list[str]:
    """Run them at once; the errors that they ended with."""
    errors: list[str] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return errors


def test_a_loop_that_threads_share_ends_for_each_of_them_though_one_begins_the_next_epoch(numbered: Path) -> None:
    loader = numbers_in(numbered)
    for _ in range(30):
        batches, again = iter(loader), []

        def goes_on(batches: Any = batches, again: Any = again) -> None:
            list(batches)
            again.append(iter(loader))

        helps = functools.partial(list, batches)
        assert in_threads(helps, goes_on, helps) == []


@pytest.mark.parametrize("auto_reset", [True, False])
def test_threads_that_share_next_get_whole_epochs(numbered: Path, auto_reset: bool) -> None:
    loader = numbers_in(numbered, auto_reset=auto_reset)
    for _ in range(5):
        found: list[int] = []

        def pull(found: list[int] = found) -> None:
            with contextlib.suppress(StopIteration):
                while True:
                    found.extend(next(loader)[0].flatten().tolist())

        assert in_threads(pull, pull, pull) == []
        times = len(found) // 23
        assert sorted(found) == sorted(times * list(range(23)))
        assert times in ((1, 2, 3) if auto_reset else (1,))
        loader.reset()


def test_the_length_may_be_asked_for_while_another_thread_begins_an_epoch_anew(numbered: Path) -> None:
    loader, is_over = numbers_in(numbered), threading.Event()
    length = len(loader)

    def leaves() -> None:
        for _ in range(10):
            next(iter(loader))
        is_over.set()

    def asks() -> None:
        while not is_over.is_set():
            assert (len(loader), loader.batch_size) == (length, 4)

    assert in_threads(leaves, asks) == []


def test_what_is_closed_says_so_whatever_is_asked_of_it(numbered: Path) -> None:
    loader = numbers_in(numbered)
    state = loader.state_dict()
    loader.close()
    asked: list[Callable[[], object]] = [
        lambda: iter(loader),
        lambda: next(loader),
        lambda: loader.set_epoch(4),
        lambda: loader.load_state_dict(state),
        lambda: loader.state_dict(),
    ]
    for ask in asked:
        with pytest.raises(RuntimeError, match="this FileReaderLoader was closed"):
            ask()


def test_a_file_that_is_no_image_is_an_error_and_the_next_loop_goes_on(
    photos: Path, tmp_path: Path, device: str
) -> None:
    (tmp_path / "a").mkdir()
    for k, path in enumerate(sorted((photos / sorted(os.listdir(photos))[0]).iterdir())[:6]):
        (tmp_path / "a" / f"{k}.jpg").write_bytes(path.read_bytes())
    whole = (tmp_path / "a" / "4.jpg").read_bytes()
    (tmp_path / "a" / "4.jpg").write_bytes(bytes(500))
    # With several threads DALI now and then ends the process here: see NOTE [ What DALI cannot parse ] in _dali.py.
    one_thread = SMALL | {"num_threads": 1}
    loader = FileReaderLoader(tmp_path, pipelines.validation, 2, device=device, **one_thread)
    with pytest.raises(
        PipelineError, match=r"DALI failed on a batch. .*4.jpg: 500 bytes, in no image.*skip'.*DALI says"
    ):
        list(loader)
    (tmp_path / "a" / "4.jpg").write_bytes(whole)
    assert sum(len(images) for images, _ in loader) == 6


# --- readers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "name", "write"),
    [
        ("tfrecord", "part.tfrecord", write_tfrecord),
        ("webdataset", "part.tar", write_tar),
        ("caffe2", "part", write_caffe2),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_the_same_images_come_from_every_format(
    folder: ImageFolder, tmp_path: Path, device: str, reader: str, name: str, write: Any
) -> None:
    samples = [(path, 40 * label) for path, label in folder.samples]  # labels of one to three digits
    write(tmp_path / name, samples)
    loader = FileReaderLoader(tmp_path / name, pipelines.validation, 10, reader=reader, device=device, **SMALL)
    expected = FileReaderLoader(folder.root, pipelines.validation, 10, device=device, **SMALL)
    for _ in range(2):
        for (images, labels), (right, of_class) in zip(loader, expected, strict=True):
            assert torch.equal(images, right) and torch.equal(labels, 40 * of_class)


@pytest.mark.parametrize("reader", ["tfrecord", "webdataset"])
def test_several_files_are_one_data_set(folder: ImageFolder, tmp_path: Path, reader: str) -> None:
    write, paths = {"tfrecord": write_tfrecord, "webdataset": write_tar}[reader], []
    for part in range(3):
        paths.append(tmp_path / f"{part}.{reader}")
        write(paths[-1], folder.samples[16 * part : 16 * part + 16])
    shards = [
        FileReaderLoader(
            paths, pipelines.validation, 7, reader=reader, num_shards=2, shard_id=k, device="cpu", shuffle=True, **SMALL
        )
        for k in range(2)
    ]
    images = torch.cat([images for loader in shards for images, _ in loader])
    assert len(images) == len(images.flatten(1).unique(dim=0)) == 48


@pipeline_def(exec_dynamic=True)
def parts(source: Any) -> Any:
    _, *others = source()
    return tuple(others)


@pipeline_def(exec_dynamic=True)
def alone(source: Any) -> Any:
    (encoded,) = source()
    return encoded


def tar_of(path: Path, *samples: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for at, sample in enumerate(samples):
            for ext, content in sample.items():
                member = tarfile.TarInfo(f"{at}.{ext}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def labels_in(tar: Path, **options: Any) -> list[Any]:
    how: dict[str, Any] = {"reader": "webdataset", "device": "cpu", "num_threads": 1, "reader_options": options}
    return [part.tolist() for part in FileReaderLoader(tar, parts, 2, style="torch", output_map=["label"], **how)]


@pytest.mark.parametrize("text", [b"cat", b"-1", b"1.5", b"", b"1 2", b" 7", b'{"label": 0}', b"1234567890123456789"])
def test_a_label_that_is_no_number_is_an_error_and_no_other_number(tmp_path: Path, text: bytes) -> None:
    tar = tar_of(tmp_path / "a.tar", {"jpg": b"x", "cls": b"0"}, {"jpg": b"x", "cls": text})
    with pytest.raises(PipelineError, match="a label of the webdataset is no number in digits"):
        labels_in(tar)


def test_labels_may_have_any_number_of_digits_and_a_line_end(tmp_path: Path) -> None:
    texts = [b"0", b"7\n", b"0012\r\n", b"2147483648", b"999999999999999999"]
    tar = tar_of(tmp_path / "a.tar", *({"jpg": b"x", "cls": text} for text in texts))
    assert list(itertools.chain(*labels_in(tar))) == [0, 7, 12, 2**31, 10**18 - 1]


def test_labels_of_records_may_be_large_and_those_of_files_are_refused_where_they_would_be_changed(
    folder: ImageFolder, tmp_path: Path
) -> None:
    path, _ = folder.samples[0]
    write_tfrecord(tmp_path / "a", [(path, 2**31), (path, 2**62)])
    how: dict[str, Any] = {"output_map": ["label"], "device": "cpu", "num_threads": 1}
    (labels,) = FileReaderLoader(tmp_path / "a", parts, 2, reader="tfrecord", **how)
    assert labels.dtype == torch.int64 and labels.tolist() == [2**31, 2**62]
    for labels, known in ((None, 0), (5, 5), ([-(2**31)], -(2**31)), (np.array([7.0]), 7), (range(3, 4), 3)):
        options: dict[str, Any] = {"files": [path], "labels": labels}
        (found,) = FileReaderLoader(None, parts, 1, reader_options=options, **how)
        assert found.tolist() == [known]
    large, not_whole = "the label 2147483648, and DALI's file reader keeps 32 bits", "and labels are whole numbers"
    refused: dict[Any, str] = {2**31: large, np.float32(2**31): large, 1.5: not_whole, "1": not_whole, None: not_whole}
    for label, message in refused.items():
        options = {"files": [path, path], "labels": [1.0, label]}
        with pytest.raises(ValueError, match=message):
            FileReaderLoader(None, parts, 1, reader_options=options, **how)


def test_a_record_without_the_feature_is_told_of_features(folder: ImageFolder, tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "a", folder.samples[:2])
    options = {"features": ("image/other", "image/class/label")}
    how: dict[str, Any] = {"reader": "tfrecord", "reader_options": options, "device": "cpu"}
    with pytest.raises(PipelineError, match=r"have a feature 'image/other', and is that an image\?"):
        list(FileReaderLoader(tmp_path / "a", pipelines.validation, 2, **how, **SMALL))


def test_other_parts_of_a_tar_than_class_numbers_come_as_they_are(tmp_path: Path) -> None:
    tar = tar_of(tmp_path / "a.tar", {"jpg": b"x", "json": b"[12]"}, {"jpg": b"x", "json": b"[34]"})
    assert labels_in(tar, ext=["jpg", "json"]) == [[list(b"[12]"), list(b"[34]")]]


def test_a_tar_without_labels_is_an_error_or_all_images(tmp_path: Path) -> None:
    tar = tar_of(tmp_path / "a.tar", {"jpg": b"xy"}, {"jpg": b"xy"})
    tarfile.open(tmp_path / "empty.tar", "w").close()
    with pytest.raises(ValueError, match="the webdataset is empty, or"):
        FileReaderLoader(tmp_path / "empty.tar", pipelines.validation, 2, reader="webdataset", device="cpu", **SMALL)
    with pytest.raises(ValueError, match=r"lacks one of the parts .* \(by default jpg, jpeg or png, and cls\)"):
        labels_in(tar)
    how: dict[str, Any] = {"reader": "webdataset", "device": "cpu", "num_threads": 1}
    assert len(FileReaderLoader(tar, alone, 2, reader_options={"ext": ["jpg"]}, **how)) == 1


def test_records_may_be_read_without_their_labels_and_with_an_index_elsewhere(
    folder: ImageFolder, tmp_path: Path
) -> None:
    write_tfrecord(tmp_path / "a", folder.samples[:5])
    (tmp_path / "a.idx").rename(tmp_path / "b")
    options = {"features": ["image/encoded"], "index_path": str(tmp_path / "b")}
    how: dict[str, Any] = {"reader": "tfrecord", "device": "cpu", **SMALL}
    loader = FileReaderLoader(tmp_path / "a", pipelines.validation, 2, reader_options=options, **how)
    assert [len(images) for images in loader] == [2, 2, 1]
    with pytest.raises(ValueError, match="an index for each of 1 files and the names of two features"):
        FileReaderLoader(tmp_path / "a", pipelines.validation, 2, reader_options={"index_path": []}, **how)


def test_arrays_come_without_labels(tmp_path: Path) -> None:
    @pipeline_def(exec_dynamic=True)
    def halved(source: Any) -> Any:
        (arrays,) = source()
        return arrays / 2

    for k in range(5):
        np.save(tmp_path / f"{k}.npy", np.full((2, 3), k, np.float32))
    batches = list(FileReaderLoader(tmp_path, halved, 2, reader="numpy", device="cpu", num_threads=1))
    assert [batch.shape for batch in batches] == [(2, 2, 3), (2, 2, 3), (1, 2, 3)]
    assert torch.cat(batches)[:, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2]


def test_an_array_that_is_cut_off_is_an_error_without_advice_about_images(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((40, 40)))
    (tmp_path / "0.npy").write_bytes((tmp_path / "0.npy").read_bytes()[:300])
    loader = FileReaderLoader(tmp_path, alone, 1, reader="numpy", device="cpu", output_map=["data"], num_threads=1)
    with pytest.raises(PipelineError, match="DALI failed on a batch. DALI says: ") as raised:
        list(loader)
    assert "on_error" not in str(raised.value)


def test_a_list_of_files_needs_no_root(folder: ImageFolder) -> None:
    options = {"files": [path for path, _ in folder.samples[:5]], "labels": [9, 8, 7, 6, 5]}
    loader = FileReaderLoader(None, pipelines.validation, 5, reader_options=options, device="cpu", **SMALL)
    ((_, labels),) = loader
    assert labels.tolist() == [9, 8, 7, 6, 5]


# --- pipelines of one's own ------------------------------------------------------------------------------------------


def test_the_graph_of_the_readme_serves_both_roads(folder: ImageFolder, device: str) -> None:
    @pipeline_def(exec_dynamic=True)
    def mine(source: Any) -> Any:
        encoded, *labels = source()
        images = fn.decoders.image(encoded, device="mixed" if device == "cuda" else "cpu", output_type=types.RGB)
        return fn.resize(images, size=[24, 24]), *(label.gpu() if device == "cuda" else label for label in labels)

    loader = FileReaderLoader(folder.root, mine, 8, device=device, num_threads=1)
    ordinal = 0 if device == "cuda" else None
    pipeline = mine(source=pipelines.from_workers, batch_size=8, num_threads=1, device_id=ordinal)
    with ProxyServer(pipeline) as server:
        dataset = ImageFolder(folder.root, server.proxy, loader=lambda path: np.fromfile(path, np.uint8))
        for (images, labels), (same, alike) in zip(loader, DataLoader(dataset, 8, server=server), strict=True):
            assert torch.equal(images, same) and torch.equal(labels.cpu(), alike)


@pipeline_def(exec_dynamic=True)
def without_source(source: Any) -> Any:
    return fn.random.coin_flip(), fn.random.coin_flip()


def test_a_graph_that_calls_no_source_is_told_to(numbered: Path) -> None:
    with pytest.raises(ValueError, match=r"no reader named 'Reader'; it has none\. Call source\(\) in the"):
        FileReaderLoader(numbered, without_source, 4, device="cpu")


def test_a_graph_for_a_gpu_says_what_to_change_where_there_is_none(numbered: Path) -> None:
    script = f"""
        from nvidia.dali import pipeline_def
        from proxyloader import FileReaderLoader, PipelineError
        @pipeline_def(exec_dynamic=True)
        def graph(source):
            encoded, labels = source()
            return encoded, labels.gpu()
        try:
            FileReaderLoader({str(numbered)!r}, graph, 4, device="cpu")
        except PipelineError as error:
            print(error)
    """
    done = run_alone(script, CUDA_VISIBLE_DEVICES="")
    assert done.stdout.startswith("the pipeline has operators for a GPU, and there is none"), done.stderr


def of_ones_own(root: Path, name: str = "Reader", outputs: int = 2, **reader: Any) -> Any:
    @pipeline_def(batch_size=4, num_threads=1, device_id=None, exec_dynamic=True, seed=5)
    def graph() -> Any:
        content, labels = fn.readers.file(file_root=str(root), name=name, **reader)
        shift = fn.cast(fn.random.uniform(range=[0, 100]), dtype=types.INT32)
        return (content[0:1], labels, labels + shift, shift)[:outputs]

    return graph()


def test_a_pipeline_of_ones_own_with_several_outputs_by_name(numbered: Path, device: str) -> None:
    pipeline = of_ones_own(numbered, outputs=4, pad_last_batch=True)
    loader = FileReaderLoader.from_pipeline(pipeline, output_map=["data", "label", "sum", "shift"])
    for _ in range(2):
        batches = list(loader)
        assert sum(len(data) for data, *_ in batches) == 23
        for _, label, sums, shift in batches:
            assert label.dtype == torch.int64 and torch.equal(sums.flatten() - shift.flatten(), label)
    one = FileReaderLoader.from_pipeline(of_ones_own(numbered, outputs=1, pad_last_batch=True), style="dali")
    assert sorted(next(iter(one))[0]) == ["data"]


def test_after_a_break_a_pipeline_of_ones_own_draws_anew(numbered: Path) -> None:
    pipeline = of_ones_own(numbered, outputs=4, pad_last_batch=True, random_shuffle=True)
    loader = FileReaderLoader.from_pipeline(pipeline, output_map=["data", "label", "sum", "shift"])
    first = next(iter(loader))
    batches = list(loader)
    assert sorted(int(number) for data, *_ in batches for number in data) == list(range(23))
    assert not torch.equal(batches[0][3], first[3])


def test_epochs_that_run_into_each_other_are_warned_of(numbered: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "proxyloader"):
        FileReaderLoader.from_pipeline(of_ones_own(numbered))
    assert "give it pad_last_batch=True" in caplog.text


@pytest.mark.parametrize("policy", list(LastBatchPolicy), ids=lambda policy: policy.name)
def test_dalis_own_names_of_the_policies_are_taken(numbered: Path, policy: Any) -> None:
    for asked in (policy, policy.name, policy.name.lower()):
        loader = numbers_in(numbered, last_batch_policy=asked)
        sizes = [len(content) for content, _ in loader]
        assert sizes == 5 * [4] + {"FILL": [4], "DROP": [], "PARTIAL": [3]}[policy.name]
        assert len(loader) == len(sizes) == (5 if policy.name == "DROP" else math.ceil(23 / 4))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(num_shards=2, shard_id=2), ValueError, "a whole number from 0 to 1, as num_shards=2; got 2"),
        (dict(shard_id=1), ValueError, "shard_id=1 needs num_shards"),
        (dict(num_shards=2, shard_id="first"), ValueError, "from 0 to 1, as num_shards=2; got 'first'"),
        (
            dict(reader="png"),
            ValueError,
            "reader is one of file, tfrecord, webdataset, caffe2, numpy, got 'png'",
        ),
        (dict(last_batch_policy="keep"), ValueError, "one of 'fill', 'partial', 'drop', or a member .* got 'keep'"),
        (dict(style="jax"), ValueError, "style is one of torch, dali, got 'jax'"),
        (dict(output_map=["data"]), ValueError, r"has 2 outputs, and output_map is \['data'\]"),
        (dict(output_map="ab"), ValueError, "has 2 outputs, and output_map is 'ab'"),
        (dict(random_shuffle=True), TypeError, "random_shuffle is an argument of the pipeline, .*: use shuffle=True"),
        (dict(stick_to_shard=True), TypeError, r'use reader_options=\{"stick_to_shard": True\}'),
        (dict(pad_last_batch=True), TypeError, 'use last_batch_policy="fill"'),
        (dict(device_id=0), TypeError, "device_id is an argument of the pipeline, .*: use device="),
        (dict(output_map=["data", "data"]), ValueError, "give each a name of its own"),
        (dict(device="tpu"), ValueError, "device is a CUDA device .* or 'cpu', got 'tpu'"),
        (dict(device="cuda:99"), ValueError, "device='cuda:99', and torch sees .* CUDA device"),
        (dict(sise=3), TypeError, "neither .* nor training takes sise; beside source training takes size, area"),
        (dict(seed=-1), ValueError, "seed is a whole number, 0 or more, or None; got -1"),
        (dict(batch_size=2.5), ValueError, "batch_size is a whole number, 1 or more; got 2.5"),
        (dict(num_threads=0), ValueError, "num_threads is a whole number, 1 or more, or None; got 0"),
        (dict(num_threads=5000), ValueError, "num_threads is at most 1024, or None; got 5000"),
        (dict(prefetch=0), ValueError, "prefetch is a whole number, 1 or more; got 0"),
        (dict(root=None), ValueError, "root is None, and reader_options say nothing .* either: file_list or files"),
        (dict(root=3), TypeError, "root is a path or several, got 3"),
        (dict(num_shards=49, shard_id=3), ValueError, "num_shards is 49, and there are 48 samples: .* Start fewer"),
        (dict(reader_options={"shard_id": 1}), ValueError, r"reader_options has shard_id, .* use shard_id=\.\.\."),
        (dict(reader_options={"random_shuffle": True}), ValueError, r"use shuffle=\.\.\."),
        (dict(reader_options={"pad_last_batch": False}), ValueError, r"own matter; .*from_pipeline"),
        (dict(reader_options=3), TypeError, "reader_options is a dict of arguments of the reader, or None; got 3"),
        (dict(reader_options={"colour": 1}), TypeError, 'fn.readers.file does not take that: Argument "colour"'),
        (
            dict(root=None, reader_options={"file_list": "none.txt"}),
            FileNotFoundError,
            "file_list='none.txt', and there",
        ),
        (
            dict(reader="caffe2"),
            PipelineError,
            "fn.readers.caffe2 cannot read what it is given; is the root of that kind",
        ),
        (dict(reader="webdataset"), IsADirectoryError, "is a folder; the webdataset reader reads files"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_when_the_loader_is_built(
    photos: Path, arguments: dict[str, Any], kind: Any, message: str
) -> None:
    with pytest.raises(kind, match=message):
        FileReaderLoader(**{"root": photos, "pipeline": pipelines.training, "device": "cpu"} | arguments)


def test_a_root_that_is_missing_or_empty_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "empty" / "class").mkdir(parents=True)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.jpg").write_bytes(b"")
    for name, message in [
        ("missing", "there is nothing at .*missing.*, which the file reader is to read"),
        ("empty", "has no folder with a file in it; .* root/class/image.jpg"),
        ("flat", "has no folder with a file in it"),
        ("flat/a.jpg", "is a file; the file reader wants a folder"),
    ]:
        with pytest.raises(FileNotFoundError, match=message):
            FileReaderLoader(tmp_path / name, pipelines.training, device="cpu")
    with pytest.raises(FileNotFoundError, match=r"has no file \*\.npy"):
        FileReaderLoader(tmp_path / "empty", numbers, reader="numpy", device="cpu")
    with pytest.raises(FileNotFoundError, match=r"no index .*a\.jpg\.idx.*tfrecord2idx .*a\.jpg"):
        FileReaderLoader(tmp_path / "flat" / "a.jpg", numbers, reader="tfrecord", device="cpu")
    with pytest.raises(ValueError, match=r"file_list='.*/list\.txt', which lists nothing: a path and a label"):
        (tmp_path / "list.txt").write_text("\n")
        FileReaderLoader(None, numbers, reader_options={"file_list": str(tmp_path / "list.txt")}, device="cpu")
    with pytest.raises(FileNotFoundError, match="no file that DALI takes for an image"):
        (tmp_path / "empty" / "class" / "notes.txt").write_text("")
        FileReaderLoader(tmp_path / "empty", pipelines.training, device="cpu")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_torchvision_transform_is_refused_with_what_to_do(photos: Path, compiled: bool) -> None:
    transform: Any = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    with pytest.raises(UnsupportedTransformError, match=r"proxyloader\.DataLoader\(ImageFolder.*pipelines\.training"):
        FileReaderLoader(photos, compile_transforms(transform) if compiled else transform)


def test_what_is_no_pipeline_function_is_refused_with_what_to_do(photos: Path) -> None:
    with pytest.raises(TypeError, match=r"use FileReaderLoader\.from_pipeline\(pipeline\)"):
        FileReaderLoader(photos, of_ones_own(photos))
    with pytest.raises(TypeError, match="pipeline is read; it should be pipelines.training"):

        def read(encoded: Any) -> Any: ...

        FileReaderLoader(photos, read)

    @pipeline_def
    def without_source(data_dir: str) -> Any: ...

    with pytest.raises(TypeError, match=r"without_source does not take source.*from_pipeline"):
        FileReaderLoader(photos, without_source)
    with pytest.raises(TypeError, match=r"takes a nvidia.dali.Pipeline, got training\. Call the function"):
        FileReaderLoader.from_pipeline(pipelines.training)  # type: ignore[arg-type]


def test_a_pipeline_without_a_reader_of_that_name_is_refused(numbered: Path) -> None:
    with pytest.raises(ValueError, match=r"no reader named 'Reader'; it has Mine\. Name it: fn\.readers\.file"):
        FileReaderLoader.from_pipeline(of_ones_own(numbered, name="Mine"))
    loader = FileReaderLoader.from_pipeline(of_ones_own(numbered, name="Mine", pad_last_batch=True), "Mine")
    assert sum(len(data) for data, _ in loader) == 23


def test_images_of_several_sizes_make_no_batch(photos: Path) -> None:
    loader = FileReaderLoader(photos, pipelines.rotation, 4, device="cpu", num_threads=1)
    with pytest.raises(PipelineError, match="the samples of a batch differ in shape"):
        list(loader)


def test_under_torchrun_each_process_may_read_its_shard(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    how: dict[str, Any] = {"device": "cpu", "resize": 32, "size": 32}
    for num_shards in ("auto", 3):
        with FileReaderLoader(photos, pipelines.validation, 4, num_shards=num_shards, **how) as loader:
            assert "shard 1 of 3" in repr(loader)
    with FileReaderLoader(photos, pipelines.validation, 4, **how) as loader:
        assert "shard 0 of 1" in repr(loader), "all is read where nobody says otherwise"
    with pytest.raises(ValueError, match="num_shards=2 contradicts .* rank 1 of 3"):
        FileReaderLoader(photos, pipelines.validation, 4, num_shards=2, shard_id=0, **how)


VALIDATION = {
    "the usual": transforms.Compose(
        [
            transforms.Resize(40),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    ),
    "levels": transforms.Compose([transforms.Resize((30, 24)), transforms.PILToTensor()]),
    "padded, v2": v2.Compose(
        [v2.CenterCrop(600), v2.Resize(20), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Grayscale()]
    ),
}


@pytest.mark.parametrize("transform", VALIDATION.values(), ids=VALIDATION)
def test_a_transform_without_chance_gives_what_the_loader_gives(photos: Path, transform: Any, device: str) -> None:
    how: dict[str, Any] = {"device": device, "num_threads": 2, "hw_decoder_load": 1.0}
    theirs = list(DataLoader(ImageFolder(str(photos), transform), 7, **how))
    with FileReaderLoader(photos, transform, 7, **how) as loader:
        for _ in range(2):
            for (images, labels), (wanted, wanted_labels) in zip(loader, theirs, strict=True):
                assert images.device.type == device and torch.equal(labels.cpu(), wanted_labels)
                torch.testing.assert_close(images, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transform", VALIDATION.values(), ids=VALIDATION)
def test_a_transform_does_not_turn_images_by_exif(photos: Path, tmp_path: Path, transform: Any, device: str) -> None:
    (tmp_path / "class").mkdir()
    for k, path in enumerate(sorted(photos.rglob("*.jpg"))[:8]):
        with Image.open(path) as image:
            exif = image.getexif()
            exif[ExifTags.Base.Orientation] = 1 + k
            image.save(tmp_path / "class" / f"{k}.jpg", exif=exif)
    how: dict[str, Any] = {"device": device, "num_threads": 2, "hw_decoder_load": 1.0}
    (wanted, _) = next(iter(DataLoader(ImageFolder(str(tmp_path), transform), 8, **how)))
    with FileReaderLoader(tmp_path, transform, 8, **how) as loader:
        (images, _) = next(iter(loader))
    torch.testing.assert_close(images, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (transforms.RandomResizedCrop(32), "draws random numbers .*RandomResizedCrop.get_params"),
        (transforms.RandomApply([transforms.Grayscale(3)]), "draws random numbers"),
        (v2.Compose([v2.FiveCrop(16), v2.ToImage()]), "makes 5 images of one"),
        (transforms.ElasticTransform(), "ElasticTransform"),
    ],
    ids=str,
)
def test_a_transform_with_chance_is_refused(photos: Path, transform: Any, said: str) -> None:
    whole = (
        transforms.Compose([transform, transforms.ToTensor()]) if not isinstance(transform, v2.Compose) else transform
    )
    with pytest.raises(UnsupportedTransformError, match=said):
        FileReaderLoader(photos, whole, 4)


# --- going on in mid-epoch -------------------------------------------------------------------------------------------


def resumable(photos: Path, device: str, **others: Any) -> FileReaderLoader:
    how: dict[str, Any] = {"shuffle": True, "seed": 3, "device": device, "num_threads": 2, "size": 32}
    return FileReaderLoader(photos, pipelines.training, 7, **how | others)


@pytest.mark.parametrize("policy", ["partial", "fill", "drop"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stop", [0, 1, 2, "end"])
def test_a_loop_goes_on_where_the_state_was_saved(
    photos: Path, device: str, policy: str, shards: int, stop: Any
) -> None:
    sharded = {"num_shards": shards, "shard_id": shards - 1} if shards > 1 else {}
    with resumable(photos, device, last_batch_policy=policy, **sharded) as loader:
        before = list(loader)
        seen = []
        epoch = iter(loader)
        for _ in range(len(loader) if stop == "end" else stop):
            seen.append(next(epoch))
        if stop == "end":
            assert list(epoch) == []
        state = loader.state_dict()
        rest = [*epoch, *loader] if stop != "end" else [*loader, *loader]
        assert before
    with resumable(photos, device, last_batch_policy=policy, **sharded) as loader:
        loader.load_state_dict(torch.load(io.BytesIO(saved(state)), weights_only=True))
        again = [*loader, *loader]
    assert len(again) == len(rest) > 0
    for (images, labels), (wanted, wanted_labels) in zip(again, rest):
        assert torch.equal(images, wanted) and torch.equal(labels, wanted_labels)


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def other_checkpoint(photos: Path) -> Any:
    with resumable(photos, "cpu", augmentation="trivialaugment") as loader:
        return loader.state_dict()["checkpoint"]


def test_a_state_of_another_loader_is_refused(photos: Path) -> None:
    with resumable(photos, "cpu") as loader:
        state = loader.state_dict()
    changed: list[dict[str, Any]] = [{"seed": 4}, {"shuffle": False}, {"last_batch_policy": "fill"}, {"flip": 0.1}]
    for other in changed:
        name = next(iter(other)) if "flip" not in other else "pipeline"
        with resumable(photos, "cpu", **other) as loader:
            with pytest.raises(ValueError, match=rf"saved by a loader with {name}=\S+, and this one has {name}="):
                loader.load_state_dict(state)
            assert sum(len(images) for images, _ in loader) >= 48  # nothing was lost by that
    with resumable(photos, "cpu") as loader:
        with pytest.raises(ValueError, match="with samples=47, and this one has samples=48"):
            loader.load_state_dict(state | {"samples": 47})
        with pytest.raises(ValueError, match="DALI cannot go on from this state, which is of another pipeline"):
            loader.load_state_dict(state | {"checkpoint": other_checkpoint(photos)})
        assert sum(len(images) for images, _ in loader) == 48
        with pytest.raises(ValueError, match="takes what state_dict of a FileReaderLoader gave"):
            loader.load_state_dict({})
    given = pipelines.training(source=Reader(str(photos), pad_last_batch=True), batch_size=7, num_threads=1, size=32)
    with FileReaderLoader.from_pipeline(given) as loader:
        with pytest.raises(ValueError, match=r"cannot go to another place .* checkpoint=state\['checkpoint'\]"):
            loader.load_state_dict(state)
        assert sum(len(images) for images, _ in loader) == 48  # nothing was lost by that
    without = resumable(photos, "cpu", enable_checkpointing=False)
    with without as loader, pytest.raises(ValueError, match="build it with enable_checkpointing=True"):
        loader.state_dict()


# --- after an error, an interrupt, a break ---------------------------------------------------------------------------


@pipeline_def(exec_dynamic=True)
def interrupted_at_5(source: Callable[[], Any]) -> Any:
    content, labels = source()
    return fn.python_function(content[0:1], function=fail_at_5), labels


def fail_at_5(number: Any) -> Any:
    if number[0] == 5 and Failing.now:
        raise ValueError("five")
    return number


class Failing:
    now = True


def test_a_loop_that_failed_hands_out_nothing_more_and_the_next_is_whole(numbered: Path) -> None:
    Failing.now = True
    with FileReaderLoader(numbered, interrupted_at_5, 2, device="cpu", num_threads=1) as loader:
        batches = iter(loader)
        with pytest.raises(PipelineError, match=r"(?s)DALI failed on a batch.*five"):
            for _ in range(6):
                next(batches)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="failed, or was interrupted"):
                next(batches)
        Failing.now = False
        for _ in range(2):
            assert [int(k) for content, _ in loader for k in content.flatten()] == list(range(23))


def test_where_others_use_up_the_engines_the_loop_is_an_error_and_the_next_is_whole(
    numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is found on a GPU: see ``tests/gpu/test_engines_gpu.py``."""
    loader = numbers_in(numbered)
    failing = [loader._epochs.pipeline]
    monkeypatch.setattr(jpeg_engines, "have_failed", lambda pipeline: pipeline in failing)
    assert flat(loader) == list(range(23)) and loader._epochs.pipeline not in failing  # it was built again
    batches = iter(loader)
    next(batches)
    failing.append(loader._epochs.pipeline)
    with raises(PipelineError, code="no-engines"):
        next(batches)
    assert flat(loader) == list(range(23)) and loader._epochs.pipeline not in failing
    batches = iter(loader)
    assert len([next(batches) for _ in range(6)]) == len(loader)
    failing.append(loader._epochs.pipeline)
    assert next(batches, None) is None  # it needs no more of its pipeline


def test_what_is_no_class_number_is_handed_out_as_it_is(numbered: Path) -> None:
    @pipeline_def(exec_dynamic=True)
    def one_hot(source: Callable[[], Any]) -> Any:
        content, labels = source()
        return content[0:1], fn.one_hot(labels, num_classes=3)

    @pipeline_def(exec_dynamic=True)
    def halves(source: Callable[[], Any]) -> Any:
        content, labels = source()
        return content[0:1], labels + 0.5

    for graph, shape in ((one_hot, (4, 3)), (halves, (4, 1))):
        with FileReaderLoader(numbered, graph, 4, device="cpu", num_threads=1) as loader:
            _, labels = next(iter(loader))
            assert labels.shape == shape
    assert labels[0] == 0.5


def test_a_given_pipeline_that_moves_from_shard_to_shard_does_so_after_a_break(
    numbered: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shard(k: int) -> FileReaderLoader:
        pipeline = numbers(
            source=Reader(str(numbered), num_shards=2, shard_id=k, pad_last_batch=True), batch_size=4, num_threads=1
        )
        return FileReaderLoader.from_pipeline(pipeline)

    def epoch(loader: FileReaderLoader, leave: bool) -> set[int]:
        seen: set[int] = set()
        for content, _ in loader:
            seen |= {int(k) for k in content.flatten()}
            if leave and len(seen) >= 8:
                break
        return seen

    first, second = shard(0), shard(1)
    for leaves in (True, False, True, False):
        assert not epoch(first, leaves) & epoch(second, False)
    assert "what is left is read and thrown away" in caplog.text


def with_places(root: Path) -> Any:
    """A pipeline whose labels are the places of its samples in the padded epoch, from a function."""

    @pipeline_def(batch_size=4, num_threads=1)
    def graph() -> Any:
        content, _ = fn.readers.file(file_root=str(root), name="Reader", pad_last_batch=True)
        places = fn.external_source(lambda info: np.int32([info.idx_in_epoch % 24]), batch=False, dtype=types.INT32)
        return content, places

    return graph()


def checkpointed(root: Path) -> Any:
    first = FileReaderLoader.from_pipeline(numbers_with_checkpoints(root))
    for _ in range(2):
        next(iter(first))
    return numbers_with_checkpoints(root, first.state_dict()["checkpoint"])


def numbers_with_checkpoints(root: Path, checkpoint: bytes | None = None) -> Any:
    source = Reader(str(root), pad_last_batch=True)
    return numbers(source=source, batch_size=4, num_threads=1, enable_checkpointing=True, checkpoint=checkpoint)


def deserialized(root: Path) -> Any:
    source = Reader(str(root), pad_last_batch=True)
    return Pipeline.deserialize(numbers(source=source, batch_size=4, num_threads=1, device_id=None).serialize())


@pytest.mark.parametrize("make", [with_places, checkpointed, deserialized])
def test_a_given_pipeline_that_cannot_begin_anew_is_read_to_its_end_after_a_break(
    make: Callable[[Path], Any], numbered: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = FileReaderLoader.from_pipeline(make(numbered))
    list(loader)  # what is left of an epoch that goes on
    whole = [[tensor.flatten().tolist() for tensor in batch] for batch in loader]
    for leave in (0, 2):
        for k, _ in enumerate(loader):
            if k == leave:
                break
        assert [[tensor.flatten().tolist() for tensor in batch] for batch in loader] == whole
    assert caplog.text.count("cannot begin anew: what is left is read") == 2
    assert make is not with_places or flat((places, _) for _, places in whole) == list(range(23))


def test_what_is_left_of_an_epoch_is_read_once_however_often_the_next_loop_begins(
    numbered: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = FileReaderLoader.from_pipeline(deserialized(numbered))
    next(iter(loader))
    for _ in range(3):
        iter(loader)
    assert caplog.text.count("what is left is read and thrown away") == 1


def read_by_dali(root: Path, **others: Any) -> Any:
    return numbers(source=Reader(str(root), pad_last_batch=True), batch_size=4, num_threads=1, device_id=None, **others)


@pytest.mark.parametrize("how", ["by a loader", "by DALI's iterator", "by hand"])
def test_a_pipeline_that_somebody_else_left_in_mid_epoch_begins_anew(
    how: str, numbered: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = read_by_dali(numbered)
    if how == "by a loader":
        next(iter(FileReaderLoader.from_pipeline(pipeline)))
    elif how == "by hand":
        pipeline.run()
    else:
        next(DALIClassificationIterator(pipeline, reader_name="Reader"))
    loader = FileReaderLoader.from_pipeline(pipeline)
    assert [flat(loader) for _ in range(2)] == [list(range(23))] * 2
    assert "somebody else has begun an epoch of the pipeline, and left it; it begins anew" in caplog.text


def test_a_pipeline_that_was_left_in_mid_epoch_and_cannot_begin_anew_is_refused(numbered: Path) -> None:
    pipeline = with_places(numbered)
    next(iter(FileReaderLoader.from_pipeline(pipeline)))
    with pytest.raises(ValueError, match="calls functions for data, .* cannot begin anew: define it again"):
        FileReaderLoader.from_pipeline(pipeline)


def test_a_pipeline_has_one_loader(numbered: Path) -> None:
    pipeline = read_by_dali(numbered)
    first = FileReaderLoader.from_pipeline(pipeline)
    loop = iter(first)
    next(loop)
    second = FileReaderLoader.from_pipeline(pipeline)
    for use in (lambda: next(loop), lambda: iter(first)):
        with pytest.raises(RuntimeError, match="another FileReaderLoader .* build a pipeline for each"):
            use()
    assert flat(second) == list(range(23))


@pytest.mark.parametrize("policy", ["partial", "fill", "drop"])
@pytest.mark.parametrize("before", [1, 3])
def test_a_pipeline_that_goes_on_from_a_checkpoint_ends_its_epoch_as_the_policy_says(
    policy: str, before: int, numbered: Path
) -> None:
    def loader(checkpoint: bytes | None = None) -> FileReaderLoader:
        pipeline = read_by_dali(numbered, enable_checkpointing=True, checkpoint=checkpoint)
        return FileReaderLoader.from_pipeline(pipeline, last_batch_policy=policy)

    first = loader()
    loop = iter(first)
    for _ in range(before):
        next(loop)
    second = loader(first.state_dict()["checkpoint"])
    assert flat(second) == flat(loop) != []
    assert flat(second) == flat(first)


def test_len_after_a_break_is_that_of_the_epoch_that_comes(numbered: Path) -> None:
    loader = numbers_in(numbered, 11, num_shards=2, shard_id=0, seed=0)  # 11 samples, and 12 in the other shard
    for expected in (1, 2, 1):
        assert len(loader) == expected
        loop = iter(loader)
        next(loop)
        assert len(loader) == expected
        del loop


def copied(root: Path, to: Path) -> Path:
    return Path(shutil.copytree(root, to))


@pytest.mark.parametrize("was_left", [True, False])
def test_when_a_root_that_was_away_is_back_the_next_loop_reads_it(
    numbered: Path, tmp_path: Path, was_left: bool
) -> None:
    root = copied(numbered, tmp_path / "set")
    loader = numbers_in(root)
    if was_left:
        next(iter(loader))
    else:
        assert len(flat(loader)) == 23
    root.rename(tmp_path / "away")
    with pytest.raises((FileNotFoundError, PipelineError)):
        list(loader)
    if was_left:
        with pytest.raises(RuntimeError, match=r"the epoch could not begin; try again: iter\(loader\)"):
            len(loader)
        assert "to be opened" in repr(loader)
    with pytest.raises(FileNotFoundError):
        list(loader)
    (tmp_path / "away").rename(root)
    for _ in range(2):
        assert flat(loader) == list(range(23)) and len(loader) == 6
    loader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        list(loader)


def test_set_epoch_says_what_comes_also_after_a_loop_that_could_not_begin(numbered: Path, tmp_path: Path) -> None:
    root = copied(numbered, tmp_path / "set")
    loader = numbers_in(root)
    next(iter(loader))
    root.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        iter(loader)  # epoch 1
    (tmp_path / "away").rename(root)
    loader.set_epoch(2)
    assert len(list(loader)) == 6 and loader.state_dict()["epoch"] == 3


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_pickled_or_copied(numbered: Path, copy_of: Callable[[Any], Any]) -> None:
    loader = numbers_in(numbered)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy_of(loader)
    assert flat(loader) == list(range(23))


def test_a_reader_that_lists_other_files_than_before_says_so(
    numbered: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copied(numbered, tmp_path / "set")
    loader = numbers_in(root)
    next(iter(loader))
    with caplog.at_level(logging.WARNING, "proxyloader"):
        next(iter(loader))
        assert not caplog.text
        (root / "class2" / "23.jpg").write_bytes(bytes([23]))
        assert len(flat(loader)) == 24 and len(loader) == 6
    assert "lists 24 samples now, and listed 23 before" in caplog.text


def test_a_function_that_gives_no_more_in_mid_epoch_is_told_of(
    numbered: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @pipeline_def(batch_size=4, num_threads=1)
    def graph() -> Any:
        content, _ = fn.readers.file(file_root=str(numbered), name="Reader", pad_last_batch=True)
        return content, fn.external_source([[np.zeros(1)] * 4] * 3)

    assert len(list(FileReaderLoader.from_pipeline(graph()))) == 3
    assert "ended after 3 of 6 batches: a function that the pipeline calls for data gives no more" in caplog.text


def test_a_pipeline_to_be_fed_by_hand_is_refused(numbered: Path) -> None:
    @pipeline_def(batch_size=4, num_threads=1)
    def graph() -> Any:
        content, _ = fn.readers.file(file_root=str(numbered), name="Reader")
        return content, fn.external_source(name="others")

    with pytest.raises(ValueError, match="is to be fed by hand: others. .*ProxyServer"):
        FileReaderLoader.from_pipeline(graph())


def test_set_epoch_says_which_shard_and_order_come(photos: Path) -> None:
    how: dict[str, Any] = {"num_shards": 3, "shard_id": 0}
    with resumable(photos, "cpu", **how) as counted, resumable(photos, "cpu", **how) as told:
        for _ in range(2):
            next(iter(counted))
        told.set_epoch(2)
        for (images, labels), (wanted, wanted_labels) in zip(told, counted, strict=True):
            assert torch.equal(images, wanted) and torch.equal(labels, wanted_labels)
        told.set_epoch(3)  # which comes anyway
        assert [len(labels) for _, labels in told] == [len(labels) for _, labels in counted]


def test_orders_that_processes_could_differ_in_are_refused(photos: Path) -> None:
    with pytest.raises(ValueError, match="shuffle_after_epoch.*Use shuffle=True"):
        FileReaderLoader(photos, pipelines.validation, reader_options={"shuffle_after_epoch": True}, device="cpu")


def test_a_subclass_of_a_transform_is_a_transform(photos: Path) -> None:
    class Mine(transforms.Compose): ...

    with pytest.raises(UnsupportedTransformError, match="Mine"):
        FileReaderLoader(photos, Mine([transforms.Resize(32), transforms.ToTensor()]), device="cpu")
    with pytest.raises(TypeError, match="with a transform takes no size"):
        FileReaderLoader(photos, transforms.Compose([transforms.ToTensor()]), device="cpu", size=9)
