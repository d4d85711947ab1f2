"""`distrain report`: a run's folder, planned against measured, and its curve."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page.")] = False,
) -> int:
    """Show a run: memory, time and throughput as planned and as measured, where they drift, and the loss.

    Exit status: 0, or 2 where the folder is no run's.

    \b
    distrain report runs/quickstart
    distrain report runs/quickstart --json
    """
    from .child import run_folder
    from .measured import ran
    from .printed import say

    found = ran(run_folder(run_dir))
    if as_json:
        import json

        say(json.dumps(document(found), indent=2))
    else:
        from .report_text import page
        from .text import look

        say(page(found, look()))
    return 0


def document(found: Any) -> dict[str, Any]:
    """A run as plain data: every field, and each figure's drift."""
    plain = asdict(found)
    for section in ("memory", "time", "speed"):
        plain[section] = [{**asdict(each), "drift": each.drift} for each in getattr(found, section)]
    return {"version": 1, **plain}
