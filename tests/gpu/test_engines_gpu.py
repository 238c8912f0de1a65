"""Engines on a GPU: who decodes is seen by a picture, and where others use them up, the batches are right."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvidia.dali import Pipeline, fn, pipeline_def, types
from torchvision import transforms
from torchvision.datasets import ImageFolder

from proxyloader import DataLoader, ProxyServer, pipelines
from proxyloader.dali import executor as _executor, interrupts, jpeg_engines
from proxyloader.make_dataset import make_dataset

from .. import scripts
from ..faults import Spelled
from ..integration.roads import read_bytes
from ..limits import WAIT_S
from ..numbered import SIDE_PX, read_numbers, spell_dataset

TO_TENSOR = transforms.Compose([transforms.CenterCrop(224), transforms.ToTensor()])

pytestmark = pytest.mark.alone  # as they count on how many use the engines, or use them up

EXHAUST = """
import logging, subprocess, sys
import numpy as np
from PIL import Image
from nvidia.dali import fn, pipeline_def, types
from torchvision import transforms
from proxyloader import DataLoader, ProxyServer
from proxyloader.dali import executor, jpeg_engines
from tests.faults import Spelled
from tests.gpu.test_engines_gpu import by_hand, is_right
from tests.numbered import read_numbers

def decoder(number):
    @pipeline_def(batch_size=1, num_threads=1, device_id=0, prefetch_queue_depth=1, exec_dynamic=True)
    def graph():
        images = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        padding = (1 << 20) + 4096 * number  # each its own, so that none shares its room with another
        return fn.decoders.image(images, device="mixed", hw_decoder_load=1.0, device_memory_padding=padding)

    return graph()

def exhaust():
    encoded, _ = jpeg_engines.make_test_image(quality=90)
    held, padding = [], (("device_memory_padding", 1 << 19),)
    while len(held) % 8 or jpeg_engines._measure_error(0, padding) < jpeg_engines.MAX_MEAN_ERROR:
        assert len(held) < 100
        held.append(decoder(len(held)))
        held[-1].build()
        held[-1].feed_input("images", executor.tensor_list([encoded]))
        held[-1]._run_once()
        held[-1].outputs()
    print(len(held))
    return held

logging.basicConfig()
dataset = Spelled(sys.argv[1], transform=transforms.PILToTensor())
"""

LATE = """
# The others leave no room to start CUDA or its decoders.
jpeg_engines._measure_error(0, engine_share=0.0)
print("ready", flush=True)
assert input() == "go"
jpeg_engines.CROWDED_BYTES = 0
for _ in range(2):
    for images, indices in DataLoader(dataset, 8, device="cuda"):
        assert read_numbers(images, white=255) == indices.tolist()
for is_built, given in ((True, {}), (False, {"hw_decoder_load": 1.0}), (True, {"device_memory_padding": 12345})):
    jpeg_engines._engines.clear()  # as in a process of its own
    pipeline = by_hand(**given)
    if is_built:
        pipeline.build()
    assert is_right(ProxyServer(pipeline), sys.argv[1]), (given, is_built)
print("right")
"""

EARLY = """
pipe = subprocess.PIPE
late = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
assert late.stdout.readline() == "ready\\n", late.communicate()
loader = DataLoader(dataset, 8, device="cuda", collate_fn=list)
bound, jpeg_engines.CROWDED_BYTES = jpeg_engines.CROWDED_BYTES, 0  # as when others come
next(iter(loader))
jpeg_engines.CROWDED_BYTES = bound
others = exhaust()
for batch in loader:
    for image, index in batch:
        image = image.permute(1, 2, 0).cpu().numpy()
        theirs = np.asarray(Image.open(dataset.samples[index][0]).convert("RGB"))
        off = np.abs(image.astype(int) - theirs).mean()
        assert off < jpeg_engines.MAX_MEAN_ERROR, off  # so it was the engines
assert len(batch) == 1  # which takes room of its own
print("right")
output, errors = late.communicate("go", timeout=120)
assert late.returncode == 0 and "Falling back to CUDA" in errors, errors
print(output)
"""

PAUSED = """
batches = iter(DataLoader(dataset, 8, device="cuda"))
seen = [next(batches)]
others = exhaust()
jpeg_engines.CROWDED_BYTES = 0
for images, indices in [*seen, *batches]:
    assert read_numbers(images, white=255) == indices.tolist()
assert jpeg_engines.are_disabled(0)
print("right")
"""


def test_who_decoded_is_seen_on_a_gpu_with_engines() -> None:
    assert jpeg_engines._measure_error(0) < jpeg_engines.MAX_MEAN_ERROR / 2
    assert jpeg_engines._measure_error(0, engine_share=0.0) > jpeg_engines.MAX_MEAN_ERROR * 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where other processes use them up."""
    monkeypatch.setattr(jpeg_engines, "_engines", {})
    monkeypatch.setattr(jpeg_engines, "CROWDED_BYTES", 0)
    monkeypatch.setattr(jpeg_engines, "_measure_error", lambda device_id, padding: 1.0)


def by_hand(**given: Any) -> Pipeline:
    @pipeline_def(batch_size=8, num_threads=1, device_id=0, exec_dynamic=True)
    def graph() -> Any:
        encoded = fn.external_source(name="images", no_copy=True)
        return fn.decoders.image(encoded, device="mixed", output_type=types.RGB, **given)

    return graph()


READY = {"size": SIDE_PX, "resize": SIDE_PX, "mean": (0, 0, 0), "std": (1, 1, 1), "layout": "HWC"}


def is_right(server: ProxyServer, root: str | Path) -> bool:
    dataset = Spelled(root, transform=server.proxy, loader=read_bytes)
    for images, indices in DataLoader(dataset, 8, server=server):
        if read_numbers(images.movedim(-1, 1), white=255) != indices.tolist():
            return False
    return True


@pytest.mark.parametrize(
    "make",
    [
        by_hand,
        functools.partial(by_hand, hw_decoder_load=0.5),
        functools.partial(pipelines.validation, "proxy", **READY, batch_size=8, num_threads=1, device_id=0),
    ],
    ids=["by default", "told", "ready"],
)
@pytest.mark.parametrize("is_built", [False, True])
def test_a_users_pipeline_is_made_to_leave_them_alone(
    make: Callable[[], Pipeline], is_built: bool, failing: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    root = spell_dataset(tmp_path / "set", 24)
    for attempt in range(2):
        pipeline = make()
        if is_built:
            pipeline.build()
        executor = pipeline._pipe
        caplog.clear()
        with caplog.at_level(logging.WARNING, "proxyloader"):
            server = ProxyServer(pipeline)
        assert ("GPU 0 has no JPEG engines, or other processes have exhausted them" in caplog.text) == (attempt == 0)
        assert server.pipeline is pipeline and pipeline._pipe is not executor
        assert not _executor.get_engine_paddings(pipeline)
        assert is_right(server, root)


def exhausting(script: str, *arguments: Any) -> Any:
    # The more queues a process has, the more room each decoder takes.
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    done = scripts.run(EXHAUST + script, *arguments, timeout_s=4 * WAIT_S, environment=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.timeout(240)
def test_who_was_there_before_others_use_them_up_keeps_them_and_who_comes_later_is_right(tmp_path: Path) -> None:
    images = make_dataset(tmp_path / "images", images=8 * 8 + 1, size=(320, 240), processes=1, progress=False)
    numbers = spell_dataset(tmp_path / "numbers", 64)
    done = exhausting(EARLY, images, EXHAUST + LATE, numbers)
    assert done.stdout.split()[1:] == ["right", "right"]
    assert "Falling back to CUDA" not in done.stderr


@pytest.mark.timeout(240)
def test_who_pauses_while_others_use_them_up_goes_on_without(tmp_path: Path) -> None:
    done = exhausting(PAUSED, spell_dataset(tmp_path / "numbers", 64))
    assert done.stdout.split()[1:] == ["right"]
    assert done.stderr.count("Falling back to CUDA") == 1


def test_no_thread_of_dali_stays_on_the_core_that_handles_the_interrupts(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "images", images=1024, size=(320, 240), processes=4, progress=False)
    loader = DataLoader(ImageFolder(root, TO_TENSOR), 256, num_workers=4, persistent_workers=True, device="cuda")
    before, cores, begun_s = gpu_interrupts(), os.sched_getaffinity(0), time.monotonic()
    while time.monotonic() < begun_s + 3 * interrupts.INTERVAL_S:
        list(loader)
    counts, elapsed_s = gpu_interrupts(), time.monotonic() - begun_s
    busy = {core for core in counts if counts[core] - before[core] > 2 * interrupts.BUSY_PER_S * elapsed_s}
    threads = [
        task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("[DALI] Ex")
    ]
    assert threads
    assert not any(os.sched_getaffinity(int(task.name)) & busy for task in threads if len(busy) < len(cores))
    assert os.sched_getaffinity(0) == cores


def gpu_interrupts() -> dict[int, int]:
    lines = Path("/proc/interrupts").read_text().splitlines()
    rows = [[*map(int, line.split()[1 : 1 + len(lines[0].split())])] for line in lines if line.endswith("nvidia")]
    return {int(name[3:]): sum(column) for name, column in zip(lines[0].split(), zip(*rows))}
