"""Checks that compare losses: of families, precisions, ZeRO stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite

from ...cli.config.load import load_recipe
from .check_context import MACHINE, CheckContext
from .finding import CheckBroken, Finding
from .fit_runs import ONE_DEVICE, RECIPE, FitRun, fit_each, fit_together
from .loss_differences import largest, most_apart

TINY = (*ONE_DEVICE, "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=4", "optim.lr=1e-3", "optim.warmup=0")
FIVE = (*TINY, "parallel.zero=0", "train.steps=5")
FAMILIES = {
    "gpt": ("model=tiny",),
    "llama": ("model=tiny_llama",),
    "moe": ("model=tiny_moe",),
    "gpt-oss": ("model=tiny_gpt_oss",),
    "llama with LoRA": ("model=tiny_llama", "model.lora.rank=4"),
}

FLOAT32_LOSS = 2e-4  # nats between a GPU and a CPU, both in float32: ten Adam steps, in which rounding differs
FP8_CAPABILITY = (8, 9)  # from which on GPUs have products of 8-bit floats
HALF_LOSS = 0.02  # of a float32 loss, over the same steps in bf16 or fp16

# A model that transformers alone makes: GPT-NeoX.
HF_CONFIG = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def train_families(context: CheckContext) -> Finding:
    """Train five steps of each family in the precision that the device computes in; losses must be finite and begin to fall."""
    config = context.folder / "gpt_neox"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8")
    families = {**FAMILIES, "hf": (f"model.hf={config}",)}
    words = (*FIVE, f"train.precision={'bf16' if context.on_gpu else 'fp32'}")
    runs = [FitRun(name=f"family.{name.replace(' ', '.')}", recipe=RECIPE, words=(*words, *each)) for name, each in families.items()]
    trained, failed = fit_each(runs, context)
    losses = {name: trained[run.name].losses for name, run in zip(families, runs, strict=True) if run.name in trained}
    departures = [f"{name}: losses {_text(each)}" for name, each in losses.items() if not _is_learning(each)]
    return Finding(figures={"losses": losses}, departures=(*failed.values(), *departures))


def compare_precisions(context: CheckContext) -> Finding:
    """Train float32 on the device and on the CPU, and bf16 on the device, from the same values; losses must agree."""
    words = (*FIVE, "model=tiny_llama", "train.steps=10")
    runs = [FitRun(name=f"precision.{each}", recipe=RECIPE, words=(*words, f"train.precision={each}")) for each in ("fp32", "bf16")]
    on_cpu = FitRun(name="precision.cpu", recipe=RECIPE, words=(*words, "train.precision=fp32", "device=cpu"))
    trained = fit_together([*runs, on_cpu], context)
    fp32, bf16, cpu = (trained[f"precision.{each}"].losses for each in ("fp32", "bf16", "cpu"))
    apart = most_apart(fp32, cpu)
    half_apart = largest([abs(one / other - 1) for one, other in zip(bf16, fp32, strict=True)])
    departures = [f"float32 is {apart:.1e} nats from the CPU's"] if not apart <= FLOAT32_LOSS else []
    departures += [f"bf16 is {100 * half_apart:.1f} % from float32"] if not half_apart <= HALF_LOSS else []
    return Finding(
        figures={"fp32 - cpu, nats": apart, "bf16 / fp32 - 1": half_apart, "losses": {"fp32": fp32, "bf16": bf16, "cpu": cpu}},
        departures=tuple(departures),
    )


def train_zero_stages(context: CheckContext) -> Finding:
    """Train every ZeRO stage of DeepSpeed, offload, fp16 with its loss scale, and engine native, also offloading and in fp8; losses must
    agree with those of stage 0 or 1 in that precision, those of fp16 and fp8 with bf16's."""
    words = (*TINY, "model=tiny_llama", "train.steps=8")
    cases = {f"fp32 zero{stage}": ("train.precision=fp32", f"parallel.zero={stage}") for stage in range(4)}
    cases |= {f"bf16 zero{stage}": ("train.precision=bf16", f"parallel.zero={stage}") for stage in (1, 2, 3)}
    if context.on_gpu:
        cases["bf16 offload"] = ("parallel=offload", "train.precision=bf16")
        cases["fp16 zero1"] = ("train.precision=fp16", "parallel.zero=1")
    engines: dict[str, tuple[str, ...]] = {name: ("engine=zero", *each) for name, each in cases.items()}
    for precision in ("fp32", "bf16", "fp16") if context.on_gpu else ("fp32", "bf16"):
        engines[f"{precision} native"] = ("engine=native", f"train.precision={precision}", "parallel.zero=1")
    engines["bf16 native offload"] = (*engines["bf16 native"], "parallel.offload.optimizer=true")
    if computes_in_fp8(context):
        engines["fp8 native"] = ("engine=native", "train.precision=fp8", "parallel.zero=1")
    runs = [FitRun(name=name.replace(" ", "."), recipe=RECIPE, words=(*words, *each)) for name, each in engines.items()]
    trained, failed = fit_each(runs, context)
    losses = {name: trained[run.name].losses for name, run in zip(engines, runs, strict=True) if run.name in trained}
    if missing := {"fp32 zero0", "bf16 zero1"} - losses.keys():
        raise CheckBroken(f"{' and '.join(sorted(missing))} did not train: {'; '.join(failed.values())}")
    departures = list(failed.values())
    for name, found in losses.items():
        reference, limit = ("fp32 zero0", FLOAT32_LOSS) if name.startswith("fp32") else ("bf16 zero1", HALF_LOSS * losses["fp32 zero0"][0])
        if not (apart := most_apart(found, losses[reference])) <= limit:
            departures.append(f"{name} is {apart:.1e} nats from {reference}")
    return Finding(figures={"losses": losses}, departures=tuple(departures))


def computes_in_fp8(context: CheckContext) -> bool:
    """Whether the device has products of 8-bit floats, as a CPU's arithmetic has in another type; a GPU by its compute capability, where
    the check of the machine has found it."""
    if capability := context.earlier.get(MACHINE, {}).get("compute capability"):
        return tuple(capability) >= FP8_CAPABILITY
    device = load_recipe(RECIPE, [*context.words(), *ONE_DEVICE, "parallel.dp=1"]).cluster.device
    return device.kind == "cpu" or "fp8" in device.peak


def _is_learning(losses: Sequence[float]) -> bool:
    return all(map(isfinite, losses)) and losses[-1] < losses[0]


def _text(losses: Sequence[float]) -> str:
    return " ".join(f"{each:.4f}" for each in losses)
