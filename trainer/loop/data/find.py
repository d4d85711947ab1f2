"""The files that `data.path` names, in an order that is the same everywhere."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from ...spec.problem import Problem, Unreadable, nearest
from .data_error import refused, wrong

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


Remark = Callable[[str], object]


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


class Search(NamedTuple):
    """What a folder is searched for."""

    suffixes: tuple[str, ...]  # ends of the names of the files that are read
    beside: tuple[str, ...]  # ends of the names of files that belong to others: nobody misses them
    words: str  # the suffixes, for a message
    mend: str  # what to do where a folder has no such file
    takes: Callable[[Path], bool] = lambda path: True  # whether a file with one of the suffixes is read


def found(words: Sequence[str], search: Search, remark: Remark, problems: list[Problem]) -> list[list[File]]:
    """The files of each word, which names a file, a folder or a pattern; adds to problems.

    A remark counts the files that are left out of a folder or a pattern.
    """
    return [_named(word, search, remark, problems) for word in words]


def _named(word: str, search: Search, remark: Remark, problems: list[Problem]) -> list[File]:
    """The files of one word; adds to problems."""
    try:
        return list(_files(word, search, remark))
    except Unreadable as error:
        problems += error.problems
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, ~NOBODY, a zero byte
        inside = f"{error.filename}: " if isinstance(error, OSError) and error.filename not in (None, word) else ""
        problems.append(wrong(f"data.path={word}: {inside}{getattr(error, 'strerror', None) or str(error).rstrip('.')}"))
    return []


def _files(word: str, search: Search, remark: Remark) -> list[File]:
    """The files of one word; raises Unreadable, and OSError, RuntimeError or ValueError for a word that is no path."""
    path = Path(word).expanduser()
    if path.is_dir():
        return _of_folder(word, path, search, remark)
    if path.is_file():
        return [_named_file(path)]
    if path.exists():
        raise refused(f"data.path={word} is no file but a pipe or a device", "write what it gives to a file, and name that")
    if path.is_symlink():
        raise refused(f"data.path={word} is a link to {os.readlink(path)}, which is not there")
    if has_magic(word):
        return _of_pattern(word, path, search, remark)
    if ".bin" in search.suffixes and path.with_name(f"{path.name}.bin").exists():  # Megatron names a pair without its suffixes
        return [_named_file(path.with_name(f"{path.name}.bin"))]
    raise refused(f"data.path={word}: no such file or folder", _neighbour(path))


def _named_file(path: Path) -> File:
    """A file that is named itself; raises Unreadable."""
    file = _file(path.name, path)
    if not file.size:
        raise refused(f"{file.path} is empty", "leave it out of data.path")
    return file


def _of_folder(word: str, path: Path, search: Search, remark: Remark) -> list[File]:
    everything = _below(path)
    fitting = [file for file in everything if file.size and file.name.lower().endswith(search.suffixes)]
    files = [file for file in fitting if search.takes(file.path)] or fitting
    left = _count_words([file for file in everything if not file.name.lower().endswith(search.beside)], files)
    if not files:
        raise refused(f"data.path={word} has no {search.words} in it" + (f" but {left}" if left else ""), search.mend.format(word))
    if left:
        remark(f"data.path={word}: {_file_count(files)}, and left out are {left}")
    return files


def _of_pattern(word: str, path: Path, search: Search, remark: Remark) -> list[File]:
    hits = [Path(hit) for hit in sorted(glob(str(path), recursive=True)) if os.path.isfile(hit)]
    hits = [hit for hit in hits if hit.suffix == ".idx" or not hit.name.lower().endswith(search.beside)]
    if not hits:
        raise refused(f"data.path={word} matches no file")
    root = os.path.commonpath([hit.parent for hit in hits])
    everything = {file.path: file for file in sorted((_file(hit.relative_to(root).as_posix(), hit) for hit in hits), reverse=True)}
    files = sorted(file for file in everything.values() if file.size)
    if not files:
        raise refused(f"data.path={word} matches empty files only")
    if left := _count_words(list(everything.values()), files):
        remark(f"data.path={word}: {_file_count(files)}, and left out are {left}")
    return files


def _file_count(files: Sequence[File]) -> str:
    return f"{len(files):,} files are read" if files[1:] else "1 file is read"


def _count_words(everything: Sequence[File], files: Sequence[File]) -> str:
    """How many files of which kind are not among those that are read: 3 .pdf, 2 empty; "" where none is left out."""
    taken = {file.path for file in files}
    left = Counter("empty" if not file.size else file.path.suffix or "without a suffix" for file in everything if file.path not in taken)
    rows = [f"{count:,} {kind}" for kind, count in left.most_common(5)]
    more = sum(left.values()) - sum(count for _, count in left.most_common(5))
    return ", ".join([*rows, *([f"{more:,} others"] if more else [])])


def _below(root: Path, suffixes: tuple[str, ...] = ("",), without: AbstractSet[str] = frozenset()) -> list[File]:
    """The files below a folder, sorted by name, but for hidden ones and those in folders of the names `without`; raises OSError."""
    files = []
    for at, folders, names in os.walk(root, onerror=_fail):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        below = Path(at).relative_to(root)
        for name in names:
            if name.endswith(suffixes) and not name.startswith("."):
                with suppress(FileNotFoundError):  # a link to nothing
                    about = os.stat(os.path.join(at, name))
                    if stat.S_ISREG(about.st_mode):
                        files.append(File((below / name).as_posix(), Path(at, name), about.st_size))
    return sorted(files)


def _fail(error: OSError) -> None:
    """A folder that can't be read is not passed over."""
    raise error


def _file(name: str, path: Path) -> File:
    """A file, or the .bin beside a .idx; raises Unreadable where that is missing."""
    path = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if not path.exists():
        raise refused(f"{path}: no such file", f"{path.with_suffix('.idx').name} wants it beside itself")
    return File(name, path, path.stat().st_size)


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    close = nearest(path.name, [each.name for each in path.parent.iterdir()])
    return close if close.startswith("did") else ""
