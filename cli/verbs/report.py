"""`distrain report`: a run, planned against measured, with its loss curve; or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..pages.printing import print_output


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR ...", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page (of several runs, a list).")] = False,
) -> int:
    """Show a run: its memory, time and throughput as planned and as measured, the largest drift, and the loss.

    Several runs are shown side by side: the differences of their configs, their losses at the steps that all logged, their speed.

    Exit status: 0; 2 a folder is no run's.

    \b
    distrain report runs/quickstart
    distrain report runs/quickstart --json
    distrain report runs/base runs/wide
    """
    from ...trainer.rundir.measured import read_measured_run

    folders = _run_folders(run_dirs)
    if as_json:
        import json

        documents = [report_document(read_measured_run(folder)) for folder in folders]
        return print_output(json.dumps(documents[0] if len(folders) == 1 else documents, indent=2))
    from ..pages.text_layout import stdout_style

    if len(folders) > 1:
        from ..pages.compare_page import compared_runs, comparison_text

        return print_output(comparison_text(compared_runs(run_dirs, folders), stdout_style()))
    from ..pages.report_page import report_text

    return print_output(report_text(read_measured_run(folders[0]), stdout_style()))


def _run_folders(run_dirs: Sequence[Path]) -> list[Path]:
    """The run folders as absolute paths; raises Unreadable with all that are none, or where there are more than there are marks."""
    from ...trainer.rundir.files import find_run_folder
    from ...trainer.spec.problem import Problem, Unreadable
    from ..pages.compare_page import MARKS

    folders, problems = list[Path](), list[Problem]()
    for each in run_dirs:
        try:
            folders.append(find_run_folder(each))
        except Unreadable as error:
            problems += error.problems
    if len(run_dirs) > len(MARKS):
        problems.append(Problem(rule="folder", says=f"{len(run_dirs)} runs are too many for a page", mend=f"give at most {len(MARKS)}"))
    if problems:
        raise Unreadable(problems)
    return folders


def report_document(run: Any) -> dict[str, Any]:
    """A run as plain data: every field, and the drift of each figure."""
    plain = asdict(run)
    for section in ("memory", "time", "speed"):
        plain[section] = [{**asdict(each), "drift": each.drift} for each in getattr(run, section)]
    return {"version": 1, **plain}
