"""Checks that compare memory and step time of a run with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cli.config.load import load_recipe
from ...trainer.plan.plan import make_plan
from ...trainer.rundir.measured_run import read_measured_run
from .check_context import CheckContext
from .finding import CheckSkipped, Finding
from .fit_runs import FitRun, fit, fit_overrides
from .kernel_table import busy_seconds, longest_kernels, read_events

MEMORY_GOAL, TIME_GOAL = 0.03, 0.10  # shares of the plan


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A configuration whose memory and step time are compared with the plan."""

    recipe: str
    words: tuple[str, ...]
    grouped: bool = False  # whether its attention has fewer key heads than query heads

    def overrides(self, context: CheckContext) -> tuple[str, ...]:
        """Its overrides; tiny in a rehearsal."""
        if context.on_gpu:
            return (*self.words, *STEPS)
        return (*self.words, *STEPS, *REHEARSAL, *(("model.kv_heads=2", "model.head_dim=16") if self.grouped else ()))


# fmt: off
PROFILED = 9  # the last step, which is profiled and not timed
KERNELS = 40  # that are kept, by seconds
STEPS = (
    "data=synthetic", f"train.steps={PROFILED}", "train.tokens=null", "optim.warmup=0", "checkpoint.final=false",
    f"log.profile=[{PROFILED},{PROFILED}]",
)
REHEARSAL = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.ffn=192", "model.vocab=256", "train.seq=64", "train.precision=fp32",
    "train.gradients=auto", "train.compile=false",
)
GPT = ("train.batch=48", "train.microbatch=12", "parallel.zero=1")
XL = ("model=gpt2_1_5b", "model.vocab_multiple=64", "model.dropout=0", "parallel.zero=1")
STACK = (  # 16 layers of Llama 3 8B
    "model=llama3_8b", "model.layers=16", "model.vocab=32768", "train.seq=4096", "train.batch=4", "train.microbatch=1", "parallel.zero=1",
)
ONE_RANK = ("parallel.tp=1", "parallel.pp=1", "parallel.ep=1", "parallel.zero=1", "parallel.sequence=false")
PLANNED = {
    "gpt2_124m": PlannedRun(recipe="gpt2_124m_1gpu", words=(*GPT, "train.compile=false")),
    "gpt2_124m compiled": PlannedRun(recipe="gpt2_124m_1gpu", words=(*GPT, "train.compile=true")),
    "llama 16 layers": PlannedRun(recipe="llama3_2_1b_1node", grouped=True, words=(*STACK, "train.compile=false")),
    "llama 16 layers compiled": PlannedRun(recipe="llama3_2_1b_1node", grouped=True, words=(*STACK, "train.compile=true")),
    "gpt2_1_5b compiled": PlannedRun(
        recipe="gpt2_124m_1gpu", words=(*XL, "train.batch=16", "train.microbatch=8", "train.compile=true")
    ),
    "mixtral 2 layers": PlannedRun(
        recipe="mixtral_8x7b",
        grouped=True,
        words=(
            *("model.layers=2", "model.aux_loss=0", *ONE_RANK, "train.compile=false"),
            *("train.seq=4096", "train.batch=4", "train.microbatch=1"),
        ),
    ),
    "llama3_2_1b zero3": PlannedRun(
        recipe="llama3_2_1b_1node",
        grouped=True,
        words=(
            *("engine=zero", "parallel.zero=3", "train.compile=false", "train.gradients=fp32"),
            *("train.seq=4096", "train.batch=8", "train.microbatch=2"),
        ),
    ),
    "gpt2_1_5b recomputed": PlannedRun(
        recipe="gpt2_124m_1gpu",
        words=(*XL, "train.batch=32", "train.microbatch=16", "parallel.recompute=full", "train.compile=false"),
    ),
}
# fmt: on


def compare_with_plan(context: CheckContext, name: str) -> Finding:
    """Train a configuration, and compare its memory and step time with the plan: on a CPU its memory by kind, and no time."""
    planned = PLANNED[name]
    run = FitRun(name=f"plan.{name.replace(' ', '.')}", recipe=planned.recipe, words=planned.overrides(context))
    skip_too_large(run, context)
    whole = fit(run, context)
    trained = replace(whole, rows=whole.rows[: PROFILED - 1])
    row, memory, events = trained.rows[-1], read_measured_run(trained.folder).memory, read_events(trained.folder)
    figures: dict[str, Any] = {
        "recipe": planned.recipe,
        "words": [*context.words(), "parallel.dp=1", *run.words],
        "step_seconds": trained.step_seconds,
        "planned_step_seconds": row.get("planned_seconds"),
        "memory": {each.name: each.measured for each in memory},
        "planned_memory": {each.name: each.planned for each in memory},
        "memory_peak": trained.memory_peak if context.on_gpu else None,
        "planned_memory_peak": row.get("planned_memory_peak"),
        "has_rates": context.has_rates,
        "mfu": row.get("mfu"),
        "tokens_per_second": trained.step_tokens / trained.step_seconds,
        "busy seconds": busy_seconds(events),
        "kernels: launches, seconds": longest_kernels(events, 1, KERNELS),
    }
    return Finding(figures=figures, departures=tuple(plan_departures(figures)))


def skip_too_large(run: FitRun, context: CheckContext) -> None:
    """Raise CheckSkipped where a run's plan takes more memory than the device has."""
    planned = load_recipe(run.recipe, fit_overrides(run, context))
    held, has = make_plan(planned).memory, planned.cluster.device.memory
    if held is not None and isinstance(has, float | int) and held.peak > has:
        raise CheckSkipped(f"it takes {held.peak / 2**30:.1f} GiB, and {planned.cluster.device.name} has {has / 2**30:.1f}")


def plan_departures(figures: Mapping[str, Any]) -> Sequence[str]:
    """Return where measured figures are further from the planned ones than the goals, in words."""
    return [
        f"{what} is {100 * (measured / planned - 1):+.1f} % of the plan's" if planned and measured is not None else f"{what}: not known"
        for what, measured, planned, goal in planned_measured(figures)
        if not planned or measured is None or abs(measured / planned - 1) > goal
    ]


def planned_measured(figures: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float | None, float]]:
    """Yield what was measured of a planned run: its name, the measured figure, the planned one, and how far apart they may be (a share).

    Peak memory and step time are those of a GPU; a rehearsal has memory by kind alone, and of a GPU without rates no time is planned.
    """
    for kind, measured in figures["memory"].items():
        yield f"memory of {kind}", measured, figures["planned_memory"][kind], MEMORY_GOAL
    if figures["memory_peak"] is not None:
        yield "peak memory", figures["memory_peak"], figures["planned_memory_peak"], MEMORY_GOAL
        if figures.get("has_rates", True):
            yield "step time", figures["step_seconds"], figures["planned_step_seconds"], TIME_GOAL
