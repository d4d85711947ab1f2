"""The routing of tokens to experts, the order of the routed copies, and how balanced it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...layers.transformer.context_parallel import ContextParallel

NEAR_TIE_UNITS = 16  # units in the last place of a token's largest logit

# B batch, S sequence, E experts, K experts per token, C copies that are computed: B S K less those over an expert's capacity


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of tokens. A copy's number is its token's number (of B S) times K, plus which of the token's experts it is for.

    `order` lists the numbers of the copies that are computed, sorted by expert; those of expert e end at `ends[e]`. `weights` are the
    weights of each token's copies in its sum, `chosen` their experts.
    """

    weights: Tensor  # [B, S, K]
    chosen: Tensor  # [B, S, K] int64
    order: Tensor  # [C] int64
    ends: Tensor  # [E] int64


def route(logits: Tensor, top_k: int, capacity: int | None, cp: ContextParallel | None = None) -> Routing:
    """Route each token to the experts of its `top_k` largest logits [B, S, E], weighted by their softmax (arXiv:2401.04088 section 2.1).

    An expert takes the first `capacity` tokens of each sequence that chose it; a copy over capacity adds nothing to its token. The ranks
    of `cp` tell each other what their tokens of a sequence chose.
    """
    largest, chosen = logits.topk(top_k, dim=-1)
    experts = logits.shape[-1]
    kept = chosen
    if capacity is not None:  # a copy over capacity goes to expert E, which there is not
        earlier = earlier_choices(chosen, experts) if cp is None else cp.shard(earlier_choices(cp.gather(chosen), experts))
        kept = chosen.masked_fill(earlier >= capacity, experts)
    by_expert, order = kept.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=logits.device), right=True)
    return Routing(
        weights=torch.softmax(largest, dim=-1),
        chosen=chosen,
        order=order if capacity is None else order[: int(ends[-1])],
        ends=ends,
    )


def earlier_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return how many earlier tokens of the sequence chose the same expert as each copy, [B, S, K]."""
    counts = one_hot_choices(chosen, experts).cumsum(1)  # [B, S, E]
    return counts.gather(2, chosen) - 1


def one_hot_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return 1 where a token chose an expert, else 0: [B, S, E]."""
    return chosen.new_zeros(*chosen.shape[:2], experts).scatter_(2, chosen, 1)


def near_tie_count(logits: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Return the number of tokens whose last chosen expert leads the next one by no more than rounding in `dtype` can change: another
    order of summation, as in another layout, can send them elsewhere."""
    if top_k == logits.shape[-1]:
        return torch.zeros((), dtype=torch.int64, device=logits.device)
    largest = logits.detach().topk(top_k + 1, dim=-1).values
    lead = largest[..., -2] - largest[..., -1]
    return (lead <= NEAR_TIE_UNITS * torch.finfo(dtype).eps * logits.detach().abs().amax(-1)).sum()


def imbalance(logits: Tensor, chosen: Tensor, cp: ContextParallel | None = None) -> Tensor:
    """Return E sum_e f_e P_e of each sequence, [B]; 1 where routing is even (arXiv:2101.03961 eq. 4, over a sequence's tokens).

    f_e is the share of the sequence's copies that chose expert e, P_e the mean over its tokens of softmax(logits [B, S, E]). The ranks of
    `cp` sum what their tokens chose, and return terms that add up to the sequence's: each has the gradient of its own tokens.
    """
    experts, ranks = logits.shape[-1], 1
    copies = one_hot_choices(chosen, experts).sum(1)  # [B, E]
    if cp is not None:
        dist.all_reduce(copies, group=cp.group.handle)
        ranks = cp.group.size
    share = copies.to(logits.dtype) / (ranks * chosen.shape[1] * chosen.shape[2])
    return experts * (share * torch.softmax(logits, dim=-1).mean(1)).sum(-1) / ranks
