"""The words that start ranks on other hosts, and the files that go with them: made of harmless letters, or refused.

DeepSpeed's launcher pastes arguments and the values of some environment variables into the command line of remote shells, unquoted,
and logs them. So what crosses there is made here, of SAFE letters alone, and all else travels in a file that ranks read.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from ...spec.problem import Problem, Unreadable
from ..hosts.hostfile import Host, included, written
from ..hosts.slurm_nodes import SRUN
from . import openmpi

SAFE = re.compile(r"[A-Za-z0-9._/=:-]+")
_UNSAFE = re.compile(r"[^A-Za-z0-9._/=:-]")
LETTERS = "letters, digits and . _ / = : -"

# ssh that never asks, gives up on a host that doesn't answer, and notices a link that is cut.
SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")

# Variables that DeepSpeed's launcher pastes into remote shells by the beginning of their names (EXPORT_ENVS, and NCCL of CUDA's).
PASTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
PATHS = ("PYTHONPATH", "PYTHONHOME")  # of these, those without which its own processes may not start
# What ranks on other hosts are told of this shell's variables, by the beginning of their names; launch.environment names more.
HANDED = (
    "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "MV2_", "FI_", "IB_",
    "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "XDG_CACHE_HOME", "TZ",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
OWN = ("CUDA_VISIBLE_DEVICES",)  # of these, what each host sets for itself
RANKS = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}  # as place.py says

# pdsh as DeepSpeed's runner finds it. When the runner is told to stop it has every host `pkill -f` launchers by their name, those of
# other runs too. This run's end without that: their guests (guest.py) see to it.
PDSH = """\
#!/bin/sh
for word; do
    case $word in "pkill "*) exit 0 ;; esac
done
PATH=${PATH#"${0%/*}":}
exec pdsh "$@"
"""

SLOT = Path(__file__).parents[1] / "agent" / "bootstrap_srun.py"  # what srun starts: the launcher has it start a file

# What each of its ways to the hosts wants on this machine.
RUNNERS = {"pdsh": ("pdsh",), "openmpi": ("mpirun", "ompi_info"), "slurm": ("srun", "sinfo")}

PORTS = range(20000, 30000)  # below those that Linux hands out itself


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that a launch wants to be there."""

    path: Path
    text: str
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Command:
    """Words to be run on a host ("": this one), in a folder, with variables added to the environment, `without` taken from it.

    Programs are looked for in `first` before PATH: a folder, from where it runs.
    """

    words: tuple[str, ...]
    where: str = ""
    folder: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    first: str = ""

    def __str__(self) -> str:
        """As a line that a shell runs."""
        unset = [f"-u {shlex.quote(name)}" for name in self.without]
        before = [*unset, *(f"{key}={shlex.quote(value)}" for key, value in self.environment.items())]
        before += [f'PATH={shlex.quote(self.first)}:"$PATH"'] if self.first else []
        line = shlex.join(self.words)
        line = f"env {' '.join(before)} {line}" if self.without else " ".join([*before, line])
        return f"cd {shlex.quote(str(self.folder))} && {line}" if self.folder else line

    def surroundings(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the command, started from one like this."""
        path = {"PATH": f"{self.first}:{environment.get('PATH', os.defpath)}"} if self.first else {}
        return {key: value for key, value in environment.items() if key not in self.without} | dict(self.environment) | path


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How a run is started: the files that are written first, then the commands, or the `lines` of a shell that starts all its ranks;
    `remarks` for a person who types them. Commands of several hosts are each typed there."""

    commands: tuple[Command, ...]
    lines: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Start:
    """What every way of starting is told: the module that each rank runs and its arguments, where, and where the ranks meet."""

    module: str
    arguments: tuple[str, ...]
    python: str
    folder: Path  # RUN_DIR
    address: str
    port: int

    @property
    def own(self) -> Path:
        """The folder of the files that are made here."""
        return self.folder / "launch"


def crosses(word: str, what: str, mend: str) -> str:
    """The word, if it may stand on the command line of a remote shell; raises Unreadable where it may not."""
    odd = _UNSAFE.search(word)
    if odd:
        says = f"{what} {word} holds {odd[0]!r}, and what crosses to other machines is of {LETTERS}"
        raise Unreadable([Problem(rule="words", says=says, mend=mend)])
    if not word or word.startswith("-"):
        raise Unreadable([Problem(rule="words", says=f"{what} {word or 'without a letter'} is no word to cross", mend=mend)])
    return word


def checked(start: Start) -> Start:
    """The same, where all of it may cross to other hosts; raises Unreadable with all that may not."""
    problems: list[Problem] = []
    for word, what, mend in (
        (start.python, "the Python", "install distrain at a path of these"),
        (str(start.folder), "the run folder", "set name and log.dir to ones of these"),
        (start.address, "launch.address", "set it to a name or address of the first host"),
        *((each.removeprefix(str(start.folder)), "the argument", "") for each in (start.module, *start.arguments)),
    ):
        try:
            crosses(word, what, mend)
        except Unreadable as error:
            problems += error.problems
    if problems:
        raise Unreadable(problems)
    return start


def port_of(folder: Path) -> int:
    """A port for the ranks of a run to meet at: the same for each start, and another for most other runs."""
    return PORTS[crc32(bytes(folder)) % len(PORTS)]


def handed(environment: Mapping[str, str], further: Sequence[str] = ()) -> dict[str, str]:
    """Of this shell's variables those that ranks on other hosts are told, over a file."""
    return {key: value for key, value in environment.items() if (key.startswith(HANDED) and key not in OWN) or key in further}


def deepspeed(start: Start, hosts: Sequence[Host], environment: Mapping[str, str], further: Sequence[str], runner: str) -> Launching:
    """A run through DeepSpeed's launcher, over `runner` (pdsh, openmpi, slurm); raises Unreadable where something may not cross."""
    checked(start)
    own = start.own
    # it is started there, and pastes what the system calls the place
    crosses(os.path.realpath(own), "the launcher's folder, which is", "set log.dir to a folder of these, links followed")
    options = ["--hostfile", str(own / "hosts"), "--launcher", runner, "--force_multi", "--no_ssh_check", "--no_local_rank"]
    ways, whom = _ways(runner, hosts, environment)
    options += [*whom, "--master_addr", start.address, "--master_port", str(start.port)]
    options += [crosses(str(SLOT), "the path", "")] if runner == "slurm" else ["--module", start.module]
    exports = RANKS | ({"MASTER_ADDR": start.address, "MASTER_PORT": str(start.port)} if runner != "pdsh" else {})
    told = sorted(handed(environment, further))
    return Launching(
        commands=(
            Command(
                words=(start.python, "-m", "deepspeed.launcher.runner", *options, *start.arguments),
                folder=own,  # it puts the folder that it runs in on the path of Python, and so does each host
                environment={"DS_ENV_FILE": str(own / "exports"), **ways},
                without=(*_pasted(environment), *_carried(environment, runner)),
                first="." if runner == "pdsh" else "",  # own may hold a colon, which no folder of PATH can
            ),
        ),
        files=(
            File(path=own / "hosts", text=written(hosts)),
            File(path=own / "exports", text="".join(f"{key}={value}\n" for key, value in exports.items())),
            *([File(path=own / "pdsh", text=PDSH, mode=0o700)] if runner == "pdsh" else []),
        ),
        remarks=(
            "fit has what it starts come to it with a ticket that it leaves on each host over ssh: without it nothing trains",
            f"in the ticket, mode 0600, are these variables for the ranks: {', '.join(told) or 'none'}",
        ),
    )


def _ways(runner: str, hosts: Sequence[Host], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What a runner is told of how to reach the hosts, over its environment, and the launcher's options for it."""
    if runner == "pdsh":
        ssh = " ".join([*environment.get("PDSH_SSH_ARGS_APPEND", "").split(), *SSH])
        return {"PDSH_SSH_ARGS_APPEND": ssh}, [] if all(host.whole for host in hosts) else ["--include", included(hosts)]
    if not all(host.whole for host in hosts):
        says = f"launch.runner={runner} starts a host's first slots, not {included(hosts)}"
        raise Unreadable([Problem(rule="runner", says=says, mend="set launch.runner=pdsh")])
    if runner == "openmpi":
        return openmpi.surroundings(environment, SSH), []
    where = [f"--nodes={len(hosts)}", f"--ntasks-per-node={len(hosts[0].slots)}", f"--nodelist={','.join(host.name for host in hosts)}"]
    return {}, [f"--launcher_args={' '.join([*where, *SRUN])}"]


def _carried(environment: Mapping[str, str], runner: str) -> tuple[str, ...]:
    """Variables that come to ranks with the ticket: mpirun and srun would hand them on too, as they do with all that they are run with."""
    return () if runner == "pdsh" else tuple(sorted(key for key in handed(environment) if not key.startswith(PASTED)))


def _pasted(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that the launcher is started without; raises Unreadable where it can't do without one that may not cross."""
    for key in PATHS:
        if environment.get(key):
            crosses(environment[key], key, f"unset {key}, or have it name paths of these")
    return tuple(sorted(key for key in environment if key.startswith(PASTED) and key not in PATHS))
