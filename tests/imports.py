"""Who imports whom in the package."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "proxyloader"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@functools.cache
def imports(module: Path) -> set[str]:
    """The modules that one of ours imports, at any depth; ours as file names relative to the package."""
    tree = ast.parse((PACKAGE / module).read_text())
    return set().union(*(_imported(PACKAGE / module, node) for node in ast.walk(tree)))


def _imported(path: Path, node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {node.module or ""}
    if isinstance(node, ast.ImportFrom):
        home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        return {str(file_of(home, alias.name).relative_to(PACKAGE)) for alias in node.names}
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return set()


def file_of(home: Path, name: str) -> Path:
    """Where ``from home import name`` finds it: in a module of that name, or in what ``home`` is itself."""
    places = home / f"{name}.py", home / name / "__init__.py", home.with_suffix(".py"), home / "__init__.py"
    return next(place for place in places if place.exists())


def folder_of(module: str) -> str:
    """The folder of the package that a module lies in; "" at its root."""
    return Path(module).parts[0] if len(Path(module).parts) > 1 else ""
