"""The runs for fault injection: `distrain fit` on this machine or over virtual hosts, its processes, metrics and checkpoints."""

from __future__ import annotations

import json
import mmap
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
from ..trainer.rundir.checkpoints import checkpoints_folder
from .virtual_hosts import VirtualHosts

STEPS = 120
RECIPE = (
    *("conf=quickstart", "model=tiny", "model.layers=2", "model.dropout=0.1", "data=synthetic", "train.batch=8"),
    *("train.seq=16", "train.microbatch=2", "train.evaluate={every: 20, batches: 2}", "train.skip=0", "log.every=1", "optim.warmup=3"),
    *("checkpoint={every: 5, keep: 3}", "name=run"),
)
RUNS_VARIABLE = "FAULTS_RUNS"  # an environment variable that identifies a campaign's processes, whose parents may have died
# fmt: off
ROLES = {  # role of a process, by a part of its command line
    "/pipe_agent.py": "agent", "agent.bootstrap": "agent", "trainer.loop.rank": "rank", "launcher.runner": "runner",
    "launcher.launch": "launcher", "pdsh": "pdsh", "mpirun ": "mpirun", "orted ": "orted", "ssh ": "ssh",
}
# fmt: on
# A sitecustomize.py: in the step and rank that FAULTS_IN_RANK names, it turns a gradient into NaN, or makes this and each later step slow.
FAULT_IN_RANK = """
import os, sys, time
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
        right, (kind, at, rank) = module.train_step, os.environ["FAULTS_IN_RANK"].split()
        def step(run, course, micros, now, *rest):
            if kind == "slow" and now >= int(at) and os.environ["RANK"] == rank:
                time.sleep(0.05)
            if kind == "slow" or now != int(at) or os.environ["RANK"] != rank:
                return right(run, course, micros, now, *rest)
            parameter = next(course.engine.parts[-1].module.parameters())
            hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
            try:
                return right(run, course, micros, now, *rest)
            finally:
                hook.remove()
        module.train_step = step
if os.environ.get("FAULTS_IN_RANK") and "RANK" in os.environ:
    sys.meta_path.insert(0, Spoils())
"""


class Disk:
    """A tmpfs at a folder, which can be filled; mounting it needs root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", str(folder))

    def fill(self, spare: int) -> None:
        """Leave about `spare` bytes free; a size under what a run has written meanwhile is refused, so the use is read again."""
        deadline = time.monotonic() + 60
        while True:
            stats = os.statvfs(self.folder)
            size = max((stats.f_blocks - stats.f_bfree) * stats.f_frsize + spare, mmap.PAGESIZE)  # 0 is no limit
            try:
                return _run("mount", "-o", f"remount,size={size}", str(self.folder))
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def empty(self) -> None:
        """Remove the limit."""
        _run("mount", "-o", "remount,size=50%", str(self.folder))

    def close(self) -> None:
        """Unmount it."""
        _run("umount", "--lazy", str(self.folder))


@dataclass(kw_only=True)
class FitProcess:
    """One `distrain fit`, running or ended; `log` has its output."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)

    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    @property
    def lines(self) -> list[str]:
        """The lines that it printed."""
        return self.log.read_text(errors="replace").splitlines()


class LocalRuns:
    """Runs on this machine, of two ranks and `steps` steps."""

    name = "local"
    tolerance = 0.0  # of a step's loss, against the undisturbed run

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.steps = folder, steps
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        (self.site / "sitecustomize.py").write_text(FAULT_IN_RANK)

    overrides: Sequence[str] = ("cluster=1x2",)

    def start(self, folder: Path, *overrides: str, in_rank: str = "") -> FitProcess:
        """Start `distrain fit` with RUN_DIR `folder`/run."""
        log = folder / "fit.log"
        words = (*RECIPE, f"train.steps={self.steps}", *self.overrides, f"log.dir={folder}", *overrides)
        command = [sys.executable, "-m", "distrain", "fit", *words]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", RUNS_VARIABLE: str(self.folder)}
        if in_rank:
            environment |= {"PYTHONPATH": str(self.site), "FAULTS_IN_RANK": in_rank}
        with log.open("wb") as out:
            return FitProcess(process=self._popen(command, environment, out), log=log)

    def _popen(self, command: Sequence[str], environment: Mapping[str, str], out: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def processes(self) -> dict[int, str]:
        """Return the command line of every process of these runs, by its process id on this machine."""
        mark, found = f"{RUNS_VARIABLE}={self.folder}".encode(), dict[int, str]()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return {pid: words for pid, words in found.items() if words}

    def close(self) -> None:
        """Kill what is left of these runs."""
        for pid in self.processes():
            send_signal(pid, signal.SIGKILL)

    def cut_link(self) -> None:
        """Take the link of a host down."""
        raise ValueError("a local run has no link to cut")

    def restore_link(self) -> None:
        """Bring the link up again."""


class HostRuns(LocalRuns):
    """Two hosts of one rank each, through DeepSpeed's launcher; `distrain fit` runs on the first."""

    name = "hosts"
    tolerance = 1e-6  # a run that has lost a host goes on in another layout

    def __init__(self, folder: Path, hosts: VirtualHosts, runner: str = "pdsh", steps: int = STEPS) -> None:
        super().__init__(folder, steps)
        self.hosts, self._down = hosts, False
        launch = ("launch=deepspeed", f"launch.runner={runner}", f"launch.hostfile={hosts.write_hostfile(1)}", "launch.preflight=false")
        self.overrides = ("cluster=2x1", *launch)

    def _popen(self, command: Sequence[str], environment: Mapping[str, str], out: Any) -> subprocess.Popen[bytes]:
        return super()._popen(self.hosts.hosts[0].command_line(command), environment, out)

    def processes(self) -> dict[int, str]:
        return {pid: words for host in self.hosts.hosts for pid, words in host.processes().items()}

    def cut_link(self) -> None:
        self._down = True
        self.hosts.set_link(1, "down")

    def restore_link(self) -> None:
        if self._down:
            self._down = False
            self.hosts.set_link(1, "up")


def process_role(command: str, controller: str = "distrain fit") -> str:
    """Return a process's role in a run by its command line; that of the controller itself contains `controller`."""
    return next((name for part, name in {controller: "fit", **ROLES}.items() if part in command), "other")


def metric_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, without an incomplete last line of a killed writer. Raises ValueError for any other."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def loss_curve(run: Path) -> dict[int, tuple[float, float]]:
    """Return (loss, gradient norm) of each step; of a step done twice, the last."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in metric_rows(run) if row.get("grad_norm") is not None and "lr" in row}


def newest_checkpoint(run: Path) -> CheckpointSearch:
    """Return the newest checkpoint of a run that verifies."""
    return find_newest(checkpoints_folder(run))


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until `condition` is true, for at most `seconds`; return whether it became true."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.03)
    return True


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
