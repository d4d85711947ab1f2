"""Hugging Face folders: weights read from transformers and written for it give the same logits in both; bad folders are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from distrain.trainer.layers.counter_rng import normal  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.config import read_hf_config  # noqa: E402
from distrain.trainer.models.hf_format.weights import generation_config, hf_config, read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.spec.changed_run import with_changes  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.read import read  # noqa: E402
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train  # noqa: E402
from distrain.trainer.spec.sections.rope import Rope  # noqa: E402
from distrain.trainer.spec.sections.router import Router  # noqa: E402

CPU = torch.device("cpu")
S = 24
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "act": "swiglu", "positions": "rope"}
OLMO2: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "all", "norm_place": "after"}
GEMMA3: dict[str, Any] = {"qk_norm": True, "norm_place": "both", "norm": "rmsnorm1p", "act": "geglu_tanh", "positions": "rope"}
GEMMA3 |= {"scale_embedding": True, "query_pre_attn_scalar": 9, "rope_base": 1e6, "rope_local_base": 500.0, "window": 6}
GEMMA3 |= {"layer_types": ("sliding_attention", "full_attention")}
OLMO3: dict[str, Any] = OLMO2 | {"window": 6, "layer_types": ("sliding_attention",) * 3 + ("full_attention",), "rope_base": 5e3}
DEEPSEEK: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "vocab": 64,
    "experts": 8,
    "expert_ffn": 24,
    "shared_experts": 1,
    **LLAMA,
}
DEEPSEEK |= {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
YARN = Rope(type="yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7)
V3 = Router(score="sigmoid", scale=2.5, groups=4, top_groups=2, bias=True)
STRETCHED_HALVES = Rope(type="yarn", factor=4.0, original_max_position_embeddings=8)
MIXTURE: dict[str, Any] = {"family": "moe", "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 12, "vocab": 64, **LLAMA}
MIXTURE |= {"experts": 4, "top_k": 2, "expert_ffn": 24, "qk_norm": True}
GPT_OSS: dict[str, Any] = MIXTURE | {"qk_norm": False, "bias": True, "expert_bias": True, "sinks": True, "act": "swiglu_clamped"}
HYBRID: dict[str, Any] = {"full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "shared_experts": 2}
HYBRID |= {"linear_key_head_dim": 10, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4}
OURS = {
    "gpt": Model(family="gpt", layers=2, hidden=48, heads=4, vocab=101, bias=True, tied=True, act="gelu_tanh", dropout=0.1),
    "gpt without biases": Model(family="gpt", layers=1, hidden=32, heads=4, vocab=64, ffn=80, act="relu", vocab_multiple=48),
    "llama": Model(family="llama", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=16, ffn=72, vocab=101, **LLAMA),
    "llama with biases": Model(family="llama", layers=1, hidden=32, heads=4, ffn=56, vocab=64, bias=True, tied=True, **LLAMA),
    "mixtral": Model(family="moe", layers=2, hidden=32, heads=4, kv_heads=2, ffn=56, vocab=64, experts=4, top_k=2, **LLAMA),
    "qwen3": Model(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=56, vocab=64, qk_norm=True, **LLAMA),
    "qwen3, windows": Model(family="llama", layers=1, hidden=32, heads=4, ffn=56, vocab=64, qk_norm=True, window=6, **LLAMA),
    "olmo2": Model(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=56, vocab=64, **OLMO2, **LLAMA),
    "olmo3": Model(family="llama", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=56, vocab=64, **OLMO3, **LLAMA),
    "olmo3, stretched": Model(
        family="llama", layers=5, hidden=32, heads=4, ffn=56, vocab=64, rope=STRETCHED_HALVES, rope_local_base=5e3, **OLMO3, **LLAMA
    ),
    "gemma3": Model(family="llama", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=56, vocab=64, tied=True, **GEMMA3),
    "gemma3, stretched": Model(
        family="llama", layers=2, hidden=32, heads=4, head_dim=12, ffn=56, vocab=64, **GEMMA3 | {"rope": Rope(type="linear", factor=8.0)}
    ),
    "qwen3 moe": Model(**MIXTURE, layers=2, router=Router(normalize=False)),
    "qwen3 moe, dense layers": Model(**MIXTURE, layers=3, ffn=40, dense_layers=2),
    "glm4 moe": Model(
        **MIXTURE | {"experts": 8, "top_k": 3},
        layers=3,
        ffn=40,
        shared_experts=2,
        dense_layers=1,
        qkv_bias=True,
        rope_share=0.7,
        router=V3,
    ),
    "glm4 moe, plain": Model(
        family="moe",
        layers=2,
        hidden=32,
        heads=4,
        ffn=24,
        vocab=64,
        experts=4,
        top_k=2,
        shared_experts=1,
        tied=True,
        rope_share=0.25,
        rope=STRETCHED_HALVES,
        router=Router(score="sigmoid", normalize=False, bias=True),
        **LLAMA,
    ),
    "gpt-oss": Model(**GPT_OSS, layers=3, window=6, layer_types=("sliding_attention", "full_attention"), rope=STRETCHED_HALVES),
    "gpt-oss, all windows": Model(**GPT_OSS | {"bias": False, "head_dim": 8}, layers=2, window=7, tied=True),
    "qwen": Model(family="llama", layers=3, hidden=32, heads=4, ffn=56, vocab=64, qkv_bias=True, vocab_multiple=48, **LLAMA),
    "qwen3 next": Model(**MIXTURE | HYBRID | {"family": "hybrid", "norm": "rmsnorm1p"}, layers=6, rope_share=0.5, norm_eps=1e-2),
    "qwen3 next, tied": Model(
        **MIXTURE | HYBRID | {"family": "hybrid", "norm": "rmsnorm1p", "full_attention_interval": 1, "linear_conv_kernel_dim": 2},
        layers=2,
        tied=True,
        norm_eps=1e-2,
        router=Router(normalize=False),
    ),
    "deepseek v2": Model(family="mla", **DEEPSEEK, q_lora_rank=0, top_k=3, router=Router(normalize=False, scale=2.0)),
    "deepseek v3": Model(family="mla", **DEEPSEEK, q_lora_rank=20, top_k=3, router=V3, rope=YARN),
}
ROPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
LATENT = ROPE | {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 0,
}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
}
GROUPS = {"n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 101, "n_positions": S}
MOE = {"num_key_value_heads": 2, "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
GLM = {
    "num_key_value_heads": 2, "head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}  # fmt: skip
GEMMA = {"num_key_value_heads": 2, "head_dim": 12}
NEXT: dict[str, Any] = MOE | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
NEXT |= {"num_hidden_layers": 4, "shared_expert_intermediate_size": 48, "head_dim": 16, "rms_norm_eps": 1e-2}
OSS = {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 6}
TWO_ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e3}, "sliding_attention": {"rope_theta": 100.0}}
LONGER = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 8}
FAR = {"rope_type": "default", "rope_theta": 5e5}
# fmt: off
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2":             ("GPT2Config",    GPT2 | {"tie_word_embeddings": True}),
    "gpt2, untied":     ("GPT2Config",    GPT2 | {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "relu"}),
    "llama, grouped":   ("LlamaConfig",   ROPE | {"num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5}),
    "llama, tied":      ("LlamaConfig",   ROPE | {"tie_word_embeddings": True, "rope_parameters": FAR}),
    "llama, biased":    ("LlamaConfig",   ROPE | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "mistral":          ("MistralConfig", ROPE | {"num_key_value_heads": 2, "sliding_window": None}),
    "mixtral":          ("MixtralConfig", ROPE | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 3}),
    "qwen2":            ("Qwen2Config",   ROPE | {"num_key_value_heads": 2}),
    "qwen3":            ("Qwen3Config",   ROPE | {"num_key_value_heads": 2, "head_dim": 12}),
    "olmo2":            ("Olmo2Config",   ROPE | {"num_key_value_heads": 2}),
    "olmo3":            ("Olmo3Config",   ROPE | {"num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 6}),
    "olmo3, stretched": ("Olmo3Config",   ROPE | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6,
                                          "rope_parameters": {"full_attention": LONGER, "sliding_attention": {"rope_theta": 100.0}}}),
    "gemma3":           ("Gemma3TextConfig", ROPE | GEMMA | {"query_pre_attn_scalar": 9, "sliding_window": 6, "sliding_window_pattern": 3}),
    "gemma3, stretched": ("Gemma3TextConfig", ROPE | GEMMA | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 99,
                                          "tie_word_embeddings": False, "rope_parameters": TWO_ROPES}),
    "qwen3, windows":   ("Qwen3Config",   ROPE | {"num_key_value_heads": 4, "head_dim": 8, "use_sliding_window": True, "sliding_window": 6,
                                          "max_window_layers": 1}),
    "qwen3 moe":        ("Qwen3MoeConfig", ROPE | MOE | {"norm_topk_prob": True}),
    "qwen3 moe, plain": ("Qwen3MoeConfig", ROPE | MOE | {"use_sliding_window": True, "sliding_window": 6}),
    "qwen3 moe, dense layers": ("Qwen3MoeConfig", ROPE | MOE | {"mlp_only_layers": [0]}),
    "glm4 moe":         ("Glm4MoeConfig", ROPE | GLM | {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2,
                                          "routed_scaling_factor": 2.5}),
    "glm4 moe, air":    ("Glm4MoeConfig", ROPE | GLM | {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False}),
    "glm4 moe, stretched": ("Glm4MoeConfig", ROPE | GLM | {"rope_parameters": LONGER | {"partial_rotary_factor": 0.34}}),
    "qwen3 next":       ("Qwen3NextConfig", ROPE | NEXT),
    "qwen3 next, pairs": ("Qwen3NextConfig", ROPE | NEXT | {"layer_types": ["linear_attention", "full_attention"] * 2,
                                          "norm_topk_prob": False, "tie_word_embeddings": True, "rope_parameters": LONGER,
                                          "linear_conv_kernel_dim": 3, "linear_num_value_heads": 2}),
    "deepseek v2":      ("DeepseekV2Config", LATENT | {"q_lora_rank": None, "routed_scaling_factor": 2.0}),
    "deepseek v2, groups": ("DeepseekV2Config", LATENT | GROUPS | {"q_lora_rank": 20, "topk_method": "group_limited_greedy"}),
    "deepseek v3":      ("DeepseekV3Config", LATENT | GROUPS | {"q_lora_rank": 20}),
    "deepseek v3, plain": ("DeepseekV3Config", LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "gpt-oss":          ("GptOssConfig",  ROPE | OSS),
    "gpt-oss, plain":   ("GptOssConfig",  ROPE | OSS | {"attention_bias": False, "layer_types": ["full_attention", "sliding_attention"],
                                          "rope_parameters": FAR, "tie_word_embeddings": True}),
    "qwen2, tied":      ("Qwen2Config",   ROPE | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}
# fmt: on


def run_of(model: Model, **changes: Any) -> Run:
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    run = Run(name="test", model=model, cluster=cluster, parallel=Parallel(), train=Train(batch=2, microbatch=2, seq=S, steps=1))
    return with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()])


def module_of(run: Run) -> Any:
    """Return a module in which every weight has an effect, norms and biases too."""
    module = build_model(run, device=CPU, dtype=torch.float32, seed=5)
    load_weights(
        module,
        [(name, tensor + 0.2 * normal(6, name, 0, tensor.numel()).view(tensor.shape)) for name, tensor in named_weights(module, run)],
    )
    return module


def model_of_transformers(transformers: Any, name: str) -> Any:
    """Return one of THEIRS in which every weight has an effect, biases of routers too."""
    kind, keys = THEIRS[name]
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(initializer_range=0.2, **deepcopy(keys))).eval()
    biases = [tensor for key, tensor in theirs.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for parameter in [*theirs.parameters(), *biases]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


def tokens_of(run: Run) -> Any:
    return torch.randint(run.model.vocab, (2, S), generator=torch.Generator().manual_seed(7))


def tolerance(name: str) -> float:
    """Return the largest difference of float32 logits. Linear attention's heads are normed after they are read, which enlarges what
    rounding makes of heads that read little: both are as far from float64."""
    return 3e-5 if name.startswith("qwen3 next") else 1e-5


def save_weights(folder: Path, name: str, **changes: Any) -> Run:
    """Write one of OURS to a folder and return its run."""
    run = run_of(OURS[name])
    write_hf_folder(named_weights(module_of(run), run), run, folder, **changes)
    return run


def problems(folder: Path, run: Run) -> str:
    with pytest.raises(Unreadable) as error:
        next(read_hf_weights(folder, run))
    return "\n".join(map(str, error.value.problems))


@pytest.mark.parametrize("name", THEIRS)
def test_weights_of_transformers_give_the_same_logits_here(name: str, tmp_path: Path, transformers: Any) -> None:
    theirs = model_of_transformers(transformers, name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    run = run_of(read(read_hf_config(tmp_path), Model), model__vocab_multiple=16)
    ours = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(ours, read_hf_weights(tmp_path, run))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens_of(run)), theirs(tokens_of(run)).logits, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", [name for name in THEIRS if name.startswith("qwen3 next")])
def test_packed_documents_have_the_logits_that_transformers_gives_each_alone(name: str, tmp_path: Path, transformers: Any) -> None:
    theirs = model_of_transformers(transformers, name)
    theirs.save_pretrained(tmp_path)
    run = run_of(read(read_hf_config(tmp_path), Model))
    ours = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(ours, read_hf_weights(tmp_path, run))
    lengths = (1, 7, 70, 2, 16)  # of tokens: the third begins in a chunk of 64, and fills the next
    tokens = torch.randint(run.model.vocab, (1, sum(lengths)), generator=torch.Generator().manual_seed(7))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    with torch.no_grad():
        found = ours.head(ours.hidden_states(tokens, documents, None))
        expected = torch.cat([theirs(each).logits for each in tokens.split(lengths, dim=1)], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1.5 * tolerance(name))  # each is up to 3e-5 from float64


@pytest.mark.parametrize(
    "name", [name for name in THEIRS if name.startswith(("olmo", "gpt-oss", "gemma3", "glm4", "qwen3 moe", "qwen3 next", "deepseek v3"))]
)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path, transformers: Any) -> None:
    """transformers' gradients are saved as a model's weights, and read under our names."""
    theirs = model_of_transformers(transformers, name)
    theirs.save_pretrained(tmp_path / "weights")
    run = run_of(read(read_hf_config(tmp_path / "weights"), Model))
    ours = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(ours, read_hf_weights(tmp_path / "weights", run))
    tokens = tokens_of(run)
    for model, logits in ((theirs, theirs(tokens).logits), (ours, ours.logits(tokens))):
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    theirs.save_pretrained(tmp_path / "gradients")
    expected, found = dict(read_hf_weights(tmp_path / "gradients", run)), dict(ours.named_parameters())
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for key, parameter in found.items():
        torch.testing.assert_close(
            parameter.grad, expected[key], rtol=0, atol=tolerance(name) / 5 * largest, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_folder_of_kimi_k2_is_read_as_deepseek_v3s(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "deepseek v3")
    expected = dict(read_hf_weights(tmp_path, run))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    found = dict(read_hf_weights(tmp_path, run_of(read(read_hf_config(tmp_path), Model))))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_layers_for_tokens_after_the_next_are_left_in_the_folder(tmp_path: Path) -> None:
    """GLM-4.5's files hold one more layer than num_hidden_layers says."""
    run = save_weights(tmp_path, "glm4 moe")
    expected = dict(named_weights(module_of(run), run))
    held = load_file(tmp_path / "model.safetensors")
    more = {key.replace("layers.2.", "layers.3."): tensor + 1 for key, tensor in held.items() if "layers.2." in key}
    save_file(held | more | {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    found = dict(read_hf_weights(tmp_path, run))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("max_file_bytes", [20_000, 10**9])
def test_our_weights_give_the_same_logits_in_transformers(name: str, max_file_bytes: int, tmp_path: Path, transformers: Any) -> None:
    run = save_weights(tmp_path, name, max_file_bytes=max_file_bytes)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(
            theirs.eval()(tokens_of(run)).logits, module_of(run).logits(tokens_of(run)), rtol=0, atol=tolerance(name)
        )


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_survive_a_round_trip_bit_for_bit(name: str, dtype: Any, tmp_path: Path) -> None:
    run = run_of(OURS[name])
    module = module_of(run).to(dtype)
    write_hf_folder(named_weights(module, run), run, tmp_path)
    # transformers' GPT-2 always has biases: zeros are written for a model without them.
    again = run_of(read(read_hf_config(tmp_path), Model))
    expected = dict(named_weights(module, run))
    for key, tensor in read_hf_weights(tmp_path, again):
        assert tensor.dtype == (torch.float32 if key.endswith("router.bias") else dtype)
        assert torch.equal(tensor, expected.pop(key, torch.zeros_like(tensor)))
    assert not expected


@pytest.mark.parametrize(
    ("stated", "longest"), [('{"max_position_embeddings": 4096}', 4096), ('{"max_position_embeddings": 8}', S), ("", S)]
)
def test_training_on_short_sequences_leaves_the_context_of_published_weights(stated: str, longest: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(stated)
    run = run_of(OURS["llama"], model__weights=str(tmp_path))
    assert hf_config(run, "llama", "float32")["max_position_embeddings"] == longest == generation_config(run, {})["max_length"]


def test_files_stay_within_their_maximum_size(tmp_path: Path) -> None:
    save_weights(tmp_path, "llama", max_file_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    held = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert sum(held) == index["metadata"]["total_size"]
    assert max(held) <= 20_000
    assert [file.name for file in files][-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"


def test_gpt_2_of_the_hub_is_read_without_the_transformer_prefix(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "gpt")
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, S, S)}, file)  # its causal mask, too
    expected = dict(named_weights(module_of(run), run))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_hf_weights(tmp_path, run))


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    said = problems(tmp_path, with_changes(run, [("model.ffn", 96), ("model.rope_base", 5e5), ("model.tied", True)]))
    assert said.count("\n") == 2
    assert f"{tmp_path} has model.ffn=72, this run 96: set model.ffn=72" in said
    assert "model.rope_base=10000.0, this run 500000.0" in said
    assert "model.tied=false" in said


@pytest.mark.parametrize(
    ("name", "key", "value", "has"),
    [
        ("olmo2", "norm_place", "both", "after"),
        ("olmo2", "qk_norm_over", "head", "all"),
        ("gemma3", "scale_embedding", False, "true"),
        ("gemma3", "query_pre_attn_scalar", None, "9"),
        ("gemma3", "rope_local_base", 1e4, "500.0"),
    ],
)
def test_a_folder_with_other_norms_or_scales_is_refused(name: str, key: str, value: Any, has: str, tmp_path: Path) -> None:
    run = save_weights(tmp_path, name)
    assert f"{tmp_path} has model.{key}={has}, this run" in problems(tmp_path, with_changes(run, [(f"model.{key}", value)]))


def test_another_family_is_reported_as_a_single_problem(tmp_path: Path) -> None:
    save_weights(tmp_path, "llama")
    assert problems(tmp_path, run_of(OURS["gpt"])) == (
        f"{tmp_path} is a model of family llama, but model.family=gpt: set model.hf={tmp_path} to take its sizes"
    )


def test_a_file_that_was_cut_short_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    says = f"{file} is {len(whole) - 10:,} bytes where its header says {len(whole):,}: download it again"
    assert problems(tmp_path, run) == says
    for damaged in (b"", whole[:4], b"\xff" * 64, b"<!DOCTYPE html>" * 10):
        file.write_bytes(damaged)
        assert problems(tmp_path, run) == f"{file} is not a safetensors file: download it again"


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "model.safetensors"}}))
    assert problems(tmp_path, run).startswith(f"{tmp_path} lacks one.safetensors, which model.safetensors.index.json names")


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    save_file({"lm_head.weight": torch.zeros(101, 48)}, tmp_path / "model.safetensors")
    lines = problems(tmp_path, run).splitlines()
    assert len(lines) == 7
    assert lines[-1].endswith(" more tensors are missing or of another shape")


def test_other_rotary_frequencies_are_refused(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "this run {type:default}: set model.rope={type:linear,factor:8.0}" in problems(tmp_path, run)


def test_missing_and_misshapen_weights_are_reported_before_any_is_read(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    held = load_file(tmp_path / "model.safetensors")
    del held["model.norm.weight"]
    held["lm_head.weight"] = torch.zeros(100, 48)
    save_file(held, tmp_path / "model.safetensors")
    said = problems(tmp_path, run)
    assert f"{tmp_path} has no model.norm.weight, which is norm.weight here" in said
    assert "lm_head.weight is [100, 48], not [101, 48]" in said


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "holds no .safetensors" in problems(tmp_path, run)


def test_existing_weights_are_not_overwritten(tmp_path: Path) -> None:
    run = save_weights(tmp_path, "llama")
    with pytest.raises(Unreadable, match="holds weights: name a folder"):
        write_hf_folder(named_weights(module_of(run), run), run, tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", ("model.act", "geglu")),
        ("llama", ("model.norm", "layernorm")),
        ("llama", ("model.positions", "none")),
        ("mixtral", ("model.router.normalize", False)),
        ("mixtral", ("model.router.score", "sigmoid")),
        ("qwen3 moe", ("model.router.scale", 2.0)),
        ("qwen3 moe", ("model.router.groups", 2)),
        ("qwen3 moe", ("model.router.bias", True)),
        ("qwen3 moe", ("model.shared_experts", 1)),
        ("qwen3 moe", ("model.rope_share", 0.5)),
        ("qwen3 moe", ("model.qkv_bias", True)),
        ("mixtral", ("model.dense_layers", 1)),
        ("llama", ("model.rope_share", 0.5)),
        ("llama", ("model.norm_place", "after")),
        ("gpt", ("model.norm_place", "both")),
        ("mixtral", ("model.norm_place", "after")),
        ("deepseek v3", ("model.norm_place", "after")),
        ("qwen3", ("model.qk_norm_over", "all")),
        *(
            ("gemma3", each)
            for each in (
                ("model.norm", "rmsnorm"),
                ("model.norm_place", "before"),
                ("model.qk_norm", False),
                ("model.act", "geglu"),
                ("model.scale_embedding", False),
                ("model.window", None),
                ("model.qkv_bias", True),
                ("model.rope_share", 0.5),
            )
        ),
        ("gemma3, stretched", ("model.rope_local_base", None)),
        ("llama", ("model.scale_embedding", True)),
        ("llama", ("model.query_pre_attn_scalar", 9)),
        ("olmo2", ("model.qk_norm", False)),
        ("olmo2", ("model.qk_norm_over", "head")),
        ("olmo2", ("model.norm_place", "both")),
        ("olmo2", ("model.qkv_bias", True)),
        ("olmo2", ("model.rope_share", 0.5)),
        ("olmo3", ("model.qkv_bias", True)),
        ("olmo3", ("model.rope_share", 0.5)),
        ("olmo3, stretched", ("model.rope_local_base", None)),
        ("olmo3, stretched", ("model.norm_place", "both")),
        ("qwen3, windows", ("model.rope_local_base", 1e3)),
        ("qwen3", ("model.rope_share", 0.5)),
        *(
            ("gpt-oss", each)
            for each in (
                ("model.sinks", False),
                ("model.expert_bias", False),
                ("model.act", "swiglu"),
                ("model.qkv_bias", False),
                ("model.qk_norm", True),
                ("model.window", None),
                ("model.norm_place", "both"),
                ("model.rope_share", 0.5),
                ("model.rope_local_base", 1e3),
                ("model.shared_experts", 1),
                ("model.dense_layers", 1),
                ("model.capacity", 2.0),
                ("model.scale_embedding", True),
                ("model.query_pre_attn_scalar", 9),
                ("model.router.scale", 2.0),
            )
        ),
        ("llama", ("model.sinks", True)),
        ("mixtral", ("model.expert_bias", True)),
        ("glm4 moe", ("model.shared_experts", 0)),
        ("glm4 moe", ("model.router.bias", False)),
        ("glm4 moe", ("model.bias", True)),
        ("glm4 moe", ("model.window", 6)),
        ("glm4 moe", ("model.capacity", 2.0)),
    ],
)
def test_a_model_without_a_class_in_transformers_is_not_written(name: str, change: tuple[str, Any], tmp_path: Path) -> None:
    run = with_changes(run_of(OURS[name]), [change])
    with pytest.raises(Unreadable, match="none of Hugging Face's"):
        write_hf_folder(named_weights(module_of(run), run), run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
