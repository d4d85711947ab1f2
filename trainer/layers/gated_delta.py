"""The gated delta rule (arXiv:2412.06464) behind a short causal convolution, as linear attention of Qwen3-Next has it.

A head has a state S [D, V]. A token first lets it decay, then replaces what its key reads by its value, and reads it by its query:
S' = exp(g) S, S = S' + beta k (v - k^T S')^T, o = S^T q. Chunks of tokens are computed at once (section 3.3): within a chunk the rule is
a triangular system, and only the states at the chunks' ends follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dtypes import at_least_float32

CHUNK = 64  # tokens; of flash-linear-attention and transformers
UNIT_EPS = 1e-6  # added to the square of a query's or key's length

# B batch, S sequence, K key heads, R value heads of each, D width of a key, V of a value, N chunks, L tokens of a chunk, W taps


@dataclass(frozen=True, kw_only=True)
class DeltaInputs:
    """The inputs of the rule: queries and keys [B, S, K D] and values [B, S, K R V] before their convolutions, the logits [B, S, K R] of
    beta and of the decay, the taps [W, channels] of the convolutions, and of each value head the logarithm of its rate and what is added
    to the logits of its decay, [K R]."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor
    query_conv: Tensor
    key_conv: Tensor
    value_conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


def gated_delta(inputs: DeltaInputs, key_dim: int, chunk: int = CHUNK) -> Tensor:
    """Return what the queries read, [B, S, K R V], for keys of `key_dim` elements; computed in float32."""
    tensors = tuple(getattr(inputs, name) for name in DeltaInputs.__dataclass_fields__)
    read: Tensor = _GatedDelta.apply(key_dim, chunk, *tensors)  # type: ignore[no-untyped-call]
    return read


class _GatedDelta(torch.autograd.Function):
    """Saves its inputs alone: backward computes the convolutions, the chunks and their states again."""

    @staticmethod
    def forward(ctx: Any, key_dim: int, chunk: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.key_dim, ctx.chunk = key_dim, chunk
        inputs = DeltaInputs(**dict(zip(DeltaInputs.__dataclass_fields__, tensors, strict=True)))
        parts = _prepare(inputs, key_dim, chunk)
        output = _scan(parts).output
        return _from_chunks(output, inputs.value.shape[1]).to(inputs.value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = DeltaInputs(**dict(zip(DeltaInputs.__dataclass_fields__, ctx.saved_tensors, strict=True)))
        parts = _prepare(inputs, ctx.key_dim, ctx.chunk)
        return None, None, *_gradients(inputs, parts, at_least_float32(grad), ctx.chunk)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What the chunks are made of, in float32. A dim R of 1 stands for all value heads of a key head."""

    query_unit: _Unit  # of queries and keys the convolution's result, and what is made of it
    key_unit: _Unit
    value_conv: Tensor  # [B, S, K R V]
    query: Tensor  # [B, K, 1, N, L, D], of length D^-0.5
    key: Tensor  # [B, K, 1, N, L, D], of length 1
    value: Tensor  # [B, K, R, N, L, V]
    beta: Tensor  # [B, K, R, N, L]
    log_decay: Tensor  # [B, S, K R]: g
    total: Tensor  # [B, K, R, N, L]: g summed from the chunk's start
    between: Tensor  # [B, K, R, N, L, L]: exp of g summed from behind the second token to the first; 0 where that is earlier
    system: Tensor  # [B, K, R, N, L, L]: what a token's key reads of the chunk's earlier tokens, times beta
    reads: Tensor  # [B, K, R, N, L, L]: what a token's query reads of the chunk's tokens
    new_value: Tensor  # [B, K, R, N, L, V]: what tokens write where the state before the chunk is 0
    old_key: Tensor  # [B, K, R, N, L, D]: with which they take off what they read of that state


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A convolution's result [B, S, K D], the inverse length of each head's activated part [B, S, K, 1], and that part over its length."""

    conv: Tensor
    inverse: Tensor
    unit: Tensor


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """What the chunks wrote, one after another: outputs and written values [B, K, R, N, L, V], the state [B, K, R, D, V] before each."""

    output: Tensor
    written: Tensor
    states: list[Tensor]


def _prepare(inputs: DeltaInputs, key_dim: int, chunk: int) -> _Parts:
    """Return what does not depend on the states."""
    query_unit, key_unit = (
        _unit(causal_conv(at_least_float32(x), at_least_float32(taps)), key_dim)
        for x, taps in ((inputs.query, inputs.query_conv), (inputs.key, inputs.key_conv))
    )
    value_conv = causal_conv(at_least_float32(inputs.value), at_least_float32(inputs.value_conv))
    heads = query_unit.unit.shape[2]
    query, key = (_chunks(each.unit.unsqueeze(3), chunk) for each in (query_unit, key_unit))
    query = query * key_dim**-0.5
    value = _chunks(_by_key_head(F.silu(value_conv), heads, inputs.beta.shape[-1]), chunk)
    beta = _chunks(_by_key_head(torch.sigmoid(at_least_float32(inputs.beta)), heads, inputs.beta.shape[-1]), chunk).squeeze(-1)
    log_decay = -at_least_float32(inputs.a_log).exp() * F.softplus(_shifted(inputs))
    total = _chunks(_by_key_head(log_decay, heads, inputs.beta.shape[-1]), chunk).squeeze(-1).cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    system = (key @ key.mT * between * beta.unsqueeze(-1)).tril(-1)
    old = key * (beta * total.exp()).unsqueeze(-1)
    return _Parts(
        query_unit=query_unit,
        key_unit=key_unit,
        value_conv=value_conv,
        query=query,
        key=key,
        value=value,
        beta=beta,
        log_decay=log_decay,
        total=total,
        between=between,
        system=system,
        reads=query @ key.mT * between,
        new_value=_solve(system, value * beta.unsqueeze(-1)),
        old_key=_solve(system, old),
    )


def _solve(system: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """Return (1 + system)^-1 right, or that of the transposed system."""
    if transposed:
        return torch.linalg.solve_triangular(system.mT, right, upper=True, unitriangular=True)
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def _scan(parts: _Parts) -> _Scan:
    """Run through the chunks."""
    query, key = _decayed(parts)
    ends = parts.total[..., -1].exp()[..., None, None]  # [B, K, R, N, 1, 1]
    value = parts.new_value
    state = value.new_zeros(*value.shape[:3], key.shape[-1], value.shape[-1])
    outputs, written, states = [], [], []
    for at in range(value.shape[3]):
        states.append(state)
        new = value[:, :, :, at] - parts.old_key[:, :, :, at] @ state
        outputs.append(query[:, :, :, at] @ state + parts.reads[:, :, :, at] @ new)
        written.append(new)
        state = state * ends[:, :, :, at] + key[:, :, :, at].mT @ new
    return _Scan(output=torch.stack(outputs, 3), written=torch.stack(written, 3), states=states)


def _decayed(parts: _Parts) -> tuple[Tensor, Tensor]:
    """Return the queries as they read the state before the chunk, and the keys as they write to the one behind it, [B, K, R, N, L, D]."""
    left = (parts.total[..., -1:] - parts.total).exp()
    return parts.query * parts.total.exp().unsqueeze(-1), parts.key * left.unsqueeze(-1)


def _gradients(inputs: DeltaInputs, parts: _Parts, grad: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Return the gradients of `inputs`, from that of what the queries read, [B, S, K R V]."""
    scan, (query, key) = _scan(parts), _decayed(parts)
    seq, value_heads = grad.shape[1], inputs.beta.shape[-1]
    heads = parts.query.shape[1]
    grad = _chunks(_by_key_head(grad, heads, value_heads), chunk)
    reads_grad = grad @ scan.written.mT
    from_reads = parts.reads.mT @ grad
    ends = parts.total[..., -1].exp()  # [B, K, R, N]
    state_grad = torch.zeros_like(scan.states[0])
    of_query, of_key, of_new, of_old, of_ends = [], [], [], [], []
    for at in reversed(range(grad.shape[3])):
        state, new, own = scan.states[at], scan.written[:, :, :, at], grad[:, :, :, at]
        new_grad = from_reads[:, :, :, at] + key[:, :, :, at] @ state_grad
        of_query.append(own @ state.mT)
        of_key.append(new @ state_grad.mT)
        of_new.append(new_grad)
        of_old.append(-(new_grad @ state.mT))
        of_ends.append((state_grad * state).sum((-1, -2)))
        state_grad = (
            state_grad * ends[:, :, :, at, None, None]
            + query[:, :, :, at].mT @ own
            - parts.old_key[:, :, :, at].mT @ new_grad
        )
    query_grad, key_grad, new_grad, old_grad, ends_grad = (
        torch.stack(each[::-1], 3) for each in (of_query, of_key, of_new, of_old, of_ends)
    )
    # The triangular system: of X = (1 + A)^-1 Y the gradients are Y' = (1 + A)^-T X' and A' = -Y' X^T
    value_right = _solve(parts.system, new_grad, transposed=True)  # of beta v
    key_right = _solve(parts.system, old_grad, transposed=True)  # of beta exp(total) k
    system_grad = -(value_right @ parts.new_value.mT + key_right @ parts.old_key.mT).tril(-1)
    beta = parts.beta.unsqueeze(-1)
    grown = parts.total.exp().unsqueeze(-1)
    pairs = system_grad * parts.between  # of beta_i k_i k_j
    read_pairs = reads_grad * parts.between  # of q_i k_j
    by_row = pairs @ parts.key
    beta_grad = (by_row * parts.key).sum(-1) + (key_right * grown * parts.key).sum(-1) + (value_right * parts.value).sum(-1)
    weights = system_grad * parts.system + reads_grad * parts.reads
    key_side = (key_grad * key).sum(-1)
    total_grad = weights.sum(-1) - weights.sum(-2) + (query_grad * query).sum(-1) - key_side
    total_grad = total_grad + (key_right * (beta * grown * parts.key)).sum(-1)
    total_grad[..., -1] += key_side.sum(-1) + ends_grad * ends
    decay_grad = total_grad.flip(-1).cumsum(-1).flip(-1)
    left = (parts.total[..., -1:] - parts.total).exp().unsqueeze(-1)
    all_keys = by_row * beta + (pairs * beta).mT @ parts.key + read_pairs.mT @ parts.query + key_grad * left + key_right * beta * grown
    all_queries = read_pairs @ parts.key + query_grad * grown
    query_grad = _from_chunks(all_queries.sum(2, keepdim=True), seq) * query.shape[-1] ** -0.5
    key_grad = _from_chunks(all_keys.sum(2, keepdim=True), seq)
    value_grad = _from_chunks(value_right * beta, seq)
    beta_grad, decay_grad = (_from_chunks(each.unsqueeze(-1), seq) for each in (beta_grad, decay_grad))  # [B, S, K R]
    query_grads = _conv_gradients(_unit_gradient(parts.query_unit, query_grad), inputs.query, inputs.query_conv)
    key_grads = _conv_gradients(_unit_gradient(parts.key_unit, key_grad), inputs.key, inputs.key_conv)
    value_grads = _conv_gradients(value_grad * _silu_slope(parts.value_conv), inputs.value, inputs.value_conv)
    share = torch.sigmoid(at_least_float32(inputs.beta))
    logit_grad = decay_grad * -at_least_float32(inputs.a_log).exp() * torch.sigmoid(_shifted(inputs))
    return (
        query_grads[0],
        key_grads[0],
        value_grads[0],
        (beta_grad * share * (1 - share)).to(inputs.beta.dtype),
        logit_grad.to(inputs.decay.dtype),
        query_grads[1],
        key_grads[1],
        value_grads[1],
        (decay_grad * parts.log_decay).sum((0, 1)).to(inputs.a_log.dtype),
        logit_grad.sum((0, 1)).to(inputs.dt_bias.dtype),
    )


def _shifted(inputs: DeltaInputs) -> Tensor:
    """Return the logits of the decay with what is added to them, [B, S, K R]."""
    return at_least_float32(inputs.decay) + at_least_float32(inputs.dt_bias)


def causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Return each channel of x [B, S, C] convolved with its taps [W, C], the last of which is of the token itself."""
    output = x * taps[-1]
    for back in range(1, min(len(taps), x.shape[1])):
        output[:, back:] += x[:, :-back] * taps[-1 - back]
    return output


def _conv_gradients(grad: Tensor, x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [B, S, C] and of its taps [W, C], from that of the convolution's result."""
    wide, weights = at_least_float32(x), at_least_float32(taps)
    x_grad, taps_grad = grad * weights[-1], torch.zeros_like(weights)
    taps_grad[-1] = (grad * wide).sum((0, 1))
    for back in range(1, min(len(weights), x.shape[1])):
        x_grad[:, :-back] += grad[:, back:] * weights[-1 - back]
        taps_grad[-1 - back] = (grad[:, back:] * wide[:, :-back]).sum((0, 1))
    return x_grad.to(x.dtype), taps_grad.to(taps.dtype)


def _unit(conv: Tensor, key_dim: int) -> _Unit:
    """Return the activated heads of a convolution's result [B, S, K D], each over its length."""
    active = torch.unflatten(F.silu(conv), -1, (-1, key_dim))
    inverse = torch.rsqrt(active.square().sum(-1, keepdim=True) + UNIT_EPS)
    return _Unit(conv=conv, inverse=inverse, unit=active * inverse)


def _unit_gradient(made: _Unit, grad: Tensor) -> Tensor:
    """Return the gradient of a convolution's result [B, S, K D], from that of its heads of length 1."""
    grad = grad.view_as(made.unit)
    active = made.inverse * (grad - made.unit * (made.unit * grad).sum(-1, keepdim=True))
    return active.flatten(2) * _silu_slope(made.conv)


def _silu_slope(x: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))


def _by_key_head(x: Tensor, heads: int, value_heads: int) -> Tensor:
    """Return x [B, S, K R ...] as [B, S, K, R, ...]."""
    return torch.unflatten(x, -1, (heads, value_heads // heads, -1))


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x [B, S, K, R, ...] in chunks, [B, K, R, N, L, ...]; behind the sequence there are zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return torch.unflatten(x, 1, (-1, chunk)).permute(0, 3, 4, 1, 2, 5).contiguous()


def _from_chunks(x: Tensor, seq: int) -> Tensor:
    """Return x [B, K, R, N, L, V] as [B, S, K R V]."""
    return x.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)[:, :seq].flatten(2)
