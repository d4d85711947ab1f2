"""The files of a step: its drawing and its trace, which replace only older ones of distrain's."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...trainer.plan.timeline.chrome_trace import GENERATOR
from ...trainer.spec.problem import one_line
from ...trainer.system.atomic_file import write_atomically
from ..arguments.target_file import is_made_by, target_file
from ..pages.printing import print_unwritten


def svg_target(file: str, name: str, generator: str = GENERATOR) -> Path:
    """Return where to write a drawing; raises Unreadable where that can't be."""
    return target_file(file, Path(name).name or "step", (".svg",), lambda path: is_made_by(path, generator))


def trace_target(file: str, name: str, generator: str = GENERATOR) -> Path:
    """Return where to write a trace; raises Unreadable where that can't be."""
    return target_file(file, Path(name).name or "step", (".json", ".gz"), lambda path: is_made_by(path, generator))


def write_svg(target: Path, drawing: str) -> str:
    """Write a drawing and return a line for the user; raises OSError, and then the file is as it was."""
    write_atomically(target, drawing.encode())
    return one_line(f"wrote {target}")


def write_trace(target: Path, document: Mapping[str, Any]) -> str:
    """Write a trace, compressed where the file ends in .gz, and return a line for the user; raises OSError as `write_svg` does."""
    from msgspec import json

    content = json.encode(document)
    write_atomically(target, gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
    return one_line(f"wrote {target}: open it at ui.perfetto.dev")


def write_step_files(writers: Sequence[tuple[Path, Callable[[Path], str]]], show: Callable[[str], object]) -> int:
    """Write files, and show a line about each. Return the exit status: 1 where one can't be written."""
    status = 0
    for file, write in writers:
        try:
            show(write(file))
        except OSError as error:
            status = print_unwritten(str(file), error)
    return status
