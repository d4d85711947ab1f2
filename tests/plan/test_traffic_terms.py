"""What an engine is said to make of a plan's messages, weight by weight, are the bytes that the plan counts by elements."""

from __future__ import annotations

from collections import Counter

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.compare_rank_messages import rank_shards
from distrain.trainer.plan.costs.traffic_term import TrafficTerm
from distrain.trainer.plan.engines import cost_model
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.traffic import rank_traffic
from distrain.trainer.spec.run import Run

BASE = ("data=synthetic", "train.batch=16", "train.seq=32", "train.microbatch=1", "train.precision=fp32", "cluster.gpus=4")
DENSE, EXPERTS = ("model=tiny",), ("model=tiny_moe", "parallel.ep=2")
BOTH: tuple[tuple[str, ...], ...] = (
    *((*model, f"parallel.zero={zero}") for model in (DENSE, EXPERTS) for zero in (0, 1, 2)),
    *((*DENSE, "train.precision=bf16", f"parallel.zero={zero}") for zero in (1, 2)),
    (*DENSE, "train.precision=bf16", "train.gradients=fp32", "parallel.zero=1"),
    (*DENSE, "parallel.tp=2", "parallel.zero=1"),
    (*DENSE, "parallel.cp=2", "parallel.zero=2"),
)
STAGES: tuple[tuple[str, ...], ...] = tuple((*DENSE, "parallel.pp=2", f"parallel.zero={zero}") for zero in (0, 1))
NATIVE: tuple[tuple[str, ...], ...] = (
    *((*DENSE, f"parallel.zero={zero}", "parallel.shard=2") for zero in (1, 2)),
    (*DENSE, "parallel.zero=3", "parallel.gather=step"),
    *((*model, "optim=muon", f"parallel.zero={zero}") for model in (DENSE, EXPERTS) for zero in (1, 2)),
)
CASES = (
    *(("native", *words) for words in (*BOTH, *STAGES, *NATIVE)),
    *(("zero", *words) for words in BOTH),
    *(("pipe", *words) for words in STAGES),
)


def terms_of(run: Run, rank: int, engine: str) -> list[TrafficTerm]:
    position = mesh_position(run, rank)
    data = position.mesh.data_rank(position.coordinates)
    return list(cost_model(engine).traffic_terms(run, position.mesh, rank_shards(run, position), data))


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_an_engines_terms_are_the_bytes_that_each_rank_is_planned_to_send(words: tuple[str, ...]) -> None:
    """But for padding, which is less than 2 in 1,000 of these models."""
    engine, *keys = words
    run = load_recipe("quickstart", [*BASE, *keys, f"engine={engine}"])
    plan = make_plan(run)
    assert (plan.ok, plan.engine, plan.runnable) == (True, engine, True)
    for rank in range(plan.world):
        planned: Counter[str] = Counter()
        for each in rank_traffic(run, rank):
            planned[each.verb] += each.payload * each.count * (each.axis == "dp")
        found: Counter[str] = Counter()
        for term in terms_of(run, rank, engine):
            assert term.bytes > 0, term
            found[term.verb] += term.bytes
        assert found == pytest.approx(+planned, rel=2e-3)
