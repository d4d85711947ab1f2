"""Which drawn recipes and layouts are legal, by the project's own rules; counts what is refused, and follows the advice of refusals."""

from __future__ import annotations

import json
import re
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from ...cli.arguments.prove_arguments import read_layouts
from ...trainer.launch.admission import check_start
from ...trainer.plan.plan import make_plan
from ...trainer.plan.rules.unused_keys import RULE as IDLE
from ...trainer.prove.trials.layouts import ONE_PROCESS, ProveLayout, run_in_layout
from ...trainer.prove.trials.plan_proof import shortened_run
from ...trainer.prove.trials.trial import Trial, trial_problems
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.read import read_run
from ...trainer.spec.run import Run
from .typed_recipe import DrawnRecipe

FIRST_WORDS = 6  # of a refusal, by which it is counted


@dataclass
class LegalTrials:
    """Plans recipes in layouts."""

    refused: Counter[str] = field(default_factory=Counter)  # by rule and first words
    examples: dict[str, str] = field(default_factory=dict)  # of each, the first command and the whole text
    crashes: dict[str, str] = field(default_factory=dict)  # the last line of a traceback -> command and traceback
    wrong_advice: dict[str, str] = field(default_factory=dict)  # by rule and first words -> command, advice and what it led to
    followed: int = 0  # advice that was followed

    def is_legal(self, recipe: DrawnRecipe, layout: ProveLayout, *, idle: bool = True) -> bool:
        """Whether a recipe trains in a layout; `idle`: whether it may have keys that do nothing."""
        command = recipe.command([layout.name], checks=False)
        if layout != ONE_PROCESS and isinstance(read := read_layouts(layout.name)[0], Problem):
            return self._refuse((replace(read, says=read.says.replace(layout.name, "")),), command)
        try:
            trial = plan_trial(recipe, layout)
        except Unreadable as error:
            return self._refuse(error.problems, command)
        except Exception:
            return self._crash(traceback.format_exc(), command)
        if problems := trial_problems(trial):
            for each in problems:
                self._follow_advice(trial.run, each, command)
            return self._refuse(problems, command)
        return idle or not any(each.rule == IDLE for each in trial.plan.warnings)

    def _refuse(self, problems: tuple[Problem, ...], command: str) -> bool:
        name = first_words(problems[0])
        self.refused[name] += 1
        self.examples.setdefault(name, f"{command}\n{problems[0]}")
        return False

    def _crash(self, says: str, command: str) -> bool:
        self.crashes.setdefault(says.strip().splitlines()[-1], f"{command}\n{says}")
        return False

    def _follow_advice(self, run: Run, problem: Problem, command: str) -> None:
        """Plan the run with each change that a refusal offers: the same refusal must not come again."""
        name = first_words(problem)
        if name not in self.wrong_advice and problem.changes:
            self.followed += len(problem.changes)
            if says := wrong_advice(run, problem):
                self.wrong_advice[name] = f"{command}\n{problem}\n{says}"


def plan_trial(recipe: DrawnRecipe, layout: ProveLayout) -> Trial:
    """Plan a recipe in a layout as `prove` does; raises Unreadable."""
    words = recipe.recipe
    nodes = 1 if layout == ONE_PROCESS else words.run().cluster.nodes
    run = run_in_layout(shortened_run(words.run_on(layout.ranks), recipe.steps, "plan"), layout, nodes)
    return Trial(layout=layout, run=run, plan=make_plan(run))


def first_words(problem: Problem) -> str:
    """A refusal by its rule and first words, without its numbers."""
    return f"{problem.rule}: {' '.join(re.sub(r'[0-9][0-9.,e+-]*', 'N', problem.says).split()[:FIRST_WORDS])}"


def wrong_advice(run: Run, problem: Problem) -> str:
    """What is wrong with the changes that a problem of a run offers: the first that leaves that problem, or can't be made; "" if none."""
    for change in problem.changes:
        try:
            changed = run_with(run, change)
        except Unreadable as error:
            return f"after {' '.join(change)}: {error.problems[0]}"
        if any(first_words(each) == first_words(problem) for each in check_start(changed, make_plan(changed)).problems):
            return f"after {' '.join(change)} it is refused as before"
    return ""


def run_with(run: Run, change: Iterable[str]) -> Run:
    """The run with overrides of keys; raises Unreadable."""
    config = asdict(run)
    for word in change:
        key, _, text = word.partition("=")
        *path, name = key.split(".")
        section = config
        for each in path:
            section = section[each]
        section[name] = _value(text)
    return read_run(config)


def _value(text: str) -> object:
    """The value of an override that an advice offers: a number, true, null, a word, or a list of them."""
    if text.startswith("["):
        return [_value(each) for each in text[1:-1].split(",")]
    try:
        return json.loads(text)
    except ValueError:
        return text
