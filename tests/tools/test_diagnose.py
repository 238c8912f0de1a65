"""``diagnose``: runs that are bound by one thing each, measured as a user does, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader
from proxyloader.tools.cli import main
from proxyloader.tools.diagnose.diagnosis import Diagnosis
from proxyloader.tools.diagnose.figures import Alone, Figures
from proxyloader.tools.diagnose.loaders import measured_alone
from proxyloader.tools.diagnose.phase import Phase
from proxyloader.tools.diagnose.trials import Trial, _changes, trials
from proxyloader.tools.diagnose.verdict import diagnosed

from ..limits import WAIT_S
from .test_cli import COMMAND, ENVIRONMENT

SECONDS = 1.0
"""For all phases of a diagnosis. Where steps are longer, it takes longer: each phase has at least three."""

TRANSFORM = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])


class SlowToRead(ImageFolder):
    """As from a slow disk: what waits does not compute."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05)
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


def said(found: Diagnosis) -> str:
    return " ".join(str(found).split())


def phase(step_ms: float, **more: Any) -> Phase:
    """Ten steps that take this long, on an idle machine."""
    cpu = dict.fromkeys(("thread_cpu_s", "thread_delay_s", "main_cpu_s", "workers_cpu_s", "workers_delay_s"), 0.0)
    read = dict.fromkeys(("bytes_read", "bytes_from_disk", "iowait_cores"), 0.0)
    return Phase(**{"wall_s": step_ms / 100, "waits_s": (0.001,) * 10, **cpu, **read, **more})


def figures(step_ms: float, stock_ms: float, ours_ms: float, **more: Any) -> Figures:
    """Those of a run of one of our loaders with batches of 100 images, of 10 MB, for which it takes 50 ms of CPU time,
    and the stock loader 800."""
    ours = phase(ours_ms, workers_cpu_s=0.5, bytes_read=1e8)
    stock = phase(stock_ms, workers_cpu_s=8.0, bytes_read=1e8)
    measured = Figures(
        watched="proxyloader",
        both=phase(max(step_ms, ours_ms)),
        step=phase(step_ms),
        alone={"proxyloader": Alone(3.0, ours), "stock": Alone(1.0, stock)},
        failure="",
        batch_size=100,
        num_workers=8,
        cores=16,
        waiting_share=0.1,
    )
    return dataclasses.replace(measured, **more)


class TestWhatBoundsARun:
    """Each is bound by one thing, which takes five times as long as any other, or more."""

    def test_its_input(self, photos: Path) -> None:
        found = proxyloader.diagnose(loader_of(photos, SlowToDecode), lambda batch: None, seconds=SECONDS)
        assert found.bound == "input"
        assert found.verdict.startswith("The input bounds this run (a step takes ")

    def test_the_disk(self, photos: Path) -> None:
        loader = loader_of(photos, SlowToRead, num_workers=1, persistent_workers=True)
        found = proxyloader.diagnose(loader, lambda batch: None, seconds=SECONDS)
        assert found.bound == "disk"
        assert re.search(r"The loader mostly waits: it uses \d\.\d of \d+ cores, reads \d+\.\d MB/s", found.reason)
        assert found.figures.waiting_share is not None and found.figures.waiting_share > 0.5

    def test_its_model(self, photos: Path) -> None:
        loader = loader_of(photos, loader=proxyloader.DataLoader, device="cpu")
        found = proxyloader.diagnose(loader, lambda batch: time.sleep(0.3), seconds=SECONDS)
        assert found.bound == "model"
        assert "proxyloader is not worth it here" in found.verdict

    def test_the_cpu_of_its_loop(self, photos: Path) -> None:
        found = proxyloader.diagnose(loader_of(photos), lambda batch: compute(0.15), seconds=SECONDS)
        assert found.bound == "loop"
        assert "no GPU works: that is Python, or a model on one core" in found.reason or torch.cuda.is_available()


class TestTheVerdict:
    @pytest.mark.parametrize(
        ("changed", "bound"),
        [
            ({"step": phase(200), "both": phase(200)}, "model"),
            ({"step": phase(200, thread_cpu_s=1.9, main_cpu_s=1.9)}, "loop"),
            ({"step": phase(200, thread_cpu_s=0.9, thread_delay_s=1.0, main_cpu_s=0.9)}, "loop"),
            ({"step": phase(200, thread_cpu_s=1.9, main_cpu_s=1.9, gpu_percent=95.0)}, "model"),
            ({"step": phase(200, thread_cpu_s=1.9, main_cpu_s=9.0)}, "model"),
            ({"step": phase(90, thread_cpu_s=0.9, main_cpu_s=1.7), "both": phase(190), "cores": 1}, "cores"),
        ],
        ids=["asleep", "Python", "Python without a core", "waits for a GPU", "many threads", "one core for all"],
    )
    def test_of_a_long_step(self, changed: dict[str, Any], bound: str) -> None:
        assert diagnosed(figures(100, 100, 20, **changed), ()).bound == bound

    @pytest.mark.parametrize(
        ("loader", "waiting_share", "bound"),
        [
            (phase(100), 0.9, "disk"),
            (phase(100, bytes_read=1e8, bytes_from_disk=9e7), 0.1, "disk"),
            (phase(100, bytes_read=1e8, bytes_from_disk=1e7), 0.1, "input"),
            (phase(100), None, "input"),
            (phase(100, workers_cpu_s=7.0), 0.9, "input"),
            (phase(100, workers_cpu_s=1.0, workers_delay_s=6.0), 0.9, "input"),
            (phase(100, jpeg_percent=99.0), 0.9, "input"),
        ],
        ids=["waits", "from a disk", "from memory", "unknown", "busy", "without a core", "busy engines"],
    )
    def test_of_a_slow_loader(self, loader: Phase, waiting_share: float | None, bound: str) -> None:
        slow = figures(10, 500, 100, waiting_share=waiting_share)
        alone = {**slow.alone, "proxyloader": Alone(3.0, loader)}
        assert diagnosed(dataclasses.replace(slow, alone=alone), ()).bound == bound

    def test_says_what_the_stock_loader_gives_and_what_none_exceeds(self) -> None:
        found = diagnosed(figures(50, 200, 80), ())
        assert found.verdict == (
            "The input bounds this run (a step takes 80.0 ms, 50.0 ms without its loader, and the loader alone 80.0 "
            "ms); proxyloader is worth it: 1,250 images/s with proxyloader and 500 images/s with the stock loader, "
            "2.50 times as many."
        )
        assert found.most == (
            "With the stock loader a step takes 200 ms, of which 75 % are the loader's. So by Amdahl's law a loader "
            "that takes no time makes it 1 / (1 - 0.75) = 4 times as fast; proxyloader makes it 2.5 times as fast."
        )

    def test_knows_that_without_workers_one_comes_after_the_other(self) -> None:
        found = diagnosed(figures(50, 100, 40, num_workers=0, both=phase(90), cores=100), ())
        assert "1,111 images/s with proxyloader and 667 images/s with the stock loader" in found.verdict
        assert "a step takes 150 ms, of which 67 % are the loader's" in found.most
        assert "hinder" not in found.reason and "keeps up" not in found.loses[0]

    def test_says_which_argument_could_not_be_tried(self) -> None:
        tried = Trial("num_workers=4", 1.01), Trial("dtype=torch.float16", 0.0)
        assert diagnosed(figures(50, 200, 80), tried).sections["Suggested"] == (
            "nothing: no gain of 5 % with num_workers=4",
            "dtype=torch.float16 could not be tried, as it raises an error",
        )

    def test_is_not_sure_where_step_and_loader_hinder_each_other(self) -> None:
        found = diagnosed(figures(50, 200, 80, both=phase(160)), ())
        assert "proxyloader may be worth it" in found.verdict
        assert "step and loader take 2.0 times what follows from each alone" in found.reason

    def test_has_conditions_that_follow_from_the_figures(self) -> None:
        found = diagnosed(figures(50, 200, 80), ())
        assert found.wins == (
            "with a step below 190 ms (here 50.0): it gives up to 2.50 times the images",
            "with images or transforms that take the stock loader more than 80.0 ms a batch (here 200), and "
            "proxyloader no longer than here",
            "with less than 10.0 cores for the loader: a batch takes the stock loader 800 ms of CPU time, and "
            "proxyloader 50.0 ms",
            "if the files come at more than 50.0 MB/s; from 125 MB/s on it gains all that it can",
            "in runs of more than 17 batches: then it has made up for its later start",
        )
        assert found.loses == (
            "with a step of 190 ms or more (here 50.0): the stock loader keeps up with it",
            "with 10.0 cores or more for the stock loader: then a step takes no longer than with proxyloader",
            "if the files come at less than 50.0 MB/s: then both loaders wait for them",
            "in runs of fewer than 17 batches: it starts later, and has not made up for it",
        )

    @pytest.mark.parametrize(("stock_ms", "ours_ms"), [(200, 80), (80, 200), (300, 250), (20, 10)])
    @pytest.mark.parametrize("step_ms", [0.001, 50, 1000])
    def test_has_three_conditions_to_win_and_two_not_to(self, step_ms: float, stock_ms: float, ours_ms: float) -> None:
        found = diagnosed(figures(step_ms, stock_ms, ours_ms), ())
        assert len(found.wins) >= 3 and len(found.loses) >= 2
        wins = max(stock_ms, step_ms) > 1.05 * max(ours_ms, step_ms)
        assert ("is worth it" in found.verdict) == wins

    def test_knows_that_a_step_on_the_cpu_leaves_fewer_cores_to_the_loader(self) -> None:
        """Alone, proxyloader is faster, with ten times the CPU time, which the step needs, too."""
        step = phase(50, main_cpu_s=0.5)
        alone = {
            "stock": Alone(1.0, phase(70, workers_cpu_s=0.1)),
            "proxyloader": Alone(1.0, phase(60, workers_cpu_s=1.0)),
        }
        found = diagnosed(figures(50, 70, 60, cores=2, step=step, alone=alone), ())
        assert "proxyloader is not worth it here" in found.verdict
        assert found.wins[0] == "with a step below 33.3 ms (here 50.0): it gives up to 1.17 times the images"

    def test_of_a_loader_that_has_no_other_names_the_reason(self) -> None:
        alone = {"proxyloader": Alone(3.0, phase(80))}
        found = diagnosed(figures(50, 200, 80, alone=alone, failure="TypeError: a proxy"), ())
        assert "there is no other loader to compare with (TypeError: a proxy)" in found.verdict
        assert found.wins == found.loses == ()

    def test_suggests_what_gains_five_percent(self) -> None:
        trials = (Trial("num_workers=4", 1.06), Trial("num_workers=16", 1.3), Trial("dtype=torch.float16", 1.04))
        assert diagnosed(figures(50, 200, 80), trials).suggestions == (
            "num_workers=16: the loader alone is 1.30 times as fast",
            "num_workers=4: the loader alone is 1.06 times as fast",
        )

    def test_says_that_another_batch_size_changes_the_training(self) -> None:
        (suggested,) = diagnosed(figures(50, 200, 80), (Trial("batch_size=64", 1.2),)).suggestions
        assert suggested == "batch_size=64: the loader alone is 1.20 times as fast; it changes the training, too"

    @pytest.mark.parametrize("kind", [StockLoader, proxyloader.DataLoader])
    def test_tries_larger_batches_by_what_they_give_in_images(self, kind: Any) -> None:
        class Batches(torch.utils.data.Dataset[int]):
            """A batch of any size takes as long."""

            def __len__(self) -> int:
                return 64

            def __getitems__(self, indices: list[int]) -> list[int]:
                time.sleep(0.2)  # long beside what a busy machine adds
                return indices

        loader = kind(Batches(), batch_size=4)
        alone = measured_alone(loader, 1.0).phase
        (trial,) = [each for each in trials(loader, torch.zeros(4), alone, 3.0) if "batch_size" in each.change]
        assert trial.change == "batch_size=8" and 1.5 < trial.gain < 2.5

    def test_tries_no_batch_larger_than_the_dataset(self) -> None:
        loader = StockLoader(torch.arange(6), batch_size=4)
        assert not _changes(loader, torch.zeros(4)).keys() & {"batch_size=8"}


class TestALoopOfOnesOwn:
    def test_ends_by_itself_with_a_result(self, photos: Path) -> None:
        loader = loader_of(photos, loader=proxyloader.DataLoader, device="cpu", num_workers=1)
        with proxyloader.diagnosis(loader, seconds=SECONDS) as batches:
            for images, labels in batches:
                assert images.shape == (4, 3, 32, 32) and labels.shape == (4,)
        found = batches.result
        assert found.figures.watched == "proxyloader" and found.figures.alone.keys() == {"proxyloader", "stock"}
        assert found.figures.batch_size == 4
        changes = [trial.change for trial in found.trials]
        of_batches = ["batch_size=8", "dtype=torch.bfloat16", "memory_format=torch.channels_last"]
        assert changes[-4:] == [*of_batches, "persistent_workers=True"]
        assert all(trial.gain > 0 for trial in found.trials)
        assert "loop as it is" in said(found) and "Suggested" in said(found)

    def test_that_is_left_early_has_none(self, photos: Path) -> None:
        with proxyloader.diagnosis(loader_of(photos)) as batches:
            for _ in batches:
                break
        with pytest.raises(RuntimeError, match="there is no result, as the loop was left early"):
            batches.result  # noqa: B018

    def test_goes_on_to_the_user_with_the_error_of_a_step(self, photos: Path) -> None:
        def step(batch: Any) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            proxyloader.diagnose(loader_of(photos), step)

    def test_of_no_dataloader_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"the loader is a torch\.utils\.data\.DataLoader .*; got list"):
            proxyloader.diagnosis([1, 2])

    @pytest.mark.parametrize("seconds", [0, -1, float("nan")])
    def test_of_no_time_is_refused(self, photos: Path, seconds: float) -> None:
        with pytest.raises(ValueError, match="it is a number of seconds above 0"):
            proxyloader.diagnosis(loader_of(photos), seconds=seconds)

    def test_in_one_of_several_processes_is_refused(self, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="this is one of 2 processes"):
            proxyloader.diagnosis(loader_of(photos))

    def test_over_no_batch_is_an_error(self) -> None:
        loader = StockLoader(TensorDataset(torch.zeros(3)), 4, drop_last=True)
        with pytest.raises(ValueError, match="the loader gives no batch"):
            proxyloader.diagnose(loader, lambda batch: None)


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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(SCRIPT.format(module="torch.utils.data", epochs=100))
    return tmp_path / "train.py"


@pytest.fixture(autouse=True)
def forget_the_module_beside_the_script() -> object:
    yield
    sys.modules.pop("beside", None)


EXAMPLES = Path(__file__).parents[2] / "examples"

OPTIONS = ("--seconds", str(SECONDS))


class TestAScript:
    @pytest.mark.parametrize("module", ["torch.utils.data", "proxyloader"])
    def test_runs_until_its_largest_loader_is_diagnosed(
        self, script: Path, photos: Path, capsys: pytest.CaptureFixture[str], module: str
    ) -> None:
        script.write_text(SCRIPT.format(module=module, epochs=100))
        before = StockLoader.__init__, StockLoader.__iter__, proxyloader.DataLoader.__iter__, sys.argv, list(sys.path)
        files = ("--json", "found.json", "--html", "found.html")
        assert main(["diagnose", *OPTIONS, *files, str(script), str(photos)]) == 0
        assert before == (
            StockLoader.__init__, StockLoader.__iter__, proxyloader.DataLoader.__iter__, sys.argv, sys.path
        )  # fmt: skip
        assert Path("left").exists()
        out = capsys.readouterr().out
        assert "bounds this run" in " ".join(out.split()) and "the end" not in out and "an error" not in out
        told = json.loads(Path("found.json").read_text())
        assert told["script"] == f"train.py {photos}" and told["verdict"] in " ".join(out.split())
        assert told["figures"]["watched"] == ("stock" if module == "torch.utils.data" else "proxyloader")
        assert told["figures"]["alone"].keys() == {"stock", "proxyloader"}
        assert told["figures"]["batch_size"] == 4
        assert told["verdict"] in Page.of(Path("found.html")).text

    @pytest.mark.exhaustive  # the test before this one runs a shorter script with each loader
    @pytest.mark.parametrize("name", ["train_torchvision.py", "train_proxyloader.py"])
    def test_may_be_an_example(self, tmp_path: Path, photos: Path, name: str) -> None:
        for folder in ("train", "val"):
            (tmp_path / folder).symlink_to(photos)
        arguments = ("--arch", "shufflenet_v2_x0_5", "--size", "32", "--batch-size", "8", "--workers", "1")
        command = [*COMMAND, "diagnose", *OPTIONS, str(EXAMPLES / name), str(tmp_path), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * WAIT_S, cwd=tmp_path, env=ENVIRONMENT, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "bounds this run" in " ".join(done.stdout.split())

    def test_that_ends_before_is_an_error(self, script: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script.write_text(SCRIPT.format(module="torch.utils.data", epochs=0))
        assert main(["diagnose", str(script), str(photos)]) == 1
        assert "has ended before the loop over its largest DataLoader was diagnosed" in capsys.readouterr().err

    def test_without_a_loader_is_an_error(self, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script.write_text("import os; print(__name__, os.path.isabs(__file__))")
        assert main(["diagnose", str(script)]) == 1
        out, err = capsys.readouterr()
        assert out == "__main__ True\n" and "looped over no DataLoader of torch or proxyloader" in err

    def test_that_fails_shows_its_own_error(self, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script.write_text("import os\nos.chdir('/')\n1 / 0")
        with pytest.raises(SystemExit) as exit:
            main(["diagnose", script.name])
        assert exit.value.code == 1
        err = capsys.readouterr().err
        assert err.endswith("ZeroDivisionError: division by zero\n")
        assert err.count("File ") == 1 and str(script) in err

    def test_that_exits_has_its_own_exit_status(self, script: Path) -> None:
        script.write_text("import sys; sys.exit(7)")
        with pytest.raises(SystemExit) as exit:
            main(["diagnose", str(script)])
        assert exit.value.code == 7

    def test_for_no_time_is_not_begun(self, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script.write_text("print('begun')")
        assert main(["diagnose", "--seconds", "0", str(script)]) == 1
        assert capsys.readouterr() == ("", "proxyloader: error: seconds=0: it is a number of seconds above 0\n")

    def test_that_is_not_there_is_an_error(self, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diagnose", "other.py"]) == 1
        assert capsys.readouterr().err == "proxyloader: error: other.py: No such file or directory\n"


class Page(HTMLParser):
    """What a page holds: its text, its tags, and the addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags, self.loaded, self.viewport = "", [], [], ""

    @classmethod
    def of(cls, file: Path) -> Page:
        page = cls()
        page.feed(file.read_text())
        return page

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attributes)
        self.loaded += [value for name, value in attributes if name in ("src", "srcset", "data") and value]
        self.loaded += [given["href"]] if tag == "link" and given.get("href") else []
        if given.get("name") == "viewport":
            self.viewport = given.get("content") or ""

    def handle_data(self, data: str) -> None:
        self.text += data


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    from proxyloader.tools.diagnose.page import html_of

    file = tmp_path / "page.html"
    file.write_text(html_of(diagnosed(figures(50, 200, 80), (Trial("num_workers=4", 1.2),)), "train.py <data>"))
    return file


class TestThePage:
    def test_stands_alone_and_has_all_sentences_and_plots(self, page_file: Path) -> None:
        found, page = diagnosed(figures(50, 200, 80), (Trial("num_workers=4", 1.2),)), Page.of(page_file)
        assert page.loaded == [] and not {"script", "link", "iframe", "img"} & set(page.tags)
        assert not re.search(r"@import|url\((?!#)", page_file.read_text())
        assert page.tags.count("svg") == 3
        assert "train.py <data>" in page.text and found.verdict in page.text
        assert all(each in page.text for sentences in found.sections.values() for each in sentences)
        assert page.viewport == "width=device-width, initial-scale=1"

    @pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the test beside this one reads the page without one")
    def test_is_as_wide_as_the_screen(self, page_file: Path, tmp_path: Path) -> None:
        """A browser tells what no parser can: whether anything of the laid out page is wider than the screen.

        Chromium has no window as narrow as a phone, so the page is shown in frames of these widths.
        """
        frames = "".join(
            f"<iframe src='{page_file.name}' style='width:{px}px; border:0'></iframe>" for px in (390, 1280)
        )
        told = (
            "[...document.querySelectorAll('iframe')].map(frame => frame.contentDocument.documentElement.scrollWidth)"
        )
        (tmp_path / "frames.html").write_text(f"{frames}<script>onload = () => document.body.append({told})</script>")
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom")
        command = [
            str(CHROMIUM),
            *options,
            f"--user-data-dir={tmp_path / 'profile'}",
            (tmp_path / "frames.html").as_uri(),
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
        narrow, wide = map(int, re.findall(r"(\d+),(\d+)</body>", shown)[0])
        assert narrow <= 390 and wide <= 1280
