"""Bytes that the passes, and the optimizer's step, hold for a moment: closed forms, one mechanism a test."""

from dataclasses import replace
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.planned_memory import DEVICE, GIB, gpt, memory_of, run_of
from distrain.trainer.layers import cross_entropy
from distrain.trainer.models.families import op_table
from distrain.trainer.plan.costs.block_temporary_bytes import LOGITS_AT_A_TIME, op_bytes
from distrain.trainer.plan.costs.local_tensors import LocalTensors, block_split
from distrain.trainer.plan.plan_data import MemoryBytes
from distrain.trainer.spec.run import Device, Model
from distrain.trainer.spec.sections.lora import Lora

H, F, V, S = 1024, 4096, 50000, 2048
LLAMA: dict[str, Any] = {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope", "kv_heads": 8, "ffn": F}
CUDA, CPU = (
    Device(**{name: getattr(DEVICE, name) for name in ("name", "memory", "bandwidth", "peak", "units", "context")}, kind=kind)
    for kind in ("cuda", "cpu")
)


def stage_bytes(model: Model, stage: int = -1, ranks: int = 1, **changes: Any) -> MemoryBytes:
    """Return the bytes of a stage of a run whose step has two micro-batches of one sequence."""
    keys = {"engine": "auto", "cluster__device": CUDA, "train__precision": "bf16", "train__attention": "flash", "train__batch": 2 * ranks}
    return memory_of(run_of(model, ranks, **keys | changes)).stages[stage].bytes


def test_on_a_gpu_the_logits_gradient_takes_the_logits_place() -> None:
    """The head's backward then holds the gradients of its input and of its weight beside them; the loss's float32 of each row is gone."""
    model = gpt(1, 64, 4, vocab=V, dropout=0.0, tied=False)
    assert stage_bytes(model).temporary == 2 * (S * 64 + 64 * V) - 4 * S


def test_on_a_cpu_the_loss_makes_the_logits_gradient_from_some_rows_in_float32_at_a_time() -> None:
    """Two chunks of float32 where one has all rows, else three: the softmax of the chunk before is alive while the next is made."""
    model = gpt(1, 16, 4, vocab=V, dropout=0.0, tied=False)
    few, rows = 16, 2**20 // V
    cpu: dict[str, Any] = {"cluster__device": CPU, "train__precision": "fp32", "engine": "native"}
    assert stage_bytes(model, train__seq=few, **cpu).temporary == few * V * 4 + 2 * (few * V * 4)
    assert stage_bytes(model, **cpu).temporary == S * V * 4 + 3 * (rows * V * 4)


def test_a_loss_in_chunks_holds_the_logits_of_one_and_the_gradients_of_the_heads_input_and_weight() -> None:
    """The chunks are of a multiple of eight columns. On a CPU it holds the float32 of some rows of one besides."""
    model, chunk = gpt(1, 64, 4, vocab=V, dropout=0.0, tied=False), 7144
    held = stage_bytes(model, train__loss_chunks=7)
    assert held.logits == 0
    assert held.temporary == 2 * (S * chunk + S * 64 + 64 * V)
    frozen = replace(model, lora=Lora(rank=1, targets=("query",)))
    assert stage_bytes(frozen, train__loss_chunks=7).temporary == 2 * (S * chunk + S * 64)
    cpu = stage_bytes(model, cluster__device=CPU, train__precision="fp32", engine="native", train__loss_chunks=7)
    assert cpu.temporary == 4 * (S * chunk + S * 64 + 64 * V + 3 * (2**20 // chunk) * chunk)


def test_the_planned_chunks_of_logits_are_those_of_the_loss() -> None:
    assert cross_entropy._CHUNK["cpu"] == LOGITS_AT_A_TIME


def test_a_gated_feed_forwards_backward_holds_three_wide_gradients_and_has_freed_one() -> None:
    """The gradients of the product, of the gate and of its factor; the down projection's input is freed; the residual stream's waits."""
    model = Model(**LLAMA, layers=4, hidden=H, heads=8, vocab=512)
    assert stage_bytes(model, 0, ranks=4, parallel__pp=4, train__batch=8).temporary == 2 * S * F * 2 + S * H * 2


def test_a_recomputed_layer_is_held_again() -> None:
    model = Model(**LLAMA, layers=4, hidden=H, heads=8, vocab=512)
    keys: dict[str, Any] = {"ranks": 4, "parallel__pp": 4, "train__batch": 8}
    kept, full = stage_bytes(model, 0, **keys), stage_bytes(model, 0, **keys, parallel__recompute="full")
    flights = 4
    layer = (kept.activations - full.activations) // flights
    assert full.temporary == kept.temporary + layer


def test_a_tied_weights_gradient_waits_for_the_embeddings_and_both_are_added() -> None:
    """With little else to hold: the head's, the embedding's and their sum, beside the gradient of the hidden states."""
    model = gpt(1, H, 16, vocab=V, dropout=0.0)
    tied = stage_bytes(model, train__seq=64, train__precision="fp32", parallel__zero=0, train__batch=4096)
    kept = tied.activations + tied.logits
    assert tied.temporary + kept == pytest.approx(3 * V * H * 4 + 64 * H * 4, rel=0.01)


@pytest.mark.parametrize(
    ("zero", "precision", "gradients", "each"),
    [(1, "bf16", "auto", 6), (2, "bf16", "auto", 6), (3, "bf16", "auto", 6), (3, "bf16", "fp32", 4), (1, "fp32", "auto", 4)],
)
def test_the_optimizers_step_holds_flat_gradients_and_their_float32_copy(zero: int, precision: str, gradients: str, each: int) -> None:
    """Where that is more than activations: 22 bytes a parameter at the most with bf16, not 16."""
    model = Model(**LLAMA, layers=64, hidden=2048, heads=16, vocab=512)
    stage = stage_bytes(model, engine="zero", train__seq=16, parallel__zero=zero, train__precision=precision, train__gradients=gradients)
    parameters = memory_of(run_of(model, 1)).stages[0].parameters
    assert stage.activations + stage.logits + stage.temporary == pytest.approx(each * parameters, rel=1e-3)
    assert stage.total > 4 * GIB


def test_a_byte_that_fp8_keeps_is_no_mask_of_a_dropout() -> None:
    """A dropout draws twelve bytes for each byte of its mask; a cast holds nothing so long."""
    run = load_recipe("gpt2_124m_1gpu", ["train.precision=fp8", "engine=native", "model.dropout=0.1"])
    table, split = op_table(run), block_split(run.parallel, 1, "torch", fused=False)
    local = LocalTensors(table, split, vocab_multiple=run.model.vocab_multiple, activation=2, form="torch")
    held = {op.name: op_bytes(op, local, "cuda").forward for op in table.layer}
    assert held["mlp.residual"] == 14 * run.train.seq * run.model.hidden
    assert not any(held[op.name] for op in table.layer if op.in_fp8)


def test_compiled_layers_save_what_the_papers_count_and_the_loss_is_not_compiled() -> None:
    model = Model(**LLAMA, layers=4, hidden=H, heads=8, vocab=V)
    ours, compiled, papers = stage_bytes(model), stage_bytes(model, train__compile=True), stage_bytes(model, engine="papers")
    assert compiled.activations < ours.activations
    assert compiled.activations == pytest.approx(papers.activations, rel=0.005)
    assert (compiled.logits, compiled.temporary) == (ours.logits, ours.temporary)
    assert papers.temporary == 0
    assert stage_bytes(model, train__compile=True, parallel__zero=3).activations == ours.activations


def test_gradients_are_reduced_from_two_buckets_in_turn_where_messages_overlap() -> None:
    model = Model(**LLAMA, layers=4, hidden=H, heads=8, vocab=512)
    two, one = (stage_bytes(model, 0, ranks=2, parallel__zero=2, parallel__overlap__data=each) for each in (True, False))
    assert two.buffers - one.buffers == one.buffers == 2 * 50_000_000


def test_offloaded_optimizers_step_on_the_host() -> None:
    model = Model(**LLAMA, layers=64, hidden=2048, heads=16, vocab=512)
    here, there = (
        stage_bytes(model, engine="zero", train__seq=16, parallel__zero=2, parallel__offload__optimizer=each) for each in (False, True)
    )
    assert there.temporary < here.temporary / 10


@pytest.mark.parametrize(("sequences", "inputs"), [(1, 2), (2, 3)])
def test_a_head_that_gathers_a_split_sequence_holds_its_input_whole(sequences: int, inputs: int) -> None:
    """Beside the input's gradient; of several sequences one of them once more, in the order of ranks."""
    model = gpt(1, 64, 4, vocab=V, dropout=0.0, tied=False)
    keys: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence": True, "train__microbatch": sequences, "train__batch": 4}
    rows = sequences * S
    assert stage_bytes(model, ranks=2, **keys).temporary == 2 * (inputs * rows * 64 + 64 * V // 2) - 4 * rows
    chunked = stage_bytes(model, ranks=2, train__loss_chunks=5, **keys)  # whose input's gradient is sent when no logits are held
    assert chunked.temporary == 2 * (2 * rows * 64 + 64 * V // 2 + rows * V // 10)
