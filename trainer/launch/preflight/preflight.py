"""Asking every host of a run, at once and before anything starts, whether the run can start there."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...spec.problem import Problem
from ...system import open_files
from ..commands.deepspeed import LETTERS, crosses
from ..hosts.hostfile import Host
from ..hosts.ssh import Ssh, Stopped, Told, at_once
from ..single_host import signals
from . import host_probe
from .checks import ELEMENTS, Asked, Seen, missing_sum, notes, problems, unreached

FACTS, LINKS, REDUCED = 30.0, 20.0, 120.0  # seconds that a round may take; the last imports torch
CLEARED = 3.0  # seconds to remove what a round left that was broken off
LONGER = 5.0  # seconds beyond them, for ssh


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found: problems, which stop a run; notes, which don't; `rate`, bytes/s of the all-reduce on each host's link."""

    seen: tuple[Seen, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    rate: float | None = None


def preflight(hosts: Sequence[Host], asked: Asked) -> Report:
    """Ask all hosts. Nothing is left on them but the run's folder; raises Stopped once this process is told to stop."""
    crosses(asked.python, "the Python", f"install distrain at a path of {LETTERS}")
    seen = [Seen(host=host) for host in hosts]
    if few := open_files.allowed(open_files.held(0, len(hosts))):
        return Report(seen=tuple(seen), problems=(few,), notes=())
    with signals() as told:
        calls = Calls(asked.python, told)
        marks = {each.name: f".preflight.{secrets.token_hex(8)}" for each in seen}
        _facts(seen, asked, marks, calls)
        there = [each for each in seen if each.facts is not None]
        if len(seen) > 1:
            _links(there, asked, marks, calls)
            _clear(there, asked, marks)
        found = [*problems(seen, asked)]
        rate = None
        if len(seen) > 1 and not found:
            rate = _reduced(seen, asked, calls)
            found += missing_sum(seen, asked)
        if told:
            raise Stopped(told[0][0])
    return Report(seen=tuple(seen), problems=tuple(found), notes=tuple(notes(seen, asked, rate)), rate=rate)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a host said, or why it said nothing; on this machine's clock it was asked at `began`, `seconds` before its answer."""

    said: dict[str, Any] | str
    began: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Calls:
    """ssh to several hosts at once, each running a program of `probe.py`, until something is `told`."""

    python: str
    told: Told = ()

    def all(self, rows: Sequence[tuple[str, dict[str, Any]]], seconds: float) -> list[Answer]:
        """The answer to each (host, order). None of them is left when this returns; nobody is asked any more once something is told."""
        if self.told:
            return [Answer(said="not asked") for _ in rows]
        answers: list[Answer | None] = []
        begun: list[Ssh] = []
        acts = []
        try:
            for name, order in rows:
                began, clock = time.monotonic(), time.time()
                try:
                    begun.append(Ssh(name, f"{self.python} -"))
                except OSError as error:
                    answers.append(Answer(said=f"ssh can't be started: {error.strerror}"))
                    continue
                answers.append(None)
                acts.append((begun[-1], partial(_heard, begun[-1], _program(order | {"seconds": seconds}), began, clock)))
            heard = iter(at_once(acts, seconds + LONGER, lambda: bool(self.told)))
        finally:
            for each in begun:
                each.close()
        late = Answer(said=f"no answer in {seconds + LONGER:.0f} s")
        return [each or next(heard) or late for each in answers]


def _heard(ssh: Ssh, program: str, began: float, clock: float) -> Answer:
    said, wrong = ssh.process.communicate(program.encode())
    answer = _answer(said.decode(errors="replace"), wrong.decode(errors="replace"), ssh.process.returncode)
    return Answer(said=answer, began=clock, seconds=time.monotonic() - began)


def _program(order: dict[str, Any]) -> str:
    """What `python -` reads: the probe, without the folder that it is started in on its path, and what it is asked."""
    source = Path(host_probe.__file__).read_text(encoding="utf-8")
    return (
        "import sys\n"
        "sys.path[:] = [each for each in sys.path if each]\n"
        "there = {'__name__': 'probe'}\n"
        f"exec(compile({source!a}, 'probe', 'exec'), there)\n"
        f"there['main']({json.dumps(order)!a})\n"
    )


def _answer(said: str, wrong: str, status: int) -> dict[str, Any] | str:
    for line in said.splitlines():
        with suppress(ValueError):  # a line that was cut off
            if line.startswith(host_probe.MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(host_probe.MARK))
                return answer
    words = [line.strip() for line in wrong.splitlines() if line.strip()]
    return words[-1] if words else f"ended with {status} and without a word"


def _facts(seen: Sequence[Seen], asked: Asked, marks: Mapping[str, str], calls: Calls) -> None:
    order = {"round": "facts", "kind": asked.kind, "folder": str(asked.folder), "leave": len(seen) > 1}
    for each, answer in zip(seen, calls.all([(each.name, order | {"note": marks[each.name]}) for each in seen], FACTS), strict=True):
        each.seconds = answer.seconds
        if isinstance(answer.said, str):
            each.problems.append(unreached(each.name, answer.said, asked.python))
            continue
        each.facts = answer.said
        ahead, behind = each.facts["clock"] - (answer.began + each.seconds), each.facts["clock"] - answer.began
        each.drift = max(0.0, ahead) or min(0.0, behind)


def _clear(seen: Sequence[Seen], asked: Asked, marks: Mapping[str, str]) -> None:
    """Have the notes removed of those who did not say whom they reach, after which they do it themselves: the round was broken off."""
    order = {"round": "clear", "folder": str(asked.folder)}
    Calls(asked.python).all([(each.name, order | {"note": marks[each.name]}) for each in seen if each.links is None], CLEARED)


def _links(there: Sequence[Seen], asked: Asked, marks: Mapping[str, str], calls: Calls) -> None:
    word = secrets.token_hex(16)
    rows = {each.name: [each.address, each.facts["port"], marks[each.name]] for each in there if each.facts}
    orders = [
        (
            name,
            {
                "round": "links",
                "folder": str(asked.folder),
                "note": mark,
                "word": word,
                "port": port,
                "others": {other: row for other, row in rows.items() if other != name},
            },
        )
        for name, (_, port, mark) in rows.items()
    ]
    for each, answer in zip(there, calls.all(orders, LINKS), strict=True):
        if isinstance(answer.said, str):
            each.problems.append(unreached(each.name, answer.said, asked.python))
        else:
            each.links = answer.said


def _reduced(seen: Sequence[Seen], asked: Asked, calls: Calls) -> float | None:
    """Have one process a host add up together; the rate on each one's link, bytes/s, by the ring's 2 (n - 1) / n of the bytes."""
    first = seen[0]
    assert first.facts is not None
    order = {
        "round": "reduced",
        "kind": asked.kind,
        "address": first.address,
        "port": first.facts["port"],
        "ranks": len(seen),
        "elements": ELEMENTS,
        "environment": dict(asked.environment),
    }
    rows = [(each.name, order | {"rank": rank, "device": each.host.slots[0]}) for rank, each in enumerate(seen)]
    for each, answer in zip(seen, calls.all(rows, REDUCED), strict=True):
        each.reduced = {"problem": answer.said} if isinstance(answer.said, str) else answer.said
    found = [each.reduced["seconds"] for each in seen if each.reduced and "seconds" in each.reduced]
    return 2 * (len(seen) - 1) / len(seen) * 4 * ELEMENTS / max(found) if len(found) == len(seen) else None
