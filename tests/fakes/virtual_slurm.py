"""A real Slurm on virtual hosts (scripts/virtual_hosts.py): slurmctld on the first host, slurmd on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from distrain.scripts.virtual_hosts import VirtualHosts
from distrain.tests.fakes.deadline import DEADLINE

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
# Without munge, whose daemon needs a user and folders of its own: the hosts' network is private.
CONFIG = """\
ClusterName=namespaces
SlurmctldHost={first}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={nodes} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm_tools() -> str:
    """Return which programs of Slurm are missing, besides those of virtual_hosts.py; "" where none is."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    return f"{', '.join(absent)} not found: apt-get install slurmctld slurmd slurm-client" if absent else ""


class VirtualSlurm:
    """Slurm on these hosts, of `cores` cores each; closing it (contextlib.closing) leaves nothing behind."""

    def __init__(self, hosts: VirtualHosts, folder: Path, cores: int) -> None:
        self.hosts, self.folder = hosts, folder
        folder.mkdir()
        names = [host.name for host in hosts.hosts]
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(first=names[0], folder=folder, nodes=",".join(names), cores=cores))
        self.environment = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start(0, "slurmctld", "-D")
            for number, name in enumerate(names):
                self._start(number, "slurmd", "-D", "-N", name)
            until = time.monotonic() + DEADLINE
            while self.output("sinfo", "--noheader", "--format=%T %D").split() != ["idle", str(len(names))]:
                assert time.monotonic() < until, (folder / "slurmctld.log").read_text()
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def command_environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return an environment in which Slurm's commands find it."""
        return {**environment, **self.environment}

    def output(self, *command: str) -> str:
        """Run a command of Slurm on the first host; return its output, "" where it fails."""
        words = self.hosts.hosts[0].command_line(command)
        return subprocess.run(words, env=self.command_environment(), capture_output=True, text=True, timeout=DEADLINE, check=False).stdout

    def exit_status(self, job: str) -> int:
        """Wait for a job to end; return its exit status."""
        state: dict[str, str] = {}
        while state.get("JobState", "PENDING") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            time.sleep(0.2)
            state = dict(word.partition("=")[::2] for word in self.output("scontrol", "--oneliner", "show", "job", job).split())
        return int(state["ExitCode"].partition(":")[0])

    def close(self) -> None:
        """End the daemons; the hosts end what these started."""
        for each in self._daemons:
            each.terminate()
        for each in self._daemons:
            each.wait()

    def _start(self, host: int, *command: str) -> None:
        none = subprocess.DEVNULL
        self._daemons.append(
            subprocess.Popen(
                self.hosts.hosts[host].command_line(command), env=self.command_environment(), stdin=none, stdout=none, stderr=none
            )
        )
