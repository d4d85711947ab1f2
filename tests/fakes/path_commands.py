"""Commands that are found on PATH in place of ssh and its like: they note how they were called, and do what a test wants."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = """\
#!{python} -IS
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps({{"argv": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}}) + "\\n")
"""
# ssh that runs the command on this machine, as a shell that only knows the host's name.
SSH = """\
host, command = [word for word in sys.argv[1:] if word != "--"][-2:]
here = {home!r} + "/" + host
os.environ["SSH_CONNECTION"] = "127.0.0.1 1 127.0.0.1 22"
if os.path.exists(here):
    exec(open(here).read())
os.execvp("sh", ["sh", "-c", command])
"""
# pdsh that has a shell of this machine read the command for each host
PDSH = """\
import subprocess
at = sys.argv.index("-w") + 1
for number, host in enumerate(sys.argv[at].split(",")):
    subprocess.run(["sh", "-c", " ".join(sys.argv[at + 1 :]).replace("%n", str(number)).replace("%h", host)])
"""
# a Python that does nothing but land
PYTHON = """\
if sys.argv[1:3] == ["-I", "-S"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# what stands for sbatch's own: the job's nodes, and a process a task
SCONTROL = """\
print("127.0.0.1\\n127.0.0.2")
"""
SRUN = """\
import subprocess
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
command = [word for word in sys.argv[1:] if not word.startswith("--")]
if "ntasks" not in options:
    sys.exit()  # called by DeepSpeed's launcher: no rank is wanted
tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
started = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each)}) for rank in range(tasks)
]
sys.exit(max(abs(task.wait()) for task in started))
"""
SBATCH = """\
os.execvp("bash", ["bash", sys.argv[1]])
"""
QUIET = ""


class FakeCommands:
    """A folder that goes first on PATH; `calls` are its commands' own, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "bin", folder / "hosts"
        self.folder.mkdir(parents=True)
        self.home.mkdir()
        self._log = folder / "calls"

    def put(self, name: str, does: str) -> None:
        """A command of this name."""
        text = HEAD.format(python=sys.executable, log=str(self._log)) + does.replace("{home!r}", repr(str(self.home)))
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)

    def host(self, name: str, does: str) -> None:
        """What the ssh of `SSH` does in place of a host of this name: Python, before the command is run."""
        (self.home / name).write_text(does)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """How the commands were called: {"argv", "environment", "folder"}."""
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def forget(self) -> None:
        """Begin a new list of calls."""
        self._log.unlink(missing_ok=True)

    def path(self, environment: Mapping[str, str] = os.environ) -> str:
        """PATH with these commands first."""
        return f"{self.folder}:{environment['PATH']}"
