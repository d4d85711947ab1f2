"""The table of mutations that change nothing that matters, each with the reason: equivalents.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .sites import Mutation

TABLE = Path(__file__).with_name("equivalents.json")


@dataclass(frozen=True)
class Equivalents:
    """The reasons by (module:function, expression, replacement)."""

    reasons: dict[tuple[str, str, str], str]

    def reason(self, mutation: Mutation) -> str:
        """Why a mutation changes nothing that matters; "" if it is not in the table."""
        return self.reasons.get((f"{mutation.module}:{mutation.function}", mutation.expression, mutation.replacement), "")


def read_equivalents(file: Path = TABLE) -> Equivalents:
    """Read the table: a list of {"function", "expression", "replacement", "reason"}."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return Equivalents({(row["function"], row["expression"], row["replacement"]): row["reason"] for row in rows})
