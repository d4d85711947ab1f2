"""The hosts of a run: a hostfile in DeepSpeed's format, read strictly, and the hosts and slots that launch.include or exclude select."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...spec.numbers.as_text import plural
from ...spec.problem import Problem, Unreadable, suggest_name
from ...system.regular_file import expand_home, read_plain

MOST_BYTES = 16 << 20  # of a hostfile
MOST_SLOTS = 1024  # of one host; more must be a typing error
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_COUNT = re.compile(r"[0-9]{1,6}")
_PATTERN = re.compile(r"[\[\]*?]")
NAME_RULE = "a name has only letters, digits and . _ -"
SSH_CONFIG_MEND = "name the host in ~/.ssh/config, with its user, port or address, and use that name"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host by the name that ssh uses, and the numbers of the slots that a run uses there, one rank each."""

    name: str
    slots: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the slots are numbered from 0 without a gap, as `slots=N` says."""
        return self.slots == tuple(range(len(self.slots)))


@dataclass(frozen=True, kw_only=True)
class HostCount:
    """How many hosts a run needs: one per node, each with a slot per GPU, and its spares; None where the launch has no spares."""

    nodes: int
    gpus: int
    spares: int | None

    @property
    def hosts(self) -> int:
        """All hosts, spares too."""
        return self.nodes + (self.spares or 0)


def select_hosts(
    available: Sequence[Host],
    path: str,
    *,
    nodes: int,
    gpus: int,
    spares: int | None = None,
    include: str | None = None,
    exclude: str | None = None,
    reading: str | None = None,
) -> tuple[Host, ...]:
    """Return the hosts that `include` or `exclude` leave of those in the hostfile `path`, in its order; they must match the cluster.

    The cluster has `nodes` hosts, and `spares` more follow them; None where the launch has no spares. `include` and `exclude` are in
    DeepSpeed's format, `host1@host2:0,2`: hosts separated by @, each with the slots that are meant after a colon, or with all. Raises
    Unreadable with all that is wrong.
    """
    hosts, problems = filter_hosts(available, path, include, exclude)
    if not problems:
        cluster = f"{plural(nodes, 'node')} x {gpus}{f' ({reading})' if reading else ''}"
        needed = HostCount(nodes=nodes, gpus=gpus, spares=spares)
        problems = [*_cluster_problems(hosts, available, needed, path, cluster, excluded=bool(exclude))]
    if problems:
        raise Unreadable(problems)
    return hosts


def filter_hosts(available: Sequence[Host], path: str, include: str | None, exclude: str | None) -> tuple[tuple[Host, ...], list[Problem]]:
    """Return the hosts that `include` or `exclude` leave, and what is wrong with these."""
    if include and exclude:
        says = f"launch.include={include} and launch.exclude={exclude} are both given"
        return (), [Problem(rule="include", says=says, mend="give one of them")]
    key, selection = ("include", include) if include else ("exclude", exclude)
    if not selection:
        return tuple(available), []
    problems: list[Problem] = []
    named = dict(_parse_selection(selection, available, f"launch.{key}={selection}", path, problems))
    left = tuple(host for each in available if (host := _keep_slots(each, named.get(each.name, ()), named=key == "include")).slots)
    if not left and not problems:
        problems.append(Problem(rule=key, says=f"launch.{key}={selection} leaves no slot of {path}", mend="leave at least one"))
    return left, problems


def _keep_slots(host: Host, slots: tuple[int, ...], *, named: bool) -> Host:
    """Return the host with the `slots` that were named, or with the others."""
    return Host(name=host.name, slots=tuple(slot for slot in host.slots if (slot in slots) == named))


def _parse_selection(
    selection: str, hosts: Sequence[Host], key: str, path: str, problems: list[Problem]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (host, slots) for each host of an include or exclude; append what is wrong to `problems`."""
    known, seen = {host.name: host for host in hosts}, set[str]()
    for word in selection.split("@"):
        name, colon, listed = word.partition(":")
        if name not in known:
            mend = suggest_name(name, known) if name else "write host1@host2:0,2"
            problems.append(Problem(rule="include", says=f"{key} names {name or 'no host'}, which is not in {path}", mend=mend))
            continue
        if name in seen:
            problems.append(Problem(rule="include", says=f"{key} names {name} twice", mend=f"write {name}:0,1 and so on, once"))
        seen.add(name)
        available, wanted = known[name].slots, listed.split(",")
        wrong = [each for each in wanted if not _COUNT.fullmatch(each) or int(each) not in available] if colon else []
        if wrong:
            says = f"{key}: {name} has no slot {', '.join(each or repr(each) for each in wrong)}"
            problems.append(Problem(rule="include", says=says, mend=f"its slots are {_slot_range(available)}"))
            continue
        yield name, tuple(sorted({*map(int, wanted)})) if colon else available


def _slot_range(slots: Sequence[int]) -> str:
    return f"{slots[0]} to {slots[-1]}" if len(slots) > 1 else str(slots[0])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile with all their slots; raises Unreadable with a problem for each thing that is wrong."""
    return parse_hostfile(_read_text(path), path)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile's text; messages call it `path`. Raises Unreadable."""
    hosts: dict[str, Host] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = [word for word in re.split(r"[ \t]", line.removesuffix("\r").partition("#")[0]) if word]
        if not words:
            continue
        name = words[0]
        found = [*_name_problems(name, lines), *_slot_problems(words)]
        problems += [Problem(rule="hostfile", says=f"{path} line {number}: {says}", mend=mend) for says, mend in found]
        lines.setdefault(name.lower(), number)
        if not found:
            hosts[name] = Host(name=name, slots=tuple(range(int(words[1].removeprefix("slots=")))))
    if not lines:
        problems.append(Problem(rule="hostfile", says=f"{path} names no host", mend="write a line per host: host1 slots=8"))
    if problems:
        raise Unreadable(problems)
    return tuple(hosts.values())


def _read_text(path: str) -> str:
    try:
        return read_plain(expand_home(path), MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        says, mend = f"{path} line {line} is not UTF-8", "a hostfile is plain text with a line per host: host1 slots=8"
    except IsADirectoryError:
        says, mend = f"launch.hostfile={path} is a folder", "name a file with a line per host: host1 slots=8"
    except FileNotFoundError:
        says, mend = f"launch.hostfile={path}: no such file", "name one that exists"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        says, mend = f"launch.hostfile={path} can't be read: {why}", "name a file with a line per host: host1 slots=8"
    raise Unreadable([Problem(rule="hostfile", says=says, mend=mend)])


def _name_problems(name: str, lines: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, the fix) of a host's name, which goes to ssh and, through pdsh, to a remote shell."""
    if name.startswith("slots="):
        yield f"no host before {name}", f"write host1 {name}"
    elif name.startswith("-"):
        yield f"{name} begins with -, which ssh would read as an option", NAME_RULE
    elif "@" in name or ":" in name:
        yield f"{name} is more than a name", SSH_CONFIG_MEND
    elif _PATTERN.search(name):
        yield f"{name} stands for several hosts", "write a line per host"
    elif odd := _UNSAFE.search(name):
        yield f"{name} contains {odd[0]!r}", NAME_RULE
    elif not name[0].isalnum():
        yield f"{name} begins with {name[0]}", "a name begins with a letter or digit"
    elif name.lower() in lines:
        yield f"{name} is on line {lines[name.lower()]} already", "give each host one line"


def _slot_problems(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, the fix) of the words after a host's name."""
    name, *rest = words
    slots = [word for word in rest if word.startswith("slots=")]
    if name.startswith("slots="):
        return
    for word in rest:
        if word not in slots:
            number = re.search(r"[0-9]+$", word)
            yield f"unknown word {word}", f"write slots={number[0]}" if number and not slots else "remove it"
    if len(slots) > 1:
        yield f"{name} has {' and '.join(slots)}", "give slots once"
    elif slots:
        yield from _slot_count_problems(slots[0].removeprefix("slots="))
    elif not rest:
        yield f"{name} has no slots", f"write {name} slots=8, or as many as it has"


def _slot_count_problems(value: str) -> Iterator[tuple[str, str]]:
    if not _COUNT.fullmatch(value):
        digits = re.match(r"[0-9]+", value)
        yield f"slots={value} is not a whole number", f"write slots={digits[0] if digits else 8}"
    elif int(value) == 0:
        yield "slots=0 is a host without a rank", "remove the line"
    elif int(value) > MOST_SLOTS:
        yield f"slots={value} is more than {MOST_SLOTS}", "a slot is a GPU, or a process on a CPU"


def _cluster_problems(
    hosts: Sequence[Host], available: Sequence[Host], needed: HostCount, path: str, cluster: str, *, excluded: bool
) -> Iterator[Problem]:
    """Yield the problem of hosts that do not match the cluster: one per node and spare, with a slot per GPU."""
    counts = [len(host.slots) for host in hosts]
    if len(counts) == needed.hosts and set(counts) == {needed.gpus}:
        return
    slots = "slot" if counts[-1] == 1 else "slots"
    each = f"{counts[0]} {slots}{' each' if len(counts) > 1 else ''}" if len(set(counts)) == 1 else f"{_count_list(counts)} {slots}"
    number = plural(len(hosts), "host")
    left = f"launch.exclude leaves {number} of {path}" if excluded else f"{path} has {number}"
    spares = f" and launch.spares={needed.spares}" if needed.spares else ""
    says = f"{left} with {each}, but the cluster is {cluster}{spares}"
    yield Problem(rule="hostfile", says=says, mend=f"set {' or '.join(_fitting_overrides(hosts, available, needed, excluded=excluded))}")


def _count_list(counts: Sequence[int]) -> str:
    """Slot counts that differ, as 8, 8 and 4; a range where there are more than four."""
    if len(counts) <= 4:
        return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
    return f"{min(counts)} to {max(counts)}"


def _fitting_overrides(hosts: Sequence[Host], available: Sequence[Host], needed: HostCount, *, excluded: bool) -> Iterator[str]:
    """Yield overrides under which the hosts match the cluster."""
    drop = "launch.exclude=null " if excluded else ""
    enough = [first_slots(host, needed.gpus) for host in hosts if len(host.slots) >= needed.gpus]
    if len(enough) >= needed.hosts:
        yield f"{drop}launch.include={include_text(enough[: needed.hosts], available)}"
    more = len(enough) - needed.nodes
    if needed.spares is not None and more >= 0 and more != needed.spares:
        cut = f" {drop}launch.include={include_text(enough, available)}" if enough != list(hosts) else ""
        yield f"launch.spares={more}{cut}"
    least = min(len(host.slots) for host in hosts)
    uneven = any(len(host.slots) > least for host in hosts)
    cut = f" {drop}launch.include={include_text([first_slots(host, least) for host in hosts], available)}" if uneven else ""
    spares = needed.spares or 0
    none = " launch.spares=0" if spares >= len(hosts) else ""
    yield f"cluster={len(hosts) if none else len(hosts) - spares}x{least} parallel.dp=auto{none}{cut}"


def first_slots(host: Host, slots: int) -> Host:
    """Return the host with the first of its slots."""
    return Host(name=host.name, slots=host.slots[:slots])


def include_text(hosts: Sequence[Host], available: Sequence[Host] = ()) -> str:
    """Return the launch.include that selects these hosts and slots; a host with all its slots in `available` goes by its name alone."""
    whole = {host.name: host.slots for host in available}
    return "@".join(host.name if host.slots == whole.get(host.name) else f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)


def hostfile_text(hosts: Sequence[Host]) -> str:
    """Return the hosts as a hostfile. It cannot skip a slot below the last: `include_text` goes with it for that."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts)
