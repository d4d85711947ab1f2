"""The files that `data.path` names, in an order that is the same everywhere."""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from ....spec.problem import Problem, Unreadable, suggest_name
from .data_error import data_error, data_problem

# Folders of the standard library that are skipped: tests, tools with a user interface, tables, installed packages, compiled files.
_TESTS = {"test", "tests", "__phello__"}
_TOOLS = {"idlelib", "turtledemo", "lib2to3", "ensurepip"}
_TABLES = {"encodings", "pydoc_data"}
_INSTALLED = {"site-packages", "dist-packages", "lib-dynload"}
_COMPILED = {"__pycache__"}
_SKIPPED_FOLDERS = _TESTS | _TOOLS | _TABLES | _INSTALLED | _COMPILED
_MACHINE_FILES = (
    "_sysconfigdata",
    "sitecustomize",
    "usercustomize",
    "python-config",
)  # modules that differ between machines with the same Python version

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")  # s3://, https://

Remark = Callable[[str], object]


class DataFile(NamedTuple):
    """A data file: its path, its size in bytes, and its name relative to the folder that the user named."""

    name: str
    path: Path
    size: int


def library_files() -> list[DataFile]:
    """Return the non-empty .py files of this Python's standard library, sorted by name; raises Unreadable."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _files_below(root, (".py",), _SKIPPED_FOLDERS) if file.size and not file.path.name.startswith(_MACHINE_FILES)]
    if not files:
        raise data_error(f"data=stdlib: no .py files in {root}", "set data=text data.path=FOLDER")
    return files


class FileSearch(NamedTuple):
    """Which files of a folder are read."""

    suffixes: tuple[str, ...]  # name suffixes of the files that are read
    companions: tuple[str, ...]  # name suffixes of files that belong to data files: they are not reported as skipped
    described: str  # the suffixes, for a message
    mend: str  # what to do if a folder has no such file, with {} for the folder and {} for the suffix of most of its files
    accepts: Callable[[Path], bool] = lambda path: True  # whether a file with one of the suffixes is read


def find_files(words: Sequence[str], search: FileSearch, remark: Remark, problems: list[Problem]) -> list[list[DataFile]]:
    """Return the files of each path, which names a file, a folder or a pattern; append to `problems`.

    A remark counts the files of a folder or a pattern that are skipped.
    """
    mend = "leave it out of data.path" if len(words) > 1 else "name another"
    return [_files_of_word(word, search, remark, problems, of_empty=mend) for word in words]


def _files_of_word(word: str, search: FileSearch, remark: Remark, problems: list[Problem], *, of_empty: str) -> list[DataFile]:
    """Return the files of one path; append to `problems`. `of_empty` is the mend of an empty file."""
    try:
        files = list(_find(word, search, remark))
        if not files[0].size:  # of a folder or a pattern none is empty
            raise data_error(f"{files[0].path} is empty", of_empty)
        return files
    except Unreadable as error:
        problems += error.problems
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown ~USER, a zero byte
        inside = f"{error.filename}: " if isinstance(error, OSError) and error.filename not in (None, word) else ""
        problems.append(data_problem(f"data.path={word}: {inside}{getattr(error, 'strerror', None) or str(error).rstrip('.')}"))
    return []


def _find(word: str, search: FileSearch, remark: Remark) -> list[DataFile]:
    """Return the files of one path; raises Unreadable, and OSError, RuntimeError or ValueError if it is not a valid path."""
    path = Path(word).expanduser()
    if path.is_dir():
        return _folder_files(word, path, search, remark)
    if path.is_file():
        return [_file(path.name, path)]
    if path.exists():
        raise data_error(f"data.path={word} is a pipe or a device, not a file", "write its contents to a file and name that")
    if path.is_symlink():
        raise data_error(f"data.path={word} is a link to {os.readlink(path)}, which does not exist")
    if _REMOTE.match(word):
        raise data_error(f"data.path={word}: remote paths are not read", "copy the files to a folder, or mount them there")
    if has_magic(word):
        return _pattern_files(word, path, search, remark)
    if ".bin" in search.suffixes and path.with_name(f"{path.name}.bin").exists():  # Megatron names a .bin and .idx pair without suffixes
        bin_path = path.with_name(f"{path.name}.bin")
        return [_file(bin_path.name, bin_path)]
    raise data_error(f"data.path={word}: no such file or folder", _similar_name(path))


def _folder_files(word: str, path: Path, search: FileSearch, remark: Remark) -> list[DataFile]:
    everything = _files_below(path)
    fitting = [file for file in everything if file.size and file.name.lower().endswith(search.suffixes)]
    files = [file for file in fitting if search.accepts(file.path)] or fitting
    skipped = _skipped_text([file for file in everything if not file.name.lower().endswith(search.companions)], files)
    if not files and everything and not any(file.size for file in everything):
        raise data_error(f"data.path={word} has only empty files in it")
    if not files:
        says = f"data.path={word} has no {search.described} in it" + (f", only {skipped}" if skipped else "")
        raise data_error(says, search.mend.format(word, _commonest_suffix(everything)))
    if skipped:
        remark(f"data.path={word}: {_file_count(files)}; skipped: {skipped}")
    return files


def _pattern_files(word: str, path: Path, search: FileSearch, remark: Remark) -> list[DataFile]:
    hits = [Path(hit) for hit in sorted(glob(str(path), recursive=True)) if os.path.isfile(hit)]
    hits = [hit for hit in hits if hit.suffix == ".idx" or not hit.name.lower().endswith(search.companions)]
    if not hits:
        raise data_error(f"data.path={word} matches no file")
    root = os.path.commonpath([hit.parent for hit in hits])
    everything = {file.path: file for file in sorted((_file(hit.relative_to(root).as_posix(), hit) for hit in hits), reverse=True)}
    files = sorted(file for file in everything.values() if file.size)
    if not files:
        raise data_error(f"data.path={word} matches only empty files")
    if skipped := _skipped_text(list(everything.values()), files):
        remark(f"data.path={word}: {_file_count(files)}; skipped: {skipped}")
    return files


def _commonest_suffix(files: Sequence[DataFile]) -> str:
    """Return the suffix of most of the files that are not empty; "" where there is none."""
    found = Counter(file.path.suffix for file in files if file.size).most_common(1)
    return found[0][0] if found else ""


def _file_count(files: Sequence[DataFile]) -> str:
    return f"{len(files):,} files are read" if files[1:] else "1 file is read"


def _skipped_text(everything: Sequence[DataFile], files: Sequence[DataFile]) -> str:
    """Return how many files of each kind are skipped: "3 .pdf, 2 empty"; "" if none is."""
    read = {file.path for file in files}
    kinds = Counter("empty" if not file.size else file.path.suffix or "without a suffix" for file in everything if file.path not in read)
    rows = [f"{count:,} {kind}" for kind, count in kinds.most_common(5)]
    more = sum(kinds.values()) - sum(count for _, count in kinds.most_common(5))
    return ", ".join([*rows, *([f"{more:,} others"] if more else [])])


def _files_below(root: Path, suffixes: tuple[str, ...] = ("",), without: AbstractSet[str] = frozenset()) -> list[DataFile]:
    """Return the files below a folder, sorted by name, without hidden files and folders named in `without`; raises OSError.

    Links to files are read, links to folders are not followed. Every rank does this, so it makes one `Path` a file.
    """
    files, left = list[DataFile](), [(root, "")]
    while left:
        folder, below = left.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if _is_folder(entry):
                    if name not in without and not entry.is_symlink():
                        left.append((folder / name, f"{below}{name}/"))
                elif name.endswith(suffixes):
                    with suppress(FileNotFoundError):  # a broken link
                        about = entry.stat()
                        if stat.S_ISREG(about.st_mode):
                            files.append(DataFile(f"{below}{name}", folder / name, about.st_size))
    return sorted(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a folder is a folder, or a link to one; what can't be looked at is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _file(name: str, path: Path) -> DataFile:
    """Return a file, or the .bin of a .idx; raises Unreadable if that is missing."""
    path = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if not path.exists():
        raise data_error(f"{path}: no such file", f"{path.with_suffix('.idx').name} needs it in the same folder")
    return DataFile(name, path, path.stat().st_size)


def _similar_name(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    close = suggest_name(path.name, [each.name for each in path.parent.iterdir()])
    return close if close.startswith("did") else ""
