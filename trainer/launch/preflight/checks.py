"""What hosts lack for a run, from what they said of themselves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...spec.problem import Problem
from ..hosts.hostfile import Host
from . import host_probe

ELEMENTS = 4 << 20  # float32 of the all-reduce that is timed: 16 MiB
PER_CORE = 8  # CPU processes that a core can serve, slowly
DRIFT = 2.0  # seconds between two clocks that are worth a word
TAKEN = 0.1  # share of a GPU's memory from which another's process must be on it
SLOW = 0.5  # of the declared rate: below it, a word


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the run wants of its hosts; `save` is a checkpoint's bytes, `rate` bytes/s of a device between nodes, where declared."""

    python: str
    folder: Path
    kind: str  # of device: cpu, cuda
    save: int
    keep: int  # checkpoints that are kept
    rate: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # of the all-reduce


@dataclass(kw_only=True)
class Seen:
    """One host: what each round answered."""

    host: Host
    seconds: float = 0.0  # to its first answer
    drift: float = 0.0  # seconds that its clock is ahead, at least
    facts: dict[str, Any] | None = None
    links: dict[str, Any] | None = None
    reduced: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As ssh is told it."""
        return self.host.name

    @property
    def address(self) -> str:
        """By which the other hosts reach it: where ssh does."""
        return str((self.facts or {}).get("address") or self.name)


def unreached(name: str, why: str, python: str) -> Problem:
    """That a host does not answer."""
    if python in why and "o such file" in why:
        return Problem(rule="preflight", says=f"{name} has no {python}", mend="install distrain there at the same path")
    mend = f"`ssh {name} true` is to work without a question"
    return Problem(rule="preflight", says=f"{name} can't be asked: {why}", mend=mend)


def problems(seen: Sequence[Seen], asked: Asked) -> Iterator[Problem]:
    """All that stops a run, from the first two rounds."""
    own = host_probe.versions()
    for each in seen:
        yield from each.problems
        if each.facts is not None:
            yield from _unlike(each, own)
            yield from _folder(each, asked)
            yield from _devices(each, asked)
    yield from _twins([each for each in seen if each.facts is not None])
    yield from _apart(seen, asked)


def _unlike(each: Seen, own: Mapping[str, str]) -> Iterator[Problem]:
    """That a host has other versions than this machine."""
    assert each.facts is not None
    theirs = each.facts["versions"]
    mend = "install the same on all hosts"
    for name in ("python", *host_probe.PACKAGES):
        mine, there = own[name], theirs[name]
        if name == "python":  # the same but for its last number
            mine, there = (".".join(word.split(".")[:2]) for word in (mine, there))
        if not (theirs["code"] if name == "distrain" else there):
            yield Problem(rule="preflight", says=f"{each.name} has no {name}", mend=f"install {' '.join((name, mine)).strip()} there")
        elif there != mine:
            yield Problem(rule="preflight", says=f"{each.name} has {name} {there}, this machine {mine or 'none'}", mend=mend)
        elif name == "distrain" and theirs["code"] != own["code"]:
            yield Problem(rule="preflight", says=f"{each.name} has other files of distrain than this machine", mend=mend)


def _folder(each: Seen, asked: Asked) -> Iterator[Problem]:
    assert each.facts is not None
    found = each.facts["folder"]
    if why := found.get("problem"):
        says = f"{each.name} can't write to {asked.folder}: {why}"
        yield Problem(rule="preflight", says=says, mend="set log.dir to a folder that all hosts can write to")
    elif found["free"] < asked.save:
        says = f"{each.name} has {_size(found['free'])} free in {asked.folder}, and a checkpoint is {_size(asked.save)}"
        yield Problem(rule="preflight", says=says, mend="make room, or set log.dir to another disk")


def _devices(each: Seen, asked: Asked) -> Iterator[Problem]:
    assert each.facts is not None
    slots, cores = each.host.slots, each.facts["cores"]
    if asked.kind != "cuda":
        if len(slots) > PER_CORE * cores:
            says = f"{each.name} has {cores} cores, which can't serve {len(slots)} ranks"
            yield Problem(rule="preflight", says=says, mend=f"give it at most slots={PER_CORE * cores}")
        return
    if each.facts["cards"] is None:
        yield Problem(rule="preflight", says=f"{each.name} shows no GPU", mend="`nvidia-smi` is to work there")
        return
    cards = {index: (used, whole) for index, used, whole in each.facts["cards"]}
    missing = [slot for slot in slots if slot not in cards]
    if missing:
        says = f"{each.name} has {len(cards)} GPUs and no GPU {', '.join(map(str, missing))}"
        yield Problem(rule="preflight", says=says, mend="write as many slots as there are into the hostfile")
    for slot in slots:
        used, whole = cards.get(slot, (0, 1))
        if used > TAKEN * whole:
            says = f"GPU {slot} of {each.name} has {_size(used)} of {_size(whole)} taken"
            yield Problem(rule="preflight", says=says, mend=f"end what runs there, or set launch.exclude={each.name}:{slot}")


def _twins(there: Sequence[Seen]) -> Iterator[Problem]:
    """That two names are one machine."""
    names: dict[str, str] = {}
    for each in there:
        home = json.dumps((each.facts or {})["home"])
        if home in names:
            says = f"{names[home]} and {each.name} are the same machine"
            yield Problem(rule="preflight", says=says, mend="take one of them out of the hostfile")
        names.setdefault(home, each.name)


def _apart(seen: Sequence[Seen], asked: Asked) -> Iterator[Problem]:
    """That hosts don't reach each other, or don't share the run folder. One whom nobody reaches is told of once."""
    joined = [each for each in seen if each.links is not None]
    deaf = Counter(name for each in joined for name in (each.links or {})["failed"])
    shut = {name for name, count in deaf.items() if count == len(joined) - 1 and count > 1}
    for name in sorted(shut):
        says = f"{name} is reached by no other host"
        yield Problem(rule="preflight", says=says, mend="open its firewall to the other hosts, all ports")
    for each in joined:
        failed = {name: why for name, why in (each.links or {})["failed"].items() if name not in shut}
        if failed:
            name, why = next(iter(failed.items()))
            more = f", nor {len(failed) - 1} more" if len(failed) > 1 else ""
            says = f"{each.name} does not reach {name}{more}: {why}"
            yield Problem(rule="preflight", says=says, mend="open the firewall between the hosts, all ports")
    blind = [each for each in joined if (each.links or {})["unseen"]]
    if blind:
        first = blind[0]
        says = f"{first.name} does not see what {(first.links or {})['unseen'][0]} writes to {asked.folder}"
        yield Problem(rule="preflight", says=says, mend="set log.dir to a folder that all hosts share")


def missing_sum(seen: Sequence[Seen], asked: Asked) -> Iterator[Problem]:
    """That nothing gets through; one line, for all hosts wait for the same."""
    failed = [each for each in seen if each.reduced and "problem" in each.reduced]
    if failed:
        name = "NCCL" if asked.kind == "cuda" else "gloo"
        says = f"{failed[0].name} can't add up with the others over {name}: {(failed[0].reduced or {})['problem']}"
        yield Problem(rule="preflight", says=says, mend=f"set {name.upper()}_SOCKET_IFNAME to the interface between the hosts")


def notes(seen: Sequence[Seen], asked: Asked, rate: float | None) -> Iterator[str]:
    """What does not stop a run; `rate` is the measured bytes/s between hosts."""
    for each in seen:
        if abs(each.drift) > DRIFT:
            yield f"the clock of {each.name} is {abs(each.drift):.0f} s {'ahead of' if each.drift > 0 else 'behind'} this machine's"
        free = ((each.facts or {}).get("folder") or {}).get("free")
        if free is not None and asked.save <= free < (asked.keep + 1) * asked.save:
            yield f"{each.name} has room for {free // asked.save} checkpoints, and {asked.keep + 1} are there while one is saved"
    if rate is not None and asked.rate is not None and rate < SLOW * asked.rate:
        says = f"an all-reduce of {_size(4 * ELEMENTS)} goes at {rate / 1e9:.3g} GB/s between hosts"
        yield f"{says}, and cluster.between declares {asked.rate / 1e9:.3g} GB/s a device"


def _size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
