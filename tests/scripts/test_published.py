"""Predictions of published runs: from a case's configuration alone, a row for each, with bars around each figure."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from distrain.scripts.published import __main__ as command
from distrain.scripts.published import frameworks
from distrain.scripts.published.case_runs import CLUSTERS, runs_of_case
from distrain.scripts.published.frameworks import FRAMEWORKS
from distrain.scripts.published.measured import score
from distrain.scripts.published.predict import RESERVED, WORKSPACES, predict
from distrain.scripts.published.ranking import rankings
from distrain.trainer.plan.plan import make_plan

SHARED = Path(__file__).resolve().parents[3] / "shared" / "published" / "cases.json"

CASE: dict[str, Any] = {
    "id": "one",
    "source": {"name": "a test", "ref": ""},
    "model": {
        "name": "gpt", "arch": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": None, "ffn": 8192,
        "vocab": 51200, "seq": 2048, "gated_mlp": False, "tied_embeddings": True, "bias": True, "experts": None, "topk": None,
        "moe_ffn": None, "shared_experts": None,
    },
    "cluster": {"gpu": "A100", "gpu_mem_gb": 80, "gpus": 16, "gpus_per_node": 8, "internode": None, "internode_gbps_per_gpu": 200},
    "parallel": {
        "tp": 2, "pp": 2, "vpp": None, "dp": 4, "cp": 1, "ep": 1, "etp": None, "zero": None, "fsdp": None, "fsdp_shard_size": None,
        "sequence_parallel": None, "distributed_optimizer": True, "tp_comm_overlap": None, "schedule": "1f1b",
    },
    "batch": {"micro": 2, "grad_accum": 16, "global": 128},
    "precision": "bf16",
    "recompute": None,
    "framework": "Megatron-LM",
    "attention": None,
    "compile": None,
    "measured": {"iter_time_s": 2.0, "tflops_per_gpu": 100.0, "tflops_kind": "model", "mfu": 0.4, "peak_mem": 20.0, "peak_mem_unit": "GB",
                 "peak_mem_kind": "nvidia-smi"},
    "derived": {"iter_time_s": 2.0, "how": ""},
    "split": "fit",
    "notes": "",
}  # fmt: skip


def changed_case(**groups: dict[str, Any] | str) -> dict[str, Any]:
    """The case with keys of some of its groups changed."""
    case = copy.deepcopy(CASE)
    for group, keys in groups.items():
        case[group] = {**case[group], **keys} if isinstance(keys, dict) else keys
    return case


def stripped_case(case: dict[str, Any]) -> dict[str, Any]:
    """The case without what was measured; of a measurement its kind and unit stay."""
    left = {key: value for key, value in case.items() if key not in ("derived", "split", "notes")}
    left["measured"] = {key: value if key.endswith(("_kind", "_unit")) else None for key, value in case["measured"].items()}
    return left


def all_cases() -> list[dict[str, Any]]:
    moe = {"arch": "moe", "gated_mlp": True, "experts": 8, "topk": 2, "moe_ffn": 4096}
    made = [
        changed_case(model=moe, parallel={"ep": 4, "pp": 1, "dp": 8}),
        changed_case(model={**moe, "arch": "moe-mla"}, parallel={"ep": 4, "pp": 1, "dp": 8}, cluster={"gpu": "GB200", "gpu_mem_gb": 186}),
        *(changed_case(framework=row.name) for row in FRAMEWORKS),
        *(changed_case(cluster={"gpu": gpu, "gpu_mem_gb": memory}, precision="fp16") for gpu, memory in CLUSTERS),
    ]
    return made + (json.loads(SHARED.read_text()) if SHARED.exists() else [])


@pytest.mark.parametrize("case", [pytest.param(each, id=f"{at}-{each['id']}") for at, each in enumerate(all_cases())])
def test_a_case_without_its_measurements_gets_the_same_prediction(case: dict[str, Any]) -> None:
    assert predict(stripped_case(case)) == predict(case)


@pytest.mark.parametrize("case", [pytest.param(each, id=f"{at}-{each['id']}") for at, each in enumerate(all_cases())])
def test_every_case_is_planned_with_bars_around_its_figures(case: dict[str, Any]) -> None:
    found = predict(case)
    assert found.why_not is None
    assert 0 < (found.step_low or 0) < (found.step_seconds or 0) < (found.step_high or 0) < math.inf
    assert 0 < (found.memory_low or 0) < (found.memory_peak or 0) < (found.memory_high or 0)


def test_a_case_that_cannot_be_planned_gets_a_row_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([stripped_case(changed_case(cluster={"gpu": "TPU"})), stripped_case(CASE)]))
    monkeypatch.setattr("sys.argv", ["published", str(file), "--json"])
    command.main()
    first, second = json.loads(capsys.readouterr().out)
    assert first["step_seconds"] is None
    assert "TPU" in first["why_not"]
    assert second["step_seconds"] > 0
    assert second["why_not"] is None


def test_micro_batches_that_do_not_divide_the_batch_are_counted_as_full_ones() -> None:
    (only,) = runs_of_case(changed_case(batch={"global": 121}))
    assert only.run.train.batch == 128


def test_of_layers_that_are_recomputed_in_part_the_step_lies_between_none_and_all() -> None:
    none, some, every = (predict(changed_case(recompute=how)).step_seconds or 0 for how in ("none", "selective-layer", "full"))
    assert none < some < every


def test_a_choice_is_judged_by_what_the_chosen_layout_measured() -> None:
    cases = [changed_case(parallel={"tp": tp, "dp": 8 // tp}) for tp in (1, 2, 4)]
    predictions = [predict(case) for case in cases]
    order = sorted(range(3), key=lambda at: predictions[at].step_seconds or 0)
    for at, seconds in zip(order, (2.0, 1.0, 4.0), strict=True):
        cases[at]["derived"] = {"iter_time_s": seconds}
    (found,) = rankings(score(case, each) for case, each in zip(cases, predictions, strict=True))
    assert found.regret == 1.0
    assert found.tau == pytest.approx(1 / 3)
    assert found.most == 1
    assert sorted(found.clear) == [-1, 1, 1]


def test_runs_of_one_layout_are_no_pair_to_be_ranked() -> None:
    """A plan gives them the same time: no plan orders them. Two layouts whose times differ by less than repeats do are not clear."""
    cases = [changed_case(id=name, parallel={"tp": tp, "dp": 8 // tp}) for name, tp in (("once", 1), ("again", 1), ("other", 2))]
    for case, seconds in zip(cases, (1.0, 1.2, 1.22), strict=True):
        case["derived"] = {"iter_time_s": seconds}
    (found,) = rankings(score(case, predict(case)) for case in cases)
    assert found.most == pytest.approx(2 / 3)
    assert len(found.clear) == 1


TITAN: dict[str, Any] = {
    "parallel": {"pp": 1, "dp": 8}, "framework": "torchtitan", "recompute": "selective-op", "compile": True,
    "measured": {"peak_mem_kind": "allocated"},
}  # fmt: skip


def test_a_loss_that_is_not_compiled_holds_further_copies_of_the_logits() -> None:
    """2 + 4 + 4 + 4 bytes a logit beside 2 + 2: logits, float32 logits, their log-softmax and its gradient. torchtitan compiles it since
    April 2025, but not over a vocabulary that the tensor axis splits."""
    logits = 2 * 2048 * 51200
    one = {**TITAN, "parallel": {"pp": 1, "tp": 1, "dp": 16}}

    def peak(group: dict[str, Any], date: str) -> int:
        return predict(changed_case(**group, source={"ref": f"benchmarks/llama_{date}_titan.md"})).memory_peak or 0

    assert peak(one, "202412") - peak(one, "2025-06") == (14 - 4) * logits
    assert peak(TITAN, "202412") == peak(TITAN, "2025-06")


def test_a_loss_over_a_split_vocabulary_holds_its_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's loss_parallel: log-softmax, its exponent, the target's gradient and their sum in float32."""
    case = changed_case(**TITAN, model={"vocab": 512_000})
    peak = predict(case).memory_peak or 0
    rows = tuple(row._replace(split_loss=row.loss) if row.name == "torchtitan" else row for row in FRAMEWORKS)
    monkeypatch.setattr(frameworks, "FRAMEWORKS", rows)
    assert peak - (predict(case).memory_peak or 0) == (4 * 4 - 14) * 2 * 2048 * 512_000 // 2


def test_a_loss_is_as_new_as_any_where_the_source_names_no_date() -> None:
    one = {**TITAN, "parallel": {"pp": 1, "tp": 1, "dp": 16}}
    assert predict(changed_case(**one)) == predict(changed_case(**one, source={"ref": "a page of 202506"}))


def test_recomputing_every_second_product_keeps_the_others_results() -> None:
    """Of query, key, value, out, up and down the first, third and fifth; attention's result and its float32 log-sums. Of 24 layers, but one
    while its backward runs, which has its own in either case."""
    layer = 2 * 2048 * (2 * (2048 + 2048 + 8192) + 2 * 2048 + 4 * 16) // 2
    for vocab, layers in ((64, 23), (512_000, 24)):
        group = {**TITAN, "model": {"vocab": vocab}}
        some, every = (predict(changed_case(**{**group, "recompute": how})).memory_peak or 0 for how in ("selective-op", "full"))
        assert some - every == layers * layer


def test_the_allocators_cached_pieces_count_where_the_source_sees_them() -> None:
    seen = {
        kind: predict(changed_case(measured={"peak_mem_kind": kind})).memory_peak or 0
        for kind in ("nvidia-smi", "as in figure", "allocated")
    }
    assert seen["as in figure"] == round(RESERVED * seen["allocated"])
    assert seen["nvidia-smi"] - seen["as in figure"] == 1.4e9


def test_segments_that_grow_keep_fewer_cached_pieces_and_xla_none() -> None:
    for framework, share in (("torchtitan", 0.4), ("MaxText", 0.0)):
        group = {**TITAN, "framework": framework, "recompute": "full"}
        seen, held = (
            predict(changed_case(**{**group, "measured": {"peak_mem_kind": kind}})).memory_peak or 0 for kind in ("figure", "allocated")
        )
        assert seen == round((1 + share * (RESERVED - 1)) * held)


def test_half_precision_sums_gradients_in_half_precision_under_megatron_deepspeed() -> None:
    """arXiv:1910.02054 section 3.1: 2 bytes of gradients a parameter; in bf16 the framework sums in 4 beside 2."""
    gradients = [
        runs_of_case(changed_case(framework="Megatron-DeepSpeed", precision=each))[0].run.train.gradients for each in ("fp16/bf16", "bf16")
    ]
    assert gradients == ["auto", "fp32"]


def test_gradients_that_are_all_reduced_take_longer_than_scattered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    case = changed_case(framework="Megatron-DeepSpeed", precision="fp16", parallel={"zero": 1})
    summed = predict(case).step_seconds or 0
    monkeypatch.setattr(frameworks, "FRAMEWORKS", tuple(row._replace(scatters=True) for row in FRAMEWORKS))
    assert summed > (predict(case).step_seconds or 0)


def test_early_zero_3_gathers_over_nodes_at_one_cards_rate() -> None:
    """One of eight cards of a node; what stays in a node is as fast as ever."""
    early, other = (runs_of_case(changed_case(framework=each))[0].run.cluster for each in ("DeepSpeed ZeRO-3", "Megatron-LM"))
    assert early.between is not None
    assert other.between is not None
    assert early.between.rate == pytest.approx(other.between.rate / 8)
    assert early.inside == other.inside


def test_virtual_stages_of_megatron_core_are_expected_of_tables_only() -> None:
    group: dict[str, Any] = {"framework": "Megatron-Core", "parallel": {"schedule": None}}
    told, unsaid = (runs_of_case(changed_case(**group, batch={"micro": micro}))[0].run.parallel.chunks for micro in (2, None))
    assert told == 1 < unsaid


def held(case: dict[str, Any]) -> int:
    """Predicted bytes of a rank, of those that a plan counts: with the device's context, without workspaces."""
    seen = copy.deepcopy(case)
    seen["measured"]["peak_mem_kind"] = case["measured"]["peak_mem_kind"].replace("nvidia-smi", "") + " allocated"
    return (predict(seen).memory_peak or 0) - WORKSPACES + int(runs_of_case(seen)[0].run.cluster.device.context)


def test_a_recomputed_layer_holds_all_that_it_saves_and_its_gradients_while_its_backward_runs() -> None:
    """A plan counts what the layer saves. Its last product reads the gradient of its result, of sbh elements, as of the residual stream,
    and makes those of its input, of 4sbh / t, and of its weight, of 4hh / t; t is 2, elements are of 2 bytes."""
    case = changed_case(recompute="full", attention="flash", model={"vocab": 64})
    plan = make_plan(runs_of_case(case)[0].run)
    assert plan.memory
    values = 2048 * 2 * 2048
    assert held(case) - plan.memory.stages[0].bytes.total == 2 * (2 * values + 4 * values // 2 + 4 * 2048 * 2048 // 2)


def test_logits_are_gone_before_the_last_layer_runs_backward() -> None:
    """Where they are the most that a pass holds, recomputation changes what layers save, and nothing else: sbh(10 + 20 / t) without dropout
    and with fused attention, whose log-sums are float32, against 2sbh (arXiv:2205.05198 table 2). A plan adds a recomputed layer."""
    last: dict[str, Any] = {"attention": "flash", "measured": {"peak_mem_kind": "last rank"}}
    none, full = (held(changed_case(**last, recompute=how)) for how in ("none", "full"))
    layer = 2048 * 2 * 2048 * (10 + 20 // 2 - 2) + 4 * 16 * 2048 * 2 // 2
    assert none - full == 12 * layer
    memory = make_plan(runs_of_case(changed_case(**last, recompute="full"))[0].run).memory
    assert memory
    assert full == memory.stages[1].bytes.total - layer


def test_what_a_recipe_recomputes_unsaid_does_not_keep_a_run_from_fitting() -> None:
    large = changed_case(model={"seq": 16384}, batch={"micro": 8, "grad_accum": 4}, cluster={"gpu": "H100"})
    unsaid, none, other = (
        predict({**large, "framework": framework, "recompute": how})
        for framework, how in (("NeMo 24.09", None), ("NeMo 24.09", "none"), ("Megatron-Core", None))
    )
    assert (unsaid.fits, none.fits, other.fits) == (True, False, False)
    assert unsaid.memory_peak == none.memory_peak


def test_the_stage_that_a_source_looked_at_is_the_last_where_it_says_so() -> None:
    kinds = ("as in figure", "max allocated on the last rank")
    first, last = (predict(changed_case(model={"vocab": 64}, recompute="none", measured={"peak_mem_kind": kind})) for kind in kinds)
    assert (first.memory_stage, last.memory_stage) == (0, 1)


LLAMA_8B = {"arch": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "gated_mlp": True}


def stages_of(framework: str, **model: Any) -> tuple[int, ...] | None:
    (row,) = runs_of_case(
        changed_case(framework=framework, model={**LLAMA_8B, "tied_embeddings": False, **model}, parallel={"pp": 8, "dp": 1})
    )
    return row.run.parallel.stages


def test_a_stage_of_nanotron_ends_with_the_layer_that_passes_its_share() -> None:
    """As nanotron prints for Llama 3 8B on 8 stages: the head weighs as much as 2.2 layers."""
    assert stages_of("nanotron") == (5, 4, 4, 5, 4, 4, 4, 2)
    assert stages_of("Megatron-LM") is None


def test_layers_are_spread_evenly_where_a_stage_would_have_none() -> None:
    """A head that weighs as much as all layers."""
    assert stages_of("nanotron", vocab=32 * 128256) is None


def test_the_memory_of_nanotron_is_that_of_the_first_rank() -> None:
    """The last stage of a small model with a large vocabulary is the fullest."""
    model = {"vocab": 512_000, "layers": 4}
    one, other = (predict(changed_case(framework=name, model=model, recompute="none")) for name in ("nanotron", "Megatron-LM"))
    assert (one.memory_stage, other.memory_stage) == (0, 1)


def test_eager_modules_of_nanotron_keep_the_activated_gate_too() -> None:
    """Gate, activated gate, up and their product: four tensors of the feed-forward's width, in 2 bytes each. Backward of the last layer
    holds a gradient of that width beside them."""
    seq, ffn, layers = 1024, 4096, 4

    def memory(width: int, micro: int) -> float:
        found = predict(
            changed_case(
                framework="nanotron",
                model={**LLAMA_8B, "tied_embeddings": False, "layers": layers, "ffn": width, "seq": seq, "vocab": 1024},
                parallel={"pp": 1, "dp": 1, "tp": 1},
                batch={"micro": micro, "grad_accum": 1, "global": micro},
                recompute="none",
                cluster={"gpu": "H100", "gpus": 1},
                measured={"peak_mem_kind": "max allocated"},
            )
        )
        assert found.memory_peak is not None
        return found.memory_peak

    grows = (memory(2 * ffn, 3) - memory(2 * ffn, 2)) - (memory(ffn, 3) - memory(ffn, 2))
    assert grows == (4 * layers + 1) * 2 * seq * ffn
