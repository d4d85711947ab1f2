"""The op tables match published counts: Korthikanti's activation bytes, Narayanan's parameters and FLOPs, the parameters of models."""

from dataclasses import replace
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.models.families import FAMILIES, op_table
from distrain.trainer.models.ops.op_table import Op, block_weights, element_count, parameter_count
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

DEVICE = Device(name="A100", memory=1e16, bandwidth=2e12, peak={"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12}, units=108)
LINKS: dict[str, Any] = {"inside": Link(bandwidth=300e9, latency=5e-6), "between": Link(bandwidth=25e9, latency=1e-5)}


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Model:
    return Model(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=vocab, bias=True, tied=True, dropout=0.1)


def plan_of(model: Model, *, seq: int, micro: int = 1, batch: int | None = None, **changes: Any) -> Plan:
    """Return the plan of a model on as few devices as its degrees need, with keys changed: parallel__tp=8."""
    train = Train(batch=batch or micro, seq=seq, microbatch=micro, steps=1, precision="fp16", attention="math")
    run = Run(name="test", model=model, cluster=Cluster(nodes=1, gpus=1, device=DEVICE, **LINKS), parallel=Parallel(dp=1), train=train)
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    plan = make_plan(with_changes(run, (keys | {"cluster.gpus": keys.get("parallel.tp", 1)}).items()))
    assert plan.problems == ()
    return plan


def layer_saved_bytes(seq: int, micro: int, hidden: int, heads: int, **changes: Any) -> int:
    """Return the bytes that one more layer saves for backward on one rank, as the papers count them."""
    held = []
    for layers in (1, 2):
        memory = plan_of(gpt(layers, hidden, heads), seq=seq, micro=micro, engine="papers", **changes).memory
        assert memory is not None
        held.append(memory.stages[0].bytes.activations)
    return held[1] - held[0]


# arXiv:2205.05198 table 2, rows of table 3 first; one GPT layer at 2 bytes an element and 1 a mask.
# fmt: off
LAYERS = pytest.mark.parametrize(("s", "b", "h", "a", "t"), [
    (2048, 4,  6144,  64, 8),
    (2048, 1, 12288,  96, 8),
    (2048, 1, 20480, 128, 8),
    (2048, 1, 25600, 160, 8),
    (1024, 2,   768,  12, 4),
    ( 128, 3,    64,   4, 2),
])
# fmt: on


@LAYERS
def test_a_layer_saves_34sbh_and_5as2b(s: int, b: int, h: int, a: int, t: int) -> None:
    assert layer_saved_bytes(s, b, h, a) == 34 * s * b * h + 5 * a * s * s * b


@LAYERS
def test_tensor_parallelism_leaves_10sbh_on_every_rank(s: int, b: int, h: int, a: int, t: int) -> None:
    assert layer_saved_bytes(s, b, h, a, parallel__tp=t) * t == 10 * s * b * h * t + 24 * s * b * h + 5 * a * s * s * b


@LAYERS
def test_sequence_parallelism_splits_all_saved_activations_of_a_layer(s: int, b: int, h: int, a: int, t: int) -> None:
    kept = layer_saved_bytes(s, b, h, a, parallel__tp=t, parallel__sequence=True)
    assert kept * t == 34 * s * b * h + 5 * a * s * s * b


@LAYERS
def test_selective_recomputation_does_not_save_the_core_of_attention(s: int, b: int, h: int, a: int, t: int) -> None:
    selective = {"parallel__tp": t, "parallel__recompute": "selective"}
    assert layer_saved_bytes(s, b, h, a, **selective) * t == 10 * s * b * h * t + 24 * s * b * h
    assert layer_saved_bytes(s, b, h, a, **selective, parallel__sequence=True) * t == 34 * s * b * h


@LAYERS
def test_full_recomputation_saves_only_the_input_of_a_layer(s: int, b: int, h: int, a: int, t: int) -> None:
    full = {"parallel__tp": t, "parallel__recompute": "full"}
    assert layer_saved_bytes(s, b, h, a, **full) == 2 * s * b * h
    assert layer_saved_bytes(s, b, h, a, **full, parallel__sequence=True) * t == 2 * s * b * h


@LAYERS
def test_flash_attention_saves_four_bytes_per_query_in_place_of_scores(s: int, b: int, h: int, a: int, t: int) -> None:
    kept = layer_saved_bytes(s, b, h, a, parallel__tp=t, parallel__sequence=True, train__attention="flash")
    assert kept * t == 34 * s * b * h + 4 * a * s * b


@LAYERS
def test_without_dropout_no_mask_is_saved(s: int, b: int, h: int, a: int, t: int) -> None:
    assert layer_saved_bytes(s, b, h, a, model__dropout=0.0) == 32 * s * b * h + 2 * a * s * s * b


# arXiv:2104.04473 table 1 (a row each scale) and GPT-2: layers, hidden, heads, vocab, seq, batch.
# fmt: off
NARAYANAN = pytest.mark.parametrize(("L", "h", "a", "V", "s", "B"), [
    ( 24,  2304,  24, 51200, 2048,  512),
    ( 48,  8192,  64, 51200, 2048, 1536),
    ( 96, 12288,  96, 51200, 2048, 1536),
    (128, 25600, 160, 51200, 2048, 3072),
    ( 12,   768,  12, 50257, 1024,    8),
])
# fmt: on


@NARAYANAN
def test_the_parameters_of_gpt_match_narayanan(L: int, h: int, a: int, V: int, s: int, B: int) -> None:
    """arXiv:2104.04473 eq. 2, which leaves out the 2h of the last norm."""
    plan = plan_of(gpt(L, h, a, vocab=V), seq=s, batch=B)
    assert plan.model is not None
    assert plan.model.parameters == L * (12 * h * h + 13 * h) + V * h + s * h + 2 * h


@NARAYANAN
def test_the_flops_of_gpt_match_narayanan(L: int, h: int, a: int, V: int, s: int, B: int) -> None:
    """Model FLOPs: arXiv:2205.05198 appendix A. Hardware FLOPs: arXiv:2104.04473 eq. 3, four passes under full recomputation."""
    model = 72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    again = {
        "none": model,
        "selective": model + 4 * B * s * s * h * L,  # the two products of attention's core
        "full": 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h)),
    }
    for recompute, hardware in again.items():
        plan = plan_of(gpt(L, h, a, vocab=V), seq=s, batch=B, parallel__recompute=recompute)
        assert plan.run is not None
        assert plan.time is not None
        assert plan.throughput is not None
        assert plan.run.flops == pytest.approx(model, rel=1e-12)
        assert plan.throughput.hardware_flops_per_second_per_gpu * plan.time.step == pytest.approx(hardware, rel=1e-12)


GPT2: dict[str, Any] = {"family": "gpt", "tied": True, "bias": True, "vocab": 50257, "context": 1024}
LLAMA: dict[str, Any] = {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope"}
LLAMA2, LLAMA3 = LLAMA | {"vocab": 32000}, LLAMA | {"vocab": 128256}
MIXTRAL: dict[str, Any] = LLAMA2 | {"family": "moe", "experts": 8, "top_k": 2}
BERT: dict[str, Any] = {"family": "bert", "tied": True, "bias": True, "vocab": 30522, "context": 512}


# The parameters of the published weights, as transformers counts them: a tied weight once.
# fmt: off
PUBLISHED = pytest.mark.parametrize(("base", "layers", "hidden", "heads", "kv_heads", "ffn", "published"), [
    (GPT2,    12,   768,  12,  12,  3072,     124_439_808),  # openai-community/gpt2
    (GPT2,    24,  1024,  16,  16,  4096,     354_823_168),  # gpt2-medium
    (GPT2,    36,  1280,  20,  20,  5120,     774_030_080),  # gpt2-large
    (GPT2,    48,  1600,  25,  25,  6400,   1_557_611_200),  # gpt2-xl
    (LLAMA2,  32,  4096,  32,  32, 11008,   6_738_415_616),  # meta-llama/Llama-2-7b-hf
    (LLAMA2,  40,  5120,  40,  40, 13824,  13_015_864_320),  # Llama-2-13b-hf
    (LLAMA2,  80,  8192,  64,   8, 28672,  68_976_648_192),  # Llama-2-70b-hf
    (LLAMA3,  32,  4096,  32,   8, 14336,   8_030_261_248),  # Meta-Llama-3-8B
    (LLAMA3,  80,  8192,  64,   8, 28672,  70_553_706_496),  # Meta-Llama-3-70B
    (LLAMA3, 126, 16384, 128,   8, 53248, 405_853_388_800),  # Llama-3.1-405B
    (MIXTRAL, 32,  4096,  32,   8, 14336,  46_702_792_704),  # mistralai/Mixtral-8x7B-v0.1
    (BERT,    24,  1024,  16,  16,  4096,     335_174_458),  # google-bert/bert-large-uncased with its masked-token head, biased
])
# fmt: on


@PUBLISHED
def test_a_model_has_its_published_parameters(
    base: dict[str, Any], layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, published: int
) -> None:
    model = Model(**base, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)
    plan = plan_of(model, seq=512)
    assert plan.model is not None
    assert plan.model.parameters == published


def test_a_token_uses_two_of_the_eight_experts_of_mixtral() -> None:
    """12.9e9 active parameters: arXiv:2401.04088 section 1 says 13B."""
    plan = plan_of(Model(**MIXTRAL, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336), seq=512)
    assert plan.model is not None
    assert plan.model.active_parameters == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336 == 12_879_925_248


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("deepseek_v3", 671_026_419_200 - 58 * 256),  # without the biases of its routers, which no loss trains
        ("deepseek_v2_lite", 15_706_484_224),
    ],
)
def test_deepseek_has_its_published_parameters(name: str, published: int) -> None:
    """The parameters of Hugging Face's deepseek-ai/DeepSeek-V3 (without its extra head) and DeepSeek-V2-Lite."""
    model = load_recipe("mixtral_8x7b", [f"model={name}", "engine=papers"]).model
    assert parameter_count(FAMILIES["mla"].table(model, Train(batch=1, seq=8, steps=1)), model.layers) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("glm45_355b", 358_337_791_296),
        ("glm45_air_106b", 110_468_824_832),
    ],
)
def test_glm_4_5_has_its_published_parameters(name: str, published: int) -> None:
    """Those of the safetensors of zai-org/GLM-4.5 and GLM-4.5-Air: ours, the biases of routers, which no loss trains, and a layer for the
    token after the next: two norms, a projection of twice the width, a layer, its last norm, an embedding and a head."""
    run = load_recipe("mixtral_8x7b", [f"model={name}", "engine=papers"])
    table, model = op_table(run), run.model
    layer = sum(element_count(weight.dims, table.sizes) for weight in block_weights(table.layer))
    next_token = layer + 2 * model.hidden**2 + 3 * model.hidden + 2 * model.vocab * model.hidden
    biases = (model.layers - model.dense_layers + 1) * model.experts
    assert parameter_count(table, model.layers) + next_token + biases == published


def test_a_token_of_kimi_k2_uses_its_published_parameters() -> None:
    """1.04T and 32.6B: arXiv:2507.20534 table 2, rounded there; the safetensors of moonshotai/Kimi-K2-Base hold 1,026,408,232,448."""
    run = load_recipe("mixtral_8x7b", ["model=kimi_k2_1t", "engine=papers"])
    table = op_table(run)
    assert parameter_count(table, 61) + 60 * 384 == 1_026_408_232_448
    assert parameter_count(table, 61, active=True) == pytest.approx(32.6e9, rel=0.01)


def test_where_positions_turn_a_part_of_each_head_all_of_it_is_copied_once() -> None:
    def turn(share: float) -> Op:
        ops = FAMILIES["llama"].table(replace(SMALL["llama"], rope_share=share), Train(batch=1, seq=8, steps=1)).layer
        return next(op for op in ops if op.name == "attention.rope")

    whole, half = turn(1.0), turn(0.5)
    assert whole.moves == half.moves
    assert (whole.eager_passes, half.eager_passes) == (4, 4 / 2 + 1)
    assert (whole.own_passes, half.own_passes) == (16, 16 / 2 + 1)


SMALL = {
    "bert": Model(**BERT, layers=2, hidden=64, heads=4),
    "gpt": Model(**GPT2, layers=2, hidden=64, heads=4),
    "llama": Model(**LLAMA2, layers=2, hidden=64, heads=4, kv_heads=2, ffn=96),
    "moe": Model(**MIXTRAL, layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, shared_experts=1),
    "mla": Model(**MIXTRAL | {"family": "mla"}, layers=2, hidden=64, heads=4, ffn=96, shared_experts=1, q_lora_rank=24,
                 kv_lora_rank=12, qk_nope_head_dim=16, qk_rope_head_dim=4, v_head_dim=10),
    "hybrid": Model(**MIXTRAL | {"family": "hybrid"}, layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, shared_experts=1, qk_norm=True,
                    full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
                    linear_value_head_dim=10, linear_conv_kernel_dim=3),
}  # fmt: skip


@pytest.mark.parametrize("q_lora_rank", [0, 24])
def test_latent_attention_has_the_weights_of_its_projections(q_lora_rank: int) -> None:
    """arXiv:2412.19437 section 2.1.1: down to the latents, their norms, up to queries, keys, values, and out; 4 heads of 16 + 4, 10."""
    table = FAMILIES["mla"].table(replace(SMALL["mla"], q_lora_rank=q_lora_rank), Train(batch=1, seq=8, steps=1))
    ops = [op for op in table.layer if op.name.startswith("attention")]
    queries = 64 * 24 + 24 + 24 * 4 * 20 if q_lora_rank else 64 * 4 * 20
    counted = sum(element_count(weight.dims, table.sizes) for op in ops for weight in op.weights)
    assert counted == queries + 64 * (12 + 4) + 12 + 12 * 4 * (16 + 10) + 4 * 10 * 64


OP_TABLE_FAMILIES = [name for name, row in FAMILIES.items() if not row.made_by_transformers]


@pytest.mark.parametrize("family", OP_TABLE_FAMILIES)
def test_a_tied_model_has_one_embedding_table_less(family: str) -> None:
    train = Train(batch=1, seq=8, steps=1)
    tied, apart = (replace(SMALL[family], tied=tied) for tied in (True, False))
    counts = [parameter_count(FAMILIES[family].table(model, train), model.layer_groups) for model in (tied, apart)]
    assert counts[1] - counts[0] == SMALL[family].vocab * SMALL[family].hidden


# Elements of a small model that tp doesn't split: norms, biases of rows, routers, position and segment tables, BERT's transform,
# latents.
# fmt: off
REPLICATED = {
    "bert":  64 * (2 * (2 * 2 + 2) + 512 + 2 + 2 + 64 + 1 + 2),
    "gpt":   64 * (2 * (2 * 2 + 2) + 1024 + 2),
    "llama": 64 * (2 * 2 + 1),
    "moe":   64 * (2 * (2 + 8) + 1),
    "hybrid": 64 * (4 * (2 + 8 + 1) + 1) + 2 * (10 + 2 * 16),  # of each layer norms, router and gate; of heads a gated norm, or two norms
    "mla":   64 * (2 * (2 + 8 + 24 + 12 + 4) + 1) + 2 * (24 + 12),  # the products down to the latents, and their norms
}
# fmt: on


@pytest.mark.parametrize("family", OP_TABLE_FAMILIES)
def test_tensor_parallelism_halves_all_but_the_replicated_parameters(family: str) -> None:
    whole, half = (plan_of(SMALL[family], seq=8, parallel__tp=tp, model__vocab=50304) for tp in (1, 2))
    assert whole.memory is not None
    assert half.memory is not None
    assert 2 * half.memory.stages[0].parameters - whole.memory.stages[0].parameters == REPLICATED[family]
