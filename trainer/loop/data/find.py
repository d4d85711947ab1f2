"""The files that `data.path` names, in an order that is the same everywhere."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from ...spec.problem import Problem, Unreadable, nearest
from .refusal import refused, wrong

TEXT = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
TOKENS = (".bin",)

# Folders of the standard library that are left out: tests, tools with windows of their own, tables, and what is installed there.
_TESTS = {"test", "tests", "__phello__"}
_TOOLS = {"idlelib", "turtledemo", "lib2to3", "ensurepip"}
_TABLES = {"encodings", "pydoc_data"}
_INSTALLED = {"site-packages", "dist-packages", "lib-dynload"}
_NOT_LIBRARY = _TESTS | _TOOLS | _TABLES | _INSTALLED
_OF_A_MACHINE = (
    "_sysconfigdata",
    "sitecustomize",
    "usercustomize",
    "python-config",
)  # modules that differ between machines of one Python version


class File(NamedTuple):
    """A file, its size in bytes, and its name below what the user named: the same wherever the data lies."""

    name: str
    path: Path
    size: int


def library() -> list[File]:
    """The .py files of this Python's standard library, sorted by name, empty ones left out; raises Unreadable."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _below(root, (".py",), _NOT_LIBRARY) if file.size and not file.path.name.startswith(_OF_A_MACHINE)]
    if not files:
        raise refused(f"data=stdlib: no .py files in {root}", "set data=text data.path=FOLDER")
    return files


def found(words: Sequence[str], suffixes: tuple[str, ...]) -> list[list[File]]:
    """The files of each word: a file, a folder (its files with one of the suffixes), or a pattern; raises Unreadable."""
    problems: list[Problem] = []
    groups = [list(_named(word, suffixes, problems)) for word in words]
    for files in groups:
        problems += [wrong(f"{file.path} is empty", "leave it out of data.path") for file in files if not file.size]
    if problems:
        raise Unreadable(problems)
    return groups


def _named(word: str, suffixes: tuple[str, ...], problems: list[Problem]) -> Iterator[File]:
    path = Path(word).expanduser()
    if path.is_dir():
        files = _below(path, suffixes)
        if not files:
            kinds = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if suffixes[1:] else suffixes[0]
            mend = f"name files of other kinds by a pattern: data.path='{word}/**/*.md'" if suffixes == TEXT else ""
            problems.append(wrong(f"data.path={word} has no {kinds} in it", mend))
        yield from files
    elif path.exists():
        yield _file(path.name, path)
    elif has_magic(word):
        hits = [Path(hit) for hit in sorted(glob(str(path), recursive=True)) if os.path.isfile(hit)]
        root = os.path.commonpath([hit.parent for hit in hits]) if hits else ""
        if not hits:
            problems.append(wrong(f"data.path={word} matches no file", ""))
        yield from sorted(_file(hit.relative_to(root).as_posix(), hit) for hit in hits)
    elif ".bin" in suffixes and path.with_name(f"{path.name}.bin").exists():  # Megatron names a pair without its suffixes
        yield _file(f"{path.name}.bin", path.with_name(f"{path.name}.bin"))
    else:
        problems.append(wrong(f"data.path={word}: no such file or folder", _neighbour(path)))


def _below(root: Path, suffixes: tuple[str, ...], without: AbstractSet[str] = frozenset()) -> list[File]:
    """The files below a folder, sorted by name, but for hidden ones and those in folders of the names `without`."""
    files = []
    for at, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        paths = (Path(at, name) for name in names if name.endswith(suffixes) and not name.startswith("."))
        files += [_file(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


def _file(name: str, path: Path) -> File:
    path = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if not path.exists():
        raise refused(f"{path}: no such file", f"{path.with_suffix('.idx').name} wants it beside itself")
    return File(name, path, path.stat().st_size)


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    close = nearest(path.name, [each.name for each in path.parent.iterdir()])
    return close if close.startswith("did") else ""
