"""What `report --timeline` shows of a run: a measured step, and the simulated one of the same run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..plan.layout.mesh import replica_size
from ..plan.plan import make_plan
from ..plan.timeline.compare_steps import StepComparison, measured_timeline
from ..plan.timeline.critical_path import critical_path, slowest_stage
from ..plan.timeline.make_timeline import make_timeline
from ..plan.timeline.step_costs import StepCosts, step_costs
from ..plan.timeline.step_segments import segmented_step, simulated_lanes
from ..plan.timeline.timeline import Timeline
from ..spec.derived.batch_levels import run_at_batch
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from .measured_step import MeasuredStep, measured_step
from .run_in_manifest import read_run_file
from .timeline_files import read_timelines


@dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """The measured step, of which `measured` is the first replica; the simulated one, the stage that most others wait for in it, and the
    costs that it was made from; both cut by the same rules."""

    name: str
    step: MeasuredStep
    comparison: StepComparison
    measured: Timeline
    simulated: Timeline
    slowest: int
    costs: StepCosts


def read_timeline_report(folder: Path) -> TimelineReport:
    """Read RUN_DIR; raises Unreadable where its run has no timeline that can be read, or its plan has no times."""
    run = read_run_file(folder / "run.json")
    if run is None:
        raise _unreadable(f"{folder / 'run.json'} can't be read, or is of another version of distrain", "train the run again")
    timelines = read_timelines(folder, run)
    step = measured_step(timelines, run.parallel.pp)
    costs = _costs(_run_of_step(run, step), folder)
    simulated = make_timeline(costs)
    comparison = StepComparison(
        measured=segmented_step(step.lanes, origin="measured"),
        simulated=segmented_step(simulated_lanes(simulated), origin="simulated"),
    )
    return TimelineReport(
        name=run.name,
        step=step,
        comparison=comparison,
        measured=measured_timeline(comparison.measured, simulated),
        simulated=simulated,
        slowest=slowest_stage(critical_path(simulated)),
        costs=costs,
    )


def _run_of_step(run: Run, step: MeasuredStep) -> Run:
    """The run whose steps all have the batch of a measured step, which may be smaller while the batch is ramped up."""
    if not run.train.rampup.batches:
        return run
    micros = 1 + max(span.micro for lane in step.lanes for span in lane.spans if span.is_pass)
    dp = run.cluster.nodes * run.cluster.gpus // replica_size(run.parallel)
    return run_at_batch(run, micros * dp * run.train.microbatch)


def _costs(run: Run, folder: Path) -> StepCosts:
    """The costs of a run's step; raises Unreadable where its plan has problems or no times."""
    plan = make_plan(run)
    costs = step_costs(run) if plan.ok else None
    if costs is None:
        problems = plan.problems if not plan.ok else [each for each in plan.warnings if each.rule == "time"]
        raise Unreadable(problems or [Problem(rule="timeline", says=f"{folder}: no step of its run can be simulated")])
    return costs


def _unreadable(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="timeline", says=says, mend=mend)])
