"""Reading a Hugging Face config.json gives the model that transformers would build, or a refusal with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.public_configs import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA3_1B,
    GEMMA3_4B,
    GEMMA3_12B,
    GEMMA3_27B,
    GLM45,
    GLM45_AIR,
    GPT2,
    GPT_OSS_20B,
    GPT_OSS_120B,
    KIMI_K2,
    LLAMA2_7B,
    LLAMA31_8B,
    MINISTRAL_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    OLMO2_7B,
    OLMO2_13B,
    OLMO2_32B,
    OLMO3_7B,
    OLMO3_32B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
    QWEN25_7B,
)
from distrain.trainer.models.families import FAMILIES
from distrain.trainer.models.hf_format.config import needs_family_hf, read_hf_config
from distrain.trainer.models.hf_format.config_kinds import CONFIG_KINDS, SAME_MODELS
from distrain.trainer.models.ops.op_table import parameter_count
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Model, Train
from distrain.trainer.spec.sections.rope import Rope
from distrain.trainer.spec.sections.router import Router

# The public files' own keys, less token ids and data types that name no size.
PUBLIC = {
    "gpt2": (GPT2, 124_439_808),
    "llama2_7b": (LLAMA2_7B, 6_738_415_616),
    "llama31_8b": (LLAMA31_8B, 8_030_261_248),
    "mistral_7b": (MISTRAL_7B, 7_248_023_552),
    "qwen25_7b": (QWEN25_7B, 7_615_616_512),
    "qwen3_8b": (QWEN3_8B, 8_190_735_360),
    "ministral_8b": (MINISTRAL_8B, 8_019_808_256),
    "mixtral_8x7b": (MIXTRAL_8X7B, 46_702_792_704),
    "qwen3_30b_a3b": (QWEN3_30B_A3B, 30_532_122_624),
    "deepseek_v2_lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "deepseek_v3": (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),  # without the biases of its routers, which no loss trains
    # The safetensors also hold a layer for the token after the next, with tables of its own: tests/models/test_op_tables.py.
    "olmo2_7b": (OLMO2_7B, 7_298_617_344),
    "olmo2_13b": (OLMO2_13B, 13_716_198_400),
    "olmo2_32b": (OLMO2_32B, 32_234_279_936),
    # OLMo 2's but for the 74 words that its table has beyond the tokenizer's
    "olmo3_7b": (OLMO3_7B, 7_298_617_344 - 2 * 74 * 4096),
    "olmo3_32b": (OLMO3_32B, 32_234_279_936 - 2 * 74 * 5120),
    "gpt_oss_20b": (GPT_OSS_20B, 20_914_757_184),  # arXiv:2508.10925 table 1: 20.91 and 116.83 billion
    "gpt_oss_120b": (GPT_OSS_120B, 116_829_156_672),
    "gemma3_1b": (GEMMA3_1B, 999_885_952),
    # arXiv:2503.19786 table 1 has 3,209, 10,759 and 25,600 million beside the embedding.
    "gemma3_4b": (GEMMA3_4B, 3_209_010_688 + 262_208 * 2560),
    "gemma3_12b": (GEMMA3_12B, 10_759_155_456 + 262_208 * 3840),
    "gemma3_27b": (GEMMA3_27B, 25_599_716_096 + 262_208 * 5376),
    "glm45": (GLM45, 352_797_829_024 - 89 * 160),
    "glm45_air": (GLM45_AIR, 106_852_251_264 - 45 * 128),
    "qwen3_next_80b": (QWEN3_NEXT_80B, 79_674_391_296),  # as transformers makes it: tests/models/test_hybrid.py
    "kimi_k2": (KIMI_K2, 1_026_408_232_448 - 60 * 384),
}


def write_config(folder: Path, config: object) -> Path:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return file


def refusal(file: Path) -> str:
    with pytest.raises(Unreadable) as caught:
        read_hf_config(file)
    return str(caught.value)


@pytest.mark.parametrize(("config", "count"), PUBLIC.values(), ids=PUBLIC)
def test_a_public_file_has_the_parameters_of_its_model(config: dict[str, Any], count: int, tmp_path: Path) -> None:
    model = read(read_hf_config(write_config(tmp_path, config)), Model)
    assert parameter_count(FAMILIES[model.family].table(model, Train(batch=1, seq=128)), model.layer_groups) == count


def test_every_model_type_is_tested_with_a_public_file() -> None:
    assert {config["model_type"] for config, _ in PUBLIC.values()} == {*CONFIG_KINDS, *SAME_MODELS}


def test_gpt2_is_read_key_by_key(tmp_path: Path) -> None:
    file = write_config(tmp_path, GPT2)
    assert read_hf_config(file) == {
        "family": "gpt",
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "vocab": 50257,
        "context": 1024,
        "tied": True,
        "bias": True,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "act": "gelu_tanh",
        "positions": "learned",
        "dropout": 0.1,
        "hf": str(file),
    }


def test_qwen2_is_read_key_by_key(tmp_path: Path) -> None:
    file = write_config(tmp_path, QWEN25_7B)
    assert read_hf_config(file) == {
        "family": "llama",
        "layers": 28,
        "hidden": 3584,
        "heads": 28,
        "kv_heads": 4,
        "ffn": 18944,
        "vocab": 152064,
        "tied": False,
        "bias": False,
        "qkv_bias": True,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "act": "swiglu",
        "positions": "rope",
        "rope_base": 1000000.0,
        "rope": {"type": "default"},
        "dropout": 0.0,
        "hf": str(file),
    }


def test_the_experts_of_mixtral_are_read(tmp_path: Path) -> None:
    read_keys = read_hf_config(write_config(tmp_path, MIXTRAL_8X7B))
    assert [read_keys[key] for key in ("family", "experts", "top_k", "expert_ffn")] == ["moe", 8, 2, 14336]


def test_qwen3_moe_is_read_key_by_key(tmp_path: Path) -> None:
    file = write_config(tmp_path, QWEN3_30B_A3B)
    assert read_hf_config(file) == {
        "family": "moe",
        "layers": 48,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 151936,
        "tied": False,
        "bias": False,
        "qk_norm": True,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "act": "swiglu",
        "positions": "rope",
        "rope_base": 1000000.0,
        "rope": {"type": "default"},
        "dropout": 0.0,
        "experts": 128,
        "top_k": 8,
        "expert_ffn": 768,
        "router": {"normalize": True},
        "hf": str(file),
    }


@pytest.mark.parametrize("listed", [[0, 1], [1, 0, 1]])
def test_the_first_layers_of_qwen3_moe_may_have_no_experts(listed: list[int], tmp_path: Path) -> None:
    """Their feed-forward is as wide as transformers' where the file does not say."""
    keys = read_hf_config(write_config(tmp_path, QWEN3_30B_A3B | {"mlp_only_layers": listed, "intermediate_size": 5000}))
    assert (keys["dense_layers"], keys["ffn"], keys["expert_ffn"]) == (2, 5000, 768)
    config = {key: value for key, value in QWEN3_30B_A3B.items() if key != "intermediate_size"}
    assert read_hf_config(write_config(tmp_path, config | {"mlp_only_layers": listed}))["ffn"] == 6144


def test_glm_4_5_is_read_key_by_key(tmp_path: Path) -> None:
    file = write_config(tmp_path, GLM45)
    assert read_hf_config(file) == {
        "family": "moe",
        "layers": 92,
        "hidden": 5120,
        "heads": 96,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": 12288,
        "vocab": 151552,
        "tied": False,
        "bias": False,
        "qkv_bias": True,
        "qk_norm": True,
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "act": "swiglu",
        "positions": "rope",
        "rope_base": 1000000.0,
        "rope_share": 0.5,
        "rope": {"type": "default"},
        "dropout": 0.0,
        "dense_layers": 3,
        "experts": 160,
        "top_k": 8,
        "expert_ffn": 1536,
        "shared_experts": 1,
        "router": {"score": "sigmoid", "normalize": True, "scale": 2.5, "groups": 1, "top_groups": 1, "bias": True},
        "hf": str(file),
    }


def test_the_rotated_share_of_a_head_is_read_wherever_transformers_writes_it(tmp_path: Path) -> None:
    """A file that lacks it means half, as transformers' class of GLM-4.5 has it; the mapping's own goes before one beside it."""
    bare = {key: value for key, value in GLM45.items() if key not in ("partial_rotary_factor", "rope_theta", "rope_scaling")}
    inside = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    for keys, share in (({}, 0.5), ({"partial_rotary_factor": 0.75}, 0.75), ({"rope_parameters": inside}, 0.25)):
        assert read_hf_config(write_config(tmp_path, bare | keys))["rope_share"] == share
    assert read_hf_config(write_config(tmp_path, GLM45 | {"rope_parameters": inside}))["rope_share"] == 0.25


def test_layers_of_qwen3_next_are_groups(tmp_path: Path) -> None:
    """A file lists every layer's type, or the interval, or neither: then every fourth layer has full attention."""
    bare = {key: value for key, value in QWEN3_NEXT_80B.items() if key != "full_attention_interval"}
    thirds = ["linear_attention", "linear_attention", "full_attention"] * 16
    for keys, interval in (({}, 4), ({"full_attention_interval": 6}, 6), ({"layer_types": thirds, "full_attention_interval": 6}, 3)):
        assert read_hf_config(write_config(tmp_path, bare | keys))["full_attention_interval"] == interval
    shared = read_hf_config(write_config(tmp_path, bare | {"shared_expert_intermediate_size": 1536}))
    assert shared["shared_experts"] == 3


OF_OURS = {
    "glm45_355b": GLM45,
    "glm45_air_106b": GLM45_AIR,
    "kimi_k2_1t": KIMI_K2,
    "gemma3_1b": GEMMA3_1B,
    "gemma3_4b": GEMMA3_4B,
    "gemma3_12b": GEMMA3_12B,
    "gemma3_27b": GEMMA3_27B,
    "olmo2_7b": OLMO2_7B,
    "olmo2_13b": OLMO2_13B,
    "olmo2_32b": OLMO2_32B,
    "olmo3_7b": OLMO3_7B,
    "olmo3_32b": OLMO3_32B,
    "gpt_oss_20b": GPT_OSS_20B,
    "gpt_oss_120b": GPT_OSS_120B,
    "qwen3_next_80b": QWEN3_NEXT_80B,
}


@pytest.mark.parametrize(("name", "config"), OF_OURS.items(), ids=OF_OURS)
def test_a_model_of_ours_has_the_sizes_of_its_public_file(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """All but the balance loss and initial weights, which no file states as we do, and rotary scaling for longer sequences."""
    ours = load_recipe("mixtral_8x7b", [f"model={name}", "engine=papers"]).model
    theirs = read(read_hf_config(write_config(tmp_path, config)), Model)
    ours = replace(ours, aux_loss=0.0, init=theirs.init, kv_heads=ours.kv_heads or ours.heads, layer_types=ours.types_of_layers)
    assert ours == replace(theirs, rope=theirs.rope if theirs.has_local_rope or theirs.sinks else Rope(), hf=None)


def test_every_fourth_layer_of_olmo3_is_whole_and_its_bases_are_transformers(tmp_path: Path) -> None:
    """Where a file lacks layer_types, or bases; 4.57 read rope_theta as that of all layers, 5 as that of layers without a window."""
    bare = {key: value for key, value in OLMO3_7B.items() if key not in ("layer_types", "sliding_window", "rope_theta", "rope_scaling")}
    keys = read_hf_config(write_config(tmp_path, bare))
    sliding, full = "sliding_attention", "full_attention"
    assert keys["layer_types"] == [sliding, sliding, sliding, full] * 8
    assert (keys["window"], keys["rope_base"], keys["rope_local_base"], keys["rope"]) == (4096, 5e5, 5e5, {"type": "default"})
    says = refusal(write_config(tmp_path, bare | {"rope_theta": 1e4}))
    assert "transformers 5 rotates layers with a window by 500000, and not by rope_theta=10000.0: state rope_parameters with" in says
    ropes = {full: {"rope_type": "default", "rope_theta": 1e4}, sliding: {"rope_type": "default", "rope_theta": 1e3}}
    keys = read_hf_config(write_config(tmp_path, bare | {"rope_parameters": ropes}))
    assert (keys["rope_base"], keys["rope_local_base"]) == (1e4, 1e3)
    says = refusal(write_config(tmp_path, bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}))
    assert "has not a mapping for each of full_attention and sliding_attention" in says
    assert "sliding_window=null, but layers of this model_type have one" in refusal(write_config(tmp_path, bare | {"sliding_window": None}))


def test_a_file_of_gemma3_may_state_how_many_layers_have_one_that_is_whole(tmp_path: Path) -> None:
    keys = read_hf_config(write_config(tmp_path, GEMMA3_1B | {"sliding_window_pattern": 13}))
    assert keys["layer_types"] == [*["sliding_attention"] * 12, "full_attention"] * 2


def test_gpt_oss_is_read_with_the_defaults_of_its_class(tmp_path: Path) -> None:
    """It is yarn and alternating windows where a file states neither; other gates are refused, and weights in MXFP4."""
    left_out = ("rope_scaling", "rope_theta", "layer_types", "sliding_window", "swiglu_limit")
    bare = {key: value for key, value in GPT_OSS_20B.items() if key not in left_out}
    assert read_hf_config(write_config(tmp_path, bare)) == read_hf_config(write_config(tmp_path, GPT_OSS_20B))
    plain = read_hf_config(write_config(tmp_path, bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}))
    assert (plain["rope"], plain["rope_base"]) == ({"type": "default"}, 1e4)
    assert "family moe does not have swiglu_limit=10.0: it has 7.0" in refusal(write_config(tmp_path, bare | {"swiglu_limit": 10.0}))


FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
AUTO_MAP = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}


def compressed(**weights: Any) -> dict[str, Any]:
    """LLAMA31_8B with a quantization_config of compressed-tensors whose weights are others than 8-bit floats."""
    changed = {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}
    return LLAMA31_8B | {"quantization_config": COMPRESSED | {"config_groups": changed}}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}),
        (DEEPSEEK_V3, {"quantization_config": FP8 | {"fmt": "e4m3", "activation_scheme": "dynamic"}, "auto_map": AUTO_MAP}),
        (KIMI_K2, {"quantization_config": FP8, "auto_map": AUTO_MAP}),
        (LLAMA31_8B, {"quantization_config": FP8 | {"weight_block_size": None}}),
        (LLAMA31_8B, {"quantization_config": COMPRESSED | {"kv_cache_scheme": None, "sparsity_config": {"format": "dense"}}}),
        (LLAMA31_8B, {"quantization_config": COMPRESSED | {"config_groups": {"a": GROUP | {"format": None}}}}),
        (LLAMA31_8B, {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}),
    ],
)
def test_a_file_of_quantized_weights_is_that_of_the_plain_model(config: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    assert read_hf_config(write_config(tmp_path, config | more)) == read_hf_config(write_config(tmp_path, config))


def test_what_a_file_states_is_kept_where_it_is_a_default_of_the_recipes_family(tmp_path: Path) -> None:
    """The recipe is a GPT, which has biases."""
    write_config(tmp_path, LLAMA31_8B | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    model = load_recipe("quickstart", [f"model.hf={tmp_path}"]).model
    assert (model.family, model.bias, model.tied, model.norm) == ("llama", True, True, "rmsnorm")


def test_a_kimi_k2_is_read_as_a_deepseek_v3(tmp_path: Path) -> None:
    kimi, deepseek = (read_hf_config(write_config(tmp_path, KIMI_K2 | {"model_type": name})) for name in ("kimi_k2", "deepseek_v3"))
    assert kimi == deepseek
    assert not needs_family_hf(write_config(tmp_path, KIMI_K2))


def test_experts_have_the_names_of_both_versions_of_transformers(tmp_path: Path) -> None:
    """And without norm_topk_prob weights are not normalized, as there."""
    config = {key: value for key, value in QWEN3_30B_A3B.items() if key not in ("num_experts", "norm_topk_prob")}
    keys = read_hf_config(write_config(tmp_path, config | {"num_local_experts": 64}))
    assert (keys["experts"], keys["router"]) == (64, {"normalize": False})
    assert read_hf_config(write_config(tmp_path, config))["experts"] == 128
    assert read_hf_config(write_config(tmp_path, config | {"num_experts": 16, "num_local_experts": 16}))["experts"] == 16
    says = refusal(write_config(tmp_path, config | {"num_experts": 16, "num_local_experts": 8}))
    assert "num_experts=16, num_local_experts=8 differ, but model.experts is a single value" in says


def test_every_layer_of_qwen3_moe_has_the_window(tmp_path: Path) -> None:
    """transformers reads no max_window_layers there."""
    keys = read_hf_config(write_config(tmp_path, QWEN3_30B_A3B | {"use_sliding_window": True, "sliding_window": 4096}))
    assert (keys["window"], "layer_types" in keys) == (4096, False)
    assert "window" not in read_hf_config(write_config(tmp_path, QWEN3_30B_A3B | {"sliding_window": 4096}))


def test_the_rotary_base_is_read_from_the_keys_of_transformers_5(tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    config = {key: value for key, value in LLAMA2_7B.items() if key != "rope_scaling"} | rope
    assert read_hf_config(write_config(tmp_path, config))["rope_base"] == 500000.0


def test_a_folder_can_be_named_in_place_of_its_config_json(tmp_path: Path) -> None:
    write_config(tmp_path, GPT2)
    assert read_hf_config(tmp_path)["hidden"] == 768


def test_the_architecture_is_read_where_model_type_is_missing(tmp_path: Path) -> None:
    config = {key: value for key, value in MIXTRAL_8X7B.items() if key != "model_type"}
    assert read_hf_config(write_config(tmp_path, config))["family"] == "moe"


def test_head_dim_and_tied_embeddings_are_read(tmp_path: Path) -> None:
    keys = read_hf_config(write_config(tmp_path, LLAMA31_8B | {"head_dim": 64, "tie_word_embeddings": True}))
    assert (keys["head_dim"], keys["tied"]) == (64, True)


def test_attention_and_mlp_bias_must_agree(tmp_path: Path) -> None:
    assert read_hf_config(write_config(tmp_path, LLAMA31_8B | {"attention_bias": True, "mlp_bias": True}))["bias"] is True
    assert "attention_bias=true, mlp_bias=false differ" in refusal(write_config(tmp_path, LLAMA31_8B | {"attention_bias": True}))


def test_a_null_number_of_key_heads_means_as_many_as_heads(tmp_path: Path) -> None:
    assert "kv_heads" not in read_hf_config(write_config(tmp_path, LLAMA2_7B | {"num_key_value_heads": None}))


def test_windows_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Mistral has no switch; Qwen2's is off unless it is said to be on, and without layer_types its first layers have no window."""
    mistral = read_hf_config(write_config(tmp_path, MISTRAL_7B | {"sliding_window": 4096, "use_sliding_window": False}))
    assert (mistral["window"], "layer_types" in mistral) == (4096, False)
    assert "window" not in read_hf_config(write_config(tmp_path, QWEN25_7B))
    qwen = read_hf_config(write_config(tmp_path, QWEN25_7B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}))
    assert (qwen["window"], qwen["layer_types"]) == (4096, ["full_attention"] * 20 + ["sliding_attention"] * 8)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLAMA31_8B | {"sliding_window": 4096}, "sliding_window=4096 is not known to family llama, and may change what the model computes"),
        (
            LLAMA31_8B | {"quantization_config": {"bits": 4}},
            "quantization_config={bits:4} names no quant_method: read are bf16, fp16, fp32",
        ),
        (LLAMA31_8B | {"quantization_config": "fp8"}, "quantization_config=fp8 names no quant_method"),
        *(
            (
                LLAMA31_8B | {"quantization_config": {"quant_method": method}},
                f"weights of quant_method={method} are not read: read are bf16",
            )
            for method in ("gptq", "awq", "bitsandbytes", "modelopt")
        ),
        *(
            (DEEPSEEK_V3 | {"quantization_config": FP8 | {"weight_block_size": block}}, "is not two whole numbers above 0")
            for block in ([128], [128, 0], "128", [128, 128, 1], [True, 128])
        ),
        (
            LLAMA31_8B | {"quantization_config": COMPRESSED | {"format": "pack-quantized"}},
            "weights of format=pack-quantized are not read",
        ),
        (LLAMA31_8B | {"quantization_config": COMPRESSED | {"format": None}}, "weights of format=null are not read"),
        (LLAMA31_8B | {"quantization_config": COMPRESSED | {"transform_config": {"a": 1}}}, "transform_config={a:1} is not read"),
        (LLAMA31_8B | {"quantization_config": COMPRESSED | {"sparsity_config": {"format": "2:4"}}}, "sparsity_config="),
        (LLAMA31_8B | {"quantization_config": COMPRESSED | {"config_groups": {}}}, "it has no config_groups"),
        (LLAMA31_8B | {"quantization_config": COMPRESSED | {"config_groups": {"a": {"weights": None}}}}, "a names no weights"),
        (compressed(num_bits=4), "weights of group_0 are floats of 4 bits, which are not read"),
        (compressed(type="int"), "weights of group_0 are ints of 8 bits, which are not read"),
        (compressed(symmetric=False), "weights of group_0 have zero points, which are not read"),
        (compressed(strategy="group", group_size=128), "weights of group_0 have strategy=group, which is not read"),
        (compressed(strategy="group", block_structure=[128, 128]), "weights of group_0 have strategy=group, which is not read"),
        (compressed(strategy="block", block_structure="2x4"), "weights of group_0 have strategy=block, which is not read"),
        (
            LLAMA31_8B | {"quantization_config": COMPRESSED | {"config_groups": {"a": GROUP | {"format": "pack-quantized"}}}},
            "weights of a have format=pack-quantized, which is not read",
        ),
        (KIMI_K2 | {"auto_map": AUTO_MAP | {"AutoModelForCausalLM": "modeling_x.X"}}, "it names code of the model's own"),
        (LLAMA31_8B | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "it names code of the model's own"),
        (MISTRAL_7B | {"attention_bias": True}, "attention_bias=true is not known to family llama"),
        (LLAMA31_8B | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not known to family llama"),
        (LLAMA31_8B | {"rope_scaling": {"factor": 2.0}}, "rope_type=unnamed"),
        (LLAMA31_8B | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_type="),
        (QWEN25_7B | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type=longrope"),
        (LLAMA31_8B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA31_8B | {"hidden_act": "gelu"}, "family llama does not have hidden_act=gelu: it has silu"),
        (LLAMA31_8B | {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (GPT2 | {"attn_pdrop": 0.0}, "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0 differ"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
        (GPT2 | {"activation_function": "swish"}, "activation_function=swish"),
        (MIXTRAL_8X7B | {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (QWEN3_30B_A3B | {"decoder_sparse_step": 2}, "family moe does not have decoder_sparse_step=2: it has 1"),
        (
            QWEN3_30B_A3B | {"mlp_only_layers": [1]},
            "family moe does not have mlp_only_layers=[1]: its layers without experts are the first",
        ),
        (QWEN3_30B_A3B | {"mlp_only_layers": [0, 47]}, "family moe does not have mlp_only_layers=[0, 47]: its layers without experts are"),
        (QWEN3_30B_A3B | {"mlp_only_layers": 1}, "mlp_only_layers=1 is not a list of whole numbers"),
        (QWEN3_30B_A3B | {"mlp_only_layers": [False]}, "mlp_only_layers=[false] is not a list of whole numbers"),
        (QWEN3_30B_A3B | {"mlp_only_layers": [0], "intermediate_size": "6144"}, 'intermediate_size="6144" is not a whole number'),
        (GLM45 | {"partial_rotary_factor": None}, "partial_rotary_factor=null is not a number"),
        (GLM45 | {"scoring_func": "softmax"}, "scoring_func=softmax is not known to family moe"),
        (GLM45 | {"attention_bias": 1}, "attention_bias=1 is not true or false"),
        (KIMI_K2 | {"scoring_func": "softmax"}, "family mla does not have scoring_func=softmax: it has sigmoid"),
        (QWEN3_30B_A3B | {"n_shared_experts": 1}, "n_shared_experts=1 is not known to family moe"),
        (QWEN3_30B_A3B | {"norm_topk_prob": 1}, "norm_topk_prob=1 is not true or false"),
        (QWEN3_NEXT_80B | {"decoder_sparse_step": 2}, "family hybrid does not have decoder_sparse_step=2: it has 1"),
        (QWEN3_NEXT_80B | {"mlp_only_layers": [0]}, "family hybrid does not have mlp_only_layers=[0]: it has []"),
        (QWEN3_NEXT_80B | {"num_hidden_layers": 50}, "full_attention_interval=4 of 50 layers are no whole groups"),
        (QWEN3_NEXT_80B | {"full_attention_interval": 0}, "full_attention_interval=0 is not a whole number, at least 1"),
        (QWEN3_NEXT_80B | {"full_attention_interval": True}, "full_attention_interval=true is not a whole number, at least 1"),
        (QWEN3_NEXT_80B | {"layer_types": ["linear_attention"] * 48}, "is not a list with full_attention"),
        (QWEN3_NEXT_80B | {"layer_types": "full_attention"}, "is not a list with full_attention"),
        (QWEN3_NEXT_80B | {"layer_types": ["full_attention", "linear_attention"] * 24}, "of 48 layers are no whole groups"),
        (QWEN3_NEXT_80B | {"shared_expert_intermediate_size": 768}, "=768 is no multiple of moe_intermediate_size=512"),
        (QWEN3_NEXT_80B | {"shared_expert_intermediate_size": None}, "are not whole numbers, at least 1"),
        (QWEN3_NEXT_80B | {"use_sliding_window": True}, "use_sliding_window=true is not known to family hybrid"),
        (LLAMA31_8B | {"num_hidden_layers": "32"}, 'num_hidden_layers="32" is not a whole number'),
        (LLAMA31_8B | {"num_hidden_layers": True}, "num_hidden_layers=true is not a whole number"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "family mla does not have moe_layer_freq=2: it has 1"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "family mla does not have rope_interleave=false: it has true"),
        (DEEPSEEK_V2_LITE | {"norm_topk_prob": True}, "family mla does not have norm_topk_prob=true: it has false"),
        (LLAMA31_8B | {"vocab_size": None}, "vocab_size=null is not a whole number"),
        (LLAMA31_8B | {"rms_norm_eps": None}, "rms_norm_eps=null is not a number"),
        (LLAMA31_8B | {"tie_word_embeddings": 0}, "tie_word_embeddings=0 is not true or false"),
    ],
)
def test_an_unsupported_value_is_refused_by_its_key_and_value(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(write_config(tmp_path, config))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA31_8B.items() if key not in ("hidden_size", "vocab_size")}
    lines = refusal(write_config(tmp_path, config | {"hidden_act": "relu"})).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "hidden_size is missing",
        "vocab_size is missing",
        "family llama does not have hidden_act=relu",
    ]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "deepseek_v32", 7])
def test_the_refusal_of_an_unknown_model_type_lists_the_known_ones(name: object, tmp_path: Path) -> None:
    says = refusal(write_config(tmp_path, {"model_type": name}))
    assert (
        f"model_type={name} has no family here: known: gpt2, llama, mistral, ministral, mixtral, qwen2, qwen3, olmo2, olmo3, gemma3_text"
        in says
    )
    assert "kimi_k2; any other model type of transformers is family hf" in says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1, column 2"),
        ("[]", "does not hold a mapping of keys"),
        ("{}", "model_type is missing"),
        ("[" * 100_000, "is not a config.json"),
    ],
    ids=["cut off", "a list", "empty", "deep"],
)
def test_a_file_that_is_not_a_config_is_refused(text: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(write_config(tmp_path, text))


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\x00{")
    assert "is not a config.json" in refusal(file)


@pytest.mark.parametrize("name", ["config.json", "nowhere/config.json", "."])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    says = refusal(tmp_path / name)
    assert "config.json: No such file or directory: name a config.json or its folder" in says


def test_deepseek_is_read_with_its_router_and_its_rotary_scaling(tmp_path: Path) -> None:
    v2, v3 = (read(read_hf_config(write_config(tmp_path, config)), Model) for config in (DEEPSEEK_V2_LITE, DEEPSEEK_V3))
    assert (v2.q_lora_rank, v3.q_lora_rank) == (0, 1536)
    assert (v2.dense_layers, v3.dense_layers) == (1, 3)
    assert v2.router == Router(normalize=False)
    assert v3.router == Router(score="sigmoid", scale=2.5, groups=8, top_groups=4, bias=True)
    assert (v2.rope.mscale_all_dim, v3.rope.mscale_all_dim, v3.rope.factor) == (0.707, 1.0, 40)


def test_groups_that_greedy_routing_does_not_read_are_left_out(tmp_path: Path) -> None:
    config = DEEPSEEK_V2_LITE | {"n_group": 8, "topk_group": 3}
    greedy, grouped = (
        read(read_hf_config(write_config(tmp_path, config | {"topk_method": method})), Model)
        for method in ("greedy", "group_limited_greedy")
    )
    assert (greedy.router.groups, greedy.router.top_groups) == (1, 1)
    assert (grouped.router.groups, grouped.router.top_groups) == (8, 3)
