"""`distrain report`: a run's folder, planned against measured, and its curve; or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR ...", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page; a list of several runs.")] = False,
) -> int:
    """Show a run: memory, time and throughput as planned and as measured, where they drift, and the loss.

    Several runs are shown side by side: what differs in their configs, their losses at the steps that all logged, their speed.

    Exit status: 0, or 2 where a folder is no run's.

    \b
    distrain report runs/quickstart
    distrain report runs/quickstart --json
    distrain report runs/base runs/wide
    """
    from ...trainer.rundir.measured import ran
    from ..pages.console import say

    folders = _run_folders(run_dirs)
    if as_json:
        import json

        documents = [document(ran(folder)) for folder in folders]
        return say(json.dumps(documents[0] if len(folders) == 1 else documents, indent=2))
    from ..pages.format import look

    if len(folders) > 1:
        from ..pages.compare_page import compared_runs, page_of_runs

        return say(page_of_runs(compared_runs(run_dirs, folders), look()))
    from ..pages.report_page import page

    return say(page(ran(folders[0]), look()))


def _run_folders(run_dirs: Sequence[Path]) -> list[Path]:
    """Every RUN_DIR as a whole path; raises Unreadable with all that are none, or where they are too many to tell apart."""
    from ...trainer.spec.problem import Problem, Unreadable
    from ...trainer.system.torch_child import run_folder
    from ..pages.compare_page import MARKS

    folders, problems = list[Path](), list[Problem]()
    for each in run_dirs:
        try:
            folders.append(run_folder(each))
        except Unreadable as error:
            problems += error.problems
    if len(run_dirs) > len(MARKS):
        problems.append(Problem(rule="folder", says=f"{len(run_dirs)} runs are too many for a page", mend=f"give at most {len(MARKS)}"))
    if problems:
        raise Unreadable(problems)
    return folders


def document(found: Any) -> dict[str, Any]:
    """A run as plain data: every field, and each figure's drift."""
    plain = asdict(found)
    for section in ("memory", "time", "speed"):
        plain[section] = [{**asdict(each), "drift": each.drift} for each in getattr(found, section)]
    return {"version": 1, **plain}
