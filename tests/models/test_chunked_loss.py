"""Head and loss in chunks of the vocabulary: how near they are in half precision, and what they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from distrain.trainer.layers.chunked_loss import chunked_token_losses  # noqa: E402
from distrain.trainer.layers.cross_entropy import IGNORED, cross_entropy  # noqa: E402
from distrain.trainer.spec.derived.loss_chunks import chunk_size, most_chunks  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, dtype

R, H, V, WORDS = 64, 32, 1000, 990  # rows, hidden, padded vocabulary, vocabulary


def inputs(kind: dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(WORDS, (2, R // 2))
    labels[1, 5:9] = IGNORED
    return torch.randn(2, R // 2, H).to(kind).requires_grad_(), (torch.randn(H, V) / 4).to(kind).requires_grad_(), labels


def in_chunks(x: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the gradients of x and of the weight."""
    loss = chunked_token_losses(x, weight, labels, WORDS, None, chunks, transposed=False).sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def whole(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = cross_entropy(x @ weight, labels, WORDS)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize(
    ("vocab", "chunks", "sizes"), [(1000, 8, [128] * 7 + [104]), (64, 7, [16] * 4), (63, 8, [8] * 7 + [7]), (5, 1, [5])]
)
def test_chunks_have_a_multiple_of_eight_columns(vocab: int, chunks: int, sizes: list[int]) -> None:
    size = chunk_size(vocab, chunks)
    assert [min(size, vocab - first) for first in range(0, vocab, size)] == sizes
    assert most_chunks(vocab) == len(range(0, vocab, 8))


@pytest.mark.parametrize("chunks", [1, 3, 125])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(chunks: int) -> None:
    for found, expected in zip(in_chunks(*inputs(), chunks), whole(*inputs()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_in_bf16_the_weights_gradient_is_as_near_as_without_chunks_and_the_inputs_is_rounded_for_each_chunk() -> None:
    x, weight, labels = inputs(torch.bfloat16)
    exact = whole(x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels)
    once, chunked = ([rms(found - right) / rms(right) for found, right in zip(each, exact, strict=True)] for each in (
        whole(*inputs(torch.bfloat16)), in_chunks(*inputs(torch.bfloat16), 8)
    ))  # fmt: skip
    assert chunked[0] < 1.1 * once[0] + 1e-6
    assert chunked[2] < 1.1 * once[2]
    assert once[1] < chunked[1] < 2 * once[1]


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


class Largest(TorchDispatchMode):
    """Notes the most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor))])
        return result


def test_no_more_than_one_chunk_of_logits_is_ever_made() -> None:
    x, weight, labels = inputs()
    with Largest() as all_at_once:
        whole(x, weight, labels)
    with Largest() as found:
        in_chunks(x, weight, labels, 4)
    assert all_at_once.elements == R * V
    assert found.elements == H * V  # the weight's gradient
    assert R * chunk_size(V, 4) < H * V
