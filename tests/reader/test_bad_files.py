"""Where DALI's reader fails, or what decodes behind it, the file that is to blame is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from nvidia.dali import fn, pipeline_def
from PIL import Image

from proxyloader import FileReaderLoader, PipelineError
from proxyloader.reader import bad_files, pipelines
from proxyloader.reader.sources import Reader

SMALL: dict[str, Any] = {"size": 16, "device": "cpu", "num_threads": 1}


@pytest.fixture
def root(photos: Path, tmp_path: Path) -> Path:
    """12 photographs in 3 class folders, and files that are not read."""
    root = tmp_path / "set"
    for k, path in enumerate(sorted(photos.rglob("*.jpg"))[:12]):
        folder = root / f"class_{k // 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k:02}{'.JPG' if k % 3 else '.jpg'}").write_bytes(path.read_bytes())
    (root / "class_0" / "notes.txt").write_text("no image")
    (root / "readme.jpg").write_text("in no class")
    (root / "class_1" / "04b.jpg").mkdir()
    (root / "list.txt").write_text("class_2/08.JPG 1\n\nclass_0/00.jpg 0\n")
    return root


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"file_filters": ["*1.jpg", "0*.jpg"]},
        {"file_filters": ["*.jpg"], "case_sensitive_filter": True},
        {"dir_filters": ["*_0", "*_2"]},
        {"dir_filters": "*_1", "file_filters": "*5.*"},
        {"files": ["class_1/05.JPG", "class_0/03.jpg"]},
        {"files": "class_1/05.JPG"},
        {"file_list": "list.txt"},
    ],
    ids=str,
)
def test_the_files_are_those_that_dali_reads_and_in_its_order(root: Path, options: dict[str, Any]) -> None:
    if "file_list" in options:
        options = {"file_list": str(root / options["file_list"])}
    source = Reader(root, options=options)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)  # type: ignore[untyped-decorator,unused-ignore]
    def names() -> Any:
        encoded, _ = source()
        return fn.get_property(encoded, key="source_info")

    pipeline = names()
    pipeline.build()
    theirs = [bytes(pipeline.run()[0].at(0)).decode() for _ in range(pipeline.epoch_size("Reader"))]
    assert [str(Path(path).relative_to(root)) for path in bad_files._paths(source)] == theirs


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"text", "4 bytes, in no image format"),
        (b"", r"the file is empty \(0 bytes\)"),
    ],
    ids=["text", "empty"],
)
def test_a_file_that_cannot_be_read_is_named(root: Path, content: bytes, reason: str, shuffle: bool) -> None:
    loader = FileReaderLoader(root, pipelines.validation, 2, shuffle=shuffle, **SMALL)
    bad = root / "class_1" / "05.JPG"
    bad.write_bytes(content)
    somewhere = "In this batch or another: " * (shuffle and len(content) > 0)  # an empty one DALI names itself
    message = f"DALI failed on a batch. {somewhere}{re.escape(str(bad))}: {reason}.*on_error='skip'"
    with pytest.raises(PipelineError, match=message):
        list(loader)


@pytest.mark.parametrize("listed", ["file_list", "files"])
def test_a_file_under_a_root_among_the_options_is_named(root: Path, tmp_path: Path, listed: str) -> None:
    (tmp_path / "list.txt").write_text("class_0/03.jpg 0\nclass_1/05.JPG 1\n")
    names = {"file_list": str(tmp_path / "list.txt"), "files": ["class_0/03.jpg", "class_1/05.JPG"]}[listed]
    options = {listed: names, "file_root": str(root)}
    loader = FileReaderLoader(None, pipelines.validation, 2, reader_options=options, **SMALL)
    (root / "class_1" / "05.JPG").write_bytes(b"text")
    with pytest.raises(PipelineError, match=r"batch. \S+/set/class_1/05\.JPG: 4 bytes"):
        list(loader)


def test_of_two_the_one_is_named_that_is_in_the_batch(root: Path) -> None:
    loader = FileReaderLoader(root, pipelines.validation, 2, num_shards=2, shard_id=1, **SMALL)
    for name in ("class_0/01.JPG", "class_2/10.JPG", "class_2/11.JPG"):  # the first is of the other shard
        (root / name).write_bytes(b"text")
    with pytest.raises(PipelineError, match=r"batch. \S+class_2/10\.JPG: 4 bytes"):
        list(loader)


def test_for_what_pillow_can_read_and_dali_cannot_no_other_file_is_blamed(root: Path) -> None:
    loader = FileReaderLoader(root, pipelines.validation, 2, num_shards=2, shard_id=1, **SMALL)
    (root / "class_0" / "01.JPG").write_bytes(b"text")
    Image.new("RGB", (20, 20)).save(root / "class_2" / "10.JPG", "GIF")
    with pytest.raises(PipelineError, match=r"DALI failed on a batch\. DALI's reader cannot"):
        list(loader)


@pytest.mark.parametrize("gone", ["root", "list"])
def test_where_the_files_have_gone_meanwhile_the_error_is_still_dalis(root: Path, gone: str) -> None:
    listed = root / "list.txt"
    source = {"reader_options": {"file_list": str(listed)}} if gone == "list" else {}
    loader = FileReaderLoader(root, pipelines.validation, 2, **source, **SMALL)
    for path in root.rglob("*.[jJ]*"):
        if path.is_file():
            path.write_bytes(b"text")
    batches = iter(loader)
    root.rename(root.with_name("away")) if gone == "root" else listed.unlink()
    with pytest.raises(PipelineError, match="DALI failed on a batch. "):
        list(batches)


def test_nobody_is_blamed_for_other_errors_or_after_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "class_0" / "01.JPG").write_bytes(b"text")
    source = Reader(root)

    def blamed(operator: str, source: Reader, batch: range = range(12)) -> str:
        return bad_files.find_bad_file(RuntimeError(f"in CPU operator `nvidia.dali.fn.{operator}`,"), source, batch)

    for operator in ("decoders.image", "decoders.image_random_crop", "experimental.decoders.image", "peek_image_shape"):
        assert "01.JPG" in blamed(operator, source)
    for operator in ("resize", "decoders.audio"):
        assert not blamed(operator, source)
    assert not blamed("decoders.image", Reader(root, "numpy"))
    assert not blamed("decoders.image", source, range(2, 4))
    monkeypatch.setattr(bad_files, "LOOK_S", -1.0)
    assert not blamed("decoders.image", source)
