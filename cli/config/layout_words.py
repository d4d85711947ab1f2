"""The words of `distrain prove` beside a recipe's: `steps=N`, and `layouts=` with layouts as words, `dp2.tp2.zero1`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...trainer.prove.layouts import ALONE, AXES, RECOMPUTES, SCHEDULES, Layout
from ...trainer.spec.problem import Problem, nearest

FORM = "degrees as dp2, tp2, cp2, pp2 or ep2 and flags as zero1, sequence, gpipe or full, joined by dots: dp2.tp2.zero1"
MINE = ("steps", "layouts")

Chosen = Literal["few", "all", "named"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the words ask for beside the recipe and its overrides."""

    steps: int | None = None
    chosen: Chosen = "few"
    layouts: tuple[Layout, ...] = ()  # those named


def read_asked(words: Sequence[str]) -> tuple[Asked, list[str], list[Problem]]:
    """`steps=` and `layouts=`, the words that are the recipe's, and what is wrong with the first."""
    rest = [word for word in words if not word.startswith(tuple(f"{key}=" for key in MINE))]
    said = {key: [word.partition("=")[2] for word in words if word.startswith(f"{key}=")] for key in MINE}
    problems = [_twice(key, values) for key, values in said.items() if len(values) > 1]
    steps, layouts = (next(iter(said[key]), None) for key in MINE)
    if steps is not None and not re.fullmatch(r"[1-9]\d{0,8}", steps):
        problems.append(Problem(rule="steps", says=f"steps={steps} is not a whole number, at least 1"))
    named = [] if layouts in (None, "all") else read_layouts(layouts or "")
    problems += [each for each in named if isinstance(each, Problem)]
    if problems:
        return Asked(), rest, problems
    found = tuple(dict.fromkeys(each for each in named if isinstance(each, Layout)))
    chosen: Chosen = "named" if found else "all" if layouts == "all" else "few"
    return Asked(steps=int(steps) if steps else None, chosen=chosen, layouts=found), rest, []


# Keys, by how they begin, that prove sets itself.
OWN = {
    "log.every": "prove logs every step",
    "log.sinks": "prove keeps metrics.jsonl alone",
    "log.profile": "prove profiles nothing",
    "log.ledger": "prove counts messages",
    "checkpoint.": "prove saves each run at its end and resumes none",
    "train.evaluate": "prove does not validate",
    "launch": "prove starts its own processes here",
    "train.tokens": "prove trains steps=N",
    "engine": "each layout has its own engine",
}


def unread(keys: Iterable[str]) -> list[Problem]:
    """The keys that prove does not read, each with what it does instead."""
    rows = [(key, why) for key in keys for start, why in OWN.items() if key.startswith(start)]
    return [Problem(rule="idle", says=f"{key} does nothing here", mend=why) for key, why in rows]


def _twice(key: str, values: Sequence[str]) -> Problem:
    return Problem(rule="twice", says=f"{key} is given {len(values)} times", mend="give it once")


def read_layouts(words: str) -> list[Layout | Problem]:
    """The layouts that `layouts=` names, or what is wrong with each."""
    named = [word for word in words.strip("[]").replace(" ", "").split(",") if word]
    none = Problem(rule="layouts", says="layouts= names no layout", mend=f"write all, or {FORM}")
    return [_read(word) for word in named] or [none]


def _read(word: str) -> Layout | Problem:
    """One layout, or the first thing that is wrong with it."""
    said: dict[str, Any] = {}
    for part in word.split("."):
        read = _part(part)
        if isinstance(read, str):
            return _wrong(word, "is no layout", read)
        key, value = read
        if key in said:
            return _wrong(word, f"says {key} twice", "say it once")
        said[key] = value
    return _sensible(word, Layout(**said), said)


def _part(part: str) -> tuple[str, Any] | str:
    """(key, value) of a degree or a flag, or what would be right."""
    if found := re.fullmatch(rf"({'|'.join(AXES)})([1-9]\d{{0,5}})", part):
        return found[1], int(found[2])
    if found := re.fullmatch(r"zero([0-3])", part):
        return "zero", int(found[1])
    if part == "sequence":
        return "sequence", True
    for key, known in (("schedule", SCHEDULES), ("recompute", RECOMPUTES)):
        if part in known:
            return key, part
    name = part.rstrip("0123456789")
    if not part:
        return "a dot stands between two words"
    if name in AXES:
        return f"a degree is at least 1, as {name}2"
    if name == "zero":
        return "the stages are zero0 to zero3"
    return nearest(part, (*(f"{axis}2" for axis in AXES), "zero1", "sequence", *SCHEDULES, *RECOMPUTES))


def _sensible(word: str, layout: Layout, said: dict[str, Any]) -> Layout | Problem:
    if layout == ALONE:
        return _wrong(word, "is the one process that all others are held against", "leave it out, or add a degree: dp2")
    if layout.sequence and layout.tp == 1:
        return _wrong(word, "splits the sequence over tensor ranks, and has one", f"write {word}.tp2" if "tp" not in said else "say tp2")
    if "schedule" in said and layout.pp == 1:
        return _wrong(word, f"has a schedule, {layout.schedule}, and one stage", f"write {word}.pp2" if "pp" not in said else "say pp2")
    return layout


def _wrong(word: str, says: str, mend: str) -> Problem:
    return Problem(rule="layouts", says=f"layouts: {word} {says}", mend=mend)
