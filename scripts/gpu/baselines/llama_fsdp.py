"""A Llama as PyTorch's own trainer does it: compiled layers, `fully_shard` with bf16 weights and float32 sums, fused AdamW."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ....trainer.system.reserved_port import reserve_port
from .timed_loop import Sizes, Timed, make_step, random_batch, time_steps

ROPE_BASE = 500_000.0


class Layer(nn.Module):
    """RMSNorm, causal attention with grouped heads and rotary positions, RMSNorm, SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = sizes.heads, sizes.kv_heads, sizes.hidden // sizes.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.hidden, eps=1e-5), nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.query = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.key, self.value = (nn.Linear(sizes.hidden, self.kv_heads * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output [B, S, H]; cos and sin are [S, head size]."""
        y = self.norm_1(x)
        query = _rotate(self._split(self.query(y), self.heads), cos, sin)
        key = _rotate(self._split(self.key(y), self.kv_heads), cos, sin)
        value = self._split(self.value(y), self.kv_heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.size).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-other, one), dim=-1) * sin).to(x.dtype)


class Llama(nn.Module):
    """Rotary positions, and a head of its own."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        size = sizes.hidden // sizes.heads
        angles = torch.outer(torch.arange(sizes.seq), ROPE_BASE ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V]."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def time_llama(sizes: Sizes, device: torch.device) -> Timed:
    """Train on random tokens in a group of one rank and time the steps; on a CPU nothing is compiled."""
    with reserve_port() as port:
        address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=address, rank=0, world_size=1)
    try:
        return _time_in_group(sizes, device)
    finally:
        dist.destroy_process_group()


def _time_in_group(sizes: Sizes, device: torch.device) -> Timed:
    torch.manual_seed(0)
    os.environ.setdefault("LOCAL_RANK", "0")
    with device:
        model = Llama(sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    loss = torch.compile(loss_of) if device.type == "cuda" else loss_of
    for layer in model.layers:
        if device.type == "cuda":
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    tokens, labels = random_batch(sizes, device)
    return time_steps(make_step(optimizer, sizes.micros, lambda: loss(model(tokens), labels)), device)
