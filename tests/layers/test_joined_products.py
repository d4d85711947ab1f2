"""Products with weights that lie one after another give the outputs and the gradients of separate ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from distrain.trainer.layers.joined_products import joined_products  # noqa: E402

BATCH, SEQ, INNER, OUTER = 2, 3, 5, 7


def random_layers(many: int, *, has_bias: bool) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
    """Return an input, the joined weights, and the parameters that are views of these, with their biases."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, SEQ, INNER, dtype=torch.float64, requires_grad=True)
    joined = torch.randn(many, INNER, OUTER, dtype=torch.float64)
    weights = [nn.Parameter(each) for each in joined.unbind()[::-1]]
    biases = [nn.Parameter(torch.randn(OUTER, dtype=torch.float64)) if has_bias else None for _ in weights]
    return x, joined, weights, biases


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("many", [2, 3])
def test_outputs_and_gradients_are_those_of_separate_products(many: int, has_bias: bool, keeps_all: bool) -> None:
    x, joined, weights, biases = random_layers(many, has_bias=has_bias)
    inputs = [x, *weights, *(each for each in biases if each is not None)]
    found = joined_products(x, joined, weights, biases, keeps_all=keeps_all)
    expected = [x @ weight if bias is None else x @ weight + bias for weight, bias in zip(weights, biases, strict=True)]
    grads = [torch.randn_like(each) for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, grads), torch.autograd.grad(expected, inputs, grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("has_bias", "keeps_all", "memories"), [(False, True, 1), (False, False, 3), (True, True, 3)])
def test_outputs_share_a_memory_where_backward_needs_them_all(has_bias: bool, keeps_all: bool, memories: int) -> None:
    outputs = joined_products(*random_layers(3, has_bias=has_bias), keeps_all=keeps_all)
    assert len({each.untyped_storage().data_ptr() for each in outputs}) == memories


def test_an_input_without_gradient_gets_none() -> None:
    x, joined, weights, biases = random_layers(2, has_bias=False)
    outputs = joined_products(x.detach(), joined, weights, biases, keeps_all=True)
    torch.stack(outputs).sum().backward()
    assert all(each.grad is not None and each.grad.shape == (INNER, OUTER) for each in weights)
