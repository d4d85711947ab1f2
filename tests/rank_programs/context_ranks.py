"""Ranks that split every sequence compare attention and whole models with one rank that has the whole sequences, in float64.

Run by path with the number of ranks. Prints a line of JSON: {case: the largest difference on any rank}.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distrain.tests.rank_programs.tensor_ranks import Comparisons, main
from distrain.trainer.layers.counter_rng import dropout_keys, dropout_mask
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.layers.rank_group import Group
from distrain.trainer.layers.transformer.context_parallel import AttentionCore, ContextParallel, context_attention
from distrain.trainer.layers.transformer.core_attention import (
    FlashCore,
    FusedCore,
    ScoresCore,
    attention_weights,
    flash_attention,
    weighted_values,
)
from distrain.trainer.layers.transformer.document_attention import DocumentCore
from distrain.trainer.layers.transformer.document_bounds import document_bounds
from distrain.trainer.layers.transformer.document_mask import document_mask, document_starts
from distrain.trainer.layers.transformer.transformer import Transformer
from distrain.trainer.models.build import build_model, build_module
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train

B, S, A, D = 2, 48, 6, 8  # batch, sequence, heads, head_dim
P = 0.3  # of dropout
CPU = torch.device("cpu")
KINDS = ("flash", "fused", "scores", "scores with dropout", "documents")
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "act": "swiglu", "positions": "rope"}
LATENT: dict[str, Any] = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
LINEAR: dict[str, Any] = {"full_attention_interval": 2, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "qk_norm": True}
LINEAR |= {"linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 4, "shared_experts": 1}
MODELS = {
    "gpt": Model(family="gpt", layers=2, hidden=48, heads=6, vocab=101, bias=True, tied=True),
    "mla": Model(family="mla", layers=2, hidden=48, heads=6, vocab=101, ffn=32, experts=3, top_k=2, **LATENT, **LLAMA),
    "hybrid": Model(family="hybrid", layers=4, hidden=48, heads=6, kv_heads=3, vocab=101, ffn=32, experts=3, top_k=2, **LINEAR, **LLAMA),
    "llama": Model(family="llama", layers=2, hidden=48, heads=6, kv_heads=2, vocab=101, **LLAMA),
}
# Of models whose ranks exchange tokens for heads: family, kernel, recomputation, dropout and further keys. Three ranks with one key head
# have a copy each.
EXCHANGED: tuple[tuple[str, str, str, float, dict[str, object]], ...] = (
    ("gpt", "flash", "none", 0.0, {}),
    ("gpt", "math", "selective", P, {}),
    ("mla", "flash", "selective", 0.0, {}),
    ("mla", "math", "full", P, {}),
    ("hybrid", "math", "full", P, {}),
    ("llama", "flash", "full", 0.0, {"model__kv_heads": 1}),
    ("llama", "math", "none", P, {"model__kv_heads": 1, "model__window": 10}),
    ("llama", "flash", "selective", 0.0, {"model__kv_heads": 3, "model__window": 10}),
    ("llama", "flash", "none", 0.0, {"model__kv_heads": 1, "model__window": 10, "model__sinks": True}),
    ("llama", "math", "selective", P, {"model__kv_heads": 3, "model__sinks": True}),
)


# Of models whose kernel takes the bounds of documents: family, recomputation and further keys.
BY_BOUNDS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("gpt", "full", {}),
    ("mla", "none", {}),
    ("hybrid", "none", {}),
    ("llama", "selective", {"model__kv_heads": 3}),
    ("llama", "full", {"model__kv_heads": 3, "model__window": 10}),
)


# Of models whose ranks gather the keys of a window that is shorter than the sequence: family, kernel, recomputation, dropout, whether
# documents are kept apart by a mask, further keys. Three ranks have chunks of 8 tokens.
GATHERED: tuple[tuple[str, str, str, float, bool, dict[str, object]], ...] = (
    ("llama", "flash", "none", 0.0, False, {"model__window": 10}),
    ("llama", "flash", "selective", 0.0, False, {"model__window": 3, "model__kv_heads": 3}),
    ("mla", "flash", "full", 0.0, False, {"model__window": 21}),
    ("gpt", "flash", "none", 0.0, True, {"model__window": 10}),
    ("llama", "math", "none", P, False, {"model__window": 10}),
    ("gpt", "math", "selective", 0.0, True, {"model__window": 3}),
)


class AttentionInputs(NamedTuple):
    """The inputs of attention: three tensors [B, S, A or N, D], the mask added to the scores, the dropout states of each head's rows."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    states: Tensor


def random_documents() -> Tensor:
    """Return document numbers [B, S], in which a new document begins at about every seventh token."""
    return torch.cumsum((torch.rand(B, S) < 0.15).long(), dim=1)


def unsplit_attention(inputs: AttentionInputs, kind: str) -> Tensor:
    """Return the values [B, S, A, D] that one rank computes."""
    query, key, value = (each.transpose(1, 2) for each in inputs[:3])
    if kind in ("flash", "fused", "documents"):
        return flash_attention(query, key, value, inputs.mask).transpose(1, 2)
    weights = attention_weights(query, key, inputs.mask)
    if kind == "scores with dropout":
        weights = weights.masked_fill(dropout_mask(inputs.states, S, P), 0.0) / (1.0 - P)
    return weighted_values(weights, value).transpose(1, 2)


def core_of(kind: str, context: ContextParallel, states: Tensor, documents: Tensor) -> AttentionCore:
    """Return the core of one of KINDS."""
    match kind:
        case "documents":
            return DocumentCore(context, document_bounds(documents))
        case "flash":
            return FlashCore(context)
        case "fused":
            return FusedCore(context)
        case "scores":
            return ScoresCore(context, 0.0, None)
    return ScoresCore(context, P, lambda seq: dropout_mask(states, seq, P))


def attention(context: ContextParallel, heads: int, documents_apart: bool, kind: str, recompute: bool) -> Comparisons:
    """Compare the values of this rank's queries, and their gradients, with one rank's."""
    query, key, value, grad = (torch.randn(B, S, many, D, dtype=torch.float64, requires_grad=True) for many in (A, heads, heads, A))
    states, documents = torch.randint(-(2**62), 2**62, (B, A, S)), random_documents()
    own = context.positions(S, CPU)
    masks = [
        document_mask(document_starts(documents)[:, places], places, S, torch.float64) if documents_apart else None
        for places in (torch.arange(S), own)
    ]
    values = unsplit_attention(AttentionInputs(query, key, value, masks[0], states), kind)
    expected = (values, *torch.autograd.grad(values, (query, key, value), grad))

    mine = tuple(each.detach()[:, own].requires_grad_() for each in (query, key, value))
    query, key, value = (each.transpose(1, 2) for each in mine)
    core: Any = core_of(kind, context, states[:, :, own], documents if documents_apart else torch.zeros_like(documents))
    forward, calls = core.forward, [0.0]

    def counted_forward(*given: Any) -> Any:
        calls[0] += 1
        return forward(*given)

    core.forward = counted_forward
    mask = None if kind == "documents" else masks[1]
    made = context_attention(query, key, value, mask, core, context, recompute=recompute)
    found = (made, *torch.autograd.grad(made, mine, grad[:, own]))
    yield "the core's forwards", torch.tensor(calls), torch.tensor([2.0 if recompute or kind == "fused" else 1.0])
    for what, ours, theirs in zip(("values", "by query", "by key", "by value"), found, expected, strict=True):
        yield what, ours, theirs[:, own]


def run_of(name: str, **changes: object) -> Run:
    """Return a run of one of MODELS with keys changed, as parallel__recompute="full"."""
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    train = Train(batch=B, microbatch=B, seq=S, steps=1, precision="fp32")
    run = Run(name=name, model=MODELS[name], cluster=cluster, parallel=Parallel(), train=train)
    return with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()])


def whole_model(
    context: ContextParallel,
    name: str,
    kernel: str,
    recompute: str,
    p: float,
    apart_by_bounds: bool,
    has_documents: bool,
    **changes: object,
) -> Comparisons:
    """Compare the sum of losses and the gradient of every weight, of which each rank computes a part, with those of one rank's mask."""
    run = run_of(name, train__attention=kernel, parallel__recompute=recompute, model__dropout=p, **changes)
    module = build_model(run, device=CPU, dtype=torch.float64, seed=5)
    with torch.no_grad():
        for number, sinks in enumerate(each for key, each in module.named_parameters() if key.endswith(".sinks")):
            sinks.copy_(torch.arange(A) / 4 + number - 1)
    tokens, labels, documents = *torch.randint(101, (2, B, S)), random_documents() if has_documents else None
    labels[:, 3:7] = IGNORED
    theirs = gradients(module, tokens, labels, documents, p)
    other = build_module(dict(module.named_parameters()), run, cp=context)
    ours = gradients(other, context.shard(tokens), context.shard(labels), documents, p, apart_by_bounds=apart_by_bounds)
    for what, part in ours.items():
        dist.all_reduce(part, group=context.group.handle)
        yield what, part, theirs[what]


def gradients(
    module: Transformer, tokens: Tensor, labels: Tensor, documents: Tensor | None, p: float, *, apart_by_bounds: bool = False
) -> dict[str, Tensor]:
    """Return the sum of losses, the number of labels that are not ignored, and the gradient of the sum by each weight. Documents are kept
    apart by a mask, or by their bounds."""
    keyed = dropout_keys(1, 0, torch.arange(B), torch.arange(S)) if p else None
    bounds = document_bounds(documents) if apart_by_bounds and documents is not None else None
    loss, counted = module(tokens, labels, documents=documents, bounds=bounds, keys=keyed)
    held = dict(module.named_parameters())
    found = dict(zip(held, torch.autograd.grad(loss / B / S, list(held.values())), strict=True))
    return {"loss": loss.detach().clone(), "labels": counted, **found}


def compare_gathered(context: ContextParallel) -> Comparisons:
    """Compare a tensor that was split and gathered again with itself."""
    whole = torch.randn(B, S, 3, dtype=torch.float64)
    yield "gathered", context.gather(context.shard(whole)), whole


def differences(group: Group) -> dict[str, float]:
    """Return the largest difference of each case on any rank."""
    context = ContextParallel(group=group)
    checks = {
        f"{kind}, {heads} key heads, {'documents, ' * documents_apart}{'recomputed' if recompute else 'saved'}": partial(
            attention, context, heads, documents_apart, kind, recompute
        )
        for heads, documents_apart, kind, recompute in product((A, 2), (False, True), KINDS, (False, True))
    }
    models = product(MODELS, (("flash", 0.0), ("math", P)), ("none", "selective", "full"))
    checks |= {
        f"{name} {kernel} {recompute} {p} model": partial(whole_model, context, name, kernel, recompute, p, False, True)
        for name, (kernel, p), recompute in models
    }
    swapped = replace(context, exchanges_heads=True)
    checks |= {
        f"{name} {recompute} {changes} model by bounds{', exchanged' * group.exchanges_heads}": partial(
            whole_model, group, name, "flash", recompute, 0.0, True, True, **changes
        )
        for (name, recompute, changes), group in product(BY_BOUNDS, (context, swapped))
    }
    checks |= {
        f"{name} {kernel} {recompute} {p} {changes} exchanged": partial(
            whole_model, swapped, name, kernel, recompute, p, False, True, **changes
        )
        for name, kernel, recompute, p, changes in EXCHANGED
    }
    checks |= {
        f"{name} {kernel} {recompute} {p} {has_documents} {changes} gathered": partial(
            whole_model, context, name, kernel, recompute, p, False, has_documents, **changes
        )
        for name, kernel, recompute, p, has_documents, changes in GATHERED
    }
    checks["gathered"] = partial(compare_gathered, context)
    found: dict[str, float] = {}
    for what, check in checks.items():
        torch.manual_seed(7)
        most = torch.zeros((), dtype=torch.float64)
        for part, ours, theirs in check():
            assert ours.shape == theirs.shape, f"{what}: {part} is {tuple(ours.shape)} for {tuple(theirs.shape)}"
            most = torch.maximum(most, (ours.double() - theirs.double()).detach().abs().max())
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group.handle)
        found[what] = most.item()
    return found


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), differences))
