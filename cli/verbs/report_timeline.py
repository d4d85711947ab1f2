"""`distrain report --timeline`: a measured step of a run beside the simulated one, as a page, as JSON, as a drawing, as a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pages.printing import print_error, print_json, print_output

if TYPE_CHECKING:
    from ...trainer.plan.timeline.step_segments import Cause, SegmentedStep
    from ...trainer.rundir.timeline_report import TimelineReport

DOCUMENT_VERSION = 1
KEYS = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights"}  # of causes that have another name


def report_timeline(folders: Sequence[Path], svg: str | None, trace: str | None, *, as_json: bool) -> int:
    """Show the median of the timed steps of a run. Return the exit status; raises Unreadable where the run has none that can be read."""
    from ...trainer.rundir.timeline_report import read_timeline_report
    from ..pages.text_layout import stdout_style
    from ..pages.timeline_page import timeline_text

    folder = _only_folder(folders)
    targets = _targets(svg, trace, folder.name)
    report = read_timeline_report(folder)
    if as_json:
        print_json(timeline_document(report))
    else:
        print_output(timeline_text(report, stdout_style()))
    return _write(targets, report, print_error if as_json else print_output)


def _only_folder(folders: Sequence[Path]) -> Path:
    """The run folder; raises Unreadable where there are several."""
    from ...trainer.spec.problem import Problem, Unreadable

    if len(folders) > 1:
        raise Unreadable([Problem(rule="timeline", says=f"--timeline shows one run, not {len(folders)}", mend="give one RUN_DIR")])
    return folders[0]


def _targets(svg: str | None, trace: str | None, name: str) -> tuple[Path | None, Path | None]:
    """The files to write, checked before any work; raises Unreadable."""
    from ...trainer.plan.timeline.chrome_comparison import GENERATOR
    from ..drawings.step_files import svg_target, trace_target

    return (
        svg_target(svg, name, GENERATOR) if svg is not None else None,
        trace_target(trace, name, GENERATOR) if trace is not None else None,
    )


def _write(targets: tuple[Path | None, Path | None], report: TimelineReport, show: Callable[[str], object]) -> int:
    """Write the files that were asked for, and show a line about each."""
    from ...trainer.plan.timeline.chrome_comparison import comparison_document
    from ..drawings.comparison_drawing import draw_comparison
    from ..drawings.step_files import write_step_files, write_svg, write_trace

    svg, trace = targets
    step, ranks = report.step.step, report.step.ranks
    writers: list[tuple[Path, Callable[[Path], str]]] = []
    if svg is not None:
        drawing = draw_comparison(report.measured, report.simulated, report.name, step)
        writers.append((svg, lambda file: write_svg(file, drawing)))
    if trace is not None:
        document = comparison_document(report.comparison, report.measured, report.simulated, report.costs, report.name, step, ranks)
        writers.append((trace, lambda file: write_trace(file, document)))
    return write_step_files(writers, show)


def timeline_document(report: TimelineReport) -> dict[str, Any]:
    """A measured step beside the simulated one as plain data, in seconds."""
    step, comparison = report.step, report.comparison
    measured, simulated = comparison.stages
    on_path = [_by_name(path) for path in comparison.paths]
    return {
        "version": DOCUMENT_VERSION,
        "name": report.name,
        "step": step.step,
        "seconds": comparison.measured.seconds,
        "simulated": comparison.simulated.seconds,
        "planned": report.simulated.planned,
        "steps": [{"step": number, "seconds": seconds} for number, seconds in step.seconds.items()],
        "machines": [
            {"processes": each.processes, "cores": each.cores, "threads": each.threads, "busy": each.busy, "ran": each.ran}
            for each in step.machines
        ],
        "clock_error": step.clock_error,
        "critical_path": {"measured": on_path[0], "simulated": on_path[1]},
        "stages": [
            {"index": index, "measured": _by_name(one), "simulated": _by_name(other)}
            for index, (one, other) in enumerate(zip(measured, simulated, strict=True))
        ],
        "actions": [
            {
                "kind": KEYS.get(each.kind, each.kind),
                "stage": each.stage,
                "number": each.number,
                "measured": each.measured,
                "simulated": each.simulated,
            }
            for each in comparison.actions()
        ],
        "ranks": [{"rank": rank, **lane} for rank, lane in zip(step.ranks, _lanes(comparison.measured), strict=True)],
        "simulated_stages": _lanes(comparison.simulated),
    }


def _by_name(seconds: dict[Cause, float]) -> dict[str, float]:
    return {KEYS.get(cause, cause): each for cause, each in seconds.items()}


def _lanes(step: SegmentedStep) -> list[dict[str, Any]]:
    """Each lane's stage and segments; those of no micro-batch have none."""
    return [
        {
            "stage": lane.stage,
            "segments": [
                {"cause": KEYS.get(each.cause, each.cause), "start": each.start, "end": each.end}
                | ({"micro": each.micro, "part": each.part} if each.part >= 0 else {})
                for each in segments
            ],
        }
        for lane, segments in zip(step.lanes, step.segments, strict=True)
    ]
