"""GPT-2 trained on one GPU as many do by hand: float32 weights, bf16 autocast, the whole model compiled, torch's fused AdamW."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .timed_loop import Sizes, Timed, make_step, random_batch, time_steps


class Block(nn.Module):
    """A pre-norm transformer layer: causal self-attention, then GELU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.up = nn.Linear(sizes.hidden, sizes.ffn)
        self.down = nn.Linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [B, S, H]."""
        batch, seq, hidden = x.shape
        query, key, value = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


class Gpt(nn.Module):
    """Learned positions, and a head that is the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.seq, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of tokens [B, S]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def time_gpt(sizes: Sizes, device: torch.device) -> Timed:
    """Train on random tokens and time the steps; on a CPU nothing is compiled."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with device:
        model = Gpt(sizes)
    forward = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    tokens, labels = random_batch(sizes, device)

    def loss() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            mean: Tensor = forward(tokens, labels)
        return mean

    return time_steps(make_step(optimizer, sizes.micros, loss), device)
