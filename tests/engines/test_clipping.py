"""Gradients are clipped as torch clips them."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from distrain.trainer.engines.clipping import clip_divisor  # noqa: E402
from distrain.trainer.engines.deepspeed.engine import clip  # noqa: E402


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("most", [1e-7, 1e-6, 0.5, 2.0])
def test_gradients_are_those_of_torchs_clip_grad_norm(size: float, most: float) -> None:
    """Norms as small as the number that keeps the division from 0 too."""
    gradient = size * torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    norm = gradient.norm()
    expected = nn.Parameter(torch.zeros_like(gradient))
    expected.grad = gradient.clone()
    nn.utils.clip_grad_norm_([expected], most)
    clipped = nn.Parameter(torch.zeros_like(gradient))
    clipped.grad = gradient.clone()
    clip([clipped], norm, most)
    torch.testing.assert_close(clipped.grad, expected.grad, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(gradient / clip_divisor(norm, most), expected.grad, rtol=1e-12, atol=0.0)
