"""The command line of distrain, run in a process that ends with the program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from ...trainer.system.child_process import module_arguments, start_child
from .finding import CheckBroken

SHOWN = 300  # characters of the end of stderr in a message


def run_distrain(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a verb and return what it prints, with variables added to this process's environment; raises CheckBroken where it fails."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_child(module_arguments("distrain.__main__", *words), {**os.environ, **(environment or {})}, **streams) as child:
        out, err = child.communicate()
    if child.returncode:
        raise CheckBroken(f"{words[0]} ended with {child.returncode}: {err.strip()[-SHOWN:]}")
    return str(out)
