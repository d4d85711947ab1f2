"""Proofs of what users write beside degrees: a file of actions, layers of each stage, shards over some ranks, when weights are gathered."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.arguments.prove_arguments import read_layouts, read_prove_request
from distrain.cli.config.load import load_recipe
from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.tests.fakes.prove_screen import TINY, ScreenRecord, run_prove
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.plan.engines import engine_for
from distrain.trainer.prove.trials.layouts import FILE_SCHEDULE, ProveLayout, is_native, recipe_layout, run_in_layout
from distrain.trainer.prove.trials.plan_proof import Proof, SkippedLayout, candidates, plan_proof
from distrain.trainer.prove.trials.written_choices import choices_sentence, written_choices
from distrain.trainer.spec.problem import Problem

ORDER = "0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1B0,1F1,1I1,1W1\n"  # two micro-batches on two stages, as no built-in schedule has them


def file_words(folder: Path, *keys: str, order: str = ORDER) -> list[str]:
    """A recipe of two stages that run a file's actions, and further keys."""
    (folder / "order.csv").write_text(order)
    return ["model.layers=4", "parallel.pp=2", f"parallel.schedule={folder / 'order.csv'}", "cluster.gpus=2", "parallel.zero=0", *keys]


def proof_of(arguments: list[str], keys: list[str]) -> Proof:
    recipe = RecipeForRanks("quickstart", [*TINY[1:], *keys], None)
    return plan_proof(read_prove_request(arguments)[0], recipe.run(), recipe.run_on)


# fmt: off
NAMES = (  # name, its layout
    ("pp2.file",                        ProveLayout(pp=2, schedule=FILE_SCHEDULE)),
    ("pp2.stages1-3",                   ProveLayout(pp=2, stages=(1, 3))),
    ("pp2.interleaved.chunks3",         ProveLayout(pp=2, schedule="interleaved", chunks=3)),
    ("dp4.zero1.shard2",                ProveLayout(dp=4, zero=1, shard=2)),
    ("dp2.pp2.zero3.gather_micro",      ProveLayout(dp=2, pp=2, zero=3, gather="micro")),
    ("dp2.zero3.gather_step",           ProveLayout(dp=2, zero=3, gather="step")),
    ("dp2.tp2.powersgd4",               ProveLayout(dp=2, tp=2, compress=4)),
    ("dp2.zero2.offload_optimizer",     ProveLayout(dp=2, zero=2, offload="optimizer")),
    ("cp2.zero1.all_to_all",            ProveLayout(cp=2, zero=1, all_to_all=True)),
    ("dp2.zero3.offload_all",           ProveLayout(dp=2, zero=3, offload="all")),
    ("dp4.pp2.zero3.file.stages1-3.shard2.gather_step.full",
     ProveLayout(dp=4, pp=2, zero=3, schedule=FILE_SCHEDULE, stages=(1, 3), shard=2, gather="step", recompute="full")),
)
MISTAKES = (
    ("layouts=dp2.all_to_all",          ("dp2.all_to_all exchanges tokens for heads, but has one rank for each sequence: "
                                         "write dp2.all_to_all.cp2")),
    ("layouts=dp2.file",                "dp2.file has a schedule, file, but only one stage: write dp2.file.pp2"),
    ("layouts=dp2.stages1-3",           "dp2.stages1-3 has stages of a pipeline, but only one stage: write dp2.stages1-3.pp2"),
    ("layouts=pp2.stages",              "pp2.stages is no layout: write the layers of each part of the model, as stages1-2-1"),
    ("layouts=dp4.zero1.shard",         "dp4.zero1.shard is no layout: write a number, as shard2"),
    ("layouts=dp4.shard2",              "dp4.shard2 has shards of 2 ranks, and ZeRO shards nothing at stage 0: write dp4.shard2.zero1"),
    ("layouts=dp2.zero1.gather_step",   "dp2.zero1.gather_step says how often ZeRO 3 gathers weights, and gathers none: write zero3"),
    ("layouts=dp2.powersgd",            "dp2.powersgd is no layout: write a number, as powersgd2"),
    ("layouts=tp2.powersgd4",           "tp2.powersgd4 compresses gradients, and has one data-parallel rank: write tp2.powersgd4.dp2"),
    ("layouts=dp2.zero1.offload_optim", "dp2.zero1.offload_optim is no layout: did you mean offload_optimizer?"),
    ("layouts=dp2.offload_all",         "dp2.offload_all offloads, and ZeRO shards nothing at stage 0: write dp2.offload_all.zero3"),
    ("layouts=dp2.zero3.gather_steps",  "dp2.zero3.gather_steps is no layout: did you mean gather_step?"),
)
# fmt: on


@pytest.mark.parametrize(("name", "layout"), NAMES)
def test_a_layouts_name_has_what_users_write(name: str, layout: ProveLayout) -> None:
    assert layout.name == name
    assert read_layouts(name) == [layout]


@pytest.mark.parametrize(("argument", "line"), MISTAKES)
def test_a_mistake_in_what_users_write_is_one_line(argument: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["prove", "conf=quickstart", argument]) == 2
    assert capsys.readouterr().err == f"distrain: layouts: {line}\n"


def test_a_recipes_own_layout_is_as_it_is_written(tmp_path: Path) -> None:
    keys = file_words(tmp_path, "parallel.stages=[1,3]", "parallel.zero=3", "parallel.shard=2", "parallel.gather=step", "cluster.gpus=8")
    run = load_recipe("quickstart", [*TINY[1:], *keys])
    own = recipe_layout(run)
    assert own == ProveLayout(dp=4, pp=2, zero=3, schedule=FILE_SCHEDULE, stages=(1, 3), shard=2, gather="step")
    parallel = run_in_layout(run, own).parallel
    assert (parallel.actions, parallel.stages, parallel.shard, parallel.gather) == (ORDER, (1, 3), 2, "step")
    assert parallel.schedule == run.parallel.schedule
    assert [each.partition("=")[0] for each in written_choices(run)] == [
        *("parallel.schedule", "parallel.stages", "parallel.shard", "parallel.gather"),
    ]


def test_a_recipe_that_exchanges_heads_is_proved_so() -> None:
    run = load_recipe(
        "quickstart", [*TINY[1:], "parallel.cp=2", "parallel.cp_comm=all_to_all", "parallel.zero=0", "parallel.dp=1", "cluster.gpus=2"]
    )
    own = recipe_layout(run)
    assert own == ProveLayout(cp=2, all_to_all=True)
    assert run_in_layout(run, own).parallel == run.parallel
    assert written_choices(run) == ("parallel.cp_comm=all_to_all",)


def test_layouts_of_a_model_with_a_window_gather_keys_and_exchange_heads_where_ranks_share_a_sequence() -> None:
    """Attention computes a window in another way with either. With sinks ranks that gather keys are refused."""
    for words, exchanges in ((["model.window=null"], {False}), (["model.window=4"], {False, True}), (["model.sinks=true"], {True})):
        run = load_recipe("quickstart", [*TINY[1:], *words])
        assert {each.all_to_all for each in candidates(run) if each.cp > 1} == exchanges
        assert not any(each.all_to_all for each in candidates(run) if each.cp == 1)


def test_a_recipe_that_compresses_gradients_is_proved_so_and_its_other_layouts_are_not() -> None:
    keys = ["parallel.zero=0", "parallel.compress.name=powersgd", "parallel.compress.rank=2", "parallel.compress.start=40"]
    run = load_recipe("quickstart", [*TINY[1:], *keys, "cluster.gpus=2"])
    own = recipe_layout(run)
    assert own == ProveLayout(dp=2, compress=2)
    assert written_choices(run) == ("parallel.compress.name=powersgd",)
    proof = proof_of(["steps=6"], [*keys, "cluster.gpus=2"])
    compressed = {each.layout: each.run.parallel.compress for each in proof.trials if each.run.parallel.compress.name != "none"}
    assert {layout: (each.rank, each.start) for layout, each in compressed.items()} == {own: (2, 3)}
    assert proof.reference.run.parallel.compress.name == "none"
    assert recipe_layout(load_recipe("quickstart", [*TINY[1:], *keys, "cluster.gpus=1"])) is None


@pytest.mark.parametrize(("zero", "moved", "offload"), [(1, ("optimizer",), "optimizer"), (3, ("optimizer", "parameters"), "all")])
def test_a_recipe_that_offloads_is_proved_so(zero: int, moved: tuple[str, ...], offload: Any) -> None:
    keys = [f"parallel.zero={zero}", *(f"parallel.offload.{name}=true" for name in moved), "cluster.gpus=2", "engine=zero"]
    run = load_recipe("quickstart", [*TINY[1:], *keys])
    own = recipe_layout(run)
    assert own == ProveLayout(dp=2, zero=zero, offload=offload)
    assert run_in_layout(run, own).parallel.offload == run.parallel.offload
    assert written_choices(run) == tuple(f"parallel.offload.{name}=true" for name in moved)
    others = proof_of([f"layouts={own.name},dp2.zero{zero},tp2"], keys).trials
    assert [each.run.parallel.offload == run.parallel.offload for each in others] == [True, False, False]


def test_keys_without_an_effect_are_no_choices_of_a_recipe() -> None:
    run = load_recipe("quickstart", [*TINY[1:], "parallel.stages=[1,1]", "parallel.gather=micro", "parallel.zero=0", "parallel.shard=2"])
    assert written_choices(run) == ()
    assert recipe_layout(run) == ProveLayout(dp=2)


def test_what_is_written_runs_on_the_engine_that_the_name_says(tmp_path: Path) -> None:
    recipe = RecipeForRanks("quickstart", [*TINY[1:], *file_words(tmp_path)], None)
    for _, layout in NAMES:
        if layout.chunks != 3:  # of four layers
            run = run_in_layout(recipe.run_on(layout.ranks), layout)
            row, _ = engine_for(run, run.parallel)
            assert row is not None
            assert (row.name == "native") == is_native(layout), layout.name


def test_a_file_decides_the_number_of_micro_batches_of_each_layout(tmp_path: Path) -> None:
    keys = file_words(tmp_path, "train.batch=16", "train.microbatch=8")
    proof = proof_of(["layouts=pp2.file,dp2.pp2.file,dp4.pp2.file"], keys)
    assert [each.plan.microbatches for each in proof.trials] == [2, 2, 2]
    assert [each.run.train.microbatch for each in proof.trials] == [8, 4, 2]


def test_the_opening_says_whether_what_is_written_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof plans every layout of four ranks, the axes in pairs among them; of eight there are four times as many."""
    monkeypatch.setattr("distrain.trainer.prove.trials.plan_proof.MOST_PROCESSES", 4)
    keys = file_words(tmp_path, "parallel.stages=[1,3]")
    choices = f"parallel.schedule={tmp_path / 'order.csv'}, parallel.stages=[1,3]"
    proof = proof_of([], keys)
    assert ProveLayout(pp=2, schedule=FILE_SCHEDULE, stages=(1, 3)) in [each.layout for each in proof.trials]
    assert choices_sentence(proof) == f"pp2.file.stages1-3 trains the recipe's layout as it is written: {choices}"
    assert (
        choices_sentence(proof_of(["layouts=dp2"], keys)) == f"not trained: the recipe's {choices}: layouts= leaves out pp2.file.stages1-3"
    )
    many = replace(proof, recipe=load_recipe("quickstart", [*TINY[1:], *keys, "cluster.gpus=64"]), trials=())
    assert choices_sentence(many) == f"not trained: the recipe's {choices}: its layout needs 64 ranks, and a proof has at most 4 here"
    problem = Problem(rule="memory", says="it does not fit")
    own = SkippedLayout(layout=ProveLayout(pp=2, schedule=FILE_SCHEDULE, stages=(1, 3)), problem=problem)
    skipped = replace(proof, trials=(), skipped=(own,))
    assert choices_sentence(skipped) == f"not trained: the recipe's {choices}: it does not fit"
    assert choices_sentence(replace(proof, recipe=load_recipe("quickstart"))) == ""


def test_a_plan_of_a_file_whose_mend_has_no_stages_says_what_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan weighs a layout without stages, which the file's rows do not fit."""
    assert (
        command(
            [
                "plan",
                "conf=quickstart",
                *TINY[1:],
                *file_words(tmp_path, "parallel.zero=3", "parallel.gather=micro"),
                "engine=native",
            ]
        )
        == 0
    )
    assert "warning: engine native does not run parallel.zero=3 with" in capsys.readouterr().out


def test_a_layout_that_runs_a_file_needs_a_recipe_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["prove", "conf=quickstart", *TINY[1:], "layouts=pp2.file"]) == 1
    says = "layouts: pp2.file runs the recipe's own file of actions, and parallel.schedule=1f1b is none: set parallel.schedule=FILE.csv"
    assert capsys.readouterr().err == f"distrain: {says}\n"


def test_what_users_write_trains_the_curve_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    keys = file_words(tmp_path, "parallel.stages=[1,3]", "train.steps=3")
    names = "pp2.file.stages1-3,pp2.stages3-1,dp4.zero2.shard2,dp2.zero3.gather_step,pp2.zero1.zb_v.offload_optimizer,cp2.tp2.all_to_all"
    record = run_prove([*keys, f"layouts={names}"], tmp_path, lambda *_: nullcontext(ranks.server))
    assert record.status == 0
    assert "pp2.file.stages1-3 trains the recipe's layout as it is written" in " ".join(" ".join(record.lines).split())
    document = json.loads((tmp_path / "quickstart.prove" / "prove.json").read_text())
    assert [each["verdict"] for each in document["layouts"]] == ["same"] * 6
    rows = {each["layout"]: each for each in document["layouts"]}
    assert rows["pp2.file.stages1-3"]["stages"] == [1, 3]
    assert rows["pp2.file.stages1-3"]["schedule"] == str(tmp_path / "order.csv")
    assert (rows["dp4.zero2.shard2"]["shard"], rows["dp2.zero3.gather_step"]["gather"]) == (2, "step")
    assert rows["dp2.zero3.gather_step"]["engine"] == "native"
    offloaded = rows["pp2.zero1.zb_v.offload_optimizer"]
    assert (offloaded["offload"], offloaded["messages"]["verdict"]) == (["optimizer"], "equal")
    assert document["written"]["says"].startswith("pp2.file.stages1-3 trains")


# fmt: off
SPOILED = (  # fault, its verdict, what is said of it
    ("pp2.file=other_order",                "actions",  r"as action 3 of stage 0, rank 0 ran 0B1, and its schedule says 0I0"),
    ("dp2.pp2.file=lost_weights",           "departs",  r"gradient norm departs at step 1"),
    ("pp2.file.stages1-3=swapped_layers",   "departs",  r"loss departs at step 1"),
    ("dp4.zero1.shard2=wrong_shard_group",  "departs",  r"gradient norm departs at step 1"),
    ("cp2.all_to_all=chunks_by_rank",       "departs",  r"loss departs at step 1"),
    ("dp2.pp2.zero3.gather_micro=gathers_once", "messages", r"messages differ from the plan: dp all_gather"),
)
# fmt: on


@pytest.fixture(scope="module")
def wrong(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> ScreenRecord:
    """A proof in which each layout does what it should in another way."""
    folder = tmp_path_factory.mktemp("wrong")
    faults = dict(fault.split("=") for fault, *_ in SPOILED)
    choose_program(folder, "spoiled", faults)
    arguments = [*file_words(folder), "model.tied=false", f"layouts={','.join(faults)}", "steps=2"]
    return run_prove(arguments, folder, lambda *_: nullcontext(ranks.server))


@pytest.mark.parametrize(("fault", "verdict", "says"), SPOILED, ids=[fault for fault, *_ in SPOILED])
def test_an_error_in_what_users_write_is_found(wrong: ScreenRecord, fault: str, verdict: str, says: str) -> None:
    layout = fault.partition("=")[0]
    assert wrong.status == 1
    row = next(line.split() for line in wrong.lines if re.match(rf"{re.escape(layout)} +\d", line))
    assert row[-1] == verdict
    assert re.search(rf"{re.escape(layout)}: {says}", " ".join(" ".join(wrong.lines).split()))
