"""The README and the pages of docs/ are true: messages, links, examples, and the lists of classes."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxyloader
from proxyloader import ProxyLoaderError, errors
from proxyloader.transforms.registry import RULES, load_timm_rules

from . import scripts
from .imports import PACKAGE
from .limits import WAIT_S

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"


def blocks(page: Path, kinds: str) -> list[str]:
    """What stands between fences of these kinds, a regular expression."""
    return [code for _, code in re.findall(rf"^```({kinds})\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)]


def messages_of_the_package() -> list[str]:
    """Its strings, with … for what is put into them."""
    found = []
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub("%[sdr]", "…", node.value))
    return found


def test_every_message_on_the_page_of_errors_is_one_of_the_package() -> None:
    quoted = [message.strip() for message in blocks(ROOT / "docs" / "errors.md", "message")]
    written = messages_of_the_package()
    assert len(quoted) >= 15
    assert [message for message in quoted if not any(message in each for each in written)] == []


def test_the_page_of_errors_has_every_code_with_what_it_stands_for() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    described = re.findall(r"^\| `(\w+Error)` \| `([a-z-]+)` \| (.*) \|$", page, re.MULTILINE)
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ProxyLoaderError)]
    assert sorted(described) == sorted(
        (cls.__name__, code, meaning) for cls in classes for code, meaning in vars(cls).get("CODES", {}).items()
    )


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_python_on_the_pages_is_python(page: Path) -> None:
    for code in blocks(page, r"python|\{testcode\}"):
        compile(code, page.name, "exec")


def test_the_page_of_the_api_has_every_public_name() -> None:
    described = re.findall(r"^\.\. auto\w+:: proxyloader\.(\w+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert set(proxyloader.__all__) <= set(described)


def test_the_page_of_transforms_names_every_class_that_is_drawn_at_once() -> None:
    load_timm_rules()
    section = (ROOT / "docs" / "transforms.md").read_text().split("## Classes with built-in rules")[1].split("\n## ")[0]
    listed = {name for item in section.split("\n- ")[1:] for name in re.findall(r"`(\w+)`", item.split("\n\n")[0])}
    known = {cls.__name__ for cls in RULES} - {"ImageClassification"}  # the transforms() of weights
    assert listed == known


WHOLE_PROGRAM = """
import multiprocessing
import sys

import proxyloader
import torch.utils.data

stock = torch.utils.data.DataLoader
torch.utils.data.DataLoader = proxyloader.DataLoader

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

def without_dali(label):
    assert multiprocessing.parent_process() is None or "nvidia.dali" not in sys.modules
    return label

if __name__ == "__main__":
    transform = transforms.Compose([transforms.RandomCrop(16), transforms.ToTensor()])
    dataset = ImageFolder(sys.argv[1], transform, without_dali)
    assert DataLoader is proxyloader.DataLoader and issubclass(DataLoader, stock)

    def labels(loader_class, **options):
        torch.manual_seed(0)
        return [labels.tolist() for _, labels in loader_class(dataset, 8, shuffle=True, **options)]

    expected = labels(stock)
    assert len(expected) == 6
    assert labels(DataLoader) == expected
    assert labels(DataLoader, num_workers=1, multiprocessing_context="spawn") == expected
    print("equal")
"""


def test_the_loader_can_be_put_in_torchs_place_for_the_whole_program_and_its_workers_need_no_dali(
    photos: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    swap = "torch.utils.data.DataLoader = proxyloader.DataLoader"
    assert swap in page and swap in README.read_text() and swap in WHOLE_PROGRAM
    assert _run(WHOLE_PROGRAM, tmp_path, str(photos)).split() == ["equal"]


def test_the_example_and_every_recipe_in_the_readme_run(tmp_path: Path) -> None:
    (example,) = [code for code in blocks(README, "python") if "make_dataset" in code]
    recipes = [code for code in blocks(README, "python") if not code.startswith("from ")]
    assert len(recipes) == 5 and all(len(code.splitlines()) <= 6 for code in recipes[1:])
    smaller = {"images=256": "images=64, processes=1", "num_workers=8": "num_workers=1", "range(90)": "range(2)"}
    script = "\n".join([example, *recipes])
    for long, short in smaller.items():
        assert long in script
        script = script.replace(long, short)
    said = r"torch.Size\(\[64, 3, 224, 224\]\) torch.float32 \S+ torch.Size\(\[64\]\)\n0 \[\]\n"
    assert re.fullmatch(said, _run(script, tmp_path))


def _run(script: str, folder: Path, *arguments: str) -> str:
    (folder / "program.py").write_text(script)
    done = scripts.run(folder / "program.py", *arguments, timeout_s=2 * WAIT_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(1, 5))
def test_a_recipe_needs_no_other_than_the_shared_lines(number: int) -> None:
    shared, *others = [code for code in blocks(README, "python") if not code.startswith("from ")]
    tree = ast.parse(shared + others[number - 1])
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    known |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    assert {node.id for node in names} <= known


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert "pip install -e . && proxyloader demo" in lines and 'pip install -e ".[test]" && pytest' in lines


def numbers(found: object) -> Iterator[int]:
    """All in a record, rounded."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from numbers(each)
    elif isinstance(found, (int, float)):
        yield round(found)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "performance.md"], ids=lambda page: page.name)
def test_every_speed_in_a_table_has_its_record(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    speeds = {int(number.replace(",", "")) for row in rows for number in re.findall(r"\b\d{1,2},\d{3}\b", row)}
    records = (ROOT / "benchmarks" / "results").glob("*.jsonl")
    recorded = {
        each for file in records for line in file.read_text().splitlines() for each in numbers(json.loads(line))
    }
    for file in (ROOT / "benchmarks" / "results").glob("*.txt"):
        recorded |= {int(number.replace(",", "")) for number in re.findall(r"\b\d{1,2},\d{3}\b", file.read_text())}
    assert speeds and speeds <= recorded


LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    for page in (README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"):
        assert [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()] == [], page
