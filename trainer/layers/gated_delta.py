"""The gated delta rule (arXiv:2412.06464) behind a short causal convolution, as linear attention of Qwen3-Next has it.

A head has a state S [D, V]. A token first lets it decay, then replaces what its key reads by its value, and reads it by its query:
S' = exp(g) S, S = S' + beta k (v - k^T S')^T, o = S^T q. Chunks of tokens are computed at once (section 3.3): within a chunk the rule is
a triangular system, and only the states at the chunks' ends follow each other. Each document begins with a state of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .causal_conv import causal_conv, conv_gradients
from .chunk_starts import ChunkStarts, chunk_starts
from .delta_inputs import ACTIVATIONS, DeltaInputs, decay_logits, log_decay, of_all_heads, own_inputs, tensors_of
from .dtypes import at_least_float32
from .head_chunks import by_key_head, chunks, from_chunks
from .rank_group import Group

CHUNK = 64  # tokens; of flash-linear-attention and transformers
UNIT_EPS = 1e-6  # added to the square of a query's or key's length

# B batch, S sequence, K key heads, R value heads of each, A = B K R, D width of a key, V of a value, N chunks, L tokens of a chunk, W taps


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop over chunks would be unrolled
def gated_delta(
    inputs: DeltaInputs, key_dim: int, chunk: int = CHUNK, *, starts: Tensor | None = None, sharing: Group | None = None
) -> Tensor:
    """Return what the queries read, [B, S, K R V], for keys of `key_dim` elements; computed in float32.

    `starts` [B, S] are the tokens at which each token's document starts: no token reads another document's. None: a sequence is one.
    The ranks that are `sharing` heads have K of them each, and weights of all.
    """
    chunk = min(chunk, inputs.query.shape[1])  # a shorter sequence is one chunk, without tokens that fill it up
    read: Tensor = _GatedDelta.apply(key_dim, chunk, starts, sharing, *tensors_of(inputs))  # type: ignore[no-untyped-call]
    return read


class _GatedDelta(torch.autograd.Function):
    """Saves its inputs alone: backward computes the convolutions, the chunks and their states again."""

    @staticmethod
    def forward(ctx: Any, key_dim: int, chunk: int, starts: Tensor | None, sharing: Group | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(starts, *tensors)
        ctx.key_dim, ctx.chunk, ctx.sharing = key_dim, chunk, sharing
        inputs = own_inputs(tensors, sharing)
        return _read(_prepare(inputs, key_dim, chunk, starts), inputs.value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        starts, *tensors = ctx.saved_tensors
        inputs = own_inputs(tensors, ctx.sharing)
        of_chunks = _chunk_gradients(_prepare(inputs, ctx.key_dim, ctx.chunk, starts), at_least_float32(grad))
        grads = _input_gradients(inputs, of_chunks, ctx.key_dim, starts)
        return None, None, None, None, *grads[:ACTIVATIONS], *(of_all_heads(each, ctx.sharing) for each in grads[ACTIVATIONS:])


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What the chunks are made of, in float32. A dim R of 1 stands for all value heads of a key head."""

    query: Tensor  # [B, K, 1, N, L, D], of length D^-0.5
    key: Tensor  # [B, K, 1, N, L, D], of length 1
    value: Tensor  # [B, K, R, N, L, V]
    beta: Tensor  # [B, K, R, N, L, 1]
    total: Tensor  # [B, K, R, N, L]: g summed from the chunk's start
    starts: ChunkStarts | None  # of documents
    between: Tensor  # [B, K, R, N, L, L]: exp of g summed from behind the second token to the first; 0 where that does not read it
    system: Tensor  # [B, K, R, N, L, L]: what a token's key reads of the chunk's earlier tokens, times beta
    reads: Tensor  # [B, K, R, N, L, L]: what a token's query reads of the chunk's tokens
    new_value: Tensor  # [B, K, R, N, L, V]: what tokens write where the state before the chunk is 0
    old_key: Tensor  # [B, K, R, N, L, D]: with which they take off what they read of that state

    @property
    def ends(self) -> Tensor:
        """By how much each chunk lets the state decay, [B, K, R, N, 1, 1]."""
        return self.decay_from_start[..., -1:, :]

    @property
    def decay_from_start(self) -> Tensor:
        """By how much the state before the chunk has decayed at each token, [B, K, R, N, L, 1]."""
        return _decay_from_start(self.total, self.starts)

    @property
    def decay_to_end(self) -> Tensor:
        """By how much what each token writes decays up to the chunk's end, [B, K, R, N, L, 1]."""
        decay = (self.total[..., -1:] - self.total).exp().unsqueeze(-1)
        return decay if self.starts is None else decay * self.starts.are_of_last


def _decay_from_start(total: Tensor, starts: ChunkStarts | None) -> Tensor:
    decay = total.exp().unsqueeze(-1)
    return decay if starts is None else decay * starts.are_earlier


def _prepare(inputs: DeltaInputs, key_dim: int, chunk: int, starts: Tensor | None) -> _Parts:
    """Return what does not depend on the states."""
    heads, value_heads = inputs.query.shape[-1] // key_dim, inputs.beta.shape[-1]
    query, key = (
        chunks(_unit(causal_conv(x, taps, starts), key_dim)[1].unsqueeze(3), chunk)
        for x, taps in ((inputs.query, inputs.query_conv), (inputs.key, inputs.key_conv))
    )
    query.mul_(key_dim**-0.5)
    value = chunks(by_key_head(F.silu(causal_conv(inputs.value, inputs.value_conv, starts)), heads, value_heads), chunk)
    beta = chunks(by_key_head(torch.sigmoid(at_least_float32(inputs.beta)), heads, value_heads), chunk)
    total = chunks(by_key_head(log_decay(inputs), heads, value_heads), chunk).squeeze(-1).cumsum(-1)
    unread = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).triu(1)
    if starts is not None:
        of_chunks = chunk_starts(starts, chunk)
        unread = unread | ~of_chunks.are_equal
    else:
        of_chunks = None
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(unread, -torch.inf).exp_()
    system = (key @ key.mT * between).mul_(beta).tril_(-1)
    return _Parts(
        query=query,
        key=key,
        value=value,
        beta=beta,
        total=total,
        starts=of_chunks,
        between=between,
        system=system,
        reads=query @ key.mT * between,
        new_value=_solve(system, value * beta),
        old_key=_solve(system, key * (beta * _decay_from_start(total, of_chunks))),
    )


def _solve(system: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """Return (1 + system)^-1 right, or that of the transposed system."""
    matrix = system.mT if transposed else system
    solved: Tensor = torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)
    return solved


def _read(parts: _Parts, like: Tensor) -> Tensor:
    """Run through the chunks; return what the queries read, as a tensor [B, S, K R V] like another. Overwrites the parts' new values."""
    value, ends = _heads(parts.new_value), _heads(parts.ends)
    query, key = _heads(parts.query * parts.decay_from_start), _heads(parts.key * parts.decay_to_end)
    old_key, reads, output = _heads(parts.old_key), _heads(parts.reads), torch.empty_like(value)
    state = value.new_zeros(len(value), key.shape[-1], value.shape[-1])
    for at in range(value.shape[1]):
        written, read = value[:, at], output[:, at]
        torch.baddbmm(written, old_key[:, at], state, alpha=-1, out=written)
        torch.bmm(query[:, at], state, out=read)
        torch.baddbmm(read, reads[:, at], written, out=read)
        torch.baddbmm(state.mul_(ends[:, at]), key[:, at].mT, written, out=state)
    return from_chunks(output.view_as(parts.new_value), like.shape[1]).to(like.dtype)


def _states(parts: _Parts, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state [A, N, D, V] before each chunk, and what its tokens write, [A, N, L, V]; keys [A, N, L, D] as they write at its
    end."""
    value, old_key, ends = _heads(parts.new_value), _heads(parts.old_key), _heads(parts.ends)
    states = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    written = torch.empty_like(value)
    for at in range(value.shape[1]):
        torch.baddbmm(value[:, at], old_key[:, at], states[:, at], alpha=-1, out=written[:, at])
        if at + 1 < value.shape[1]:
            after = torch.mul(states[:, at], ends[:, at], out=states[:, at + 1])
            torch.baddbmm(after, key[:, at].mT, written[:, at], out=after)
    return states, written


def _heads(x: Tensor) -> Tensor:
    """Return x [B, K, R, N, ...] as [A, N, ...], with A = B K R, of the same memory: torch multiplies stacks of three dims in place."""
    return x.view(-1, *x.shape[3:])


@dataclass(frozen=True, kw_only=True)
class _ChunkGradients:
    """The gradients, by sequences again, of queries and keys of length 1, [B, S, K D], of values [B, S, K R V] behind their convolution, of
    beta and of g [B, S, K R]."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor


def _chunk_gradients(parts: _Parts, grad: Tensor) -> _ChunkGradients:
    """Return the gradients of what chunks are made of, from that of what the queries read, [B, S, K R V]."""
    seq, chunk = grad.shape[1], parts.total.shape[-1]
    grad = chunks(by_key_head(grad, parts.key.shape[1], parts.value.shape[1] * parts.value.shape[2]), chunk)
    query, key = parts.query * parts.decay_from_start, parts.key * parts.decay_to_end
    own, states, written = _heads(grad), *_states(parts, _heads(key))
    reads_grad, new_grad = (own @ written.mT).view_as(parts.reads), parts.reads.mT @ grad
    query_grad, key_grad = (own @ states.mT).view_as(query), query.new_empty(query.shape)
    ends_grad = query.new_empty(query.shape[:4])
    _state_gradients(parts, (own, query, key), (states, written), (new_grad, key_grad, ends_grad))
    old_grad = (_heads(new_grad) @ states.mT).neg_().view_as(key)
    del grad, own, states, written  # views hold what they are of
    key_side = (key_grad * key).sum(-1)
    key_side[..., -1] = 0  # what is written last does not decay; the diagonal below cancels too: both are left out, not rounded
    total_grad = (query_grad * query).sum(-1).sub_(key_side)
    total_grad[..., -1] += key_side.sum(-1) + ends_grad * parts.ends[..., 0, 0]
    del query, key
    # The triangular system: of X = (1 + A)^-1 Y the gradients are Y' = (1 + A)^-T X' and A' = -Y' X^T
    new_grad = _solve(parts.system, new_grad, transposed=True)  # of beta v
    old_grad = _solve(parts.system, old_grad, transposed=True)  # of beta exp(total) k
    system_grad = (new_grad @ parts.new_value.mT).add_(old_grad @ parts.old_key.mT).neg_().tril_(-1)
    weights = system_grad * parts.system
    total_grad += weights.sum(-1) - weights.sum(-2)
    del weights
    weights = (reads_grad * parts.reads).tril_(-1)
    total_grad += weights.sum(-1) - weights.sum(-2)
    del weights
    pairs, read_pairs = system_grad.mul_(parts.between), reads_grad.mul_(parts.between)  # of beta_i k_i k_j, and of q_i k_j
    by_row, decay = pairs @ parts.key, parts.decay_from_start
    beta_grad = (by_row * parts.key).sum(-1) + (new_grad * parts.value).sum(-1)
    of_old = (old_grad * parts.key).sum(-1) * decay.squeeze(-1)
    beta_grad += of_old
    total_grad += of_old * parts.beta.squeeze(-1)
    key_grad.mul_(parts.decay_to_end).add_(by_row.mul_(parts.beta)).add_(old_grad.mul_(parts.beta * decay))
    key_grad += pairs.mul_(parts.beta).mT @ parts.key
    key_grad += read_pairs.mT @ parts.query
    query_grad.mul_(decay).add_(read_pairs @ parts.key)
    new_grad.mul_(parts.beta)
    del parts, pairs, read_pairs, by_row, old_grad, system_grad, reads_grad
    return _ChunkGradients(
        query=from_chunks(query_grad.sum(2, keepdim=True), seq) * key_grad.shape[-1] ** -0.5,
        key=from_chunks(key_grad.sum(2, keepdim=True), seq),
        value=from_chunks(new_grad, seq),
        beta=from_chunks(beta_grad.unsqueeze(-1), seq),
        log_decay=from_chunks(total_grad.flip(-1).cumsum(-1).flip(-1).unsqueeze(-1), seq),
    )


def _state_gradients(
    parts: _Parts, given: tuple[Tensor, Tensor, Tensor], held: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor, Tensor]
) -> None:  # fmt: skip
    """Run back through the chunks. `given`: the gradients [A, N, L, V] of what the queries read, queries and keys as they read and write
    the states; `held`: what `_states` returns. `found`: adds to the gradients of what tokens write, which have those by the chunk's own
    queries; makes those of keys, and those of the chunks' decays."""
    own, (states, written), ends, old_key = given[0], held, _heads(parts.ends), _heads(parts.old_key)
    query, key, new_grad, key_grad, ends_grad = (_heads(each) for each in (*given[1:], *found))
    state_grad = torch.zeros_like(states[:, 0])
    for at in reversed(range(states.shape[1])):
        new = torch.baddbmm(new_grad[:, at], key[:, at], state_grad, out=new_grad[:, at])
        torch.bmm(written[:, at], state_grad.mT, out=key_grad[:, at])
        torch.sum(state_grad * states[:, at], (-1, -2), out=ends_grad[:, at])
        torch.baddbmm(state_grad.mul_(ends[:, at]), query[:, at].mT, own[:, at], out=state_grad)
        torch.baddbmm(state_grad, old_key[:, at].mT, new, alpha=-1, out=state_grad)


def _input_gradients(inputs: DeltaInputs, grads: _ChunkGradients, key_dim: int, starts: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients of `inputs` from those of what chunks are made of."""

    def of_unit_heads(x: Tensor, taps: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return conv_gradients(_unit_gradient(causal_conv(x, taps, starts), grad, key_dim), x, taps, starts)

    query_grads = of_unit_heads(inputs.query, inputs.query_conv, grads.query)
    key_grads = of_unit_heads(inputs.key, inputs.key_conv, grads.key)
    value_grad = _silu_slope(causal_conv(inputs.value, inputs.value_conv, starts)).mul_(grads.value)
    value_grads = conv_gradients(value_grad, inputs.value, inputs.value_conv, starts)
    share = torch.sigmoid(at_least_float32(inputs.beta))
    logit_grad = grads.log_decay * -at_least_float32(inputs.a_log).exp() * torch.sigmoid(decay_logits(inputs))
    return (
        query_grads[0],
        key_grads[0],
        value_grads[0],
        (grads.beta * share * (1 - share)).to(inputs.beta.dtype),
        logit_grad.to(inputs.decay.dtype),
        query_grads[1],
        key_grads[1],
        value_grads[1],
        (grads.log_decay * log_decay(inputs)).sum((0, 1)).to(inputs.a_log.dtype),
        logit_grad.sum((0, 1)).to(inputs.dt_bias.dtype),
    )


def _unit(conv: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Return the inverse lengths [B, S, K, 1] of the activated heads of a convolution's result [B, S, K D], and the heads over them."""
    active = torch.unflatten(F.silu(conv), -1, (-1, key_dim))
    inverse = torch.rsqrt(active.square().sum(-1, keepdim=True) + UNIT_EPS)
    return inverse, active * inverse


def _unit_gradient(conv: Tensor, grad: Tensor, key_dim: int) -> Tensor:
    """Return the gradient of a convolution's result [B, S, K D], from that of its heads of length 1."""
    inverse, unit = _unit(conv, key_dim)
    grad = grad.view_as(unit)
    active = inverse * (grad - unit * (unit * grad).sum(-1, keepdim=True))
    return active.flatten(2) * _silu_slope(conv)


def _silu_slope(x: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))
