"""Mixtures of experts train in every layout as in one process, send and hold the planned bytes, and resume in another layout."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.one_process import reference_curve, reference_rank_loads, reference_routing
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool


# fmt: off
BASE = (
    *("quickstart", "data=synthetic", "train.steps=2", "train.batch=8", "train.seq=32", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-3", "optim.warmup=1", "train.clip=0.5", "log.ledger=true", "checkpoint.final=false"),
)
MOE, MLA = ("model=tiny_moe", "model.layers=2"), ("model=tiny_mla", "model.layers=2")
HYBRID = ("model=tiny_hybrid",)
YARN = "model.rope={type: yarn, factor: 4, original_max_position_embeddings: 16, mscale: 1.0, mscale_all_dim: 0.7}"
CURVES = {
    "as it is":   MOE,
    "balanced":   (*MOE, "model.aux_loss=0.3", "model.router.z_loss=0.1", "model.shared_experts=1", "model.layers=4",
                   "model.dense_layers=2"),
    "small room": (*MOE, "model.aux_loss=0.3", "model.capacity=1.0", "model.dropout=0.1"),
    "plain":      (*MOE, "model.aux_loss=0.3", "model.router={normalize: false, scale: 4.0}", "model.qk_norm=true",
                   "model.qk_norm_over=all", "model.norm_place=both"),
    "sigmoid":    (*MOE, "model.aux_loss=0.3", "model.experts=8", "model.top_k=3", "train.steps=3",
                   "model.router={score: sigmoid, scale: 2.5, groups: 4, top_groups: 2, bias: true, bias_rate: 0.003, z_loss: 0.1}"),
    "half turned": (*MOE, "model.rope_share=0.5", "model.qkv_bias=true", "model.qk_norm=true", "model.layers=3", "model.dense_layers=1",
                   "model.shared_experts=1", "model.experts=8",
                   "model.router={score: sigmoid, scale: 2.5, bias: true, bias_rate: 0.003, z_loss: 0.3}"),
    "latent":     MLA,
    "latent keys": (*MLA, "model.q_lora_rank=0", "model.layers=3", "model.dense_layers=1", "model.dropout=0.1"),
    "stretched":  (*MLA, YARN, "model.heads=6"),
    "hybrid":     (*HYBRID, "model.aux_loss=0.3", "model.dropout=0.1"),
    "triples":    (*HYBRID, "model.layers=9", "model.full_attention_interval=3", "model.aux_loss=0.3", "engine=native"),
    "linear":     (*HYBRID, "model.linear_num_key_heads=2", "model.router.normalize=false", "engine=native"),
}
LAYOUTS = (  # ranks, degrees, the rest
    ("as it is",   2, "zero: 3",                                            "train.microbatch=2"),
    ("as it is",   4, "ep: 4, zero: 1, recompute: full",                    "train.microbatch=1"),
    ("as it is",   2, "ep: 2, zero: 2, offload: {optimizer: true}",         "train.microbatch=2"),
    ("as it is",   2, "cp: 2, zero: 1",                                     "train.microbatch=4"),
    ("balanced",   4, "ep: 2, pp: 2, zero: 1, schedule: gpipe",             "train.microbatch=2"),
    ("balanced",   4, "cp: 2, tp: 2, sequence: true",                       "train.microbatch=4"),
    ("small room", 4, "cp: 2, ep: 2, zero: 2",                              "train.microbatch=2"),
    ("balanced",   2, "tp: 2, sequence: true, recompute: full",             "train.microbatch=4"),
    ("balanced",   2, "pp: 2",                                              "train.microbatch=4"),
    ("balanced",   4, "ep: 2, tp: 2, zero: 1",                              "train.microbatch=2"),
    ("plain",      2, "tp: 2, zero: 1",                                     "train.microbatch=4"),
    ("sigmoid",    4, "cp: 2, ep: 2, zero: 3, recompute: full",             "train.microbatch=2"),
    ("sigmoid",    4, "tp: 2, pp: 2, sequence: true",                       "train.microbatch=4"),
    ("half turned", 4, "cp: 2, tp: 2, sequence: true",                      "train.microbatch=4"),
    ("half turned", 4, "ep: 2, pp: 2, zero: 1",                             "train.microbatch=2"),
    ("small room", 2, "ep: 2, zero: 0",                                     "train.microbatch=2"),
    ("small room", 2, "tp: 2, sequence: true, recompute: selective",        "train.microbatch=4"),
    ("latent",     4, "cp: 2, tp: 2, sequence: true",                       "train.microbatch=4"),
    ("latent",     4, "ep: 2, pp: 2, zero: 1",                              "train.microbatch=2"),
    ("latent keys", 2, "cp: 2, zero: 2, recompute: selective",              "train.microbatch=4"),
    ("latent keys", 4, "tp: 2, zero: 3, recompute: full",                   "train.microbatch=2"),
    ("stretched",  4, "tp: 4, sequence: true",                              "train.microbatch=4"),
    ("hybrid",     2, "zero: 3",                                            "train.microbatch=2"),
    ("hybrid",     2, "pp: 2",                                              "train.microbatch=4"),
    ("hybrid",     4, "ep: 2, tp: 2, zero: 1",                              "train.microbatch=2"),
    ("hybrid",     4, "tp: 4, sequence: true, recompute: selective",        "train.microbatch=4"),
    ("hybrid",     4, "ep: 2, pp: 2, zero: 1, recompute: full",             "train.microbatch=2"),
    ("hybrid",     2, "cp: 2, zero: 1",                                     "train.microbatch=4"),
    ("hybrid",     4, "cp: 2, tp: 2, sequence: true, cp_comm: all_to_all",  "train.microbatch=4"),
    ("hybrid",     4, "cp: 2, pp: 2, zero: 1, recompute: full",             "train.microbatch=2"),
    ("triples",    4, "cp: 4, zero: 3",                                     "train.microbatch=4"),
    ("triples",    4, "cp: 2, ep: 2, zero: 2, recompute: selective",        "train.microbatch=2"),
    ("triples",    3, "tp: 3, recompute: full",                             "train.microbatch=4"),
    ("triples",    4, "tp: 2, pp: 2, sequence: true, zero: 0, schedule: zb_h1", "train.microbatch=2"),
    ("triples",    3, "pp: 3, schedule: gpipe, stages: [1, 1, 1]",          "train.microbatch=4"),
    ("linear",     4, "ep: 2, tp: 2, sequence: true, zero: 3",              "train.microbatch=2"),
    ("linear",     2, "zero: 2",                                            "train.microbatch=2"),
    ("linear",     4, "tp: 4, sequence: true, recompute: full",             "train.microbatch=4"),
    ("linear",     4, "ep: 4, zero: 1",                                     "train.microbatch=1"),
    ("linear",     2, "cp: 2, zero: 3, recompute: full",                    "train.microbatch=4"),
)
# fmt: on
ROWS = pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row[0]} {row[2]}")


def words_of(row: tuple[str, int, str, str]) -> tuple[str, ...]:
    curve, ranks, degrees, micro = row
    return (*BASE, *CURVES[curve], f"cluster.gpus={ranks}", f"parallel={{{degrees}}}", micro)


@pytest.fixture(scope="module")
def train_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("moe")

    @cache
    def of(row: tuple[str, int, str, str]) -> PoolJob:
        return ranks.train(folder / f"row{LAYOUTS.index(row)}", *words_of(row))

    return of


@ROWS
def test_every_layout_trains_as_one_process_does(train_ranks: Any, row: tuple[str, int, str, str]) -> None:
    losses, norms = reference_curve((*BASE, *CURVES[row[0]]))
    job = train_ranks(row)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)
    assert all(0 <= close < 8 for close in job.figures("near_ties"))  # of 512 tokens and layers a step
    for name in reference_routing((*BASE, *CURVES[row[0]]))[0]:
        wanted = [each[name] for each in reference_routing((*BASE, *CURVES[row[0]]))]
        assert job.figures(name) == pytest.approx(wanted, abs=1e-4), name
    if (shares := load_recipe(words_of(row)[0], words_of(row)[1:]).parallel.ep) > 1:
        assert job.figures("ep_load") == pytest.approx(reference_rank_loads((*BASE, *CURVES[row[0]]), shares), abs=1e-4)


def test_a_pipeline_without_a_flush_counts_the_routing_of_each_step(ranks: RankPool, tmp_path: Path) -> None:
    """A stage runs forwards of the next step before a step's last backward. The rate leaves weights as they are."""
    words = (
        *BASE,
        *CURVES["balanced"],
        "train.steps=4",
        "optim.lr=1e-12",
        "optim.min_lr=0",
        "optim.weight_decay=0",
        "train.microbatch=2",
        "engine=native",
    )
    wanted = reference_routing((*words, "cluster.gpus=1"))
    job = ranks.train(tmp_path / "run", *words, "cluster.gpus=2", "parallel={pp: 2, schedule: pipedream}", "train.clip=0")
    for name in wanted[0]:
        assert job.figures(name) == pytest.approx([each[name] for each in wanted], abs=1e-4), name


def test_expert_ranks_in_bf16_round_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    """In bf16 a mixture departs from float32 by the tokens that rounding sends to other experts. The layout has no part in that: with
    equal micro-batches the losses of a first step are the same number, on a CPU with AMX to the last digit."""
    words = (*BASE, "model=tiny_gpt_oss", "model.layers=2", "train.microbatch=2", "train.precision=bf16", "train.gradients=fp32")
    meshes = ("cluster.gpus=1", "cluster.gpus=2 parallel.zero=2", "cluster.gpus=2 parallel.zero=2 parallel.ep=2")
    jobs = [ranks.train(tmp_path / str(at), *words, *mesh.split()) for at, mesh in enumerate(meshes)]
    assert len({job.figures("near_ties")[0] for job in jobs}) == 1
    assert [job.figures("loss")[0] for job in jobs] == pytest.approx([jobs[0].figures("loss")[0]] * len(jobs), abs=2e-6, rel=0)
    assert jobs[0].figures("near_ties")[0] > 20  # so that rounding has a choice
    assert jobs[2].figures("loss")[1] == pytest.approx(jobs[0].figures("loss")[1], abs=2e-3)  # its gradients have other sums


@ROWS
def test_ranks_send_the_planned_bytes_and_between_experts_those_of_even_routing_in_sum(
    train_ranks: Any, row: tuple[str, int, str, str]
) -> None:
    words = words_of(row)
    run = load_recipe(words[0], words[1:])
    counted = json.loads((train_ranks(row).folder / "ledger.json").read_text())["ranks"]
    audits = [compare_rank_messages(run, rank, rows) for rank, rows in enumerate(counted)]
    assert [line for audit in audits for line in audit if line.verdict == "differs"] == []
    exchanged = [line for audit in audits for line in audit if line.axis == "ep"]
    assert bool(exchanged) == (run.parallel.ep > 1)
    if run.model.capacity is None:  # what all ranks send is what was planned, whoever the tokens went to
        assert sum(line.counted_bytes for line in exchanged) == sum(line.planned_bytes for line in exchanged)
    assert all(line.counted_count == line.planned_count for line in exchanged)


@ROWS
def test_ranks_hold_the_planned_bytes(train_ranks: Any, row: tuple[str, int, str, str]) -> None:
    """Activations are equal only where they do not depend on routing; else they are nearer to a plan for the load that the step had."""
    words = words_of(row)
    run = load_recipe(words[0], words[1:])
    memory = make_plan(run).memory
    assert memory is not None
    measured = json.loads((train_ranks(row).folder / "measured.json").read_text())
    for rank, held in enumerate(measured["ranks"]):
        planned = memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes
        if run.parallel.zero != 3:
            assert held["weights"] == planned.weights
        if run.parallel.ep == run.parallel.pp == 1 and run.model.capacity is None and run.parallel.recompute == "none":
            counts = 8 * run.train.microbatch if run.model.adds_router_loss and run.parallel.cp == 1 else 0  # labels of each sequence
            assert held["activations"] == planned.activations + planned.logits + counts
    assert ("expert_ranks" in measured) == (run.parallel.ep > 1)
    if run.parallel.ep > 1 and run.parallel.recompute != "full" and run.model.capacity is None:
        stage = memory.stages[memory.stage].bytes
        held = [each["activations"] for each in measured["ranks"][: len(measured["ranks"]) // run.parallel.pp]]
        nearer = abs(max(held) - measured["expert_ranks"]["activations"])  # not equal: loads are of all groups' tokens, and of a whole step
        assert nearer < max(held) - stage.activations - stage.logits


LONGER = (*BASE, *CURVES["sigmoid"], "model.shared_experts=1", "train.steps=4")
RESUMED = (*LONGER, "train.microbatch=2", "checkpoint.resume=auto", "checkpoint.final=true")


@pytest.mark.parametrize("chosen", [2, 4], ids=["uneven routing", "all experts"])
def test_expert_ranks_hold_the_planned_activations_in_the_mean(ranks: RankPool, tmp_path: Path, chosen: int) -> None:
    """A plan counts even routing. Where every token chooses all experts routing is even, and each rank holds what is planned; else one rank
    holds more by the copies that another holds less: what is planned for the load that it had."""
    layout = ("cluster.gpus=2", "parallel.ep=2", "parallel.zero=2", "train.microbatch=4")
    words = (*BASE, "model=tiny_gpt_oss", f"model.top_k={chosen}", *layout)
    run = load_recipe(words[0], words[1:])
    memory = make_plan(run).memory
    assert memory is not None
    stage = memory.stages[0].bytes
    planned = stage.activations + stage.logits + 8 * run.train.microbatch  # labels of each sequence
    measured = json.loads((ranks.train(tmp_path / "run", *words).folder / "measured.json").read_text())
    held = [each["activations"] for each in measured["ranks"]]
    assert sum(held) == 2 * planned
    assert (held[0] == held[1]) == (chosen == run.model.experts)
    found = measured["expert_ranks"]
    assert (found["load"] > 1) == (chosen < run.model.experts)
    assert max(held) - 8 * run.train.microbatch == pytest.approx(found["activations"], rel=1e-3)  # loads are planned in thousandths


@pytest.fixture(scope="module")
def stopped(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of expert and tensor ranks that was stopped after two steps."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    ranks.fit(folder, *RESUMED, "cluster.gpus=4", "parallel={ep: 2, zero: 1, tp: 2}", signals=[(1, 0, 15)])
    return folder


@pytest.mark.parametrize("there", ["dp: 1", "ep: 4, zero: 1", "tp: 2, pp: 2"])
def test_a_checkpoint_of_expert_ranks_resumes_in_another_layout(ranks: RankPool, stopped: Path, tmp_path: Path, there: str) -> None:
    losses, norms = reference_curve(LONGER)
    shutil.copytree(stopped, tmp_path / "run")
    gpus = 1 if there == "dp: 1" else 4
    job = ranks.train(tmp_path / "run", *RESUMED, f"cluster.gpus={gpus}", f"parallel={{{there}}}")
    assert any(said.startswith("resumes from step") for said in job.lines)
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(norms, abs=0, rel=2e-5)
