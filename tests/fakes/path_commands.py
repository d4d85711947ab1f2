"""Fake commands that PATH finds instead of ssh and others: they record how they were called, and do what a test sets."""

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
call = json.dumps({{"argv": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}}) + "\\n"
log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
os.write(log, call.encode())  # at once: others write theirs, and a test reads all
os.close(log)
"""
# ssh that runs the command in a shell on this machine
SSH = """\
host, command = [word for word in sys.argv[1:] if word != "--"][-2:]
here = {home!r} + "/" + host
os.environ["SSH_CONNECTION"] = "127.0.0.1 1 127.0.0.1 22"
if os.path.exists(here):
    exec(open(here).read())
os.execvp("sh", ["sh", "-c", command])
"""
# pdsh that runs each host's command in a shell on this machine
PDSH = """\
import subprocess
at = sys.argv.index("-w") + 1
for number, host in enumerate(sys.argv[at].split(",")):
    subprocess.run(["sh", "-c", " ".join(sys.argv[at + 1 :]).replace("%n", str(number)).replace("%h", host)])
"""
# a Python that only runs upload_remote.py
PYTHON = """\
if sys.argv[1:3] == ["-I", "-S"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# scontrol and srun inside a batch job: its nodes, and a process per task
SCONTROL = """\
print("127.0.0.1\\n127.0.0.2")
"""
SRUN = """\
import subprocess
from contextlib import suppress
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
command = [word for word in sys.argv[1:] if not word.startswith("--")]
if "ntasks" not in options:
    sys.exit()  # called by DeepSpeed's launcher: no rank is wanted
tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
started = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each)}) for rank in range(tasks)
]
worst = 0
for _ in started:
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code and not worst and options.get("kill-on-bad-exit") == "1":
        for task in started:
            with suppress(ProcessLookupError):
                os.kill(task.pid, 15)
    worst = worst or abs(code)
sys.exit(worst)
"""
SBATCH = """\
os.execvp("bash", ["bash", sys.argv[1]])
"""
QUIET = ""


class FakeCommands:
    """A folder of fake commands that goes first on PATH; `calls` are their calls, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "bin", folder / "hosts"
        self.folder.mkdir(parents=True)
        self.home.mkdir()
        self._log = folder / "calls"

    def put(self, name: str, does: str) -> None:
        """Put a command into the folder; `does` is its Python code."""
        text = HEAD.format(python=sys.executable, log=str(self._log)) + does.replace("{home!r}", repr(str(self.home)))
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)

    def host(self, name: str, does: str) -> None:
        """Set what the fake ssh does for a host before it runs the command: Python code."""
        (self.home / name).write_text(does)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the calls: {"argv", "environment", "folder"} each."""
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def forget(self) -> None:
        """Clear the list of calls."""
        self._log.unlink(missing_ok=True)

    def path(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return PATH with these commands first."""
        return f"{self.folder}:{environment['PATH']}"
