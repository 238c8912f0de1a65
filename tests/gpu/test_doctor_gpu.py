"""``proxyloader doctor`` on a GPU: its engines and CUDA decode known pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..installations import environment
from ..tools.test_doctor import ALL_FORMATS, CUDA, ENGINES, ON_CPU, failing, report

pytestmark = pytest.mark.slow


def test_a_sound_gpu_decodes_all_formats_by_its_engines_and_by_cuda() -> None:
    status, findings = report(env={})
    assert (status, failing(findings)) == (0, set())
    assert " for CUDA " in findings["driver"]["found"] and "built for CUDA" in findings["torch"]["found"]
    assert (findings["GPU 0"]["status"], findings[CUDA]["status"]) == ("ok", "ok")
    instead = "CUDA decodes instead; " * (findings[ENGINES]["status"] == "warn")  # a GPU without engines
    assert findings[ENGINES]["found"] == f"{instead}correct pixels: {ALL_FORMATS}"
    assert findings[CUDA]["found"] == f"correct pixels: {ALL_FORMATS}"


DECODER = """
from nvidia.dali import fn

right = fn.decoders.image
fn.decoders.image = lambda *files, **how: {instead}
"""


def test_decoders_of_a_gpu_that_give_wrong_pixels_fail(tmp_path: Path) -> None:
    upside_down = "fn.flip(right(*files, **how), horizontal=0, vertical=1)"
    (tmp_path / "sitecustomize.py").write_text(DECODER.format(instead=upside_down))
    status, findings = report(env=environment(tmp_path))
    assert (status, failing(findings)) == (1, {ON_CPU, ENGINES, CUDA})
    for name, advice in ((ENGINES, "hw_decoder_load=0"), (CUDA, 'device="cpu"')):
        assert findings[name]["found"].startswith("JPEG: wrong pixels") and advice in findings[name]["remedy"]


def test_engines_that_leave_the_work_to_cuda_are_a_warning(tmp_path: Path) -> None:
    without_engines = 'right(*files, **how | ({"hw_decoder_load": 0.0} if how["device"] == "mixed" else {}))'
    (tmp_path / "sitecustomize.py").write_text(DECODER.replace("{instead}", without_engines))
    status, findings = report(env=environment(tmp_path))
    assert (status, failing(findings)) == (0, set())
    assert findings[ENGINES]["status"] == "warn" and "CUDA decodes instead" in findings[ENGINES]["found"]
    assert findings[CUDA]["status"] == "ok"
