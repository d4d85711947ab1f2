"""The file that a command line asks to write: checked before any work, so that none is lost."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.system.regular_file import expand_home, open_plain

HEAD = 1000  # bytes in which a file of ours names its generator
_VERSION = re.compile(r"\.v?[0-9]")  # the end of mine.v2 or llama3.1, which is no suffix


def target_file(file: str, stem: str, suffixes: Sequence[str], may_replace: Callable[[Path], bool] = lambda path: False) -> Path:
    """Return the file to write: `file`, with the first suffix where it has none; in a folder, one named `stem`.

    Raises Unreadable if it exists and `may_replace` does not allow that, its folder does not exist or can't be written, or it has another
    suffix.
    """
    if file.strip() in ("", "-"):
        raise Unreadable([Problem(rule="file", says=f"'{file}' is not the name of a file", mend=f"name one that ends in {suffixes[0]}")])
    path = expand_home(file)
    if path.is_dir():
        path = path / f"{stem}{suffixes[0]}"
    elif not path.suffix or _VERSION.match(path.suffix):
        path = path.with_name(f"{path.name}{suffixes[0]}")
    elif path.suffix not in suffixes:
        says = f"{path} does not end in {' or '.join(suffixes)}"
        raise Unreadable([Problem(rule="file", says=says, mend=f"name it {path.with_suffix(suffixes[0])}")])
    if os.path.lexists(path) and not may_replace(path):
        raise file_exists(path)
    if not path.parent.is_dir():
        raise Unreadable([Problem(rule="file", says=f"{path}: there is no folder {path.parent}", mend="create it first")])
    if not os.access(path.parent, os.W_OK):
        says = f"{path} can't be written: no file can be created in {path.parent}"
        raise Unreadable([Problem(rule="file", says=says, mend="choose another folder")])
    return path


def is_made_by(path: Path, generator: str) -> bool:
    """Whether a file names this generator near its beginning, as those do that a newer one may replace; packed where it ends in .gz."""
    if path.is_symlink():
        return False
    try:
        with open_plain(path) as opened:
            begin = gzip.GzipFile(fileobj=opened).read(HEAD) if path.suffix == ".gz" else opened.read(HEAD)
    except (OSError, EOFError):
        return False
    return generator.encode() in begin


def file_exists(path: Path) -> Unreadable:
    """Return the error for a file that is in the way."""
    return Unreadable([Problem(rule="file", says=f"{path} already exists", mend="name another file, or remove it first")])
