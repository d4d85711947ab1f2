"""Runs that faults come to: `distrain fit` on this machine or over hosts that are namespaces, its processes, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..trainer.loop.checkpoint import CheckpointSearch, find_newest
from .virtual_hosts import VirtualHosts

STEPS = 120
RECIPE = (
    *("conf=quickstart", "model=tiny", "model.layers=2", "model.dropout=0.1", "data=synthetic", f"train.steps={STEPS}", "train.batch=8"),
    *("train.seq=16", "train.microbatch=2", "train.evaluate={every: 20, batches: 2}", "train.skip=0", "log.every=1", "optim.warmup=3"),
    *("checkpoint={every: 5, keep: 3}", "launch.patience=5", "name=run"),
)
RUNS_VARIABLE = "FAULTS_GROUND"  # a variable by which the processes of a ground are known, whoever their parents are
# fmt: off
ROLES = {  # of a process, by what is in its command line
    "/local_agent.py": "agent", "agent.bootstrap": "agent", "trainer.loop.rank": "rank", "launcher.runner": "runner",
    "launcher.launch": "launcher", "pdsh": "pdsh", "mpirun ": "mpirun", "orted ": "orted", "ssh ": "ssh",
}
# fmt: on
# In a rank whose turn it is, a gradient of one step is no number.
POISON = """
import os, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
NAME = "distrain.trainer.loop.train"
class Spoils(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        if name != NAME or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        self.loader, spec.loader = spec.loader, self
        return spec
    def create_module(self, spec):
        return self.loader.create_module(spec)
    def exec_module(self, module):
        self.loader.exec_module(module)
        right, (at, rank) = module.train_step, map(int, os.environ["FAULTS_POISON"].split())
        def step(run, course, micros, now, *rest):
            if now != at or os.environ["RANK"] != str(rank):
                return right(run, course, micros, now, *rest)
            parameter = next(course.engine.stages[-1].module.parameters())
            hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
            try:
                return right(run, course, micros, now, *rest)
            finally:
                hook.remove()
        module.train_step = step
if os.environ.get("FAULTS_POISON") and "RANK" in os.environ:
    sys.meta_path.insert(0, Spoils())
"""


class Disk:
    """A tmpfs at a folder, which can be filled; root alone may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", str(folder))

    def fill(self, spare: int) -> None:
        """Leave so many bytes free."""
        held = os.statvfs(self.folder)
        _run("mount", "-o", f"remount,size={(held.f_blocks - held.f_bfree) * held.f_frsize + spare}", str(self.folder))

    def empty(self) -> None:
        """As much room as it has without a limit."""
        _run("mount", "-o", "remount,size=50%", str(self.folder))

    def close(self) -> None:
        """Unmount it."""
        _run("umount", "--lazy", str(self.folder))


@dataclass(kw_only=True)
class FitProcess:
    """One `distrain fit`, under way or ended. `log` is what it printed."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)

    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    @property
    def lines(self) -> list[str]:
        """What it printed."""
        return self.log.read_text(errors="replace").splitlines()


class LocalRuns:
    """Where runs run: on this machine, two ranks."""

    name = "local"
    apart = 0.0  # in loss, between a step that was done twice and once

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        (self.site / "sitecustomize.py").write_text(POISON)

    command_line: Sequence[str] = ("cluster=1x2",)

    def start(self, folder: Path, *words: str, poison: str = "") -> FitProcess:
        """`distrain fit` with RUN_DIR `folder`/run."""
        log = folder / "fit.log"
        command = [sys.executable, "-m", "distrain", "fit", *RECIPE, *self.command_line, f"log.dir={folder}", *words]
        quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", RUNS_VARIABLE: str(self.folder)}
        if poison:
            quiet |= {"PYTHONPATH": str(self.site), "FAULTS_POISON": poison}
        with log.open("wb") as out:
            return FitProcess(process=self._popen(command, quiet, out), log=log)

    def _popen(self, command: Sequence[str], environment: Mapping[str, str], out: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def processes(self) -> dict[int, str]:
        """The command lines of all processes of its runs, by process id as this machine counts."""
        mark, found = f"{RUNS_VARIABLE}={self.folder}".encode(), dict[int, str]()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return {pid: words for pid, words in found.items() if words}

    def close(self) -> None:
        """Kill what is left of its runs."""
        for pid in self.processes():
            send_signal(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Pull a cable."""
        raise ValueError("one machine has no cable between its ranks")

    def heal(self) -> None:
        """Put it back."""


class HostRuns(LocalRuns):
    """Two hosts of one rank each, through DeepSpeed's launcher; `distrain fit` runs on the first."""

    name = "hosts"
    apart = 1e-6  # a run that has lost a host goes on in another layout

    def __init__(self, folder: Path, hosts: VirtualHosts, runner: str = "pdsh") -> None:
        super().__init__(folder)
        self.hosts, self._down = hosts, False
        way = ("launch=deepspeed", f"launch.runner={runner}", f"launch.hostfile={hosts.hostfile(1)}", "launch.preflight=false")
        self.command_line = ("cluster=2x1", *way)

    def _popen(self, command: Sequence[str], environment: Mapping[str, str], out: Any) -> subprocess.Popen[bytes]:
        return super()._popen(self.hosts.hosts[0].command_line(command), environment, out)

    def processes(self) -> dict[int, str]:
        return {pid: words for host in self.hosts.hosts for pid, words in host.processes().items()}

    def cut(self) -> None:
        self._down = True
        self.hosts.link(1, "down")

    def heal(self) -> None:
        if self._down:
            self._down = False
            self.hosts.link(1, "up")


def process_role(words: str, whole: str = "distrain fit") -> str:
    """What a process is to a run, by its command line; `whole` is in that of the command itself."""
    return next((name for part, name in {**ROLES, whole: "fit"}.items() if part in words), "other")


def metric_rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run; a half line at its end, where a writer was killed, is no row. Raises ValueError at another."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def loss_curve(run: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) of each step; where one was done twice, of the last time."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in metric_rows(run) if row.get("grad_norm") is not None and "lr" in row}


def newest_checkpoint(run: Path) -> CheckpointSearch:
    """The newest checkpoint of a run that verifies."""
    return find_newest(run / "checkpoints")


def wait_until(met: Callable[[], object], seconds: float) -> bool:
    """Whether it came to be so in so many seconds."""
    until = time.monotonic() + seconds
    while not met():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def send_signal(pid: int, number: signal.Signals) -> None:
    """A signal, to a process that may have gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
