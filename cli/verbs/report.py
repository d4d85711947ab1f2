"""`distrain report`: a run, planned against measured, with its loss curve; or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..pages.printing import print_output
from .common_options import HtmlFile, write_html_page
from .exit_status import OK


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR ...", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page (of several runs, a list).")] = False,
    html: HtmlFile = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="The steps that log.timeline timed: one as measured beside the simulated one.")
    ] = False,
    svg: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="With --timeline: draw both steps.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", metavar="FILE", help="With --timeline: write both as a Chrome trace (.json or .json.gz), for ui.perfetto.dev."
        ),
    ] = None,
) -> int:
    """Show a run: its memory, time and throughput as planned and as measured, the largest drift, and the loss.

    Several runs are shown side by side: the differences of their configs, their losses at the steps that all logged, their speed.

    Exit status: 0; 1 FILE can't be written; 2 a folder is no run's or has no timeline, or the command line is wrong.

    \b
    distrain report runs/quickstart
    distrain report runs/quickstart --json
    distrain report runs/base runs/wide
    distrain report runs/base runs/wide --html runs.html
    distrain report runs/quickstart --timeline --svg step.svg
    """
    from ...trainer.rundir.measured_run import read_measured_run

    _check_timeline_options(svg, trace, html, timeline=timeline)
    folders = _run_folders(run_dirs)
    if timeline:
        from .report_timeline import report_timeline

        return report_timeline(folders, svg, trace, as_json=as_json)
    target = _html_target(html, folders) if html is not None else None
    if as_json:
        import json

        documents = [report_document(read_measured_run(folder)) for folder in folders]
        print_output(json.dumps(documents[0] if len(folders) == 1 else documents, indent=2))
    else:
        print_output(_text(run_dirs, folders))
    return write_html_page(target, _html(html or "", run_dirs, folders), as_json=as_json) if target else OK


def _check_timeline_options(svg: str | None, trace: str | None, html: str | None, *, timeline: bool) -> None:
    """Raise Unreadable for options that do not go together."""
    from ...trainer.spec.problem import Problem, Unreadable

    problems = [
        Problem(rule="timeline", says=f"{option} is of a timeline", mend="add --timeline")
        for option, value in (("--svg", svg), ("--trace", trace))
        if value is not None and not timeline
    ]
    if timeline and html is not None:
        problems.append(Problem(rule="timeline", says="--timeline is not shown as HTML", mend="draw it with --svg FILE"))
    if problems:
        raise Unreadable(problems)


def _text(run_dirs: Sequence[Path], folders: Sequence[Path]) -> str:
    """The page of one run, or of several side by side."""
    from ...trainer.rundir.measured_run import read_measured_run
    from ..pages.text_layout import stdout_style

    if len(folders) > 1:
        from ..pages.compare_page import compared_runs, comparison_text

        return comparison_text(compared_runs(run_dirs, folders), stdout_style())
    from ..pages.report_page import report_text

    return report_text(read_measured_run(folders[0]), stdout_style())


def _html_target(html: str, folders: Sequence[Path]) -> Path:
    """The HTML file to write; raises Unreadable for one that can't be written."""
    from ..html.html_file import html_target

    return html_target(html, "-".join(folder.name for folder in folders[:4]))


def _html(html: str, run_dirs: Sequence[Path], folders: Sequence[Path]) -> str:
    """The HTML page of one run, or of several side by side."""
    import shlex

    from ...trainer.rundir.measured_run import read_measured_run
    from ..recipe_files.config_text import run_config_text

    command = shlex.join(["distrain", "report", *map(str, run_dirs), "--html", html])
    configs = [run_config_text(folder) for folder in folders]
    if len(folders) > 1:
        from ..html.comparison_html import comparison_html
        from ..pages.compare_page import compared_runs

        return comparison_html(compared_runs(run_dirs, folders), configs, command)
    from ..html.report_html import report_html

    return report_html(read_measured_run(folders[0]), configs[0], command)


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
    for section in ("memory", "time", "speed", "saving"):
        plain[section] = [{**asdict(each), "drift": each.drift} for each in getattr(run, section)]
    return {"version": 1, **plain}
