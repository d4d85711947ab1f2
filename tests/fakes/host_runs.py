"""Runs whose head is on a host that is a namespace (vhosts.py): of small ranks without torch, and `distrain fit` itself."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distrain.scripts.virtual_hosts import Host, Hosts

DEADLINE = 120.0  # seconds, for what takes ten on an idle machine

# A head that runs on host0: folder, hostfile, program of a rank, patience, runner.
HEAD = """
import os, sys
from pathlib import Path
from distrain.trainer.launch.hosts.hostfile import read_hosts
from distrain.trainer.launch.multi_host import Start, launch_hosts
from distrain.trainer.launch.supervisor.watchdog import Watchdog
from distrain.trainer.launch.commands.deepspeed import Start as Starting, deepspeed
folder, hosts = Path(sys.argv[1]), read_hosts(sys.argv[2])
told = Starting(module="distrain.trainer.launch.agent.bootstrap", arguments=(str(folder / "run.json"),), python=sys.executable,
                folder=folder, address=hosts[0].name, port=29400)
made = deepspeed(told, hosts, os.environ, (), sys.argv[5])
start = Start(hosts=hosts, folder=folder, launcher=made.commands[0], files=made.files,
              texts={"run.json": "{}"}, command=[sys.executable, "-c", sys.argv[3]], environment=os.environ, handed={"NCCL_TOLD": "a b"})
ended = launch_hosts(start, show=lambda line: print(line, flush=True), grace=2.0,
                     watchdog=Watchdog(patience=float(sys.argv[4])))
print(ended.says)
sys.exit(ended.status)
"""
BEGIN = """
import os, signal, subprocess, sys, time
from distrain.trainer.system.parent_watch import hold_from_environment
from distrain.trainer.launch.rank.channel import Talk
talk, rank = Talk.from_environment(), int(os.environ["RANK"])
hold_from_environment()
import faulthandler; faulthandler.register(signal.SIGUSR2)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
def ready(folder=os.getcwd()):
    talk.beat(6); talk.beat(7)
    open(os.path.join(folder, f"ready{rank}"), "w").write(f"{os.getpid()} {os.getppid()}\\n")
    while True: time.sleep(0.1)
"""
SAVES = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(75)))\nready()\n"
STOPPED = "stopped; a checkpoint is saved"


def wait_for(met: Callable[[], object], why: Callable[[], str] = lambda: "the deadline passed") -> None:
    until = time.monotonic() + DEADLINE
    while not met():
        assert time.monotonic() < until, why()
        time.sleep(0.05)


def quiet() -> dict[str, str]:
    """The environment of a head: this one's, without GPUs."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SECRET_CANARY": "a canary; $(never) seen"}


class Launched:
    """A head on host0 with four ranks on two hosts, which are ready when this returns."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        program: str,
        *,
        patience: float = 100.0,
        runner: str = "pdsh",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "launch").mkdir()
        rank = f"{BEGIN}os.chdir({str(folder)!r})\n{program}".replace("folder=os.getcwd()", f"folder={str(folder)!r}")
        words = [sys.executable, "-c", HEAD, str(folder), str(hosts.folder / "hostfile"), rank, str(patience), runner]
        self.head = hosts.hosts[0].start(words, {**quiet(), **environment})  # by way of nsenter
        wait_for(lambda: all(self.pids(rank) for rank in range(4)) or self.head.poll() is not None)
        assert self.head.poll() is None, self.head.communicate()[0]

    def host(self, rank: int) -> Host:
        return self.hosts.hosts[rank // 2]

    def pids(self, rank: int) -> list[int]:
        """A rank's process and its keeper's, as its host counts them."""
        path = self.folder / f"ready{rank}"
        text = path.read_text() if path.exists() else ""
        return [int(word) for word in text.split()] if text.endswith("\n") else []

    def send(self, number: int, rank: int, *, keeper: bool = False) -> None:
        """A signal to a rank, or to its keeper."""
        self.host(rank).run("kill", f"-{int(number)}", str(self.pids(rank)[keeper]))

    def send_to(self, host: int, part: str, number: int) -> None:
        """A signal to the processes of a host whose command lines have this in them."""
        found = [pid for pid, words in self.hosts.hosts[host].processes().items() if part in words and "local_agent.py" not in words]
        assert found
        for pid in found:
            os.kill(pid, number)

    def signal(self, number: int) -> None:
        """A signal to the head."""
        self.send_to(0, "launch_hosts(start", number)

    def log(self, name: str) -> str:
        return (self.folder / "ranks" / f"{name}.log").read_text()

    def end(self) -> tuple[int, list[str]]:
        """The head's exit status and what it printed."""
        said, _ = self.head.communicate(timeout=DEADLINE)
        return self.head.returncode, said.splitlines()


STEPS = 60
WORDS = (
    "quickstart", "model=tiny", "model.layers=2", "model.dropout=0.1", "data=synthetic", "train.batch=8", "train.seq=16",
    "train.microbatch=2", "train.evaluate.every=0", "log.every=1", "optim.warmup=3", f"train.steps={STEPS}",
)  # fmt: skip
TENSOR, PIPELINE = ("parallel.tp=2", "parallel.zero=1"), ("parallel.pp=2",)


def given(folder: Path, *more: str) -> list[str]:
    """The command line of a run over two nodes of two, with its RUN_DIR in a folder."""
    return [f"conf={WORDS[0]}", *WORDS[1:], "cluster=2x2", f"log.dir={folder}", "name=run", *more]


class Trained:
    """What a run of `WORDS` over hosts leaves in RUN_DIR, which is `folder`/run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl, as far as it goes."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def losses(self) -> list[float]:
        """Of every step; where one was done twice, of the last time."""
        return list({row["step"]: row["loss"] for row in self.rows() if "loss" in row}.values())

    def has(self, step: int) -> bool:
        """Whether it got there."""
        return any(row.get("step", 0) >= step for row in self.rows())


class Fit(Trained):
    """`distrain fit` on host0, over both hosts."""

    def __init__(self, hosts: Hosts, folder: Path, *words: str, hostfile: Path | None = None) -> None:
        super().__init__(folder)
        over = ["launch=deepspeed", f"launch.hostfile={hostfile or hosts.folder / 'hostfile'}", "launch.preflight=false"]
        self.head = hosts.hosts[0].start([sys.executable, "-m", "distrain", "fit", *given(folder, *over, *words)], quiet())

    def reaches(self, step: int) -> None:
        """Wait until it gets there."""
        wait_for(lambda: self.has(step) or self.head.poll() is not None)
        assert self.head.poll() is None, self.head.communicate()[0]

    def end(self) -> tuple[int, str]:
        """Its exit status and what it printed."""
        said, _ = self.head.communicate(timeout=DEADLINE)
        return self.head.returncode, said
