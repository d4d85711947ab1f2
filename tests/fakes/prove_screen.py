"""Runs `distrain prove` on a tiny recipe and keeps what it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distrain.cli.verbs.prove_run import Printer, prove_recipe

TINY = (
    "conf=quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=4",
    "parallel.zero=1",
)  # fmt: skip


@dataclass
class ScreenRecord:
    """What a proof printed: texts, problems, live lines; and its exit status."""

    shown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    status: int | None = None

    @property
    def lines(self) -> list[str]:
        return "\n".join(self.shown).splitlines()

    def row(self, layout: str) -> list[str]:
        return next(line.split() for line in self.lines if line.split(" ")[0] == layout)


def run_prove(arguments: Sequence[str], folder: Path, start_server: Callable[..., Any], **options: Any) -> ScreenRecord:
    record = ScreenRecord()
    screen = Printer(show=record.shown.append, tell=lambda problems: record.problems.extend(map(str, problems)), live=record.live.append)
    given = {"as_json": False, "reasons": False, **options}
    record.status = prove_recipe([*TINY, *arguments, f"log.dir={folder}"], None, screen, start_server=start_server, **given)
    return record
