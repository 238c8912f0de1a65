"""The house itself: the map is true, the walls stand, the README's code runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from torchvision import transforms
from torchvision.datasets import ImageFolder

import proxyloader

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "proxyloader"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
DOORS = {"_dali.py", "_executor.py", "_outputs.py"}
"""Whoever imports one of these, or is one, uses DALI."""

TOOLS = {
    "cli.py",
    "__main__.py",
    "demo.py",
    "explanation.py",
    "contact_sheet.py",
    "make_dataset.py",
    "photograph.py",
    "odd_formats.py",
    "spelled.py",
}


def imports(module: Path, source: str | None = None) -> set[str]:
    """The modules that one of ours imports, at any depth; ours as file names relative to the package."""
    path, found = PACKAGE / module, set()
    for node in ast.walk(ast.parse(source or path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found |= {str(file_of(home, alias.name).relative_to(PACKAGE)) for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def file_of(home: Path, name: str) -> Path:
    """Where ``from home import name`` finds it: in a module of that name, or in what ``home`` is itself."""
    places = home / f"{name}.py", home / name / "__init__.py", home.with_suffix(".py"), home / "__init__.py"
    return next(place for place in places if place.exists())


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("from . import setting, cases", "bench/cases.py"),
        ("from .cases import loops_of", "bench/cases.py"),
        ("from .. import forks, _dali as door", "_dali.py"),
        ("from .._dali import fn", "_dali.py"),
        ("from .. import operators", "operators/__init__.py"),
        ("from ..operators import resize", "operators/resize.py"),
        ("from ..operators import Graph", "operators/__init__.py"),
        ("from ..operators.graph import Graph", "operators/graph.py"),
        ("from .. import DataLoader", "__init__.py"),
        ("def late():\n    from .. import demo", "demo.py"),
        ("import nvidia.dali", "nvidia.dali"),
        ("importlib.import_module('nvidia.dali')", "nvidia.dali"),
    ],
)
def test_every_way_to_write_an_import_counts(line: str, file: str) -> None:
    assert file in imports(Path("bench/child.py"), line)


def test_the_map_draws_every_module_and_no_other() -> None:
    drawing = (PACKAGE / "README.md").read_text().split("```")[1]
    drawn = re.findall(r"^  +(\w+\.py)\b", drawing, re.MULTILINE)
    on_disk = [path.name for path in MODULES if path.name != "__init__.py" or path.parent == Path()]
    assert sorted(drawn) == sorted(on_disk)


def test_only_the_rooms_that_the_readme_names_use_dali() -> None:
    (sentence,) = re.findall(r"^Only (.*?) may use DALI", (PACKAGE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([\w/]+\.py)`", sentence))
    found = {str(module) for module in MODULES if DOORS & {str(module), *imports(module)}}
    assert {module for module in found if not module.startswith("operators/")} == named


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_one_room_imports_it_and_what_measures_its_own_loaders(module: Path) -> None:
    named = any(name.startswith("nvidia") for name in imports(module))
    assert named == (str(module) in ("_dali.py", "bench/dali_cases.py"))


class SaysIfDaliIsLoaded(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), "nvidia.dali" in sys.modules


def test_nothing_that_a_worker_imports_uses_dali(photos: Path) -> None:
    dataset = SaysIfDaliIsLoaded(str(photos), transforms.Compose([transforms.RandomCrop(8), transforms.ToTensor()]))
    loader = proxyloader.DataLoader(dataset, 48, num_workers=1, multiprocessing_context="spawn", device="cpu")
    ((images, _, loaded),) = loader
    assert images.shape == (48, 3, 8, 8) and not loaded.any()


@pytest.mark.parametrize(
    "module", [path for path in MODULES if path.name not in TOOLS and path.parent.name != "bench"], ids=str
)
def test_the_core_never_imports_a_tool(module: Path) -> None:
    offered = {"explanation.py"} if str(module) == "__init__.py" else set()  # by a name that loads it when it is used
    found = imports(module)
    assert {name for name in found if name in TOOLS or name.startswith("bench/")} == offered


@pytest.mark.parametrize("asked_for", [None, "1"])
def test_importing_asks_for_queues_unless_the_user_has(asked_for: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if asked_for is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = asked_for
    code = "import os, proxyloader; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert told.stdout.strip() == (asked_for or "32")


def test_the_public_names_are_these_and_each_is_there() -> None:
    assert sorted(proxyloader.__all__) == [
        "DataLoader",
        "EncodedImage",
        "FileReaderLoader",
        "ImageError",
        "InputError",
        "LastBatchPolicy",
        "MissingDaliError",
        "PipelineError",
        "ProxyLoaderError",
        "ProxyServer",
        "ShardedSampler",
        "UnsupportedTransformError",
        "World",
        "compile_transforms",
        "explain",
        "pipelines",
        "wrap",
    ]
    for name in proxyloader.__all__:
        assert getattr(proxyloader, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        proxyloader.nothing  # noqa: B018


LIMITS = (
    r"(monotonic\(\)|perf_counter\(\)|_s\)? -).* < \(?[\d.]",
    r"\.(join|wait)\((timeout=)?\d",
    r"assert_gone\(.*, \d",
    r"timeout_s.*= \d",
)


def test_how_long_something_may_take_is_said_in_one_place() -> None:
    lines = [line for path in (ROOT / "tests").rglob("*.py") for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search("|".join(LIMITS), line)] == []


def test_every_number_has_its_record() -> None:
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert (ROOT / "benchmarks" / "results" / f"{script.stem}.jsonl").exists(), script.name
        assert script.name in (ROOT / "benchmarks" / "README.md").read_text()


def test_every_row_of_the_faults_has_a_test_that_exists() -> None:
    folder = ROOT / "tests" / "integration"
    rows = re.findall(r"^\| (\d+[a-h]?) \|(.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert len({row for row, _ in rows}) == 54
    for row, cells in rows:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cells)
        assert tests, row
        for file, name in tests:
            assert re.search(rf"^def {name}\(", (folder / file).read_text(), re.MULTILINE), (row, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "imagenet.py --archs resnet18 --images 16 --batch-size 8 --size 32 --workers 1 --epochs 2 --rounds 1",
        "parts.py --images 16",
        "several_gpus.py --images 16 --passes 2 --batch-size 4 --workers 1 --rounds 1 --ranks 2",
        "soak.py --minutes 0.05 --pictures 720",
        "training_curves.py --images 64 --epochs 1 --runs 2",
        "transforms.py --images 4 --rounds 1 --only hue RandAugment",
    ],
    ids=lambda arguments: arguments.split(".py")[0],
)
def test_every_benchmark_runs(arguments: str, tmp_path: Path) -> None:
    script, *options = arguments.split()
    options += ["--out", str(tmp_path / "record.jsonl")] + (["--device", "cpu"] if script != "parts.py" else [])
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "record.jsonl").read_text().startswith('{"date": ')


def test_the_list_of_benchmarks_that_run_is_complete() -> None:
    (mark,) = [m for m in test_every_benchmark_runs.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    assert {arguments.split()[0] for arguments in mark.args[1]} == {
        path.name for path in (ROOT / "benchmarks").glob("*.py")
    }


def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "make_dataset" in block]
    (tmp_path / "example.py").write_text(example)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([64, 3, 224, 224]) torch.float32") == 4


def test_one_build_of_dali_is_asked_for_and_no_extra_adds_another() -> None:
    builds = re.findall(r"nvidia-dali[\w-]*", (ROOT / "setup.cfg").read_text())
    assert builds == ["nvidia-dali-cuda120"]


def test_the_oldest_packages_that_are_tried_are_the_oldest_that_are_allowed() -> None:
    tried = dict(line.split("==") for line in (ROOT / ".ci" / "oldest.txt").read_text().splitlines()[1:])
    required, extras = (ROOT / "setup.cfg").read_text().split("[options.extras")
    allowed = dict(re.findall(r"^    ([\w-]+)>=([\d.]+)", required, re.M))
    allowed |= re.findall(r"^    (timm)>=([\d.]+)", extras, re.M)
    assert {name: version.removesuffix(".0") for name, version in tried.items()} == allowed


def test_a_run_draws_the_same_examples_unless_it_is_asked_for_others(request: pytest.FixtureRequest) -> None:
    assert settings.default is not None
    assert settings.default.derandomize == (request.config.getoption("--hypothesis-profile") is None)


def test_the_readme_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "pip install -e . && proxyloader demo" in lines and 'pip install -e ".[test]" && pytest' in lines
