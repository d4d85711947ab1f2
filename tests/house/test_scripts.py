"""scripts/quickstart and scripts/test: messages when something is missing, and the arguments that they pass on."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["basename", "bash", "cat", "cmp", "dirname", "env", "flock", "grep", "ln", "mkdir", "mktemp", "mv", "nice", "rm", "tail", "wc"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with a space in its path and the files that the two scripts read, with a PATH without Python."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "scripts/test", "scripts/quickstart", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    return root


def write_program(path: Path, *lines: str) -> None:
    """Write a shell program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def set_up(checkout: Path) -> None:
    """Write the files of a finished setup, with a fake Python and a fake distrain that print their arguments."""
    write_program(checkout / ".venv/bin/python", 'if [ "$1" = -c ]; then exit 0; fi', 'echo "python $*"; exit ${STATUS:-0}')
    write_program(checkout / ".venv/bin/distrain", 'echo "distrain $*"; exit ${STATUS:-0}')
    (checkout / ".venv/setup.log").touch()
    (checkout / ".venv/locked.stamp").write_text(f"{checkout}\n{(checkout / 'requirements.lock').read_text()}")
    (checkout / ".venv/packaged.stamp").write_text((checkout / "pyproject.toml").read_text())


def run(checkout: Path, command: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout from another folder, without input and with the PATH of the fixture."""
    environment = {"PATH": str(checkout.parent / "bin"), "HOME": os.environ.get("HOME", "/"), "CI": "true", **variables}
    bash = shutil.which("bash") or "bash"
    return subprocess.run(
        [bash, str(checkout / "scripts" / command), *arguments],
        cwd=checkout.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", ["quickstart", "test"])
def test_a_missing_python_is_one_line(checkout: Path, command: str) -> None:
    done = run(checkout, command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"scripts/{command}: Python 3.11 or later is missing: install it, or set PYTHON to its path\n"


def test_an_old_python_is_skipped(checkout: Path) -> None:
    write_program(checkout.parent / "bin/python3", "exit 1")
    write_program(checkout.parent / "bin/python3.12", 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    assert run(checkout, "test").stderr.startswith("scripts/test: python3.12 has no venv module: install it")


def test_a_python_without_wheels_is_skipped(checkout: Path) -> None:
    write_program(checkout.parent / "bin/python3", 'case "$2" in *"(3, 15)"*) exit 1;; *) exit 0;; esac')
    done = run(checkout, "test")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "scripts/test: python3 is newer than Python 3.14, the last that requirements.lock has packages for: "
        "set PYTHON to 3.14 or an older one\n"
    )
    write_program(checkout.parent / "bin/python3.13", 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    assert "python3 is newer than Python 3.14" in run(checkout, "test", PYTHON="python3").stderr
    assert run(checkout, "test").stderr.startswith("scripts/test: python3.13 has no venv module: install it")


def test_only_the_python_in_the_PYTHON_variable_is_tried(checkout: Path) -> None:
    done = run(checkout, "test", PYTHON="/nowhere/python3")
    assert done.stderr == "scripts/test: PYTHON=/nowhere/python3 is not Python 3.11 or later: set it to one, or unset it\n"


def test_an_environment_that_setup_did_not_make_is_not_touched(checkout: Path) -> None:
    kept = checkout / ".venv" / "kept"
    kept.parent.mkdir()
    kept.touch()
    done = run(checkout, "test", PYTHON=sys.executable)
    assert (done.returncode, kept.exists()) == (1, True)
    assert done.stderr == f"scripts/test: {kept.parent} was not made by this script: move it away\n"


def test_a_failed_install_is_one_line_and_the_next_run_tries_again(checkout: Path) -> None:
    write_program(
        checkout.parent / "bin/python3",
        'case "$1" in',
        "-V) echo Python 3.12;;",
        '-m) mkdir -p .venv/bin && ln -s "$(command -v broken)" .venv/bin/python;;',
        "esac",
    )
    write_program(checkout.parent / "bin/broken", "echo 'NameResolutionError: no host'; echo 'ERROR: no version of x'; exit 1")
    for _ in range(2):
        done = run(checkout, "test")
        assert done.returncode == 1
        assert done.stdout.startswith("making .venv with Python 3.12 ... ")
        (line,) = done.stderr.splitlines()
        assert "the package index can't be reached" in line
        assert line.endswith(f"(log: {checkout}/.venv/setup.log)")


def test_a_second_run_starts_at_once_and_passes_its_arguments_on(checkout: Path) -> None:
    set_up(checkout)
    done = run(checkout, "test", "-k", "two words", CXX="bash")
    first, *_, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert first == "python -m pytest -k two words"
    assert last.startswith("Next: ")


def test_the_script_returns_the_exit_status_of_pytest(checkout: Path) -> None:
    set_up(checkout)
    assert run(checkout, "test", STATUS="3").returncode == 3


def test_quickstart_plans_the_quickstart_recipe_and_trains_it(checkout: Path) -> None:
    set_up(checkout)
    lines = run(checkout, "quickstart", "train.steps=30").stdout.splitlines()
    assert [line for line in lines if line] == [
        "python -m distrain.trainer.machine.measure_machine",
        "distrain plan conf=quickstart train.steps=30",
        "distrain fit conf=quickstart train.steps=30",
    ]


def test_quickstart_does_not_train_if_the_plan_fails(checkout: Path) -> None:
    set_up(checkout)
    done = run(checkout, "quickstart", STATUS="1")
    assert (done.returncode, done.stdout) == (1, "python -m distrain.trainer.machine.measure_machine\ndistrain plan conf=quickstart\n")
    assert "distrain plan conf=quickstart failed with exit status 1" in done.stderr.splitlines()[-1]


def test_a_missing_compiler_is_a_warning(checkout: Path) -> None:
    set_up(checkout)
    done = run(checkout, "test")
    assert done.returncode == 0
    assert done.stderr == "warning: no C++ compiler (g++, clang++), so train.compile=true does not work\n"


def test_a_changed_lock_makes_the_environment_again(checkout: Path) -> None:
    set_up(checkout)
    with (checkout / "requirements.lock").open("a") as lock:
        lock.write("another==1\n")
    assert "Python 3.11 or later is missing" in run(checkout, "test").stderr
