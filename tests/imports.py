"""Who imports whom in the package, and on how many floors.

python -m tests.imports          # a line for each floor of modules, and one for each folder
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "proxyloader"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(module: Path, source: str | None = None, at_start: bool = False) -> set[str]:
    """The modules that one of ours imports, at any depth; ours as file names relative to the package.

    Args:
        source: in place of the module's own.
        at_start: leave out what is imported in functions, or for the type checker.
    """
    found: set[str] = set()
    for node in _statements(ast.parse(source or (PACKAGE / module).read_text()), at_start):
        found |= _imported(PACKAGE / module, node)
    return found


def _statements(tree: ast.AST, at_start: bool) -> list[ast.AST]:
    if not at_start:
        return list(ast.walk(tree))
    later = (ast.FunctionDef, ast.AsyncFunctionDef, ast.If)
    return [tree] + [
        each
        for child in ast.iter_child_nodes(tree)
        if not isinstance(child, later)
        for each in _statements(child, at_start)
    ]


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


@cache
def floor_of(module: str) -> int:
    """0: it imports none of ours at its start. Otherwise one above the highest of those that it imports."""
    below = {name for name in imports(Path(module), at_start=True) if name.endswith(".py")} - {"__init__.py", module}
    return 1 + max(map(floor_of, below), default=-1)


def main() -> None:
    floors: dict[int, list[str]] = {}
    for module in map(str, MODULES):
        floors.setdefault(floor_of(module), []).append(module)
    for floor, modules in sorted(floors.items()):
        print(f"{floor:2}  {' '.join(modules)}")
    for folder in sorted({folder_of(str(module)) for module in MODULES}):
        found = {
            folder_of(name)
            for module in MODULES
            if folder_of(str(module)) == folder
            for name in imports(module)
            if name.endswith(".py")
        } - {folder}
        print(f"{folder or 'root'} imports {', '.join(sorted(name or 'root' for name in found)) or 'no other'}")


if __name__ == "__main__":
    main()
