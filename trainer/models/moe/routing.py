"""Which experts each token goes to, in what order its copies lie, and how even that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDED = 16  # units in the last place of a token's largest logit

# B batch, S sequence, E experts, K experts of a token, C copies that are computed: B S K, less those that find no room


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where copies of tokens go. A copy's number is its token's (of B S) times K, plus which of the token's experts it goes to.

    `order` are the numbers of the copies that are computed, those of one expert side by side; of expert e they end at `ends[e]`.
    `weights` are what each copy counts in its token's sum, `chosen` its experts.
    """

    weights: Tensor  # [B, S, K]
    chosen: Tensor  # [B, S, K] int64
    order: Tensor  # [C] int64
    ends: Tensor  # [E] int64


def routed(logits: Tensor, top_k: int, room: int | None) -> Routing:
    """Each token to the experts of its `top_k` largest logits [B, S, E], weighted by their softmax (arXiv:2401.04088 section 2.1).

    With `room` an expert takes so many tokens of each sequence, the first ones: what finds none adds nothing to its token.
    """
    largest, chosen = logits.topk(top_k, dim=-1)
    experts = logits.shape[-1]
    wanted = chosen if room is None else chosen.masked_fill(places(chosen, experts) >= room, experts)  # beyond the last: nowhere
    sorts, order = wanted.flatten().sort(stable=True)
    ends = torch.searchsorted(sorts, torch.arange(experts, device=logits.device), right=True)
    return Routing(
        weights=torch.softmax(largest, dim=-1),
        chosen=chosen,
        order=order if room is None else order[: int(ends[-1])],
        ends=ends,
    )


def places(chosen: Tensor, experts: int) -> Tensor:
    """How many earlier tokens of its sequence chose the same expert as each copy [B, S, K]."""
    taken = asked(chosen, experts).cumsum(1)  # [B, S, E]
    return taken.gather(2, chosen) - 1


def asked(chosen: Tensor, experts: int) -> Tensor:
    """1 where a token chose an expert, [B, S, E]."""
    return chosen.new_zeros(*chosen.shape[:2], experts).scatter_(2, chosen, 1)


def near_ties(logits: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Tokens whose last expert is ahead of the next one by no more than rounding in `dtype` may be: another order of sums, such as
    another layout's, can send them elsewhere."""
    if top_k == logits.shape[-1]:
        return torch.zeros((), dtype=torch.int64, device=logits.device)
    largest = logits.detach().topk(top_k + 1, dim=-1).values
    ahead = largest[..., -2] - largest[..., -1]
    return (ahead <= ROUNDED * torch.finfo(dtype).eps * logits.detach().abs().amax(-1)).sum()


def imbalance(logits: Tensor, chosen: Tensor) -> Tensor:
    """E sum_e f_e P_e of each sequence [B]: 1 where routing is even (arXiv:2101.03961 eq. 4, over a sequence's tokens).

    f_e is the share of its copies that want expert e, P_e the mean over its tokens of the softmax of logits [B, S, E].
    """
    experts = logits.shape[-1]
    share = asked(chosen, experts).sum(1).to(logits.dtype) / (chosen.shape[1] * chosen.shape[2])  # [B, E]
    return experts * (share * torch.softmax(logits, dim=-1).mean(1)).sum(-1)
