"""Multi-head latent attention in torch (arXiv:2405.04434 section 2.1, 2412.19437 section 2.1.1), in a transformer whose layers have it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.norms import RMSNorm
from ...layers.parameters_by_prefix import Parameters, sub_parameters
from ...layers.tensor_parallel import ColumnLinear, Linear, TensorParallel, cast_for, column_linears, gather_inputs
from ...layers.transformer.attention import Attention
from ...layers.transformer.rotary import latent_score_scale, rotate_neighbours
from ...spec.run import Model
from ..moe.module import MoETransformer

LATENT_NORM_EPS = 1e-6  # of DeepSeek's code, whatever its rms_norm_eps

# B batch, S sequence, s this rank's part of it under sequence parallelism, H hidden, A heads, P qk_nope_head_dim, R qk_rope_head_dim


class LatentAttention(Attention):
    """Causal attention whose keys and values, and queries with q_lora_rank, are computed from a normed latent of each token.

    Positions turn the last R elements of each query, and one key of R elements that all heads have. Every tensor-parallel rank has the
    products down to the latents and the latents of all tokens that it holds; its own heads' queries, keys and values come from them as
    from the input of any column layer. Under sequence parallelism it has its tokens' latents, and gathers them for its heads.
    """

    def make_projections(self, parameters: Parameters, model: Model, tp: TensorParallel | None) -> None:
        """Make the products down to the latents, their norms, and the products up to the heads."""
        assert model.qk_nope_head_dim is not None
        assert model.qk_rope_head_dim is not None
        self.plain_dim, self.rope_dim, self.tp = model.qk_nope_head_dim, model.qk_rope_head_dim, tp
        self.padded_heads = 0  # their values, which they share with no other head, are 0
        self.scale = latent_score_scale(model.rope, self.plain_dim + self.rope_dim)
        has_latent = bool(model.q_lora_rank)
        lora = model.lora.scale
        self.query_down = Linear(sub_parameters(parameters, "query_down"), lora) if has_latent else None
        self.query_latent_norm = RMSNorm(sub_parameters(parameters, "query_latent_norm"), LATENT_NORM_EPS) if has_latent else None
        self.key_down = Linear(sub_parameters(parameters, "key_down"), lora)
        self.rope_key = Linear(sub_parameters(parameters, "rope_key"), lora)
        self.key_latent_norm = RMSNorm(sub_parameters(parameters, "key_latent_norm"), LATENT_NORM_EPS)
        self.query, self.key, self.value = (ColumnLinear(sub_parameters(parameters, part), tp, lora) for part in ("query", "key", "value"))

    def column_layers(self) -> tuple[ColumnLinear, ...]:
        """Return none: its layers share no input."""
        return ()

    def heads(self, x: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the queries and keys [B, S, A, P + R] and the values [B, S, A, v_head_dim] of this rank's heads, for x [B, S or s, H]."""
        shared = cast_for(x, self.key_down)
        latent = x
        if self.query_down is not None and self.query_latent_norm is not None:
            latent = self.query_latent_norm(self.query_down(x, shared))
        query = torch.unflatten(self.query(latent), -1, (-1, self.plain_dim + self.rope_dim))
        heads = query.shape[2]
        key, value = column_linears(self.key_latent_norm(self.key_down(x, shared)), self.key, self.value)
        rope_key = self.rope_key(x, shared)
        if self.tp is not None:
            rope_key = gather_inputs(rope_key, self.tp)
        rope_key = rope_key.unsqueeze(2)  # [B, S, 1, R]
        if angles is not None:
            plain, turned = torch.split(query, [self.plain_dim, self.rope_dim], dim=-1)
            query = torch.cat((plain, rotate_neighbours(turned, angles)), dim=-1)
            rope_key = rotate_neighbours(rope_key, angles)
        key = torch.cat((torch.unflatten(key, -1, (heads, -1)), rope_key.expand(-1, -1, heads, -1)), dim=-1)
        return query, key, torch.unflatten(value, -1, (heads, -1)), None


class LatentTransformer(MoETransformer):
    """A mixture of experts whose layers have latent attention."""

    attention_class = LatentAttention
