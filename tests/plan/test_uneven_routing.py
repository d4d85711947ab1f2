"""A plan for uneven routing: what the busiest rank of experts holds and sends, and up to which load memory suffices."""

from dataclasses import replace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.models.families import op_table
from distrain.trainer.plan.costs.deferred_bytes import deferred_bytes
from distrain.trainer.plan.costs.local_tensors import LocalTensors, block_split
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import MemoryBytes, Message, Plan
from distrain.trainer.spec.run import Run

RECIPES = {
    "mixtral":                ("mixtral_8x7b",),
    "latent attention":       ("deepseek_v3",),
    "linear attention":       ("qwen3_next_80b",),
    "shares of a pipeline":   ("mixtral_8x7b", "parallel.pp=2", "parallel.tp=2"),
    "compiled":               ("mixtral_8x7b", "train.compile=true", "parallel.zero=1"),
    "of papers":              ("mixtral_8x7b", "engine=papers"),
    "inputs that wait":       ("mixtral_8x7b", "parallel.pp=2", "parallel.zero=1", "parallel.schedule=zb_h1"),
}  # fmt: skip
ROWS = pytest.mark.parametrize("words", RECIPES.values(), ids=RECIPES)


def plan_of(words: tuple[str, ...], load: float = 1.0, *others: str) -> Plan:
    plan = make_plan(load_recipe(words[0], (*words[1:], *others, f"parallel.ep_load={load}")))
    assert plan.ok, plan.problems
    return plan


def fullest(plan: Plan) -> MemoryBytes:
    assert plan.memory
    return plan.memory.stages[plan.memory.stage].bytes


def exchanges(plan: Plan) -> list[Message]:
    return [each for each in plan.traffic if each.axis == "ep"]


def local_tensors(run: Run) -> LocalTensors:
    split = block_split(run.parallel, run.train.microbatch, "torch", fused=False)
    return LocalTensors(op_table(run), split, vocab_multiple=1, activation=2, form="torch")


def others(plan: Plan) -> list[tuple[str, str, int, int]]:
    return [(each.axis, each.verb, each.payload, each.count) for each in plan.traffic if each.axis != "ep"]


@ROWS
def test_a_load_scales_what_a_rank_receives_and_nothing_else(words: tuple[str, ...]) -> None:
    plans = [plan_of(words, load) for load in (1.0, 1.5, 2.0)]
    even, half, double = map(fullest, plans)
    grown = double.activations - even.activations
    assert half.activations - even.activations == pytest.approx(grown / 2, rel=1e-6)
    assert [each.weights + each.gradients + each.optimizer + each.logits for each in (half, double)] == [
        even.weights + even.gradients + even.optimizer + even.logits
    ] * 2
    for plan, load in zip(plans, (1.0, 1.5, 2.0), strict=True):
        assert [each.payload for each in exchanges(plan)] == [load * each.payload for each in exchanges(plans[0])]
        assert others(plan) == others(plans[0])
    seconds = [plan.time.step for plan in plans if plan.time]
    assert seconds == sorted(set(seconds))
    assert plans[0].model == plans[2].model  # its FLOPs too


def test_a_load_scales_the_bytes_of_received_copies() -> None:
    """Mixtral's experts save each copy that they receive, and of it gate, up and activated gate; half of a copy's bytes more at 1.5."""
    run = load_recipe("mixtral_8x7b", ("parallel.recompute=none",))
    model, train = run.model, run.train
    copies = train.microbatch * train.seq * model.top_k
    assert model.expert_ffn
    saved = model.layers * copies * 2 * (model.hidden + 3 * model.expert_ffn)  # bytes in bf16
    even, uneven = (fullest(plan_of(("mixtral_8x7b", "parallel.recompute=none"), load)) for load in (1.0, 1.5))
    assert uneven.activations - even.activations == saved // 2


def test_a_load_scales_the_copies_that_are_sorted_by_expert_and_those_that_wait_for_gradients_of_weights() -> None:
    """A rank sorts its own copies by rank and what it received by expert, and back. Half of what it received is more at 1.5."""
    run = load_recipe("mixtral_8x7b")
    model, (even, uneven) = run.model, [local_tensors(replace(run, parallel=replace(run.parallel, ep_load=each))) for each in (1.0, 1.5)]
    copies = run.train.microbatch * run.train.seq * model.top_k
    ops = {op.name: op for op in op_table(run).layer}
    for name in ("dispatch", "combine"):
        moved, more = (sum(map(local.bytes, ops[name].moves)) for local in (even, uneven))
        assert more - moved == 2 * copies * model.hidden * 2 // 2  # read and written, in bf16
    waiting, more = (sum(deferred_bytes(ops[name], local) for name in ("experts", "experts.down")) for local in (even, uneven))
    assert model.expert_ffn
    assert more - waiting == copies * (2 * model.hidden + 3 * model.expert_ffn) * 2 // 2


@pytest.mark.parametrize(("words", "load"), [(("parallel.ep=1",), 4.0), (("parallel.ep=2",), 4.0)])
def test_no_rank_gets_more_than_all_copies(words: tuple[str, ...], load: float) -> None:
    """Of one rank all copies are its own; of two, one has at most twice an even share."""
    ranks = int(words[0][-1])
    found, most = (plan_of(("mixtral_8x7b", *words), each) for each in (load, float(ranks)))
    assert (found.memory, found.time, found.traffic) == (most.memory, most.time, most.traffic)


@ROWS
def test_memory_suffices_up_to_the_load_that_is_said(words: tuple[str, ...]) -> None:
    memory = plan_of(words).memory
    assert memory
    assert memory.most_ep_load is not None
    at_most = plan_of(words, memory.most_ep_load)
    assert at_most.fits
    assert at_most.memory
    assert at_most.memory.most_ep_load == memory.most_ep_load  # whatever load is planned
    run = load_recipe(words[0], words[1:])
    highest = min(run.parallel.ep, run.model.experts / run.model.top_k)
    (says,) = [each.says for each in plan_of(words).warnings if each.rule == "routing"]
    if memory.most_ep_load < highest:
        assert not plan_of(words, round(memory.most_ep_load + 0.01, 2)).fits
        assert says.endswith(f"; memory suffices for parallel.ep_load={memory.most_ep_load:.2f}")
    else:
        assert memory.most_ep_load == highest
        assert says.endswith("; memory suffices for any routing")


def test_where_even_routing_does_not_fit_no_load_is_said() -> None:
    host = ("parallel.zero=1", "parallel.offload.optimizer=true", "cluster.host.memory=20e9")
    plans = [plan_of(("mixtral_8x7b",), 1.0, *words) for words in (host, ("cluster.device.memory=40e9",))]
    for plan in plans:
        assert not plan.fits
        assert plan.memory
        assert plan.memory.most_ep_load is None
    assert [each.says for each in plan.warnings if each.rule == "routing"] == [
        "expert ranks are planned for even routing, 8 experts over 8 ranks"
    ]
    planned = "the busiest rank of experts is planned to compute 1.25 times an even share (parallel.ep_load)"
    (says,) = [each.says for each in plan_of(("mixtral_8x7b",), 1.25).warnings if each.rule == "routing"]
    assert says == f"{planned}; memory suffices for parallel.ep_load=1.91"
