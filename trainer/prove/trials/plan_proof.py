"""Plans a proof: one process and every layout as planned runs; a layout that can't run here is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...machine import measure_machine as machine
from ...machine.measure_machine import CPU_RANKS_PER_CORE
from ...plan.layout.schedule_of_run import is_file
from ...plan.plan import make_plan
from ...plan.rules.value_rules import folders_rule
from ...spec.derived.batch_levels import run_steps
from ...spec.problem import Problem
from ...spec.run import Checkpoint, Evaluate, Log, Run
from ...system.cpu import cpu_count
from ...system.regular_file import expand_home
from .control_and_resume_trials import control_trial, resume_trials
from .layouts import (
    EACH_AXIS,
    FILE_SCHEDULE,
    NATIVE_ENGINE,
    NATIVE_LAYOUTS,
    ONE_PROCESS,
    ProveLayout,
    all_layouts,
    auto_is_native,
    default_layouts,
    recipe_layout,
    run_in_layout,
)
from .trial import Trial, trial_problems

DEFAULT_STEPS = 6  # trained where the request names no number, if the recipe has as many
MOST_PROCESSES = 8  # of an unnamed layout on a CPU

RunOn = Callable[[int], Run]  # the recipe on one node with this many ranks; raises Unreadable


class NothingToProve(Exception):
    """The proof can't be made, for these reasons (exit status 1)."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True, kw_only=True)
class ProveRequest:
    """The arguments of `distrain prove` beside the recipe and its overrides."""

    steps: int | None = None
    chosen: Literal["few", "all", "named"] = "few"
    layouts: tuple[ProveLayout, ...] = ()  # those named
    checks: bool = True  # whether other micro-batches and a resume are tried too


@dataclass(frozen=True, kw_only=True)
class SkippedLayout:
    """A layout that can't run here, and the first reason."""

    layout: ProveLayout
    problem: Problem


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One process, and the layouts that are compared with it."""

    recipe: Run
    reference: Trial  # one process
    trials: tuple[Trial, ...]
    control: Trial | None  # one process with other micro-batches
    saver: Trial | None  # the one of the trials that saves midway
    resume: Trial | None  # what resumes from there, in another layout
    unchosen: int  # layouts that could run too
    skipped: tuple[SkippedLayout, ...]

    @property
    def folder(self) -> Path:
        """The folder that holds the run folders."""
        return self.reference.folder.parent

    @property
    def steps(self) -> int:
        """The steps that each layout trains."""
        return self.reference.run.train.steps or 0


def plan_proof(request: ProveRequest, recipe: Run, run_on: RunOn) -> Proof:
    """Plan one process and the layouts; raises Unreadable, and NothingToProve if nothing can be compared."""
    if wrong_names := list(folders_rule(recipe, recipe.parallel, recipe.train.microbatch)):
        raise NothingToProve(Problem(rule=each.rule, says=each.says, mend=each.fix) for each in wrong_names)
    if not is_file(recipe.parallel.schedule) and (files := [each for each in request.layouts if each.schedule == FILE_SCHEDULE]):
        raise NothingToProve(_no_file(recipe, each) for each in files)
    steps, folder = request.steps or min(DEFAULT_STEPS, _recipe_steps(recipe)), f"{recipe.name}.prove"

    def trial(layout: ProveLayout) -> Trial:
        run = run_in_layout(shortened_run(run_on(layout.ranks), steps, folder), layout, recipe.cluster.nodes)
        return Trial(layout=layout, run=run, plan=make_plan(run))

    reference = trial(ONE_PROCESS)
    if problems := trial_problems(reference):
        raise NothingToProve(map(_one_process_problem, problems))
    trials = [trial(each) for each in request.layouts or candidates(recipe)]
    problems_of = ((each.layout, trial_problems(each)) for each in trials)
    skipped = tuple(SkippedLayout(layout=layout, problem=problems[0]) for layout, problems in problems_of if problems)
    if request.layouts and skipped:
        raise NothingToProve(replace(each.problem, says=f"{each.layout.name}: {each.problem.says}") for each in skipped)
    cannot = {each.layout for each in skipped}
    runnable = {each.layout: each for each in trials if each.layout not in cannot}
    if not runnable:
        raise NothingToProve([_no_layout(recipe, skipped)])
    chosen = tuple(runnable[each] for each in _chosen_layouts(request, recipe, tuple(runnable)))
    saver, resume = resume_trials(chosen, steps) if request.checks else (None, None)
    return Proof(
        recipe=recipe,
        reference=reference,
        trials=tuple(saver if saver and each.layout == saver.layout else each for each in chosen),
        control=control_trial(reference, check=request.checks),
        saver=saver,
        resume=resume,
        unchosen=len(runnable) - len(chosen),
        skipped=skipped,
    )


def _chosen_layouts(request: ProveRequest, recipe: Run, runnable: Sequence[ProveLayout]) -> Sequence[ProveLayout]:
    """All runnable layouts, or by default the recipe's own, each axis alone, what engine native alone does, and few of the others."""
    if request.chosen != "few":
        return runnable
    own = recipe_layout(recipe)
    first = dict.fromkeys([*([own] if own else []), *EACH_AXIS, *NATIVE_LAYOUTS])
    return default_layouts(runnable, [each for each in first if each in runnable])


def _one_process_problem(problem: Problem) -> Problem:
    """A reason why one process can't train; a fix that changes the layout does not help there."""
    mend = "prove a smaller one: model=tiny, or fewer model.layers" if problem.rule == "memory" else problem.mend
    return Problem(rule=problem.rule, says=f"one process: {problem.says}", mend=mend)


def _no_file(recipe: Run, layout: ProveLayout) -> Problem:
    """A layout runs the recipe's file, and the recipe has none."""
    says = f"layouts: {layout.name} runs the recipe's own file of actions, and parallel.schedule={recipe.parallel.schedule} is none"
    return Problem(rule="layouts", says=says, mend="set parallel.schedule=FILE.csv")


def _recipe_steps(run: Run) -> int:
    return max(1, run_steps(run.train))


def candidates(recipe: Run) -> tuple[ProveLayout, ...]:
    """Every layout that this machine has ranks for, the recipe's own among them, and none twice on the same engine."""
    own, limit = recipe_layout(recipe), rank_limit(recipe)
    windows = recipe.model.effective_window(recipe.train.seq) is not None
    both = (False, True) if windows else (False,)
    layouts = (
        *all_layouts(limit, experts=recipe.model.experts > 0, all_to_all=(True,) if recipe.model.sinks else both),
        *([own] if own and own.ranks <= limit else []),
    )
    return tuple(each for each in dict.fromkeys(layouts) if not _repeats_auto(recipe, each))


def _repeats_auto(recipe: Run, layout: ProveLayout) -> bool:
    """Whether a layout names the engine that it would have anyway."""
    if layout.engine != NATIVE_ENGINE:
        return False
    run = run_in_layout(recipe, layout)
    return auto_is_native(run, run.parallel)


def rank_limit(run: Run) -> int:
    """The ranks that an unnamed layout may have here: one a GPU, or a number of CPU processes."""
    if run.cluster.device.kind == "cuda":
        facts = machine.cached_facts()
        return len(facts["cuda"]) if facts else 0
    return min(MOST_PROCESSES, CPU_RANKS_PER_CORE * cpu_count())


def _no_layout(recipe: Run, skipped: Sequence[SkippedLayout]) -> Problem:
    """Why no layout is left to compare with one process."""
    if skipped:
        layout, problem = skipped[0].layout, skipped[0].problem
        return Problem(rule="layouts", says=f"no layout can run here; {layout.name}: {problem.says}", mend=problem.mend)
    says = f"a layout needs at least 2 ranks, and this machine has {rank_limit(recipe)} {recipe.cluster.device.name}"
    return Problem(rule="layouts", says=says, mend="set cluster=local device=cpu train.precision=fp32")


def shortened_run(run: Run, steps: int, folder: str) -> Run:
    """The run with `steps` steps, each logged, messages and samples recorded, and an evaluation and a save at the end; its run folder is
    in log.dir/`folder`."""
    compress = replace(run.parallel.compress, start=min(run.parallel.compress.start, steps // 2))
    return replace(
        run,
        parallel=replace(run.parallel, compress=compress),
        train=replace(run.train, steps=steps, tokens=None, evaluate=Evaluate(every=steps, batches=1)),
        optim=replace(run.optim, warmup=min(run.optim.warmup, steps // 2)),
        log=Log(every=1, sinks=("jsonl",), ledger=True, dir=str(expand_home(run.log.dir) / folder)),
        checkpoint=Checkpoint(every=0, keep=1, resume="never"),
        launch=replace(run.launch, device_check=0),
    )


def without_evaluation(proof: Proof) -> Proof:
    """The proof with runs that evaluate nothing."""

    def silent(trial: Trial) -> Trial:
        return replace(trial, run=replace(trial.run, train=replace(trial.run.train, evaluate=Evaluate())))

    trials = {id(each): silent(each) for each in proof.trials}
    return replace(
        proof,
        reference=silent(proof.reference),
        trials=tuple(trials.values()),
        control=proof.control and silent(proof.control),
        saver=proof.saver and trials[id(proof.saver)],
        resume=proof.resume and silent(proof.resume),
    )
