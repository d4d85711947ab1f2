"""Models of transformers, trained there by plain torch, lose as much in each step as our ranks that begin from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.loop.data.prepare import cache_folder, prepare_corpus  # noqa: E402
from distrain.trainer.loop.data.samples.batches import Batches  # noqa: E402
from distrain.trainer.spec.run import Run  # noqa: E402

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

# fmt: off
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}
MIXTURE = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
DEEPSEEK = {
    **MIXTURE,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0, "original_max_position_embeddings": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**DEEPSEEK, "norm_topk_prob": True},
    "deepseek_v2": {**DEEPSEEK, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    "qwen3_moe":   {**MIXTURE, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "olmo2":       {"num_key_value_heads": 2},
    "olmo3":       {"num_key_value_heads": 2, "sliding_window": 8,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}},
    "gpt_oss":     {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8,
                    "sliding_window_pattern": 2},
    "glm4_moe":    {**MIXTURE, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "use_qk_norm": True,
                    "attention_bias": True, "routed_scaling_factor": 2.5},
}
LAYOUTS = {
    "deepseek_v3": ("cluster.gpus=4", "parallel={pp: 2, ep: 2, zero: 1}", "train.microbatch=1"),
    "deepseek_v2": ("cluster.gpus=2", "parallel={tp: 2, sequence: true}", "train.microbatch=2"),
    "qwen3_moe":   ("cluster.gpus=2", "parallel={cp: 2, zero: 3}", "engine=native", "train={microbatch: 2, loss_chunks: 3, z_loss: 0.01}"),
    "olmo2":       ("cluster.gpus=4", "parallel={tp: 4, sequence: true, recompute: selective}", "engine=native", "train.microbatch=2"),
    "olmo3":       ("cluster.gpus=4", "parallel={tp: 2, cp: 2, cp_comm: all_to_all, zero: 2}", "engine=native", "train.microbatch=2"),
    "gpt_oss":     ("cluster.gpus=4", "parallel={tp: 2, ep: 2, zero: 1, sequence: true}", "train.microbatch=2"),
    "gemma3_text": ("cluster.gpus=4", "parallel={tp: 2, pp: 2}", "train.microbatch=1", "train.z_loss=0.01"),
    "glm4_moe":    ("cluster.gpus=2", "parallel={tp: 2, sequence: true}", "train.microbatch=2"),
}
WORDS = (
    *("quickstart", "data=text", f"data.path={Path(__file__).parents[2] / 'LICENSE'}", "train.steps=5", "train.batch=4"),
    *("train.seq=32", "train.evaluate.every=0"),
    *("train.precision=fp32", "optim.lr=5e-3", "optim.warmup=0", "optim.schedule=constant", "optim.weight_decay=0", "log.every=1"),
    *("model.aux_loss=0", "log.ledger=true", "checkpoint.final=false"),
)
# fmt: on


def random_model(transformers: Any, model_type: str) -> Any:
    """Return a model of transformers in float32 in which every weight has an effect, biases of experts too."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **CONFIGS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def trained_losses(model: Any, run: Run) -> list[float]:
    """Train a model of transformers on a run's batches with torch's AdamW; return the loss of each step."""
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=run.train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    batches, optim, losses = Batches(corpus, seed=run.train.seed, seq=run.train.seq), run.optim, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0)
    for step in range(run.train.steps or 0):
        batch = batches.batch(step * run.train.batch, run.train.batch)
        logits = model(input_ids=batch.tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels.flatten())
        optimizer.zero_grad()
        (loss + run.train.z_loss * logits.logsumexp(-1).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_type", CONFIGS)
def test_ranks_train_as_transformers_does(ranks: RankPool, tmp_path: Path, transformers: Any, model_type: str) -> None:
    model = random_model(transformers, model_type)
    model.save_pretrained(tmp_path / "published")
    words = (*WORDS, f"model.hf={tmp_path / 'published'}", f"model.weights={tmp_path / 'published'}", *LAYOUTS[model_type])
    losses = trained_losses(model, load_recipe(words[0], words[1:]))
    assert losses[-1] < losses[0] - 0.1
    assert ranks.train(tmp_path / "run", *words).figures("loss") == pytest.approx(losses, abs=5e-6, rel=0)
