"""Compiles the optimizer's step for a CPU, and prints as JSON how far it is from torch's AdamW, its kernels, and what they read and write;
then, of engine native, how far steps in one kernel a bucket and steps on the host are from those of torch's fused AdamW, with clipping and
a skipped step.

The compiler's middle is the same for every device: which operators are in one kernel, and which buffers that kernel reads and writes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.compiled_code import code_of_compiler
from distrain.trainer.engines.held_bytes import tensors_in
from distrain.trainer.engines.native import host_optimizer
from distrain.trainer.engines.native.adamw_kernel import Step, adamw, adamw_in_blocks, compiled_adamw, in_block_rows, in_kernel_shape
from distrain.trainer.layers.block_quantization import code_numbers, code_tables
from distrain.trainer.layers.stochastic_rounding import column_words, row_words, tensor_key
from distrain.trainer.loop.build import build_engine
from distrain.trainer.parallel.process_groups import make_grid
from distrain.trainer.parallel.world import join_ranks
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.plan import make_plan

BETA1, BETA2, EPS, DECAY, LR = 0.9, 0.95, 1e-8, 0.1, 1e-2
LENGTHS, STEPS = (1600, 4800, 1000, 4099), 4  # the compiler makes a kernel of vectors and one of elements
SHAPES = ((20, 48), (1, 300), (64, 10), (37, 112))
BLOCKS = (9, 20, 33)
BYTES = {"float": 4, "int32_t": 4, "at::BFloat16": 2, "uint8_t": 1}


def train(compute: torch.dtype, reduced: torch.dtype) -> dict[str, Any]:
    """Step weights of two lengths, with a clipped and a skipped step among them."""
    apart, step = 0.0, compiled_adamw(BETA1, BETA2, EPS)
    for length in LENGTHS:
        draw = torch.Generator().manual_seed(length)
        weight = torch.randn(length, generator=draw)
        plain = torch.nn.Parameter(weight.clone())
        optimizer = torch.optim.AdamW([plain], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
        copy = None if compute == torch.float32 else weight.to(compute)
        mean, square, taken = torch.zeros(length), torch.zeros(length), 0
        for number in range(STEPS):
            gradient, divisor, keep = torch.randn(length, generator=draw).to(reduced), torch.tensor(3.0), number != 1
            taken += keep
            if not keep:
                gradient[7] = torch.inf
            rate, root = torch.tensor(LR / (1 - BETA1**taken)), torch.tensor((1 - BETA2**taken) ** 0.5)
            numbers = (divisor, torch.tensor(float(keep)), rate, root, torch.tensor(1 - LR * DECAY))
            tensors, _ = in_kernel_shape((weight, copy, gradient, mean, square))
            step(*tensors, *numbers, None, None)
            if keep:
                plain.grad = gradient.float() / divisor
                optimizer.step()
            apart = max(apart, float((weight - plain.detach()).abs().max()))
        if copy is not None:
            apart = max(apart, float((copy - weight.to(compute)).abs().max()))
    return {"apart": apart}


def train_rounded(rounding: str) -> dict[str, Any]:
    """Step weights in bf16 with moments in bf16 of several shapes, by the compiled kernel and as it is written. Return how far weights are
    apart, and the share of moments that differ."""
    apart, differing, step = 0.0, [], compiled_adamw(BETA1, BETA2, EPS)
    written: Step = adamw
    for shape in SHAPES:
        draw, length = torch.Generator().manual_seed(shape[1]), shape[0] * shape[1]
        weight = torch.randn(length, generator=draw)
        states = [weight, weight.bfloat16(), *(torch.zeros(length, dtype=torch.bfloat16) for _ in range(2))]
        plain = [each.clone() for each in states]
        for number in range(STEPS):
            gradient = torch.randn(length, generator=draw).bfloat16()
            numbers = [torch.tensor(each) for each in (3.0, float(number != 1), LR, 0.5, 1 - LR * DECAY)]
            given: list[Any] = [None, None]
            if rounding == "stochastic":
                rows = row_words(tensor_key(1, "a"), torch.tensor(float(number)), torch.arange(shape[0]))
                given = [rows, column_words(torch.arange(shape[1]))]
            tensors, words = in_kernel_shape([*states[:2], gradient, *states[2:]], *given)
            step(*tensors, *numbers, *words)
            in_rows = [each.view(-1, shape[1]) for each in (*plain[:2], gradient, *plain[2:])]
            written(*in_rows, *numbers, *given, BETA1, BETA2, EPS)
        apart = max(apart, float((states[0] - plain[0]).abs().max()))
        differing += [float((one != other).double().mean()) for one, other in zip(states[2:], plain[2:], strict=True)]
    return {"apart": apart, "differing": max(differing)}


def compiled(train: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What a training answers, and what the kernels move that are compiled in it: one graph may serve several lengths."""
    with code_of_compiler() as codes:
        found = train(*given)
    return {**found, "graphs": [moved_bytes(code) for code in codes]}


def train_quantized() -> dict[str, Any]:
    """Step weights in bf16 with moments in 8 bits, by the compiled kernel and as it is written: how far weights are apart, and the
    share of codes and scales that differ."""
    step = compiled_adamw(BETA1, BETA2, EPS, in_blocks=True)
    written: Step = adamw_in_blocks
    tables = [code_tables(torch.device("cpu"), signed=signed) for signed in (True, False)]
    zero, apart, differing = code_numbers(signed=True).index(0.0), 0.0, []
    for blocks in BLOCKS:
        draw, length = torch.Generator().manual_seed(blocks), 256 * blocks
        weight = torch.randn(length, generator=draw)
        states = [weight, weight.bfloat16(), *(torch.full((length,), code, dtype=torch.uint8) for code in (zero, 0))]
        states += [torch.zeros(blocks), torch.zeros(blocks)]
        plain = [each.clone() for each in states]
        for number in range(STEPS):
            gradient = torch.randn(length, generator=draw).bfloat16()
            numbers = [torch.tensor(each) for each in (3.0, float(number != 1), LR, 0.5, 1 - LR * DECAY)]
            before = [each.clone() for each in states]
            rows = in_block_rows((*states[:2], gradient, *states[2:4]), states[4:])
            step(*rows, *tables, *numbers)
            written(*plain[:2], gradient, *plain[2:], *tables, *numbers, BETA1, BETA2, EPS)
            if number == 1:
                assert all(torch.equal(one, other) for one, other in zip(before, states, strict=True)), "a skipped step changes nothing"
        apart = max(apart, float((states[0] - plain[0]).abs().max()))
        differing += [float((one != other).double().mean()) for one, other in zip(states[2:], plain[2:], strict=True)]
    return {"apart": apart, "differing": max(differing)}


def moved_bytes(code: str) -> dict[str, Any]:
    """The kernels of some generated C++, and the bytes that their vector loops load and store for each element. Numbers without dims are
    loaded otherwise, and not counted."""
    kernels = re.findall(r'extern "C"\s+void\s+\w+\((.*?)\)\s*\{(.*?)\n\}', code, re.DOTALL)
    loads = stores = 0
    for arguments, body in kernels:
        width = {name: BYTES[kind] for kind, name in re.findall(r"([\w:]+)\* (\w+)", arguments)}
        vectors = body.split("C10_UNLIKELY")[0]  # without the elements left over
        loads += sum(width[name] for name in set(re.findall(r"loadu\((\w+) \+ static_cast<int64_t>\(", vectors)))
        stores += sum(width[name] for name in set(re.findall(r"store\((\w+) \+ static_cast<int64_t>\(", vectors)))
    return {"kernels": len(kernels), "loads": loads, "stores": stores}


def engine_states(precision: str, moments: str, how: str) -> tuple[list[torch.Tensor], int, list[int]]:
    """The weights and optimizer states of a small model after four steps, one of them with a gradient that is not finite; how many were
    skipped; the elements that it steps, and the bytes that it copied to the host and back. `how`: in one kernel, by torch's fused AdamW, or
    on the host."""
    words = (
        "cluster=1x1",
        "device=cpu",
        "engine=native",
        *(("parallel.zero=1", "parallel.offload.optimizer=true") if how == "host" else ("parallel.zero=0",)),
        f"train.precision={precision}",
        f"optim.moments={moments}",
        "train.clip=0.1",
        "train.seq=4",
    )
    run = load_recipe("quickstart", [*words, "train.batch=2", "train.microbatch=1", "model=tiny", "parallel.bucket=30000"])
    engine: Any = build_engine(run, make_grid(WORLD, mesh_position(run, 0)), make_plan(run).engine)
    engine.bucket_optimizer.steps_in_one_kernel = how == "kernel"
    for number in range(STEPS):
        tokens = torch.full((1, 4), number)
        hook = next(engine.modules[0].parameters()).register_hook(lambda gradient: gradient * torch.inf) if number == 1 else None
        engine.step(lambda index: (tokens, tokens, {}), LR / (1 + number), 8)  # noqa: B023
        if hook:
            hook.remove()
    states = [each for bucket in engine.buckets for each in tensors_in(engine.optimizer.state[bucket.master])]
    weights = [each.float().clone() for bucket in engine.buckets for each in (bucket.master.data, bucket.weights)]
    host, stepped = engine.bucket_optimizer.host, sum(bucket.master.numel() for bucket in engine.buckets)
    return weights + states, engine.skipped_steps, [stepped, host.to_host.bytes, host.to_device.bytes] if host else []


def compare_engines(precision: str, moments: str) -> dict[str, Any]:
    """How far the ways to step are from torch's fused AdamW, and the share of bf16 moments or of codes that differ."""
    plain, skipped, _ = engine_states(precision, moments, "fused")
    found: dict[str, Any] = {"precision": precision, "tensors": len(plain), "skipped": [skipped], "apart": {}, "differing": {}}
    for how in ("kernel",) if moments == "int8" else ("kernel", "host"):
        states, skipped, found["copied"] = engine_states(precision, moments, how)
        found["skipped"].append(skipped)
        found["apart"][how] = max(float((one.float() - other.float()).abs().max()) for one, other in zip(plain, states, strict=True))
        rounded = [(one != other).flatten() for one, other in zip(plain, states, strict=True) if one.dtype in (torch.bfloat16, torch.uint8)]
        found["differing"][how] = float(torch.cat(rounded).double().mean()) if rounded else None
    return found


if __name__ == "__main__":
    WORLD = join_ranks("cpu")
    for words in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")):
        print(json.dumps(compiled(train, *(getattr(torch, word) for word in words))), flush=True)
    for rounding in ("nearest", "stochastic"):
        print(json.dumps(compiled(train_rounded, rounding)), flush=True)
    print(json.dumps(compiled(train_quantized)), flush=True)
    host_optimizer.PART = 1000  # of pieces of 7,000, of buckets of up to 30,000 elements
    vars(host_optimizer)["PIECE"] = 7000
    for precision, moments in (("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "int8"), ("fp32", "bf16")):
        print(json.dumps(compare_engines(precision, moments)), flush=True)
    os._exit(0)
