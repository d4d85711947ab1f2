"""The files of a simulated step: its drawing and its trace, which replace only older ones of distrain's."""

from __future__ import annotations

import gzip
from pathlib import Path

from ...trainer.plan.timeline.chrome_trace import GENERATOR, trace_document
from ...trainer.plan.timeline.step_costs import StepCosts
from ...trainer.plan.timeline.timeline import Timeline
from ...trainer.spec.problem import one_line
from ...trainer.system.atomic_file import write_atomically
from ..arguments.target_file import is_made_by, target_file
from .timeline_drawing import draw_timeline


def svg_target(file: str, name: str) -> Path:
    """Return where to write a drawing; raises Unreadable where that can't be."""
    return target_file(file, Path(name).name or "step", (".svg",), lambda path: is_made_by(path, GENERATOR))


def trace_target(file: str, name: str) -> Path:
    """Return where to write a trace; raises Unreadable where that can't be."""
    return target_file(file, Path(name).name or "step", (".json", ".gz"), lambda path: is_made_by(path, GENERATOR))


def write_svg(target: Path, timeline: Timeline, name: str) -> str:
    """Draw a step and return a line for the user; raises OSError, and then the file is as it was."""
    write_atomically(target, draw_timeline(timeline, name).encode())
    return one_line(f"wrote {target}")


def write_trace(target: Path, timeline: Timeline, costs: StepCosts, name: str) -> str:
    """Write a step's trace, compressed where the file ends in .gz, and return a line for the user; raises OSError as `write_svg` does."""
    from msgspec import json

    content = json.encode(trace_document(timeline, costs, name))
    write_atomically(target, gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
    return one_line(f"wrote {target}: open it at ui.perfetto.dev")
