"""Shell completion: the words that complete a command line, in the form that each shell reads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from distrain.cli.completion import OPTIONS, candidates, completions
from distrain.cli.keys import config_files


@pytest.mark.parametrize(
    ("before", "word", "found"),
    [
        ([], "pl", ["plan"]),
        ([], "--v", ["--version"]),
        (["plan"], "--j", ["--json"]),
        (["plan"], "conf=tiny", ["conf=tiny_2x2x2", "conf=tiny_full"]),
        (["show"], "conf=quick", ["conf=quickstart"]),
        (["plan", "conf=quickstart"], "device=h", ["device=h100_80g", "device=h100_96g", "device=h200"]),
        (["plan", "conf=quickstart"], "lau", [f"launch={name}" for name in config_files.options("launch", None)]),
        (["plan", "conf=quickstart"], "parallel.zero=", [f"parallel.zero={stage}" for stage in range(4)]),
        (["plan", "conf=quickstart"], "parallel.seq", ["parallel.sequence=true", "parallel.sequence=false"]),
        (["plan", "conf=quickstart"], "parallel.mic", []),
        (["plan", "conf=quickstart"], "train.mic", ["train.microbatch=1"]),
        (["ls"], "mod", ["model"]),
        (["ls"], "optim=ad", ["optim=adamw", "optim=adamw_gpt3", "optim=adamw_llama"]),
        (["ls"], "train.steps=", []),
        (["ls", "model"], "", []),
        (["ls"], "ru", ["runs"]),
        (["ls"], "train.ev", ["train.evaluate", "train.evaluate.every", "train.evaluate.batches"]),
        (["ls"], "parallel.z", ["parallel.zero"]),
        (["cp"], "llama3_7", ["llama3_70b", "llama3_70b_dpo"]),
        (["cp"], "mod", ["model/"]),
        (["cp"], "model/tiny_", ["model/tiny_gpt_oss", "model/tiny_hybrid", "model/tiny_llama", "model/tiny_mla", "model/tiny_moe"]),
        (["cp", "quickstart"], "", []),
        (["show"], "--com", ["--comments"]),
        (["fit"], "-m", ["-m"]),
        (["doctor"], "conf=quick", ["conf=quickstart"]),
        (["doctor", "conf=quickstart"], "--c", ["--config-dir"]),
        (["nothing"], "", []),
    ],
)
def test_candidates_complete_the_word(before: list[str], word: str, found: list[str]) -> None:
    assert candidates(before, word) == found


def test_a_recipe_is_offered_first_and_only_once() -> None:
    assert candidates(["plan"], "") == [f"conf={name}" for name in config_files.recipes(None)]
    assert candidates(["plan", "conf=quickstart"], "") == [f"{group}=" for group in config_files.groups(None)]


def test_the_users_own_recipes_are_offered(tmp_path: Path) -> None:
    (tmp_path / "zzz.yaml").touch()
    assert candidates(["plan", "--config-dir", str(tmp_path)], "conf=z") == ["conf=zzz"]
    assert candidates(["plan", "--config-dir", "/nowhere"], "conf=z") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distrain", "plan", "conf", "=", "quick"], "quickstart"),
        (["distrain", "plan", "conf", "="], "\n".join(config_files.recipes(None))),
        (["distrain", "plan", "conf", "=", "quickstart", "device", "=", "cp"], "cpu"),
        (["distrain", "pl"], "plan"),
        (["distrain", "cp", "mod"], "model/\nmodel/VALUE"),
        (["distrain", "fit", "conf", "=", "quickstart", "train.ste"], "train.steps=\ntrain.steps=VALUE"),  # bash adds no space to either
        (["distrain", "fit", "conf", "=", "quickstart", "train.steps", "="], ""),
    ],
)
def test_words_that_bash_broke_at_the_equals_sign_are_joined(words: list[str], said: str) -> None:
    assert completions("bash", {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}) == said


def test_zsh_and_fish_get_whole_words() -> None:
    typed = {"_TYPER_COMPLETE_ARGS": "distrain plan conf=quick"}
    assert completions("zsh", typed) == "compadd -- conf=quickstart;"
    assert completions("fish", typed) == "conf=quickstart"
    assert completions("zsh", {"_TYPER_COMPLETE_ARGS": "distrain plan conf=./"}) == "_files"


def test_zsh_adds_no_space_after_a_word_that_goes_on(tmp_path: Path) -> None:
    for line, word in (("distrain fit conf=quickstart train.ste", "train.steps="), ("distrain cp mod", "model/")):
        assert completions("zsh", {"_TYPER_COMPLETE_ARGS": line}) == f"compadd -S '' -- {word};"
    (tmp_path / "a$(b).yaml").touch()
    typed = {"_TYPER_COMPLETE_ARGS": f"distrain plan --config-dir={tmp_path} conf=a"}
    assert completions("zsh", typed) == "compadd -- 'conf=a$(b)';"  # which zsh evaluates, and must not run


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_evaluates_what_it_is_given() -> None:
    typed = {**os.environ, "_DISTRAIN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "distrain fit conf=quickstart train.st"}
    script = 'compadd() { print -rl -- "$@" }; eval $("$1" -m distrain)'
    done = subprocess.run(["zsh", "-fc", script, "zsh", sys.executable], env=typed, capture_output=True, text=True)
    assert (done.stdout.split("\n"), done.stderr) == (["-S", "", "--", "train.steps=", ""], "")


def test_completion_does_not_load_hydra() -> None:
    program = """
import atexit, sys
atexit.register(lambda: print("loaded:", *sys.modules))
sys.argv = ["distrain"]
from distrain.cli.app import main
main()
"""
    typed = {"_DISTRAIN_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "distrain plan conf=quick"}
    done = subprocess.run([sys.executable, "-c", program], env=typed, capture_output=True, text=True)
    assert done.stdout.startswith("conf=quickstart\n"), done.stderr
    assert not {"hydra", "omegaconf", "msgspec", "rich", "torch"} & set(done.stdout.split())


def test_the_completion_script_of_a_shell_is_printed() -> None:
    """Typer looks for a shell among the parents, so this one is started by bash."""
    line = f"{quote(sys.executable)} -m distrain --show-completion bash; exit $?"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "_DISTRAIN_COMPLETE=complete_bash" in done.stdout


def test_every_verb_and_option_in_the_help_is_offered() -> None:
    from typer.main import get_command

    from distrain.cli.app import app

    verbs: Any = get_command(app)
    assert set(OPTIONS) == set(verbs.commands)
    for name, verb in verbs.commands.items():
        offered = {each for each in OPTIONS[name] if each != "--help"}
        taken = [set(row.opts) for row in verb.params if row.param_type_name == "option"]
        assert all(row & offered for row in taken), name
        assert all(any(each in row for row in taken) for each in offered), name
