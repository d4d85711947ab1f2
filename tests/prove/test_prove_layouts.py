"""The layouts of `distrain prove`: their names in `layouts=`, those that it trains, the runs that they make, and covering rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.arguments.prove_arguments import read_layouts, read_prove_request
from distrain.cli.config.load import load_recipe
from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.trainer.plan.engines import engine_for
from distrain.trainer.prove.trials.covering import choice_pairs, covering_rows
from distrain.trainer.prove.trials.layouts import (
    DEFAULT_COUNT,
    EACH_AXIS,
    ProveLayout,
    all_layouts,
    default_layouts,
    is_native,
    layout_microbatch,
    recipe_layout,
    run_in_layout,
)
from distrain.trainer.prove.trials.plan_proof import Proof, candidates, plan_proof, rank_limit

TINY = (
    "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=4", "parallel.zero=1",
)  # fmt: skip


def proof_of(arguments: list[str], *overrides: str) -> Proof:
    """The proof that `steps=` and `layouts=` request of a tiny recipe."""
    recipe = RecipeForRanks("quickstart", [*TINY, *overrides], None)
    return plan_proof(read_prove_request(arguments)[0], recipe.run(), recipe.run_on)


# fmt: off
MISTAKES = (
    ("steps=0",                  "steps=0 is not a whole number, at least 1"),
    ("steps=many",               "steps=many is not a whole number, at least 1"),
    ("steps=3 steps=4",          "steps is given 2 times: give it once"),
    ("layouts=",                 ("layouts= names no layout: write all, or degrees as dp2, tp2, cp2, pp2 or ep2 and flags as zero1, "
                                  "sequence, gpipe, native or full, joined by dots: dp2.tp2.zero1")),
    ("layouts=dp0",              "layouts: dp0 is no layout: a degree is at least 1, as dp2"),
    ("layouts=dp",               "layouts: dp is no layout: a degree is at least 1, as dp2"),
    ("layouts=dp2.zero4",        "layouts: dp2.zero4 is no layout: the stages are zero0 to zero3"),
    ("layouts=dp2..tp2",         "layouts: dp2..tp2 is no layout: write one dot between two parts"),
    ("layouts=pp2.gpip",         "layouts: pp2.gpip is no layout: did you mean gpipe?"),
    ("layouts=sequance.tp2",     "layouts: sequance.tp2 is no layout: did you mean sequence?"),
    ("layouts=dp2.dp4",          "layouts: dp2.dp4 sets dp twice: set it once"),
    ("layouts=dp2.nativ",        "layouts: dp2.nativ is no layout: did you mean native?"),
    ("layouts=pp2.1f1b.gpipe",   "layouts: pp2.1f1b.gpipe sets schedule twice: set it once"),
    ("layouts=dp2.gpipe",        "layouts: dp2.gpipe has a schedule, gpipe, but only one stage: write dp2.gpipe.pp2"),
    ("layouts=dp2.sequence",     ("layouts: dp2.sequence splits the sequence over tensor-parallel ranks, but has only one: "
                                  "write dp2.sequence.tp2")),
    ("layouts=dp1",              "layouts: dp1 is the one process that all others are compared with: leave it out, or add a degree: dp2"),
    ("layouts=dp2,tp2 train.stops=1", "no key train.stops: did you mean train.steps?"),
)
# fmt: on


@pytest.mark.parametrize(("arguments", "line"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_each_mistake_is_one_line(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = command(["prove", "conf=quickstart", *arguments.split()])
    output = capsys.readouterr()
    assert (status, output.out, output.err) == (2, "", f"distrain: {line}\n")


def test_all_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["prove", "layouts=dp0,zero9", "steps=x", "parallel.tpp=2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_steps_and_layouts_are_separated_from_the_recipes_arguments() -> None:
    request, rest, problems = read_prove_request(["conf=quickstart", "layouts=[dp2, tp2,dp2]", "steps=3", "train.steps=5"])
    assert (request.steps, request.chosen, [each.name for each in request.layouts]) == (3, "named", ["dp2", "tp2"])
    assert (rest, problems) == (["conf=quickstart", "train.steps=5"], [])
    assert read_prove_request(["layouts=all"])[0].chosen == "all"
    assert read_prove_request([])[0].chosen == "few"


def test_a_layouts_name_reads_back_as_that_layout() -> None:
    for layout in all_layouts(16, experts=True):
        for each in (layout, replace(layout, recompute="selective")):
            assert read_layouts(each.name) == [each]
    assert read_layouts("pp2.full.zero0.1f1b") == [ProveLayout(pp=2, recompute="full")]


# The layouts that are trained


def test_all_layouts_have_only_flags_that_take_effect() -> None:
    layouts = list(all_layouts(8))
    assert len(set(layouts)) == len(layouts)
    assert {each.ranks for each in layouts} == {2, 4, 8}
    assert all(each.tp > 1 for each in layouts if each.sequence)
    assert all(each.dp * each.cp > 1 for each in layouts if each.zero)
    assert all(each.pp > 1 for each in layouts if each.schedule != "1f1b")
    assert {each.ep for each in layouts} == {1}
    assert {each.ep for each in all_layouts(8, experts=True) if each.dp == 4} == {1, 2, 4}
    assert list(all_layouts(1)) == []


def test_what_deepspeed_trains_is_proved_on_engine_native_too_and_nothing_is_proved_twice() -> None:
    twice = {replace(each, engine="auto") for each in all_layouts(4) if each.engine == "native"}
    assert {ProveLayout(dp=2), ProveLayout(dp=2, zero=2), ProveLayout(tp=2, sequence=True), ProveLayout(pp=2)} < twice
    assert {ProveLayout(pp=2, schedule="zb_h1"), ProveLayout(dp=2, pp=2, zero=2)} < set(all_layouts(4)) - twice
    recipe = RecipeForRanks("quickstart", TINY, None)
    for each in all_layouts(4):
        run = run_in_layout(recipe.run_on(each.ranks), replace(each, engine="auto"))
        row, _ = engine_for(run, run.parallel)
        if row is not None:
            assert (row.name == "native") == is_native(replace(each, engine="auto")), each.name


def test_a_loss_in_chunks_is_proved_against_all_logits_of_one_process() -> None:
    run = load_recipe("quickstart", ["train.loss_chunks=4"])
    assert run_in_layout(run, ProveLayout()).train.loss_chunks == 1
    assert run_in_layout(run, ProveLayout(dp=2)).train.loss_chunks == 4


def test_on_gpus_a_layout_of_one_data_rank_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `engine: auto` is native."""
    monkeypatch.setattr("distrain.trainer.machine.measure_machine.cached_facts", lambda: {"cuda": [{}] * 2})
    names = {each.name for each in candidates(load_recipe("quickstart", ["device=h200"]))}
    assert {"dp2", "dp2.native", "tp2", "pp2", "pp2.zb_h1"} < names
    assert not {"tp2.native", "pp2.native"} & names


def test_covering_rows_have_every_pair_and_are_few() -> None:
    rows = list(product("abc", range(4), (False, True)))
    chosen = list(covering_rows(rows))
    assert set().union(*map(choice_pairs, chosen)) == set().union(*map(choice_pairs, rows))
    assert len(chosen) == 12  # 3 x 4: every pair of the two largest factors takes a row
    assert list(covering_rows(rows, taken=rows)) == []


def test_default_layouts_include_each_axis_alone_and_never_repeat() -> None:
    layouts = list(all_layouts(8))
    own = ProveLayout(dp=2, tp=2, pp=2, zero=1)
    chosen = default_layouts(layouts, [own, *EACH_AXIS])
    assert len(chosen) == len(set(chosen)) == DEFAULT_COUNT
    assert {own, *EACH_AXIS} <= set(chosen)
    assert {is_native(each) for each in chosen} == {False, True}
    assert [each.ranks for each in chosen] == sorted(each.ranks for each in chosen)
    of_two_ranks = {each.choices for each in layouts if each.ranks == 2}
    assert len(default_layouts([each for each in layouts if each.choices in of_two_ranks], [])) <= len(of_two_ranks)


def test_a_recipes_own_layout_is_among_the_defaults() -> None:
    assert recipe_layout(load_recipe("tiny_2x2x2")) == ProveLayout(dp=2, tp=2, pp=2, zero=1)
    assert recipe_layout(load_recipe("quickstart")) == ProveLayout(dp=2, zero=1)
    assert recipe_layout(load_recipe("quickstart", ["cluster.gpus=1"])) == ProveLayout(zero=1)
    interleaved = ["parallel.pp=2", "cluster=1x4", "parallel.schedule=interleaved"]
    own = ProveLayout(dp=2, pp=2, zero=1, schedule="interleaved")
    assert recipe_layout(load_recipe("quickstart", [*interleaved, "parallel.chunks=2"])) == own
    assert recipe_layout(load_recipe("quickstart", [*interleaved, "parallel.chunks=3"])) == replace(own, chunks=3)
    proof = proof_of([], "parallel.zero=2")
    assert ProveLayout(dp=2, zero=2) in [each.layout for each in proof.trials]
    assert proof.trials[0].layout == ProveLayout(dp=2)
    assert len(proof.trials) <= DEFAULT_COUNT


# fmt: off
OWN_ENGINES = (  # keys, the engine of the recipe's own layout
    (("engine=native",),                                                                     "native"),
    (("engine=native", "parallel.pp=2", "parallel.zero=0", "parallel.schedule=zb_h1"),       "auto"),  # it is native
    (("engine=zero",),                                                                       "auto"),
)
# fmt: on


@pytest.mark.parametrize(("keys", "engine"), OWN_ENGINES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_recipes_own_layout_has_its_engine_where_auto_is_another(keys: tuple[str, ...], engine: str) -> None:
    own = recipe_layout(load_recipe("quickstart", keys))
    assert own is not None
    assert own.engine == engine


def test_the_rank_limit_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_limit(load_recipe("quickstart")) == 8
    monkeypatch.setattr("distrain.trainer.machine.measure_machine.cached_facts", lambda: {"cuda": [{}] * 3})
    assert rank_limit(load_recipe("llama3_8b")) == 3


# Their runs

# fmt: off
MICROBATCHES = (  # batch, the recipe's micro-batch, layout -> micro-batch
    (16, 8, "dp2",     8),
    (16, 8, "dp4",     4),
    (16, 8, "dp8",     2),
    (16, 8, "pp2",     8),
    (16, 8, "pp4",     4),
    (16, 8, "dp2.pp4", 2),
    (24, 8, "pp4",     6),
    (24, 8, "pp4.interleaved", 6),
    (24, 4, "pp2.interleaved", 4),
    (24, 5, "dp2.pp2.interleaved", 3),
    (16, 8, "pp2.zb_v", 4),
    (6,  2, "pp4.interleaved", 2),  # the plan refuses it: four stages can't divide a batch of 6
    (12, 8, "dp2",     6),
    (12, 5, "tp2",     4),
    (8,  2, "dp2.pp8", 1),
    (7,  2, "dp2",     2),  # the plan refuses it: two replicas can't divide a batch of 7
)
# fmt: on


# fmt: off
ON_A_CPU = (
    (16, 2, "dp2",               4),
    (16, 2, "dp8",               2),  # one: two would be smaller than the recipe's
    (16, 2, "tp2",               8),
    (16, 2, "cp8.zero1",         8),
    (16, 2, "pp4",               4),
    (16, 2, "pp4.dualpipev",     2),
    (16, 2, "pp4.interleaved",   4),
    (12, 1, "pp2.interleaved",   6),
    (16, 2, "dp1",               2),  # the reference trains as the recipe says
    (12, 5, "tp2",               6),
)
# fmt: on


@pytest.mark.parametrize(("batch", "most", "name", "size"), MICROBATCHES)
def test_a_micro_batch_is_lowered_where_the_layout_requires_it(batch: int, most: int, name: str, size: int) -> None:
    run = load_recipe("quickstart", ["device=h200", f"train.batch={batch}", f"train.microbatch={most}"])
    (layout,) = read_layouts(name)
    assert isinstance(layout, ProveLayout)
    assert layout_microbatch(run, layout) == size
    assert run_in_layout(run, layout).train.batch == batch


@pytest.mark.parametrize(("batch", "most", "name", "size"), ON_A_CPU)
def test_a_micro_batch_is_raised_on_a_cpu(batch: int, most: int, name: str, size: int) -> None:
    run = load_recipe("quickstart", [f"train.batch={batch}", f"train.microbatch={most}"])
    (layout,) = read_layouts(name) if name != "dp1" else (ProveLayout(),)
    assert isinstance(layout, ProveLayout)
    assert layout_microbatch(run, layout) == size


def test_the_recipes_own_layout_keeps_its_micro_batch_on_a_cpu() -> None:
    run = load_recipe("tiny_2x2x2")
    (layout,) = read_layouts("dp2.tp2.pp2.zero1")
    assert isinstance(layout, ProveLayout)
    assert layout_microbatch(run, layout) == run.train.microbatch == 2


def test_a_trials_run_is_short_logs_every_step_and_has_only_its_layout() -> None:
    proof = proof_of(["steps=6", "layouts=dp2.full"], "cluster=1x4x2")
    (trial,) = proof.trials
    assert (trial.run.train.steps, trial.run.optim.warmup, trial.run.log.every, trial.run.checkpoint.resume) == (6, 3, 1, "never")
    assert (trial.run.cluster.gpus, trial.run.parallel.dp, trial.run.parallel.tp, trial.run.parallel.recompute) == (2, 2, 1, "full")
    assert trial.folder == Path("runs/quickstart.prove/dp2.full").absolute()
    assert (proof.steps, proof.reference.run.parallel.dp, proof.reference.run.parallel.zero) == (6, 1, 0)


def test_a_named_layout_that_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = command(["prove", "conf=quickstart", *TINY, "layouts=dp3,pp4.zb_h1,dp2", f"log.dir={tmp_path}"])
    output = capsys.readouterr()
    assert (status, output.out) == (1, "")
    assert [line.split(":")[1].strip() for line in output.err.splitlines()] == ["dp3", "pp4.zb_h1"]
    assert not list(tmp_path.iterdir())


def test_another_curve_by_design_is_refused_where_none_simulates_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ("model.lora.rank=2", "layouts=dp2.powersgd2,dp2,dp2.sync2", f"log.dir={tmp_path}")
    assert command(["prove", "conf=quickstart", *TINY, *lora]) == 1
    says = "model.lora.rank: another curve by design is simulated from drawn weights, all of them trained: leave model.lora.rank out"
    assert capsys.readouterr().err.splitlines() == [f"distrain: {name}: {says}" for name in ("dp2.powersgd2", "dp2.sync2")]


def test_a_recipe_that_one_process_cannot_train_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["prove", "conf=gpt3_175b"]) == 1
    assert capsys.readouterr().err.startswith("distrain: one process")
