"""`distrain doctor`: a line for each check of this machine, and exit status 1 where something would stop a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.trainer.launch.doctor_smoke_test import loss_check
from distrain.trainer.machine.doctor_checks import DISK, SHARED_MEMORY, compiler_check, disk_check, shared_memory_check


def test_a_machine_that_can_train_has_no_problem_and_exits_0(tmp_path: Path) -> None:
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


def test_without_torch_no_engine_is_checked(tmp_path: Path) -> None:
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
    assert "engine zero" not in done.stdout


def test_ranks_with_other_losses_than_one_process_are_a_problem() -> None:
    assert loss_check([5.0, 4.0], [5.0, 4.000001], 2).state == "ok"
    found = loss_check([5.0, float("nan")], [5.0, 4.0], 2)
    says = "problem  engine zero: the losses of 2 ranks are 5.0000, nan, those of one process 5.0000, 4.0000"
    assert str(found) == f"{says}: they should be equal: please report it"
    assert loss_check([5.0], [5.0, 4.0], 2).state == "problem"


def test_a_full_disk_is_a_problem(tmp_path: Path) -> None:
    assert disk_check(tmp_path, DISK, writable=True).state == "ok"
    assert disk_check(tmp_path, DISK - 1, writable=True).state == "warning"
    full = f"problem  disk: 0 B free in {tmp_path}: make room, or set log.dir to another disk"
    assert str(disk_check(tmp_path, 0, writable=True)) == full
    assert disk_check(tmp_path, DISK, writable=False).state == "problem"


def test_little_shared_memory_is_a_warning() -> None:
    assert shared_memory_check(SHARED_MEMORY).state == "ok"
    assert shared_memory_check(64 << 20).state == "warning"


@pytest.mark.parametrize(("name", "state"), [("c++", "ok"), ("clang++", "ok"), ("cc", "warning")])
def test_a_compiler_is_found_by_its_usual_names(name: str, state: str, tmp_path: Path) -> None:
    (tmp_path / name).touch(0o755)
    assert compiler_check({"PATH": str(tmp_path)}).state == state


def test_a_compiler_named_by_CXX_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").touch(0o755)
    assert compiler_check({"PATH": "", "CXX": str(tmp_path / "mine")}).says == str(tmp_path / "mine")
