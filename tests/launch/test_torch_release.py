"""Layers that a torch compiles wrongly are refused before anything starts."""

from __future__ import annotations

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.launch.admission import check_start
from distrain.trainer.machine import facts
from distrain.trainer.machine.torch_release import compile_problem
from distrain.trainer.plan.plan import make_plan

WORDS = ("cluster=1x2", "device=cpu", "parallel.dp=auto", "model=tiny_moe")


@pytest.mark.parametrize(
    ("words", "installed", "refused"),
    [
        ("parallel.tp=2 train.compile=true", "2.11.0+cu130", "parallel.tp=2"),
        ("parallel.cp=2 train.compile=true", "2.12.1", "parallel.cp=2"),
        ("parallel.ep=2 train.compile=true", "2.11.0", "parallel.ep=2"),
        ("parallel.tp=2 train.compile=true", "2.13.0+cpu", ""),
        ("parallel.tp=2 train.compile=true", "3.0.0", ""),
        ("parallel.tp=2 train.compile=true", "", ""),
        ("parallel.tp=2 train.compile=false", "2.11.0", ""),
        ("parallel.zero=3 train.compile=true", "2.11.0", ""),
        ("parallel.pp=2 train.compile=true", "2.11.0", ""),
        ("train.compile=true", "2.11.0", ""),
    ],
)
def test_compiled_messages_need_torch_2_13(words: str, installed: str, refused: str) -> None:
    problem = compile_problem(load_recipe("quickstart", [*WORDS, *words.split()]), installed)
    assert (problem.says if problem else "") == (refused and f"train.compile=true with {refused} trains wrongly with torch {installed}")


def test_a_run_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_recipe("quickstart", [*WORDS, "parallel.tp=2", "train.compile=true"])
    monkeypatch.setattr(facts, "torch_version", lambda: "2.11.0")
    (problem,) = check_start(run, make_plan(run)).problems
    assert str(problem) == (
        "train.compile=true with parallel.tp=2 trains wrongly with torch 2.11.0: set train.compile=false, or install torch 2.13 or later"
    )


def test_a_rank_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that torchrun starts are checked by no controller."""
    torch = pytest.importorskip("torch")
    from distrain.trainer.loop.build import build_engine
    from distrain.trainer.spec.problem import Unreadable

    run = load_recipe("quickstart", [*WORDS, "parallel.tp=2", "train.compile=true"])
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(Unreadable, match="trains wrongly with torch"):
        build_engine(run, None, "native")  # type: ignore[arg-type]
