"""Asks all hosts of a run at once, before anything starts, whether the run can start there."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...plan.plan_data import Plan
from ...rundir.files import run_folder
from ...spec.problem import Problem
from ...spec.run import Run
from ...system import open_files
from ...system.stop_requests import StopRequests, collect_stop_requests
from ..hosts.hostfile import Host
from ..hosts.needed_packages import needed_packages
from ..hosts.shell_safe import SAFE_CHARACTERS, require_shell_safe
from ..hosts.ssh import Ssh, SshInterrupted, run_concurrently
from . import preflight_host
from .checks import ELEMENTS, HostRequirements, HostState, all_reduce_problems, device_kind, host_notes, host_problems, unreachable_problem
from .spares import choose_hosts, reasons_against

LINK_VARIABLES = ("NCCL_", "GLOO_")  # prefixes of the variables that choose the links between hosts
FACTS_SECONDS, LINKS_SECONDS, ALL_REDUCE_SECONDS = 30.0, 20.0, 120.0  # time limits of the rounds; the last imports torch
CLEAR_SECONDS = 3.0  # to remove what an interrupted round left
SSH_SECONDS = 5.0  # beyond these limits, for ssh itself


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The hosts' answers, those of spares last; the problems, which prevent the run; notes, which do not; `hosts`, on which it can start;
    `rate`, bytes/s of the all-reduce on a host's link."""

    seen: tuple[HostState, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    hosts: tuple[Host, ...]
    rate: float | None = None


def host_requirements(run: Run, plan: Plan) -> HostRequirements:
    """Return what a run needs of its hosts."""
    between = run.cluster.between
    return HostRequirements(
        python=sys.executable,
        folder=run_folder(run),
        kind=run.cluster.device.kind,
        save=plan.run.checkpoint_bytes if plan.run else 0,
        keep=run.checkpoint.keep,
        rate=between.rate if between else None,
        environment={key: value for key, value in os.environ.items() if key.startswith(LINK_VARIABLES)},
        packages=needed_packages(run),
    )


def run_preflight(hosts: Sequence[Host], needs: HostRequirements, spares: Sequence[Host] = ()) -> PreflightReport:
    """Ask all hosts and spares; a usable spare takes the place of a host that is not. Only the run's folder is left on them.

    Raises SshInterrupted once a stop is requested.
    """
    with collect_stop_requests() as requests:
        seen, found = check_hosts([*hosts, *spares], needs, requests)
        notes: list[str] = []
        used = tuple(hosts)
        if spares and all(each.is_asked for each in seen):
            used, found, notes = _place_spares(seen[: len(hosts)], seen[len(hosts) :], needs)
        rate = None
        starting = [each for each in seen if each.host in used]
        if len(used) > 1 and not found:
            rate = _time_all_reduce(starting, needs, HostCalls(needs.python, requests))
            found += all_reduce_problems(starting, needs)
        if requests:
            raise SshInterrupted(requests[0][0])
    notes += host_notes(seen, needs, rate)
    return PreflightReport(seen=tuple(seen), problems=tuple(found), notes=tuple(notes), hosts=used, rate=rate)


def _place_spares(
    hosts: Sequence[HostState], spares: Sequence[HostState], needs: HostRequirements
) -> tuple[tuple[Host, ...], list[Problem], list[str]]:
    """Return the hosts to start on, the problems if the spares are too few, and a note for each spare that is used or can't be."""
    choice = choose_hosts(hosts, spares, needs)
    useless = [f"spare {name} can't be used: {why}" for name, why in choice.useless.items()]
    if len(choice.used) < len(hosts):
        return tuple(each.host for each in hosts), [*host_problems(hosts, needs)], useless
    joined = [each.name for each in spares if each.host in choice.used]
    replaced = [
        f"{name} is left out ({why}): spare {spare} takes its place"
        for (name, why), spare in zip(choice.left_out.items(), joined, strict=True)
    ]
    return choice.used, [], [*replaced, *useless]


def joining_problems(used: Sequence[Host], joining: Sequence[Host], needs: HostRequirements, stop_requests: StopRequests) -> dict[str, str]:
    """Ask the hosts of a run and some that are to join them; return why some of these can't, by name."""
    seen, _ = check_hosts([*used, *joining], needs, stop_requests)
    own = preflight_host.package_versions(needs.packages)
    kept, problems = seen[: len(used)], dict[str, str]()
    for each in seen[len(used) :]:
        if not each.is_asked:
            problems[each.name] = "it was not asked"
        elif why := next(reasons_against(each, kept, needs, own), ""):
            problems[each.name] = why
        else:
            kept.append(each)
    return problems


def check_hosts(hosts: Sequence[Host], needs: HostRequirements, stop_requests: StopRequests) -> tuple[list[HostState], list[Problem]]:
    """Ask all hosts for their facts and try the connections between them; return the answers, and what prevents a run there."""
    require_shell_safe(needs.python, "the Python", f"install distrain at a path of only {SAFE_CHARACTERS}")
    seen = [HostState(host=host) for host in hosts]
    if problem := open_files.raise_limit(open_files.needed_files(0, len(hosts))):
        return seen, [problem]
    calls = HostCalls(needs.python, stop_requests)
    notes = {each.name: f".preflight.{secrets.token_hex(8)}" for each in seen}
    _ask_facts(seen, needs, notes, calls)
    answering = [each for each in seen if each.facts is not None]
    if len(seen) > 1:
        _ask_links(answering, needs, notes, calls)
        _clear_notes(answering, needs, notes)
    return seen, [*host_problems(seen, replace(needs, kind=needs.kind or device_kind(seen)))]


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """A host's answer, or why it gave none; it was asked at `began` on this machine's clock and answered `seconds` later."""

    said: dict[str, Any] | str
    began: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class HostCalls:
    """Concurrent calls of ssh, each running `preflight_host.py` on a host, until a stop is requested."""

    python: str
    stop_requests: StopRequests = field(default_factory=list)

    def call_all(self, rows: Sequence[tuple[str, dict[str, Any]]], seconds: float) -> list[HostAnswer]:
        """Return the answer to each (host, order), within `seconds`. No ssh is left running when this returns."""
        if self.stop_requests:
            return [HostAnswer(said="not asked") for _ in rows]
        answers: list[HostAnswer | None] = []
        begun: list[Ssh] = []
        acts = []
        try:
            for name, order in rows:
                began, clock = time.monotonic(), time.time()
                try:
                    begun.append(Ssh(name, f"{self.python} -"))
                except OSError as error:
                    answers.append(HostAnswer(said=f"ssh can't be started: {error.strerror}"))
                    continue
                answers.append(None)
                acts.append((begun[-1], partial(_answer_of, begun[-1], _program(order | {"seconds": seconds}), began, clock)))
            received = iter(run_concurrently(acts, seconds + SSH_SECONDS, lambda: bool(self.stop_requests)))
        finally:
            for each in begun:
                each.close()
        late = HostAnswer(said=f"no answer in {seconds + SSH_SECONDS:.0f} s")
        return [each or next(received) or late for each in answers]


def _answer_of(ssh: Ssh, program: str, began: float, clock: float) -> HostAnswer:
    out, err = ssh.process.communicate(program.encode())
    said = _parse_answer(out.decode(errors="replace"), err.decode(errors="replace"), ssh.process.returncode)
    return HostAnswer(said=said, began=clock, seconds=time.monotonic() - began)


def _program(order: dict[str, Any]) -> str:
    """The text for `python -`: the probe, without the folder it starts in on its path, and the order for it."""
    source = Path(preflight_host.__file__).read_text(encoding="utf-8")
    return (
        "import sys\n"
        "sys.path[:] = [each for each in sys.path if each]\n"
        "there = {'__name__': 'probe'}\n"
        f"exec(compile({source!a}, 'probe', 'exec'), there)\n"
        f"there['main']({json.dumps(order)!a})\n"
    )


def _parse_answer(out: str, err: str, status: int) -> dict[str, Any] | str:
    for line in out.splitlines():
        with suppress(ValueError):  # a line that was cut off
            if line.startswith(preflight_host.MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(preflight_host.MARK))
                return answer
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with {status} and no message"


def _folder(needs: HostRequirements) -> str:
    """The run folder as the probe is told it; "" where there is none."""
    return "" if needs.folder is None else str(needs.folder)


def _ask_facts(seen: Sequence[HostState], needs: HostRequirements, notes: Mapping[str, str], calls: HostCalls) -> None:
    order = {"round": "facts", "kind": needs.kind or "cuda", "folder": _folder(needs), "leave": len(seen) > 1, "packages": needs.packages}
    answers = calls.call_all([(each.name, order | {"note": notes[each.name]}) for each in seen], FACTS_SECONDS)
    for each, answer in zip(seen, answers, strict=True):
        each.seconds = answer.seconds
        if isinstance(answer.said, str):
            each.problems.append(unreachable_problem(each.name, answer.said, needs.python))
            continue
        each.facts = answer.said
        ahead, behind = each.facts["clock"] - (answer.began + each.seconds), each.facts["clock"] - answer.began
        each.drift = max(0.0, ahead) or min(0.0, behind)


def _clear_notes(seen: Sequence[HostState], needs: HostRequirements, notes: Mapping[str, str]) -> None:
    """Remove the notes of hosts whose links round was interrupted; the others remove theirs at its end."""
    if needs.folder is None:
        return
    order = {"round": "clear", "folder": _folder(needs)}
    left = [(each.name, order | {"note": notes[each.name]}) for each in seen if each.links is None]
    HostCalls(needs.python).call_all(left, CLEAR_SECONDS)


def _ask_links(answering: Sequence[HostState], needs: HostRequirements, notes: Mapping[str, str], calls: HostCalls) -> None:
    word = secrets.token_hex(16)
    rows = {each.name: [each.address, each.facts["port"], notes[each.name]] for each in answering if each.facts}
    orders = [
        (
            name,
            {
                "round": "links",
                "folder": _folder(needs),
                "note": note,
                "word": word,
                "port": port,
                "others": {other: row for other, row in rows.items() if other != name},
            },
        )
        for name, (_, port, note) in rows.items()
    ]
    for each, answer in zip(answering, calls.call_all(orders, LINKS_SECONDS), strict=True):
        if isinstance(answer.said, str):
            each.problems.append(unreachable_problem(each.name, answer.said, needs.python))
        else:
            each.links = answer.said


def _time_all_reduce(seen: Sequence[HostState], needs: HostRequirements, calls: HostCalls) -> float | None:
    """All-reduce with one process per host; return bytes/s on each host's link, which carries the ring's 2 (n - 1) / n of the bytes."""
    first = seen[0]
    assert first.facts is not None
    order = {
        "round": "reduced",
        "kind": needs.kind,
        "address": first.address,
        "port": first.facts["port"],
        "ranks": len(seen),
        "elements": ELEMENTS,
        "environment": dict(needs.environment),
    }
    rows = [(each.name, order | {"rank": rank, "device": each.host.slots[0]}) for rank, each in enumerate(seen)]
    for each, answer in zip(seen, calls.call_all(rows, ALL_REDUCE_SECONDS), strict=True):
        each.reduced = {"problem": answer.said} if isinstance(answer.said, str) else answer.said
    found = [each.reduced["seconds"] for each in seen if each.reduced and "seconds" in each.reduced]
    return 2 * (len(seen) - 1) / len(seen) * 4 * ELEMENTS / max(found) if len(found) == len(seen) else None
