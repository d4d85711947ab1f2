"""Seconds of an operator on one device: what the planner takes for the halves of a backward."""

from __future__ import annotations

from dataclasses import replace

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.costs.local_tensors import LocalTensors, block_split
from distrain.trainer.plan.costs.op_seconds import OpSeconds, op_seconds
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
    found = [op_seconds(op, local, known) for op in table.layer if op.product and op.weights]
    assert len(found) == 4
    return found


def test_on_a_cpu_the_three_products_of_a_linear_layer_take_equally_long() -> None:
    """No multiprocessors share out tiles there; torch's took 10.6, 10.4 and 10.6 ms for these layers, four times over."""
    for each in linear_seconds(CPU):
        assert each.forward == each.input_gradients == each.weight_gradients > 0


def test_on_a_gpu_each_product_fits_its_tiles_in_its_own_way() -> None:
    assert any(len(set(each)) == 3 for each in linear_seconds(GPU))
