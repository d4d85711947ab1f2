"""`distrain search`: the best layouts of a model on a cluster, as a page, as JSON, or as a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..pages.printing import live_line, print_error, print_json, print_live_line, print_output, print_problems, print_unwritten
from .common_options import ConfigDir, RecipeAndOverrides, recipe_and_overrides
from .exit_status import FAILED, OK

if TYPE_CHECKING:
    from ...trainer.plan.search.search_result import Answer
    from ...trainer.spec.run import Run

ALL_ROWS = 10**6


def search(
    arguments: RecipeAndOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page.")] = False,
    every: Annotated[bool, typer.Option("--all", help="A row for every mesh that is not far slower than the best.")] = False,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the best layout as a recipe that `fit` runs.")
    ] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Find the best layout of a model on a cluster, among all legal ones. Degrees that you give on the command line stay.

    Exit status: 0 a layout fits; 1 none does, or FILE can't be written; 2 the command line is wrong.

    \b
    distrain search conf=llama3_70b cluster=8x8
    distrain search conf=llama3_70b cluster=8x8 parallel.tp=8 search.by=memory
    distrain search conf=llama3_8b search.nodes=1..64
    distrain search conf=llama3_70b search.within=30
    distrain search conf=llama3_70b cluster=8x8 -o best.yaml
    """
    from ..config.load import load_recipe
    from .search_scope import fixed_keys

    conf, overrides = recipe_and_overrides(arguments, "search", config_dir)
    run, fixed = load_recipe(conf, overrides, config_dir), fixed_keys(overrides, config_dir)
    if every:
        run = replace(run, search=replace(run.search, rows=ALL_ROWS))
    if run.search.nodes is not None or run.search.within is not None:
        return _search_sizes(run, fixed, output, as_json=as_json)
    if output is not None:
        from ..recipe_files.recipe_copy import recipe_file

        recipe_file(output, run.name)  # raises for one that can't be written, before the search
    answer = _find(run, fixed)
    if as_json:
        print_json(answer)
    else:
        from ..pages.search_page import search_text
        from ..pages.text_layout import stdout_style

        print_output(search_text(answer, (conf, *overrides), run.search.by, stdout_style()))
    print_problems(answer.problems if as_json else ())
    if not answer.rows:
        return FAILED
    if output is None:
        return OK
    show = print_error if as_json else print_output  # stdout holds the document alone
    return _write(output, conf, (*overrides, *answer.rows[0].overrides), answer, config_dir, show)


def _find(run: Run, fixed: frozenset[str]) -> Answer:
    from ...trainer.plan.search.search_result import find_layouts

    with live_line(f"searching the layouts of {run.name} on {run.cluster.nodes * run.cluster.gpus:,} devices ..."):
        return find_layouts(run, fixed)


def _search_sizes(run: Run, fixed: frozenset[str], output: str | None, *, as_json: bool) -> int:
    """Search each size of the cluster; a line of progress for each."""
    from ...trainer.plan.search.cluster_sizes import best_layout, is_within, search_sizes, search_within
    from ...trainer.spec.numbers.as_text import plural
    from ...trainer.spec.problem import Problem, Unreadable
    from ..pages.search_page import sizes_text
    from ..pages.text_layout import stdout_style
    from .search_scope import MOST_NODES, node_counts

    if output is not None:
        keys = [f"search.{name}" for name in ("nodes", "within") if getattr(run.search, name) is not None]
        raise Unreadable([Problem(rule="option", says="-o writes one layout", mend=f"search one size: leave {' and '.join(keys)} out")])
    days = run.search.within
    if days is not None and run.search.by == "memory":
        says = "search.within is of the fastest layouts, and search.by=memory ranks by memory"
        raise Unreadable([Problem(rule="search", says=says, mend="leave one of them out")])
    counts = node_counts(run.search.nodes or (f"1..{MOST_NODES}" if days else ""))
    sizes = []
    with live_line(""):
        for each in search_within(run, fixed, counts, days) if days else search_sizes(run, fixed, counts):
            sizes.append(each)
            print_live_line(f"searched {plural(each.nodes, 'node')} ...")
    sizes.sort(key=lambda each: each.nodes)
    if as_json:
        print_json([each.answer for each in sizes])
    else:
        print_output(sizes_text(sizes, run.search, stdout_style()))
    return OK if any(is_within(each, days) if days else best_layout(each) for each in sizes) else FAILED


def _write(output: str, conf: str, overrides: Sequence[str], answer: Answer, config_dir: Path | None, show: Callable[[str], object]) -> int:
    """Write the best layout as a recipe, named after its file, and show a line about it."""
    from ..recipe_files.search_recipe import write_recipe

    try:
        show(write_recipe(output, conf, overrides, answer, config_dir))
    except OSError as error:
        return print_unwritten(output, error)
    return OK
