"""The contents of a folder, to compare before and after."""

from __future__ import annotations

import os
from pathlib import Path


def folder_state(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Return the mode of every file of a folder, and its bytes or the target of its link."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        holds: bytes | str = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (mode, holds)
    return found
