"""Runs that do not fit: the message has the largest kinds of memory, and the smallest changes that fit."""

import re
from dataclasses import fields
from functools import cache

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.valid_run import BASE, Keys, fixed_run, gpt
from distrain.trainer.plan.memory_fixes import _single_changes, fitting_changes
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import overrides, with_changes
from distrain.trainer.spec.keys.units import gib_text
from distrain.trainer.spec.problem import Problem
from distrain.trainer.spec.run import Model, Run

LLAMA = Model(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, norm="rmsnorm", act="swiglu", positions="rope"
)
MIXTRAL = Model(
    family="moe", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, positions="rope", act="swiglu", experts=8, top_k=2
)
WORDS = Model(family="llama", layers=8, hidden=2048, heads=16, vocab=262144, norm="rmsnorm", act="swiglu", positions="rope")
WIDE, SEVEN = gpt(96, 12288, 96), gpt(32, 4096, 32)

# Runs that don't fit, and the number of keys in the smallest change that makes them fit (None: there is no such change).
# fmt: off
FULL: dict[str, tuple[Keys, int | None]] = {
    "nothing sharded":         ({"model": SEVEN, "train.precision": "fp32"},                                                  1),
    "attention's scores":      ({"model": SEVEN, "train.attention": "math", "parallel.zero": 3, "train.seq": 4096},           1),
    "a large micro-batch":     ({"model": SEVEN, "parallel.zero": 3, "train.microbatch": 16},                                 1),
    "a small device":          ({"model": gpt(24, 2048, 16), "cluster.device.memory": 11e9},                                  1),
    "a long sequence":         ({"model": SEVEN, "parallel.zero": 3, "train.seq": 16384},                                     2),
    "tensor parallel's whole": ({"model": gpt(64, 8192, 64), "parallel.tp": 8, "parallel.zero": 3, "train.microbatch": 8},  1),
    "all of gpipe's forwards": ({"model": SEVEN, "parallel.pp": 2, "parallel.tp": 8, "parallel.schedule": "gpipe"},           1),
    "a data degree that is set": ({"model": SEVEN, "parallel.dp": 16, "train.seq": 4096},                                     1),
    "too few stages":          ({"model": WIDE, "cluster.nodes": 16, "parallel.tp": 8, "parallel.pp": 4},                     1),
    "a mixture":               ({"model": MIXTRAL},                                                                           1),
    "experts on every rank":   ({"model": MIXTRAL, "train.microbatch": 1, "parallel.recompute": "full",
                                 "parallel.zero": 2, "cluster.nodes": 8},                                                      1),
    "experts split":           ({"model": MIXTRAL, "parallel.ep": 8, "train.seq": 4096},                                      2),
    "a hybrid shard":          ({"model": WIDE, "parallel.zero": 3, "parallel.shard": 2, "cluster.nodes": 8},                 2),
    "a long context":          ({"model": LLAMA, "train.seq": 65536, "train.microbatch": 1, "train.batch": 16},               1),
    "a large vocabulary":      ({"model": WORDS, "parallel.zero": 3, "train.microbatch": 8, "cluster.device.memory": 14e9},    1),
    "an offloaded optimizer":  ({"model": WIDE, "parallel.zero": 1, "parallel.offload.optimizer": True},                      2),
    "offload on one device":   ({"model": SEVEN, "cluster.nodes": 1, "cluster.gpus": 1, "parallel.zero": 2, "train.microbatch": 1,
                                 "parallel.recompute": "full", "parallel.offload.optimizer": True, "cluster.device.memory": 23e9},   1),
    "175B on two nodes":       ({"model": WIDE, "train.microbatch": 1},                                                       3),
    "175B on one device":      ({"model": WIDE, "train.microbatch": 1, "cluster.nodes": 1, "cluster.gpus": 1},                4),
    "weights on the host too": ({"model": SEVEN, "cluster.nodes": 1, "cluster.gpus": 1, "train.microbatch": 1, "parallel.zero": 3,
                                 "parallel.recompute": "full", "engine": "native", "cluster.device.memory": 16e9},              2),
    "split sequences under DeepSpeed": ({"model": SEVEN, "cluster.gpus": 2, "cluster.nodes": 1, "parallel.tp": 2, "parallel.sequence": True,
                                 "parallel.zero": 1, "parallel.recompute": "full", "train.microbatch": 1, "engine": "zero",
                                 "cluster.device.memory": 30e9},                                                               2),
    "an engine that is named": ({"model": SEVEN, "train.precision": "fp32", "engine": "pipe", "parallel.pp": 2, "train.microbatch": 8},  1),
    "more nodes, or fewer with more changes": ({"model": SEVEN, "cluster.nodes": 1, "cluster.gpus": 1, "cluster.device.memory": 24e9,
                                 "cluster.host.memory": 1e11},                                                                4),
    "moments too wide":        ({"model": SEVEN, "cluster.nodes": 1, "cluster.gpus": 1, "train.microbatch": 1, "parallel.recompute": "full",
                                 "cluster.device.memory": 95e9, "cluster.host.memory": 1e10},                                  1),
    "1T on one device that is set": ({"model": gpt(128, 25600, 160), "cluster.nodes": 1, "cluster.gpus": 1, "parallel.dp": 1,
                                 "cluster.host.memory": 1e11}, None),
}
# fmt: on

# The keys that the planner changes, smallest change first, as in trainer/plan/memory_fixes.py.
ORDER = (
    "train.compile",
    "train.loss_chunks",
    "parallel.recompute=selective",
    "parallel.schedule=1f1b",
    "parallel.shard=all",
    "parallel.sequence",
    "parallel.zero",
    "train.microbatch",
    "parallel.recompute=full",
    "train.attention",
    "parallel.ep",
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.offload",
    "engine",
    "optim.moments",
    "cluster.nodes",
)


@cache
def full(name: str) -> tuple[Run, Problem]:
    run = with_changes(BASE, FULL[name][0].items())
    plan = make_plan(run)
    assert (plan.ok, plan.fits) == (True, False)
    (problem,) = plan.problems
    return run, problem


def steps(change: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return the places in ORDER of a change's keys, each with the ZeRO stage that it sets, if it does; without parallel.dp, which follows
    from other degrees."""
    words = [word for word in change if not word.startswith("parallel.dp")]
    return [
        (next(at for at, each in enumerate(ORDER) if word.startswith(each)), word if word.startswith("parallel.zero") else "")
        for word in words
    ]


@pytest.mark.parametrize("name", FULL)
def test_a_run_that_does_not_fit_is_reported_with_its_largest_kinds_of_memory(name: str) -> None:
    run, problem = full(name)
    memory = make_plan(run).memory
    assert memory is not None
    held = memory.stages[memory.stage].bytes
    said = re.fullmatch(rf"needs {gib_text(memory.peak)} GiB of {gib_text(memory.capacity)} on stage {memory.stage}: (.*)", problem.says)
    assert said is not None
    kinds_said = [each.split() for each in said[1].split(", ")]
    kinds = {row.name: getattr(held, row.name) for row in fields(held) if row.name != "total"}
    assert [word for _, word in kinds_said] == [gib_text(kinds[kind]) for kind, _ in kinds_said]
    assert [kinds[kind] for kind, _ in kinds_said] == sorted(kinds.values())[:-4:-1]


@pytest.mark.parametrize("name", FULL)
def test_every_fitting_change_fits_in_the_bytes_shown(name: str) -> None:
    run, problem = full(name)
    before = make_plan(run)
    assert len(set(problem.changes)) == len(problem.changes)
    told = []
    for change in problem.changes:
        after = make_plan(fixed_run(run, change))
        assert (after.problems, after.fits) == ((), True)
        assert after.memory is not None
        assert after.runnable or not before.runnable
        told.append(f"{' '.join(change)} ({gib_text(after.memory.peak)})")
    assert problem.mend == ("fits with " + " or ".join(told) if told else "no change of layout was found that fits on this cluster")


@pytest.mark.parametrize("name", FULL)
def test_the_smallest_changes_come_first(name: str) -> None:
    _, problem = full(name)
    places = [steps(change) for change in problem.changes]
    nodes = ORDER.index("cluster.nodes")
    adds_nodes = any(nodes in dict(each) for each in places)
    alike = places[:1] if adds_nodes else places  # after it, one of fewer keys and more nodes
    assert [len(each) for each in alike] == [FULL[name][1]] * len(alike)
    assert places == sorted(places) or adds_nodes
    assert len({number for each in problem.changes for number in each if number.startswith("cluster.nodes")}) == sum(
        nodes in dict(each) for each in places
    )
    assert (not places) == (FULL[name][1] is None)


def test_a_loss_in_chunks_is_offered_where_logits_are_large() -> None:
    _, problem = full("a large vocabulary")
    assert problem.changes[0] == ("train.loss_chunks=8",)
    run = with_changes(BASE, FULL["a large vocabulary"][0].items())
    for others in ({"train.loss_chunks": 2}, {"train.microbatch": 1, "cluster.device.memory": 20e9}):
        assert not any("train.loss_chunks" in key for change in _single_changes(with_changes(run, others.items())) for key, _ in change)


def test_a_pipeline_that_keeps_all_forwards_is_offered_1f1b() -> None:
    """And a run without stages, for which the schedule says nothing, is not."""
    run, problem = full("all of gpipe's forwards")
    assert problem.changes[0] == ("parallel.schedule=1f1b",)
    for others in ({"parallel.pp": 1}, {"parallel.pp": 1, "model": MIXTRAL, "parallel.ep": 2}):
        keys = {key for change in _single_changes(with_changes(run, others.items())) for key, _ in change}
        assert "parallel.schedule" not in keys


def test_a_mixture_is_offered_more_expert_ranks_and_other_models_are_not() -> None:
    _, problem = full("experts on every rank")
    assert [each for each in problem.changes if each[0].startswith("parallel.ep")]
    dense = with_changes(BASE, FULL["too few stages"][0].items())
    assert not any(key == "parallel.ep" for change in _single_changes(dense) for key, _ in change)


def test_narrower_moments_are_offered_where_no_layout_fits_and_no_narrower_than_they_need_be() -> None:
    run, problem = full("moments too wide")
    assert problem.changes[0] == ("optim.moments=bf16",)
    assert any(word.startswith("cluster.nodes") for word in problem.changes[1])
    for others, offered in (
        ({"cluster.device.memory": 75e9}, ["optim.moments=int8"]),
        ({"cluster.device.memory": 75e9, "optim.moments": "bf16"}, ["optim.moments=int8"]),
        ({"cluster.host.memory": 1e12}, []),
        ({"optim.name": "sgd", "optim.momentum": 0.9, "optim.moments": "int8", "cluster.device.memory": 40e9}, []),
        ({"optim.name": "sgd", "cluster.device.memory": 40e9}, []),
    ):
        changes = [overrides(change) for change, _ in fitting_changes(with_changes(run, others.items()))]
        assert changes
        assert [word for change in changes for word in change if word.startswith("optim.")] == offered


def test_one_gpu_gets_the_engine_that_leaves_less_on_it() -> None:
    run, problem = full("offload on one device")
    assert make_plan(run).engine == "native"
    assert ("engine=zero",) in problem.changes


@pytest.mark.parametrize("name", FULL)
def test_no_single_change_fits_where_several_keys_are_shown(name: str) -> None:
    keys, least = FULL[name]
    if least == 1:
        return
    run = with_changes(BASE, keys.items())
    for key, word in (("recompute", "selective"), ("recompute", "full"), ("sequence", True), ("zero", 1), ("zero", 2), ("zero", 3)):
        assert not make_plan(with_changes(run, [(f"parallel.{key}", word)])).fits


def test_one_of_the_sentences_in_full() -> None:
    _, problem = full("nothing sharded")
    assert re.fullmatch(
        r"needs 1\d\d\.\d GiB of 74\.5 on stage 0: optimizer \d+\.\d, activations \d+\.\d, weights \d+\.\d: "
        r"fits with parallel\.zero=2 \(\d+\.\d\) or parallel\.zero=3 \(\d+\.\d\) or parallel\.tp=4 \(\d+\.\d\)",
        str(problem),
    )


def test_each_higher_zero_and_each_smaller_microbatch_that_divides_it_is_tried() -> None:
    changes = dict.fromkeys(_single_changes(load_recipe("llama3_8b_1node", ["parallel.zero=1", "train.microbatch=6", "train.batch=96"])))
    assert [value for ((key, value),) in changes if key == "parallel.zero"] == [2, 3]
    assert [value for ((key, value),) in changes if key == "train.microbatch"] == [3, 1]


def test_larger_degrees_go_as_far_as_their_axis_and_only_those_of_tensor_ranks_divide_the_heads() -> None:
    changes = dict.fromkeys(_single_changes(with_changes(BASE, {"model": gpt(6, 1152, 18)}.items())))
    degrees = {axis: [value for ((key, value), *_) in changes if key == f"parallel.{axis}"] for axis in ("ep", "tp", "pp", "cp")}
    assert degrees == {"ep": [], "tp": [2], "pp": [2, 4], "cp": [2, 4, 8]}
