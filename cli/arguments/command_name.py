"""The command that started distrain, for messages."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote


def command_name() -> str:
    """Return the command to type again: `distrain`, the path of its script, or `python -m distrain`."""
    if shutil.which("distrain"):
        return "distrain"
    script = Path(sys.argv[0])
    return quote(os.path.relpath(script)) if script.name == "distrain" else "python -m distrain"
