"""`distrain prove`: trains a recipe in every layout that this machine can run, and compares their curves."""

from __future__ import annotations

from typing import Annotated

import typer

from ..pages.printing import print_live_line, print_output, print_problems
from .common_options import ConfigDir, RecipeAndOverrides


def prove(
    arguments: RecipeAndOverrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
    reasons: Annotated[bool, typer.Option("--reasons", help="Say why each skipped layout can't run.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Train a recipe in one process and in the layouts that this machine can run, and compare their training curves.

    steps=N trains N steps (default: 6, or the recipe's where it has fewer). layouts=dp2.native,tp2.sequence,pp2.zb_h1 names
    layouts; layouts=all takes all; the default is the recipe's own and about a dozen that cover every pair of choices. Values that the
    recipe sets for parallel.schedule=FILE.csv, stages, shard, gather and offload are proved as set; a layout's name can hold them too:
    pp2.file, pp2.stages1-3, dp4.zero1.shard2, dp2.zero3.gather_step, dp2.zero2.offload_optimizer. Unless layouts are named (checks=all or
    none decides), one process trains with other micro-batches, and one layout resumes what another one saved midway.

    Exit status: 0 all train the same curve and send the planned messages; 1 one does not, or can't run; 2 the command line is wrong.

    \b
    distrain prove conf=tiny_2x2x2
    distrain prove conf=quickstart layouts=dp2,dp2.zero3 steps=4
    """
    from .prove_run import Printer, prove_recipe

    def print_over_live_line(text: str) -> None:
        print_live_line("")
        print_output(text)

    printer = Printer(show=print_over_live_line, tell=print_problems, live=print_live_line)
    return prove_recipe(arguments or (), config_dir, printer, as_json=as_json, reasons=reasons)
