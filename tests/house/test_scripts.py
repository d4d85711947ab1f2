"""scripts/quickstart and scripts/test: what they say and do where something is missing, and what they pass on."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["basename", "bash", "cat", "cmp", "dirname", "env", "flock", "grep", "ln", "mkdir", "mv", "rm", "tail", "wc"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a space in its path that holds what the two commands read, and a PATH of its own without Python."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "scripts/test", "scripts/quickstart", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    return root


def program(path: Path, *lines: str) -> None:
    """Write a shell program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def set_up(checkout: Path) -> None:
    """What a finished set-up leaves behind, with a Python and a distrain that say what they were given."""
    program(checkout / ".venv/bin/python", 'if [ "$1" = -c ]; then exit 0; fi', 'echo "python $*"; exit ${STATUS:-0}')
    program(checkout / ".venv/bin/distrain", 'echo "distrain $*"; exit ${STATUS:-0}')
    (checkout / ".venv/setup.log").touch()
    (checkout / ".venv/locked.stamp").write_text(f"{checkout}\n{(checkout / 'requirements.lock').read_text()}")
    (checkout / ".venv/packaged.stamp").write_text((checkout / "pyproject.toml").read_text())


def run(checkout: Path, command: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the checkout from another folder, with no input and only its own PATH."""
    environment = {"PATH": str(checkout.parent / "bin"), "HOME": os.environ.get("HOME", "/"), "CI": "true", **variables}
    bash = shutil.which("bash") or "bash"
    return subprocess.run(
        [bash, str(checkout / "scripts" / command), *words],
        cwd=checkout.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", ["quickstart", "test"])
def test_a_missing_python_is_named_in_one_line(checkout: Path, command: str) -> None:
    done = run(checkout, command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"scripts/{command}: Python 3.11 or later is missing: install it, or set PYTHON to where it is\n"


def test_an_old_python_is_passed_over(checkout: Path) -> None:
    program(checkout.parent / "bin/python3", "exit 1")
    program(checkout.parent / "bin/python3.12", 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    assert run(checkout, "test").stderr.startswith("scripts/test: python3.12 has no venv module: install it")


def test_a_python_that_was_asked_for_is_the_only_one_tried(checkout: Path) -> None:
    done = run(checkout, "test", PYTHON="/nowhere/python3")
    assert done.stderr == "scripts/test: PYTHON=/nowhere/python3 is not Python 3.11 or later: set it to one that is, or unset it\n"


def test_an_environment_that_is_not_ours_is_left_alone(checkout: Path) -> None:
    kept = checkout / ".venv" / "kept"
    kept.parent.mkdir()
    kept.touch()
    done = run(checkout, "test", PYTHON=sys.executable)
    assert (done.returncode, kept.exists()) == (1, True)
    assert done.stderr == f"scripts/test: {kept.parent} was not made by this command: move it away\n"


def test_a_failed_install_is_one_line_and_is_tried_again(checkout: Path) -> None:
    program(
        checkout.parent / "bin/python3",
        'case "$1" in',
        "-V) echo Python 3.12;;",
        '-m) mkdir -p .venv/bin && ln -s "$(command -v broken)" .venv/bin/python;;',
        "esac",
    )
    program(checkout.parent / "bin/broken", "echo 'NameResolutionError: no host'; echo 'ERROR: no version of x'; exit 1")
    for _ in range(2):
        done = run(checkout, "test")
        assert done.returncode == 1
        assert done.stdout.startswith("making .venv with Python 3.12 ... ")
        (said,) = done.stderr.splitlines()
        assert "a network is needed once" in said
        assert said.endswith(f"(all of it: {checkout}/.venv/setup.log)")


def test_a_second_run_starts_at_once_and_passes_its_arguments_on(checkout: Path) -> None:
    set_up(checkout)
    done = run(checkout, "test", "-k", "two words", CXX="bash")
    first, *_, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert first == "python -m pytest -k two words"
    assert last.startswith("Next: ")


def test_pytests_exit_status_is_that_of_the_command(checkout: Path) -> None:
    set_up(checkout)
    assert run(checkout, "test", STATUS="3").returncode == 3


def test_quickstart_plans_the_quickstart_recipe_and_trains_it(checkout: Path) -> None:
    set_up(checkout)
    said = run(checkout, "quickstart", "train.steps=30").stdout.splitlines()
    assert [line for line in said if line] == [
        "python -m distrain.trainer.machine.facts",
        "distrain plan conf=quickstart train.steps=30",
        "distrain fit conf=quickstart train.steps=30",
    ]


def test_quickstart_trains_nothing_that_can_not_be_planned(checkout: Path) -> None:
    set_up(checkout)
    done = run(checkout, "quickstart", STATUS="1")
    assert (done.returncode, done.stdout) == (1, "python -m distrain.trainer.machine.facts\ndistrain plan conf=quickstart\n")
    assert "distrain plan conf=quickstart ended with exit status 1" in done.stderr.splitlines()[-1]


def test_a_missing_compiler_is_a_warning(checkout: Path) -> None:
    set_up(checkout)
    done = run(checkout, "test")
    assert done.returncode == 0
    assert done.stderr == "warning: no C++ compiler (g++, clang++): everything works but train.compile=true\n"


def test_another_lock_makes_the_environment_again(checkout: Path) -> None:
    set_up(checkout)
    with (checkout / "requirements.lock").open("a") as lock:
        lock.write("another==1\n")
    assert "Python 3.11 or later is missing" in run(checkout, "test").stderr
