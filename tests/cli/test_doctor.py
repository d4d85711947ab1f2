"""`distrain doctor`: a line for each thing that a run needs, and status 1 where something would stop one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.cli.verbs.doctor import DISK, SHARED, compiler, disk, shared_memory
from distrain.cli.verbs.engine_check import compared


def test_a_machine_that_trains_gets_a_line_each_and_status_0(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "distrain", "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split(maxsplit=1) for line in re.sub(r"\n +", " ", done.stdout).splitlines()]
    names = [rest.partition(":")[0] for _, rest in rows]
    order = ["python", "distrain", "torch", "deepspeed", "transformers", "tokenizers", "compiler", "disk", "memory", "shared memory"]
    assert [*dict.fromkeys(name for name in names if name != "device")] == [*order, "gloo", "engine zero"]
    assert {state for state, _ in rows} <= {"ok", "warning"}
    assert rows[-1][0] == "ok"
    assert rows[-1][1].startswith("engine zero: 2 ranks, ZeRO 2, 3 steps: losses 5.")
    assert not list(tmp_path.iterdir())


def test_without_torch_it_stops_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name == 'torch':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "distrain", "doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem  torch: not installed: pip install torch\n" in done.stdout
    assert "engine" not in done.stdout


def test_ranks_that_lose_otherwise_are_a_problem() -> None:
    assert compared([5.0, 4.0], [5.0, 4.000001], 2).state == "ok"
    found = compared([5.0, float("nan")], [5.0, 4.0], 2)
    assert (
        str(found) == "problem  engine zero: 2 ranks lost 5.0000, nan, one process 5.0000, 4.0000: they should be equal: please report it"
    )
    assert compared([5.0], [5.0, 4.0], 2).state == "problem"


def test_a_disk_that_is_full_is_a_problem(tmp_path: Path) -> None:
    assert disk(tmp_path, DISK, writable=True).state == "ok"
    assert disk(tmp_path, DISK - 1, writable=True).state == "warning"
    full = f"problem  disk: 0 B free in {tmp_path}: make room, or set log.dir to another disk"
    assert str(disk(tmp_path, 0, writable=True)) == full
    assert disk(tmp_path, DISK, writable=False).state == "problem"


def test_little_shared_memory_is_a_warning() -> None:
    assert shared_memory(SHARED).state == "ok"
    assert shared_memory(64 << 20).state == "warning"


@pytest.mark.parametrize(("name", "state"), [("c++", "ok"), ("clang++", "ok"), ("cc", "warning")])
def test_a_compiler_is_looked_for_by_its_names(name: str, state: str, tmp_path: Path) -> None:
    (tmp_path / name).touch(0o755)
    assert compiler({"PATH": str(tmp_path)}).state == state


def test_a_compiler_that_is_named_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").touch(0o755)
    assert compiler({"PATH": "", "CXX": str(tmp_path / "mine")}).says == str(tmp_path / "mine")
