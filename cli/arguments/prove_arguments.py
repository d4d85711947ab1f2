"""Reads the arguments of `distrain prove` other than overrides: `steps=N`, `layouts=` with names such as dp2.tp2.zero1, `checks=`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ...trainer.prove.trials.layouts import (
    ALL_TO_ALL,
    FILE_SCHEDULE,
    HIERARCHICAL,
    NATIVE_ENGINE,
    ONE_PROCESS,
    POWERSGD,
    PROVED_AXES,
    PROVED_RECOMPUTES,
    PROVED_SCHEDULES,
    ProveLayout,
)
from ...trainer.prove.trials.plan_proof import ProveRequest
from ...trainer.spec.problem import Problem, suggest_name

FORM = "degrees as dp2, tp2, cp2, pp2 or ep2 and flags as zero1, sequence, gpipe, native or full, joined by dots: dp2.tp2.zero1"
REQUEST_KEYS = ("steps", "layouts", "checks")
CHECK_CHOICES = ("all", "none")

# Prefixes of keys that prove sets itself, and what it does instead.
OWN_KEYS = {
    "log.every": "prove logs every step",
    "log.sinks": "prove writes metrics.jsonl only",
    "log.profile": "prove profiles nothing",
    "log.timeline": "prove times no actions",
    "log.ledger": "prove counts messages",
    "checkpoint.": "prove saves each run at its end, and one midway too, from which another one resumes",
    "train.evaluate": "prove evaluates one batch at the end of each run",
    "launch": "prove starts its own processes here",
    "train.tokens": "prove trains steps=N",
    "engine": "a layout names its own: dp2.native",
}

_FLAGS = ("sequence", ALL_TO_ALL, HIERARCHICAL)
_COUNTS = ("chunks", "shard", "sync", "stale", "servers")
_SCHEDULES = (*PROVED_SCHEDULES, FILE_SCHEDULE)
_NUMBER = r"([1-9]\d{0,5})"


def _any_of(names: Iterable[str]) -> str:
    return f"({'|'.join(names)})"


# Each row: the pattern of a part of a layout's name, and its key and value.
_PARTS: tuple[tuple[str, Callable[[re.Match[str]], tuple[str, Any]]], ...] = (
    (_any_of((*PROVED_AXES, *_COUNTS)) + _NUMBER,  lambda found: (found[1], int(found[2]))),
    (r"zero([0-3])",                               lambda found: ("zero", int(found[1]))),
    (POWERSGD + _NUMBER,                           lambda found: ("compress", int(found[1]))),
    (r"stages([1-9]\d{0,3}(?:-[1-9]\d{0,3})*)",    lambda found: ("stages", tuple(map(int, found[1].split("-"))))),
    (r"gather_(step|micro)",                       lambda found: ("gather", found[1])),
    (r"offload_(optimizer|all)",                   lambda found: ("offload", found[1])),
    (_any_of(_FLAGS),                              lambda found: (found[1], True)),
    (NATIVE_ENGINE,                                lambda found: ("engine", found[0])),
    (_any_of(_SCHEDULES),                          lambda found: ("schedule", found[1])),
    (_any_of(PROVED_RECOMPUTES),                   lambda found: ("recompute", found[1])),
)  # fmt: skip


def read_prove_request(arguments: Sequence[str]) -> tuple[ProveRequest, list[str], list[Problem]]:
    """Return (what `steps=`, `layouts=` and `checks=` request, the other arguments, problems of the former)."""
    rest = [each for each in arguments if not each.startswith(tuple(f"{key}=" for key in REQUEST_KEYS))]
    values = {key: [each.partition("=")[2] for each in arguments if each.startswith(f"{key}=")] for key in REQUEST_KEYS}
    problems = [_repetition_problem(key, each) for key, each in values.items() if len(each) > 1]
    steps, layouts, checks = (next(iter(values[key]), None) for key in REQUEST_KEYS)
    if checks not in (None, *CHECK_CHOICES):
        problems.append(Problem(rule="checks", says=f"checks={checks} is neither {' nor '.join(CHECK_CHOICES)}"))
    if steps is not None and not re.fullmatch(r"[1-9]\d{0,8}", steps):
        problems.append(Problem(rule="steps", says=f"steps={steps} is not a whole number, at least 1"))
    parsed = [] if layouts in (None, "all") else read_layouts(layouts or "")
    problems += [each for each in parsed if isinstance(each, Problem)]
    if problems:
        return ProveRequest(), rest, problems
    named = tuple(dict.fromkeys(each for each in parsed if isinstance(each, ProveLayout)))
    chosen: Literal["few", "all", "named"] = "named" if named else "all" if layouts == "all" else "few"
    has_checks = checks == "all" or (checks is None and not named)
    return ProveRequest(steps=int(steps) if steps else None, chosen=chosen, layouts=named, checks=has_checks), rest, []


def unused_keys(keys: Iterable[str]) -> list[Problem]:
    """Return a warning for each of `keys` that prove ignores, with what it does instead."""
    rows = [(key, why) for key in keys for start, why in OWN_KEYS.items() if key.startswith(start)]
    return [Problem(rule="idle", says=f"{key} does nothing here", mend=why) for key, why in rows]


def _repetition_problem(key: str, values: Sequence[str]) -> Problem:
    return Problem(rule="twice", says=f"{key} is given {len(values)} times", mend="give it once")


def read_layouts(value: str) -> list[ProveLayout | Problem]:
    """Return the layouts of `layouts=VALUE`, with a problem in place of each that is wrong."""
    names = [name for name in value.strip("[]").replace(" ", "").split(",") if name]
    none = Problem(rule="layouts", says="layouts= names no layout", mend=f"write all, or {FORM}")
    return [_read_layout(name) for name in names] or [none]


def _read_layout(name: str) -> ProveLayout | Problem:
    """Return one layout, or the first problem of its name."""
    values: dict[str, Any] = {}
    for part in name.split("."):
        read = _read_part(part)
        if isinstance(read, str):
            return _problem(name, "is no layout", read)
        key, value = read
        if key in values:
            return _problem(name, f"sets {key} twice", "set it once")
        values[key] = value
    return _checked_layout(name, ProveLayout(**values), values)


def _read_part(part: str) -> tuple[str, Any] | str:
    """Return (key, value) of a degree or a flag; the text of a fix if it is neither."""
    for pattern, read in _PARTS:
        if found := re.fullmatch(pattern, part):
            return read(found)
    return _part_fix(part)


def _part_fix(part: str) -> str:
    """Return the fix of a part that is neither a degree nor a flag."""
    name = part.rstrip("0123456789")
    if not part:
        return "write one dot between two parts"
    if name in PROVED_AXES:
        return f"a degree is at least 1, as {name}2"
    if name == "zero":
        return "the stages are zero0 to zero3"
    if name == "stages":
        return "write the layers of each part of the model, as stages1-2-1"
    if name in (*_COUNTS, POWERSGD):
        return f"write a number, as {name}2"
    degrees = [f"{axis}2" for axis in PROVED_AXES]
    numbered = ("chunks2", "stages1-1", "shard2", "sync2", "stale1", "servers1", f"{POWERSGD}4")
    words = ("gather_step", "gather_micro", "offload_optimizer", "offload_all")
    return suggest_name(
        part, (*degrees, "zero1", "sequence", *_SCHEDULES, NATIVE_ENGINE, *PROVED_RECOMPUTES, *_FLAGS[1:], *words, *numbered)
    )


def _checked_layout(name: str, layout: ProveLayout, values: dict[str, Any]) -> ProveLayout | Problem:
    """Return the layout, or a problem if its parts contradict each other."""
    if layout == ONE_PROCESS:
        return _problem(name, "is the one process that all others are compared with", "leave it out, or add a degree: dp2")
    if layout.sequence and layout.tp == 1:
        fix = f"write {name}.tp2" if "tp" not in values else "write tp2"
        return _problem(name, "splits the sequence over tensor-parallel ranks, but has only one", fix)
    if layout.all_to_all and layout.cp == 1:
        fix = f"write {name}.cp2" if "cp" not in values else "write cp2"
        return _problem(name, "exchanges tokens for heads, but has one rank for each sequence", fix)
    if layout.pp == 1 and (part := next((key for key in ("schedule", "chunks", "stages") if key in values), None)):
        fix = f"write {name}.pp2" if "pp" not in values else "write pp2"
        noun = {"schedule": f"a schedule, {layout.schedule}"}.get(part, f"{part} of a pipeline")
        return _problem(name, f"has {noun}, but only one stage", fix)
    if layout.shard and not layout.zero:
        return _problem(name, f"has shards of {layout.shard} ranks, and ZeRO shards nothing at stage 0", f"write {name}.zero1")
    if layout.offload and not layout.zero:
        stage = 3 if layout.offload == "all" else 1
        return _problem(name, "offloads, and ZeRO shards nothing at stage 0", f"write {name}.zero{stage}")
    if layout.gather and layout.zero != 3:
        fix = "write zero3" if "zero" in values else f"write {name}.zero3"
        return _problem(name, "says how often ZeRO 3 gathers weights, and gathers none", fix)
    if layout.compress and layout.dp * layout.cp == 1:
        return _problem(
            name, "compresses gradients, and has one data-parallel rank", f"write {name}.dp2" if "dp" not in values else "write dp2"
        )
    if layout.sync and (layout.dp == 1 or layout.sync == 1):
        says = "has replicas that step alone, but only one replica" if layout.dp == 1 else "has replicas that take 1 step alone, as all do"
        return _problem(name, says, f"write {name}.dp2" if layout.dp == 1 else "write sync2")
    return layout


def _problem(name: str, says: str, mend: str) -> Problem:
    return Problem(rule="layouts", says=f"layouts: {name} {says}", mend=mend)
