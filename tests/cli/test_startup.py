"""The modules that commands load at start-up (scripts/bench_startup.py measures the time)."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "deepspeed", "numpy", "transformers", "wandb"}
PARSERS = {"hydra", "omegaconf", "antlr4", "yaml"}


def loaded_modules(*words: str) -> set[str]:
    """The top-level modules, and the modules of distrain, that a command has loaded when it ends."""
    program = f"""
import atexit, sys
atexit.register(lambda: print("loaded:", *sys.modules))
sys.argv = ["distrain", *{words!r}]
from distrain.cli.app import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.rsplit("loaded:", 1)[1].split()
    return {name for name in names if "." not in name or name.startswith("distrain.")}


def test_help_loads_no_parser_and_no_planner() -> None:
    names = loaded_modules("--help")
    assert not names & (HEAVY | PARSERS)
    assert not [name for name in names if name.startswith("distrain.trainer.plan.")]


def test_ls_loads_no_heavy_package_and_no_hydra() -> None:
    assert not loaded_modules("ls") & (HEAVY | {"hydra", "omegaconf", "antlr4"})


@pytest.mark.parametrize("recipe", ["quickstart", "megatron_1t_6x8x64"])
def test_plan_loads_no_heavy_package(recipe: str) -> None:
    assert not loaded_modules("plan", f"conf={recipe}") & HEAVY
