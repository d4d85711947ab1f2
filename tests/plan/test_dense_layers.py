"""Mixtures whose first layers are dense: the stages of a plan add up to the model, balanced around them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.layout_of_run import layout_of_run
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import StageMemory
from distrain.trainer.plan.search.stage_boundaries import with_stages
from distrain.trainer.plan.timeline.step_costs import step_costs
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

HIDDEN, FFN, EXPERT_FFN, EXPERTS, VOCAB = 256, 3072, 128, 8, 1024
ATTENTION, NORMS = 4 * HIDDEN**2, 2 * HIDDEN
DENSE = ATTENTION + NORMS + 3 * HIDDEN * FFN
MIXTURE = ATTENTION + NORMS + HIDDEN * EXPERTS + 3 * HIDDEN * EXPERT_FFN * EXPERTS


def run_of(layers: int, dense_layers: int, **parallel: object) -> Run:
    """Return a run on two devices, by default of two stages."""
    device = Device(name="A100", memory=40e9, bandwidth=2e12, peak={"bf16": 312e12}, units=108)
    link = Link(bandwidth=25e9, latency=1e-5)
    model = Model(
        family="moe", norm="rmsnorm", act="swiglu", positions="rope", layers=layers, dense_layers=dense_layers, hidden=HIDDEN, heads=4,
        ffn=FFN, expert_ffn=EXPERT_FFN, experts=EXPERTS, top_k=2, vocab=VOCAB,
    )  # fmt: skip
    return Run(
        name="dense", model=model, cluster=Cluster(nodes=1, gpus=2, device=device, inside=link, between=link),
        parallel=Parallel(**{"pp": 2} | parallel), train=Train(batch=8, seq=512, steps=1), engine="native",  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("dense_layers", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_the_stages_hold_the_parameters_that_were_counted_by_hand(schedule: str, dense_layers: int) -> None:
    plan = make_plan(run_of(6, dense_layers, schedule=schedule))
    assert plan.memory
    assert plan.model
    whole = 2 * VOCAB * HIDDEN + HIDDEN + dense_layers * DENSE + (6 - dense_layers) * MIXTURE
    assert plan.model.parameters == whole == sum(stage.parameters for stage in plan.memory.stages)
    first, *_ = plan.memory.stages
    experts = sum(end - begin for begin, end in first.parts) - dense_layers
    ends = VOCAB * HIDDEN + (VOCAB * HIDDEN + HIDDEN) * (schedule == "zb_v")
    assert first.parameters == ends + dense_layers * DENSE + experts * MIXTURE
    assert sorted(layer for stage in plan.memory.stages for part in stage.parts for layer in range(*part)) == list(range(6))


def test_a_token_uses_the_dense_layers_whole() -> None:
    model = make_plan(run_of(6, 2)).model
    assert model
    unused = 4 * 3 * HIDDEN * EXPERT_FFN * (EXPERTS - 2)
    assert model.active_parameters == model.parameters - unused


def test_the_other_layers_are_balanced_around_the_dense_ones() -> None:
    """A dense layer has 2.5 times the parameters of another one and 4.7 times its FLOPs."""
    memory = make_plan(run_of(11, 2)).memory
    assert memory
    assert [stage.layers for stage in memory.stages] == [(0, 3), (3, 11)]


def test_layers_that_the_user_gives_count_the_dense_ones() -> None:
    memory = make_plan(run_of(6, 2, stages=(3, 3))).memory
    assert memory
    assert [stage.layers for stage in memory.stages] == [(0, 3), (3, 6)]


@pytest.mark.parametrize(("dense_layers", "layer"), [(0, MIXTURE), (2, DENSE)])
def test_what_zero_3_gathers_is_of_the_largest_layers(dense_layers: int, layer: int) -> None:
    """The ends of the model, two layers, and the gathered weights and gradients of one, in bf16."""
    held = first_stage(run_of(6, dense_layers, pp=1, zero=3, gather="micro"))
    ends = 2 * VOCAB * HIDDEN + HIDDEN
    assert held.bytes.buffers == 2 * (ends + 2 * layer) + 4 * layer


def test_zero_3_gathers_the_dense_layers_too() -> None:
    counts = []
    for dense_layers in (0, 2):
        run = replace(run_of(6, dense_layers, pp=1, zero=3), engine="papers")
        counts.append([(row.verb, row.count) for row in make_plan(run).traffic])
    assert counts[0] == counts[1] == [("all_gather", 24), ("all_gather", 24), ("reduce_scatter", 24)]


def test_searched_stages_are_written_with_the_dense_layers() -> None:
    run = run_of(6, 2)
    context = CostContext(run)
    layout = with_stages(layout_of_run(context, run.parallel, 1), (1, 3))
    assert layout.parallel.stages == (3, 3)
    assert make_plan(replace(run, parallel=layout.parallel)).problems == ()


def first_stage(run: Run) -> StageMemory:
    memory = make_plan(run).memory
    assert memory
    return memory.stages[0]


def test_what_a_dense_layer_holds_for_a_moment_comes_when_the_layers_behind_it_are_done() -> None:
    mixture, both, run = first_stage(run_of(2, 0)), first_stage(run_of(3, 1)), run_of(2, 0)
    dense = first_stage(replace(run, model=replace(run.model, family="llama", experts=0, top_k=0, expert_ffn=None)))
    assert both.layers == (0, 2)
    assert both.in_flight == mixture.in_flight == 2
    angles = 4 * 512 * HIDDEN // 4  # float32 cosines and sines of a head's elements at each position
    layer = mixture.bytes.activations // 2 - angles  # of a micro-batch
    assert dense.bytes.temporary - layer > mixture.bytes.temporary
    assert both.bytes.temporary == dense.bytes.temporary - layer


def test_the_blocks_of_a_timeline_take_what_its_passes_take() -> None:
    run = run_of(6, 2)
    costs = step_costs(replace(run, train=replace(run.train, batch=16)))
    assert costs
    assert [block.name for block in costs.blocks[0]][:3] == ["embedding", "layer 0", "layer 1"]
    for part, blocks in enumerate(costs.blocks):
        for kind, seconds in (("F", sum(block.forward for block in blocks)), ("B", sum(block.backward for block in blocks))):
            assert costs.passes[kind, part].total == pytest.approx(seconds, rel=1e-9)
