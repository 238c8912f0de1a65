"""``diagnose``: trainings that are bound by one thing each, measured as a user does, and the verdict."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader, TensorDataset, get_worker_info
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader.tools.diagnose import Figures, Phase, interpret

from .command import main

SECONDS = 1.0
"""For all phases of a diagnosis. Where steps are longer, it takes longer: each phase has at least three."""

TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])


class SlowToRead(ImageFolder):
    """As from a slow disk: what waits does not compute."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05)
        return super().__getitem__(index)


class OnlyForTwoWorkers(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        if (worker := get_worker_info()) is None or worker.num_workers != 2:
            raise OSError("locked")
        return super().__getitem__(index)


class SlowToDecode(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        compute(0.02)
        return super().__getitem__(index)


def compute(seconds: float) -> None:
    """Take this much CPU time, on whatever else the machine works."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def loader_of(root: Path, kind: type[ImageFolder] = ImageFolder, loader: Any = StockLoader, **arguments: Any) -> Any:
    return loader(kind(str(root), TRANSFORM), 4, shuffle=True, **arguments)


@pytest.mark.parametrize(
    ("bound", "dataset", "step", "arguments"),
    [
        ("input", SlowToDecode, lambda batch: None, {}),
        ("disk", SlowToRead, lambda batch: None, {"num_workers": 1, "persistent_workers": True}),
        ("model", ImageFolder, lambda batch: time.sleep(0.3), {"loader": proxyloader.DataLoader, "device": "cpu"}),
        ("loop", ImageFolder, lambda batch: compute(0.15), {}),
    ],
    ids=["input", "disk", "model", "loop"],
)
def test_what_bounds_a_training_is_found(photos: Path, bound: str, dataset: Any, step: Any, arguments: Any) -> None:
    found = proxyloader.diagnose(loader_of(photos, dataset, **arguments), step, seconds=SECONDS)
    assert found.bound == bound
    assert found.figures.alone.keys() == {"proxyloader", "stock"}
    is_worth_it = found.figures.step_s("stock") > 1.05 * found.figures.step_s("proxyloader")
    assert (" not " in found.verdict) != is_worth_it and "worth it: " in found.verdict
    assert found.verdict in " ".join(str(found).split()) and "loop as it is" in str(found)


def test_measurements_that_fail_are_told_with_their_errors(photos: Path) -> None:
    figures = proxyloader.diagnose(loader_of(photos, OnlyForTwoWorkers, num_workers=2), print, seconds=SECONDS).figures
    assert figures.waiting is None and figures.speedups == {}
    assert {type(each) for each in (figures.both.cpu_s, figures.both.thread, figures.step_s("stock"))} == {float}
    assert figures.unmeasured["time spent waiting for samples to be read"] == "OSError: locked"
    assert figures.unmeasured["num_workers=1"].startswith("OSError: ")


# --- the verdict ------------------------------------------------------------------------------------------------------


def phase(step_ms: float, **more: Any) -> Phase:
    """Steps that take this long on an idle machine."""
    idle = {"cpu_s": 0.0, "thread": 0.0, "workers": 0.0}
    return Phase(**{"step_s": step_ms / 1000, **idle, **more})


def figures(step_ms: float, stock_ms: float, ours_ms: float, **more: Any) -> Figures:
    """Batches of 100 images, for which proxyloader takes 50 ms of CPU time, and the stock loader 800."""
    ours, stock = phase(ours_ms, cpu_s=0.05), phase(stock_ms, cpu_s=0.8)
    both, alone = phase(max(step_ms, ours_ms)), {"proxyloader": ours, "stock": stock}
    measured = Figures("proxyloader", both, phase(step_ms), alone, 100, 8, 16, 0.1, {})  # type: ignore[arg-type]
    return dataclasses.replace(measured, **more)


def slow(waiting: float | None, **more: Any) -> Figures:
    found = figures(10, 500, 100, waiting=waiting)
    return dataclasses.replace(found, alone={**found.alone, "proxyloader": phase(100, **more)})


BOUNDS: dict[str, tuple[Figures, str]] = {
    "a step asleep": (figures(100, 100, 20, step=phase(200), both=phase(200)), "model"),
    "a step of Python": (figures(100, 100, 20, step=phase(200, thread=0.95, cpu_s=0.19)), "loop"),
    "beside a busy GPU": (figures(100, 100, 20, step=phase(200, thread=0.95, cpu_s=0.19, gpu_percent=95.0)), "model"),
    "many threads": (figures(100, 100, 20, step=phase(200, thread=0.95, cpu_s=0.9)), "model"),
    "one core for all": (figures(100, 100, 20, step=phase(90, cpu_s=0.17), both=phase(220), cores=1), "cores"),
    "a loader that waits": (slow(0.9), "disk"),
    "from memory": (slow(0.1), "input"),
    "unknown": (slow(None), "input"),
    "busy workers": (slow(0.9, workers=7.0), "input"),
    "a busy GPU": (slow(0.9, gpu_percent=99.0), "input"),
    "a busy thread": (slow(0.9, thread=0.9), "input"),
}


@pytest.mark.parametrize(("measured", "bound"), BOUNDS.values(), ids=BOUNDS)
def test_steps_and_loaders_are_told_apart_by_what_they_use(measured: Figures, bound: str) -> None:
    assert interpret(measured).bound == bound


def test_the_report_says_what_each_loader_gives() -> None:
    found = interpret(figures(50, 200, 80, speedups={4: 1.06, 16: 1.3, 2: 0.5}))
    assert found.verdict == (
        "Input-bound: a step takes 80.0 ms, or 50.0 ms without loading. Loading alone takes 80.0 ms. "
        "proxyloader is worth it: "
        "1,250 instead of 500 images/s, 2.50x"
    )
    assert found.reasons == (
        "Alone, the workers are 0% busy",
        "Reading a sample spends 10% of its time waiting, for example for a disk",
        "With torch, loading takes 75% of a step. An infinitely fast loader would give 4.00x",
    )
    assert found.suggestions == (
        "num_workers=16: the loader alone is 1.30x as fast",
        "num_workers=4: the loader alone is 1.06x as fast",
    )


@pytest.mark.parametrize(("stock_ms", "ours_ms"), [(200, 80), (80, 200), (300, 250), (20, 10)])
@pytest.mark.parametrize("step_ms", [0.001, 50, 1000])
def test_it_is_worth_it_where_steps_get_shorter(step_ms: float, stock_ms: float, ours_ms: float) -> None:
    found = interpret(figures(step_ms, stock_ms, ours_ms))
    assert ("is worth it" in found.verdict) == (max(stock_ms, step_ms) > 1.05 * max(ours_ms, step_ms))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_workers": 0, "both": phase(130), "cores": 100}, "is worth it: 769 instead of 400 images/s, 1.92x"),
        ({"step": phase(50, cpu_s=2.0), "cores": 2}, "proxyloader is worth it: 97.6 instead of 71.4 images/s, 1.37x"),
        ({"unmeasured": {"num_workers=4": "OSError: x"}}, "Not measured: num_workers=4 (OSError: x)"),
        ({"alone": {"proxyloader": phase(80)}}, "With proxyloader, loading takes 38% of a step"),
        ({"both": phase(120)}, "The loop takes 1.50 times as long as estimated"),
        ({"step": phase(1e-4)}, "The speedup has no limit, because the loop does nothing"),
    ],
    ids=["without workers", "shared cores", "unmeasured", "one loader", "disturbed", "empty loop"],
)  # fmt: skip
def test_the_report_says(changed: dict[str, Any], said: str) -> None:
    both = {"both": phase(1000)} if "cores" in changed and changed["cores"] == 2 else {}
    found = interpret(figures(50, 200, 80, **{**both, **changed}))
    assert said in " ".join([found.verdict, *found.reasons])


# --- loops and scripts ------------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own_ends_by_itself_and_batches_of_single_images_have_the_loaders_size(photos: Path) -> None:
    how: Any = {"device": "cpu", "num_workers": 1, "collate_fn": lambda samples: [image for image, _ in samples]}
    loader = loader_of(photos, loader=proxyloader.DataLoader, **how)
    with proxyloader.diagnosis(loader, seconds=SECONDS) as batches:
        for images in batches:
            assert [image.shape for image in images] == [(3, 32, 32)] * 4
    figures = batches.result.figures
    assert (figures.watched, figures.batch_size) == ("proxyloader", 4)
    assert all(gain > 0 for gain in figures.speedups.values())


def test_a_loop_that_is_left_early_has_no_result_and_the_error_of_a_step_reaches_the_user(photos: Path) -> None:
    with proxyloader.diagnosis(loader_of(photos)) as batches:
        next(iter(batches))
    with pytest.raises(RuntimeError, match="no result: the loop was left early"):
        batches.result  # noqa: B018
    with pytest.raises(ZeroDivisionError):
        proxyloader.diagnose(loader_of(photos), lambda batch: 1 / 0)


def test_what_cannot_be_diagnosed_is_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"loader must be a torch.utils.data.DataLoader .*, got list"):
        proxyloader.diagnosis([1, 2])
    for seconds in (0, float("nan")):
        with pytest.raises(ValueError, match=f"seconds must be > 0, got {seconds}"):
            proxyloader.diagnosis(loader_of(photos), seconds=seconds)
    with pytest.raises(ValueError, match="the loader yields no batches"):
        empty: Any = StockLoader(TensorDataset(torch.zeros(3)), 4, drop_last=True)
        proxyloader.diagnose(empty, lambda batch: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="requires a single process, got 2"):
        proxyloader.diagnosis(loader_of(photos))


SCRIPT = """
import sys
from pathlib import Path

import beside
from torchvision import transforms
from torchvision.datasets import ImageFolder
from {module} import DataLoader

if __name__ == "__main__":
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset = ImageFolder(sys.argv[1], transform)
    train = DataLoader(dataset, 4, shuffle=True)
    some = DataLoader([dataset[0]] * 4, 2)
    assert len(list(some)) == 2  # a smaller one is not diagnosed
    next(iter(train))
    try:
        for epoch in range({epochs}):
            for images, labels in train:
                assert len(list(some)) == 2
        print("the end")
    except Exception:
        print("an error")
    finally:
        Path("left").touch()
"""

OPTIONS = ("--seconds", f"{SECONDS:.0f}")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").touch()
    yield tmp_path / "train.py"
    sys.modules.pop("beside", None)


@pytest.mark.parametrize("module", ["torch.utils.data", "proxyloader"])
def test_a_script_runs_until_its_largest_loader_is_diagnosed(
    script: Path, photos: Path, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    def patched() -> Any:
        return StockLoader.__init__, StockLoader.__iter__, proxyloader.DataLoader.__iter__, list(sys.argv), [*sys.path]

    script.write_text(SCRIPT.format(module=module, epochs=100))
    before = patched()
    assert main(["diagnose", *OPTIONS, str(script), str(photos)]) == 0
    assert patched() == before and Path("left").exists()
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert "the end" not in out and "an error" not in out
    assert f"proxyloader: measuring the loop over ImageFolder for about {SECONDS:g} s" in err
    assert "stock alone" in out and "proxyloader alone" in out and "worth it: " in out


FAILURES: dict[str, tuple[str, str, int, str]] = {
    "ends before": (SCRIPT.format(module="torch.utils.data", epochs=0), "60", 1, "before it was measured"),
    "raises": ("import os\nos.chdir('/')\n1 / 0", "60", 1, "ZeroDivisionError: division by zero"),
    "is not Python": ("1 +", "60", 1, "SyntaxError"),
    "exits": ("import os, sys; __name__ == '__main__' and os.path.isabs(__file__) and sys.exit(7)", "60", 7, ""),
    "for no time": ("print('begun')", "0", 2, "must be an integer >= 1, got '0'"),
    "is not there": ("", "60", 1, "train.py: No such file or directory"),
}


@pytest.mark.parametrize(("text", "seconds", "status", "said"), FAILURES.values(), ids=FAILURES)
def test_a_script_that_fails_ends_with_its_own_error(
    script: Path, photos: Path, capsys: pytest.CaptureFixture[str], text: str, seconds: str, status: int, said: str
) -> None:
    if text:
        script.write_text(text)
    found = main(["diagnose", "--seconds", seconds, script.name, str(photos)])
    out, err = capsys.readouterr()
    assert (found, out.replace("the end\n", "")) == (status, "") and said in err
