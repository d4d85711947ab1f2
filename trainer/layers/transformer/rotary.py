"""Rotary position embedding (arXiv:2104.09864), and the scaling of its frequencies for longer sequences."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor

from ...spec.run import Model
from ...spec.sections.rope import Rope
from ..dtypes import at_least_float32

# B batch, S sequence, A heads, D rotary_dim: head_dim, or a part of it


def rotary_angles(model: Model, positions: Tensor, seq: int, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of positions [S] of sequences of `seq` tokens, in at least float32 for heads of `dtype`: [2, S, D/2].

    They are scaled as model.rope says.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies, scale = rotary_frequencies(model, seq, positions.device, wide)
    angle = positions.to(wide)[:, None] * frequencies  # [S, D/2]
    return torch.stack((angle.cos(), angle.sin())) * scale


def local_rotary(model: Model) -> Model:
    """Return the model as layers with the window rotate: by a base of their own, unscaled (arXiv:2503.19786 section 2)."""
    assert model.rope_local_base is not None
    return replace(model, rope_base=model.rope_local_base, rope=Rope())


def rotary_frequencies(model: Model, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the frequencies [D/2] in radians a token, and the scale of cosines and sines.

    linear: positions are divided by the factor (arXiv:2306.15595). dynamic: the base grows with the sequence beyond the original length
    (NTK-aware, arXiv:2309.00071 section 3.3). llama3: long wavelengths are divided by the factor, as Llama 3.1's code does.
    """
    rope, base, head_dim = model.rope, model.rope_base, model.rotary_dim
    if rope.type == "dynamic":
        length = _original_length(rope)
        base *= (rope.factor * max(seq, length) / length - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    frequencies = 1 / base ** (torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    match rope.type:
        case "linear":
            return frequencies / rope.factor, 1.0
        case "llama3":
            rotations = _original_length(rope) * frequencies / (2 * pi)
            kept = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
            return (1 - kept) * frequencies / rope.factor + kept * frequencies, 1.0
        case "yarn":
            return _yarn_frequencies(rope, base, frequencies), _yarn_scale(rope)
    return frequencies, 1.0


def _yarn_frequencies(rope: Rope, base: float, frequencies: Tensor) -> Tensor:
    """Return frequencies [D/2] of which slow ones are divided by the factor, fast ones kept, and a ramp between (arXiv:2309.00071 3.2)."""
    half = len(frequencies)
    # The index of the frequency that rotates so many times in the original length
    low, high = (half * log(_original_length(rope) / (turns * 2 * pi)) / log(base) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    index = torch.arange(half, device=frequencies.device, dtype=frequencies.dtype)
    stretched = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_scale(rope: Rope) -> float:
    """Return the scale of cosines and sines, so that of scores its square (arXiv:2309.00071 section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _length_scale(rope, rope.mscale) / _length_scale(rope, rope.mscale_all_dim)
    return _length_scale(rope, 1.0)


def _length_scale(rope: Rope, weight: float) -> float:
    return 0.1 * weight * log(rope.factor) + 1


def latent_score_scale(rope: Rope, query_dim: int) -> float:
    """Return the scale of the scores of latent attention: 1 / sqrt(query_dim), with yarn times the square that DeepSeek's code has beside
    the scale of cosines and sines, which elements without positions do not see."""
    stretched = _length_scale(rope, rope.mscale_all_dim) if rope.type == "yarn" and rope.mscale_all_dim else 1.0
    return stretched**2 / sqrt(query_dim)


def _original_length(rope: Rope) -> int:
    """Return the sequences' length before scaling; a rule refuses a type that needs it without it."""
    assert rope.original_max_position_embeddings is not None
    return rope.original_max_position_embeddings


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of the first D elements of each head of x [B, S, A, D or more] by its position's angle, in float32."""
    width = 2 * angles.shape[-1]
    if width < x.shape[-1]:
        turned, plain = torch.split(x, [width, x.shape[-1] - width], dim=-1)
        return torch.cat((rotate(turned, angles), plain), dim=-1)
    cos, sin = angles.unsqueeze(2).unbind(0)  # [S, 1, D/2]
    first, second = at_least_float32(x).chunk(2, dim=-1)  # [B, S, A, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i + 1) of x [B, S, A, D] by its position's angle, in float32; the first elements of all pairs come first.

    Queries and keys in the same order have the same scores in any order.
    """
    cos, sin = angles.unsqueeze(2).unbind(0)  # [S, 1, D/2]
    wide = at_least_float32(x)
    first, second = wide[..., 0::2], wide[..., 1::2]  # [B, S, A, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
