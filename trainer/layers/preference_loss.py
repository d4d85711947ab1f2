"""The loss on preferences, of the losses of tokens: direct preference optimization (arXiv:2305.18290) and its kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..spec.derived.answer_room import answer_room
from ..spec.sections.preference import Preference
from .group_messages import all_reduce
from .held_results import take_held
from .rank_group import Group

# P pairs of a micro-batch [B, S], of whose answers the chosen comes first; R = B s tokens, of which a rank of the context axis has s a row


@dataclass(frozen=True, kw_only=True)
class PairInputs:
    """The pairs of a micro-batch. `starts` [2 P + 1], int64: where each answer begins, with its prompt, among this rank's tokens, and where
    the last one ends. `labels` [P, 2], float64: labels of each answer, on all ranks. `reference` [P, 2], float64: log probability of
    each answer under the reference, 0 without one."""

    starts: Tensor
    labels: Tensor
    reference: Tensor


class PairResults(NamedTuple):
    """What a forward finds of its pairs: log (p / p_reference) of each answer, [P, 2], and sums over pairs, [3]: how many have a chosen
    reward above the rejected, the chosen rewards, the rejected rewards; all float64. Of the ranks of a context axis one has the sums."""

    log_ratios: Tensor
    sums: Tensor


FIGURES = len(("accuracy", "chosen_reward", "rejected_reward"))  # in PairResults.sums


def preference_loss(
    losses: Tensor, shape: tuple[int, int], pairs: PairInputs, preference: Preference, context: Group | None
) -> tuple[Tensor, PairResults]:
    """Return the sum of the losses of pairs, of losses -log p [R] of the tokens of a micro-batch of this whole shape, 0 of those that are
    no labels; and the results.

    Of the ranks of a context axis one returns the sum, the others 0, and all have the gradients of their tokens. One message adds up their
    log probabilities.
    """
    given = losses, shape, pairs, preference, context
    loss, log_ratios, sums = _PreferenceLoss.apply(*given)  # type: ignore[no-untyped-call]
    return loss, PairResults(log_ratios, sums)


def pair_losses(log_p: Tensor, pairs: PairInputs, preference: Preference) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair [P] and the reward of each answer [P, 2], of their log probabilities [P, 2]."""
    beta = preference.beta
    log_ratios = log_p - pairs.reference
    rewards = beta * (log_ratios / pairs.labels if preference.loss == "simpo" else log_ratios)
    difference = rewards[:, 0] - rewards[:, 1]
    if preference.loss == "ipo":
        chosen, rejected = (log_ratios / pairs.labels).unbind(1)
        losses = (chosen - rejected - 1 / (2 * beta)).square()
    else:
        above, wrong = difference - preference.margin, preference.label_smoothing
        losses = -(1 - wrong) * F.logsigmoid(above) - wrong * F.logsigmoid(-above)
    return losses - preference.nll_weight * log_p[:, 0] / pairs.labels[:, 0], rewards


class _PreferenceLoss(torch.autograd.Function):
    """Sums in float64: the log probability of a long answer is hundreds of nats, and the loss is of small differences. Saves the gradient
    of each token's loss."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, shape: tuple[int, int], pairs: PairInputs, preference: Preference, context: Group | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.segment_reduce(losses.double(), "sum", offsets=pairs.starts)  # [2 P]
        log_p = -_sum_ranks(own, shape, context).view(-1, 2)
        with torch.enable_grad():
            log_p.requires_grad_()
            each, rewards = pair_losses(log_p, pairs, preference)
            loss, rewards = each.sum(), rewards.detach()
            if ctx.needs_input_grad[0]:
                (slopes,) = torch.autograd.grad(loss, log_p)
                ctx.save_for_backward(_of_tokens(-slopes, pairs.starts, len(losses)).to(losses.dtype))
        chosen, rejected = rewards.unbind(1)
        sums = torch.stack([(chosen > rejected).sum().double(), chosen.sum(), rejected.sum()])
        loss = loss.detach().to(losses.dtype)
        if context is not None and context.rank:
            loss, sums = torch.zeros_like(loss), torch.zeros_like(sums)
        log_ratios = log_p.detach() - pairs.reference
        ctx.mark_non_differentiable(log_ratios, sums)
        return loss, log_ratios, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * grad, None, None, None, None


def _sum_ranks(own: Tensor, shape: tuple[int, int], context: Group | None) -> Tensor:
    """Return the sums [2 P] over all ranks of a context axis of each one's, in a message whose size depends on the shape alone."""
    if context is None:
        return own
    batch, seq = shape
    sent = own.new_zeros(batch * answer_room(seq))
    sent[: len(own)] = own
    return all_reduce(sent, context)[: len(own)]


def _of_tokens(values: Tensor, starts: Tensor, tokens: int) -> Tensor:
    """Return for each of so many tokens its answer's value, of values [P, 2]; 0 behind the last answer."""
    answer = torch.searchsorted(starts, torch.arange(tokens, device=starts.device), right=True) - 1
    return F.pad(values.flatten(), (0, 1))[answer]


def take_pair_results(module: torch.nn.Module) -> list[PairResults]:
    """Return what a module's forwards have found of pairs since they were last taken."""
    return take_held(module, "pair_results")
