"""LoRA of mixtures of experts and of latent attention: layouts train the curve of one process, send and hold what was planned."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.one_process import reference_curve  # noqa: E402
from distrain.tests.fakes.small_models import CPU, batch_of, gradients, module_of, run_of  # noqa: E402
from distrain.trainer.layers.counter_rng import dropout_keys  # noqa: E402
from distrain.trainer.models.build import add_lora, build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.families import op_table  # noqa: E402
from distrain.trainer.models.ops.lora import without_lora  # noqa: E402
from distrain.trainer.plan.compare_rank_messages import compare_rank_messages  # noqa: E402
from distrain.trainer.plan.mesh_position import mesh_position  # noqa: E402
from distrain.trainer.plan.plan import make_plan  # noqa: E402
from distrain.trainer.spec.sections.lora import Lora, LoraTarget  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

# fmt: off
BASE = (
    *("quickstart", "data=synthetic", "train.steps=3", "train.batch=8", "train.seq=32", "train.evaluate.every=0", "log.every=1"),
    *("optim.lr=1e-2", "optim.warmup=1", "train.clip=0.5", "log.ledger=true", "model.lora={rank: 4, alpha: 8}"),
    "checkpoint.final=false",
)
CURVES = {
    "mixture": ("model=tiny_moe", "model.layers=4", "model.shared_experts=1", "model.dense_layers=1", "model.aux_loss=0.3"),
    "gpt-oss": ("model=tiny_gpt_oss", "model.layers=2", "model.lora.targets=[value,gate,down]"),
    "latent":  ("model=tiny_mla", "model.layers=4"),
    "latent keys": ("model=tiny_mla", "model.layers=2", "model.q_lora_rank=0", "model.lora.targets=[query,kv_a_proj_with_mqa,up]"),
    "dropped latent": ("model=tiny_mla", "model.layers=2", "model.lora.targets=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj]",
                       "model.lora.dropout=0.2"),
    "dropped keys": ("model=tiny_mla", "model.layers=2", "model.q_lora_rank=0", "model.lora.targets=[query,kv_a_proj_with_mqa]",
                     "model.lora.dropout=0.2"),
    "attention": ("model=tiny_moe", "model.layers=2", "model.lora.targets=[query,value]"),
    "hybrid": ("model=tiny_hybrid", "model.aux_loss=0.3"),
    "hybrid, odd": ("model=tiny_hybrid", "model.heads=6", "model.linear_num_key_heads=3", "model.linear_num_value_heads=6",
                    "model.lora.targets=[in_proj_qkvz,in_proj_ba,o_proj,shared_expert_gate]"),
    "hybrid, some": ("model=tiny_hybrid", "model.lora.targets=[k_proj,out_proj,up]"),
    "hybrid, frozen experts": ("model=tiny_hybrid", "model.lora.targets=[q_proj,in_proj_ba]"),
    "dropped linear": ("model=tiny_hybrid", "model.lora.dropout=0.2", "model.lora.targets=[in_proj_qkvz,out_proj,v_proj]"),
    "dropped hybrid": ("model=tiny_hybrid", "model.linear_num_key_heads=3", "model.linear_num_value_heads=6", "model.lora.dropout=0.2",
                       "model.heads=6", "model.lora.targets=[query,key,value,out,in_proj_qkvz,in_proj_ba,shared_expert_gate]"),
}
LAYOUTS = (  # ranks, degrees, the rest
    ("mixture",     8, "ep: 2, tp: 2, pp: 2, zero: 1",             "train.microbatch=2"),
    ("mixture",     4, "tp: 2, pp: 2, schedule: zb_h1",            "train.microbatch=2"),
    ("mixture",     4, "ep: 2, cp: 2, zero: 3, recompute: full",   "train.microbatch=2"),
    ("gpt-oss",     2, "tp: 2, sequence: true, zero: 1",           "train.microbatch=2"),
    ("latent",      4, "ep: 2, tp: 2, sequence: true, zero: 2",    "train.microbatch=2"),
    ("latent keys", 2, "tp: 2, zero: 0, recompute: selective",     "train.microbatch=4"),
    ("dropped latent", 4, "ep: 2, tp: 2, sequence: true, zero: 1", "train.microbatch=2"),
    ("dropped keys", 2, "tp: 2, zero: 0, recompute: selective",    "train.microbatch=4"),
    ("attention",   2, "ep: 2, zero: 1",                           "train.microbatch=2"),
    ("attention",   2, "zero: 3",                                  "train.microbatch=2"),
    ("hybrid",      8, "ep: 2, tp: 2, pp: 2, zero: 1",             "train.microbatch=2"),
    ("hybrid",      4, "tp: 2, sequence: true, pp: 2, schedule: zb_h1", "train.microbatch=2"),
    ("hybrid",      4, "ep: 2, cp: 2, zero: 3, recompute: full",   "train.microbatch=2"),
    ("hybrid",      4, "ep: 2, tp: 2, sequence: true, zero: 2",    "train.microbatch=2"),
    ("hybrid",      8, "ep: 2, tp: 4, sequence: true, zero: 3",    "train.microbatch=2"),
    ("hybrid",      2, "zero: 3",                                  "train.microbatch=2 engine=native"),
    ("hybrid, odd", 2, "tp: 2, zero: 0",                           "train.microbatch=4"),
    ("hybrid, odd", 2, "tp: 2, sequence: true, zero: 1",           "train.microbatch=4"),
    ("hybrid, some", 2, "tp: 2, zero: 0, recompute: selective",    "train.microbatch=4"),
    ("hybrid, some", 4, "cp: 2, cp_comm: all_to_all, tp: 2, zero: 1", "train.microbatch=4"),
    ("hybrid, frozen experts", 4, "cp: 2, cp_comm: all_to_all, ep: 2, zero: 1", "train.microbatch=2"),
    ("hybrid, frozen experts", 2, "tp: 2, sequence: true, zero: 1", "train.microbatch=4"),
    ("dropped hybrid", 4, "tp: 2, sequence: true, pp: 2",          "train.microbatch=2"),
    ("dropped hybrid", 2, "tp: 2, zero: 0, recompute: full",       "train.microbatch=4"),
    ("dropped linear", 2, "cp: 2, cp_comm: all_to_all, zero: 1",   "train.microbatch=4"),
)
# fmt: on
ROWS = pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row[0]} {row[2]}")


def words_of(row: tuple[str, int, str, str]) -> tuple[str, ...]:
    curve, ranks, degrees, micro = row
    return (*BASE, *CURVES[curve], f"cluster.gpus={ranks}", f"parallel={{{degrees}}}", *micro.split())


@pytest.fixture(scope="module")
def train_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lora")

    @cache
    def of(row: tuple[str, int, str, str]) -> PoolJob:
        return ranks.train(folder / f"row{LAYOUTS.index(row)}", *words_of(row))

    return of


@ROWS
def test_a_layout_trains_the_curve_of_one_process(train_ranks: Any, row: tuple[str, int, str, str]) -> None:
    losses, norms = reference_curve((*BASE, *CURVES[row[0]]))
    job = train_ranks(row)
    assert len(set(losses)) == 3
    assert job.figures("loss") == pytest.approx(losses, abs=3e-6, rel=0)
    assert job.figures("grad_norm") == pytest.approx(
        norms, abs=0, rel=1e-3
    )  # Adam enlarges the rounding of A's first gradients, which are 0


@ROWS
def test_its_ranks_send_and_hold_what_was_planned(train_ranks: Any, row: tuple[str, int, str, str]) -> None:
    words = words_of(row)
    run, folder = load_recipe(words[0], words[1:]), train_ranks(row).folder
    memory = make_plan(run).memory
    assert memory is not None
    sent = json.loads((folder / "ledger.json").read_text())["ranks"]
    assert [line for rank, rows in enumerate(sent) for line in compare_rank_messages(run, rank, rows) if line.verdict == "differs"] == []
    held = json.loads((folder / "measured.json").read_text())["ranks"]
    for stage, of_stage in enumerate(memory.stages):
        ranks = [each for rank, each in enumerate(held) if mesh_position(run, rank).coordinates["pp"] == stage]
        planned = of_stage.bytes
        for kind in ("weights", "gradients", "optimizer"):
            assert max(each[kind] for each in ranks) == pytest.approx(getattr(planned, kind), rel=0.005), (
                stage,
                kind,
            )  # a counter a tensor
        if run.parallel.ep == run.parallel.pp == 1 and run.parallel.recompute != "full":  # where they do not depend on routing
            counts = 8 * run.train.microbatch if run.model.aux_loss else 0  # labels of each sequence
            assert {each["activations"] for each in ranks} == {planned.activations + planned.logits + counts}


def lora_of(name: str) -> Any:
    """Return the run of a small model with LoRA of all linear layers."""
    return run_of(name, model__lora=Lora(rank=3, alpha=6.0), model__shared_experts=1, model__dense_layers=1)


@pytest.mark.parametrize("name", ["moe", "gpt-oss", "mla", "hybrid"])
def test_the_gradients_of_a_and_b_follow_from_those_of_the_weights_that_they_are_added_to(name: str) -> None:
    """Of W + 2 A B, whose gradient is G, A's is 2 G B^T and B's is 2 A^T G, of each expert too."""
    run = lora_of(name)
    module, plain = module_of(run), build_model(without_lora(run), device=CPU, dtype=torch.float64)
    weights, batch = dict(named_weights(module, run)), batch_of(run)
    for name, each in weights.items():
        if Lora.owns(name):
            continue
        base = name.removesuffix(".weight")
        a, b = (weights.get(f"{base}.lora_{matrix}.weight") for matrix in "ab")
        load_weights(plain, [(name, each if a is None or b is None else add_lora(each, a, b, run.model.lora))], partial=True)
    loss, of_lora = gradients(module, *batch)
    expected, of_plain = gradients(plain, *batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    targets = [each.removesuffix(".lora_a.weight") for each in of_lora if each.endswith(".lora_a.weight")]
    words = [run.model.layer_word(each) for each in of_plain if each.endswith(".weight")]
    assert len(of_lora) == 2 * len(targets) == 2 * sum(each in run.model.lora_layers for each in words)
    for target in targets:
        a, b, gradient = weights[f"{target}.lora_a.weight"], weights[f"{target}.lora_b.weight"], of_plain[f"{target}.weight"]
        torch.testing.assert_close(of_lora[f"{target}.lora_a.weight"], 2 * gradient @ b.mT, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(of_lora[f"{target}.lora_b.weight"], 2 * a.mT @ gradient, rtol=1e-9, atol=1e-12)


def test_every_product_of_a_hybrid_but_the_routers_has_additions() -> None:
    names = {name for op in op_table(lora_of("hybrid")).layer for name in (weight.name for weight in op.weights) if op.product}
    plain = {name.removesuffix(".weight") for name in names if ".lora_" not in name}
    added = {name.removesuffix(".lora_a.weight") for name in names if name.endswith(".lora_a.weight")}
    assert plain - added == {f"{at}.router" for at in range(3)}
    assert {name for name in added if name.startswith("0.attention")} == {
        f"0.attention.{each}" for each in ("query", "key", "value", "gate", "beta", "decay", "out")
    }


OF_HYBRIDS: tuple[LoraTarget, ...] = (
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "shared_expert_gate",
)


@pytest.mark.parametrize("target", OF_HYBRIDS)
def test_every_addition_of_a_hybrid_drops_its_input_in_training(target: LoraTarget) -> None:
    run = run_of("hybrid", model__lora=Lora(rank=3, alpha=6.0, dropout=0.3, targets=(target,)))
    module, (tokens, labels) = module_of(run), batch_of(run)
    keys = dropout_keys(7, 3, torch.arange(tokens.shape[0]), torch.arange(tokens.shape[1]))
    losses = [float(module(tokens, labels, keys=each)[0].detach()) for each in (keys, None)]
    assert abs(losses[0] - losses[1]) > 1e-4


def test_an_expert_has_a_and_b_of_its_own_that_begin_as_pefts() -> None:
    run = lora_of("moe")
    weights = {name: each.detach() for name, each in build_model(run, device=CPU, dtype=torch.float64, seed=1).named_parameters()}
    a, b = (weights[f"layers.1.experts.down.lora_{each}.weight"] for each in "ab")
    assert (tuple(a.shape), tuple(b.shape)) == ((4, 40, 3), (4, 3, 48))
    assert not b.any()
    assert a.std() == pytest.approx(1 / (3 * 40) ** 0.5, rel=0.1)  # of a uniform distribution between -1 / sqrt(40) and that
    assert len({each.sum().item() for each in a}) == 4
