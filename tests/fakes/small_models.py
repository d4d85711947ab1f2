"""Small models of every family in one process: runs of them, modules whose every weight has an effect, a batch, gradients."""

from __future__ import annotations

from typing import Any

import torch

from distrain.trainer.layers.counter_rng import dropout_keys, normal
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.models.build import build_model, load_weights, named_weights
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train
from distrain.trainer.spec.sections.lora import Lora
from distrain.trainer.spec.sections.rope import Rope
from distrain.trainer.spec.sections.router import Router

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "act": "swiglu", "positions": "rope"}
OLMO2: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "all", "norm_place": "after"}
GEMMA3: dict[str, Any] = {"qk_norm": True, "norm_place": "both", "norm": "rmsnorm1p", "act": "geglu_tanh", "positions": "rope"}
GEMMA3 |= {"scale_embedding": True, "query_pre_attn_scalar": 9, "rope_base": 1e6, "rope_local_base": 500.0, "window": 32}
GEMMA3 |= {"layer_types": ("sliding_attention", "full_attention"), "rope": Rope(type="linear", factor=8.0)}
OLMO3: dict[str, Any] = OLMO2 | {"layer_types": ("sliding_attention",) * 3 + ("full_attention",), "window": 32, "rope_local_base": 1e4}
OLMO3 |= {"rope": Rope(type="linear", factor=8.0)}
LATENT: dict[str, Any] = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
GPT_OSS: dict[str, Any] = {
    "bias": True,
    "expert_bias": True,
    "sinks": True,
    "norm": "rmsnorm",
    "act": "swiglu_clamped",
    "positions": "rope",
}
GPT_OSS |= {"window": 32, "layer_types": ("sliding_attention", "full_attention")}
HYBRID: dict[str, Any] = {"full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_key_head_dim": 10, "linear_value_head_dim": 6, "rope_share": 0.25, "qk_norm": True, "shared_experts": 1}
LORA = Lora(rank=3, alpha=6.0, targets=("query", "value", "out", "up", "down"))
V3 = Router(score="sigmoid", scale=2.5, groups=4, top_groups=2, bias=True)
MODELS = {
    "gpt": Model(family="gpt", layers=2, hidden=48, heads=4, vocab=101, context=40, bias=True, tied=True, act="gelu_tanh"),
    "nano": Model(family="gpt", layers=1, hidden=32, heads=4, vocab=64, ffn=80, act="relu"),
    "llama": Model(family="llama", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=16, ffn=72, vocab=101, **LLAMA),
    "qwen3": Model(family="llama", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=12, ffn=56, vocab=64, qk_norm=True, **LLAMA),
    "olmo2": Model(family="llama", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=12, ffn=56, vocab=64, **OLMO2, **LLAMA),
    "olmo3": Model(family="llama", layers=4, hidden=48, heads=6, kv_heads=2, head_dim=12, ffn=56, vocab=64, **OLMO3, **LLAMA),
    "gemma3": Model(family="llama", layers=4, hidden=48, heads=6, kv_heads=2, head_dim=12, ffn=56, vocab=64, tied=True, **GEMMA3),
    "qwen": Model(
        family="llama", layers=3, hidden=32, heads=4, ffn=56, vocab=64, qkv_bias=True, tied=True, vocab_multiple=48, rope_share=0.5, **LLAMA
    ),
    "lora": Model(family="llama", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=16, ffn=72, vocab=101, **LLAMA, lora=LORA),
    "moe": Model(
        family="moe",
        layers=2,
        hidden=48,
        heads=6,
        kv_heads=2,
        head_dim=16,
        ffn=40,
        vocab=64,
        experts=4,
        top_k=2,
        norm_place="both",
        **LLAMA,
    ),
    "grouped moe": Model(
        family="moe", layers=2, hidden=32, heads=4, ffn=24, vocab=64, experts=8, top_k=3, rope_share=0.75, **LLAMA, router=V3
    ),
    "gpt-oss": Model(family="moe", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=16, ffn=40, vocab=64, experts=4, top_k=2, **GPT_OSS),
    "llama with sinks": Model(
        family="llama", layers=2, hidden=48, heads=6, kv_heads=2, ffn=72, vocab=64, **LLAMA | {"act": "swiglu_clamped", "sinks": True}
    ),
    "hybrid": Model(
        family="hybrid",
        layers=6,
        hidden=48,
        heads=6,
        kv_heads=2,
        head_dim=16,
        ffn=40,
        vocab=64,
        experts=4,
        top_k=2,
        **HYBRID,
        **LLAMA | {"norm": "rmsnorm1p"},
    ),
    "mla": Model(family="mla", layers=2, hidden=48, heads=6, ffn=40, vocab=64, experts=4, top_k=2, **LATENT, q_lora_rank=20, **LLAMA),
}
B, S = 3, 24  # sequences, tokens of each


def run_of(name: str, **changes: Any) -> Run:
    """Return a run of one of MODELS with keys changed, as parallel__recompute="full"."""
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    train = Train(batch=B, microbatch=B, seq=S, steps=1, precision="fp32")
    run = Run(name=name, model=MODELS[name], cluster=cluster, parallel=Parallel(), train=train)
    return with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()])


def module_of(run: Run, dtype: Any = torch.float64) -> Any:
    """Return a module whose weights are far from their initial values, so that every part has an effect, norms and biases too."""
    module = build_model(run, device=CPU, dtype=dtype, seed=5)
    drawn = (
        (name, tensor.float() + 0.2 * normal(6, name, 0, tensor.numel()).view(tensor.shape)) for name, tensor in named_weights(module, run)
    )
    load_weights(module, drawn)
    return module


def batch_of(run: Run) -> tuple[Any, Any]:
    """Return tokens [B, S], and labels of which some are ignored."""
    drawn = torch.Generator().manual_seed(7)
    tokens, labels = torch.randint(run.model.vocab, (2, B, S), generator=drawn)
    labels[0, 3:7] = labels[2, -1] = IGNORED
    return tokens, labels


def keys_of(step: int = 0, samples: Any = None) -> Any:
    """Return the dropout keys of a step and of its samples, all B by default."""
    return dropout_keys(1, step, torch.arange(B) if samples is None else samples, torch.arange(S))


def gradients(module: Any, *batch: Any, **further: Any) -> tuple[Any, dict[str, Any]]:
    """Return the mean loss, and its gradient by every trained weight."""
    loss, labels = module(*batch, **further)
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss / labels, list(trained.values()))
    return loss.detach() / labels, dict(zip(trained, found, strict=True))
