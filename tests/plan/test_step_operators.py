"""The seconds of a step by kind of operator: they are those of the step, and those of kernels that an H200 ran."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.keys import config_files
from distrain.trainer.models.families import op_table
from distrain.trainer.plan.costs.operator_kinds import OPERATOR_KINDS, operator_kind
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import OperatorSeconds, Plan
from distrain.trainer.spec.run import Device
from distrain.trainer.spec.sections.cluster import Link

REPORT = Path(__file__).parents[1] / "gpu" / "h200.json"
ON_ONE_GPU = ("cluster=1x1", "device=h200", "parallel.dp=auto")
CPU = Device(name="cpu", kind="cpu", memory=8e9, bandwidth=12e9, peak={"fp32": 52e9}, dispatch=5e-6)
RUNS = (
    *((recipe,) for recipe in config_files.recipes(None)),
    ("llama3_8b_1node", "train.precision=fp8", "device=h100_80g"),
    ("llama3_8b_1node", "train.precision=fp8", "device=h100_80g", "engine=papers"),
    ("llama3_8b_1node", "parallel.cp=2", "parallel.cp_comm=all_to_all", "parallel.dp=auto"),
    ("llama3_8b_1node", "train.loss_chunks=4", "engine=native"),
    ("llama3_8b_1node", "model.lora.rank=8", "parallel.recompute=full"),
    ("llama3_8b_1node", "train.attention=math", "parallel.recompute=selective"),
    ("llama3_8b_1node", "data=text", "data.path=x", "data.documents=true", "data.document_tokens=[100,5000]"),
    ("qwen3_next_80b", "engine=papers"),
    ("mixtral_8x7b", "parallel.pp=4", "parallel.schedule=zb_h1", "parallel.dp=auto"),
)


def plan_of(recipe: str, *words: str) -> Plan:
    return make_plan(load_recipe(recipe, words))


def rows_of(recipe: str, *words: str) -> dict[str, OperatorSeconds]:
    return {each.kind: each for each in plan_of(recipe, *words).operators}


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_the_rows_are_the_seconds_in_which_a_step_computes(words: tuple[str, ...]) -> None:
    run = load_recipe(words[0], words[1:])
    if not run.cluster.device.peak:  # of this machine, which a test does not measure
        run = replace(run, cluster=replace(run.cluster, device=CPU, inside=Link(bandwidth=1e9, latency=1e-5)))
    plan = make_plan(run)
    assert plan.time is not None
    rows = plan.operators
    assert sum(each.seconds for each in rows) == pytest.approx(plan.time.compute, rel=1e-12)
    for each in rows:
        assert each.forward + each.backward + each.recomputed == pytest.approx(each.seconds, rel=1e-12)
        assert each.share == pytest.approx(each.seconds / plan.time.step)
        assert each.peak is None or 0 < each.peak <= 1, each
        assert 0 <= each.unfilled < each.seconds, each
        assert min(each.forward, each.backward, each.recomputed) >= -1e-12 * plan.time.step, each
    assert [each.seconds for each in rows] == sorted((each.seconds for each in rows), reverse=True)
    assert len({each.kind for each in rows}) == len(rows)
    assert "others" not in {each.kind for each in rows}


@pytest.mark.parametrize("model", config_files.options("model", None))
@pytest.mark.parametrize("words", ["", "model.lora.rank=8", "model.mtp.layers=1"])
def test_every_op_of_a_model_has_a_kind(model: str, words: str) -> None:
    run = load_recipe("llama3_8b_1node", [f"model={model}", *words.split()])
    if words and run.model.family in ("bert", "hybrid"):
        return
    table = op_table(run)
    ops = [op for _, block in table.blocks(run.model.layer_groups) for op in block]
    assert not [op.name for op in ops if operator_kind(op) not in set(OPERATOR_KINDS) - {"others", "gaps", "host", "slowest_rank"}]


def test_ops_of_a_mixture_are_told_apart() -> None:
    kinds = {op.name: operator_kind(op) for op in op_table(load_recipe("mixtral_8x7b")).layer}
    assert kinds == {
        "norm1": "norms", "attention": "attention_products", "attention.rope": "rotary", "attention.core": "attention_kernel",
        "attention.out": "attention_products", "attention.residual": "residuals", "norm2": "norms", "router": "router",
        "dispatch": "permutation", "experts": "expert_products", "experts.act": "activations", "experts.down": "expert_products",
        "combine": "permutation", "mlp.residual": "residuals",
    }  # fmt: skip


def test_a_device_without_rates_has_no_rows() -> None:
    run = load_recipe("llama3_8b_1node")
    run = replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, peak={})))
    assert make_plan(run).operators == ()


def test_recomputation_runs_the_forward_of_layers_again() -> None:
    plain, again = (rows_of("llama3_8b_1node", f"parallel.recompute={each}") for each in ("none", "full"))
    for kind in ("mlp_products", "attention_products", "attention_kernel", "activations"):
        assert plain[kind].recomputed == 0
        assert again[kind].recomputed == pytest.approx(plain[kind].forward)
        assert again[kind].backward == pytest.approx(plain[kind].backward)
        assert again[kind].forward == pytest.approx(plain[kind].forward)
    before, after = (rows["mlp_products"] for rows in (plain, again))
    assert before.peak is not None
    assert after.peak is not None
    assert after.peak * after.seconds == pytest.approx(4 / 3 * before.peak * before.seconds)  # of four products for three
    assert again["head"].recomputed == again["loss"].recomputed == again["gradient_sums"].recomputed == 0
    assert again["head"].peak == pytest.approx(plain["head"].peak)


def test_a_loss_in_chunks_computes_its_logits_again() -> None:
    rows = rows_of("llama3_8b_1node", "train.loss_chunks=4", "engine=native")
    assert rows["head"].recomputed == pytest.approx(rows["head"].forward)
    assert rows["head"].peak is not None


def test_products_reach_the_flops_of_the_model_over_their_seconds() -> None:
    """With one device and nothing recomputed: the products' FLOPs are those of the model, but for the half of attention that is masked."""
    run = load_recipe("gpt2_124m_1gpu", [*ON_ONE_GPU, "train.batch=48", "train.microbatch=12"])
    plan = make_plan(run)
    peak = run.cluster.device.peak["bf16"]
    rows = {each.kind: each for each in plan.operators}
    flops = {kind: each.peak * each.seconds * peak for kind, each in rows.items() if each.peak}
    model, tokens = run.model, run.train.batch * run.train.seq
    assert flops["head"] == pytest.approx(6 * model.hidden * model.vocab * tokens, rel=0.01)
    assert flops["mlp_products"] == pytest.approx(6 * 8 * model.hidden**2 * model.layers * tokens)
    assert flops["attention_products"] == pytest.approx(6 * 4 * model.hidden**2 * model.layers * tokens)
    assert flops["attention_kernel"] == pytest.approx(3.5 * 0.5 * 4 * model.hidden * run.train.seq * model.layers * tokens)


def test_small_experts_reach_less_of_the_peak_and_fill_fewer_tiles() -> None:
    large, small = (
        rows_of("mixtral_8x7b", f"model.experts={experts}", f"model.top_k={top_k}", f"model.expert_ffn={ffn}", "engine=papers")
        for experts, top_k, ffn in ((8, 2, 14336), (256, 8, 448))
    )
    assert small["expert_products"].peak < large["expert_products"].peak  # type: ignore[operator]
    lost = [rows["expert_products"].unfilled / rows["expert_products"].seconds for rows in (large, small)]
    assert lost[0] < lost[1]
    assert small["permutation"].seconds > 2 * large["permutation"].seconds
    assert small["router"].seconds > large["router"].seconds


def test_the_host_is_waited_for_where_it_is_slow() -> None:
    """Other rows don't depend on it; all seconds that a slower host adds are those of its row."""
    run = load_recipe("gpt2_124m_1gpu", [*ON_ONE_GPU, "train.batch=48", "train.microbatch=2"])
    plans = [
        make_plan(replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, dispatch=each)))) for each in (0.0, 1e-4)
    ]
    fast, slow = ({each.kind: each.seconds for each in plan.operators} for plan in plans)
    assert "host" not in fast
    assert all(fast[kind] == pytest.approx(slow[kind]) for kind in fast)
    computing = [plan.time.compute for plan in plans if plan.time]
    assert slow["host"] == pytest.approx(computing[1] - computing[0])
    assert slow["host"] > 0.5 * computing[1]


# Kernels of the reports by what their names hold; the others' are bound by memory: norms, activations, residuals, sums, loss, optimizer.
KERNELS = {"products": ("nvjet", "splitKreduce"), "attention": ("cudnn",)}
PLANNED = {
    "products": ("attention_products", "mlp_products", "head"),
    "attention": ("attention_kernel",),
    "memory": ("norms", "activations", "residuals", "rotary", "embedding", "loss", "gradient_sums"),
}
MEASURED = [
    pytest.param(row["figures"], id=row["name"])
    for row in json.loads(REPORT.read_text())["rows"]
    if row["name"].startswith("plan ") and row["status"] == "passed"
]


@pytest.mark.parametrize("figures", MEASURED)
def test_kernels_of_an_h200_took_as_long_as_planned(figures: dict[str, Any]) -> None:
    """A report has the 20 longest kernels of a step; the others, 2 to 7 % of its kernels' time, may be of any kind. What the host does once
    a step is no kernel."""
    plan = make_plan(load_recipe(figures["recipe"], figures["words"]))
    assert plan.time is not None
    listed: dict[str, float] = defaultdict(float)
    for name, (_, seconds) in figures["kernels: launches, seconds"].items():
        listed[next((kind for kind, words in KERNELS.items() if any(word in name for word in words)), "memory")] += seconds
    rest = figures["busy seconds"] - sum(listed.values())
    rows = {each.kind: each.seconds for each in plan.operators}
    planned = {kind: sum(rows.get(each, 0.0) for each in kinds) for kind, kinds in PLANNED.items()}
    planned["memory"] += plan.time.optimizer
    assert 1.0 < planned["products"] / listed["products"] < 1.15
    assert 0.82 < planned["attention"] / listed["attention"] < 1.18
    assert 0.7 * listed["memory"] < planned["memory"] < 1.0 * (listed["memory"] + rest)
    assert sum(planned.values()) == pytest.approx(figures["busy seconds"], rel=0.08)


@pytest.mark.parametrize("figures", MEASURED)
def test_an_h200_was_idle_as_long_as_planned(figures: dict[str, Any]) -> None:
    """Idle is a step that no profiler slowed without the kernels of one that it did: a difference of 1 % between these is much of 3 %."""
    plan = make_plan(load_recipe(figures["recipe"], figures["words"]))
    assert plan.time is not None
    rows = {each.kind: each.seconds for each in plan.operators}
    planned = rows["gaps"] + rows["host"] + plan.time.host
    idle = figures["step_seconds"] - figures["busy seconds"]
    assert planned == pytest.approx(idle, rel=0.15, abs=0.01 * figures["step_seconds"])
    assert plan.time.step == pytest.approx(figures["step_seconds"], rel=0.055)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gaps_are_those_of_kernels_that_run(recompute: str) -> None:
    """Each kernel has one, those that backward runs again too; a device that launches in no time has none."""
    run = load_recipe("gpt2_124m_1gpu", [*ON_ONE_GPU, "train.batch=48", "train.microbatch=12", f"parallel.recompute={recompute}"])
    plans = [make_plan(replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, launch=each)))) for each in (0.0, 1e-6)]
    without, having = ({each.kind: each for each in plan.operators} for plan in plans)
    assert "gaps" not in without
    kernels = sum(each.seconds - (without[kind].seconds if kind in without else 0.0) for kind, each in having.items() if kind != "host")
    assert having["gaps"].seconds == pytest.approx(0.9 * kernels)
    assert (having["gaps"].recomputed > 0) == (recompute == "full")
