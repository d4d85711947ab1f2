"""`distrain ls`: recipes and config groups, what keys are, and the runs of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = "runs"  # the word for them, and log.dir where a recipe sets no other


def ls(
    word: Annotated[str | None, typer.Argument(metavar="[GROUP|KEY|runs]", show_default=False)] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Of runs: the folder that holds them.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines.")] = False,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", metavar="DIR", help="Your own groups and recipes, listed with the built-in ones.")
    ] = None,
) -> int:
    """List recipes and config groups, a line each; what a key is; or the runs of a folder, the newest first.

    Exit status: 0, or 2 where there is no such group, key or folder.

    \b
    distrain ls              recipes and groups
    distrain ls model        the models that model=NAME takes, and keys model.KEY
    distrain ls train.clip   what a key takes, its unit, its default, what it does
    distrain ls runs         the runs in runs/: steps, losses, checkpoint, state
    distrain ls runs DIR     the runs in DIR, which is their log.dir
    """
    from ...trainer.spec.problem import Problem, Unreadable
    from ..pages import ls_page
    from ..pages.console import say

    if word and "/" in word and folder is None and Path(word).is_dir():
        word, folder = RUNS, Path(word)
    if folder is not None and word != RUNS:
        raise Unreadable(
            [Problem(rule="words", says=f"ls {word} takes no {folder}", mend=f"`distrain ls {RUNS} DIR` lists the runs of a folder")]
        )
    if word == RUNS:
        from ..pages.runs_page import listed_runs, run_lines, run_rows

        found = listed_runs(folder)
        return say(ls_page.json_text(run_rows(found)) if as_json else run_lines(found, folder or Path(RUNS)))
    if as_json:
        return say(ls_page.json_text(ls_page.document(word, config_dir)))
    return say(ls_page.named(word, config_dir) if word else ls_page.everything(config_dir))
