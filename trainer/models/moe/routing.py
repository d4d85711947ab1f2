"""The routing of tokens to experts, the order of the routed copies, and how balanced it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...layers.transformer.context_parallel import ContextParallel
from ...spec.sections.router import Router

NEAR_TIE_UNITS = 16  # units in the last place of a token's largest logit
TINY = 1e-20  # added to the sum of chosen sigmoids, which may all be 0 (DeepSeek-V3, as transformers has it)
MIXTRAL = Router()

# B batch, S sequence, E experts, K experts per token, G groups, C copies that are computed: B S K less those over an expert's capacity


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of tokens. A copy's number is its token's number (of B S) times K, plus which of the token's experts it is for.

    `order` lists the numbers of the copies that are computed, sorted by expert; those of expert e end at `ends[e]`. `weights` are the
    weights of each token's copies in its sum, `chosen` their experts. `scores`: softmax of all logits, where weights are read from it.
    """

    weights: Tensor  # [B, S, K]
    chosen: Tensor  # [B, S, K] int64
    order: Tensor  # [C] int64
    ends: Tensor  # [E] int64
    scores: Tensor | None = None  # [B, S, E]


def route(
    logits: Tensor,
    top_k: int,
    capacity: int | None,
    cp: ContextParallel | None = None,
    *,
    router: Router = MIXTRAL,
    bias: Tensor | None = None,
) -> Routing:
    """Route each token to the `top_k` experts that its logits [B, S, E] choose, weighted by their scores, as `router` says.

    An expert takes the first `capacity` tokens of each sequence that chose it; a copy over capacity adds nothing to its token. The ranks
    of `cp` tell each other what their tokens of a sequence chose.
    """
    largest, chosen = choose_experts(logits, top_k, router, bias)
    experts = logits.shape[-1]
    kept = chosen
    if capacity is not None:  # a copy over capacity goes to expert E, which there is not
        earlier = earlier_choices(chosen, experts) if cp is None else cp.shard(earlier_choices(cp.gather(chosen), experts))
        kept = chosen.masked_fill(earlier >= capacity, experts)
    by_expert, order = kept.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=logits.device), right=True)
    scores = torch.softmax(logits, dim=-1) if router.has_shared_scores else None
    return Routing(
        weights=copy_weights(largest if scores is None else take(scores, chosen), router),
        chosen=chosen,
        order=order if capacity is None else order[: int(ends[-1])],
        ends=ends,
        scores=scores,
    )


def choose_experts(logits: Tensor, top_k: int, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logits of each token's chosen experts, with gradients, and the experts: [B, S, K] each.

    A token chooses its largest scores, or the largest of scores + `bias` [E]; with groups those of its `top_groups` best (arXiv:2405.04434
    section 2.2.2). Scores rise with logits: without a bias logits choose, which no rounding makes equal.
    """
    if bias is None and router.groups == 1:
        return logits.topk(top_k, dim=-1)
    values, _ = _choice_values(logits.detach(), router, bias)
    if router.top_groups < router.groups:
        values = _of_best_groups(values, _group_values(values, router, bias), router)
    chosen = values.topk(top_k, dim=-1).indices
    return take(logits, chosen), chosen


def take(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the values [B, S, E] of chosen experts, [B, S, K]."""
    taken: Tensor = _Take.apply(values, chosen)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    """Saves what was chosen alone, where torch's gather saves the values too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.experts = values.shape[-1]
        return values.gather(-1, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (chosen,) = ctx.saved_tensors
        return grad.new_zeros(*grad.shape[:-1], ctx.experts).scatter_(-1, chosen, grad), None


def _choice_values(logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the values by which tokens choose experts, [B, S, E], and the scores in them; None: they are the logits."""
    if bias is None:
        return logits, None
    scores = torch.sigmoid(logits) if router.score == "sigmoid" else torch.softmax(logits, dim=-1)
    return scores + bias, scores


def _group_values(values: Tensor, router: Router, bias: Tensor | None) -> Tensor:
    """Return the value of each group [B, S, G]: its experts' largest, with a bias the sum of their two largest (DeepSeek-V2 and V3)."""
    grouped = _by_group(values, router)
    return grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)


def _by_group(values: Tensor, router: Router) -> Tensor:
    """Return values [B, S, E] as [B, S, G, E / G]."""
    return values.view(*values.shape[:-1], router.groups, -1)


def _of_best_groups(values: Tensor, groups: Tensor, router: Router) -> Tensor:
    """Return the values [B, S, E] of the experts of the best groups, by theirs [B, S, G], and -inf of the others."""
    best = groups.topk(router.top_groups, dim=-1).indices
    is_other = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, best, False)
    return _by_group(values, router).masked_fill(is_other.unsqueeze(-1), -torch.inf).flatten(-2)


def copy_weights(chosen: Tensor, router: Router) -> Tensor:
    """Return the weights of a token's copies from what it chose, [B, S, K] each: softmax scores where they are the weights, else logits.

    Softmax over all experts, divided by the sum of the chosen, is softmax over the chosen.
    """
    weights = chosen
    if router.score == "sigmoid":
        weights = torch.sigmoid(chosen)
        if router.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    elif router.normalize:
        weights = torch.softmax(chosen, dim=-1)
    return weights if router.scale == 1 else weights * router.scale


def earlier_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return how many earlier tokens of the sequence chose the same expert as each copy, [B, S, K]."""
    counts = one_hot_choices(chosen, experts).cumsum(1)  # [B, S, E]
    return counts.gather(2, chosen) - 1


def one_hot_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return 1 where a token chose an expert, else 0: [B, S, E]."""
    return chosen.new_zeros(*chosen.shape[:2], experts).scatter_(2, chosen, 1)


def near_tie_count(logits: Tensor, top_k: int, dtype: torch.dtype, router: Router = MIXTRAL, bias: Tensor | None = None) -> Tensor:
    """Return the number of tokens whose last chosen expert, or last group, leads the next one by no more than rounding in `dtype` can
    change: another order of summation, as in another layout, can send them elsewhere."""
    logits = logits.detach()
    rounding = NEAR_TIE_UNITS * torch.finfo(dtype).eps * logits.abs().amax(-1)  # of a logit
    values, scores = _choice_values(logits, router, bias)
    slopes = None if scores is None else scores * (1 - scores)  # of values by their logits
    is_close = torch.zeros_like(rounding, dtype=torch.bool)
    if router.top_groups < router.groups:
        groups, group_slopes = _group_values(values, router, bias), None
        if slopes is not None:  # a group's value changes with two of its experts
            two = _by_group(values, router).topk(2, dim=-1).indices
            group_slopes = _by_group(slopes, router).gather(-1, two).sum(-1)
        is_close = _is_close(groups, group_slopes, router.top_groups, rounding)
        values = _of_best_groups(values, groups, router)
    if top_k < logits.shape[-1]:
        is_close = is_close | _is_close(values, slopes, top_k, rounding)
    return is_close.sum()


def _is_close(values: Tensor, slopes: Tensor | None, count: int, rounding: Tensor) -> Tensor:
    """Return whether the last of each token's `count` largest values leads the next by what rounding can change, [B, S].

    `rounding` [B, S] is that of logits, `slopes` what values change with them, beside which they are rounded themselves.
    """
    largest, at = values.topk(count + 1, dim=-1)
    if slopes is not None:
        own = NEAR_TIE_UNITS * torch.finfo(values.dtype).eps * largest[..., -2].abs()
        rounding = rounding * slopes.gather(-1, at[..., -2:]).mean(-1) + own
    return largest[..., -2] - largest[..., -1] <= rounding


def squared_log_sums(logits: Tensor, cp: ContextParallel | None = None) -> Tensor:
    """Return the mean over each sequence's tokens of the square of log sum_e exp of logits [B, S, E], [B]: what ST-MoE's router z-loss
    weighs (arXiv:2202.08906 equation 5). Under `cp` they are terms that add up to a sequence's."""
    squares: Tensor = _SquaredLogSum.apply(logits)  # type: ignore[no-untyped-call]
    return squares.mean(1) / (1 if cp is None else cp.group.size)


class _SquaredLogSum(torch.autograd.Function):
    """Saves the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.logsumexp(logits, dim=-1).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        factors: Tensor = 2 * grad * torch.logsumexp(logits, dim=-1)
        return torch.softmax(logits, dim=-1) * factors.unsqueeze(-1)


def imbalance(
    logits: Tensor,
    chosen: Tensor,
    cp: ContextParallel | None = None,
    *,
    router: Router = MIXTRAL,
    bias: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Return E sum_e f_e P_e of each sequence, [B]; 1 where routing is even (arXiv:2101.03961 eq. 4, over a sequence's tokens).

    f_e is the share of the sequence's copies that chose expert e, P_e the mean over its tokens of its score of logits [B, S, E], as a share
    of all experts' (arXiv:2412.19437 eq. 17 to 20: with a bias f_e counts the largest scores without it). `scores` are those of softmax
    where the routing has them. The ranks of `cp` sum what their tokens chose, and return terms that add up to the sequence's: each has the
    gradient of its own tokens.
    """
    experts, ranks = logits.shape[-1], 1
    counted = chosen if bias is None else logits.detach().topk(chosen.shape[-1], dim=-1).indices
    copies = one_hot_choices(counted, experts).sum(1)  # [B, E]
    if cp is not None:
        dist.all_reduce(copies, group=cp.group.handle)
        ranks = cp.group.size
    share = copies.to(logits.dtype) / (ranks * chosen.shape[1] * chosen.shape[2])
    if router.score == "sigmoid":
        sigmoids = torch.sigmoid(logits)
        scores = sigmoids / (sigmoids.sum(-1, keepdim=True) + TINY)
    elif scores is None:
        scores = torch.softmax(logits, dim=-1)
    return experts * (share * scores.mean(1)).sum(-1) / ranks
