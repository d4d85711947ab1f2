"""What the launch commands of all launchers share: the request, the commands and files that answer it, and the ranks' variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from ...rundir.files import LAUNCH_FOLDER
from ...spec.problem import Problem, Unreadable
from ..hosts.shell_safe import require_shell_safe

# Prefixes of this shell's variables that ranks on other hosts get too; launch.environment names more.
FORWARDED_PREFIXES = (
    "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "MV2_", "FI_", "IB_",
    "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "XDG_CACHE_HOME", "TZ",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
HOST_VARIABLES = ("CUDA_VISIBLE_DEVICES",)  # not forwarded: each host sets its own
RANK_ENVIRONMENT = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}  # for every rank; launch/rank/environment.py says why
PORTS = range(20000, 30000)  # below the ephemeral ports of Linux
LOGS = "each rank's output is in ranks/N.log of the run folder, and in launch/N.log until it has joined rank 0"


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """A file that must exist before the launch commands run."""

    path: Path
    text: str
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line for `host` ("": this machine), run in `folder`.

    `environment` is added to the environment and the variables of `unset` are removed from it. `path_prefix` is a folder,
    relative to `folder`, that comes before PATH.
    """

    argv: tuple[str, ...]
    host: str = ""
    folder: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    path_prefix: str = ""

    def __str__(self) -> str:
        """Return the command as a line for a shell."""
        unset = [f"-u {shlex.quote(name)}" for name in self.unset]
        before = [*unset, *(f"{key}={shlex.quote(value)}" for key, value in self.environment.items())]
        before += [f'PATH={shlex.quote(self.path_prefix)}:"$PATH"'] if self.path_prefix else []
        line = shlex.join(self.argv)
        line = f"env {' '.join(before)} {line}" if self.unset else " ".join([*before, line])
        return f"cd {shlex.quote(str(self.folder))} && {line}" if self.folder else line

    def full_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the command's environment when it is started from a process with `environment`."""
        path = {"PATH": f"{self.path_prefix}:{environment.get('PATH', os.defpath)}"} if self.path_prefix else {}
        return {key: value for key, value in environment.items() if key not in self.unset} | dict(self.environment) | path


@dataclass(frozen=True, kw_only=True)
class LaunchCommands:
    """The files to write first, then either one command per host (or one in all) or the `lines` of a shell script that starts all ranks.

    `remarks` are for a person who runs them by hand.
    """

    commands: tuple[Command, ...]
    lines: tuple[str, ...] = ()
    files: tuple[LaunchFile, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What each launcher must start: the module that every rank runs, its arguments, the run folder and the rendezvous address."""

    module: str
    arguments: tuple[str, ...]
    python: str
    folder: Path  # RUN_DIR
    address: str
    port: int

    @property
    def launch_folder(self) -> Path:
        """The folder for the launcher's own files."""
        return self.folder / LAUNCH_FOLDER


def check_request(request: LaunchRequest) -> None:
    """Raise Unreadable with every part of the request that is not safe in a remote shell."""
    problems: list[Problem] = []
    folder = str(request.folder)
    for text, what, mend in (
        (request.python, "the Python", "install distrain at a path of only these characters"),
        (folder, "the run folder", "set name and log.dir to only these characters"),
        (request.address, "launch.address", "set it to a name or address of the first host"),
        *((each.removeprefix(folder), "the argument", "") for each in (request.module, *request.arguments)),
    ):
        try:
            require_shell_safe(text, what, mend)
        except Unreadable as error:
            problems += error.problems
    if problems:
        raise Unreadable(problems)


def run_port(folder: Path) -> int:
    """The rendezvous port of the run in `folder`: the same for each attempt, and different for most other runs."""
    return PORTS[crc32(bytes(folder)) % len(PORTS)]


def forwarded_variables(environment: Mapping[str, str], further: Sequence[str] = ()) -> dict[str, str]:
    """The variables of `environment` that ranks on other hosts get, through a file; `further` names more."""
    return {
        key: value
        for key, value in environment.items()
        if (key.startswith(FORWARDED_PREFIXES) and key not in HOST_VARIABLES) or key in further
    }
