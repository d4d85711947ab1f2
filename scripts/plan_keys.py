"""Write docs/plan_json.md, the list of the keys of `distrain plan --json`, from the planner's own descriptions.

python -m distrain.scripts.plan_keys
"""

from __future__ import annotations

from pathlib import Path

from ..trainer.plan.costs.operator_kinds import OPERATOR_KINDS
from ..trainer.plan.plan_json_keys import PLAN_KEYS
from .show_help import show_help

PAGE = Path(__file__).parents[1] / "docs" / "plan_json.md"
HEAD = """# The keys of `distrain plan --json`

`distrain plan conf=NAME --json` prints one document with these keys, `-m` a list of them, each with the key `overrides`: the words of that
layout. `fit` writes the same document as `plan.json` into the run's folder. All figures are in SI units: bytes, seconds, FLOP/s; a share
of 1 is all. `[]` stands for each of a list, as jq writes it, `.*` for each of a table by name. What is not known is null, never a
guess. Keys may be added; none is renamed or taken out.

This page is made by `python -m distrain.scripts.plan_keys` from `trainer/plan/plan_json_keys.py`.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page_text(), encoding="utf-8")


def page_text() -> str:
    """Return the text of the page: a row for each key, and one for each kind of operator."""
    keys = [f"| `.{key}` | {unit} | {meaning} |" for key, (unit, meaning) in PLAN_KEYS.items()]
    kinds = [f"| `{kind}` | {label} |" for kind, label in OPERATOR_KINDS.items()]
    return "\n".join(
        [
            HEAD,
            *("| key | unit | meaning |", "|---|---|---|", *keys, ""),
            "## Kinds of operators\n",
            *("| `kind` | as the page of `--operators` calls it |", "|---|---|", *kinds, ""),
            "Back: [plans](plans.md), which explains the page.\n",
        ]
    )


if __name__ == "__main__":
    show_help(__doc__)
    main()
