"""`distrain cp`: a recipe, or an option of a config group, as a file to edit, with its comments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cp(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False)],
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", metavar="DIR", help="Your own groups and recipes, which win over built-in ones.")
    ] = None,
) -> int:
    """Write a recipe to a file to edit, with its comments. The file plans the same, and its runs are named as the file.

    NAME is a recipe, the path of one, or GROUP/OPTION. FILE is never overwritten; - is stdout, and a folder takes NAME.yaml.

    Exit status: 0; 1 FILE can't be written; 2 the words are wrong.

    \b
    distrain cp llama3_8b mine.yaml
    distrain cp ../theirs.yaml mine.yaml
    distrain cp model/llama3_8b my/model/wide.yaml
    """
    from ..config.recipe_copy import copy
    from ..pages.console import say, tell
    from ..pages.format import one_line

    try:
        return say(copy(name.removeprefix("conf="), file.removeprefix("conf="), config_dir))
    except OSError as error:
        tell(one_line(f"distrain: {file} can't be written ({(error.strerror or str(error)).lower()}): name a file elsewhere"))
        return 1
