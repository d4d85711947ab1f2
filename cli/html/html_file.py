"""The file that `--html` names: checked before any work, and written atomically."""

from __future__ import annotations

from pathlib import Path

from ...trainer.spec.problem import one_line
from ...trainer.spec.regular_file import open_plain
from ...trainer.system.atomic_file import write_atomically
from ..arguments.target_file import target_file
from .page import GENERATOR

SUFFIXES = (".html", ".htm")
HEAD = 1000  # bytes in which a page of ours says so


def html_target(file: str, stem: str) -> Path:
    """Return the file to write; raises Unreadable as `target_file` does, and where another program's file would be lost."""
    return target_file(file, Path(stem).name or "page", SUFFIXES, _is_ours)


def write_html(target: Path, text: str) -> str:
    """Write a page atomically and return a line for the user; raises OSError, and then the file is as it was."""
    write_atomically(target, text.encode())
    return one_line(f"wrote {target}")


def _is_ours(path: Path) -> bool:
    """Whether a file is a page that distrain wrote, which may be replaced by a newer one."""
    if path.is_symlink():
        return False
    try:
        with open_plain(path) as opened:
            return GENERATOR.encode() in opened.read(HEAD)
    except OSError:
        return False
