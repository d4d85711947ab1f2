"""A hostfile is read strictly: all problems are reported at once, each with its line, and the suggested fixes work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from distrain.cli.app import command
from distrain.trainer.launch.hosts.hostfile import Host, hostfile_text, include_text, read_hostfile, select_hosts
from distrain.trainer.spec.problem import Unreadable

NAMES = "a name has only letters, digits and . _ -"
CONFIG = "name the host in ~/.ssh/config, with its user, port or address, and use that name"

# The content of a hostfile, and the messages for it; {} is its path.
# fmt: off
BAD: dict[str, tuple[bytes, str]] = {
    "a count with a letter":     (b"h1 slots=8x\n",            "{} line 1: slots=8x is not a whole number: write slots=8"),
    "no slots to run on":        (b"h1 slots=0\n",             "{} line 1: slots=0 is a host without a rank: remove the line"),
    "a negative count":          (b"h1 slots=-1\n",            "{} line 1: slots=-1 is not a whole number: write slots=8"),
    "a count that is no digit":  ("h1 slots=\uff18\n".encode(), "{} line 1: slots=\uff18 is not a whole number: write slots=8"),
    "an empty count":            (b"h1 slots=\n",              "{} line 1: slots= is not a whole number: write slots=8"),
    "a list of slots":           (b"h1 slots=0,1\n",           "{} line 1: slots=0,1 is not a whole number: write slots=0"),
    "a finger that slipped":     (b"h1 slots=8888\n",
                                  "{} line 1: slots=8888 is more than 1024: a slot is a GPU, or a process on a CPU"),
    "no slots":                  (b"h1\n",                     "{} line 1: h1 has no slots: write h1 slots=8, or as many as it has"),
    "no host":                   (b"slots=8\n",                "{} line 1: no host before slots=8: write host1 slots=8"),
    "slots without =":           (b"h1 slots 8\n",
                                  "{} line 1: unknown word slots: remove it\n{} line 1: unknown word 8: write slots=8"),
    "another word":              (b"h1 gpus=8\n",              "{} line 1: unknown word gpus=8: write slots=8"),
    "a further word":            (b"h1 slots=8 max_slots=8\n", "{} line 1: unknown word max_slots=8: remove it"),
    "slots twice":               (b"h1 slots=8 slots=4\n",     "{} line 1: h1 has slots=8 and slots=4: give slots once"),
    "a host twice":              (b"h1 slots=8\n\n# h2\nH1 slots=8\n", "{} line 4: H1 is on line 1 already: give each host one line"),
    "an option of ssh":          (b"-oProxyCommand=x slots=1\n",
                                  f"{{}} line 1: -oProxyCommand=x begins with -, which ssh would read as an option: {NAMES}"),
    "two commands":              (b"h1;reboot slots=1\n",      f"{{}} line 1: h1;reboot contains ';': {NAMES}"),
    "a command inside":          (b"$(reboot) slots=1\n",      f"{{}} line 1: $(reboot) contains '$': {NAMES}"),
    "a quote":                   (b"h'1 slots=1\n",            f"{{}} line 1: h'1 contains \"'\": {NAMES}"),
    "a hidden character":        (b"h\x001 slots=1\n",         f"{{}} line 1: h\\x001 contains '\\x00': {NAMES}"),
    "a letter of another script": ("h\u0131 slots=1\n".encode(), f"{{}} line 1: h\u0131 contains '\u0131': {NAMES}"),
    "a dot at the beginning":    (b".h1 slots=1\n",            "{} line 1: .h1 begins with .: a name begins with a letter or digit"),
    "a user":                    (b"me@h1 slots=1\n",          f"{{}} line 1: me@h1 is more than a name: {CONFIG}"),
    "a port":                    (b"h1:22 slots=1\n",          f"{{}} line 1: h1:22 is more than a name: {CONFIG}"),
    "a module of pdsh's":        (b"exec:h1 slots=1\n",        f"{{}} line 1: exec:h1 is more than a name: {CONFIG}"),
    "a pattern of hosts":        (b"h[1-8] slots=1\n",         "{} line 1: h[1-8] stands for several hosts: write a line per host"),
    "not text":                  (b"h1 slots=1\nh\xff slots=1\n",
                                  "{} line 2 is not UTF-8: a hostfile is plain text with a line per host: host1 slots=8"),
    "nothing":                   (b"",                         "{} names no host: write a line per host: host1 slots=8"),
    "nothing but remarks":       (b"# h1 slots=8\n\n   \n",    "{} names no host: write a line per host: host1 slots=8"),
    "two mistakes":              (b"h1 slots=x\nh2 slots=2\nh1 slots=3\n",
                                  ("{} line 1: slots=x is not a whole number: write slots=8\n"
                                   "{} line 3: h1 is on line 1 already: give each host one line")),
    "too many hosts":            (b"h1 slots=2\nh2 slots=2\n",
                                  ("{} has 2 hosts with 2 slots each, but the cluster is 1 node x 2: "
                                   "set launch.include=h1 or launch.spares=1 or cluster=2x2 parallel.dp=auto")),
    "too few slots":             (b"h1 slots=1\n",
                                  "{} has 1 host with 1 slot, but the cluster is 1 node x 2: set cluster=1x1 parallel.dp=auto"),
    "too many slots":            (b"h1 slots=8\n",
                                  ("{} has 1 host with 8 slots, but the cluster is 1 node x 2: "
                                   "set launch.include=h1:0,1 or cluster=1x8 parallel.dp=auto")),
    "uneven":                    (b"h1 slots=1\nh2 slots=3\n",
                                  ("{} has 2 hosts with 1 and 3 slots, but the cluster is 1 node x 2: "
                                   "set launch.include=h2:0,1 or cluster=2x1 parallel.dp=auto launch.include=h1@h2:0")),
}
# fmt: on


@pytest.mark.parametrize("name", BAD)
def test_each_wrong_line_of_a_hostfile_is_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, says = BAD[name]
    file = tmp_path / "hosts"
    file.write_bytes(text)
    status = command(["show", "conf=quickstart", "launch=deepspeed", f"launch.hostfile={file}", "--launch"])
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.splitlines() == [f"distrain: {line.replace('{}', str(file))}" for line in says.splitlines()]


# fmt: off
WORDS = (
    ("launch.include=h1@h3",                 "launch.include=h1@h3 names h3, which is not in {}: known: h1, h2"),
    ("launch.include=h1@",                   "launch.include=h1@ names no host, which is not in {}: write host1@host2:0,2"),
    ("launch.exclude=h1:2",                  "launch.exclude=h1:2: h1 has no slot 2: its slots are 0 to 1"),
    ("launch.exclude=h1:0,x",                "launch.exclude=h1:0,x: h1 has no slot x: its slots are 0 to 1"),
    ("launch.include=h1:",                   "launch.include=h1:: h1 has no slot '': its slots are 0 to 1"),
    ("launch.include=h1@h1:0",               "launch.include=h1@h1:0 names h1 twice: write h1:0,1 and so on, once"),
    ("launch.exclude=h1@h2",                 "launch.exclude=h1@h2 leaves no slot of {}: leave at least one"),
    ("launch.include=h1 launch.exclude=h2",  "launch.include=h1 and launch.exclude=h2 are both given: give one of them"),
    ("launch.exclude=h1:0",                  ("launch.exclude leaves 2 hosts of {} with 1 and 2 slots, but the cluster is 1 node x 2: "
                                              "set launch.exclude=null launch.include=h2 or cluster=2x1 parallel.dp=auto "
                                              "launch.exclude=null launch.include=h1:1@h2:0")),
    ("launch.spares=2",                      ("{} has 2 hosts with 2 slots each, but the cluster is 1 node x 2 and launch.spares=2: "
                                              "set launch.spares=1 or cluster=2x2 parallel.dp=auto launch.spares=0")),
    ("launch.spares=99",                     ("{} has 2 hosts with 2 slots each, but the cluster is 1 node x 2 and launch.spares=99: "
                                              "set launch.spares=1 or cluster=2x2 parallel.dp=auto launch.spares=0")),
    ("launch.include=h1 launch.spares=1",    ("{} has 1 host with 2 slots, but the cluster is 1 node x 2 and launch.spares=1: "
                                              "set launch.spares=0 or cluster=1x2 parallel.dp=auto launch.spares=0")),
    ("launch.exclude=h2:0 launch.spares=1",  ("launch.exclude leaves 2 hosts of {} with 2 and 1 slot, but the cluster is 1 node x 2 and "
                                              "launch.spares=1: set launch.spares=0 launch.exclude=null launch.include=h1 or cluster=1x1 "
                                              "parallel.dp=auto launch.exclude=null launch.include=h1:0@h2:1")),
    ("cluster=2x2x2 launch.include=h1",      ("{} has 1 host with 2 slots, but the cluster is 4 nodes x 2 (cluster=2x2x2: data 2 x "
                                              "tensor 2 x pipeline 2 = 8 processes, 4 nodes x 2, each stage on 2 nodes): "
                                              "set cluster=1x2 parallel.dp=auto")),
)
# fmt: on


@pytest.mark.parametrize(("words", "line"), WORDS, ids=[words for words, _ in WORDS])
def test_selected_hosts_are_checked_against_the_hostfile(words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1 slots=2\nh2 slots=2\n")
    status = command(["show", "conf=quickstart", "launch=deepspeed", f"launch.hostfile={file}", *words.split(), "--launch"])
    assert (status, capsys.readouterr().err) == (2, f"distrain: {line.replace('{}', str(file))}\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "launch.hostfile={}/none",
            "launch.hostfile={}/none: no such file: name one that exists",
        ),
        ("launch.hostfile={}", "launch.hostfile={} is a folder: name a file with a line per host: host1 slots=8"),
        ("launch=local launch.spares=1", "launch.spares=1 is not read by launch=local: set launch=deepspeed"),
        ("launch=slurm launch.spares=1", "launch.spares=1 is not read by launch=slurm: set launch=deepspeed"),
        ("launch=torchrun launch.hostfile={}/none launch.spares=1", "launch.spares=1 is not read by launch=torchrun: set launch=deepspeed"),
        ("launch=local launch.hostfile={}/none", "launch.hostfile={}/none is not read by launch=local: set launch=deepspeed"),
        (
            "launch=slurm launch.include=h1",
            "launch.include=h1 is not read by launch=slurm: name hosts on sbatch's command line: --nodelist, --exclude",
        ),
        (
            "launch=deepspeed",
            (
                "launch=deepspeed needs launch.hostfile: name a file with a line per host: host1 slots=2; "
                "or set launch=local to use this machine only"
            ),
        ),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "show"])
def test_a_missing_hostfile_never_falls_back_to_this_machine(
    verb: str, words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words.replace("{}", str(tmp_path)).split()
    status = command(
        [verb, "conf=quickstart", "launch=deepspeed", *given, f"log.dir={tmp_path}", *(["--launch"] if verb == "show" else [])]
    )
    said = capsys.readouterr()
    assert status == (1 if verb == "fit" else 2)
    assert said.out == ""
    assert f"distrain: {line.replace('{}', str(tmp_path))}" in said.err.splitlines()


@pytest.mark.parametrize(
    "text",
    [
        b"h1 slots=2\nh2.example.org slots=1\n",
        b"# two hosts\r\n\r\nh1\tslots=2 # the first\r\n  h2.example.org   slots=01  \r\n",
        b"\xef\xbb\xbfh1 slots=2\nh2.example.org slots=1",
    ],
    ids=["plain", "remarks, blanks, CRLF", "a mark of UTF-8, no last newline"],
)
def test_a_good_hostfile_is_read(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(text)
    found = read_hostfile(str(tmp_path / "hosts"))
    assert found == (Host(name="h1", slots=(0, 1)), Host(name="h2.example.org", slots=(0,)))


def selected_hosts(file: str, **how: Any) -> tuple[Host, ...]:
    return select_hosts(read_hostfile(file), file, **how)


def test_hosts_keep_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b slots=2\na slots=3\nc slots=2\n")
    chosen = selected_hosts(str(tmp_path / "hosts"), nodes=2, gpus=2, include="a:0,2@b")
    assert chosen == (Host(name="b", slots=(0, 1)), Host(name="a", slots=(0, 2)))
    assert selected_hosts(str(tmp_path / "hosts"), nodes=2, gpus=2, exclude="a") == (
        Host(name="b", slots=(0, 1)),
        Host(name="c", slots=(0, 1)),
    )


@given(
    counts=some.lists(some.integers(1, 4), min_size=1, max_size=5),
    nodes=some.integers(1, 4),
    gpus=some.integers(1, 4),
    spares=some.none() | some.integers(0, 3),
    out=some.lists(some.tuples(some.integers(0, 4), some.integers(0, 3)), max_size=3, unique=True),
)
def test_every_suggested_fix_works(
    counts: list[int], nodes: int, gpus: int, spares: int | None, out: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("hosts") / "hosts"
    file.write_text("".join(f"h{at} slots={count}\n" for at, count in enumerate(counts)))
    drop: dict[int, list[int]] = {}
    for host, slot in out:
        if host < len(counts) and slot < counts[host]:
            drop.setdefault(host, []).append(slot)
    exclude = "@".join(f"h{host}:{','.join(map(str, slots))}" for host, slots in drop.items()) or None
    try:
        found = selected_hosts(str(file), nodes=nodes, gpus=gpus, spares=spares, exclude=exclude)
    except Unreadable as error:
        (problem,) = error.problems
    else:
        assert [len(host.slots) for host in found] == [gpus] * (nodes + (spares or 0))
        return
    assert spares is not None or "launch.spares" not in str(problem), "a launch without spares is not offered any"
    for mend in problem.mend.removeprefix("set ").split(" or "):
        if not mend.startswith(("launch", "cluster")):
            continue
        words = dict(word.split("=", 1) for word in mend.split())
        size = re.fullmatch(r"(\d+)x(\d+)", words.get("cluster", f"{nodes}x{gpus}"))
        assert size
        kept = None if words.get("launch.exclude") == "null" else exclude
        spared = None if spares is None else int(words.get("launch.spares", spares))
        chosen = words.get("launch.include")
        left = selected_hosts(str(file), nodes=int(size[1]), gpus=int(size[2]), spares=spared, include=chosen, exclude=kept)
        assert [len(host.slots) for host in left] == [int(size[2])] * (int(size[1]) + (spared or 0))


@given(some.lists(some.frozensets(some.integers(0, 7), min_size=1), min_size=1, max_size=4))
def test_deepspeed_parses_our_hostfile_and_include_as_meant(chosen: list[frozenset[int]]) -> None:
    """By the rules of DeepSpeed's own parsers (launcher/runner.py), written out here."""
    hosts = [Host(name=f"h{at}", slots=tuple(sorted(slots))) for at, slots in enumerate(chosen)]
    pool = {found[1]: int(found[2]) for line in hostfile_text(hosts).splitlines() if (found := re.match(r"^(\S+)\s+slots=(\d+)", line))}
    included_ = {word.split(":")[0]: [int(slot) for slot in word.split(":")[1].split(",")] for word in include_text(hosts).split("@")}
    assert {host.name: list(host.slots) for host in hosts} == included_
    assert all(set(slots) <= set(range(pool[name])) for name, slots in included_.items())
