"""`distrain simulate`: the events of one step, as a page, as JSON, as a drawing, or as a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..pages.printing import live_line, print_error, print_json, print_output, print_problems
from .common_options import ConfigDir, RecipeAndOverrides, recipe_and_overrides
from .exit_status import FAILED

if TYPE_CHECKING:
    from ...trainer.plan.timeline.step_costs import StepCosts
    from ...trainer.plan.timeline.step_simulation import StepSimulation
    from ...trainer.plan.timeline.timeline import Timeline

DOCUMENT_VERSION = 1
MOST_SLOW = 1000.0  # times as long as planned


def simulate(
    arguments: RecipeAndOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page: its figures, and every span.")] = False,
    svg: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline.")] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (.json or .json.gz), for ui.perfetto.dev.")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option("--slow", metavar="STAGE=TIMES", help="Let a stage take TIMES as long to compute; repeatable.")
    ] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Simulate one step: what each pipeline stage does when, the critical path, and what would make the step shorter or longer.

    Exit status: 0; 1 the run can't be laid out, its times are not known, or a FILE can't be written; 2 the command line is wrong.

    \b
    distrain simulate conf=gpt3_175b
    distrain simulate conf=gpt3_175b parallel.schedule=zb_h1 --svg step.svg
    distrain simulate conf=gpt3_175b --trace step.json.gz
    distrain simulate conf=gpt3_175b --slow 3=1.2
    """
    from ...trainer.plan.plan import make_plan
    from ...trainer.plan.timeline.step_costs import step_costs
    from ...trainer.plan.timeline.step_simulation import simulate_step
    from ..config.load import load_recipe

    conf, overrides = recipe_and_overrides(arguments, "simulate", config_dir)
    run = load_recipe(conf, overrides, config_dir)
    targets = _targets(svg, trace, run.name)
    plan = make_plan(run)
    costs = step_costs(run) if plan.ok else None
    if costs is None:
        print_problems(plan.problems if not plan.ok else [each for each in plan.warnings if each.rule == "time"])
        return FAILED
    slowness = _slowness(slow or (), costs.layout.mesh.pp)
    with live_line("simulating a step ..."):
        step = simulate_step(run, costs, slowness)
    print_problems(plan.problems)  # a run whose memory does not fit is simulated all the same
    if as_json:
        print_json(simulate_document(run.name, step))
    else:
        _print_page(run.name, costs, step, slowness)
    return _write(targets, run.name, step.timeline, costs, print_error if as_json else print_output)


def _targets(svg: str | None, trace: str | None, name: str) -> tuple[Path | None, Path | None]:
    """The files to write, checked before any work; raises Unreadable."""
    from ..drawings.step_files import svg_target, trace_target

    return svg_target(svg, name) if svg is not None else None, trace_target(trace, name) if trace is not None else None


def _slowness(given: Sequence[str], stages: int) -> dict[int, float]:
    """The slow stages of the command line; raises Unreadable with all that is wrong with them."""
    from ...trainer.spec.problem import Problem, Unreadable, one_line

    found: dict[int, float] = {}
    problems = []
    for text in given:
        shown = one_line(text)
        stage, _, times = shown.partition("=")
        factor = _factor(times)
        if not (stage.isascii() and stage.isdecimal() and len(stage) < 10 and int(stage) < stages):
            known = f"name one of stages 0 to {stages - 1}" if stages > 1 else "there is one stage"
            says, fix = f"--slow {shown}: there is no stage {stage}", f"{known}: --slow 0=1.2"
        elif factor is None:
            says, fix = (
                f"--slow {shown} does not say how many times as long the stage computes, above 0 and at most {MOST_SLOW:g}",
                f"write --slow {stage}=1.2 for a fifth longer",
            )
        elif int(stage) in found:
            says, fix = f"--slow {shown}: stage {stage} has a factor already", "give it one"
        else:
            found[int(stage)] = factor
            continue
        problems.append(Problem(rule="slow", says=says, mend=fix))
    if problems:
        raise Unreadable(problems)
    return found


def _factor(text: str) -> float | None:
    """A number above 0 and up to MOST_SLOW; None: the text is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= MOST_SLOW else None


def _print_page(name: str, costs: StepCosts, step: StepSimulation, slowness: Mapping[int, float]) -> None:
    from ...trainer.plan.timeline.simulated_seconds import simulated_seconds
    from ..pages.simulate_page import simulate_text, slow_text
    from ..pages.text_layout import stdout_style, wrap

    print_output(simulate_text(step, name, stdout_style()))
    if slowness:
        print_output("\n".join(["", *wrap(slow_text(slowness, step.timeline.seconds, simulated_seconds(costs)))]))


def simulate_document(name: str, step: StepSimulation) -> dict[str, Any]:
    """A simulated step as plain data, in seconds and bytes."""
    timeline, path = step.timeline, step.path
    return {
        "version": DOCUMENT_VERSION,
        "name": name,
        "seconds": timeline.seconds,
        "planned": timeline.planned,
        "schedule": timeline.schedule or None,
        "microbatches": timeline.micros,
        "chunks": timeline.chunks,
        "critical_path": {"seconds": path.by_cause, "stages": [path.by_stage.get(stage.index, 0.0) for stage in timeline.stages]},
        "what_if": [{"says": row.says, "seconds": row.seconds} for row in step.what_if],
        "stages": [
            {
                "index": stage.index,
                "layers": stage.parts,
                "computing": stage.computing,
                "messages": stage.messages,
                "filling": stage.filling,
                "waiting": stage.waiting,
                "draining": stage.draining,
                "in_flight": stage.in_flight,
                "activations": stage.saved,
                "spans": [
                    {"kind": span.kind, "micro": span.micro, "part": span.part, "start": span.start, "end": span.end}
                    if span.has_micro_batch
                    else {"kind": span.kind, "start": span.start, "end": span.end}
                    for span in stage.spans
                ],
            }
            for stage in timeline.stages
        ],
    }


def _write(targets: tuple[Path | None, Path | None], name: str, timeline: Timeline, costs: StepCosts, show: Callable[[str], object]) -> int:
    """Write the files that were asked for, and show a line about each."""
    from ...trainer.plan.timeline.chrome_trace import trace_document
    from ..drawings.step_files import write_step_files, write_svg, write_trace
    from ..drawings.timeline_drawing import draw_timeline

    svg, trace = targets
    writers: list[tuple[Path, Callable[[Path], str]]] = []
    if svg is not None:
        writers.append((svg, lambda file: write_svg(file, draw_timeline(timeline, name))))
    if trace is not None:
        writers.append((trace, lambda file: write_trace(file, trace_document(timeline, costs, name))))
    return write_step_files(writers, show)
