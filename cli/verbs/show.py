"""`distrain show`: the composed config as YAML, how it is launched, or its DeepSpeed config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..pages.printing import print_json, print_output, print_problems
from .common_options import ConfigDir, RecipeAndOverrides, recipe_and_overrides
from .exit_status import OK


def show(
    arguments: RecipeAndOverrides = None,
    launch: Annotated[
        bool, typer.Option("--launch", help="The launch command and its files, as a shell script that starts the run as `fit` does.")
    ] = False,
    engine: Annotated[bool, typer.Option("--engine", help="The DeepSpeed config, as JSON.")] = False,
    comments: Annotated[bool, typer.Option("--comments", help="Explain each key: its meaning, its choices, its unit.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Print the composed config, with every default filled in, as YAML that conf=FILE reads back. Nothing is run or written.

    \b
    distrain show conf=gpt3_175b parallel.tp=4 > mine.yaml
    distrain show conf=gpt3_175b --comments
    distrain show conf=gpt3_175b launch=slurm --launch
    distrain show conf=quickstart --engine
    """
    from ...trainer.spec.problem import Problem, Unreadable

    conf, overrides = recipe_and_overrides(arguments, "show", config_dir)
    if launch and engine:
        raise Unreadable([Problem(rule="option", says="--launch and --engine each print a document", mend="give one of them")])
    if launch:
        return _print_launch(conf, overrides, config_dir)
    if engine:
        return _print_engine(conf, overrides, config_dir)
    from ..recipe_files.config_text import config_text

    return print_output(config_text(conf, overrides, config_dir, comments=comments))


def _print_launch(conf: str, overrides: Sequence[str], config_dir: Path | None) -> int:
    from ...trainer.launch.launch_script import launch_script, resume_warnings
    from ..config.load import load_recipe

    run = load_recipe(conf, overrides, config_dir)
    print_output(launch_script(run))
    print_problems(resume_warnings(run))
    return OK


def _print_engine(conf: str, overrides: Sequence[str], config_dir: Path | None) -> int:
    """Print the run's DeepSpeed config; raises Unreadable where it has no layout."""
    from ...trainer.plan.deepspeed.ds_config import deepspeed_config
    from ...trainer.plan.engines import ENGINES
    from ...trainer.plan.plan import make_plan
    from ...trainer.spec.problem import Problem, Unreadable
    from ..config.load import load_recipe

    run = load_recipe(conf, overrides, config_dir)
    plan = make_plan(run)
    if plan.mesh is None:
        raise Unreadable(plan.problems)
    if plan.engine and not ENGINES[plan.engine].has_deepspeed_config:
        says = f"engine {plan.engine} reads no configuration but the recipe"
        raise Unreadable([Problem(rule="engine", says=says, mend="engine=zero or engine=pipe shows DeepSpeed's")])
    return print_json(deepspeed_config(run, plan.mesh["dp"]))
