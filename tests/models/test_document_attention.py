"""Attention by the bounds of documents is attention under their mask: on a CPU its kernels, on a GPU what is asked of FlashAttention-2."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor  # noqa: E402

from distrain.tests.fakes.small_models import batch_of, keys_of, module_of, run_of  # noqa: E402
from distrain.trainer.layers.dtypes import PRECISION_DTYPES  # noqa: E402
from distrain.trainer.layers.transformer import document_attention as document_attention_module  # noqa: E402
from distrain.trainer.layers.transformer import document_kernels  # noqa: E402
from distrain.trainer.layers.transformer.core_attention import attention_weights, weighted_values, window_mask  # noqa: E402
from distrain.trainer.layers.transformer.document_attention import document_attention, takes_documents  # noqa: E402
from distrain.trainer.layers.transformer.document_bounds import document_bounds, document_chunks  # noqa: E402
from distrain.trainer.layers.transformer.document_mask import document_mask, document_starts  # noqa: E402
from distrain.trainer.parallel.saved_bytes import count_saved_tensors  # noqa: E402
from distrain.trainer.spec.changed_run import with_changes  # noqa: E402
from distrain.trainer.spec.derived.document_kernel import has_document_kernel, widest_head  # noqa: E402
from distrain.trainer.spec.run import Device  # noqa: E402

S, A = 24, 4
WINDOWS = (None, 1, 5, 12, 40)
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value


def marks(kind: str) -> Any:
    """Return marks of documents [B, S]."""
    drawn = torch.Generator().manual_seed(4)
    match kind:
        case "one a row":
            return torch.zeros(2, S, dtype=torch.int64)
        case "each token":
            return torch.arange(2 * S).view(2, S)
        case "two":  # the second begins in the middle of one row, and lasts to the end of both
            return torch.stack((torch.arange(S) // 13, torch.zeros(S, dtype=torch.int64)))
    return torch.cumsum((torch.rand(3, S, generator=drawn) < 0.2).long(), dim=1) % 2  # a number comes back: it is its change that counts


KINDS = ("one a row", "each token", "two", "drawn")


def masked_attention(inputs: Inputs, documents: Tensor, window: int | None, scale: float | None = None) -> Tensor:
    """Return the values [B, S, A, D] in separate kernels, under a mask."""
    query, key, value = (each.transpose(1, 2) for each in inputs)
    mask = document_mask(document_starts(documents), torch.arange(S), S, query.dtype)
    if window:
        mask = mask + window_mask(S, window, query.dtype, query.device)
    return weighted_values(attention_weights(query, key, mask, scale), value).transpose(1, 2)


def inputs_of(batch: int, kv_heads: int = A, dims: tuple[int, int] = (8, 8), dtype: Any = torch.float64) -> Inputs:
    """Return a query, key and value [B, S, A or N, D] of width dims[0], dims[0] and dims[1]."""
    drawn, (dim, value_dim) = torch.Generator().manual_seed(7), dims
    shapes = ((A, dim), (kv_heads, dim), (kv_heads, value_dim))
    query, key, value = (torch.randn(batch, S, *shape, dtype=torch.float64, generator=drawn).to(dtype).requires_grad_() for shape in shapes)
    return query, key, value


def with_gradients(values: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the values and the gradients of the inputs, from a drawn gradient of the values."""
    grad = torch.randn(values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(values.dtype)
    return values, *torch.autograd.grad(values, inputs, grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("kv_heads", "dims", "scale"), [(A, (8, 8), None), (2, (8, 8), 0.3), (1, (12, 8), None), (A, (8, 12), None)])
def test_a_kernel_that_reads_bounds_computes_what_a_mask_gives(
    kind: str, window: int | None, kv_heads: int, dims: tuple[int, int], scale: float | None
) -> None:
    documents = marks(kind)
    inputs = inputs_of(len(documents), kv_heads, dims)
    found = with_gradients(document_attention(*inputs, document_bounds(documents), window, scale), inputs)
    for ours, theirs in zip(found, with_gradients(masked_attention(inputs, documents, window, scale), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04), (torch.float16, 0.005)])
@pytest.mark.parametrize("window", [None, 5])
def test_other_types_are_close(dtype: Any, apart: float, window: int | None) -> None:
    documents = marks("drawn")
    inputs = inputs_of(len(documents), 2, dtype=dtype)
    found = with_gradients(document_attention(*inputs, document_bounds(documents), window), inputs)
    query, key, value = (each.detach().double().requires_grad_() for each in inputs)
    wide = query, key, value
    for ours, theirs in zip(found, with_gradients(masked_attention(wide, documents, window), wide), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=apart)


def test_bounds_are_the_first_token_of_each_document_and_the_end() -> None:
    found = document_bounds(torch.tensor([[3, 3, 5, 5], [5, 5, 3, 4]]))
    assert found.host.tolist() == [0, 2, 4, 6, 7, 8, 8, 8, 8]
    assert found.host.dtype == torch.int32
    assert found.to(torch.device("cpu")).starts.tolist() == found.host.tolist()


def test_the_kernel_keeps_its_inputs_its_values_and_a_float32_a_row() -> None:
    """No mask: what is kept grows with the tokens alone."""
    documents = marks("drawn")
    inputs, bounds = inputs_of(len(documents), 2, dtype=torch.float32), document_bounds(documents)
    with count_saved_tensors(inputs, [bounds.starts, bounds.host]) as saved:
        values = document_attention(*inputs, bounds)
    assert saved.bytes == 4 * len(documents) * S * A * (8 + 1)
    assert values.is_contiguous()


@pytest.mark.parametrize(
    ("precision", "head_dim", "is_recent", "expected"),
    [
        ("bf16", 128, True, True),
        ("fp16", 256, True, True),
        ("fp8", 64, True, True),
        ("bf16", 264, True, False),
        ("fp32", 64, True, False),
        ("fp16", 64, False, False),
    ],
)
def test_the_plan_and_the_model_agree_on_which_gpus_have_the_kernel(
    precision: Any, head_dim: int, is_recent: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_attention_module, "has_flash_attention", lambda: is_recent)
    peak: dict[Any, float] = {"fp16": 1e14, "fp32": 1e13} | ({"bf16": 1e14} if is_recent else {})
    run = run_of("llama", data__documents=True, train__precision=precision, train__attention="flash", model__head_dim=head_dim)
    run = with_changes(run, [("cluster.device", Device(name="gpu", memory=1e11, kind="cuda", peak=peak))])
    assert has_document_kernel(run) == expected
    assert takes_documents(torch.device("cuda"), PRECISION_DTYPES[precision], widest_head(run.model)) == expected
    assert not has_document_kernel(with_changes(run, [("model.dropout", 0.1)]))
    assert not has_document_kernel(with_changes(run, [("train.attention", "math")]))


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "mla"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("window", "dropout"), [(None, 0.0), (5, 0.0), (None, 0.2)])  # the kernel drops no scores: dropout takes the mask
def test_a_model_trains_the_same_by_bounds_and_by_a_mask(name: str, recompute: str, window: int | None, dropout: float) -> None:
    run = run_of(name, train__attention="flash", parallel__recompute=recompute, model__window=window, model__dropout=dropout)
    module, (tokens, labels) = module_of(run), batch_of(run)
    documents = torch.arange(tokens.numel()).view_as(tokens) // 7
    weights = list(module.parameters())
    results = []
    for bounds in (None, document_bounds(documents)):
        loss, _ = module(tokens, labels, documents=documents, bounds=bounds, keys=keys_of())
        results.append((loss, *torch.autograd.grad(loss, weights, allow_unused=True)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def sequences(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, left: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the values [T, A, D] and the log-sum-exp [A, T] of sequences that lie behind each other, by the definition of FlashAttention-2
    (its `flash_attn_varlen_func`): the last query of a sequence sees its last key, and each query `left` keys before its own."""
    values, sums = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype), query.new_zeros(query.shape[1], len(query))
    bounds = zip(*(each.tolist()[at:] for each in (queries, keys) for at in (0, 1)), strict=False)
    for first, end, first_key, end_key in bounds:
        many, every = end - first, end_key - first_key
        own = torch.arange(many)[:, None] + every - many
        hidden = own < torch.arange(every)
        if left is not None:
            hidden = hidden | (own - left > torch.arange(every))
        group = query.shape[1] // key.shape[1]
        wide_key, wide_value = (each[first_key:end_key].repeat_interleave(group, dim=1).transpose(0, 1) for each in (key, value))
        scores = (scale * query[first:end].transpose(0, 1) @ wide_key.mT).masked_fill(hidden, -torch.inf)
        values[first:end] = (scores.softmax(-1) @ wide_value).transpose(0, 1)
        sums[:, first:end] = scores.logsumexp(-1)
    return values, sums


class FakeFlash:
    """FlashAttention-2 for sequences of any lengths, forward and backward, as torch calls it, in plain operators."""

    def forward(self, *arguments: Any, scale: float, window_size_left: int | None, window_size_right: int) -> tuple[Tensor, Tensor]:
        query, key, value, queries, keys, most_queries, most_keys, dropout, causal, _ = arguments
        assert (dropout, causal, window_size_right) == (0.0, True, 0)
        assert queries.dtype == keys.dtype == torch.int32
        assert (most_queries, most_keys) == (queries.diff().max(), keys.diff().max())
        assert (queries[0], queries[-1], keys[0], keys[-1]) == (0, len(query), 0, len(key))
        return sequences(query, key, value, queries, keys, window_size_left, scale)

    def backward(self, grad: Tensor, *arguments: Any, scale: float, window_size_left: int | None, window_size_right: int) -> Any:
        query, key, value, values, log_sums, queries, keys, most_queries, most_keys, dropout, causal, *_ = arguments
        given = tuple(each.detach().requires_grad_() for each in (query, key, value))
        sizes = queries, keys, most_queries, most_keys, dropout, causal, False
        with torch.enable_grad():
            again, sums = self.forward(*given, *sizes, scale=scale, window_size_left=window_size_left, window_size_right=window_size_right)
        torch.testing.assert_close(values, again.detach())
        torch.testing.assert_close(log_sums, sums.detach())
        return torch.autograd.grad(again, given, grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("dims", "most"), [((8, 8), None), ((12, 8), 2)])
def test_what_is_asked_of_a_gpu_is_what_a_mask_gives(
    kind: str, window: int | None, ranks: int, dims: tuple[int, int], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows as one sequence, and of the two chunks that each rank of a split sequence has; in calls of at most so many documents."""
    fake = FakeFlash()
    monkeypatch.setattr(document_kernels, "_GPU_FORWARD", fake.forward)
    monkeypatch.setattr(document_kernels, "_GPU_BACKWARD", fake.backward)
    documents = marks(kind)
    inputs, host = inputs_of(len(documents), 2, dims), document_bounds(documents).host
    values = masked_attention(inputs, documents, window)
    grad = torch.randn(values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    length, sums = S // (2 * ranks), [torch.zeros_like(each) for each in inputs]
    plain = tuple(each.detach() for each in inputs)
    for rank in range(ranks):
        spans = [rank * length, (2 * ranks - 1 - rank) * length] if ranks > 1 else []
        own = torch.cat([torch.arange(begin, begin + length) for begin in spans]) if spans else torch.arange(S)
        mine = (plain[0][:, own], *plain[1:])
        chunks = list(document_chunks(host, len(documents), len(own), S, spans, most))
        assert max(len(each.starts) - 1 for each in chunks) <= (most or len(documents) * S)
        results = document_kernels.values_on_gpu(mine, host, chunks, window or 0, dims[0] ** -0.5)
        torch.testing.assert_close(results[0], values[:, own], rtol=0, atol=1e-12)
        parts = document_kernels.gradients_on_gpu(grad[:, own], mine, results, host, chunks, window or 0, dims[0] ** -0.5)
        sums[0][:, own] += parts[0]
        for total, part in zip(sums[1:], parts[1:], strict=True):
            total += part
    for ours, theirs in zip(sums, torch.autograd.grad(values, inputs, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
