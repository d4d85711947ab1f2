"""`distrain plan`: what a run costs, as a page, as JSON, or as a table of a sweep."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..pages.printing import live_line, print_json, print_output, print_problems
from .common_options import ConfigDir, HtmlFile, RecipeAndOverrides, recipe_and_overrides, write_html_page
from .exit_status import FAILED, OK

if TYPE_CHECKING:
    from ...trainer.plan.plan_data import Plan
    from ...trainer.plan.timeline.step_simulation import StepSimulation
    from ...trainer.spec.run import Run
    from ..pages.search_page import LayoutHint


MOST_SEARCHED = 64  # GPUs for which a plan searches at once: a second where it does not fit, else at most about 0.3
MOST_PASSES = 100_000  # of a step that an HTML page simulates: about two seconds
WORTH_TELLING = 0.2  # share of the time that a layout wastes


def plan(
    arguments: RecipeAndOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page (with -m, a list).")] = False,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Plan every combination of the listed values: parallel.tp=1,2,4.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="Add the time of each kind of operator to the page (JSON and HTML always have it).")
    ] = False,
    html: HtmlFile = None,
    config_dir: ConfigDir = None,
) -> int:
    """Plan a run: the memory of each GPU, the traffic on each link, the time of a step, the days.

    Exit status: 0 it fits (with -m, all do); 1 it doesn't fit or can't run, or FILE can't be written; 2 the command line is wrong.

    \b
    distrain plan conf=gpt3_175b
    distrain plan conf=gpt3_175b cluster=384x8 parallel.zero=1 device=h100_80g
    distrain plan conf=mixtral_8x7b --operators
    distrain plan conf=gpt3_175b -m parallel.tp=4,8 parallel.pp=8,16
    distrain plan conf=gpt3_175b --html plan.html
    """
    from ...trainer.spec.problem import Problem, Unreadable

    conf, overrides = recipe_and_overrides(arguments, "plan", config_dir)
    request = PlanRequest(conf=conf, overrides=overrides, config_dir=config_dir, as_json=as_json, operators=operators, html=html)
    if multirun and operators and not as_json:
        raise Unreadable(
            [Problem(rule="option", says="--operators is of one plan, -m of several", mend="leave one of them out, or add --json")]
        )
    return _plan_sweep(request) if multirun else _plan_run(request)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What `distrain plan` was asked: the recipe and overrides, JSON instead of the page, operators on the page, the HTML file to write."""

    conf: str
    overrides: tuple[str, ...]
    config_dir: Path | None
    as_json: bool
    html: str | None
    operators: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The recipe and the overrides."""
        return self.conf, *self.overrides

    def command(self, option: str = "") -> str:
        """The command that plans this."""
        dirs = ("--config-dir", str(self.config_dir)) if self.config_dir else ()
        html = ("--html", self.html) if self.html is not None else ()
        return shlex.join(["distrain", "plan", *filter(None, [option]), f"conf={self.conf}", *self.overrides, *dirs, *html])


def _plan_run(request: PlanRequest) -> int:
    """Plan one run and print its page or JSON; its problems go to stderr too, unless that is where the page went."""
    from ..config.load import load_recipe
    from ..pages.plan_page import plan_text
    from ..pages.search_page import hint_text
    from ..pages.text_layout import stdout_style

    run = load_recipe(request.conf, request.overrides, request.config_dir)
    target = _html_target(request, run.name)
    (plan,) = _plans([run])
    if request.as_json:
        print_json(plan)
    else:
        print_output(plan_text(plan, stdout_style(), operators=request.operators))
    hint = _better_layout(run, plan, request) if target or not request.as_json else None
    if hint and not request.as_json:
        print_output(hint_text(hint))
    if not _one_stream():
        print_problems(plan.problems)
    status = OK if plan.ok and plan.fits else FAILED
    if target is None:
        return status
    from ..html.plan_html import plan_html
    from ..recipe_files.config_text import config_text

    config = config_text(request.conf, request.overrides, request.config_dir, comments=False)
    return max(
        status,
        write_html_page(target, plan_html(plan, _simulated_step(run, plan), hint, config, request.command()), as_json=request.as_json),
    )


def _simulated_step(run: Run, plan: Plan) -> StepSimulation | None:
    """The simulated step of a plan that has times, unless it has too many passes for a page."""
    from ...trainer.plan.timeline.step_costs import step_costs
    from ...trainer.plan.timeline.step_simulation import simulate_step

    costs = step_costs(run) if plan.time else None
    if costs is None or 2 * len(costs.layout.partition.parts) * costs.layout.micros > MOST_PASSES:
        return None
    with live_line("simulating a step ..."):
        return simulate_step(run, costs)


def _html_target(request: PlanRequest, name: str) -> Path | None:
    """The HTML file to write; raises Unreadable for one that can't be written, before the plan is made."""
    if request.html is None:
        return None
    from ..html.html_file import html_target

    return html_target(request.html, name)


def _better_layout(run: Run, plan: Plan, request: PlanRequest) -> LayoutHint | None:
    """The best layout of a run that does not fit, or of one that wastes much of its time."""
    if plan.ok and not plan.fits:
        return _best_that_fits(run, request)
    return _waste(run, plan, request) if plan.runnable and plan.fits else None


def _best_that_fits(run: Run, request: PlanRequest) -> LayoutHint:
    """The best layout of a run that does not fit, as the words to type; on a large cluster, the search that finds it."""
    from ...trainer.plan.search.search_result import find_layouts
    from ..pages.search_page import best_hint, search_hint
    from .search_scope import fixed_keys

    if run.cluster.nodes * run.cluster.gpus > MOST_SEARCHED:
        return search_hint(request.words)
    answer = find_layouts(replace(run, search=replace(run.search, rows=1)), fixed_keys(request.overrides, request.config_dir))
    return best_hint(answer, request.words)


def _waste(run: Run, plan: Plan, request: PlanRequest) -> LayoutHint | None:
    """What a layout that fits wastes, and the best one, where that is much and quickly known. Runs on CPUs try things out: None."""
    from ...trainer.plan.search.search_result import faster_layout
    from ..pages.search_page import waste_hint
    from .search_scope import fixed_keys

    if plan.run is None or plan.run.seconds is None or plan.world > MOST_SEARCHED or run.cluster.device.kind == "cpu":
        return None
    best = faster_layout(run, fixed_keys(request.overrides, request.config_dir), (1 - WORTH_TELLING) * plan.run.seconds)
    return waste_hint(best, plan.run.seconds, request.words) if best else None


def _plan_sweep(request: PlanRequest) -> int:
    """Plan every combination of the listed values and print a row, or an object of a JSON list, for each."""
    from msgspec import to_builtins

    from ..config.load import empty_sweep_problem, load_sweep
    from ..pages.plan_sweep_page import sweep_text
    from ..pages.text_layout import stdout_style

    swept = load_sweep(request.conf, request.overrides, request.config_dir)
    target = _html_target(request, swept[0].run.name)
    plans = _plans([each.run for each in swept])
    layouts = [(each.swept, plan) for each, plan in zip(swept, plans, strict=True)]
    if request.as_json:
        print_json([{"overrides": words, **to_builtins(plan)} for words, plan in layouts])
    else:
        print_output(sweep_text(layouts, stdout_style()))
    if not any(each.swept for each in swept):
        print_problems([empty_sweep_problem()])
    status = OK if all(each.ok and each.fits for each in plans) else FAILED
    if target is None:
        return status
    from ..html.plan_sweep_html import sweep_html

    alone = [replace(request, conf=each.arguments[0].removeprefix("conf="), overrides=each.arguments[1:]).command() for each in swept]
    return max(status, write_html_page(target, sweep_html(layouts, alone, request.command("-m")), as_json=request.as_json))


def _plans(runs: Sequence[Run]) -> list[Plan]:
    """The plan of each run, with what `fit` would refuse of its files on this machine, and of its launch."""
    from ...trainer.launch.admission import launch_warnings
    from ...trainer.launch.file_checks import FileChecks, with_files
    from ...trainer.plan.plan import make_plan

    checks = FileChecks()
    plans = [with_files(run, make_plan(run), checks.check_run(run)) for run in runs]
    return [replace(plan, warnings=(*plan.warnings, *launch_warnings(run))) for run, plan in zip(runs, plans, strict=True)]


def _one_stream() -> bool:
    """Whether stdout and stderr are the same file, where a page has shown the problems already."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
