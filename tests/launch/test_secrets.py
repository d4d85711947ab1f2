"""Secrets in the environment reach a run's ranks and nothing else: no command line, no log, no file that the run leaves."""

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

from distrain.scripts.virtual_hosts import VirtualHosts, missing_tools
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.secrets import (
    HOSTILE_VALUES,
    PAUSE,
    TAG,
    UNNAMED,
    Act,
    FitRun,
    Watch,
    fit,
    has_secret,
    secret_files_elsewhere,
    secret_variables,
)
from distrain.trainer.launch.agent.join_token import JOIN_TOKEN_FILE, JoinToken

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="command lines are read in /proc")
over_hosts = pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())


@pytest.fixture(scope="module", autouse=True)
def started_at() -> float:
    """The time before the first test, in seconds like the times of files."""
    return time.time() - 1


# The search for secrets


def _base64(before: int, encode: Callable[[bytes], bytes], value: str) -> str:
    """Return the base64 of a secret that follows so many other bytes."""
    return encode(b"\xff" * before + os.fsencode(value)).decode()


ENCODINGS: dict[str, Callable[[str], str]] = {
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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_secret_is_found_in_every_encoding(encoding: str) -> None:
    for value in secret_variables(Path("/pwned")).values():
        assert has_secret(b"a line before " + os.fsencode(ENCODINGS[encoding](value)) + b" and after")
    assert not has_secret(os.fsencode(ENCODINGS[encoding]("another value of the same length, and no secret")))


def test_the_watch_sees_the_command_line_of_a_short_process(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    file = tmp_path / "launch" / "file"
    file.write_text(TAG)
    with Watch(tmp_path) as watch:
        subprocess.run(["sh", "-c", "sleep 0.5; true", TAG], check=True)
    file.unlink()
    assert any(map(has_secret, watch.command_lines))
    assert {name for name, _ in watch.secret_files} == {"file"}


def test_the_repr_of_a_join_token_shows_no_secret() -> None:
    token = JoinToken(secret=TAG, controllers=[], hostnames=[], slots=[], command=[], environment=secret_variables(Path("/pwned")))
    assert has_secret(token.text().encode())
    assert not has_secret(repr(token).encode())


# Runs


def assert_no_leak(run: FitRun, *folders: Path) -> None:
    """Check that no secret was seen anywhere, no shell acted on one, and the join token, the only file with secrets, is removed."""
    assert list(run.leaks(*folders)) == []
    assert not (run.folder.parent / "pwned").exists()
    assert not list((run.folder / "launch").glob(f"{Path(JOIN_TOKEN_FILE).name}*"))
    assert {mode for _, mode in run.watch.secret_files} <= {0o600}
    assert all(name.startswith(Path(JOIN_TOKEN_FILE).name) for name, _ in run.watch.secret_files)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FitRun]:
    """Two concurrent runs on this machine: one trains, and in the other torch raises at a variable with an invalid value."""
    with ThreadPoolExecutor() as pool:
        trained = pool.submit(fit, tmp_path_factory.mktemp("run"), "cluster=1x1", "log.sinks=[console,jsonl,wandb]")
        raised = pool.submit(fit, tmp_path_factory.mktemp("run"), "cluster=1x1", variables={"TORCH_DISTRIBUTED_DEBUG": "SOME"})
    return {"trained": trained.result(), "raised": raised.result()}


def test_a_run_on_this_machine_shows_no_secret(here: dict[str, FitRun]) -> None:
    run = here["trained"]
    assert run.status == 0, run.output
    assert run.secrets.items() <= run.watch.ranks[0][1].items()
    assert_no_leak(run)
    assert run.watch.secret_files == set()


def test_a_rank_that_raises_shows_no_secret(here: dict[str, FitRun]) -> None:
    run = here["raised"]
    assert run.status == 1, run.output
    assert "Traceback" in (run.folder / "ranks" / "0.log").read_text()
    assert run.secrets.items() <= run.watch.ranks[0][1].items()
    assert_no_leak(run)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    """Two hosts with one slot each."""
    with VirtualHosts(2, tmp_path_factory.mktemp("hosts")) as made:
        made.write_hostfile(1)
        yield made


def fit_on_hosts(hosts: VirtualHosts, folder: Path, *overrides: str, act: Act = lambda watch: None) -> FitRun:
    """Run `distrain fit` on both hosts."""
    launch = ("cluster=2x1", "launch=deepspeed", f"launch.hostfile={hosts.folder / 'hostfile'}", *overrides)
    return fit(folder, *launch, host=hosts.hosts[0], act=act)


def host_folders(hosts: VirtualHosts) -> list[Path]:
    """Return the folders in which hosts have files of their own."""
    return [hosts.folder, *(Path(f"/proc/{host.pid}/root/dev/shm") for host in hosts.hosts)]


WATCHED = (b"pdsh\0-S", b"ssh\0-o", b"deepspeed.launcher.runner", b"deepspeed.launcher.launch\0", b"upload_remote.py", b"bin/python -\0")


@over_hosts
def test_a_run_over_hosts_shows_no_secret(hosts: VirtualHosts, tmp_path: Path) -> None:
    unseen = set(WATCHED)
    for number in range(3):  # on a busy machine the watch may miss a short process
        (folder := tmp_path / str(number)).mkdir()
        run = fit_on_hosts(hosts, folder)
        unseen -= {part for part in unseen if any(part in line for line in run.watch.command_lines)}
        if not unseen:
            break
    assert not unseen
    assert run.status == 0, run.output
    assert "an all-reduce between the hosts runs at " in run.output
    assert sorted(run.watch.ranks) == [0, 1]
    for _, variables in run.watch.ranks.values():
        assert {name: variables.get(name) for name in HOSTILE_VALUES} == {name: run.secrets[name] for name in HOSTILE_VALUES}
        assert UNNAMED not in variables
    assert_no_leak(run, *host_folders(hosts))
    assert (Path(JOIN_TOKEN_FILE).name, 0o600) in run.watch.secret_files


def fit_with_killed_rank(hosts: VirtualHosts, folder: Path) -> FitRun:
    """Kill a run's rank as soon as it has started."""

    def kill(watch: Watch) -> None:
        deadline = time.monotonic() + DEADLINE
        while not watch.ranks and time.monotonic() < deadline:
            time.sleep(PAUSE)
        os.kill(watch.ranks[0][0], signal.SIGKILL)

    without_end = "train.steps=1000000"
    return fit_on_hosts(hosts, folder, "cluster=1x1", "launch.include=host1", "launch.preflight=false", without_end, act=kill)


def fit_refused_by_preflight(hosts: VirtualHosts, folder: Path) -> FitRun:
    """Run with a hostfile that names one host twice, which preflight refuses."""
    file = folder / "hosts; `touch pwned`"
    file.write_text(f"host1 slots=1\n{hosts.hosts[1].address} slots=1\n")
    return fit_on_hosts(hosts, folder, f"launch.hostfile={file}")


def fit_with_full_disk(hosts: VirtualHosts, folder: Path) -> FitRun:
    """Run with a host whose disk has no room for the join token; what is left there is copied to the folder."""
    hosts.hosts[1].run("mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(folder / "runs"))
    try:
        return fit_on_hosts(hosts, folder / "runs", "launch.preflight=false")
    finally:
        hosts.hosts[1].run("cp", "-r", str(folder / "runs"), str(folder / "there"))
        hosts.hosts[1].run("umount", "-l", str(folder / "runs"))


@pytest.fixture(scope="module")
def failed_runs(hosts: VirtualHosts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FitRun]:
    """Three concurrent runs over hosts that fail."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(3)]
    (folders[2] / "runs").mkdir()
    with ThreadPoolExecutor() as pool:
        runs = {
            act.__name__: pool.submit(act, hosts, folder)
            for act, folder in zip((fit_with_killed_rank, fit_refused_by_preflight, fit_with_full_disk), folders, strict=True)
        }
    return {name: each.result() for name, each in runs.items()}


@over_hosts
def test_a_run_over_hosts_whose_rank_is_killed_shows_no_secret(hosts: VirtualHosts, failed_runs: dict[str, FitRun]) -> None:
    run = failed_runs["fit_with_killed_rank"]
    assert run.status == 1, run.output
    assert "rank 0 on host1 (device 0) was killed by SIGKILL" in run.output
    assert_no_leak(run, *host_folders(hosts))
    assert (Path(JOIN_TOKEN_FILE).name, 0o600) in run.watch.secret_files


@over_hosts
def test_a_run_that_preflight_refuses_shows_no_secret(hosts: VirtualHosts, failed_runs: dict[str, FitRun]) -> None:
    run = failed_runs["fit_refused_by_preflight"]
    assert run.status == 1, run.output
    assert f"host1 and {hosts.hosts[1].address} are the same machine" in run.output
    assert_no_leak(run, *host_folders(hosts))
    assert (run.watch.ranks, run.watch.secret_files) == ({}, set())


@over_hosts
def test_a_host_without_room_for_the_join_token_leaves_none_anywhere(hosts: VirtualHosts, failed_runs: dict[str, FitRun]) -> None:
    """The part that it wrote is removed, and the other host's token too."""
    run = failed_runs["fit_with_full_disk"]
    assert run.status == 1, run.output
    assert f"host1 can't be used: {run.folder}: No space left on device" in run.output
    assert_no_leak(run, *host_folders(hosts), run.folder.parents[1] / "there")
    assert run.watch.ranks == {}
    assert not list((run.folder.parents[1] / "there").rglob("ticket*"))


def test_no_other_file_of_this_machine_holds_a_secret(started_at: float, here: dict[str, FitRun], request: pytest.FixtureRequest) -> None:
    """This test is the last: the runs of all others have ended."""
    if not missing_tools():
        request.getfixturevalue("failed_runs")
    assert list(secret_files_elsewhere(started_at, here["trained"].folder / "run.json")) == []
