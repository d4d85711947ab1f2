"""What a plan says of Muon: its states, its messages and its time by hand, which engines run it, bounds of a search that stay bounds."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.plan.test_search_bounds import EveryLayout, NothingDiscarded, larger
from distrain.trainer.models.families import op_table
from distrain.trainer.models.ops.op_table import model_parameters
from distrain.trainer.plan.axes.muon_matrices import dealt, matrix_order, newton_schulz_flops, owner
from distrain.trainer.plan.axes.weight_slices import WeightShard
from distrain.trainer.plan.engines import engine_for, engine_reason
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Message, Plan
from distrain.trainer.plan.search.search import LayoutSearch
from distrain.trainer.plan.search.space import Space
from distrain.trainer.rundir.resume_changes import compare_runs
from distrain.trainer.spec.run import Run

LLAMA = ("llama3_8b_1node", "cluster.gpus=4", "model.layers=4", "train.batch=16", "optim=muon", "parallel.zero=0", "engine=native")
MOE = ("quickstart", "model=tiny_moe", "cluster.gpus=4", "parallel.zero=0", "optim=muon")


def run_of(*words: str) -> Run:
    return load_recipe(words[0], list(words[1:]))


def planned(*words: str) -> Plan:
    plan = make_plan(run_of(*words))
    assert plan.memory
    assert plan.time
    return plan


def matrices_by_hand(run: Run) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that Muon steps: those of a layer's products, which their names say."""
    parts = ("attention.query", "attention.key", "attention.value", "attention.out", *(f"mlp.{each}" for each in ("gate", "up", "down")))
    parts += tuple(f"{kind}.{each}" for kind in ("experts", "shared") for each in ("gate", "up", "down"))
    table = op_table(run)
    shapes = {each.name: each.shape(table.sizes) for each in model_parameters(table, range(run.model.layer_groups))}
    return {
        name: shape
        for name, shape in shapes.items()
        if name.startswith("layers.") and name.split(".", 2)[2][:-7] in parts and name.endswith("weight")
    }


@pytest.mark.parametrize("words", [LLAMA, MOE, ("tiny_full", "optim=muon"), ("bert_large", "optim=muon")])
def test_the_table_says_which_weights_are_matrices_of_layers(words: tuple[str, ...]) -> None:
    """Attention's and feed-forwards'; no router, embedding, head, norm or bias."""
    run = run_of(*words)
    table = op_table(run)
    found = {each.name: each.shape(table.sizes) for each in model_parameters(table, range(run.model.layer_groups)) if each.hidden_matrix}
    assert found == matrices_by_hand(run)
    assert len(found) >= 6 * run.model.layers


def shard(name: str, *shape: int) -> WeightShard:
    zeros = (0,) * len(shape)
    return WeightShard(name=name, shape=shape, offset=zeros, length=shape, size=shape, copy=0, copies=1, shared=False, hidden_matrix=True)


def test_matrices_are_dealt_the_largest_first_and_equals_by_their_layers() -> None:
    shards = [
        shard(f"layers.{layer}.{name}", *shape) for layer in (0, 1) for name, shape in (("a", (8, 8)), ("b", (8, 8)), ("c", (2, 4, 16)))
    ]
    order = [(each.shard.name[7:], each.expert) for each in matrix_order(shards)]
    assert order == [("0.a", 0), ("1.a", 0), ("0.b", 0), ("1.b", 0), ("0.c", 0), ("0.c", 1), ("1.c", 0), ("1.c", 1)]
    assert newton_schulz_flops(8, 8, 1) > newton_schulz_flops(4, 16, 1) == newton_schulz_flops(16, 4, 1)
    assert [owner(number, 3, 2) for number in range(7)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 0)]


def test_dealt_matrices_are_counted_as_they_are_dealt() -> None:
    for first, count, every in ((0, 7, 3), (5, 9, 4), (3, 0, 2), (2, 1, 5)):
        for at in range(every):
            assert dealt(first, count, at, every) == sum(number % every == at for number in range(first, first + count))


def test_states_are_a_momentum_of_each_matrix_and_adams_two_of_all_other_weights() -> None:
    run = run_of(*LLAMA)
    matrices = sum(prod(shape) for shape in matrices_by_hand(run).values())
    plan, others = planned(*LLAMA), planned(*LLAMA, "optim=adamw")
    assert plan.memory
    assert others.memory
    spared = 4 * matrices
    assert others.memory.stages[0].bytes.optimizer - plan.memory.stages[0].bytes.optimizer == spared
    assert plan.run
    assert others.run
    assert others.run.checkpoint_bytes - plan.run.checkpoint_bytes == spared
    for words, share in (
        (("parallel.zero=1",), 4),
        (("parallel.zero=2",), 4),
        (("parallel.zero=3",), 4),
        (("parallel.tp=4",), 4),
        (("parallel.pp=4",), 4),
    ):
        some, every = planned(*LLAMA, *words).memory, planned(*LLAMA, *words, "optim=adamw").memory
        assert some
        assert every
        assert every.stages[1 % len(every.stages)].bytes.optimizer - some.stages[1 % len(some.stages)].bytes.optimizer == spared // share


def test_papers_spare_as_much() -> None:
    some, every = (planned(*LLAMA, "engine=papers", f"optim={name}").memory for name in ("muon", "adamw"))
    assert some
    assert every
    assert every.stages[0].bytes.optimizer - some.stages[0].bytes.optimizer == 4 * sum(map(prod, matrices_by_hand(run_of(*LLAMA)).values()))


def messages(plan: Plan, axis: str, verb: str) -> list[Message]:
    return [each for each in plan.traffic if (each.axis, each.verb) == (axis, verb)]


BF16 = 2


def test_messages_are_those_of_whole_matrices() -> None:
    """Four layers of seven matrices for four ranks: each owns seven, of which the first owns the largest."""
    shapes = matrices_by_hand(run_of(*LLAMA)).values()
    order = sorted((newton_schulz_flops(shape[-2], shape[-1], 1), prod(shape)) for shape in shapes)[::-1]
    owned, whole = sum(size for _, size in order[::4]), sum(size for _, size in order)
    (gathered,) = messages(planned(*LLAMA), "dp", "all_gather")
    assert (gathered.payload, gathered.count) == (4 * owned * BF16, 1)
    for zero in (1, 2, 3):
        assert [each.payload for each in messages(planned(*LLAMA, f"parallel.zero={zero}"), "dp", "all_to_all")] == [
            whole // 4 * BF16,
            owned * BF16,
        ]
    split = planned(*LLAMA, "parallel.tp=4")
    assert [each.payload for each in messages(split, "tp", "all_to_all")] == [whole // 4 * BF16, owned * BF16]
    assert messages(split, "dp", "all_gather") == []
    assert messages(planned(*LLAMA, "optim=adamw"), "dp", "all_gather") == []
    for each in (*messages(split, "tp", "all_to_all"), gathered):
        assert each.exposed == each.seconds is not None


def test_time_is_that_of_the_products_that_the_first_rank_computes() -> None:
    """On products this large a device is near its rate: five iterations of three products each."""
    run = run_of(*LLAMA)
    rate = run.cluster.device.peak["bf16"] * run.cluster.device.product_share
    order = sorted((newton_schulz_flops(shape[-2], shape[-1], 5) for shape in matrices_by_hand(run).values()), reverse=True)
    for words, ranks in (
        ((), 4),
        (("parallel.zero=1",), 4),
        (("parallel.dp=2", "parallel.tp=2"), 4),
        (("parallel.tp=4",), 4),
        (("parallel.zero=1", "parallel.shard=2"), 2),
    ):
        some, every = planned(*LLAMA, *words).time, planned(*LLAMA, *words, "optim=adamw").time
        assert some
        assert every
        added, least = some.optimizer - every.optimizer, sum(order[::ranks]) / rate
        assert 0.7 * least < added < 1.5 * least, (words, added, least)
    ten, five = (planned(*LLAMA, *words, f"optim.muon.ns_steps={steps}").time for steps in (10, 5))
    assert ten
    assert five
    assert ten.optimizer - five.optimizer == pytest.approx(least, rel=0.2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_step_writes_and_reads_an_update_of_each_matrix_where_adam_does_its_second_moment(precision: str) -> None:
    from distrain.trainer.plan.costs.cost_context import CostContext
    from distrain.trainer.plan.costs.cost_model import StageElements
    from distrain.trainer.plan.layout_of_run import layout_of_run
    from distrain.trainer.plan.native.cost_model import NativeCosts

    bytes_moved = []
    for name in ("muon", "adamw"):
        context = CostContext(run_of(*LLAMA, f"optim={name}", f"train.precision={precision}"))
        layout, held = layout_of_run(context, context.run.parallel, 4), StageElements(dense=100, frozen=0, experts=0, matrices=80)
        assert context.own_rates
        bytes_moved.append(NativeCosts().step_seconds(context, layout, held, 1) * context.own_rates.memory)
    assert bytes_moved[0] - bytes_moved[1] == pytest.approx(2 * 80 * ((4 if precision == "fp32" else BF16) - 4))


def test_the_step_holds_updates_and_the_products_of_the_largest_matrix() -> None:
    run = run_of(*LLAMA, "cluster.gpus=1")
    shapes = [shape[-2:] for shape in matrices_by_hand(run).values()]
    largest = max(2 * prod(shape) + 2 * min(shape) ** 2 for shape in shapes)
    from distrain.trainer.plan.costs.cost_context import CostContext
    from distrain.trainer.plan.costs.muon import step_bytes
    from distrain.trainer.plan.layout_of_run import layout_of_run

    def held(*words: str, gradient: int) -> int:
        run = run_of(*LLAMA, *words)
        context = CostContext(run)
        layout = layout_of_run(context, run.parallel, run.train.microbatch)
        return step_bytes(context, layout, layout.partition.kinds[0], gradient)

    whole = sum(map(prod, shapes))
    assert held("cluster.gpus=1", gradient=2) == BF16 * largest
    assert held("cluster.gpus=1", gradient=4) == BF16 * (largest + whole)
    order = sorted((newton_schulz_flops(shape[-2], shape[-1], 1), prod(shape)) for shape in shapes)[::-1]
    owned = sum(size for _, size in order[::4])
    assert held(gradient=2) == BF16 * max(owned + largest, 5 * owned)
    assert held("parallel.zero=1", gradient=2) == BF16 * max(owned + largest, whole // 4 + 2 * owned)
    assert held("parallel.tp=4", gradient=2) == BF16 * max(owned + largest, 2 * owned + whole // 4)


# fmt: off
NATIVE_ENGINE = "engine native does not run optim.name=muon"
LIMITS: list[tuple[dict[str, Any], str | None, str]] = [  # what differs, the engine that auto takes, what is said of the first limit
    ({},                                                                   "native", ""),
    ({"parallel.zero": 3, "parallel.pp": 2, "parallel.schedule": "zb_h1"}, "native", ""),
    ({"engine": "zero"},                                                   "zero",   "engine zero does not run optim.name=muon"),
    ({"engine": "pipe", "parallel.pp": 2},                                 "pipe",   "engine pipe does not run optim.name=muon"),
    ({"parallel.pp": 2, "parallel.schedule": "pipedream"},    None, f"{NATIVE_ENGINE} with parallel.schedule=pipedream"),
    ({"parallel.sync.every": 2},                              None, f"{NATIVE_ENGINE} with parallel.sync.every=2"),
    ({"parallel.staleness": 1},                               None, f"{NATIVE_ENGINE} with parallel.staleness=1"),
    ({"parallel.compress.name": "powersgd"},                  None, f"{NATIVE_ENGINE} with parallel.compress.name=powersgd"),
    ({"parallel.reduce": "server"},                           None, f"{NATIVE_ENGINE} with parallel.reduce=server"),
    ({"model.lora.rank": 2},                                  None, f"{NATIVE_ENGINE} with model.lora.rank=2"),
    ({"model.mtp.layers": 1},                                 None, f"{NATIVE_ENGINE} with model.mtp.layers=1"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "engine", "says"), LIMITS)
def test_what_does_not_run_muon_says_so_and_each_mend_helps(changes: dict[str, Any], engine: str | None, says: str) -> None:
    words = [f"{key}={value}" for key, value in ({"engine": "auto"} | changes).items()]
    run = run_of(*LLAMA, *words)
    row, limits = engine_for(run, run.parallel)
    assert (row.name if row else None) == engine
    assert (limits[0].says if limits else "") == says
    plan = make_plan(run)
    assert plan.runnable == (not says)
    for each in [each for each in plan.warnings if each.rule == "engine"]:
        assert each.mend
        for mend in each.mend.removeprefix("set ").split(" or "):
            assert make_plan(run_of(*LLAMA, *words, *mend.split())).runnable, mend
    if not says:
        assert engine_reason(run, run.parallel, "native") == "it alone runs optim.name=muon"


def test_a_model_of_transformers_is_refused() -> None:
    run = run_of(*LLAMA)
    hf = replace(run, engine="auto", model=replace(run.model, family="hf", parameters={"embedding.weight": (256, 4096)}))
    (limit,) = engine_for(hf, hf.parallel)[1]
    assert limit.says == "engine native does not run optim.name=muon with model.family=hf"


def test_moments_start_at_zero_where_muon_replaces_another_optimizer_or_the_reverse() -> None:
    """Both have kinds in common, but of other weights."""
    adamw, muon = run_of("quickstart"), run_of("quickstart", "optim.name=muon")
    assert [each.says.split()[0] for each in compare_runs(adamw, muon, step=3).problems] == ["optim.name"]
    for before, now in ((adamw, muon), (muon, adamw)):
        found = compare_runs(before, replace(now, checkpoint=replace(now.checkpoint, accept=("optim.name",))), step=3)
        assert not found.problems
        assert {"exp_avg", "exp_avg_sq"} <= set(found.new_moments)
        assert ("momentum_buffer" in found.new_moments) == (now is muon)
    assert compare_runs(muon, muon, step=3).new_moments == ()
    slower = replace(muon, optim=replace(muon.optim, muon=replace(muon.optim.muon, momentum=0.9)))
    assert [each.text for each in compare_runs(muon, slower, step=3).reported] == ["optim.muon.momentum 0.95 -> 0.9"]


def with_muon(name: str, layers: int) -> Run:
    run = larger(name)
    return replace(run, model=replace(run.model, layers=layers), optim=replace(run.optim, name="muon"))


def test_no_layout_costs_less_than_its_bounds() -> None:
    search = EveryLayout(Space(with_muon("moe", 8), runnable=True), rows=1)
    search.capacity = 1 << 60
    search.run_all()
    assert search.held > 100


def test_the_best_layouts_are_found_with_bounds_as_without() -> None:
    some, every = (kind(Space(with_muon("llama", 8), runnable=True), rows=10).run_all() for kind in (LayoutSearch, NothingDiscarded))
    assert some.best
    assert [(each.peak, each.seconds) for each in some.best] == [(each.peak, each.seconds) for each in every.best]
