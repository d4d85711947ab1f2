"""`distrain fit`: plan a run, launch it, train, and report."""

from __future__ import annotations

from typing import Annotated

import typer

from .common_options import ConfigDir, RecipeAndOverrides, recipe_and_overrides


def fit(
    arguments: RecipeAndOverrides = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Train every combination of the listed values, one after the other.")
    ] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Plan a run, launch it, train, log; a run folder that has a checkpoint goes on from its newest one.

    With -m each combination has a run folder of its own, named by its overrides; the same command resumes them.

    Exit status: 0 it trained (with -m, all did); 1 it can't run or failed; 2 the command line is wrong; 75 it was stopped after
    saving; 128 + the signal: it was stopped and could not save.

    \b
    distrain fit conf=quickstart
    distrain fit conf=quickstart train.steps=600 checkpoint.resume=must
    distrain fit conf=quickstart -m optim.lr=1e-3,3e-3 train.seed=1,2
    """
    conf, overrides = recipe_and_overrides(arguments, "fit", config_dir)
    if multirun:
        from .fit_sweep import fit_sweep

        return fit_sweep(conf, overrides, config_dir)
    from ..config.load import load_recipe
    from .fit_run import fit_run

    return fit_run(lambda: load_recipe(conf, overrides, config_dir)).status
