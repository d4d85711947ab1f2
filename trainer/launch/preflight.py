"""Asking every host of a run, at once and before anything starts, whether the run can start there."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..spec.problem import Problem
from . import probe
from .hostfile import Host
from .shortcomings import ELEMENTS, Asked, Seen, missing_sum, notes, problems, unreached
from .words import LETTERS, SSH, crosses

FACTS, LINKS, REDUCED = 30.0, 20.0, 120.0  # seconds that a round may take; the last imports torch
LONGER = 5.0  # seconds beyond them, for ssh


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found: problems, which stop a run; notes, which don't; `rate`, bytes/s of the all-reduce on each host's link."""

    seen: tuple[Seen, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    rate: float | None = None


def preflight(hosts: Sequence[Host], asked: Asked) -> Report:
    """Ask all hosts. Nothing is left on them but the run's folder."""
    crosses(asked.python, "the Python", f"install distrain at a path of {LETTERS}")
    seen = [Seen(host=host) for host in hosts]
    with Calls(asked.python) as calls:
        marks = [f".preflight.{secrets.token_hex(8)}" for _ in seen]
        _facts(seen, asked, marks, calls)
        there = [each for each in seen if each.facts is not None]
        if len(seen) > 1:
            _links(there, asked, {each.name: mark for each, mark in zip(seen, marks, strict=True)}, calls)
        found = [*problems(seen, asked)]
        rate = None
        if len(seen) > 1 and not found:
            rate = _reduced(seen, asked, calls)
            found += missing_sum(seen, asked)
    return Report(seen=tuple(seen), problems=tuple(found), notes=tuple(notes(seen, asked, rate)), rate=rate)


class Calls:
    """ssh to several hosts at once, each running a program of `probe.py`; none is left when the block ends."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._running: set[subprocess.Popen[bytes]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in list(self._running):
            each.kill()

    def all(self, rows: Sequence[tuple[str, dict[str, Any]]], seconds: float) -> list[dict[str, Any] | str]:
        """The answer to each (host, order), or why there is none."""
        if not rows:
            return []
        with ThreadPoolExecutor(max_workers=len(rows)) as pool:
            try:
                return list(pool.map(lambda row: self._one(row[0], row[1], seconds), rows))
            except BaseException:
                self.__exit__()
                raise

    def _one(self, name: str, order: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        program = _program(order | {"seconds": seconds})
        pipe = subprocess.PIPE
        try:
            ssh = subprocess.Popen(
                ["ssh", *SSH, "--", name, f"{self._python} -"], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            return f"ssh can't be started: {error.strerror}"
        self._running.add(ssh)
        try:
            said, wrong = ssh.communicate(program.encode(), timeout=seconds + LONGER)
        except subprocess.TimeoutExpired:
            ssh.kill()
            ssh.communicate()
            return f"no answer in {seconds + LONGER:.0f} s"
        finally:
            self._running.discard(ssh)
        return _answer(said.decode(errors="replace"), wrong.decode(errors="replace"), ssh.returncode)


def _program(order: dict[str, Any]) -> str:
    """What `python -` reads: the probe, without the folder that it is started in on its path, and what it is asked."""
    source = Path(probe.__file__).read_text(encoding="utf-8")
    return (
        "import sys\n"
        "sys.path[:] = [each for each in sys.path if each]\n"
        "there = {'__name__': 'probe'}\n"
        f"exec(compile({source!a}, 'probe', 'exec'), there)\n"
        f"there['main']({json.dumps(order)!a})\n"
    )


def _answer(said: str, wrong: str, status: int) -> dict[str, Any] | str:
    for line in said.splitlines():
        if line.startswith(probe.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(probe.MARK))
            return answer
    words = [line.strip() for line in wrong.splitlines() if line.strip()]
    return words[-1] if words else f"ended with {status} and without a word"


def _facts(seen: Sequence[Seen], asked: Asked, marks: Sequence[str], calls: Calls) -> None:
    def ask(each: Seen, mark: str) -> None:
        began, clock = time.monotonic(), time.time()
        order = {"round": "facts", "kind": asked.kind, "folder": str(asked.folder), "note": mark}
        (answer,) = calls.all([(each.name, order)], FACTS)
        each.seconds = time.monotonic() - began
        if isinstance(answer, str):
            each.problems.append(unreached(each.name, answer, asked.python))
            return
        each.facts = answer
        ahead, behind = answer["clock"] - (clock + each.seconds), answer["clock"] - clock
        each.drift = max(0.0, ahead) or min(0.0, behind)

    with ThreadPoolExecutor(max_workers=len(seen)) as pool:
        list(pool.map(ask, seen, marks))


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
        if isinstance(answer, str):
            each.problems.append(unreached(each.name, answer, asked.python))
        else:
            each.links = answer


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
        each.reduced = {"problem": answer} if isinstance(answer, str) else answer
    found = [each.reduced["seconds"] for each in seen if each.reduced and "seconds" in each.reduced]
    return 2 * (len(seen) - 1) / len(seen) * 4 * ELEMENTS / max(found) if len(found) == len(seen) else None
