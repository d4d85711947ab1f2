"""A real Slurm over hosts that are namespaces (vhosts.py): its controller on the first of them, its daemon on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from distrain.scripts.virtual_hosts import VirtualHosts

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
PATIENCE = 60.0  # seconds for its nodes to be there
# No munge, whose daemon wants a user and folders of its own: nobody else sees the hosts' network.
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
    """Why this machine can't run Slurm over hosts of its own, beside what vhosts.py wants; "" where it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    return f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client" if absent else ""


class VirtualSlurm:
    """Slurm over these hosts, of so many cores each; leaves nothing behind when it is closed (contextlib.closing)."""

    def __init__(self, hosts: VirtualHosts, folder: Path, cores: int) -> None:
        self.hosts, self.folder = hosts, folder
        folder.mkdir()
        names = [host.name for host in hosts.hosts]
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(first=names[0], folder=folder, nodes=",".join(names), cores=cores))
        self.environment = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self._begun: list[subprocess.Popen[bytes]] = []
        try:
            self._begin(0, "slurmctld", "-D")
            for number, name in enumerate(names):
                self._begin(number, "slurmd", "-D", "-N", name)
            until = time.monotonic() + PATIENCE
            while self.says("sinfo", "--noheader", "--format=%T %D").split() != ["idle", str(len(names))]:
                assert time.monotonic() < until, (folder / "slurmctld.log").read_text()
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def known(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """An environment in which its commands find it."""
        return {**environment, **self.environment}

    def says(self, *command: str) -> str:
        """What a command of its prints, run on the first host; "" where it fails."""
        words = self.hosts.hosts[0].command_line(command)
        return subprocess.run(words, env=self.known(), capture_output=True, text=True, timeout=PATIENCE, check=False).stdout

    def ended(self, job: str) -> int:
        """A job's exit status, once it has ended."""
        state: dict[str, str] = {}
        while state.get("JobState", "PENDING") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            time.sleep(0.2)
            state = dict(word.partition("=")[::2] for word in self.says("scontrol", "--oneliner", "show", "job", job).split())
        return int(state["ExitCode"].partition(":")[0])

    def close(self) -> None:
        """End its daemons; the hosts end what they started."""
        for each in self._begun:
            each.terminate()
        for each in self._begun:
            each.wait()

    def _begin(self, host: int, *command: str) -> None:
        none = subprocess.DEVNULL
        self._begun.append(
            subprocess.Popen(self.hosts.hosts[host].command_line(command), env=self.known(), stdin=none, stdout=none, stderr=none)
        )
