"""Which test files may find an error in a file: the quick ones, whose lines are recorded, and the slow ones that name its module."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path


def quick_files(root: Path) -> list[str]:
    """The files of quick tests, by their paths from the checkout's root."""
    slow, timed = _slow_and_timed(root / "tests" / "conftest.py")
    return [_relative(root, each) for each in _test_files(root) if each.stem not in (*slow, *timed)]


def slow_files(root: Path, path: str) -> list[str]:
    """The files of slow tests that name the module of a file, by their paths from the checkout's root, the quickest first."""
    module = f"distrain.{path.removesuffix('.py').replace('/', '.')}"
    slow, _ = _slow_and_timed(root / "tests" / "conftest.py")
    naming = [each for each in _test_files(root) if each.stem in slow and _names(root, each, module)]
    return [_relative(root, each) for each in sorted(naming, key=lambda each: -slow.index(each.stem))]


def _test_files(root: Path) -> list[Path]:
    return sorted((root / "tests").glob("*/test_*.py"))


def _relative(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def _names(root: Path, file: Path, module: str) -> bool:
    """Whether a test file, or a helper in tests/ that it imports, imports a module."""
    imported = _imports(file)
    helpers = [name for name in imported if name.startswith("distrain.tests.")]
    paths = (root / f"{name.removeprefix('distrain.').replace('.', '/')}.py" for name in helpers)
    return module in imported or any(module in _imports(path) for path in paths if path.exists())


def _imports(file: Path) -> set[str]:
    """The modules that a file imports, by their whole names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def _slow_and_timed(conftest: Path) -> tuple[Sequence[str], Sequence[str]]:
    """The lists SLOW, the slowest first, and TIMED of tests/conftest.py."""
    lists: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(conftest.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("SLOW", "TIMED"):
            lists[node.targets[0].id] = ast.literal_eval(node.value)
    return lists["SLOW"], lists["TIMED"]
