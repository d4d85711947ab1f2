"""What mpirun has shells of other hosts read, through an ssh that has a shell of this machine read it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from distrain.tests.fakes.hostile_words import hostile
from distrain.tests.fakes.path_commands import QUIET, FakeCommands
from distrain.trainer.launch.commands.openmpi import PREFIXES, SSH_ARGS, launcher_variables, mpirun_environment
from distrain.trainer.launch.hosts.shell_safe import SSH_OPTIONS
from distrain.trainer.spec.problem import Unreadable

# ssh that has a shell of this machine read what follows the host
JOINED = """\
os.execvp("sh", ["sh", "-c", " ".join(sys.argv[sys.argv.index("h1") + 1 :])])
"""
FAILED = """\
sys.exit(1)
"""
TAME = {"OMPI_MCA_btl": "^openib", "OMPI_MCA_oob_tcp_if_include": "eth0,eth1", "OMPI_MCA_odd": "a%b@c+d", SSH_ARGS: "-p 22"}
real = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: apt-get install openmpi-bin")


def daemon(folder: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """How real mpirun, in this environment, has a host start its daemon."""
    stand_ins = FakeCommands(folder)
    for name, does in (("ssh", JOINED), ("orted", FAILED), ("true", QUIET)):
        stand_ins.put(name, does)
    (folder / "hostfile").write_text("h1 slots=1\n")
    known = {**os.environ, "PATH": stand_ins.path(), **environment}
    words = ["mpirun", "-n", "1", "-hostfile", str(folder / "hostfile"), "true"]
    subprocess.run(words, env=known, cwd=folder, capture_output=True, timeout=120, check=False)
    return [call for call in stand_ins.calls if call["argv"][0].endswith("orted")]


@real
def test_what_is_let_through_reaches_a_host_s_daemon_as_it_is(tmp_path: Path) -> None:
    (call,) = daemon(tmp_path, {**TAME, **mpirun_environment(TAME, SSH_OPTIONS)})
    words = call["argv"]
    told = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "-mca"}
    assert (told["btl"], told["oob_tcp_if_include"], told["odd"]) == ("^openib", "eth0,eth1", "a%b@c+d")
    assert told["plm_rsh_args"] == " ".join(["-p", "22", *SSH_OPTIONS])
    assert not (tmp_path / "pwned").exists()


@real
def test_mpirun_has_a_shell_read_what_is_refused(tmp_path: Path) -> None:
    evil = {"OMPI_MCA_odd": "$(touch pwned)"}
    daemon(tmp_path, {**evil, **mpirun_environment({}, SSH_OPTIONS)})
    assert (tmp_path / "pwned").exists()
    with pytest.raises(Unreadable, match="to a shell on each host"):
        mpirun_environment(evil, SSH_OPTIONS)


@given(name=some.sampled_from(PREFIXES), more=some.just("X") | hostile, value=hostile)
@example(name="OPAL_", more="PREFIX", value="$(touch pwned)")
@example(name="OMPI_", more="MCA_plm_rsh_args", value="-o ProxyCommand=`touch pwned`")
def test_no_hostile_word_is_let_through(name: str, more: str, value: str) -> None:
    letters = set("\"$`\\;|&<>()'\n\r*?~#! ")
    try:
        mpirun_environment({name + more: value}, SSH_OPTIONS)
    except Unreadable:
        return
    assert not letters & set(name + more)
    assert not letters & set(value) - ({" ", "\n", "\r"} if name + more == SSH_ARGS else set())


def test_a_rank_keeps_nothing_of_mpirun_s() -> None:
    assert launcher_variables({"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "UCX_TLS": "tcp", "PATH": "/bin"}) == [
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "UCX_TLS",
    ]
    assert launcher_variables({"UCX_TLS": "rc", "PATH": "/bin"}) == []
