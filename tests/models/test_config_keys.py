"""The keys of a config.json: every architecture of transformers is read right, or refused by the name of what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distrain.trainer.models.hf_format.config import needs_family_hf, read_hf_config
from distrain.trainer.models.hf_format.config_kinds import CONFIG_KINDS
from distrain.trainer.models.hf_format.config_rows import REQUIRED
from distrain.trainer.models.hf_format.harmless_keys import HARMLESS_KEYS, is_harmless
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Model

Configs = dict[str, dict[str, Any]]  # config.json by model_type


@pytest.fixture(scope="module")
def default_configs() -> Configs:
    """The default config.json of each causal language model that transformers has, by model_type."""
    transformers = pytest.importorskip("transformers", reason="transformers, the yardstick, is not installed")
    transformers.logging.set_verbosity_error()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found[model_type] = json.loads(transformers.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        except Exception:  # a model_type that is made of others has no default; the library has errors of its own for that
            continue
    assert len(found) > 100
    return found


def write(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def test_the_default_of_each_architecture_is_read_or_left_to_transformers(default_configs: Configs, tmp_path: Path) -> None:
    """Every key that transformers writes for our model types is known, so that no public model is refused for it."""
    for model_type, config in default_configs.items():
        file = write(tmp_path, config)
        if config["model_type"] in CONFIG_KINDS:  # some names share another's configuration
            assert read_hf_config(file)["layers"] == config.get("num_hidden_layers", config.get("n_layer"))
        else:
            assert needs_family_hf(file), model_type
    assert set(CONFIG_KINDS) <= set(default_configs)


@pytest.mark.parametrize("model_type", CONFIG_KINDS)
def test_a_key_that_a_file_lacks_has_the_default_of_transformers(default_configs: Configs, model_type: str, tmp_path: Path) -> None:
    config, kind = default_configs[model_type], CONFIG_KINDS[model_type]
    whole = read(read_hf_config(write(tmp_path, config)), Model)
    for name in (name for row in kind.rows if row.default not in (REQUIRED, None) for name in row.theirs):  # None: from other keys
        inside = {key: value for key, value in (config.get("rope_parameters") or {}).items() if key != name}
        bare = {key: value for key, value in config.items() if key not in (name, "rope_parameters")} | {"rope_parameters": inside}
        assert read(read_hf_config(write(tmp_path, bare)), Model) == whole, name


def test_what_other_architectures_have_is_refused_by_name(default_configs: Configs, tmp_path: Path) -> None:
    """Each key of another architecture, on its own in a Llama's file: refused unless it is on the list of harmless keys."""
    llama = default_configs["llama"]
    others = {key: value for config in default_configs.values() for key, value in config.items() if value and key not in llama}
    refused: set[str] = set()
    for key, value in others.items():
        try:
            read_hf_config(write(tmp_path, llama | {key: value}))
        except Unreadable as error:
            if key in str(error):
                refused.add(key)
    read = {"rope_theta", "original_max_position_embeddings"}
    assert others.keys() - refused == {key for key in others if is_harmless(key)} | read
    assert refused >= {
        "final_logit_softcapping",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "sliding_window",
        "layer_types",
    }


def test_a_harmless_key_changes_no_logit(default_configs: Configs) -> None:
    """transformers' own models of our types, made with another value of each harmless key that their config has."""
    torch = pytest.importorskip("torch")
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
             "head_dim": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 40, "num_local_experts": 2,
             "num_experts_per_tok": 2, "moe_intermediate_size": 12, "sliding_window": 4, "n_routed_experts": 2, "n_group": 1,
             "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}  # fmt: skip
    read_elsewhere = {
        "max_position_embeddings",
        "rope_parameters",
        "model_type",
        "architectures",
        "dtype",
        "return_dict",
        "id2label",
        "label2id",
    }
    tokens = torch.arange(12)[None]
    tried = set()
    for model_type in CONFIG_KINDS:
        keys: dict[str, Any] = {key: value for key, value in small.items() if key in default_configs[model_type]}
        keys |= {"num_key_value_heads": 2} if "kv_lora_rank" in keys else {}
        keys |= {"layer_types": ["full_attention"]} if "linear_num_key_heads" in default_configs[model_type] else {}
        kind = transformers.CONFIG_MAPPING[model_type]

        def logits(**changes: Any) -> Any:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(kind(**(keys | changes))).eval()  # noqa: B023
            weights = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=weights))
                return model(tokens).logits

        plain = logits()
        for key, value in default_configs[model_type].items():
            if not is_harmless(key) or key in read_elsewhere or key.endswith(("version", "_or_path", "_type", "_activation")):
                continue
            other = not value if isinstance(value, bool) else 3 if value is None or isinstance(value, int) else 0.5
            torch.testing.assert_close(logits(**{key: other}), plain, rtol=0, atol=1e-6)
            tried.add(key)
    assert tried >= {"initializer_range", "use_cache", "pretraining_tp", "bos_token_id", "pad_token_id", "router_aux_loss_coef"}


def test_each_harmless_key_says_what_it_is_of() -> None:
    assert all(HARMLESS_KEYS.values())
    assert not is_harmless("quantization_config")
    assert not is_harmless("attention_bias")
