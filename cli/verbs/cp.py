"""`distrain cp`: copies a recipe, or an option of a config group, to a file to edit, with its comments."""

from __future__ import annotations

from typing import Annotated

import typer

from ..pages.printing import print_output, print_unwritten
from .common_options import ConfigDir


def cp(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False)],
    config_dir: ConfigDir = None,
) -> int:
    """Copy a recipe to a file to edit, with its comments. The copy plans the same, and its runs are named after the file.

    NAME is a recipe, the path of one, or GROUP/OPTION. FILE is never overwritten; - is stdout; a folder gets NAME.yaml.

    Exit status: 0; 1 FILE can't be written; 2 the command line is wrong.

    \b
    distrain cp llama3_8b mine.yaml
    distrain cp ../theirs.yaml mine.yaml
    distrain cp model/llama3_8b my/model/wide.yaml
    """
    from ..recipe_files.recipe_copy import copy_config

    try:
        return print_output(copy_config(name.removeprefix("conf="), file.removeprefix("conf="), config_dir))
    except OSError as error:
        return print_unwritten(file, error)
