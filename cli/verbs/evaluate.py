"""`distrain evaluate`: the loss of a run's newest checkpoint, on its validation data or on other data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def evaluate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[data.KEY=VALUE ...]", show_default=False)] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="The step of the checkpoint, not the newest.")] = None,
    sequences: Annotated[int | None, typer.Option("--sequences", metavar="N", min=1, help="Read at most N sequences of each set.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (optim.ema).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the lines.")] = False,
) -> int:
    """Print the loss of a run's newest checkpoint, in float32, on what its evaluations read, or on other data.

    Without data.path it reads what the run holds out, and its validation sets; with it, all files that data.path names.
    data.validate.NAME=PATH names more sets. Each has its loss, perplexity, and bits a byte where tokens are bytes;
    preferences have their loss, accuracy and margin.

    \b
    distrain evaluate runs/quickstart
    distrain evaluate runs/quickstart data=text data.path=notes.txt
    distrain evaluate runs/mine data.validate.code=main.py --step 200 --json
    """
    from ...trainer.rundir.files import find_run_folder
    from ...trainer.system.run_child import run_child

    folder = find_run_folder(run_dir)
    options = {"changes": _data_changes(overrides or []), "step": step, "sequences": sequences, "ema": ema, "as_json": as_json}
    return run_child("distrain.trainer.loop.offline.evaluate_run", [str(folder), json.dumps(options)])


def _data_changes(words: list[str]) -> dict[str, Any]:
    """Return the keys of `data` that words set; raises Unreadable with every problem, and where they set another key."""
    from ...trainer.spec.problem import Problem, Unreadable
    from ..arguments.override_grammar import parse_override
    from ..arguments.overrides import sort_overrides
    from ..keys.keys import config_keys

    known = config_keys()
    found = sort_overrides(words, partial(parse_override, known=known), known, None)
    chosen = {f"{each.key}.name": each.value for each in found.choices if not each.deletes}
    changes, problems = chosen | found.values, list(found.problems)
    given = (*found.choices, *found.settings)
    others = [each.text for each in given if not each.deletes and not f"{each.key}.".startswith("data.")]
    for text in [*others, *([f"cluster={found.shape}"] if found.shape else [])]:
        says = f"{text} sets no key of data, and the rest is the run's"
        problems.append(Problem(rule="evaluate", says=says, mend="set data.path, data.validate.NAME or another key of data"))
    for text in (each.text for each in given if each.deletes):
        problems.append(Problem(rule="evaluate", says=f"evaluate deletes no key, as {text} does", mend="set keys of data"))
    if "data.validation" in changes and "data.path" not in changes:
        says = "data.validation would hold out text that the run has trained on"
        problems.append(Problem(rule="evaluate", says=says, mend="set data.path=FILE or data.validate.NAME=FILE"))
    if problems:
        raise Unreadable(problems)
    return changes
