"""The attempt after a machine fault: which hosts it runs on, in what size, and what the line that announces it says."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest

from distrain.tests.fakes.attempts import attempt_run
from distrain.tests.fakes.path_commands import SSH, FakeCommands
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts_and_commands import resolve_hosts
from distrain.trainer.launch.next_attempt import HostedRun, TooFewHosts, describe_change, next_attempt, preferred_hosts
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Run

GONE = "sys.exit('No route to host')"
TWICE = "at fault 2 times"
NONE: Mapping[str, str] = MappingProxyType({})


class Cluster:
    """A run over three hosts, a, b and c, one rank each, with spares d and e, whose fake ssh runs everything on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh = FakeCommands(folder / "stand_ins")
        self.ssh.put("ssh", SSH)
        self.ssh.put("pdsh", SSH)
        self.run = self.with_spares(2)

    def with_spares(self, spares: int) -> Run:
        names = "abcde"[: 3 + spares]
        (self.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
        launch = [("name", "deepspeed"), ("hostfile", str(self.folder / "hostfile")), ("spares", spares), ("preflight", False)]
        return with_changes(attempt_run("cluster=3x1"), [(f"launch.{key}", value) for key, value in launch])

    def lose(self, *names: str) -> None:
        for name in names:
            self.ssh.host(name, GONE)

    def bring_back(self, name: str) -> None:
        self.ssh.host(name, "")

    def asked(self) -> set[str]:
        """The hosts that were called since the last time."""
        found = {call["argv"][-2] for call in self.ssh.calls}
        self.ssh.forget()
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    monkeypatch.setenv("PATH", made.ssh.path())
    return made


def first_attempt(run: Run) -> HostedRun:
    return HostedRun(run=run, plan=make_plan(run), hosts=resolve_hosts(run).hosts)


def names(attempt: HostedRun) -> str:
    """The hosts of an attempt, in the order of its ranks, which they must match."""
    assert attempt.plan.world == attempt.run.cluster.nodes == len(attempt.hosts)
    assert attempt.plan.run == make_plan(attempt.run).run
    return "".join(host.name for host in attempt.hosts)


def following(whole: HostedRun, last: HostedRun | None = None, avoid: Mapping[str, str] = NONE) -> HostedRun:
    return next_attempt(whole, last or whole, avoid)


# Without spares


def test_an_avoided_host_is_left_out_and_so_is_the_rendezvous_address_on_it(cluster: Cluster) -> None:
    whole = first_attempt(with_changes(cluster.with_spares(0), [("launch.address", "10.0.0.1")]))
    attempt = following(whole, avoid={"b": TWICE})
    launch = attempt.run.launch
    assert (names(attempt), launch.include, launch.address, attempt.run.checkpoint.resume) == ("ac", "a@c", "10.0.0.1", "auto")
    assert attempt.change == ", on a, c: dp 3 -> 2, the same 12 sequences a step; without b (at fault 2 times)"
    attempt = following(whole, avoid={"a": "it could not be used"})
    assert (names(attempt), attempt.run.launch.include, attempt.run.launch.address) == ("bc", "b@c", None)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_a_smaller_run_has_whole_replicas(cluster: Cluster, axis: str) -> None:
    """Of four hosts, of which two hold a replica, three can't be used."""
    sizes = [("cluster.nodes", 4), ("launch.spares", 0), (f"parallel.{axis}", 2), ("parallel.dp", 2)]
    attempt = following(first_attempt(with_changes(cluster.with_spares(1), sizes)), avoid={"b": TWICE})
    assert (names(attempt), attempt.run.parallel.dp, getattr(attempt.run.parallel, axis)) == ("ac", 1, 2)
    assert attempt.change.startswith(", on a, c: dp 2 -> 1, the same 12 sequences a step; without b")


def test_an_avoided_host_is_used_where_the_run_needs_it(cluster: Cluster) -> None:
    run = cluster.with_spares(0)
    run = with_changes(run, [("parallel", replace(run.parallel, dp=1, pp=3)), ("model.layers", 3)])
    attempt = following(first_attempt(run), avoid={"b": TWICE})
    assert (attempt.run, names(attempt), attempt.change) == (with_changes(run, [("checkpoint.resume", "auto")]), "abc", "")


def test_no_host_is_called_once_a_stop_was_requested(cluster: Cluster) -> None:
    whole = first_attempt(cluster.run)
    with pytest.raises(TooFewHosts):
        next_attempt(whole, whole, {}, [(signal.SIGTERM, 0.0)])


def test_a_hostfile_that_no_longer_fits_the_run_is_refused(cluster: Cluster) -> None:
    whole = first_attempt(cluster.run)
    (cluster.folder / "hostfile").write_text("a slots=1\nb slots=1\n")
    with pytest.raises(Unreadable, match=r"has 2 hosts with 1 slot each, but the cluster is 3 nodes x 1 .* and launch\.spares=2"):
        following(whole)


# Spares

# fmt: off
REPLACED: tuple[tuple[str, dict[str, str], str, str], ...] = (  # hosts gone, hosts to avoid, those of the next attempt, what is said
    ("b",   {},           "acd",  ", on a, c, d: spare d for b (it can't be reached)"),
    ("",    {"b": TWICE}, "acd",  ", on a, c, d: spare d for b (at fault 2 times)"),
    ("bd",  {},           "ace",  ", on a, c, e: spare e for b (it can't be reached); without spare d (it can't be reached)"),
    ("bc",  {},           "ade",  ", on a, d, e: spare d for b (it can't be reached), spare e for c (it can't be reached)"),
    ("b",   {"d": TWICE}, "ace",  ", on a, c, e: spare e for b (it can't be reached); without spare d (at fault 2 times)"),
    ("bcd", {},           "ae",   (", on a, e: dp 3 -> 2, the same 12 sequences a step; spare e for b (it can't be reached); "
                                   "without c (it can't be reached), spare d (it can't be reached)")),
    ("bde", {"c": TWICE}, "a",    (", on a: dp 3 -> 1, the same 12 sequences a step; without b (it can't be reached), "
                                   "c (at fault 2 times), spare d (it can't be reached), spare e (it can't be reached)")),
    ("de",  {},           "abc",  ""),
)
# fmt: on


@pytest.mark.parametrize(("gone", "avoid", "used", "change"), REPLACED, ids=[f"{row[0]}-{''.join(row[1])}" for row in REPLACED])
def test_spares_replace_hosts_before_the_run_shrinks(cluster: Cluster, gone: str, avoid: dict[str, str], used: str, change: str) -> None:
    cluster.lose(*gone)
    attempt = following(first_attempt(cluster.run), avoid=avoid)
    assert (names(attempt), attempt.change) == (used, change)
    if len(used) == 3:
        assert attempt.run == with_changes(cluster.run, [("checkpoint.resume", "auto")])
    else:
        assert (attempt.run.launch.include, attempt.run.launch.spares) == ("@".join(used), 0)


def test_spares_are_not_asked_while_they_are_not_needed(cluster: Cluster) -> None:
    whole = first_attempt(cluster.run)
    following(whole)
    assert cluster.asked() == {"a", "b", "c"}
    following(whole, avoid={"b": TWICE})
    assert cluster.asked() == {"a", "b", "c", "d", "e"}


def test_a_spare_keeps_its_place_when_the_lost_host_is_back(cluster: Cluster) -> None:
    whole = first_attempt(cluster.run)
    cluster.lose("b")
    second = following(whole)
    cluster.bring_back("b")
    third = following(whole, second)
    assert (names(second), names(third), third.change) == ("acd", "acd", "")
    cluster.lose("d")
    fourth = following(whole, third)
    assert (names(fourth), fourth.change) == ("abc", ", on a, b, c: b (back) for d (it can't be reached)")


def test_the_rendezvous_address_returns_with_its_host(cluster: Cluster) -> None:
    whole = first_attempt(with_changes(cluster.run, [("launch.address", "10.0.0.1")]))
    cluster.lose("a")
    second = following(whole)
    assert (names(second), second.run.launch.address) == ("bcd", None)
    cluster.bring_back("a")
    cluster.lose("d", "e")
    third = following(whole, second)
    assert (names(third), third.run.launch.address) == ("abc", "10.0.0.1")


def test_a_spare_that_the_preflight_refuses_does_not_join(cluster: Cluster) -> None:
    """All names are this machine, so that no second one can join a run."""
    whole = first_attempt(with_changes(cluster.run, [("launch.preflight", True), ("log.dir", str(cluster.folder))]))
    cluster.lose("b")
    attempt = following(whole)
    assert names(attempt) == "ac"
    assert attempt.change == (
        ", on a, c: dp 3 -> 2, the same 12 sequences a step; without b (it can't be reached), "
        "spare d (a and d are the same machine), spare e (a and e are the same machine)"
    )
    assert [each.name for each in (cluster.folder / "run").iterdir()] == []


def test_spares_are_the_last_hosts_that_include_leaves(cluster: Cluster) -> None:
    run = with_changes(cluster.run, [("launch.exclude", "a"), ("launch.spares", 1)])
    found = resolve_hosts(run)
    assert [[host.name for host in part] for part in (found.hosts, found.spares)] == [["b", "c", "d"], ["e"]]
    cluster.lose("c")
    assert names(following(first_attempt(run))) == "bde"
    cluster.lose("e")
    smaller = following(first_attempt(run))
    assert (names(smaller), smaller.run.launch.include, smaller.run.launch.exclude) == ("bd", "b@d", None)


def test_the_last_nodes_of_a_slurm_job_are_spares(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.ssh.put("scontrol", "print('n1\\nn2\\nn3\\nn4')")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    run = with_changes(cluster.run, [("launch.hostfile", None), ("launch.spares", 1)])
    assert [host.name for host in resolve_hosts(run).spares] == ["n4"]
    cluster.lose("n2")
    assert following(first_attempt(run)).change == ", on n1, n3, n4: spare n4 for n2 (it can't be reached)"


# Growing back


def test_a_smaller_run_grows_back_once_its_hosts_are_back(cluster: Cluster) -> None:
    whole = first_attempt(cluster.with_spares(0))
    cluster.lose("b", "c")
    second = following(whole)
    assert (names(second), second.run.parallel.dp) == ("a", 1)
    cluster.bring_back("c")
    third = following(whole, second)
    assert (names(third), third.change) == ("ac", ", on a, c: dp 1 -> 2, the same 12 sequences a step; with c (back)")
    cluster.bring_back("b")
    fourth = following(whole, third)
    assert (names(fourth), fourth.change) == ("abc", ", on a, b, c: dp 2 -> 3, the same 12 sequences a step; with b (back)")
    assert fourth.run == with_changes(whole.run, [("checkpoint.resume", "auto")])
    assert fourth.plan == whole.plan


def test_a_smaller_run_does_not_grow_by_a_host_to_avoid(cluster: Cluster) -> None:
    whole = first_attempt(cluster.with_spares(0))
    second = following(whole, avoid={"b": TWICE})
    third = following(whole, second, avoid={"b": TWICE})
    assert (names(third), third.change) == ("ac", "")


def test_a_smaller_run_grows_by_spares_too(cluster: Cluster) -> None:
    whole = first_attempt(cluster.run)
    cluster.lose("b", "c", "d", "e")
    second = following(whole)
    cluster.bring_back("e")
    third = following(whole, second)
    assert (names(third), third.change) == (
        "ae",
        ", on a, e: dp 1 -> 2, the same 12 sequences a step; with spare e; without spare d (it can't be reached)",
    )


# The choice and the line, without hosts

FOUR = tuple(Host(name=name, slots=(0,)) for name in "abcd")


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_hosts_of_the_last_attempt_come_first_and_all_keep_their_order(nodes: int) -> None:
    for kinds in product(("lost", "used", "free"), repeat=4):
        usable = [host for host, kind in zip(FOUR, kinds, strict=True) if kind != "lost"]
        used = {host.name for host, kind in zip(FOUR, kinds, strict=True) if kind == "used"}
        chosen = preferred_hosts(usable, used, nodes)
        assert len(chosen) == min(nodes, len(usable))
        assert list(chosen) == sorted(chosen, key=lambda host: host.name)
        kept = [host.name in used for host in chosen]
        assert sum(kept) == min(nodes, len(used))
        free = [host.name for host in usable if host.name not in used]
        assert [host.name for host in chosen if host.name not in used] == free[: len(kept) - sum(kept)]


def test_the_line_names_the_first_of_many_hosts() -> None:
    run = attempt_run("cluster=1x2")
    hosts = tuple(Host(name=f"h{number}", slots=(0,)) for number in range(40))
    last, now = (HostedRun(run=run, plan=make_plan(run), hosts=part) for part in (hosts[:20], hosts[20:]))
    line = describe_change(last, now, {}, {host.name for host in hosts[20:]})
    assert line.startswith(", on h20, h21, h22, h23, h24, h25, h26, h27 and 12 more: spare h20 for h0 (not needed), ")
    assert line.endswith(", spare h27 for h7 (not needed) and 12 more")
