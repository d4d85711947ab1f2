"""Random recipes in random layouts: what is drawn, what a wrong layout is called, and what float64 says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from distrain.scripts.random_layouts.__main__ import draw, read_arguments
from distrain.scripts.random_layouts.data_files import write_data_files
from distrain.scripts.random_layouts.drawn_recipe import LEFT_OUT, SECTIONS, drawn_keys
from distrain.scripts.random_layouts.drawn_values import NO_VALUE, drawn_value, leaf_keys
from distrain.scripts.random_layouts.judged_proof import (
    RunFinding,
    Servers,
    judge_proof,
    memory_departures,
    odd_lines,
    unless_narrow,
)
from distrain.scripts.random_layouts.legal_trials import LegalTrials, plan_trial, run_with, wrong_advice
from distrain.scripts.random_layouts.typed_recipe import DrawnRecipe
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.prove.judge import LayoutResult
from distrain.trainer.prove.trials.layouts import ProveLayout
from distrain.trainer.prove.trials.trial import write_run_folder
from distrain.trainer.spec.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = {
    "model": "tiny", "model.layers": "2", "data": "synthetic", "train.batch": "8", "train.seq": "16", "train.microbatch": "4",
    "cluster.gpus": "2", "parallel.dp": "auto", "parallel.tp": "1", "parallel.pp": "1",
}  # fmt: skip


def small(folder: Path, **words: str) -> DrawnRecipe:
    return DrawnRecipe(words={**SMALL, "log.dir": str(folder / "proof"), **words}, steps=3)


def judged(recipe: DrawnRecipe, layouts: Sequence[ProveLayout], ranks: RankPool, folder: Path) -> dict[str, RunFinding]:
    """The findings of a proof on the pool's server, by run; in float32 where it asks for float64."""
    servers = Servers(folder, {}, started=dict.fromkeys((False, True), ranks.server))
    return {each.run: each for each in judge_proof(recipe, layouts, servers, checks=False).findings}


# What is drawn


def test_a_seed_draws_the_same_legal_recipe_and_layouts_again(tmp_path: Path) -> None:
    files, trials = write_data_files(tmp_path / "data"), LegalTrials()
    recipe, layouts, _ = draw(3, 1, files, trials, tmp_path)
    assert (recipe, layouts) == draw(3, 1, files, LegalTrials(), tmp_path)[:2]
    assert layouts
    assert all(LegalTrials().is_legal(recipe, each) for each in layouts)
    assert sum(trials.refused.values()) > 0
    assert trials.crashes == {}


def test_every_key_of_a_section_is_drawn_or_left_out_with_a_reason() -> None:
    known = {key for key in leaf_keys() if key.partition(".")[0] in SECTIONS}
    left_out = {start for start in LEFT_OUT if not any(key == start or key.startswith(f"{start}.") for key in known)}
    assert left_out == set()
    text = {key for key, hint in drawn_keys().items() if drawn_value(hint, None, Random(1)) is NO_VALUE}
    assert text == {f"data.{name}_key" for name in ("text", "prompt", "completion", "messages", "chosen", "rejected")}


def test_a_drawn_number_keeps_to_the_bounds_of_its_type() -> None:
    keys, random = leaf_keys(), Random(1)
    assert {drawn_value(keys["model.dropout"], None, random) < 1 for _ in range(50)} == {True}
    assert {drawn_value(keys["parallel.tp"], None, random) >= 1 for _ in range(50)} == {True}
    assert {drawn_value(keys["train.attention"], None, random) for _ in range(50)} == {"flash", "math"}
    assert None in {drawn_value(keys["model.window"], None, random) for _ in range(50)}


def test_advice_that_leaves_its_problem_is_named(tmp_path: Path) -> None:
    run = small(tmp_path, **{"train.batch": "9"}).recipe.run()
    says = "train.batch=9 is not a multiple of dp 2 x train.microbatch=4"
    good = Problem(rule="batch", says=says, changes=(("train.batch=16",), ("train.microbatch=1", "train.batch=10")))
    assert wrong_advice(run, good) == ""
    for wrong in ("train.seq=32", "train.batch=10"):
        bad = Problem(rule="batch", says=says, changes=(("train.batch=16",), (wrong,)))
        assert wrong_advice(run, bad) == f"after {wrong} it is refused as before"
    unreadable = Problem(rule="batch", says=says, changes=(("train.batch=none",),))
    assert wrong_advice(run, unreadable).startswith("after train.batch=none: train.batch=none is not")
    assert run_with(run, ["model.lora.targets=[query,down]", "model.tied=true"]).model.lora.targets == ("query", "down")


def test_words_that_are_no_arguments_are_refused() -> None:
    assert read_arguments(["seed=2", "--json", "a.json"])[0]["seed"] == "2"
    for words in (["sed=2"], ["--json"], ["planned"]):
        with pytest.raises(SystemExit, match="unknown"):
            read_arguments(words)


# What is found


@pytest.fixture(scope="module")
def found(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFinding]:
    """What is found of three layouts, two of which go wrong."""
    folder = tmp_path_factory.mktemp("random")
    for top in (folder / "proof", folder / "proof" / "wide"):
        choose_program(top, "spoiled", {"dp2.zero1": "faster", "dp2.zero3": "dies"})
    layouts = [ProveLayout(dp=2, zero=stage) for stage in (0, 1, 3)]
    return judged(small(folder), layouts, ranks, folder)


def test_a_planted_wrong_layout_is_named_with_its_command_and_no_other(found: dict[str, RunFinding]) -> None:
    assert {name: each.kind for name, each in found.items()} == {"dp2.zero1": "departs", "dp2.zero3": "failed"}
    departs = found["dp2.zero1"]
    assert re.match(r"error: in float64 \w+ is \S+ from one process", departs.wide)
    assert not departs.is_rounding
    assert departs.command.startswith("distrain prove conf=tiny_2x2x2 model=tiny ")
    assert departs.command.endswith("steps=3 layouts=dp2.zero1")
    assert "what a rank may raise" in found["dp2.zero3"].says


def test_other_bytes_than_planned_and_warnings_in_logs_are_named(tmp_path: Path) -> None:
    trial = plan_trial(small(tmp_path), ProveLayout(dp=2))
    write_run_folder(trial)
    assert trial.plan.memory is not None
    planned = trial.plan.memory.stages[0].bytes
    kinds = {"weights": planned.weights, "gradients": planned.gradients, "optimizer": planned.optimizer}
    kinds["activations"] = planned.activations + planned.logits

    def departures(**kind: int) -> list[str]:
        (trial.folder / "measured.json").write_text(json.dumps({"step": 2, "ranks": [kinds, {**kinds, **kind}]}))
        return list(memory_departures(LayoutResult(trial=trial, verdict="same")))

    assert departures() == departures(optimizer=planned.optimizer + 300) == []
    (more,) = departures(weights=2 * planned.weights)
    assert more == f"weights: measured {2 * planned.weights:,} bytes, planned {planned.weights:,}"

    (trial.folder / "ranks").mkdir()
    for rank, line in enumerate(("fine", "UserWarning: odd")):
        (trial.folder / "ranks" / f"{rank}.log").write_text(f"{line}\n{line}\n")
    assert odd_lines(trial.folder) == ["UserWarning: odd"]


def test_what_a_narrow_type_may_do_is_not_confirmed_by_float64() -> None:
    says = "rounding: in float64 loss is 2.0e-12 from one process"
    assert unless_narrow(says, []) == says
    narrow = unless_narrow(says, ["train.precision=fp8"])
    assert narrow == "not confirmed: in float64, without train.precision=fp8, loss is 2.0e-12 from one process"
    error = says.replace("rounding", "error")
    assert unless_narrow(error, ["train.precision=fp8"]) == error
