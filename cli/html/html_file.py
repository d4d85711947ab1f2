"""The file that `--html` names: checked before any work, and written atomically."""

from __future__ import annotations

from pathlib import Path

from ...trainer.spec.problem import one_line
from ...trainer.system.atomic_file import write_atomically
from ..arguments.target_file import is_made_by, target_file
from .page import GENERATOR

SUFFIXES = (".html", ".htm")


def html_target(file: str, stem: str) -> Path:
    """Return the file to write; raises Unreadable as `target_file` does, and where another program's file would be lost."""
    return target_file(file, Path(stem).name or "page", SUFFIXES, lambda path: is_made_by(path, GENERATOR))


def write_html(target: Path, text: str) -> str:
    """Write a page atomically and return a line for the user; raises OSError, and then the file is as it was."""
    write_atomically(target, text.encode())
    return one_line(f"wrote {target}")
