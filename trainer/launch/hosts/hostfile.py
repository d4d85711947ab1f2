"""The hosts of a run: a hostfile in DeepSpeed's form, read strictly, and which of its hosts and slots a run takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...spec.plain_file import expanded, read_plain
from ...spec.problem import Problem, Unreadable, nearest

MOST_BYTES = 16 << 20  # of a hostfile
MOST_SLOTS = 1024  # of one host; more is a slip of the finger
_ODD = re.compile(r"[^A-Za-z0-9._-]")
_COUNT = re.compile(r"[0-9]{1,6}")
_HOSTLIST = re.compile(r"[\[\]*?]")
NAMES = "a name is of letters, digits and . _ -"
CONFIG = "give the host a name in ~/.ssh/config, and its user, port or address there"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as ssh is told it, and the numbers of its slots that are taken, one rank each."""

    name: str
    slots: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether the slots are the first ones, as `slots=N` says."""
        return self.slots == tuple(range(len(self.slots)))


def hosts_of(
    there: Sequence[Host],
    path: str,
    *,
    nodes: int,
    gpus: int,
    include: str | None = None,
    exclude: str | None = None,
    reading: str | None = None,
) -> tuple[Host, ...]:
    """Of the hosts of a hostfile, in its order, what `include` or `exclude` leaves: as many as nodes, each with as many slots as
    a node has GPUs. Raises Unreadable with all that is wrong.

    Both are in DeepSpeed's form, `host1@host2:0,2`: hosts between @, after a colon the slots that are meant, without it all.
    """
    hosts, problems = _filtered(there, path, include, exclude)
    if not problems:
        cluster = f"{nodes} {'node' if nodes == 1 else 'nodes'} x {gpus}{f' ({reading})' if reading else ''}"
        problems = [*_unfitting(hosts, there, nodes, gpus, path, cluster, excluded=bool(exclude))]
    if problems:
        raise Unreadable(problems)
    return hosts


def _filtered(there: Sequence[Host], path: str, include: str | None, exclude: str | None) -> tuple[tuple[Host, ...], list[Problem]]:
    if include and exclude:
        says = f"launch.include={include} and launch.exclude={exclude} are both given"
        return (), [Problem(rule="include", says=says, mend="give one of them")]
    key, words = ("include", include) if include else ("exclude", exclude)
    if not words:
        return tuple(there), []
    problems: list[Problem] = []
    named = dict(_named(words, there, f"launch.{key}={words}", path, problems))
    left = tuple(host for each in there if (host := _left(each, named, takes=key == "include")).slots)
    if not left and not problems:
        problems.append(Problem(rule=key, says=f"launch.{key}={words} leaves nothing of {path}", mend="leave a slot"))
    return left, problems


def _left(host: Host, named: dict[str, tuple[int, ...]], *, takes: bool) -> Host:
    slots = named.get(host.name, ())
    return Host(name=host.name, slots=tuple(slot for slot in host.slots if (slot in slots) == takes))


def _named(words: str, hosts: Sequence[Host], key: str, path: str, problems: list[Problem]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(host, slots) of each word of an include or exclude."""
    known, seen = {host.name: host for host in hosts}, set[str]()
    for word in words.split("@"):
        name, colon, listed = word.partition(":")
        if name not in known:
            mend = nearest(name, known) if name else "write host1@host2:0,2"
            problems.append(Problem(rule="include", says=f"{key} names {name or 'no host'}, which {path} has not", mend=mend))
            continue
        if name in seen:
            problems.append(Problem(rule="include", says=f"{key} names {name} twice", mend=f"write {name}:0,1 and so on, once"))
        seen.add(name)
        there, wanted = known[name].slots, listed.split(",")
        wrong = [each for each in wanted if not _COUNT.fullmatch(each) or int(each) not in there] if colon else []
        if wrong:
            says = f"{key}: {name} has no slot {', '.join(each or 'without a number' for each in wrong)}"
            problems.append(Problem(rule="include", says=says, mend=f"its slots are {_range(there)}"))
            continue
        yield name, tuple(sorted({*map(int, wanted)})) if colon else there


def _range(slots: Sequence[int]) -> str:
    return f"{slots[0]} to {slots[-1]}" if len(slots) > 1 else str(slots[0])


def read_hosts(path: str) -> tuple[Host, ...]:
    """The hosts of a hostfile with all their slots; raises Unreadable with a line for each thing that is wrong."""
    return read_text(_text(path), path)


def read_text(text: str, path: str) -> tuple[Host, ...]:
    """The same of a hostfile's text; `path` is what it is called."""
    hosts: dict[str, Host] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = [word for word in re.split(r"[ \t]", line.removesuffix("\r").partition("#")[0]) if word]
        if not words:
            continue
        name = words[0]
        found = [*_name(name, lines), *_wrong(words)]
        problems += [Problem(rule="hostfile", says=f"{path} line {number}: {says}", mend=mend) for says, mend in found]
        lines.setdefault(name.lower(), number)
        if not found:
            hosts[name] = Host(name=name, slots=tuple(range(int(words[1].removeprefix("slots=")))))
    if not lines:
        problems.append(Problem(rule="hostfile", says=f"{path} names no host", mend="write a line a host: host1 slots=8"))
    if problems:
        raise Unreadable(problems)
    return tuple(hosts.values())


def _text(path: str) -> str:
    try:
        return read_plain(expanded(path), MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        says, mend = f"{path} line {line} is not UTF-8", "a hostfile is plain text, a line a host: host1 slots=8"
    except IsADirectoryError:
        says, mend = f"launch.hostfile={path} is a folder", "name a file, a line a host: host1 slots=8"
    except FileNotFoundError:
        says, mend = f"launch.hostfile={path}: no such file", "name one that exists, or set launch=local for this machine alone"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        says, mend = f"launch.hostfile={path} can't be read: {why}", "name a file, a line a host: host1 slots=8"
    raise Unreadable([Problem(rule="hostfile", says=says, mend=mend)])


def _name(name: str, lines: dict[str, int]) -> Iterator[tuple[str, str]]:
    """What is wrong with a host's name: it is handed to ssh, and by pdsh to a remote shell."""
    if name.startswith("slots="):
        yield f"no host before {name}", f"write host1 {name}"
    elif name.startswith("-"):
        yield f"{name} begins with -, which ssh would take for an option", NAMES
    elif "@" in name or ":" in name:
        yield f"{name} is more than a name", CONFIG
    elif _HOSTLIST.search(name):
        yield f"{name} stands for several hosts", "write a line a host"
    elif odd := _ODD.search(name):
        yield f"{name} holds {odd[0]!r}", NAMES
    elif not name[0].isalnum():
        yield f"{name} begins with {name[0]}", "a name begins with a letter or digit"
    elif name.lower() in lines:
        yield f"{name} is on line {lines[name.lower()]} already", "give each host one line"


def _wrong(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with what follows a host's name."""
    name, *rest = words
    slots = [word for word in rest if word.startswith("slots=")]
    if name.startswith("slots="):
        return
    for word in rest:
        if word not in slots:
            number = re.search(r"[0-9]+$", word)
            yield f"no word {word}", f"write slots={number[0]}" if number and not slots else "leave it out"
    if len(slots) > 1:
        yield f"{name} has {' and '.join(slots)}", "give slots once"
    elif slots:
        yield from _count(slots[0].removeprefix("slots="))
    elif not rest:
        yield f"{name} has no slots", f"write {name} slots=8, or however many it has"


def _count(value: str) -> Iterator[tuple[str, str]]:
    if not _COUNT.fullmatch(value):
        digits = re.match(r"[0-9]+", value)
        yield f"slots={value} is not a whole number", f"write slots={digits[0] if digits else 8}"
    elif int(value) == 0:
        yield "slots=0 is a host without a rank", "leave the line out"
    elif int(value) > MOST_SLOTS:
        yield f"slots={value} is more than {MOST_SLOTS}", "a slot is a GPU, or a process on a CPU"


def _unfitting(
    hosts: Sequence[Host], there: Sequence[Host], nodes: int, gpus: int, path: str, cluster: str, *, excluded: bool
) -> Iterator[Problem]:
    """That the hosts are not the cluster: as many of them as nodes, as many slots each as a node has GPUs."""
    counts = [len(host.slots) for host in hosts]
    if len(counts) == nodes and set(counts) == {gpus}:
        return
    left = f"launch.exclude leaves of {path}" if excluded else f"{path} has"
    slots = "slot" if counts[-1] == 1 else "slots"
    each = f"{counts[0]} {slots}{' each' if len(counts) > 1 else ''}" if len(set(counts)) == 1 else f"{_listed(counts)} {slots}"
    says = f"{left} {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'} with {each}, but the cluster is {cluster}"
    yield Problem(rule="hostfile", says=says, mend=f"set {' or '.join(_fitting(hosts, there, nodes, gpus, excluded=excluded))}")


def _listed(counts: Sequence[int]) -> str:
    """Counts that differ: 8, 8 and 4; of many hosts how many have how many."""
    if len(counts) <= 4:
        return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
    return f"{min(counts)} to {max(counts)}"


def _fitting(hosts: Sequence[Host], there: Sequence[Host], nodes: int, gpus: int, *, excluded: bool) -> Iterator[str]:
    """Words under which hosts and cluster are one."""
    drop = "launch.exclude=null " if excluded else ""
    enough = [_first(host, gpus) for host in hosts if len(host.slots) >= gpus][:nodes]
    if len(enough) == nodes:
        yield f"{drop}launch.include={included(enough, there)}"
    least = min(len(host.slots) for host in hosts)
    uneven = any(len(host.slots) > least for host in hosts)
    cut = f" {drop}launch.include={included([_first(host, least) for host in hosts], there)}" if uneven else ""
    yield f"cluster={len(hosts)}x{least} parallel.dp=auto{cut}"


def _first(host: Host, slots: int) -> Host:
    return Host(name=host.name, slots=host.slots[:slots])


def included(hosts: Sequence[Host], of: Sequence[Host] = ()) -> str:
    """The words of launch.include that take these hosts and slots; a host that is whole in `of` goes by its name alone."""
    whole = {host.name: host.slots for host in of}
    return "@".join(host.name if host.slots == whole.get(host.name) else f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)


def written(hosts: Sequence[Host]) -> str:
    """The hosts as DeepSpeed's hostfile; slots below the last that are not taken are left out by `included` beside it."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts)
