"""The torch modules' logits, losses and gradients match formulas written out plainly: sums over named indices, complex rotations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional


from distrain.tests.fakes.small_models import MODELS, batch_of, gradients, keys_of, module_of, run_of  # noqa: E402
from distrain.trainer.layers.counter_rng import dropout, hash64, splitmix64  # noqa: E402
from distrain.trainer.layers.cross_entropy import IGNORED  # noqa: E402
from distrain.trainer.spec.run import Model  # noqa: E402

DENSE = [name for name, model in MODELS.items() if not model.experts]
EVERY_DENSE_MODEL = pytest.mark.parametrize("name", DENSE)
ATTENTION = pytest.mark.parametrize("attention", ["flash", "math"])


ACTS: dict[str, Callable[[Any], Any]] = {
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
}
ACTS["geglu_tanh"] = ACTS["gelu_tanh"]


Drop = Callable[..., Any]  # (x [S, E], layer, site, [head]) -> x with dropout


def no_drop(x: Any, *address: Any) -> Any:
    return x


def written_out(model: Model, w: dict[str, Any], tokens: Any, drop: Drop = no_drop) -> Any:
    """Return the logits [S, V] of one sequence."""
    size = len(tokens)
    x = torch.stack([w["embedding.weight"][token] for token in tokens]) * (math.sqrt(model.hidden) if model.scale_embedding else 1)
    if model.positions == "learned":
        x = x + w["positions.weight"][:size]
    x = drop(x, -1, "embedding")
    for index in range(model.layers):
        layer = {name.removeprefix(f"layers.{index}."): each for name, each in w.items() if name.startswith(f"layers.{index}.")}
        y = norm_written_out(model, layer, "norm1", x) if model.norm_place != "after" else x
        attended = attention_written_out(model, layer, y, partial(drop_in_layer, drop, index), index)
        if model.norm_place != "before":
            attended = norm_written_out(model, layer, "post_norm1", attended)
        x = x + drop(attended, index, "attention.residual")
        y = norm_written_out(model, layer, "norm2", x) if model.norm_place != "after" else x
        has_gate = model.act in ("swiglu", "geglu_tanh")
        wide = ACTS[model.act](affine(layer, "mlp.gate" if has_gate else "mlp.up", y))
        fed = affine(layer, "mlp.down", wide * affine(layer, "mlp.up", y) if has_gate else wide)
        if model.norm_place != "before":
            fed = norm_written_out(model, layer, "post_norm2", fed)
        x = x + drop(fed, index, "mlp.residual")
    x = norm_written_out(model, w, "norm", x)
    table = w["embedding.weight"].T if model.tied else w["head.weight"]
    return x @ table[:, : model.vocab]


def drop_in_layer(drop: Drop, layer: int, x: Any, site: str, head: int) -> Any:
    return drop(x, layer, site, head)


def affine(w: dict[str, Any], name: str, x: Any) -> Any:
    whole = torch.einsum("si,io->so", x, w[f"{name}.weight"]) + w.get(f"{name}.bias", 0)
    if f"{name}.lora_a.weight" not in w:
        return whole
    return whole + 2 * torch.einsum("si,ir,ro->so", x, w[f"{name}.lora_a.weight"], w[f"{name}.lora_b.weight"])  # alpha 6 / rank 3


def norm_written_out(model: Model, w: dict[str, Any], name: str, x: Any) -> Any:
    if model.norm != "layernorm":
        scale = w[f"{name}.weight"] + (model.norm == "rmsnorm1p")
        return x / torch.sqrt((x**2).mean(1, keepdim=True) + model.norm_eps) * scale
    centred = x - x.mean(1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(1, keepdim=True) + model.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention_written_out(model: Model, w: dict[str, Any], x: Any, drop: Drop, index: int) -> Any:
    size, dim = len(x), model.head_dim or model.hidden // model.heads
    query, key, value = (affine(w, f"attention.{part}", x) for part in ("query", "key", "value"))
    if model.qk_norm and model.qk_norm_over == "all":
        query, key = (norm_written_out(model, w, f"attention.{part}_norm", each) for part, each in (("query", query), ("key", key)))
    query, key, value = (each.view(size, -1, dim) for each in (query, key, value))
    group = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for head in range(query.shape[1]):
        q, k, v = query[:, head], key[:, head // group], value[:, head // group]
        if model.qk_norm and model.qk_norm_over == "head":
            q, k = (norm_written_out(model, w, f"attention.{part}_norm", each) for part, each in (("query", q), ("key", k)))
        if model.positions == "rope":
            turned, base, factor = round(dim * model.rope_share), model.rope_base, model.rope.factor
            if model.rope_local_base and index % 2 == 0:  # the first of each two layers, of layer_types
                base, factor = model.rope_local_base, 1.0
            q, k = (torch.cat((rotate_written_out(each[:, :turned], base, factor), each[:, turned:]), dim=1) for each in (q, k))
        shares = torch.zeros(size, size, dtype=x.dtype)
        for position in range(size):
            scores = k[: position + 1] @ q[position] / math.sqrt(model.query_pre_attn_scalar or dim)
            shares[position, : position + 1] = torch.softmax(scores, 0)
        out[:, head] = drop(shares, "attention", head) @ v
    return affine(w, "attention.out", out.flatten(1))


def rotate_written_out(x: Any, base: float, factor: float) -> Any:
    size, dim = x.shape
    angle = torch.arange(size, dtype=x.dtype)[:, None] / factor * base ** (-2 * torch.arange(dim // 2, dtype=x.dtype) / dim)
    turned = torch.complex(x[:, : dim // 2], x[:, dim // 2 :]) * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), dim=1)


@EVERY_DENSE_MODEL
@ATTENTION
def test_logits_match_the_written_out_formulas(name: str, attention: str) -> None:
    run = run_of(name, train__attention=attention)
    module, (tokens, _) = module_of(run), batch_of(run)
    expected = torch.stack([written_out(run.model, dict(module.named_parameters()), row) for row in tokens])
    assert (module.logits(tokens) - expected).abs().max() < 1e-12 * expected.abs().max()


@EVERY_DENSE_MODEL
@ATTENTION
def test_the_loss_is_the_cross_entropy_of_the_labels_that_count(name: str, attention: str) -> None:
    run = run_of(name, train__attention=attention)
    module, (tokens, labels) = module_of(run), batch_of(run)
    loss, many = module(tokens, labels)
    assert many == (labels != IGNORED).sum()
    expected = F.cross_entropy(module.logits(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


@EVERY_DENSE_MODEL
@ATTENTION
def test_gradients_match_the_written_out_formulas(name: str, attention: str) -> None:
    z_loss = 0.01 if attention == "flash" else 0.0
    run = run_of(name, train__attention=attention, train__z_loss=z_loss)
    module, (tokens, labels) = module_of(run), batch_of(run)
    logits = torch.stack([written_out(run.model, dict(module.named_parameters()), row) for row in tokens])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss, found = gradients(module, tokens, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    trained = expected + z_loss * logits.logsumexp(-1)[labels != IGNORED].square().mean()
    wanted = dict(zip(found, torch.autograd.grad(trained, [module.get_parameter(key) for key in found]), strict=True))
    largest = max(grad.abs().max() for grad in wanted.values())  # a key's bias has none but rounding
    for key, grad in found.items():
        assert (grad - wanted[key]).abs().max() < 1e-12 * largest, key


@EVERY_DENSE_MODEL
@ATTENTION
def test_each_layer_site_and_head_draws_its_own_dropout(name: str, attention: str) -> None:
    run = run_of(name, train__attention=attention, model__dropout=0.3)
    module, (tokens, labels), keys = module_of(run), batch_of(run), keys_of()

    def drop(states: Any, x: Any, layer: int, site: str, head: int | None = None) -> Any:
        address = hash64(layer, site)
        rows = splitmix64(states + address)
        return dropout(x, 0.3, rows if head is None else splitmix64(rows + torch.tensor(address) * (head + 1)))

    rows = zip(tokens, keys.states, strict=True)
    logits = torch.stack([written_out(run.model, dict(module.named_parameters()), row, partial(drop, states)) for row, states in rows])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss, _ = gradients(module, tokens, labels, keys=keys)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
