"""The house itself: the map is true, the walls stand, the README's code runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

import proxyloader

from . import scripts
from .imports import MODULES, PACKAGE, folder_of, imports
from .limits import WAIT_S
from .mutations import MUTATIONS, Mutation, plant
from .tiers import by_default

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"

BELOW = {
    "transforms": {""},
    "data": {"", "transforms"},
    "kernels": {"", "transforms"},
    "workers": {"", "transforms", "data", "kernels"},
    "dali": {"", "transforms", "data", "kernels"},
    "loader": {"", "transforms", "data", "workers", "kernels", "dali"},
    "tools": {"", "transforms", "data", "workers", "kernels", "dali", "loader"},
}
"""What each folder may import. "" is the package's root."""

PUBLIC_PAGES = {
    "__init__.py": {"dali", "data", "loader", "tools"},
    "__main__.py": {"tools"},
    "make_dataset.py": {"tools"},
    "pipelines.py": {"dali"},
}
"""The files at the root that hand on what folders have. The others import no folder."""


def test_the_map_draws_every_module_in_its_folder_and_no_other() -> None:
    drawing = ARCHITECTURE.read_text().split("```")[1]
    drawn, folders = [], [PACKAGE]
    for indent, name in re.findall(r"^( +)([\w/]+(?:\.py|/))(?: |$)", drawing, re.MULTILINE):
        del folders[len(indent) // 2 :]
        folders.append(folders[-1] / name)
        if name.endswith(".py"):
            drawn.append(folders.pop().relative_to(PACKAGE))
    on_disk = [path for path in MODULES if path.name != "__init__.py" or path.parent == Path()]
    missing, gone = sorted(map(str, {*on_disk} - {*drawn})), sorted(map(str, {*drawn} - {*on_disk}))
    assert not missing, f"these modules are not on the map of docs/architecture.md: {missing}"
    assert not gone, f"the map of docs/architecture.md has modules that are not there: {gone}"
    assert len(drawn) == len(on_disk)


def test_the_architecture_page_names_files_that_are_there_and_lists_every_note_in_the_code_with_its_file() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|jsonl))`", ARCHITECTURE.read_text().split("```")[2])
    assert named
    assert [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()] == []
    listed = re.findall(r"^- NOTE \[ (.+) \] in `(.+)`:", ARCHITECTURE.read_text(), re.MULTILINE)
    sources = {str(module): (PACKAGE / module).read_text() for module in MODULES}
    written = [
        (note, file) for file in sources for note in re.findall(r"^NOTE \[ (.+) \]$", sources[file], re.MULTILINE)
    ]
    assert sorted(listed) == sorted(written)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_down_and_through_the_door(module: Path) -> None:
    home, found = folder_of(str(module)), {name for name in imports(module) if name.endswith(".py")}
    others = {name for name in found if folder_of(name) != home}
    allowed = BELOW[home] if home else PUBLIC_PAGES.get(str(module), set())
    assert {folder_of(name) for name in others} <= allowed | ({"tools"} & PUBLIC_PAGES.get(str(module), set()))
    for name in others:
        folder, _, rest = name.partition("/")
        if rest:
            inner = rest.removesuffix(".py").removesuffix("/__init__").split("/")[0]
            doors = importlib.import_module(f"proxyloader.{folder}").__all__
            assert inner in doors, f"{module} imports {name}, and proxyloader.{folder} offers {doors}"


@pytest.mark.parametrize("folder", BELOW)
def test_a_door_offers_what_others_use_and_no_more(folder: str) -> None:
    used = set()
    for module in MODULES:
        if folder_of(str(module)) != folder:
            paths = [Path(name).parts for name in imports(module) if folder_of(name) == folder]
            used |= {parts[1].removesuffix(".py") for parts in paths}
    assert sorted(used) == sorted(importlib.import_module(f"proxyloader.{folder}").__all__)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_one_module_imports_dali_and_what_measures_its_own_loaders(module: Path) -> None:
    named = any(name.startswith("nvidia") for name in imports(module))
    assert named == (str(module) in ("dali/api.py", "tools/bench/cases.py"))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_each_fault_of_the_mutation_check_can_be_planted(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    copy.write_text((PACKAGE / mutation.file).read_text())
    plant(mutation, tmp_path)
    compile(copy.read_text(), copy, "exec")
    assert all((ROOT / "tests" / name).exists() for name in mutation.tests.split())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"PROXYLOADER_KEEP_ENVIRONMENT": "1"}, {}),
    ],
    ids=["by default", "unless the user has", "unless that is forbidden"],
)
def test_importing_asks_for_queues(given: dict[str, str], found: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"} | given
    code = "import os; before = dict(os.environ); import proxyloader; print(dict(os.environ.items() - before.items()))"
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert ast.literal_eval(told.stdout) == dict(found.items() - given.items())


PUBLIC_NAMES = """
DataLoader ForeignImageError ImageError InputError LargeImageError LastBatchPolicy LoaderStats
MissingDaliError MissingImageError PipelineError ProxyLoaderError ProxyServer RemoteImageFolder ShardedSampler
World diagnose diagnosis explain pipelines wrap
"""


def test_the_public_names_are_these_and_each_is_there() -> None:
    assert sorted(proxyloader.__all__) == PUBLIC_NAMES.split()
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


FROM_THE_PACKAGE = r"(?m)^ *from (proxyloader[\w.]*) import (?:\(([\s\w,]+)\)|([\w, ]+))"


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests", "docs"])
def test_what_is_imported_from_the_package_is_there(folder: str) -> None:
    """Also in the scripts that stand in strings."""
    for script in (ROOT / folder).rglob("*.py"):
        for source, *names in re.findall(FROM_THE_PACKAGE, script.read_text()):
            module = importlib.import_module(source)
            for name in re.findall(r"(?<!as )\b(?!as\b)\w+", " ".join(names)):
                is_there = hasattr(module, name) or importlib.util.find_spec(f"{source}.{name}")
                assert is_there, f"{script} imports {source}.{name}"


def test_every_benchmark_is_run_here_and_has_its_record() -> None:
    assert BENCHMARKS.keys() == {script.stem for script in (ROOT / "benchmarks").glob("[!_]*.py")}
    for name in BENCHMARKS:
        assert (ROOT / "benchmarks" / "results" / f"{name}.jsonl").exists(), name
        assert f"{name}.py" in (ROOT / "benchmarks" / "README.md").read_text()


def test_every_row_of_the_faults_has_a_test_that_exists() -> None:
    folder = ROOT / "tests" / "integration"
    rows = re.findall(r"^\| (\d+[a-h]?) \|(.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert len({row for row, _ in rows}) == 54
    for row, cells in rows:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cells)
        assert tests, row
        for file, name in tests:
            assert re.search(rf"^def {name}\(", (folder / file).read_text(), re.MULTILINE), (row, name)


BENCHMARKS = {
    "decoders": "--batches 2 --batch-size 4 --kinds 4:2:0 gray --qualities 90",
    "detection": "--images 8 --batch-size 2 --workers 1 --steps 2 --soak 24",
    "imagenet": "--archs resnet18 --images 16 --batch-size 8 --size 32 --workers 1 --epochs 2 --rounds 1",
    "limits": "--pipelines hflip --images 64 --workers 1 --rounds 1 --seconds 0.1",
    "parts": "--images 16",
    "remote": "--images 16 --image-size 64 48 --crop 32 --batch-size 4 --rounds 1 --stores moto waits --clients s3fs "
    "--workers 1 --connections 1 4",
    "several_gpus": "--images 16 --passes 2 --batch-size 4 --workers 1 --rounds 1 --ranks 2",
    "scan_checks": "--images 44 --looked-at 4 --rounds 1 --processes 1",
    "soak": "--minutes 0.02 --images 64",
    "training_curves": "--images 64 --epochs 1 --runs 2",
    "transforms": "--images 4 --rounds 1 --only crop",
    "versions": f"--before {ROOT} --images 16 --batch-size 4 --workers 1 --rounds 1",
}
CASES = {name: (name, options) for name, options in BENCHMARKS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), by_default(CASES, "soak", "transforms"))
def test_every_benchmark_runs(name: str, options: str, tmp_path: Path) -> None:
    arguments = [*options.split(), "--out", str(tmp_path / "record.jsonl")]
    arguments += [] if name in ("parts", "scan_checks") else ["--device", "cpu"]
    program, environment = ROOT / "benchmarks" / f"{name}.py", {"TMPDIR": str(tmp_path)}
    done = scripts.run(program, *arguments, timeout_s=2 * WAIT_S, environment=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "record.jsonl").read_text().startswith('{"date": ')


def test_one_build_of_dali_is_asked_for_and_the_oldest_packages_that_are_allowed_are_tried() -> None:
    required, extras = (ROOT / "setup.cfg").read_text().split("[options.extras")
    assert re.findall(r"nvidia-dali[\w-]*", required + extras) == ["nvidia-dali-cuda120"]
    tried = dict(line.split("==") for line in (ROOT / ".ci" / "oldest.txt").read_text().splitlines()[1:])
    allowed = dict(re.findall(r"^    ([\w-]+)>=([\d.]+)", required, re.M))
    allowed |= re.findall(r"^    (timm)>=([\d.]+)", extras, re.M)
    assert {name: version.removesuffix(".0") for name, version in tried.items()} == allowed


def test_a_run_draws_the_same_examples_unless_it_is_asked_for_others(request: pytest.FixtureRequest) -> None:
    assert settings.default is not None
    assert settings.default.derandomize == (request.config.getoption("--hypothesis-profile") is None)
