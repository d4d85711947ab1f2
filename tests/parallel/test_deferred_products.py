"""Schedules that compute weights' gradients apart hold what their products need, and no more: what a plan counts, to the byte."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.layout.held_passes import STEADY, held_passes
from distrain.trainer.plan.layout.schedules import SCHEDULES, part_of
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

BASE = (
    *("quickstart", "data=synthetic", "train.steps=2", "train.batch=8", "train.seq=32", "train.microbatch=1", "optim.warmup=1"),
    *("train.evaluate.every=0", "log.every=1", "engine=native", "model.layers=4"),
)
LLAMA, MOE = ("model=tiny_llama", "model.kv_heads=2", "model.vocab=257"), ("model=tiny_moe", "model.top_k=4", "model.expert_bias=true")
HYBRID = ("model=tiny_hybrid", "model.top_k=4")
MLA, LORA = ("model=tiny_mla", "model.top_k=4", "model.q_lora_rank=0"), "model.lora={rank: 4, alpha: 8}"
# fmt: off
ROWS = {  # the model, ranks, the layout; bytes of ends of experts and of scales, which are a number each
    "zb_h1":            (LLAMA, 2, "pp: 2, schedule: zb_h1", 0),
    "four stages":      ((*LLAMA, "model.layers=8"), 4, "pp: 4, schedule: zb_h1, recompute: full", 0),
    "zb_v, recomputed": (LLAMA, 2, "pp: 2, schedule: zb_v, recompute: full", 0),
    "dualpipev_w":      (LLAMA, 2, "pp: 2, schedule: dualpipev_w, recompute: full", 0),
    "sequence":         ((*LLAMA, "train.loss_chunks=3"), 4, "pp: 2, tp: 2, sequence: true, schedule: zb_h1", 0),
    "bf16":             ((*LLAMA, "train.precision=bf16"), 4, "pp: 2, cp: 2, zero: 2, schedule: zb_h1, recompute: full", 0),
    "experts":          (MOE, 4, "pp: 2, ep: 2, zero: 3, schedule: zb_h1, recompute: full", 0),
    "experts, tp":      (MOE, 4, "pp: 2, tp: 2, sequence: true, schedule: zb_h1", 0),
    "linear attention": (HYBRID, 4, "pp: 2, tp: 2, schedule: zb_h1, recompute: full", 0),
    "further tokens":   ((*LLAMA, "model.layers=2", "model.mtp.layers=2"), 2, "pp: 2, schedule: zb_h1", 0),
    "LoRA":             ((*LLAMA, LORA), 2, "pp: 2, schedule: zb_h1", 0),
    "LoRA, sequence":   ((*LLAMA, LORA), 4, "pp: 2, tp: 2, sequence: true, schedule: zb_h1", 0),
    "LoRA of experts":  ((*MLA, LORA), 2, "pp: 2, schedule: zb_h1", 64),
    "fp8":              ((*LLAMA, "train.precision=fp8"), 4, "pp: 2, tp: 2, sequence: true, schedule: zb_h1", 200),
}
# fmt: on


@pytest.mark.parametrize("row", ROWS)
def test_a_stage_holds_what_is_planned_until_weights_gradients_are_computed(ranks: RankPool, tmp_path: Path, row: str) -> None:
    """With recomputation a micro-batch saves a layer's input, and its products that wait hold several times as much."""
    model, gpus, degrees, numbers = ROWS[row]
    words = (*BASE, *model, f"cluster.gpus={gpus}", f"parallel={{{degrees}}}")
    run = load_recipe(words[0], words[1:])
    memory = make_plan(run).memory
    assert memory is not None
    job = ranks.train(tmp_path / "run", *words)
    for rank, held in enumerate(json.loads((job.folder / "measured.json").read_text())["ranks"]):
        planned = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        assert 0 <= held["activations"] - planned.activations - planned.logits <= numbers


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.splits_backward])
def test_more_micro_batches_than_a_steady_step_has_hold_no_more(name: str) -> None:
    schedule = SCHEDULES[name]
    for stages, more in product((2, 3, 5), (0, 1, 7)):
        for stage in range(stages):
            found = held_passes(schedule, stage, stages, STEADY * stages + more, 1)
            counts = dict.fromkeys("FIBW", 0)
            seen, parts = set(), schedule.parts(1)
            for kind, _, chunk in schedule.actions(stage, stages, STEADY * stages + more, 1):
                counts[kind] += 1
                if part_of(stage, chunk, stages, folded=schedule.folded) == parts * stages - 1:
                    counts[f"{kind}, head"] = counts.get(f"{kind}, head", 0) + 1
                head = {key[0]: many for key, many in counts.items() if key.endswith("head")}
                saved, waiting = counts["F"] - counts["I"] - counts["B"], counts["I"] - counts["W"]
                of_head = head.get("F", 0) - head.get("I", 0) - head.get("B", 0), head.get("I", 0) - head.get("W", 0)
                seen.add((saved / parts, waiting / parts, *of_head))
            assert set(found) <= seen
            assert all(any(all(one <= other for one, other in zip(each, most, strict=True)) for most in found) for each in seen)
            assert max(each.saved + each.deferred for each in found) <= schedule.in_flight(stage, stages, 99, 1)


def test_the_fullest_stage_may_be_any_of_equal_ones() -> None:
    """Of stages with as many layers a later one has more products that wait; the last has one layer here."""
    words = (*LLAMA, "model.layers=10", "cluster.gpus=4", "parallel={pp: 4, schedule: zb_h1, recompute: full, stages: [3, 3, 3, 1]}")
    memory = make_plan(load_recipe(BASE[0], (*BASE[1:], *words))).memory
    assert memory is not None
    assert [stage.bytes.total for stage in memory.stages].index(memory.peak) == memory.stage == 2
