"""What mpirun passes to shells on other hosts, with a fake ssh that passes it to a shell on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.path_commands import QUIET, FakeCommands
from distrain.tests.fakes.shell_text import hostile
from distrain.trainer.launch.commands.mpirun_environment import PREFIXES, SSH_ARGS, launcher_variables, mpirun_environment
from distrain.trainer.launch.hosts.shell_safe import SSH_OPTIONS
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.system.child_process import end_child

# ssh that runs what follows the host's name in a shell on this machine
JOINED = """\
os.execvp("sh", ["sh", "-c", " ".join(sys.argv[sys.argv.index("h1") + 1 :])])
"""
FAILED = """\
sys.exit(1)
"""
TAME = {"OMPI_MCA_btl": "^openib", "OMPI_MCA_oob_tcp_if_include": "eth0,eth1", "OMPI_MCA_odd": "a%b@c+d", SSH_ARGS: "-p 22"}
real = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not found: apt-get install openmpi-bin")


def daemon(folder: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the calls with which real mpirun starts its daemon on a host, in this environment."""
    commands = FakeCommands(folder)
    for name, does in (("ssh", JOINED), ("orted", FAILED), ("true", QUIET)):
        commands.put(name, does)
    (folder / "hostfile").write_text("h1 slots=1\n")
    known = {**os.environ, "PATH": commands.path(), **environment}
    words = ["mpirun", "-n", "1", "-hostfile", str(folder / "hostfile"), "true"]
    mpirun = subprocess.Popen(words, env=known, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + DEADLINE
    try:
        while not (daemons := [call for call in commands.calls if call["argv"][0].endswith("orted")]) and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        end_child(mpirun)  # it may wait long for a daemon that failed
    return daemons


@real
def test_accepted_variables_reach_the_daemon_unchanged(tmp_path: Path) -> None:
    (call,) = daemon(tmp_path, {**TAME, **mpirun_environment(TAME, SSH_OPTIONS)})
    words = call["argv"]
    told = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "-mca"}
    assert (told["btl"], told["oob_tcp_if_include"], told["odd"]) == ("^openib", "eth0,eth1", "a%b@c+d")
    assert told["plm_rsh_args"] == " ".join(["-p", "22", *SSH_OPTIONS])
    assert not (tmp_path / "pwned").exists()


@real
def test_a_refused_variable_would_be_run_by_a_remote_shell(tmp_path: Path) -> None:
    evil = {"OMPI_MCA_odd": "$(touch pwned)"}
    daemon(tmp_path, {**evil, **mpirun_environment({}, SSH_OPTIONS)})
    assert (tmp_path / "pwned").exists()
    with pytest.raises(Unreadable, match="to a shell on each host"):
        mpirun_environment(evil, SSH_OPTIONS)


@given(name=some.sampled_from(PREFIXES), more=some.just("X") | hostile, value=hostile)
@example(name="OPAL_", more="PREFIX", value="$(touch pwned)")
@example(name="OMPI_", more="MCA_plm_rsh_args", value="-o ProxyCommand=`touch pwned`")
def test_no_unsafe_variable_is_accepted(name: str, more: str, value: str) -> None:
    letters = set("\"$`\\;|&<>()'\n\r*?~#! ")
    try:
        mpirun_environment({name + more: value}, SSH_OPTIONS)
    except Unreadable:
        return
    assert not letters & set(name + more)
    assert not letters & set(value) - ({" ", "\n", "\r"} if name + more == SSH_ARGS else set())


def test_the_variables_of_mpirun_are_found() -> None:
    assert launcher_variables({"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "UCX_TLS": "tcp", "PATH": "/bin"}) == [
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "UCX_TLS",
    ]
    assert launcher_variables({"UCX_TLS": "rc", "PATH": "/bin"}) == []
