"""Attention with sinks, and the clamped gate of gpt-oss, are their formulas in float64; a GPU's kernel is called as it computes."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from distrain.trainer.layers.experts import grouped_sum  # noqa: E402
from distrain.trainer.layers.transformer import attention_sinks as sinks_of  # noqa: E402
from distrain.trainer.layers.transformer import windowed_core  # noqa: E402
from distrain.trainer.layers.transformer.attention_sinks import HeadSinks, sink_attention, sink_weights  # noqa: E402
from distrain.trainer.layers.transformer.core_attention import weighted_values, window_band, window_mask  # noqa: E402
from distrain.trainer.layers.transformer.feed_forward import clamped_swiglu  # noqa: E402
from distrain.trainer.layers.transformer.windowed_core import gpu_window_gradients, gpu_window_values  # noqa: E402

B, S, A, N, D = 2, 21, 6, 2, 8
WINDOWS = (None, 1, 4, 7, 30)


def inputs(size: int = D) -> Any:
    """Return query, key, value and the layer's sinks, some far above and some far below the scores."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(B, many, S, size, dtype=torch.float64, requires_grad=True) for many in (A, N, N))
    return query, key, value, torch.tensor([0.5, -1.0, 2.0, 30.0, -30.0, 0.0, 4.0, -2.0, 1.0], dtype=torch.float64, requires_grad=True)


def expected(given: Any, first: int, hidden: Any) -> Any:
    """Return the values [B, S, A, D]: softmax over a row's scores and one more logit, which has no value."""
    query, key, value, sinks = given
    key, value = (each.repeat_interleave(A // N, dim=1) for each in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5 + hidden
    logits = torch.cat((scores, sinks[first : first + A, None, None].expand(B, A, S, 1)), dim=-1)
    return (torch.softmax(logits, -1)[..., :-1] @ value).transpose(1, 2)


def hidden_keys(window: int | None, documents: bool) -> Any:
    """Return the mask [S, S] or [B, 1, S, S] of what a query does not see."""
    mask = window_mask(S, S if window is None else min(window, S), torch.float64, torch.device("cpu"))
    if not documents:
        return mask
    of_token = torch.arange(S).expand(B, S) // torch.tensor([[8], [5]])
    return mask + torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill((of_token[:, :, None] != of_token[:, None])[:, None], -torch.inf)


def agree(found: Any, wanted: Any, given: tuple[Any, ...]) -> None:
    """Check values and the gradients of all that was given."""
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    grad = torch.randn(B, S, A, found.shape[-1], dtype=torch.float64)
    for ours, theirs in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_sink_takes_its_share_of_each_row(window: int | None, documents: bool, kernel: str) -> None:
    given: Any = inputs()
    query, key, value, sinks = given
    hidden, own = hidden_keys(window, documents), HeadSinks(sinks, 2, A)
    if kernel == "math":
        found = weighted_values(sink_weights(query, key, hidden, None, own), value).transpose(1, 2)
    else:
        is_shorter = window is not None and window < S
        band = window_band(window, torch.float64, torch.device("cpu")) if is_shorter and window else None
        found = sink_attention(query, key, value, own, hidden_keys(None, True) if documents else None, band, window, None)
    agree(found, expected(given, 2, hidden), given)


def flash_of_a_gpu(query: Any, key: Any, value: Any, *others: Any, scale: float, window_size_left: Any, window_size_right: Any) -> Any:
    """What FlashAttention-2's forward returns for tensors [B, S, A or N, D] (torch.ops.aten._flash_attention_forward)."""
    assert others == (None, None, S, S, 0.0, True, False)
    assert query.shape[-1] % 8 == 0
    scores = seen_scores(query, key, scale, window_size_left, window_size_right)
    wide = value.repeat_interleave(A // N, dim=2).transpose(1, 2)
    return (torch.softmax(scores, -1) @ wide).transpose(1, 2), torch.logsumexp(scores, -1), None, None, None


def seen_scores(query: Any, key: Any, scale: float, left: int | None, right: int | None) -> Any:
    key = key.repeat_interleave(A // N, dim=2)
    assert right in (None, 0)
    behind = torch.arange(S)[:, None] - torch.arange(S)
    is_hidden = (behind < 0) | (behind > (S if left is None else left))
    return (query.transpose(1, 2) @ key.permute(0, 2, 3, 1) * scale).masked_fill(is_hidden, -torch.inf)


def flash_gradients_of_a_gpu(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *others: Any, scale: float, **window: Any
) -> Any:
    """What its backward computes: shares from the log-sum-exps that it is given, their sums of products from the values."""
    assert others[:6] == (None, None, S, S, 0.0, True)
    shares = torch.exp(seen_scores(query, key, scale, window["window_size_left"], window["window_size_right"]) - sums[..., None])
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    wide = value.repeat_interleave(A // N, dim=2).transpose(1, 2)
    of_scores = shares * (grad @ wide.mT - (grad * out).sum(-1, keepdim=True)) * scale
    query_grad = of_scores @ key.repeat_interleave(A // N, dim=2).transpose(1, 2)
    grouped = (each.view(B, N, A // N, S, -1).sum(2).transpose(1, 2) for each in (of_scores.mT @ query.transpose(1, 2), shares.mT @ grad))
    return query_grad.transpose(1, 2), *grouped


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [D, 6])
def test_a_gpus_kernel_is_given_windows_and_log_sums_as_it_reads_them(
    window: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 6 elements is padded to 8."""
    shorter = window if window is not None and window < S else None

    def fake_values(*given: Any) -> Any:
        return gpu_window_values(*given[:3], shorter, given[-1])  # type: ignore[call-arg]

    def fake_gradients(*given: Any) -> Any:
        return gpu_window_gradients(*given[:6], shorter, given[-1])  # type: ignore[call-arg]

    monkeypatch.setattr(windowed_core, "_GPU_FORWARD", flash_of_a_gpu)
    monkeypatch.setattr(windowed_core, "_GPU_BACKWARD", flash_gradients_of_a_gpu)
    monkeypatch.setattr(sinks_of, "_cpu_values", fake_values)
    monkeypatch.setattr(sinks_of, "_cpu_gradients", fake_gradients)
    monkeypatch.setattr(windowed_core, "padded_heads", eights)
    given: Any = inputs(size)
    found = sink_attention(given[0], given[1], given[2], HeadSinks(given[3], 2, A), None, None, window, None)
    agree(found, expected(given, 2, hidden_keys(window, documents=False)), given)


def eights(*tensors: Any) -> tuple[Any, ...]:
    return tuple(torch.nn.functional.pad(each, (0, -each.shape[-1] % 8)) for each in tensors)


def test_bf16_is_near_float64() -> None:
    given: Any = inputs()
    half: Any = [each.detach().bfloat16().requires_grad_() for each in given]
    wide: Any = [each.detach().double().requires_grad_() for each in half]
    grad = torch.randn(B, S, A, D).bfloat16()
    band = window_band(4, torch.bfloat16, torch.device("cpu"))
    wanted = expected(wide, 2, hidden_keys(4, documents=False))
    hidden = hidden_keys(4, documents=False).bfloat16()
    for found in (
        sink_attention(half[0], half[1], half[2], HeadSinks(half[3], 2, A), None, band, 4, None),
        weighted_values(sink_weights(half[0], half[1], hidden, None, HeadSinks(half[3], 2, A)), half[2]).transpose(1, 2),
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.03)
        ours = torch.autograd.grad(found, half, grad)
        for one, other in zip(ours, torch.autograd.grad(wanted, wide, grad.double(), retain_graph=True), strict=True):
            assert (one.double() - other).abs().max() < 0.02 * other.abs().max()


def test_a_clamped_gate_is_its_formula_and_stops_at_its_limits() -> None:
    """At a limit itself the gradient goes on, as torch's clamp had it up to 2.13."""
    torch.manual_seed(3)
    gate, up = (torch.randn(500, dtype=torch.float64).mul(6).requires_grad_() for _ in range(2))
    with torch.no_grad():
        gate[:2], up[:3] = 7.0, torch.tensor([7.0, -7.0, 7.5])
    lower, between = torch.where(gate <= 7, gate, 7.0), torch.where(up.abs() <= 7, up, 7 * up.sign())
    grad = torch.randn(500, dtype=torch.float64)
    found, wanted = clamped_swiglu(gate, up), (between + 1) * lower * torch.sigmoid(1.702 * lower)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    for ours, theirs in zip(torch.autograd.grad(found, (gate, up), grad), torch.autograd.grad(wanted, (gate, up), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_rows_of_each_expert_are_added_up() -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(grouped_sum(x, torch.tensor([2, 2, 7])), torch.stack((x[:2].sum(0), torch.zeros(3).double(), x[2:].sum(0))))
