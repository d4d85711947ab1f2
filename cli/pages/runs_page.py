"""`distrain ls runs`: the runs of a folder, as a table or as plain data."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...trainer.rundir.run_summary import RunSummary
from ...trainer.spec.problem import one_line
from .text_layout import page_width, table, wrap


def runs_text(runs: Sequence[RunSummary], top: Path) -> str:
    """A line a run of the folder `top`, and below it why the run failed or is damaged."""
    if not runs:
        return f"no runs in {one_line(str(top))}"
    names = ["run", *(one_line(_path_below(run.folder, top)) for run in runs)]
    numbers = table([["steps", "loss", "validation", "saved", "when", "state"], *map(_cells, runs)], left=(4, 5))
    wide = min(max(map(len, names)), page_width() - 2 - max(map(len, numbers)))
    lines: list[str] = []
    for name, line, says in zip(names, numbers, ["", *(run.says for run in runs)], strict=True):
        if len(name) > wide:
            lines.append(name)
            name = ""
        lines.append(f"{name.ljust(wide)}  {line}")
        lines += wrap(one_line(says), indent="    ", hang="      ") if says else []
    return "\n".join(lines)


def runs_document(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Runs as plain data."""
    return [{**asdict(run), "folder": str(run.folder)} for run in runs]


def _path_below(folder: Path, top: Path) -> str:
    """A run folder relative to the listed folder; its own name where it is that folder."""
    return folder.absolute().name if folder == top else os.path.relpath(folder, top)


def _cells(run: RunSummary) -> list[str]:
    losses = [f"{loss:.4f}" if loss is not None else "-" for loss in (run.loss, run.validation)]
    saved = str(run.checkpoint) if run.checkpoint is not None else "-"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.when))
    return [f"{run.steps}/{run.of if run.of is not None else '?'}", *losses, saved, when, run.state]
