"""`distrain plan`: what a run costs, as a page, as JSON, or as a table of a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..pages.printing import print_json, print_output, print_problems
from .common_options import ConfigDir, RecipeAndOverrides, recipe_and_overrides
from .exit_status import FAILED, OK

if TYPE_CHECKING:
    from ...trainer.plan.result import Plan
    from ...trainer.spec.run import Run


MOST_SEARCHED = 64  # GPUs for which a plan searches at once: a second where it does not fit, else at most about 0.3
WORTH_TELLING = 0.2  # share of the time that a layout wastes


def plan(
    arguments: RecipeAndOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page (with -m, a list).")] = False,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Plan every combination of the listed values: parallel.tp=1,2,4.")
    ] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Plan a run: the memory of each GPU, the traffic on each link, the time of a step, the days.

    Exit status: 0 it fits (with -m, all do); 1 it doesn't fit or can't run; 2 the command line is wrong.

    \b
    distrain plan conf=gpt3_175b
    distrain plan conf=gpt3_175b cluster=384x8 parallel.zero=1 device=h100_80g
    distrain plan conf=gpt3_175b -m parallel.tp=4,8 parallel.pp=8,16
    """
    conf, overrides = recipe_and_overrides(arguments, "plan", config_dir)
    plans = _print_sweep if multirun else _print_plan
    return OK if all(each.ok and each.fits for each in plans(conf, overrides, config_dir, as_json)) else FAILED


def _print_plan(conf: str, overrides: Sequence[str], config_dir: Path | None, as_json: bool) -> list[Plan]:
    """Plan one run and print its page or JSON; its problems go to stderr too, unless that is where the page went."""
    from ..config.load import load_recipe
    from ..pages.plan_page import plan_text
    from ..pages.text_layout import stdout_style

    run = load_recipe(conf, overrides, config_dir)
    (only,) = _plans([run])
    if as_json:
        print_json(only)
    else:
        print_output(plan_text(only, stdout_style()))
    if only.ok and not only.fits and not as_json:
        print_output(_best_that_fits(run, conf, overrides, config_dir))
    elif only.runnable and only.fits and not as_json and (waste := _waste(run, only, conf, overrides, config_dir)):
        print_output(waste)
    if not _one_stream():
        print_problems(only.problems)
    return [only]


def _best_that_fits(run: Run, conf: str, overrides: Sequence[str], config_dir: Path | None) -> str:
    """The best layout of a run that does not fit, as the words to type; on a large cluster, the search that finds it."""
    from ...trainer.plan.search.answer import find_layouts
    from ..pages.search_page import best_text, search_hint
    from .search_scope import fixed_keys

    if run.cluster.nodes * run.cluster.gpus > MOST_SEARCHED:
        return search_hint((conf, *overrides))
    answer = find_layouts(replace(run, search=replace(run.search, rows=1)), fixed_keys(overrides, config_dir))
    return best_text(answer, (conf, *overrides))


def _waste(run: Run, plan: Plan, conf: str, overrides: Sequence[str], config_dir: Path | None) -> str:
    """What a layout that fits wastes, and the best one, where that is much and quickly known. Runs on CPUs try things out: empty."""
    from ...trainer.plan.search.answer import faster_layout
    from ..pages.search_page import waste_text
    from .search_scope import fixed_keys

    if plan.time is None or plan.world > MOST_SEARCHED or run.cluster.device.kind == "cpu":
        return ""
    best = faster_layout(run, fixed_keys(overrides, config_dir), (1 - WORTH_TELLING) * plan.time.step)
    return waste_text(best, plan.time.step, (conf, *overrides)) if best else ""


def _print_sweep(conf: str, overrides: Sequence[str], config_dir: Path | None, as_json: bool) -> list[Plan]:
    """Plan every combination of the listed values and print a row, or an object of a JSON list, for each."""
    from msgspec import to_builtins

    from ..config.load import empty_sweep_problem, load_sweep
    from ..pages.plan_sweep_page import sweep_text
    from ..pages.text_layout import stdout_style

    swept = load_sweep(conf, overrides, config_dir)
    plans = _plans([each.run for each in swept])
    layouts = [(each.swept, plan) for each, plan in zip(swept, plans, strict=True)]
    if as_json:
        print_json([{"overrides": words, **to_builtins(plan)} for words, plan in layouts])
    else:
        print_output(sweep_text(layouts, stdout_style()))
    if not any(each.swept for each in swept):
        print_problems([empty_sweep_problem()])
    return plans


def _plans(runs: Sequence[Run]) -> list[Plan]:
    """The plan of each run, with what `fit` would refuse of its files on this machine."""
    from ...trainer.launch.file_checks import FileChecks, with_files
    from ...trainer.plan.plan import make_plan

    checks = FileChecks()
    return [with_files(run, make_plan(run), checks.check_run(run)) for run in runs]


def _one_stream() -> bool:
    """Whether stdout and stderr are the same file, where a page has shown the problems already."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
