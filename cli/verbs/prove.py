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

    \b
    steps=N        steps to train; default 6, or the recipe's where it has fewer
    layouts=A,B    layouts such as dp2.native, tp2.sequence, pp2.zb_h1; or all
    checks=all     also: one process with other micro-batches, and a resume in
                   another layout; none: neither. Default: all, unless layouts
                   are named

    By default the recipe's own layout and about a dozen that cover every pair of choices are trained. Names may also hold a schedule file,
    stages, shards, gathering and offload, which a recipe's own layout takes from it: pp2.file, pp2.stages1-3, dp4.zero1.shard2,
    dp2.zero3.gather_step, dp2.zero2.offload_optimizer.

    Exit status: 0 all train the same curve and send the planned messages; 1 one does not, or can't run; 2 the command line is wrong.

    \b
    distrain prove conf=tiny_2x2x2
    distrain prove conf=quickstart layouts=dp2,dp2.zero3 steps=4
    """
    from ...trainer.prove.fork_client import start_wide_server
    from .prove_run import Printer, prove_recipe

    def print_over_live_line(text: str) -> None:
        print_live_line("")
        print_output(text)

    printer = Printer(show=print_over_live_line, tell=print_problems, live=print_live_line)
    return prove_recipe(arguments or (), config_dir, printer, as_json=as_json, reasons=reasons, start_wide=start_wide_server)
