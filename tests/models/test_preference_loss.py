"""The loss on preferences: values and gradients by its formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distrain.trainer.layers.preference_loss import PairInputs, PairResults, preference_loss
from distrain.trainer.spec.sections.preference import Preference

STARTS = [0, 4, 9, 10, 16]  # two pairs; behind the last answer padding
TOKENS = 18
REFERENCE = [[-3.0, -4.5], [-1.25, -6.0]]


def token_losses() -> Tensor:
    """Losses of the tokens, 0 of prompts and padding."""
    losses = torch.rand(TOKENS, generator=torch.Generator().manual_seed(3)) * 3 + 0.1
    losses[[0, 4, 10, 16, 17]] = 0.0
    return losses


def pair_inputs() -> PairInputs:
    labels = torch.tensor([[3.0, 4.0], [1.0, 5.0]], dtype=torch.float64)
    return PairInputs(starts=torch.tensor(STARTS), labels=labels, reference=torch.tensor(REFERENCE, dtype=torch.float64))


def computed(preference: Preference) -> tuple[Tensor, Tensor, PairResults]:
    """(loss, gradient of each token's loss, results)."""
    losses = token_losses().requires_grad_()
    loss, results = preference_loss(losses, (2, 9), pair_inputs(), preference, None)
    (3 * loss).backward()
    assert losses.grad is not None
    return loss, losses.grad / 3, results


def plain(formula: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, gradient of each token's loss) of a formula of the log probabilities and the mean ones of a token, [pairs, 2] each."""
    losses = token_losses().double().requires_grad_()
    sums = torch.stack([-losses[begin:end].sum() for begin, end in pairwise(STARTS)]).view(2, 2)
    loss = formula(sums, sums / pair_inputs().labels).sum()
    loss.backward()
    assert losses.grad is not None
    return loss, losses.grad


def over_reference(log_p: Tensor) -> Tensor:
    ratios = log_p - torch.tensor(REFERENCE, dtype=torch.float64)
    return ratios[:, 0] - ratios[:, 1]


def mean_over_reference(log_p: Tensor) -> Tensor:
    ratios = (log_p - torch.tensor(REFERENCE, dtype=torch.float64)) / pair_inputs().labels
    return ratios[:, 0] - ratios[:, 1]


# fmt: off
FORMULAS: dict[str, tuple[Preference, Callable[[Tensor, Tensor], Tensor]]] = {
    "arXiv:2305.18290 eq. 7": (Preference(beta=0.3), lambda log_p, mean: -logsigmoid(0.3 * over_reference(log_p))),
    "label smoothing": (Preference(beta=0.3, label_smoothing=0.2), lambda log_p, mean:
        -0.8 * logsigmoid(0.3 * over_reference(log_p)) - 0.2 * logsigmoid(-0.3 * over_reference(log_p))),
    "a margin": (Preference(beta=0.3, margin=0.5), lambda log_p, mean: -logsigmoid(0.3 * over_reference(log_p) - 0.5)),
    "arXiv:2404.19733 eq. 1": (Preference(beta=0.3, nll_weight=0.7), lambda log_p, mean:
        -logsigmoid(0.3 * over_reference(log_p)) - 0.7 * mean[:, 0]),
    "arXiv:2310.12036 eq. 17": (Preference(loss="ipo", beta=0.3), lambda log_p, mean: (mean_over_reference(log_p) - 1 / 0.6) ** 2),
}
# fmt: on


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradients_are_those_of_the_formula(name: str) -> None:
    preference, formula = FORMULAS[name]
    loss, gradient, _ = computed(preference)
    wanted, wanted_gradient = plain(formula)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-6, atol=1e-7)


def test_simpo_compares_mean_log_probabilities_and_has_no_reference() -> None:
    preference, losses = Preference(loss="simpo", beta=2.0, margin=1.0), token_losses().requires_grad_()
    pairs = pair_inputs()
    found, _ = preference_loss(
        losses, (2, 9), PairInputs(starts=pairs.starts, labels=pairs.labels, reference=0 * pairs.reference), preference, None
    )
    found.backward()
    wanted, gradient = plain(lambda log_p, mean: -logsigmoid(2.0 * (mean[:, 0] - mean[:, 1]) - 1.0))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert losses.grad is not None
    torch.testing.assert_close(losses.grad.double(), gradient, rtol=1e-6, atol=1e-7)


def test_results_are_log_ratios_and_sums_of_rewards() -> None:
    _, _, results = computed(Preference(beta=0.3))
    sums = [-token_losses()[begin:end].double().sum().item() for begin, end in pairwise(STARTS)]
    ratios = torch.tensor(sums, dtype=torch.float64).view(2, 2) - torch.tensor(REFERENCE, dtype=torch.float64)
    torch.testing.assert_close(results.log_ratios, ratios)
    rewards = 0.3 * ratios
    higher = (rewards[:, 0] > rewards[:, 1]).sum().item()
    assert 0 < higher < 2
    assert results.sums.tolist() == pytest.approx([higher, *rewards.sum(0).tolist()])


def test_equal_rewards_are_no_preference() -> None:
    losses = torch.zeros(4)
    pairs = PairInputs(starts=torch.tensor([0, 2, 4]), labels=torch.ones(1, 2).double(), reference=torch.zeros(1, 2).double())
    loss, results = preference_loss(losses, (1, 4), pairs, Preference(), None)
    assert loss.item() == pytest.approx(0.6931472, abs=1e-7)
    assert results.sums.tolist() == [0, 0, 0]


def test_long_answers_are_summed_in_float64() -> None:
    """Their log probabilities are thousands of nats; the difference of two is what counts."""
    losses = torch.full((200_000,), 0.1)
    pairs = PairInputs(starts=torch.tensor([0, 100_000, 200_000]), labels=torch.ones(1, 2).double(), reference=torch.zeros(1, 2).double())
    loss, results = preference_loss(losses, (1, 200_000), pairs, Preference(beta=1.0), None)
    assert results.log_ratios[0].tolist() == pytest.approx([-10_000 * (1 + 1.49e-8)] * 2, rel=1e-9)
    assert loss.item() == pytest.approx(0.6931472, abs=1e-7)


def test_a_batch_without_pairs_has_no_loss() -> None:
    pairs = PairInputs(starts=torch.tensor([0]), labels=torch.ones(0, 2).double(), reference=torch.zeros(0, 2).double())
    loss, results = preference_loss(torch.zeros(4), (1, 4), pairs, Preference(), None)
    assert (loss.item(), results.sums.tolist(), results.log_ratios.shape) == (0, [0, 0, 0], (0, 2))
