"""`distrain ls`: recipes and config groups, the meaning of keys, and the runs of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..pages.printing import print_output
from .common_options import ConfigDir


def ls(
    name: Annotated[str | None, typer.Argument(metavar="[GROUP|GROUP=NAME|KEY|WORD|runs]", show_default=False)] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="After `runs`: the folder that holds them.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """List recipes and config groups; describe a group or a key; print an option; or list the runs of a folder, newest first.

    Exit status: 0; 2 there is no such group, option, key, word or folder.

    \b
    distrain ls              recipes and groups
    distrain ls model        the models that model=NAME takes, and keys model.KEY
    distrain ls model=tiny   the file of an option; conf=NAME: of a recipe
    distrain ls train.clip   a key's values, its unit, its default, its meaning
    distrain ls nvlink       what is about a word: recipes, options, keys
    distrain ls runs         the runs in runs/: steps, losses, checkpoint, state
    distrain ls runs DIR     the runs in DIR, which is their log.dir
    """
    from ...trainer.rundir.run_summary import RUNS
    from ...trainer.spec.problem import Problem, Unreadable
    from ..pages import ls_page

    if name and "/" in name and "=" not in name and folder is None and Path(name).is_dir():
        name, folder = RUNS, Path(name)
    if name == RUNS:
        return print_output(_runs_output(folder, as_json=as_json))
    if folder is not None:
        mend = f"`distrain ls {RUNS} DIR` lists the runs of a folder"
        raise Unreadable([Problem(rule="words", says=f"ls {name} takes no folder, but was given {folder}", mend=mend)])
    if as_json:
        return print_output(ls_page.json_text(ls_page.document(name, config_dir)))
    return print_output(ls_page.description(name, config_dir) if name else ls_page.overview(config_dir))


def _runs_output(folder: Path | None, *, as_json: bool) -> str:
    from ...trainer.rundir.run_summary import RUNS, run_summaries
    from ..pages.ls_page import json_text
    from ..pages.runs_page import runs_document, runs_text

    runs = run_summaries(folder)
    return json_text(runs_document(runs)) if as_json else runs_text(runs, folder or Path(RUNS))
