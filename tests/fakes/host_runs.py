"""Runs over virtual hosts (scripts/virtual_hosts.py), with the controller on host0: small ranks without torch, and `distrain fit`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from types import MappingProxyType
from typing import Any

from distrain.scripts.virtual_hosts import VirtualHost, VirtualHosts
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.held_step import HeldStep
from distrain.tests.fakes.overrides import without_repeats
from distrain.trainer.rundir.metric_rows import SAVE_KEY

# A controller that runs on host0. Its arguments: folder, hostfile, program of a rank, patience, runner.
CONTROLLER = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.hosts.hostfile import read_hostfile
from distrain.trainer.launch.multi_host import MultiHostLaunch, launch_remote_ranks
from distrain.trainer.launch.supervisor.watchdog import Watchdog
from distrain.trainer.launch.commands.command import LaunchRequest
from distrain.trainer.launch.commands.deepspeed import deepspeed_commands
folder, hosts = Path(sys.argv[1]), read_hostfile(sys.argv[2])
request = LaunchRequest(module="distrain.trainer.launch.agent.bootstrap", arguments=(str(folder / "run.json"),), python=sys.executable,
                        folder=folder, address=hosts[0].name, port=29400)
commands = deepspeed_commands(request, hosts, os.environ, (), sys.argv[5])
launch = MultiHostLaunch(hosts=hosts, folder=folder, launcher=commands.commands[0], files=commands.files,
                         texts={"run.json": "{}"}, command=[sys.executable, "-c", sys.argv[3]], environment=os.environ,
                         forwarded={"NCCL_TOLD": "a b"})
outcome = launch_remote_ranks(launch, show=lambda line: print(line, flush=True), grace=2.0,
                              watchdog=Watchdog(patience=float(sys.argv[4])))
print(outcome.says)
sys.exit(outcome.status)
"""
BEGIN = """
import os, signal, subprocess, sys, time
from distrain.trainer.system.parent_watch import watch_parent_from_environment
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.launch.rank.hang_answer import HangAnswer
channel, rank = Channel.from_environment(), int(os.environ["RANK"])
watch_parent_from_environment()
answer = HangAnswer(channel)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
def ready(folder=os.getcwd()):
    channel.report_step(6); channel.report_step(7)
    open(os.path.join(folder, f"ready{rank}"), "w").write(f"{os.getpid()} {os.getppid()}\\n")
    while True: time.sleep(0.1)
"""
QUICK_RUNNER = "openmpi" if which("mpirun") else "pdsh"  # with pdsh each host imports DeepSpeed once more, in each attempt
SAVES = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(75)))\nready()\n"
STOPPED = "stopped; a checkpoint is saved: the same command continues"


def wait_for(condition: Callable[[], object], why: Callable[[], str] = lambda: "the deadline passed") -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def controller_environment(hosts: VirtualHosts) -> dict[str, str]:
    """Return the environment of a controller on these hosts: this process's, without GPUs and with a secret.

    Open MPI keeps its folders with theirs: in /tmp, hosts of the same names that run at once would share them.
    """
    added = {"SECRET_CANARY": "a canary; $(never) seen", "OMPI_MCA_orte_tmpdir_base": str(hosts.folder)}
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **added}


class RanksOnHosts:
    """A controller on host0 with two ranks on each of the hosts, all two of them by default, which are ready once it is constructed."""

    def __init__(
        self,
        hosts: VirtualHosts,
        folder: Path,
        program: str,
        *,
        patience: float = 100.0,
        runner: str = "pdsh",
        environment: Mapping[str, str] = MappingProxyType({}),
        on: Sequence[int] = (0, 1),
    ) -> None:
        self.hosts, self.folder, self.on = hosts, folder, on
        ranks = range(2 * len(on))
        hostfile = folder / "hosts"
        hostfile.write_text("".join(f"{hosts.hosts[number].name} slots=2\n" for number in on))
        (folder / "launch").mkdir()
        rank = f"{BEGIN}os.chdir({str(folder)!r})\n{program}".replace("folder=os.getcwd()", f"folder={str(folder)!r}")
        command = [sys.executable, "-c", CONTROLLER, str(folder), str(hostfile), rank, str(patience), runner]
        self.controller = hosts.hosts[0].start(command, {**controller_environment(hosts), **environment})  # by way of nsenter
        wait_for(lambda: all(self.pids(rank) for rank in ranks) or self.controller.poll() is not None)
        assert self.controller.poll() is None, self.controller.communicate()[0]

    def host(self, rank: int) -> VirtualHost:
        return self.hosts.hosts[self.on[rank // 2]]

    def pids(self, rank: int) -> list[int]:
        """Return the process ids of a rank and its agent, as its host numbers them; empty until the rank is ready."""
        path = self.folder / f"ready{rank}"
        text = path.read_text() if path.exists() else ""
        return [int(word) for word in text.split()] if text.endswith("\n") else []

    def send(self, number: int, rank: int, *, agent: bool = False) -> None:
        """Send a signal to a rank, or to its agent."""
        self.host(rank).run("kill", f"-{int(number)}", str(self.pids(rank)[agent]))

    def send_to_processes(self, host: int, part: str, number: int) -> None:
        """Send a signal to the processes of a host whose command lines contain `part`, except agents."""
        found = [pid for pid, line in self.hosts.hosts[host].processes().items() if part in line and "pipe_agent.py" not in line]
        assert found
        for pid in found:
            with suppress(ProcessLookupError):  # it has ended with the one before
                os.kill(pid, number)

    def signal(self, number: int) -> None:
        """Send a signal to the controller."""
        self.send_to_processes(0, "launch_remote_ranks(launch", number)

    def log(self, name: str) -> str:
        return (self.folder / "ranks" / f"{name}.log").read_text()

    def end(self) -> tuple[int, list[str]]:
        """Wait for the controller's end; return its exit status and the lines that it printed."""
        output, _ = self.controller.communicate(timeout=DEADLINE)
        return self.controller.returncode, output.splitlines()


STEPS = 6
LONG = "train.steps=5000"  # of a run that is stopped: it can't end before
ARGUMENTS = (
    "quickstart", "model=tiny", "model.layers=2", "model.dropout=0.1", "data=synthetic", "train.batch=8", "train.seq=16",
    "train.microbatch=2", "train.evaluate.every=0", "log.every=1", "optim.warmup=3", "optim.schedule=constant",
    f"train.steps={STEPS}",
)  # fmt: skip
TENSOR, PIPELINE = ("parallel.tp=2", "parallel.zero=1"), ("parallel.pp=2",)
ONE_EACH = "cluster=2x1"  # a device a host, where two more ranks would hold nothing that those of another test don't


def run_arguments(folder: Path, *overrides: str) -> list[str]:
    """Return `fit`'s arguments for a run on two nodes, of two devices each by default, with its RUN_DIR in a folder."""
    return [f"conf={ARGUMENTS[0]}", *without_repeats(*ARGUMENTS[1:], "cluster=2x2", f"log.dir={folder}", "name=run", *overrides)]


def one_process_losses(steps: int = STEPS) -> list[float]:
    """Return the losses of a run of `ARGUMENTS` of that many steps in one process without DeepSpeed."""
    from distrain.tests.fakes.one_process import reference_curve  # torch: most tests over hosts need none

    return reference_curve((*ARGUMENTS[:-1], f"train.steps={steps}"))[0]


class TrainedRun:
    """The RUN_DIR, `folder`/run, of a run of `ARGUMENTS` over hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl so far, without those of saves."""
        file = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if SAVE_KEY not in row]

    def losses(self) -> list[float]:
        """Return the loss of every step; of a step that was done twice, the second."""
        return list({row["step"]: row["loss"] for row in self.rows() if "loss" in row}.values())

    def has_reached(self, step: int) -> bool:
        """Return whether the run has reached a step."""
        return any(row.get("step", 0) >= step for row in self.rows())


class FitOnHosts(TrainedRun):
    """`distrain fit` on host0, over both hosts; its ranks are held at a step if it is given one."""

    def __init__(
        self, hosts: VirtualHosts, folder: Path, *overrides: str, hostfile: Path | None = None, held: HeldStep | None = None
    ) -> None:
        super().__init__(folder)
        over = ["launch=deepspeed", f"launch.hostfile={hostfile or hosts.folder / 'hostfile'}", "launch.preflight=false"]
        variables = held.environment if held else {}
        over += [f"launch.environment=[{','.join(variables)}]"] if variables else []
        self.controller = hosts.hosts[0].start(
            [sys.executable, "-m", "distrain", "fit", *run_arguments(folder, *over, *overrides)],
            {**controller_environment(hosts), **variables},
        )

    def wait_for_step(self, step: int) -> None:
        """Wait until the run reaches a step; raises AssertionError if it ends before."""
        wait_for(lambda: self.has_reached(step) or self.controller.poll() is not None)
        assert self.controller.poll() is None, self.controller.communicate()[0]

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit status and its output."""
        output, _ = self.controller.communicate(timeout=DEADLINE)
        return self.controller.returncode, output
