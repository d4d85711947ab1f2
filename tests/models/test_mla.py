"""Latent attention computes what its papers say, in float64, values and gradients, by every path."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from distrain.tests.fakes.small_models import MODELS, S, batch_of, gradients, keys_of, module_of, run_of  # noqa: E402
from distrain.trainer.layers.transformer.core_attention import attention_weights, flash_attention, weighted_values  # noqa: E402
from distrain.trainer.layers.transformer.document_mask import document_mask, document_starts  # noqa: E402
from distrain.trainer.layers.transformer.rotary import rotary_angles  # noqa: E402
from distrain.trainer.spec.run import Model  # noqa: E402
from distrain.trainer.spec.sections.rope import Rope  # noqa: E402

B, H = 2, 48
YARN = Rope(type="yarn", factor=8.0, original_max_position_embeddings=6, mscale=0.8, mscale_all_dim=1.2)
MLA = {
    "latent queries": MODELS["mla"],
    "plain queries": replace(MODELS["mla"], q_lora_rank=0),
    "yarn": replace(MODELS["mla"], rope=YARN),
    "wide values": replace(MODELS["mla"], v_head_dim=22),
}


def paper_attention(weights: dict[str, Any], model: Model, x: Any, mask: Any) -> Any:
    """Return attention's output for x [B, S, H] by arXiv:2412.19437 eq. 1 to 11, head by head; pairs turn as complex numbers."""
    latents = {}
    for name, source in (("query", x), ("key", x)):
        if f"{name}_down.weight" in weights:
            down = source @ weights[f"{name}_down.weight"]
            mean_square = down.square().mean(-1, keepdim=True)
            latents[name] = down / (mean_square + 1e-6).sqrt() * weights[f"{name}_latent_norm.weight"]
    plain, turned, width = (getattr(model, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rope_key = turn(x @ weights["rope_key.weight"], model)
    heads = []
    for head in range(model.heads):
        query_columns = slice(head * (plain + turned), (head + 1) * (plain + turned))
        query = latents.get("query", x) @ weights["query.weight"][:, query_columns]
        key = latents["key"] @ weights["key.weight"][:, head * plain : (head + 1) * plain]
        value = latents["key"] @ weights["value.weight"][:, head * width : (head + 1) * width]
        scores = query[..., :plain] @ key.mT + turn(query[..., plain:], model) @ rope_key.mT
        if model.rope.type == "yarn":
            scores = scores * (0.1 * (model.rope.mscale_all_dim or 0) * log(model.rope.factor) + 1) ** 2
        heads.append(torch.softmax(scores / sqrt(plain + turned) + mask, dim=-1) @ value)
    return torch.cat(heads, dim=-1) @ weights["out.weight"]


def turn(x: Any, model: Model) -> Any:
    """Multiply the pairs (2i, 2i + 1) of x [B, S, R], as complex numbers, by those of their position."""
    cos, sin = rotary_angles(model, torch.arange(x.shape[1]), x.shape[1], x.dtype)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(pairs).flatten(-2)


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("documents_apart", [False, True])
def test_attention_and_its_gradients_are_the_papers(name: str, kernel: str, recompute: str, documents_apart: bool) -> None:
    run = replace(
        run_of("mla", train__attention=kernel, parallel__recompute=recompute, model__layers=1), model=replace(MLA[name], layers=1)
    )
    attention = module_of(run).layers["0"].attention
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(B, S, H, dtype=torch.float64, generator=drawn, requires_grad=True)
    grad = torch.randn(B, S, H, dtype=torch.float64, generator=drawn)
    places = torch.arange(S)
    documents = torch.arange(S).expand(B, S) // 7 if documents_apart else torch.zeros(B, S, dtype=torch.int64)
    mask = document_mask(document_starts(documents), places, S, torch.float64)
    weights = dict(attention.named_parameters())
    angles = rotary_angles(run.model, places, S, torch.float64)
    found = attention(x, angles, mask if documents_apart else None, None)
    expected = paper_attention(weights, run.model, x, mask[:, 0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    inputs = [x, *weights.values()]
    for ours, theirs in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("widths", [(16, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_kernel_takes_values_of_another_width(widths: tuple[int, int], masked: bool) -> None:
    query, key = torch.randn(2, 2, 3, S, widths[0], dtype=torch.float64).requires_grad_()
    value = torch.randn(2, 3, S, widths[1], dtype=torch.float64, requires_grad=True)
    mask = document_mask(torch.zeros(2, S, dtype=torch.int64), torch.arange(S), S, torch.float64) if masked else None
    for scale in (None, 0.3):
        fused = flash_attention(query, key, value, mask, scale)
        apart = weighted_values(attention_weights(query, key, mask, scale), value)
        torch.testing.assert_close(fused, apart, rtol=0, atol=1e-12)
        grad = torch.randn_like(fused)
        for one, other in zip(*(torch.autograd.grad(each, (query, key, value), grad) for each in (fused, apart)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dropout", "window"), [(0.1, None), (0.0, 5), (0.1, 5)])
def test_every_path_computes_the_same_loss_and_gradients(dropout: float, window: int | None) -> None:
    """Fused or separate kernels, saved or recomputed; dropout is keyed."""
    results = []
    for kernel, recompute in (("flash", "none"), ("math", "none"), ("flash", "selective"), ("math", "full")):
        run = run_of("mla", train__attention=kernel, parallel__recompute=recompute, model__dropout=dropout, model__window=window)
        results.append(gradients(module_of(run), *batch_of(run), keys=keys_of() if dropout else None))
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-12, atol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], rtol=0, atol=1e-13)
