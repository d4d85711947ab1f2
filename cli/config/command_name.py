"""The command with which a user started distrain."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote


def command_name() -> str:
    """The command to type again: `distrain`, the path of its script, or `python -m distrain`."""
    if shutil.which("distrain"):
        return "distrain"
    called = Path(sys.argv[0])
    return quote(os.path.relpath(called)) if called.name == "distrain" else "python -m distrain"
