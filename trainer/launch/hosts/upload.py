"""Writes a run's files on all of its hosts over ssh, or on none: `upload_remote.py` runs on each host and writes there."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...system.stop_requests import StopRequests, collect_stop_requests
from .shell_safe import require_shell_safe
from .ssh import Ssh, SshInterrupted, run_concurrently

UPLOAD_REMOTE = Path(__file__).with_name("upload_remote.py")
HOST_SECONDS = 60.0  # for a host to answer, and to write a few files
ROLL_BACK_SECONDS = 5.0  # to remove them


class UnreachableHosts(Exception):
    """Some hosts can't be written to; the message says why, in one line."""

    def __init__(self, hosts: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.hosts = tuple(hosts)


class Connection:
    """An ssh to a host, on which `upload_remote.py` runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._uploaded = False
        words = (
            require_shell_safe(sys.executable, "the Python", "install distrain at a path of only these characters"),
            "-I",
            "-S",
            require_shell_safe(str(UPLOAD_REMOTE), "the path", ""),
        )
        self.ssh = Ssh(name, " ".join(words))
        self._process = self.ssh.process

    def identify(self) -> None:
        """Read the host's own name, its address, and this machine's address as the host sees it. Raises OSError."""
        answer = self._answer("connection")
        words, self.hostname = str(answer["connection"]).split(), str(answer.get("name", ""))
        if len(words) != 4:
            raise OSError("its ssh server sets no SSH_CONNECTION")
        self.controller_address, self.address = words[0], words[2]

    def upload(self, folder: Path, files: Mapping[str, str]) -> None:
        """Write these files into a folder of the host, until they are rolled back. Raises OSError."""
        self._uploaded = True
        self._send({"folder": str(folder), "files": dict(files)})
        self._answer("written")

    def commit(self) -> None:
        """Keep the uploaded files: every host has its own. Raises OSError."""
        if self._uploaded:
            self._send("keep")
            self._answer("kept")

    def roll_back(self) -> None:
        """Remove the uploaded files. Raises OSError."""
        if self._uploaded:
            self._send("back")
            self._answer("removed")

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(message)}\n".encode())
        self._process.stdin.flush()

    def _answer(self, key: str) -> dict[str, Any]:
        """Read the JSON line that has `key`; skip what a login shell prints before it. Raises OSError."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if isinstance(answer, dict) and "problem" in answer:
                raise OSError(answer["problem"])
            if isinstance(answer, dict) and key in answer:
                return answer
        lines = self._process.stderr.read().decode(errors="replace").splitlines()
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else "ended with no message"
        raise OSError(next((line.strip() for line in reversed(lines) if line.strip()), f"ssh {how}"))


@contextmanager
def connect_hosts(names: Sequence[str], stop_requests: StopRequests | None = None) -> Iterator[list[Connection]]:
    """Connect to all hosts while the block runs, and commit what it uploaded; where it fails, roll all of it back.

    Raises UnreachableHosts with all that can't be reached, SshInterrupted once a stop is requested, and OSError where ssh can't
    be started.
    """
    connections: list[Connection] = []
    try:
        for name in names:
            connections.append(Connection(name))
        on_every_host(connections, Connection.identify, stop_requests)
        yield connections
        on_every_host(connections, Connection.commit, stop_requests)
    except BaseException:
        with suppress(UnreachableHosts):
            on_every_host(connections, Connection.roll_back, seconds=ROLL_BACK_SECONDS)
        raise
    finally:
        for each in connections:
            each.ssh.close()


def reachable_hosts(names: Sequence[str], stop_requests: StopRequests | None = None) -> tuple[str, ...]:
    """Return the hosts that answer over ssh; none once a stop is requested.

    Without `stop_requests`, a stop signal that arrives meanwhile is sent to this process again afterwards.
    """
    with collect_stop_requests(stop_requests) as requests:
        try:
            with connect_hosts(names, requests):
                reachable = tuple(names)
        except UnreachableHosts as error:
            reachable = tuple(name for name in names if name not in error.hosts)
        except (OSError, SshInterrupted):
            reachable = ()
    if requests and stop_requests is None:
        os.kill(os.getpid(), requests[0][0])
    return reachable


def on_every_host(
    connections: Sequence[Connection],
    act: Callable[[Connection], object],
    stop_requests: StopRequests | None = None,
    seconds: float | None = None,
) -> None:
    """Do `act` on all hosts at once. Raises UnreachableHosts with all on which it failed, SshInterrupted once a stop is requested.

    `seconds` is the time limit, by default HOST_SECONDS.
    """
    limit = HOST_SECONDS if seconds is None else seconds

    def failure(each: Connection) -> str:
        try:
            act(each)
        except (OSError, ValueError) as error:
            return str(error) or repr(error)
        return ""

    acts = [(each.ssh, partial(failure, each)) for each in connections]
    failures = run_concurrently(acts, limit, lambda: bool(stop_requests))
    if stop_requests:
        raise SshInterrupted(stop_requests[0][0])
    failed = [(each.name, why) for each, why in zip(connections, failures, strict=True) if why != ""]
    if failed:
        says = "; ".join(f"{name} can't be used: {f'no answer in {limit:.0f} s' if why is None else why}" for name, why in failed[:4])
        raise UnreachableHosts([name for name, _ in failed], says + (f"; nor can {len(failed) - 4} more" if len(failed) > 4 else ""))
