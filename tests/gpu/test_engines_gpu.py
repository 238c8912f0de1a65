"""Engines on a GPU: who decodes is seen by a picture, and where others use them up, the batches are right."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from torchvision.transforms import PILToTensor

from proxyloader import _dali, engines, pipelines
from proxyloader.pipeline import PipelineOptions, build_pipeline
from proxyloader.server import ProxyServer
from proxyloader.spelled import spell_dataset
from proxyloader.transforms.registry import plan_for

EXHAUSTED = """
import logging, sys
from nvidia.dali import fn, pipeline_def, types
from torchvision import transforms
from proxyloader import DataLoader, _dali, engines
from proxyloader.spelled import numbers_in
from tests.faults import Spelled

def decoder(number):
    @pipeline_def(batch_size=1, num_threads=1, device_id=0, prefetch_queue_depth=1, exec_dynamic=True)
    def graph():
        images = fn.external_source(name="images", no_copy=True, ndim=1, dtype=types.UINT8)
        padding = (1 << 20) + 4096 * number  # each its own, so that none shares its room with another
        return fn.decoders.image(images, device="mixed", hw_decoder_load=1.0, device_memory_padding=padding)

    return graph()

logging.basicConfig()
engines.CROWDED_BYTES = 0
dataset = Spelled(sys.argv[1], transform=transforms.PILToTensor())
encoded, _ = engines._picture()
held = []
while len(held) % 8 or engines._levels_off(0) < engines.MOST_LEVELS:
    assert len(held) < 100
    held.append(decoder(len(held)))
    held[-1].build()
    held[-1].feed_input("images", _dali.tensor_list([encoded]))
    _dali.run(held[-1])
    held[-1].outputs()
print(len(held))
for _ in range(2):
    for images, indices in DataLoader(dataset, 8, device="cuda"):
        assert numbers_in(images, white=255) == indices.tolist()
print("right")
"""


def test_who_decoded_is_seen_on_a_gpu_with_engines() -> None:
    assert engines._levels_off(0, 1.0) < engines.MOST_LEVELS / 2
    assert engines._levels_off(0, 0.0) > engines.MOST_LEVELS * 2


def test_ready_graphs_leave_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_failing", {0})
    pipeline = pipelines.validation("proxy", batch_size=1, num_threads=1, device_id=0)
    pipeline.build()
    assert not _dali.uses_engines(pipeline)
    assert not _dali.uses_engines(build_pipeline(plan_for(PILToTensor()), PipelineOptions(1, device_id=0)))


def test_a_pipeline_by_hand_that_counts_on_them_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "_failing", set())
    monkeypatch.setattr(engines, "CROWDED_BYTES", 0)
    monkeypatch.setattr(engines, "_levels_off", lambda device_id: 1.0)
    with caplog.at_level(logging.WARNING, "proxyloader"):
        ProxyServer(pipelines.validation("proxy", batch_size=1, num_threads=1, device_id=0))
    assert "GPU 0 has no JPEG engines, or other processes use them up" in caplog.text


@pytest.mark.timeout(240)
def test_where_others_use_them_up_the_pictures_are_right(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXHAUSTED, str(spell_dataset(tmp_path / "set", 64))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "right", done.stderr[-2000:]
    assert "CUDA decodes" in done.stderr
