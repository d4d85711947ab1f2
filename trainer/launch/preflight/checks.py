"""Problems and notes about a run's hosts, judged from what they answered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...machine.measure_machine import CPU_RANKS_PER_CORE
from ...spec.numbers.as_text import size_text
from ...spec.problem import Problem
from ..hosts.hostfile import Host
from . import preflight_host

ELEMENTS = 4 << 20  # float32 values of the timed all-reduce: 16 MiB
CLOCK_DRIFT = 2.0  # least difference of two clocks, in seconds, that a note reports
GPU_MEMORY_TAKEN = 0.1  # if a larger share of a GPU's memory is used, another process uses the GPU
SLOW_SHARE = 0.5  # share of the declared rate below which a note reports the measured one


@dataclass(frozen=True, kw_only=True)
class HostRequirements:
    """What the run needs of its hosts. `save` is a checkpoint's bytes; `rate` is the declared bytes/s of a device between nodes, if any."""

    python: str
    folder: Path | None  # None: nothing is written on the hosts
    kind: str | None  # of device: cpu or cuda; None: see `device_kind`
    save: int
    keep: int  # checkpoints kept
    rate: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for the all-reduce
    packages: tuple[str, ...] = ()  # beside those of every rank


@dataclass(kw_only=True)
class HostState:
    """One host and its answer to each round; None where it gave none."""

    host: Host
    seconds: float = 0.0  # until its first answer
    drift: float = 0.0  # seconds that its clock is ahead of this machine's, at least
    facts: dict[str, Any] | None = None
    links: dict[str, Any] | None = None
    reduced: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name that ssh uses."""
        return self.host.name

    @property
    def is_asked(self) -> bool:
        """Whether it has answered, or it is known why it did not."""
        return self.facts is not None or bool(self.problems)

    @property
    def address(self) -> str:
        """Its address for the other hosts: the one that ssh connected to."""
        return str((self.facts or {}).get("address") or self.name)


def device_kind(seen: Sequence[HostState]) -> Literal["cpu", "cuda"]:
    """Return the kind of device that hosts have: GPUs if any of them shows one."""
    return "cuda" if any(each.facts and each.facts["cards"] for each in seen) else "cpu"


def unreachable_problem(name: str, why: str, python: str) -> Problem:
    """The problem of a host that does not answer; `why` is what ssh said."""
    if python in why and "o such file" in why:
        return Problem(rule="preflight", says=f"{name} has no {python}", mend="install distrain there at the same path")
    mend = f"make `ssh {name} true` work without asking for anything"
    return Problem(rule="preflight", says=f"{name} can't be asked: {why}", mend=mend)


def host_problems(seen: Sequence[HostState], needs: HostRequirements) -> Iterator[Problem]:
    """Yield all that prevents the run, from the first two rounds."""
    own = preflight_host.package_versions(needs.packages)
    for each in seen:
        yield from own_problems(each, needs, own)
    for one, other in _same_machines(seen):
        says = f"{one} and {other} are the same machine"
        yield Problem(rule="preflight", says=says, mend="take one of them out of the hostfile")
    yield from _link_problems(seen, needs)


def own_problems(each: HostState, needs: HostRequirements, own: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what a host lacks by itself; `own` are this machine's versions."""
    yield from each.problems
    if each.facts is not None:
        yield from _version_problems(each, needs, own)
        yield from _folder_problems(each, needs)
        yield from _device_problems(each, needs)


def broken_pairs(seen: Sequence[HostState], needs: HostRequirements) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the names of two hosts that can't be in one run, and why, for each reason."""
    names = {each.name for each in seen}
    for one, other in _same_machines(seen):
        yield frozenset((one, other)), f"{one} and {other} are the same machine"
    for each in seen:
        for name, why in _failed_links(each, names).items():
            yield frozenset((each.name, name)), f"{each.name} does not reach {name}: {why}"
        for name in _unseen_hosts(each, names):
            yield frozenset((each.name, name)), f"{each.name} does not see what {name} writes to {needs.folder}"


def _version_problems(each: HostState, needs: HostRequirements, own: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the packages whose version differs from this machine's."""
    assert each.facts is not None
    theirs = each.facts["versions"]
    mend = "install the same on all hosts"
    further = [name for name in needs.packages if own[name]]  # a package may be here by another name, as builds of Triton are
    for name in ("python", *preflight_host.PACKAGES, *further):
        mine, there = own[name], theirs[name]
        if name == "python":  # the patch version may differ
            mine, there = (".".join(word.split(".")[:2]) for word in (mine, there))
        if not (theirs["code"] if name == "distrain" else there):
            yield Problem(rule="preflight", says=f"{each.name} has no {name}", mend=f"install {' '.join((name, mine)).strip()} there")
        elif there != mine:
            yield Problem(rule="preflight", says=f"{each.name} has {name} {there}, this machine {mine or 'none'}", mend=mend)
        elif name == "distrain" and theirs["code"] != own["code"]:
            yield Problem(rule="preflight", says=f"{each.name} and this machine have different files of distrain", mend=mend)


def _folder_problems(each: HostState, needs: HostRequirements) -> Iterator[Problem]:
    assert each.facts is not None
    if needs.folder is None:
        return
    found = each.facts["folder"]
    if why := found.get("problem"):
        says = f"{each.name} can't write to {needs.folder}: {why}"
        yield Problem(rule="preflight", says=says, mend="set log.dir to a folder that all hosts can write to")
    elif found["free"] < needs.save:
        says = f"{each.name} has {size_text(found['free'])} free in {needs.folder}, and a checkpoint is {size_text(needs.save)}"
        yield Problem(rule="preflight", says=says, mend="free some space, or set log.dir to another disk")


def _device_problems(each: HostState, needs: HostRequirements) -> Iterator[Problem]:
    assert each.facts is not None
    slots, cores = each.host.slots, each.facts["cores"]
    if needs.kind != "cuda":
        if len(slots) > CPU_RANKS_PER_CORE * cores:
            says = f"{each.name} has {cores} cores, which can't serve {len(slots)} ranks"
            yield Problem(rule="preflight", says=says, mend=f"give it at most slots={CPU_RANKS_PER_CORE * cores}")
        return
    if each.facts["cards"] is None:
        yield Problem(rule="preflight", says=f"{each.name} shows no GPU", mend="make `nvidia-smi` work there")
        return
    cards = {index: (used, whole) for index, used, whole in each.facts["cards"]}
    missing = [slot for slot in slots if slot not in cards]
    if missing:
        says = f"{each.name} has {len(cards)} GPUs and no GPU {', '.join(map(str, missing))}"
        yield Problem(rule="preflight", says=says, mend="write the number of its GPUs as slots in the hostfile")
    for slot in slots:
        used, whole = cards.get(slot, (0, 1))
        if used > GPU_MEMORY_TAKEN * whole:
            says = f"GPU {slot} of {each.name} has {size_text(used)} of {size_text(whole)} in use"
            yield Problem(rule="preflight", says=says, mend=f"end what runs there, or set launch.exclude={each.name}:{slot}")


def _same_machines(seen: Sequence[HostState]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names that are one machine."""
    names: dict[str, str] = {}
    for each in seen:
        if each.facts is None:
            continue
        home = json.dumps(each.facts["home"])
        if home in names:
            yield names[home], each.name
        names.setdefault(home, each.name)


def _failed_links(each: HostState, names: Container[str]) -> dict[str, str]:
    """Those of the hosts `names` that a host does not reach, and why."""
    return {name: why for name, why in (each.links or {"failed": {}})["failed"].items() if name in names}


def _unseen_hosts(each: HostState, names: Container[str]) -> list[str]:
    """Those of the hosts `names` whose files a host does not see."""
    return [name for name in (each.links or {"unseen": ()})["unseen"] if name in names]


def _link_problems(seen: Sequence[HostState], needs: HostRequirements) -> Iterator[Problem]:
    """Yield hosts that don't reach each other, or don't share the run folder; a host that no other reaches is named once."""
    linked = [each for each in seen if each.links is not None]
    names = {each.name for each in seen}
    failures = Counter(name for each in linked for name in _failed_links(each, names))
    unreached = {name for name, count in failures.items() if count == len(linked) - 1 and count > 1}
    for name in sorted(unreached):
        says = f"{name} is reached by no other host"
        yield Problem(rule="preflight", says=says, mend="open its firewall to the other hosts, all ports")
    for each in linked:
        failed = {name: why for name, why in _failed_links(each, names).items() if name not in unreached}
        if failed:
            name, why = next(iter(failed.items()))
            more = f", nor {len(failed) - 1} more" if len(failed) > 1 else ""
            says = f"{each.name} does not reach {name}{more}: {why}"
            yield Problem(rule="preflight", says=says, mend="open the firewall between the hosts, all ports")
    unshared = [(each, unseen) for each in linked if (unseen := _unseen_hosts(each, names))]
    if unshared:
        first, unseen = unshared[0]
        says = f"{first.name} does not see what {unseen[0]} writes to {needs.folder}"
        yield Problem(rule="preflight", says=says, mend="set log.dir to a folder that all hosts share")


def all_reduce_problems(seen: Sequence[HostState], needs: HostRequirements) -> Iterator[Problem]:
    """Yield the first host's failure of the all-reduce; the others only wait for it."""
    failed = [each for each in seen if each.reduced and "problem" in each.reduced]
    if failed:
        name = "NCCL" if needs.kind == "cuda" else "gloo"
        says = f"{failed[0].name} fails in an all-reduce with the others over {name}: {(failed[0].reduced or {})['problem']}"
        yield Problem(rule="preflight", says=says, mend=f"set {name.upper()}_SOCKET_IFNAME to the interface between the hosts")


def host_notes(seen: Sequence[HostState], needs: HostRequirements, rate: float | None) -> Iterator[str]:
    """Yield what does not prevent the run; `rate` is the measured bytes/s between hosts."""
    for each in seen:
        if abs(each.drift) > CLOCK_DRIFT:
            yield f"the clock of {each.name} is {abs(each.drift):.0f} s {'ahead of' if each.drift > 0 else 'behind'} this machine's"
        free = ((each.facts or {}).get("folder") or {}).get("free")
        if free is not None and needs.save <= free < (needs.keep + 1) * needs.save:
            yield f"{each.name} has room for {free // needs.save} checkpoints, and the run needs {needs.keep + 1} while it saves one"
    if rate is not None and needs.rate is not None and rate < SLOW_SHARE * needs.rate:
        says = f"an all-reduce of {size_text(4 * ELEMENTS)} between hosts runs at {rate / 1e9:.3g} GB/s"
        yield f"{says}, and cluster.between declares {needs.rate / 1e9:.3g} GB/s a device"
