"""What `distrain prove` is to train: one process and every layout, as planned runs; what can't run is left out, with why."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...cli.config.cluster_shape import is_shape
from ...cli.config.layout_words import Asked
from ...cli.config.load import Loader
from ...cli.verbs.fit import PER_CORE, folder_of, refused
from ..machine import facts as machine
from ..plan.plan import make_plan
from ..plan.result import Plan
from ..plan.value_rules import folders
from ..rundir.paths import whole_paths
from ..spec.plain_file import expanded
from ..spec.problem import Problem
from ..spec.run import Checkpoint, Evaluate, Log, Run
from .layouts import ALONE, SIMPLE, Layout, every, few, laid, own

STEPS = 8  # that are trained where the words say no other number, and the recipe has as many
PROCESSES = 8  # of a layout on a CPU at the most, unless it is named


class Refused(Exception):
    """Nothing can be shown, for these reasons (exit status 1)."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A layout of the recipe, planned."""

    layout: Layout
    run: Run
    plan: Plan

    @property
    def folder(self) -> Path:
        """RUN_DIR of its own."""
        return folder_of(self.run)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One process, and the layouts that are held against it."""

    whole: Run  # the recipe as it was said
    alone: Trial
    trials: tuple[Trial, ...]
    more: int  # layouts that would run too
    left_out: tuple[tuple[Layout, Problem], ...]  # those that can't, and why

    @property
    def folder(self) -> Path:
        """Where the folders of the runs are."""
        return self.alone.folder.parent

    @property
    def steps(self) -> int:
        return self.alone.run.train.steps or 0


class Recipe:
    """A recipe and its overrides, to be composed again for any number of ranks: what a CPU's rank has is a share of this machine."""

    def __init__(self, conf: str, overrides: Sequence[str], config_dir: Path | None) -> None:
        self._loader, self._config_dir = Loader(config_dir), config_dir
        self._conf, self._overrides = conf, list(overrides)
        self._of: dict[int, Run] = {}

    def again(self) -> Recipe:
        """The same, once more is known of this machine."""
        return Recipe(self._conf, self._overrides, self._config_dir)

    def whole(self) -> Run:
        """As it was said; raises Unreadable."""
        return self._loader.run(self._conf, self._overrides)

    def of(self, ranks: int) -> Run:
        """On one node of so many ranks."""
        if ranks not in self._of:
            rest = [word for word in self._overrides if not (word.startswith("cluster=") and is_shape(word.removeprefix("cluster=")))]
            self._of[ranks] = self._loader.run(self._conf, [*rest, "cluster.nodes=1", f"cluster.gpus={ranks}"])
        return self._of[ranks]


def prepared(asked: Asked, recipe: Recipe) -> Proof:
    """Plan one process and the layouts; raises Unreadable, and Refused where nothing can be shown."""
    whole = recipe.whole()
    if unnamed := list(folders(whole, whole.parallel, whole.train.microbatch)):
        raise Refused(Problem(rule=each.rule, says=each.says, mend=each.mend) for each in unnamed)
    steps, folder = asked.steps or min(STEPS, _steps(whole)), f"{whole.name}.prove"

    def trial(layout: Layout) -> Trial:
        run = laid(shortened(recipe.of(layout.ranks), steps, folder), layout)
        return Trial(layout=layout, run=run, plan=make_plan(run))

    alone = trial(ALONE)
    if problems := refused(alone.run, alone.plan):
        raise Refused(map(_of_one, problems))
    tried = [trial(each) for each in asked.layouts or _every(whole)]
    wrong = {each.layout: found[0] for each in tried if (found := refused(each.run, each.plan))}
    if asked.layouts and wrong:
        raise Refused(replace(problem, says=f"{layout.word}: {problem.says}") for layout, problem in wrong.items())
    fine = {each.layout: each for each in tried if each.layout not in wrong}
    if not fine:
        raise Refused([_nothing(whole, tuple(wrong.items()))])
    chosen = few(list(fine), [each for each in dict.fromkeys((own(whole), *SIMPLE)) if each in fine]) if asked.chosen == "few" else [*fine]
    return Proof(
        whole=whole,
        alone=alone,
        trials=tuple(fine[each] for each in chosen),
        more=len(fine) - len(chosen),
        left_out=tuple(wrong.items()),
    )


def _of_one(problem: Problem) -> Problem:
    """What keeps one process from training, which all else is held against; what mends a layout does not mend that."""
    mend = "prove a smaller one: model=tiny, or fewer model.layers" if problem.rule == "memory" else problem.mend
    return Problem(rule=problem.rule, says=f"one process: {problem.says}", mend=mend)


def _steps(run: Run) -> int:
    tokens = run.train.tokens or 0
    return run.train.steps or max(1, int(tokens // (run.train.batch * run.train.seq)))


def _every(whole: Run) -> tuple[Layout, ...]:
    """Every layout that this machine has ranks for, and the recipe's own among them."""
    mine, most = own(whole), room(whole)
    return tuple(dict.fromkeys([*every(most, experts=whole.model.experts > 0), *([mine] if mine and mine.ranks <= most else [])]))


def room(run: Run) -> int:
    """Ranks that this machine holds: one a GPU, or so many CPU processes."""
    if run.cluster.device.kind == "cuda":
        facts = machine.found()
        return len(facts["cuda"]) if facts else 0
    return min(PROCESSES, PER_CORE * machine.cores())


def _nothing(run: Run, wrong: Sequence[tuple[Layout, Problem]]) -> Problem:
    """Why no layout is left to be held against one process."""
    if wrong:
        layout, problem = wrong[0]
        return Problem(rule="layouts", says=f"no layout can run here; {layout.word}: {problem.says}", mend=problem.mend)
    says = f"a layout has at least 2 ranks, and this machine has {room(run)} {run.cluster.device.name}"
    return Problem(rule="layouts", says=says, mend="set cluster=local device=cpu train.precision=fp32")


def shortened(run: Run, steps: int, folder: str) -> Run:
    """The run for so many steps, every one logged, its messages counted, saved at its end; its folder goes below log.dir/`folder`."""
    return replace(
        run,
        train=replace(run.train, steps=steps, tokens=None, evaluate=Evaluate()),
        optim=replace(run.optim, warmup=min(run.optim.warmup, steps // 2)),
        log=Log(every=1, sinks=("jsonl",), ledger=True, dir=str(expanded(run.log.dir) / folder)),
        checkpoint=Checkpoint(every=0, keep=1, resume="never"),
    )


def written(trial: Trial) -> None:
    """A run's folder, made anew."""
    from msgspec import json as encoder

    if (trial.folder / "run.json").is_file():
        shutil.rmtree(trial.folder)
    trial.folder.mkdir(parents=True, exist_ok=True)
    for name, what in (("run.json", whole_paths(trial.run)), ("plan.json", trial.plan)):
        (trial.folder / name).write_bytes(encoder.format(encoder.encode(what)))
