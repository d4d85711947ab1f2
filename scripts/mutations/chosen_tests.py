"""Which test files may find an error in a file: the quick ones, whose lines are recorded, and the slow ones of its rooms."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

# fmt: off
ROOMS: dict[str, tuple[str, ...]] = {  # a folder of files to mutate: the folders of tests that train or compute with it
    "trainer/layers":               ("models", "parallel"),
    "trainer/models":               ("models",),
    "trainer/parallel":             ("parallel",),
    "trainer/engines":              ("engines", "parallel", "prove", "models", "loop", "checkpoint"),
    "trainer/loop/data":            ("data",),
    "trainer/loop/checkpoint":      ("checkpoint", "loop"),
    "trainer/loop":                 ("loop", "parallel", "checkpoint", "data"),
    "trainer/plan/axes":            ("plan", "parallel", "checkpoint"),
    "trainer/plan/deepspeed":       ("plan", "parallel"),
    "trainer/plan/layout":          ("plan", "parallel"),
    "trainer/plan":                 ("plan", "parallel"),
    "trainer/rundir":               ("checkpoint", "loop"),
    "trainer/spec":                 ("spec", "loop"),
}
# fmt: on
COMPARING = ("models", "parallel")  # folders of tests whose rank programs compare ranks with one process, which shows most in least time


def quick_files(root: Path, folders: Collection[str] = ()) -> list[str]:
    """The files of quick tests in some folders of tests, or in all, by their paths from the checkout's root."""
    slow, timed = _slow_and_timed(root / "tests" / "conftest.py")
    return [
        _relative(root, each)
        for each in _test_files(root)
        if each.stem not in (*slow, *timed) and (not folders or each.parent.name in folders)
    ]


def named_quick_files(root: Path, path: str, folders: Collection[str] = ()) -> list[str]:
    """The files of quick tests that are named for a file or a folder above it, by their paths from the checkout's root."""
    return [each for each in quick_files(root, folders) if _is_named_in(path, root / each)]


def slow_tests(root: Path, path: str, folders: Sequence[str] = ()) -> list[str]:
    """The slow tests, in some folders of tests or in those of its room, for an error in a file, by their ids from the checkout's root.

    First tests of COMPARING and of its rooms that start a rank program which imports its module, or one that imports it; then the files
    that name the module or its folder, as test_delayed.py does delayed_engine.py, then those of its rooms, in the order of ROOMS, the
    quickest of each first.
    """
    module = f"distrain.{path.removesuffix('.py').replace('/', '.')}"
    slow, _ = _slow_and_timed(root / "tests" / "conftest.py")
    rooms = tuple(folders) or next(folders for room, folders in ROOMS.items() if path.startswith(f"{room}/"))
    files = [each for each in _test_files(root) if each.stem in slow and (not folders or each.parent.name in folders)]
    naming = {each for each in files if _names(root, each, module) or _is_named_in(path, each)}
    chosen = [each for each in files if each in naming or each.parent.name in rooms]
    programs = {each.name for each in (root / "tests" / "rank_programs").glob("*.py") if _names(root, each, module, among="distrain.")}
    starting = {each: _tests_that_start(each, programs) if each.parent.name in {*rooms} & {*COMPARING} else [] for each in chosen}
    chosen.sort(
        key=lambda each: (
            each not in naming and not starting[each],
            rooms.index(each.parent.name) if each.parent.name in rooms else len(rooms),
            -slow.index(each.stem),
        )
    )
    return [
        *(f"{_relative(root, each)}::{test}" for each in chosen for test in starting[each]),
        *(_relative(root, each) for each in chosen),
    ]


def _test_files(root: Path) -> list[Path]:
    return sorted((root / "tests").glob("*/test_*.py"))


def _relative(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def _is_named_in(path: str, test: Path) -> bool:
    """Whether a test file's name stands in that of the file under test or is that of a folder above it."""
    name = test.stem.removeprefix("test_")
    return name in Path(path).stem or name in Path(path).parent.parts


def _names(root: Path, file: Path, module: str, among: str = "distrain.tests.") -> bool:
    """Whether a test file, or a module of ours that it imports, by default a helper in tests/, imports a module."""
    imported = _imports(root, file)
    paths = (root / f"{name.removeprefix('distrain.').replace('.', '/')}.py" for name in imported if name.startswith(among))
    return module in imported or any(module in _imports(root, path) for path in paths if path.exists())


def _tests_that_start(file: Path, programs: Collection[str]) -> list[str]:
    """The tests of a file that start one of these rank programs, themselves or by a function of the file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {each.name: _words(each) for each in tree.body if isinstance(each, ast.FunctionDef)}
    starting = {name for name, words in functions.items() if not words.isdisjoint(programs)}
    return [name for name, words in functions.items() if name.startswith("test_") and (name in starting or not words.isdisjoint(starting))]


def _words(tree: ast.AST) -> set[str]:
    """The names, arguments and texts in a tree."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(word)) | ast.Name(id=word) | ast.arg(arg=word):
                found.add(word)
    return found


@cache
def _imports(root: Path, file: Path) -> frozenset[str]:
    """The modules that a file imports, by their whole names."""
    package = ("distrain", *file.relative_to(root).parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = package[: -node.level] if node.level else ()
            name = ".".join((*above, *((node.module,) if node.module else ())))
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def _slow_and_timed(conftest: Path) -> tuple[Sequence[str], Sequence[str]]:
    """The lists SLOW, the slowest first, and TIMED of tests/conftest.py."""
    lists: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(conftest.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("SLOW", "TIMED"):
            lists[node.targets[0].id] = ast.literal_eval(node.value)
    return lists["SLOW"], lists["TIMED"]
