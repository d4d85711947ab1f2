"""Secrets of the environment reach a run's ranks and nothing else: no command line, no log, no byte that the run leaves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest

from distrain.scripts.virtual_hosts import Hosts, missing
from distrain.tests.fakes.secrets import DEADLINE, EVIL, KEPT, PAUSE, TAG, Act, Fitted, Watch, elsewhere, environment, fit, holds
from distrain.trainer.launch.agent.token import FILE, JoinToken

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="command lines are read in /proc")
over_hosts = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module", autouse=True)
def began() -> float:
    """When the first test did, in seconds as files have them."""
    return time.time() - 1


# The net


def _base64(before: int, encode: Callable[[bytes], bytes], value: str) -> str:
    """A secret after so many other bytes."""
    return encode(b"\xff" * before + os.fsencode(value)).decode()


WRITTEN: dict[str, Callable[[str], str]] = {
    "itself": str,
    "JSON": json.dumps,
    "repr": repr,
    "shlex": shlex.quote,
    "percent": lambda value: quote(value, errors="surrogateescape"),
    "hex": lambda value: os.fsencode(value).hex(),
    "its end": lambda value: value[-len(TAG) :],
    **{f"base64 after {at}": partial(_base64, at, b64encode) for at in range(3)},
    **{f"urlsafe after {at}": partial(_base64, at, urlsafe_b64encode) for at in range(3)},
}


@pytest.mark.parametrize("way", WRITTEN)
def test_the_net_holds_a_secret_however_it_is_written(way: str) -> None:
    for value in environment(Path("/pwned")).values():
        assert holds(b"a line before " + os.fsencode(WRITTEN[way](value)) + b" and after")
    assert not holds(os.fsencode(WRITTEN[way]("another value of the same length, and no secret")))


def test_the_watch_sees_a_command_line_that_lives_for_a_moment(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    file = tmp_path / "launch" / "file"
    file.write_text(TAG)
    with Watch(tmp_path) as watch:
        subprocess.run(["sh", "-c", "sleep 0.5; true", TAG], check=True)
    file.unlink()
    assert any(map(holds, watch.lines))
    assert {name for name, _ in watch.holding} == {"file"}


def test_a_ticket_that_is_printed_shows_no_secret() -> None:
    ticket = JoinToken(token=TAG, doors=[], names=[], slots=[], command=[], environment=environment(Path("/pwned")))
    assert holds(ticket.written().encode())
    assert not holds(repr(ticket).encode())


# Runs


def all_is_well(fitted: Fitted, *folders: Path) -> None:
    """No secret is seen anywhere, none was acted on, and the ticket, which alone held them, has gone."""
    assert list(fitted.leaks(*folders)) == []
    assert not (fitted.folder.parent / "pwned").exists()
    assert not list((fitted.folder / "launch").glob(f"{Path(FILE).name}*"))
    assert {mode for _, mode in fitted.watch.holding} <= {0o600}
    assert all(name.startswith(Path(FILE).name) for name, _ in fitted.watch.holding)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fitted]:
    """Runs on this machine, both at once: one that trains, and one in which torch reads a variable that it does not understand."""
    with ThreadPoolExecutor() as pool:
        trained = pool.submit(fit, tmp_path_factory.mktemp("run"), "cluster=1x1", "log.sinks=[console,jsonl,wandb]")
        raised = pool.submit(fit, tmp_path_factory.mktemp("run"), "cluster=1x1", more={"TORCH_DISTRIBUTED_DEBUG": "SOME"})
    return {"trained": trained.result(), "raised": raised.result()}


def test_a_run_on_this_machine_shows_no_secret(here: dict[str, Fitted]) -> None:
    fitted = here["trained"]
    assert fitted.status == 0, fitted.said
    assert fitted.handed.items() <= fitted.watch.ranks[0][1].items()
    all_is_well(fitted)
    assert fitted.watch.holding == set()


def test_a_rank_that_raises_shows_no_secret(here: dict[str, Fitted]) -> None:
    fitted = here["raised"]
    assert fitted.status == 1, fitted.said
    assert "Traceback" in (fitted.folder / "ranks" / "0.log").read_text()
    assert fitted.handed.items() <= fitted.watch.ranks[0][1].items()
    all_is_well(fitted)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, with a slot each."""
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        made.hostfile(1)
        yield made


def over(hosts: Hosts, folder: Path, *words: str, act: Act = lambda watch: None) -> Fitted:
    """A run over both hosts."""
    given = ("cluster=2x1", "launch=deepspeed", f"launch.hostfile={hosts.folder / 'hostfile'}", *words)
    return fit(folder, *given, host=hosts.hosts[0], act=act)


def places(hosts: Hosts) -> list[Path]:
    """Where hosts have files of their own."""
    return [hosts.folder, *(Path(f"/proc/{host.pid}/root/dev/shm") for host in hosts.hosts)]


@over_hosts
def test_a_run_over_hosts_shows_no_secret(hosts: Hosts, tmp_path: Path) -> None:
    fitted = over(hosts, tmp_path)
    assert fitted.status == 0, fitted.said
    assert "an all-reduce between the hosts goes at " in fitted.said
    assert sorted(fitted.watch.ranks) == [0, 1]
    for _, known in fitted.watch.ranks.values():
        assert {name: known.get(name) for name in EVIL} == {name: fitted.handed[name] for name in EVIL}
        assert KEPT not in known
    for part in (
        b"pdsh\0-S",
        b"ssh\0-o",
        b"deepspeed.launcher.runner",
        b"deepspeed.launcher.launch\0",
        b"upload_remote.py",
        b"bin/python -\0",
    ):
        assert any(part in line for line in fitted.watch.lines), part
    all_is_well(fitted, *places(hosts))
    assert (Path(FILE).name, 0o600) in fitted.watch.holding


def killed(hosts: Hosts, folder: Path) -> Fitted:
    """A run whose rank is killed as soon as it is there."""

    def kill(watch: Watch) -> None:
        until = time.monotonic() + DEADLINE
        while not watch.ranks and time.monotonic() < until:
            time.sleep(PAUSE)
        os.kill(watch.ranks[0][0], signal.SIGKILL)

    return over(hosts, folder, "cluster=1x1", "launch.include=host1", "launch.preflight=false", act=kill)


def refused(hosts: Hosts, folder: Path) -> Fitted:
    """A run of whose hosts preflight finds one twice."""
    file = folder / "hosts; `touch pwned`"
    file.write_text(f"host1 slots=1\n{hosts.hosts[1].address} slots=1\n")
    return over(hosts, folder, f"launch.hostfile={file}")


def full(hosts: Hosts, folder: Path) -> Fitted:
    """A run of which a host has no room for all of the ticket; what is left there is moved to the folder."""
    hosts.hosts[1].run("mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(folder / "runs"))
    try:
        return over(hosts, folder / "runs", "launch.preflight=false")
    finally:
        hosts.hosts[1].run("cp", "-r", str(folder / "runs"), str(folder / "there"))
        hosts.hosts[1].run("umount", str(folder / "runs"))


@pytest.fixture(scope="module")
def ended(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fitted]:
    """Runs over hosts that come to a bad end, all at once."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(3)]
    (folders[2] / "runs").mkdir()
    with ThreadPoolExecutor() as pool:
        runs = {act.__name__: pool.submit(act, hosts, folder) for act, folder in zip((killed, refused, full), folders, strict=True)}
    return {name: run.result() for name, run in runs.items()}


@over_hosts
def test_a_run_over_hosts_whose_rank_is_killed_shows_no_secret(hosts: Hosts, ended: dict[str, Fitted]) -> None:
    fitted = ended["killed"]
    assert fitted.status == 1, fitted.said
    assert "rank 0 on host1 (device 0) was killed by SIGKILL" in fitted.said
    all_is_well(fitted, *places(hosts))
    assert (Path(FILE).name, 0o600) in fitted.watch.holding


@over_hosts
def test_a_run_that_preflight_refuses_shows_no_secret(hosts: Hosts, ended: dict[str, Fitted]) -> None:
    fitted = ended["refused"]
    assert fitted.status == 1, fitted.said
    assert f"host1 and {hosts.hosts[1].address} are the same machine" in fitted.said
    all_is_well(fitted, *places(hosts))
    assert (fitted.watch.ranks, fitted.watch.holding) == ({}, set())


@over_hosts
def test_a_host_that_can_not_take_the_ticket_leaves_none_anywhere(hosts: Hosts, ended: dict[str, Fitted]) -> None:
    """What it wrote of the ticket goes, and the other host's too."""
    fitted = ended["full"]
    assert fitted.status == 1, fitted.said
    assert f"host1 can't be used: {fitted.folder}: No space left on device" in fitted.said
    all_is_well(fitted, *places(hosts), fitted.folder.parents[1] / "there")
    assert fitted.watch.ranks == {}
    assert not list((fitted.folder.parents[1] / "there").rglob("ticket*"))


def test_no_other_file_of_this_machine_holds_a_secret(began: float, here: dict[str, Fitted], request: pytest.FixtureRequest) -> None:
    """The last test: the runs of all others have ended."""
    if not missing():
        request.getfixturevalue("ended")
    assert list(elsewhere(began, here["trained"].folder / "run.json")) == []
