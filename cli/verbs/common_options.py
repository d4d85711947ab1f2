"""Parameters that several verbs share: the recipe with its overrides, the folder of the user's own configs, the HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

RecipeAndOverrides = Annotated[list[str] | None, typer.Argument(metavar="conf=NAME [KEY=VALUE ...]", show_default=False)]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="Your own groups (DIR/model/mine.yaml) and recipes (DIR/mine.yaml); they win over built-in ones.",
    ),
]
HtmlFile = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE", help="Also write the page as one HTML file to hand on; replaces only a page that distrain wrote."
    ),
]


def write_html_page(target: Path, text: str, *, as_json: bool) -> int:
    """Write the page of `--html` and say so; return the exit status. Where JSON is printed, stdout holds it alone."""
    from ..html.html_file import write_html
    from ..pages.printing import print_error, print_output, print_unwritten

    try:
        says = write_html(target, text)
    except OSError as error:
        return print_unwritten(str(target), error)
    (print_error if as_json else print_output)(says)
    return 0


def recipe_and_overrides(arguments: Sequence[str] | None, verb: str, config_dir: Path | None) -> tuple[str, tuple[str, ...]]:
    """Return the recipe and the overrides that a verb was given; raises Unreadable with all that is wrong with them."""
    from ...trainer.spec.problem import Unreadable
    from ..arguments.arguments import read_arguments
    from ..config.load import override_problems
    from ..pages.printing import print_problems

    read = read_arguments(arguments or (), verb, config_dir)
    if read.problems:
        raise Unreadable([*read.problems, *override_problems(read.overrides, config_dir)])
    print_problems(read.warnings)
    return read.conf, read.overrides
