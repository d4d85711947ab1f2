"""Measures the devices of several hosts and the links between them: a program on each host (`machine/calibrate_host.py`), over ssh.

All hosts reach a stage before any goes on: they measure their devices at the same time, and then the links. Where one fails, all end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any

from ..machine.calibrate_host import MARK
from ..machine.cluster_measurement import ClusterMeasurement, cluster_measurement
from ..machine.measurement import PATIENCE, DeviceMeasurement, Kind
from ..spec.numbers.as_text import plural
from ..spec.problem import Problem
from ..system.stop_requests import StopRequests, collect_stop_requests
from .hosts.hostfile import Host
from .hosts.ssh import Ssh, SshInterrupted, run_concurrently
from .preflight.checks import HostRequirements, HostState, device_kind
from .preflight.preflight import LINK_VARIABLES, check_hosts

MODULE = "distrain.trainer.machine.calibrate_host"
FABRIC_VARIABLES = (*LINK_VARIABLES, "FI_", "UCX_", "IB_")  # prefixes of this shell's variables that hosts get too
HOST_SECONDS = 5.0  # beyond the time limit, after which a program ends by itself
OTHERS_SECONDS = 1.0  # after a host's failure, for others to say that they failed as well
LAST_LINES = 20  # of a host's stderr


def measure_hosts(
    hosts: Sequence[Host],
    kind: Kind | None,
    show: Callable[[str], object],
    *,
    seconds: float = PATIENCE,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> ClusterMeasurement | tuple[Problem, ...]:
    """Measure the slots of all hosts; `kind` None is GPUs where the hosts have them. Return the problems where that fails.

    `show` is called with what is measured next; `sizes` are changes of the probe's sizes (`device_probe.ProbeSizes`).

    Raises SshInterrupted once a stop is requested. No process is left on a host: each ends with its ssh, or after `seconds`.
    """
    needs = HostRequirements(python=sys.executable, folder=None, kind=kind, save=0, keep=0)
    with collect_stop_requests() as requests:
        seen, problems = check_hosts(hosts, needs, requests)
        probes = HostProbes(seen, kind or device_kind(seen), sizes, show)
        if not problems and not requests:
            problems = probes.run(seconds, requests)
        if requests:
            raise SshInterrupted(requests[0][0])
    return tuple(problems) or probes.measurement()


@dataclass(kw_only=True)
class HostProbe:
    """The program on one host, and what it has answered."""

    state: HostState
    ssh: Ssh
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    stages: dict[str, Any] = field(default_factory=dict)  # those that it has reached, by name
    found: dict[str, Any] | None = None
    links: list[dict[str, Any]] | None = None
    size: int = 0  # bytes of the long all-reduces
    problem: Problem | None = None

    @property
    def name(self) -> str:
        """The host's name."""
        return self.state.name

    @property
    def has_ended(self) -> bool:
        """Whether it has answered all, or failed."""
        return self.problem is not None or self.links is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line; a host that has gone is noticed where its answers are read."""
        assert self.ssh.process.stdin is not None
        with suppress(OSError, ValueError):
            self.ssh.process.stdin.write(f"{json.dumps(message)}\n".encode())
            self.ssh.process.stdin.flush()


class HostProbes:
    """The programs on all hosts."""

    def __init__(self, seen: Sequence[HostState], kind: Kind, sizes: Mapping[str, Any], show: Callable[[str], object]) -> None:
        self._seen, self._kind, self._sizes, self._show = seen, kind, dict(sizes), show
        self._probes: list[HostProbe] = []
        self._failed_at = float("inf")
        self._lock = Lock()

    def run(self, seconds: float, stop_requests: StopRequests) -> list[Problem]:
        """Run the programs to their ends; return the problems. No ssh is left running when this returns."""
        try:
            for state in self._seen:
                self._probes.append(HostProbe(state=state, ssh=Ssh(state.name, f"{sys.executable} -P -m {MODULE}")))
            acts = [(each.ssh, partial(self._follow, at, seconds)) for at, each in enumerate(self._probes)]
            run_concurrently(acts, seconds, lambda: bool(stop_requests) or time.monotonic() > self._failed_at + OTHERS_SECONDS)
        except OSError as error:
            return [Problem(rule="probe", says=f"ssh can't be started: {error.strerror}")]
        finally:
            for each in self._probes:
                each.ssh.close()
        return self._problems(seconds)

    def measurement(self) -> ClusterMeasurement | tuple[Problem, ...]:
        """Return what was measured, or the problems of hosts that can't be described by one file."""
        from msgspec import convert

        found = [convert(each.found, DeviceMeasurement) for each in self._probes]
        names = [each.name for each in self._probes]
        gpus = {each.name: name for name, each in zip(names, found, strict=True) if each.kind == "cuda"}
        if len(gpus) > 1:
            says = "the hosts' GPUs differ: " + ", ".join(f"{host} has {gpu}" for gpu, host in gpus.items())
            return (Problem(rule="probe", says=says, mend="choose hosts of one kind with launch.include"),)
        links = [each.links or [] for each in self._probes]
        return cluster_measurement(names, found, links, self._probes[0].size)

    def _order(self, at: int, seconds: float) -> dict[str, Any]:
        slots = self._seen[at].host.slots
        environment = {key: value for key, value in os.environ.items() if key.startswith(FABRIC_VARIABLES)}
        if self._kind == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        return {
            "kind": self._kind,
            "devices": len(slots),
            "host": at,
            "hosts": len(self._seen),
            "seconds": seconds + HOST_SECONDS,
            "environment": environment,
            "sizes": self._sizes,
        }

    def _follow(self, at: int, seconds: float) -> None:
        """Send a host its request and read its answers to their end."""
        probe = self._probes[at]
        assert probe.ssh.process.stdout is not None
        assert probe.ssh.process.stderr is not None
        errors = Thread(target=_keep_last_lines, args=(probe.ssh.process.stderr, probe.stderr), daemon=True)
        errors.start()
        probe.send(self._order(at, seconds))
        for line in probe.ssh.process.stdout:
            with suppress(ValueError):  # a line that was cut off
                if line.startswith(MARK.encode()):
                    self._receive(at, json.loads(line.removeprefix(MARK.encode())))
        status = probe.ssh.process.wait()
        if not probe.has_ended and status != -signal.SIGKILL:  # not killed by `run_concurrently`
            errors.join(OTHERS_SECONDS)
            why = next((each for each in reversed(probe.stderr) if each), f"its program ended without a message, ssh with status {status}")
            self._fail(probe, Problem(rule="probe", says=f"{probe.name} could not be measured: {why}"))

    def _receive(self, at: int, message: Mapping[str, Any]) -> None:
        probe = self._probes[at]
        if "progress" in message and at == 0:
            self._show(f"{message['progress']}, on {plural(len(self._probes), 'host')}")
        if "found" in message:
            probe.found = message["found"]
            probe.links = [] if len(self._probes) == 1 else None
        if "links" in message:
            probe.links, probe.size = message["links"], message["bytes"]
        if "problem" in message:
            self._fail(probe, self._problem_of(probe, message))
        if "stage" in message:
            with self._lock:
                probe.stages[message["stage"]] = message
                if all(message["stage"] in each.stages for each in self._probes):
                    self._go_on(message["stage"])

    def _go_on(self, stage: str) -> None:
        first = self._probes[0]
        for each in self._probes:
            each.send({"stage": stage, "address": first.state.address, "port": first.stages[stage].get("port")})

    def _problem_of(self, probe: HostProbe, message: Mapping[str, Any]) -> Problem:
        """The problem that a host reports; of the links between hosts, a failure of any of them may be the cause."""
        if "links" not in probe.stages:
            return Problem(rule="probe", says=f"{probe.name} could not be measured: {message['problem']}", mend=message["mend"])
        library = "NCCL" if self._kind == "cuda" else "gloo"
        says = f"{probe.name} fails in an all-reduce with the others over {library}: {message['problem']}"
        return Problem(rule="link", says=says, mend=f"set {library.upper()}_SOCKET_IFNAME to the interface between the hosts")

    def _fail(self, probe: HostProbe, problem: Problem) -> None:
        probe.problem = problem
        self._failed_at = min(self._failed_at, time.monotonic())

    def _problems(self, seconds: float) -> list[Problem]:
        """Return the problem of each host that failed by itself, else the first one of a link, else the hosts that did not end in time."""
        failed = [each.problem for each in self._probes if each.problem]
        if failed:
            return [each for each in failed if each.rule != "link"] or failed[:1]
        unfinished = [each for each in self._probes if not each.has_ended]
        least = min((len(each.stages) for each in unfinished), default=0)
        behind = [each for each in unfinished if len(each.stages) == least]
        return [Problem(rule="probe", says=f"{each.name} could not be measured: no answer in {seconds:.0f} s") for each in behind]


def _keep_last_lines(stream: Any, kept: deque[str]) -> None:
    with suppress(OSError, ValueError):  # closed
        for line in stream:
            kept.append(line.decode(errors="replace").strip())
