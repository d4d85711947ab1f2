"""Seconds of an operator on one device: what the planner takes for the halves of a backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.costs.block_costs import HOST_WAITS, dispatched_seconds
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.costs.local_tensors import LocalTensors, block_split
from distrain.trainer.plan.costs.op_seconds import OpSeconds, op_kernels, op_seconds
from distrain.trainer.plan.costs.roofline import rates
from distrain.trainer.spec.run import Device

SMALL = ("train.precision=fp32", "model.hidden=192", "model.heads=4", "train.seq=128", "train.microbatch=2")
CPU = Device(name="cpu", kind="cpu", memory=8e9, bandwidth=12e9, peak={"fp32": 52e9})
GPU = Device(name="A100", kind="cuda", memory=80e9, bandwidth=2e12, peak={"fp32": 19.5e12}, units=108)


def linear_seconds(device: Device) -> list[OpSeconds]:
    """The seconds of each linear layer of a small model on a device."""
    run = load_recipe("quickstart", SMALL)
    run = replace(run, cluster=replace(run.cluster, device=device))
    table, known = CostContext(run).table, rates(device, "fp32", fused=False)
    assert known is not None
    split = block_split(run.parallel, run.train.microbatch, "torch", fused=False)
    local = LocalTensors(table, split, vocab_multiple=run.model.vocab_multiple, activation=4, form="torch")
    found = [op_seconds(op, local, known, 4) for op in table.layer if op.product and op.weights]
    assert len(found) == 4
    return found


def test_on_a_cpu_the_three_products_of_a_linear_layer_take_equally_long() -> None:
    """No multiprocessors share out tiles there; torch's took 10.6, 10.4 and 10.6 ms for these layers, four times over."""
    for each in linear_seconds(CPU):
        assert each.forward == each.input_gradients == each.weight_gradients > 0


def test_on_a_gpu_each_product_fits_its_tiles_in_its_own_way() -> None:
    assert any(len(set(each)) == 3 for each in linear_seconds(GPU))


def softmax_seconds(*overrides: str) -> tuple[float, int]:
    """The seconds of the forward of a rank's softmax as Megatron-LM computes it, and its kernels."""
    run = load_recipe("gpt2_124m", ["train.attention=math", "model.heads=16", "model.hidden=1024", "train.precision=fp16", *overrides])
    device = Device(name="A100", kind="cuda", memory=80e9, bandwidth=2e12, peak={"fp16": 312e12}, units=108, launch=1e-6, streaming=1.0)
    known, table = rates(device, "fp16", fused=True), CostContext(run).table
    assert known is not None
    split = block_split(run.parallel, run.train.microbatch, "megatron", fused=True)
    local = LocalTensors(table, split, vocab_multiple=1, activation=2, form="megatron")
    (softmax,) = (op for op in table.layer if op.name == "attention.softmax")
    return op_seconds(softmax, local, known, 2).forward, op_kernels(softmax, local)


def test_megatrons_fused_softmax_takes_four_heads_at_a_time() -> None:
    """Two heads a rank: cast, scale, mask, softmax and cast back are kernels of their own, and move 36 bytes a score for 4."""
    parts, many = softmax_seconds("parallel.tp=8", "train.microbatch=1", "model.dropout=0")
    fused, one = softmax_seconds("parallel.tp=8", "train.microbatch=2", "model.dropout=0")
    assert (many, one) == (5, 1)
    scores = 2 * 1024**2  # of one sequence
    assert parts == pytest.approx(36 * scores / 2e12 + 5e-6)
    assert fused == pytest.approx(4 * 2 * scores / 2e12 + 1e-6)


def test_ops_beside_a_host_that_is_as_slow_take_longer_than_either() -> None:
    """Short kernels wait for the host where its lead is short; where one of both is much slower, the other hides under it."""
    device, host = [1.0, 3.0], [2.0, 2.0]
    assert dispatched_seconds(device, host, 0.0) == 4 + HOST_WAITS * 1
    assert dispatched_seconds(device, [2e-6, 2e-6], 0.0) == pytest.approx(4)
    assert dispatched_seconds([0.0, 0.0], host, 1.0) == 5
    assert dispatched_seconds(device, [0.0, 0.0], 0.0) == 4
    assert dispatched_seconds([], [], 1.0) == 0
    assert dispatched_seconds([0.0, 0.0], [0.0, 0.0], 0.0) == 0  # of ops that are not counted
