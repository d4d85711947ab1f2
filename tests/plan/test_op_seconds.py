"""Seconds of an operator on one device: what the planner takes for the halves of a backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.models.ops.shared_ops import LOG_SUMS, TANH_PASSES
from distrain.trainer.plan.axes.axis import ActivationForm
from distrain.trainer.plan.costs.block_costs import SplitCosts
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.costs.local_tensors import LocalTensors, block_split
from distrain.trainer.plan.costs.op_seconds import OpSeconds, attention_seconds, op_kernels, op_seconds
from distrain.trainer.plan.costs.roofline import DeviceRates, product_seconds, rates, tile_efficiency
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.layout.layout import mesh_of
from distrain.trainer.plan.layout_of_run import layout_of_run
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.run import Device

SMALL = ("train.precision=fp32", "model.hidden=192", "model.heads=4", "train.seq=128", "train.microbatch=2")
CPU = Device(name="cpu", kind="cpu", memory=8e9, bandwidth=12e9, peak={"fp32": 52e9})
GPU = Device(name="A100", kind="cuda", memory=80e9, bandwidth=2e12, peak={"fp32": 19.5e12}, units=108)


def layer_seconds(device: Device, *overrides: str) -> dict[str, OpSeconds]:
    """The seconds of each op of a small model's layer on a device."""
    run = load_recipe("quickstart", [*SMALL, *overrides])
    run = replace(run, cluster=replace(run.cluster, device=device))
    table, known = CostContext(run).table, rates(device, "fp32", fused=False)
    assert known is not None
    split = block_split(run.parallel, run.train.microbatch, "torch", fused=False)
    local = LocalTensors(table, split, vocab_multiple=run.model.vocab_multiple, activation=4, form="torch")
    return {op.name: op_seconds(op, local, known, 4) for op in table.layer}


def linear_seconds(device: Device) -> list[OpSeconds]:
    """The seconds of each linear layer of a small model on a device."""
    found = [each for each in layer_seconds(device).values() if each.weight_gradients]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("inner", [32, 256, 1024])
def test_on_a_cpu_a_product_has_one_rate(inner: int) -> None:
    device = rates(replace(CPU, sustained=0.7, bandwidth=1e15, launch=0.0), "fp32", fused=False)
    assert device is not None
    assert product_seconds(1000, 300, inner, 1, 4, device.linear, device) == pytest.approx(2 * 1000 * 300 * inner / (0.7 * 52e9))


@pytest.mark.parametrize(("device", "longer"), [(CPU, TANH_PASSES), (GPU, 1.0)])
def test_on_a_cpu_gelu_by_tanh_takes_longer_than_moving_its_tensors(device: Device, longer: float) -> None:
    by_tanh, exact = (layer_seconds(replace(device, launch=0.0), f"model.act={act}")["mlp.act"] for act in ("gelu_tanh", "gelu"))
    assert by_tanh.forward == pytest.approx(longer * exact.forward)
    assert by_tanh.input_gradients == pytest.approx(longer * exact.input_gradients)


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


H200 = Device(name="H200", kind="cuda", memory=150e9, bandwidth=4.8e12, peak={"bf16": 989e12, "fp8": 1979e12}, units=132, dispatch=6e-5)


def known_rates(*, own: bool) -> DeviceRates:
    """The rates of an H200 in bf16, of our modules or of published runs."""
    found = rates(H200, "bf16", fused=True, own=own)
    assert found is not None
    return found


def seconds_of(name: str, *, gradient: int = 2) -> OpSeconds:
    """The seconds of an op of GPT-2 124M in our modules on an H200, 12 sequences at once."""
    run = load_recipe("gpt2_124m_1gpu", ["train.microbatch=12"])
    table = CostContext(run).table
    local = LocalTensors(
        table, block_split(run.parallel, 12, "torch", fused=True), vocab_multiple=run.model.vocab_multiple, activation=2, form="torch"
    )
    (op,) = (op for op in (*table.layer, *table.head) if op.name == name)
    return op_seconds(op, local, known_rates(own=True), gradient)


def test_a_product_with_few_tiles_splits_its_inner_dim_since_hopper() -> None:
    """A weight's gradient, 768 x 3072 of 12,288 tokens, took 88 us on an H200: 1.5 times as fast as tiles of before. A small product
    keeps four times as many multiprocessors busy where its inner dim is long enough for four parts."""
    before, since = (tile_efficiency(768, 3072, 12288, 1, 132, hopper) for hopper in (False, True))
    assert since > 1.5 * before
    split, short = (tile_efficiency(192, 192, inner, 1, 132, True) for inner in (4096, 1024))
    assert split == pytest.approx(4 * short)


def test_attention_of_short_sequences_loses_its_rate() -> None:
    """With as many keys as a kernel wastes it takes twice as long as at its best rate; heads of 64 elements take longer still."""
    known, flops = known_rates(own=True), 1e12
    for at, waste in enumerate(known.flash_tokens):
        short, endless = (attention_seconds(flops, 128, keys, 1.0, known)[at] - known.launch for keys in (waste, 10**12))
        assert short == pytest.approx(2 * endless)
    assert attention_seconds(flops, 64, 1024, 1.0, known)[0] > 1.2 * attention_seconds(flops, 128, 1024, 1.0, known)[0]
    others = known_rates(own=False)
    assert attention_seconds(flops, 128, 1, 2.5, others) == pytest.approx((flops / others.flash, 2.5 * flops / others.flash), rel=0.01)


def test_our_modules_add_each_micro_batchs_gradients_and_sum_those_of_biases() -> None:
    """Of GPT-2 124M's wider product: 6 bytes a weight in bf16, 10 in float32, and the bias's 12 x 1024 x 3072 elements."""
    bf16, fp32 = (seconds_of("mlp", gradient=width) for width in (2, 4))
    weights, known = 768 * 3072 + 3072, known_rates(own=True)
    assert fp32.weight_gradients - bf16.weight_gradients == pytest.approx(4 * weights / known.memory)
    product = product_seconds(768, 3072, 12 * 1024, 1, 2, known.linear, known)
    summed = (6 * weights + 2 * 12 * 1024 * 3072) / known.memory + 3 * known.launch
    assert bf16.weight_gradients == pytest.approx(product + summed)


def fp8_seconds(name: str, *, fused: bool, chunks: int = 1) -> tuple[OpSeconds, DeviceRates, int]:
    """The seconds of an op of GPT-2 124M in our modules in fp8, the device's rates, and the kernels of a pass."""
    run = load_recipe("gpt2_124m_1gpu", ["train.microbatch=12", "train.precision=fp8", "engine=native", f"train.loss_chunks={chunks}"])
    table, known = CostContext(run).table, rates(H200, "fp8", fused=fused, own=True)
    assert known is not None
    split = block_split(run.parallel, 12, "compiled" if fused else "torch", fused=fused)
    local = LocalTensors(table, split, vocab_multiple=run.model.vocab_multiple, activation=2, form=split.form)
    (op,) = (op for op in (*table.layer, *table.head) if op.name == name)
    return op_seconds(op, local, known, 2), known, op_kernels(op, local)


def test_a_product_in_fp8_is_computed_at_its_rate_and_casts_what_it_multiplies() -> None:
    """Of GPT-2 124M's wider product: its input and weight forward, its output's gradient and the weight again backward; the weight, the
    input and that gradient are copied the other way round. Kernels that are not compiled move 9 bytes an element for 5."""
    rows, inner, outer = 12 * 1024, 768, 3072
    for fused, passes in ((True, 1.0), (False, 1.8)):
        found, known, kernels = fp8_seconds("mlp", fused=fused)
        assert known.linear == pytest.approx(2 * known.other, rel=0.01)
        assert kernels == (1 if fused else 26)
        product = product_seconds(rows, outer, inner, 1, 2, known.linear, known)
        casts = passes * (5.4 * (rows * inner + inner * outer) / known.memory + known.launch)
        assert found.forward == pytest.approx(product + casts + 2 * inner * outer / known.memory + known.launch)
        casts_back = passes * (5.4 * (rows * outer + inner * outer) / known.memory + known.launch)
        assert found.input_gradients == pytest.approx(product_seconds(rows, inner, outer, 1, 2, known.linear, known) + casts_back)
        turned = 2 * rows * (inner + outer) / known.memory + 2 * known.launch
        summed = (6 * (inner * outer + outer) + 2 * rows * outer) / known.memory + 3 * known.launch
        product = product_seconds(inner, outer, rows, 1, 2, known.linear, known)
        assert found.weight_gradients == pytest.approx(product + turned + summed)


def test_the_head_of_our_modules_computes_in_bf16() -> None:
    found, known, kernels = fp8_seconds("head", fused=True)
    assert kernels == 1
    assert found.forward == pytest.approx(product_seconds(12 * 1024, 50304, 768, 1, 2, known.other, known))


def test_a_head_in_chunks_computes_each_chunk_again_and_all_gradients_in_its_backward() -> None:
    """The terms of the input's gradient are added up chunk by chunk: each later one reads what there is."""
    whole, _, kernels = fp8_seconds("head", fused=True)
    found, known, kernels = fp8_seconds("head", fused=True, chunks=8)
    rows, hidden, chunk = 12 * 1024, 768, 6288
    sides = ((rows, chunk, hidden), (rows, hidden, chunk), (hidden, chunk, rows))
    forward, inputs, weights = (8 * product_seconds(*side, 1, 2, known.other, known) for side in sides)
    added = (7 * 2 * rows * hidden + 6 * hidden * 50304) / known.memory + known.launch  # with those of earlier micro-batches
    assert kernels == 8
    assert found.forward == pytest.approx(forward)
    assert found.input_gradients == pytest.approx(forward + inputs + weights + added)
    assert found.weight_gradients == 0
    assert found.forward == pytest.approx(whole.forward, rel=0.1)


def test_our_loss_reads_the_logits_once_forward_and_writes_their_gradient_backward() -> None:
    loss, known, logits = seconds_of("loss"), known_rates(own=True), 12 * 1024 * 50304 * 2
    assert loss.forward == pytest.approx(logits / known.memory + 3 * known.launch)
    assert loss.input_gradients == pytest.approx(2 * logits / known.memory + 3 * known.launch)


def test_deepspeeds_hooks_at_stage_3_take_the_host_time_of_every_weight() -> None:
    """A small layer is bound by the host: its 9 weights cost as much as 6 operators each, forward, and twice that backward."""
    run = load_recipe("llama3_2_1b_1node", ["model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=16", "train.seq=32"])
    run = replace(run, cluster=replace(run.cluster, device=H200))
    context, layer = CostContext(run), {}
    for zero in (0, 3):
        hooks = ENGINES["zero"].costs.hooks(replace(run.parallel, zero=zero))
        split = block_split(run.parallel, 1, "torch", fused=False, hooks=hooks)
        layer[zero] = context.block_costs(split, context.wires(mesh_of(run.parallel, context.world))).layer
    forward, backward = (getattr(layer[3], half) - getattr(layer[0], half) for half in ("forward", "backward"))
    assert forward == pytest.approx(9 * 6 * H200.dispatch_seconds, rel=0.01)
    assert backward == pytest.approx(2 * 9 * 6 * H200.dispatch_seconds, rel=0.01)


def test_a_plan_counts_the_hooks_of_its_engine() -> None:
    """Eight layers with 9 weights each and one head, norm and embedding wait for the host at stage 3 alone."""
    small = ("model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=16", "model.layers=8", "train.seq=32")
    one = ("device=h200", "cluster=1x1", "parallel.dp=1", "train.batch=1", "train.microbatch=1", "train.compile=false")
    plans = [make_plan(load_recipe("llama3_2_1b_1node", [*small, *one, "engine=zero", f"parallel.zero={zero}"])) for zero in (0, 3)]
    without, hooked = (plan.time.compute for plan in plans if plan.time)
    assert hooked - without > 8 * 9 * 6 * 3 * H200.dispatch_seconds


@pytest.mark.parametrize(
    ("form", "words", "again"),
    [
        ("torch", "parallel.cp=1 train.precision=fp32", 0),
        ("torch", "parallel.cp=2 train.precision=fp32", 1),
        ("torch", "parallel.cp=2 train.precision=bf16", 0),
        ("torch", "parallel.cp=2 train.precision=bf16 data=text data.path=x data.documents=true", 0),
        ("torch", "parallel.cp=2 train.precision=fp32 data=text data.path=x data.documents=true", 1),
        ("compiled", "parallel.cp=2 train.precision=bf16", 0),
        ("compiled", "parallel.cp=2 train.precision=fp32", 1),
        ("megatron", "parallel.cp=2 train.precision=fp32", 0),
        ("torch", "parallel.cp=2 train.precision=fp32 cpu", 0),
    ],
)
def test_our_context_parallelism_runs_attentions_core_again_on_a_gpu(form: ActivationForm, words: str, again: int) -> None:
    """In float32: in the core's own backward, and not once more under selective recomputation; its
    log-sum-exp is then not saved."""
    small = ("model=tiny_llama", "cluster=1x2", "parallel.dp=auto", "train.seq=256", "train.batch=4", "train.microbatch=1")
    run = load_recipe("quickstart", [*small, *words.removesuffix(" cpu").split()])
    device = CPU if words.endswith(" cpu") else replace(GPU, peak={"fp32": 19.5e12, "bf16": 312e12})
    run = replace(run, cluster=replace(run.cluster, device=replace(device, dispatch=0.0)))
    context = CostContext(run)
    wires = layout_of_run(context, run.parallel, 1).wires
    splits = {each: block_split(replace(run.parallel, recompute=each), 1, form, fused=form == "compiled") for each in ("none", "selective")}
    layers = {each: context.block_costs(split, wires).layer for each, split in splits.items()}
    backward = {each: layer.backward or 0.0 for each, layer in layers.items()}
    costs = SplitCosts(run, context.table, splits["none"], wires).layer
    (at,) = [at for at, op in enumerate(costs.ops) if op.core]
    core, every = costs.seconds[at], sum(each.input_gradients for each in costs.seconds)
    assert backward["none"] == pytest.approx(every + sum(each.weight_gradients for each in costs.seconds) + again * core.forward)
    assert backward["selective"] - backward["none"] == pytest.approx((1 - again) * core.forward)
    assert layers["none"].saved - layers["selective"].saved == (1 - again) * costs.local.bytes(LOG_SUMS)
