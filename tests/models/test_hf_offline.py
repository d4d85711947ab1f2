"""Family hf without ranks: written models, generation, published weights, and what of it is planned, for many architectures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.hf_models import NEOX, SIZES, WORDS, words, write_config
from distrain.tests.fakes.quantized_folders import PER_ROW, dequantized, fp8_config, quantize_folder, tensors_in
from distrain.trainer.launch.file_checks import weight_problems
from distrain.trainer.models.hf.inspect_config import inspect_config, load_config
from distrain.trainer.models.hf_format.check_folder import check_same_config
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Model

transformers: Any = pytest.importorskip("transformers", reason="transformers, which has these models, is not installed")
torch: Any = pytest.importorskip("torch")

SMALL = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
# fmt: off
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt_neox":    {},
    "opt":         {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom":       {"n_layer": 2, "n_head": 4},
    "falcon":      {"head_dim": None, "ffn_hidden_size": 64},
    "phi":         {},
    "phi3":        {},
    "gemma":       {},
    "gemma2":      {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "olmo2":       {},
    "granite":     {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "smollm3":     {},
    "starcoder2":  {"sliding_window": 8},
    "stablelm":    {},
    "cohere":      {},
    "qwen3_moe":   MOE,
    "deepseek_v3": {**MOE, **LATENT, **ROUTED},
}
# fmt: on


def small_causal_lm(model_type: str, folder: Path) -> tuple[Any, Any]:
    """Return a run of a small model of an architecture, and the model with random weights that all have an effect."""
    from distrain.trainer.models.hf.module import build_causal_lm

    keys = {"model_type": model_type, **SMALL, **ARCHITECTURES[model_type]}
    config = {key: value for key, value in keys.items() if value is not None}
    answer = inspect_config(write_config(folder, config) / "config.json")
    plain = load_recipe("quickstart", [*WORDS, "model.dropout=0", "cluster.gpus=1", "train.microbatch=2"])
    run = replace(plain, model=read({"family": "hf", "hf": str(folder), **answer["sizes"], "parameters": answer["parameters"]}, Model))
    module = build_causal_lm(run, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return run, module


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_generation_with_a_cache_draws_what_transformers_draws(model_type: str, tmp_path: Path) -> None:
    """The likeliest tokens, beyond windows of 8; and after the context of 20 is full, those of the last 20 tokens alone."""
    from distrain.trainer.loop.offline.generate import Sampling, generate_tokens

    run, module = small_causal_lm(model_type, tmp_path)
    prompt = torch.arange(3, 9)
    wanted = Sampling(prompt="", tokens=12, temperature=0, top_k=None, seed=0, tokenizer=None)
    ours = list(generate_tokens(module, prompt, 64, wanted, size=run.model.vocab))
    theirs = module.hf.generate(
        prompt[None], attention_mask=torch.ones(1, 6), max_new_tokens=12, do_sample=False, eos_token_id=None, min_new_tokens=12
    )
    assert ours == theirs[0, 6:].tolist()
    short = list(generate_tokens(module, prompt, 10, wanted, size=run.model.vocab))
    tokens = prompt.tolist()
    with torch.no_grad():
        for token in short:
            assert token == int(module.logits(torch.tensor([tokens[-10:]]))[0, -1].argmax())
            tokens.append(token)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_neox"])
def test_the_plan_counts_the_parameters_that_a_token_uses(model_type: str, tmp_path: Path) -> None:
    """Of four experts a token uses two: of transformers' own parameters, half of those of experts."""
    run, module = small_causal_lm(model_type, tmp_path)
    plan = make_plan(run)
    assert plan.ok
    assert plan.model is not None
    every = sum(each.numel() for each in module.parameters())
    of_experts = sum(each.numel() for name, each in module.named_parameters() if ".experts." in name)
    assert (of_experts > 0) == (model_type != "gpt_neox")
    assert (plan.model.parameters, plan.model.active_parameters) == (every, every - of_experts // 2)
    assert plan.model.flops_per_token == 6.0 * plan.model.active_parameters


def test_zero_3_is_planned_to_gather_a_layer_at_a_time(tmp_path: Path) -> None:
    """As the papers have it: two layers' weights, the one that computes and the one gathered ahead, and one layer's gradients."""
    run, module = small_causal_lm("qwen3_moe", tmp_path)
    device = [("cluster.device.kind", "cuda"), ("cluster.device.dispatch", 6e-5)]
    changes = [("engine", "papers"), ("cluster.gpus", 2), *device, ("parallel.zero", 3)]
    plan = make_plan(with_changes(run, changes))
    assert plan.memory is not None
    sizes: dict[str, int] = {}
    for name, each in module.hf.named_parameters():
        part = ".".join(name.split(".")[:3]) if ".layers." in name else name
        sizes[part] = sizes.get(part, 0) + each.numel()
    assert len(sizes) == 2 + 3  # two layers; the embedding, the last norm and the head
    assert plan.memory.stages[0].bytes.buffers == max(sizes.values()) * (2 * 4 + 4)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_written_model_has_the_same_logits_in_transformers(model_type: str, tmp_path: Path) -> None:
    from distrain.trainer.models.hf.module import write_causal_lm

    _, module = small_causal_lm(model_type, tmp_path)
    write_causal_lm(module, tmp_path / "out", torch.float32, {"eos_token_id": 7, "bos_token_id": None})
    again, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (again.config.eos_token_id, again.config.bos_token_id) == (7, 1)
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, module.logits(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt_neox", "qwen3_moe", "gemma3_text"])
def test_published_weights_are_read_as_transformers_reads_them(model_type: str, tmp_path: Path) -> None:
    """Experts lie one by one in the files of transformers, and in one tensor in its model."""
    from distrain.trainer.models.hf_format.transformers_weights import open_published_weights

    run, module = small_causal_lm(model_type, tmp_path / "config")
    module.hf.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    with open_published_weights(tmp_path / "weights", run) as there:
        assert there.keys() == dict(module.named_parameters()).keys()
        for name, parameter in module.named_parameters():
            assert torch.equal(there[name][tuple(map(slice, parameter.shape))], parameter), name


@pytest.mark.parametrize("config", [fp8_config((16, 12)), PER_ROW], ids=["fp8", "rows"])
def test_quantized_weights_are_read_where_they_have_the_names_of_parameters(config: dict[str, Any], tmp_path: Path) -> None:
    from distrain.trainer.models.hf_format.transformers_weights import open_published_weights

    run, module = small_causal_lm("stablelm", tmp_path / "config")
    module.hf.save_pretrained(tmp_path / "plain")
    folder = quantize_folder(tmp_path / "plain", tmp_path / "packed", config)
    run = with_changes(run, [("model.hf", str(tmp_path / "plain"))])
    expected = dequantized(tensors_in(folder), config)
    assert not [*weight_problems(with_changes(run, [("model.weights", str(folder)), ("log.dir", str(tmp_path / "runs"))]))]
    with open_published_weights(folder, run) as there:
        for name, parameter in module.hf.named_parameters():
            assert torch.equal(there[f"hf.{name}"][(slice(None),) * parameter.dim()].float(), expected[name]), name


def test_quantized_experts_one_by_one_are_refused_for_family_hf(tmp_path: Path) -> None:
    """Only transformers merges them."""
    run, module = small_causal_lm("qwen3_moe", tmp_path / "config")
    module.hf.save_pretrained(tmp_path / "plain")
    folder = quantize_folder(tmp_path / "plain", tmp_path / "packed", fp8_config((8, 8)))
    with pytest.raises(Unreadable) as error:
        check_same_config(folder, with_changes(run, [("model.hf", str(tmp_path / "plain"))]))
    assert "has no model.layers.0.mlp.experts.gate_up_proj, which is" in str(error.value.problems[0])
    assert "name a folder of plain weights" in str(error.value.problems[-1])


def test_quantized_weights_of_another_method_are_refused_for_family_hf(tmp_path: Path) -> None:
    folder = write_config(tmp_path, NEOX | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert "weights of quant_method=gptq are not read" in inspect_config(folder / "config.json")["problem"]
    file = write_config(tmp_path, NEOX | {"quantization_config": fp8_config(None)}) / "config.json"
    assert "parameters" in inspect_config(file)
    assert "quantization_config" not in load_config(file).to_dict(), "exports are plain"


def test_weights_of_another_model_are_refused_key_by_key(neox: Path, tmp_path: Path) -> None:
    from distrain.trainer.launch.file_checks import weight_problems

    transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING["gpt_neox"].from_dict(NEOX)).save_pretrained(
        tmp_path / "weights"
    )
    (tmp_path / "weights" / "config.json").write_text(json.dumps(NEOX | {"rotary_pct": 0.5, "hidden_size": 64}))
    run = load_recipe("quickstart", [*words(neox, 1, 0), f"model.weights={tmp_path / 'weights'}", f"log.dir={tmp_path}"])
    said = "\n".join(map(str, weight_problems(run)))
    assert f"{tmp_path / 'weights'} has hidden_size=64, and model.hf={neox} 32" in said
    assert "rotary_pct=0.5" in said
    assert f"set model.hf={tmp_path / 'weights'} to take its sizes" in said
    missing = load_recipe("quickstart", [*words(neox, 1, 0), f"model.weights={tmp_path / 'nowhere'}", f"log.dir={tmp_path}"])
    assert "is not a folder" in str(next(weight_problems(missing)))
    (tmp_path / "run.json").write_text("{}")
    trained = replace(missing, model=replace(missing.model, weights=str(tmp_path)))
    mend = f"write `distrain export {tmp_path} {tmp_path}_hf` and set model.weights={tmp_path}_hf"
    assert [str(each) for each in weight_problems(trained)] == [f"model.weights={tmp_path} is a run folder: {mend}"]
