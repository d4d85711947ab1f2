"""The torch modules match the op table: names, shapes and count of weights, FLOPs, and saved activations."""

from __future__ import annotations

from dataclasses import astuple, replace
from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402

from distrain.tests.fakes.small_models import CPU, MODELS, run_of  # noqa: E402
from distrain.trainer.layers.counter_rng import dropout_keys  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.models.families import FAMILIES, op_table  # noqa: E402
from distrain.trainer.models.hybrid.ops import LINEAR  # noqa: E402
from distrain.trainer.models.mla.ops import LATENT  # noqa: E402
from distrain.trainer.models.ops.op_table import (  # noqa: E402
    Op,
    OpTable,
    Tensor,
    element_count,
    forward_flops,
    is_frozen,
    model_parameters,
    parameter_count,
    round_up,
)
from distrain.trainer.parallel.saved_bytes import count_saved_tensors  # noqa: E402
from distrain.trainer.plan.costs.cost_context import CostContext  # noqa: E402
from distrain.trainer.spec.run import Model, Run, Train  # noqa: E402
from distrain.trainer.spec.sections.lora import Lora  # noqa: E402
from distrain.trainer.spec.sections.router import Router  # noqa: E402

LOGITS = ("seq", "batch", "vocab")
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def table_of(run: Run) -> OpTable:
    return op_table(run)


def batch_of(run: Run) -> tuple[Any, Any]:
    shape = run.train.microbatch, run.train.seq
    return torch.randint(run.model.vocab, shape), torch.randint(run.model.vocab, shape)


# Written by hand, independently of the op table: GPT-2's shapes as Conv1D has them.
BY_HAND = {
    "embedding.weight": (101, 48),
    "positions.weight": (40, 48),
    **{f"layers.{index}.{name}": shape for index in range(2) for name, shape in {
        "norm1.weight": (48,), "norm1.bias": (48,),
        "attention.query.weight": (48, 48), "attention.query.bias": (48,),
        "attention.key.weight": (48, 48), "attention.key.bias": (48,),
        "attention.value.weight": (48, 48), "attention.value.bias": (48,),
        "attention.out.weight": (48, 48), "attention.out.bias": (48,),
        "norm2.weight": (48,), "norm2.bias": (48,),
        "mlp.up.weight": (48, 192), "mlp.up.bias": (192,),
        "mlp.down.weight": (192, 48), "mlp.down.bias": (48,),
    }.items()},
    "norm.weight": (48,), "norm.bias": (48,),
}  # fmt: skip


def test_the_weights_of_gpt_match_a_list_written_by_hand() -> None:
    module = build_model(run_of("gpt"), device=CPU, dtype=torch.float32)
    assert {name: tuple(each.shape) for name, each in module.named_parameters()} == BY_HAND


@EVERY_MODEL
def test_every_weight_has_the_name_and_shape_of_the_op_table(name: str) -> None:
    run = run_of(name)
    table = table_of(run)
    size = {**table.sizes, "vocab": round_up(run.model.vocab, run.model.vocab_multiple)}
    expected = {each.name: each.shape(size) for each in model_parameters(table, range(run.model.layer_groups))}
    module = build_model(run, device=torch.device("meta"), dtype=torch.float32)
    assert {name: tuple(each.shape) for name, each in module.named_parameters()} == expected
    frozen = {each.name for each in model_parameters(table, range(run.model.layer_groups)) if each.frozen}
    assert {name for name, each in module.named_parameters() if not each.requires_grad} == frozen


@EVERY_MODEL
def test_a_module_has_as_many_parameters_as_the_op_table_counts(name: str) -> None:
    run = run_of(name, model__vocab_multiple=1)
    module = build_model(run, device=torch.device("meta"), dtype=torch.float32)
    assert sum(each.numel() for each in module.parameters()) == parameter_count(table_of(run), run.model.layer_groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_named_parameters_add_up_to_the_parameter_count(family: str) -> None:
    model = Model(family=family, layers=3, hidden=48, heads=4, vocab=101, experts=4, top_k=2, shared_experts=1, tied=True, bias=True)
    sizes: dict[str, Any] = dict.fromkeys(LATENT, 6) if family == "mla" else dict.fromkeys(LINEAR, 1) if family == "hybrid" else {}
    model = replace(model, **sizes)
    table = FAMILIES[family].table(model, Train(batch=1, seq=8))
    assert sum(prod(each.shape(table.sizes)) for each in model_parameters(table, range(3))) == parameter_count(table, 3)


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    assert [round_up(101, each) for each in (1, 64, 101)] == [101, 128, 101]


def as_many(query: Any, *others: Any) -> list[tuple[int, ...]]:
    """Return shapes of keys and values with as many heads as queries have: torch 2.11 counts no others."""
    return [(each[0], query[1], *each[2:]) for each in others]


# torch's counter knows the fused kernels of GPUs, but not the CPU's, which are added here. The counter and the op table both count
# causal attention in full: the half that a causal kernel skips is the table's `computed`.
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, *as_many(q, k, v)),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad, q, *as_many(q, k, v)
    ),
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hybrid"])  # whose chunks compute more: test_hybrid.py
@pytest.mark.parametrize("attention", ["math", "flash"])
def test_torch_counts_the_flops_of_the_op_table(name: str, attention: str) -> None:
    run = run_of(name, train__attention=attention, model__vocab_multiple=1)
    assert counted_flops(run) == planned_flops(run)


def planned_flops(run: Run) -> float:
    """Return the FLOPs of a forward and a backward pass without recomputation, by the op table."""
    table = table_of(run)
    expected = sum(
        many * forward_flops(op, table.sizes) * (op.product.backward if is_frozen(op) else 1 + op.product.backward)
        for many, ops in table.blocks(run.model.layer_groups)
        for op in ops
        if op.product
    )
    return expected + flops_with_padding(table, run)


def counted_flops(run: Run) -> int:
    """Return the FLOPs of a forward and a backward pass."""
    module = build_model(run, device=CPU, dtype=torch.float32, seed=1)
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        module(*batch_of(run))[0].backward()
    flops: int = counter.get_total_flops()
    return flops


def flops_with_padding(table: OpTable, run: Run) -> float:
    """Return the FLOPs with the zeros to which the CPU's fused kernel pads values that are narrower than keys: 2 products forward, 5
    backward."""
    narrower = table.sizes.get("query_dim", table.sizes["head_dim"]) - table.sizes["head_dim"]
    pairs = run.model.layers * element_count(("batch", "heads", "seq", "seq"), table.sizes)
    return 2 * pairs * narrower * (1 + 2.5) if run.train.attention == "flash" else 0.0


def planned_saved_bytes(run: Run) -> int:
    """Return the bytes that a forward pass of our modules saves, by the op table."""
    table = table_of(run)
    size = {**table.sizes, "vocab": round_up(run.model.vocab, run.model.vocab_multiple)}
    width = {"fp32": 4, "bf16": 2}[run.train.precision]

    def bytes_of(tensors: tuple[Tensor, ...]) -> int:
        return sum(element_count(tensor.dims, size) * (tensor.width or width) for tensor in tensors)

    def layer(ops: tuple[Op, ...]) -> int:
        match run.parallel.recompute:
            case "full":
                return bytes_of((Tensor(("batch", "seq", "hidden")),))
            case "selective":
                return sum(bytes_of(op.saves_torch) for op in ops if not op.core)
            case _:
                return sum(bytes_of(op.saves_torch) for op in ops)

    ends, dense = sum(bytes_of(op.saves_torch) for op in table.embedding + table.head), table.dense_layers
    return ends + dense * layer(table.dense_layer) + (run.model.layer_groups - dense) * layer(table.layer)


def measured_saved_bytes(run: Run) -> int:
    """Return the bytes that a forward pass of our modules saves, measured."""
    module = build_model(run, device=CPU, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[run.train.precision], seed=1)
    batch = batch_of(run)
    keyed = dropout_keys(1, 0, torch.arange(run.train.microbatch), torch.arange(run.train.seq))
    with count_saved_tensors(module.parameters(), batch, [keyed.states]) as saved:
        loss, _ = module(*batch, keys=keyed)
    assert loss.requires_grad  # and its graph is alive
    return saved.bytes


@EVERY_MODEL
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torch_saves_the_bytes_of_the_op_table(name: str, recompute: str, attention: str, dropout: float, precision: str) -> None:
    changes = {"parallel__recompute": recompute, "train__attention": attention, "model__dropout": dropout, "train__precision": precision}
    run = run_of(name, **changes)
    assert measured_saved_bytes(run) == planned_saved_bytes(run)


@EVERY_MODEL
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"])
def test_torch_saves_the_bytes_of_the_op_table_for_every_activation(name: str, act: str) -> None:
    run = run_of(name, model__act=act)
    assert measured_saved_bytes(run) == planned_saved_bytes(run)


@EVERY_MODEL
@pytest.mark.parametrize(("microbatch", "seq"), [(1, 24), (1, 1), (5, 7), (2, 40)])
def test_torch_saves_the_bytes_of_the_op_table_for_every_shape(name: str, microbatch: int, seq: int) -> None:
    for attention in ("flash", "math"):
        run = run_of(name, train__batch=microbatch, train__microbatch=microbatch, train__seq=seq, train__attention=attention)
        assert measured_saved_bytes(run) == planned_saved_bytes(run)


@EVERY_MODEL
@pytest.mark.parametrize("window", [1, 5, 8, 17, 23, 24])
def test_torch_saves_the_bytes_of_the_op_table_with_a_window(name: str, window: int) -> None:
    for attention, recompute, dropout, precision in (
        ("flash", "none", 0.0, "fp32"),
        ("flash", "selective", 0.0, "fp32"),
        ("flash", "full", 0.0, "bf16"),
        ("flash", "none", 0.1, "fp32"),
        ("math", "none", 0.0, "fp32"),
        ("math", "selective", 0.1, "bf16"),
        ("math", "full", 0.0, "fp32"),
        ("flash", "full", 0.1, "fp32"),
    ):
        keys = {"train__attention": attention, "parallel__recompute": recompute, "model__dropout": dropout, "train__precision": precision}
        run = run_of(name, train__seq=24, model__window=window, **keys)
        assert measured_saved_bytes(run) == planned_saved_bytes(run), (attention, recompute, dropout, precision)


ROUTERS = [
    Router(score=score, normalize=normalize, scale=scale, groups=groups, bias=bias)
    for score in ("softmax", "sigmoid")
    for normalize in (True, False)
    for scale in (1.0, 2.5)
    for groups in (1, 2)
    for bias in (False, True)
]
ROUTERS += [Router(score=score, normalize=normalize, z_loss=0.1) for score in ("softmax", "sigmoid") for normalize in (True, False)]


@pytest.mark.parametrize("aux_loss", [0.0, 0.1])
@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: "-".join(map(str, astuple(router))))
def test_torch_saves_the_bytes_of_the_op_table_for_every_router(router: Router, aux_loss: float) -> None:
    run = run_of("moe", model__router=router, model__aux_loss=aux_loss, train__precision="bf16")
    counts = 8 * run.train.microbatch if run.model.adds_router_loss else 0  # labels of each sequence
    assert measured_saved_bytes(run) == planned_saved_bytes(run) + counts


# fmt: off
FROZEN: tuple[tuple[str, Any, dict[str, Any]], ...] = (  # model, targets: None, all linear layers; other keys
    ("moe",     None,                       {"shared_experts": 1, "dense_layers": 1}),
    ("moe",     ("query",),                 {"shared_experts": 1}),
    ("moe",     ("gate",),                  {"shared_experts": 1, "aux_loss": 0.1}),
    ("moe",     ("up", "down"),             {"act": "relu"}),
    ("gpt-oss", ("gate", "out"),            {}),
    ("mla",     None,                       {"shared_experts": 1}),
    ("mla",     ("q_a_proj", "kv_b_proj"),  {}),
    ("mla",     ("query",),                 {"q_lora_rank": 0}),
    ("mla",     ("kv_a_proj_with_mqa",),    {"q_lora_rank": 0}),
    ("mla",     ("query", "kv_a_proj_with_mqa"), {"q_lora_rank": 0}),
    ("nano",    ("query",),                 {}),
    ("gemma3",  ("down",),                  {"window": 8}),
)
# fmt: on


@pytest.mark.parametrize(("name", "targets", "keys"), FROZEN, ids=str)
def test_a_frozen_product_saves_its_input_for_a_alone_or_as_what_another_op_returned(name: str, targets: Any, keys: Any) -> None:
    changes: dict[str, Any] = {f"model__{key}": value for key, value in keys.items()}
    for recompute in ("none", "selective"):
        run = run_of(name, model__lora=Lora(rank=3, targets=targets), **changes, parallel__recompute=recompute)
        counts = 8 * run.train.microbatch if run.model.adds_router_loss else 0
        assert measured_saved_bytes(run) == planned_saved_bytes(run) + counts, recompute
    whole = run_of(name, model__lora=Lora(rank=3, targets=targets), **changes)
    assert counted_flops(whole) == planned_flops(whole)


@EVERY_MODEL
def test_a_loss_in_chunks_saves_no_logits_and_computes_them_twice(name: str) -> None:
    run, whole = (run_of(name, train__loss_chunks=chunks, model__vocab_multiple=1) for chunks in (5, 1))
    size = table_of(run).sizes
    kept = 4 * element_count(("seq", "batch", "hidden"), size) if run.model.lora.rank else 0  # the input of a frozen head too
    assert measured_saved_bytes(run) == planned_saved_bytes(run) == planned_saved_bytes(whole) - 4 * element_count(LOGITS, size) + kept
    again = CostContext(run).recompute_flops_per_token("none") * size["seq"] * size["batch"]
    assert counted_flops(run) - counted_flops(whole) == again == 2 * element_count((*LOGITS, "hidden"), size)


def test_a_storage_is_counted_once_while_it_is_alive() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    with count_saved_tensors([w]) as saved:
        y = (x @ w).exp()  # x (w lives anyway), then exp's result
        z = y.view(4, 8) * y.view(4, 8).cos()  # y again, and its cosine
    assert saved.bytes == 4 * (8 * 16 + 8 * 4 + 8 * 4)
    del y, z
    assert saved.bytes == 4 * 8 * 16  # x, which is still here
