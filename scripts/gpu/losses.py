"""Checks that compare losses: of families, precisions, options, ZeRO stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite, isnan, nan

from ...cli.config.load import load_recipe
from ...trainer.rundir.measured import read_measured_run
from .check_context import CheckContext
from .finding import Finding
from .fit_runs import ONE_DEVICE, RECIPE, FinishedFit, FitRun, fit_together

TINY = (*ONE_DEVICE, "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=4", "optim.lr=1e-3", "optim.warmup=0")
FIVE = (*TINY, "parallel.zero=0", "train.steps=5")
FAMILIES = {
    "gpt": ("model=tiny",),
    "llama": ("model=tiny_llama",),
    "moe": ("model=tiny_moe",),
    "gpt-oss": ("model=tiny_gpt_oss",),
    "llama with LoRA": ("model=tiny_llama", "model.lora.rank=4"),
}

# Ways to compute that have kernels or copies of their own on a GPU: those that train the plain curve, and those that train others.
MOMENTS, DOCUMENTS = "moments in bf16", "DOCUMENTS"  # an option; a path that is written for the run
SAME_CURVE: dict[str, tuple[str, ...]] = {
    "loss in chunks": ("train.loss_chunks=4",),
    "attention in separate kernels": ("train.attention=math",),
    "recomputation": ("parallel.recompute=full",),
    "zero3": ("parallel.zero=3",),
    "timeline": ("log.timeline=[3,4]",),
    "saves in the background": ("checkpoint.every=3", "checkpoint.background=true"),
    "checks of devices": ("launch.device_check=2",),
    MOMENTS: ("optim.moments=bf16",),
}
TEXT = ("data=text", "data.path=" + DOCUMENTS)
APART = (*TEXT, "data.documents=true")
OTHER_CURVES: dict[str, tuple[str, ...]] = {
    "z-loss": ("train.z_loss=1",),
    "text": TEXT,
    "documents": APART,
    "documents and windows": (*APART, "model.window=6"),
    "windows": ("model.window=16",),
    "latent attention": ("model=tiny_mla",),
    "attention sinks": ("model.sinks=true",),
    "multi-token prediction": ("model.mtp={layers: 1, weight: 5}",),
    "muon": ("optim.name=muon",),
}

FLOAT32_LOSS = 2e-4  # nats between a GPU and a CPU, both in float32: ten Adam steps, in which rounding differs
HALF_LOSS = 0.02  # of a float32 loss, over the same steps in bf16 or fp16
OPTION_LOSS, TEXT_LOSS = 5e-4, 1e-3  # of a loss, over six steps in bf16; on a CPU at most 6e-5, of text 3e-4

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
    trained = dict(zip(families, fit_together(runs, context).values(), strict=True))
    departures = [f"{name}: losses {_text(each.losses)}" for name, each in trained.items() if not _is_learning(each.losses)]
    return Finding(figures={"losses": {name: each.losses for name, each in trained.items()}}, departures=tuple(departures))


def compare_precisions(context: CheckContext) -> Finding:
    """Train float32 on the device and on the CPU, and bf16 on the device, from the same values; losses must agree."""
    words = (*FIVE, "model=tiny_llama", "train.steps=10")
    runs = [FitRun(name=f"precision.{each}", recipe=RECIPE, words=(*words, f"train.precision={each}")) for each in ("fp32", "bf16")]
    on_cpu = FitRun(name="precision.cpu", recipe=RECIPE, words=(*words, "train.precision=fp32", "device=cpu"))
    trained = fit_together([*runs, on_cpu], context)
    fp32, bf16, cpu = (trained[f"precision.{each}"].losses for each in ("fp32", "bf16", "cpu"))
    apart = _apart(fp32, cpu)
    half_apart = _largest([abs(one / other - 1) for one, other in zip(bf16, fp32, strict=True)])
    departures = [f"float32 is {apart:.1e} nats from the CPU's"] if not apart <= FLOAT32_LOSS else []
    departures += [f"bf16 is {100 * half_apart:.1f} % from float32"] if not half_apart <= HALF_LOSS else []
    return Finding(
        figures={"fp32 - cpu, nats": apart, "bf16 / fp32 - 1": half_apart, "losses": {"fp32": fp32, "bf16": bf16, "cpu": cpu}},
        departures=tuple(departures),
    )


def compare_options(context: CheckContext) -> Finding:
    """Train ways to compute in bf16 on the device, in engine native: losses must be those of a plain run, or those of the same way in
    float32 on the CPU."""
    path = context.folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} is {number * number}, "}) + "\n" for number in range(2000)), encoding="utf-8")
    words = (*TINY, "model=tiny_llama", "engine=native", "train.steps=6")
    cases = {"plain": (), **SAME_CURVE, **OTHER_CURVES}

    def option_run(option: str, place: str, *where: str) -> FitRun:
        own = tuple(each.replace(DOCUMENTS, str(path)) for each in cases[option])
        plain = tuple(each for each in words if not (each.startswith("data=") and any(word.startswith("data=") for word in own)))
        return FitRun(name=f"option.{option.replace(' ', '.')}{place}", recipe=RECIPE, words=(*plain, *own, *where))

    runs = {option: option_run(option, "", "train.precision=bf16") for option in cases}
    exact = {option: option_run(option, ".cpu", "train.precision=fp32", "device=cpu") for option in OTHER_CURVES}
    trained = fit_together([*runs.values(), *exact.values()], context)
    losses = {option: trained[each.name].losses for option, each in runs.items()}
    expected = {option: trained[exact[option].name].losses if option in exact else losses["plain"] for option in cases}
    apart = {option: _apart(found, expected[option]) / expected[option][0] for option, found in losses.items()}
    limits = {option: TEXT_LOSS if TEXT[0] in each else OPTION_LOSS for option, each in cases.items()}
    departures = [f"{option} is {100 * share:.2f} % from what it must be" for option, share in apart.items() if not share <= limits[option]]
    unseen = []
    for option in OTHER_CURVES:
        other = losses["text" if option.startswith("documents") else "plain"]
        if not _apart(losses[option], other) / other[0] > limits[option]:
            unseen.append(option)
    departures += [f"{option} trains the plain curve" for option in unseen]
    held = {option: _optimizer_bytes(trained[runs[option].name]) for option in ("plain", MOMENTS)}
    if not held[MOMENTS] < 0.75 * held["plain"]:
        departures.append(f"{MOMENTS} take {held[MOMENTS]} bytes with the weights, where plain ones take {held['plain']}")
    figures = {"losses": losses, "apart, of the first loss": apart, "bytes of the optimizer": held}
    return Finding(figures=figures, departures=tuple(departures))


def _optimizer_bytes(trained: FinishedFit) -> float:
    """Return the measured bytes of the optimizer; nan where they are not known."""
    return next((each.measured for each in read_measured_run(trained.folder).memory if each.name == "optimizer" and each.measured), nan)


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
    if _computes_in_fp8(context):
        engines["fp8 native"] = ("engine=native", "train.precision=fp8", "parallel.zero=1")
    runs = [FitRun(name=name.replace(" ", "."), recipe=RECIPE, words=(*words, *each)) for name, each in engines.items()]
    losses = {name: each.losses for name, each in zip(engines, fit_together(runs, context).values(), strict=True)}
    departures = []
    for name, found in losses.items():
        reference, limit = ("fp32 zero0", FLOAT32_LOSS) if name.startswith("fp32") else ("bf16 zero1", HALF_LOSS * losses["fp32 zero0"][0])
        if not (apart := _apart(found, losses[reference])) <= limit:
            departures.append(f"{name} is {apart:.1e} nats from {reference}")
    return Finding(figures={"losses": losses}, departures=tuple(departures))


def _computes_in_fp8(context: CheckContext) -> bool:
    """Whether the device has products of 8-bit floats, as a CPU's arithmetic has in another type."""
    device = load_recipe(RECIPE, [*context.words(), *ONE_DEVICE, "parallel.dp=1"]).cluster.device
    return device.kind == "cpu" or "fp8" in device.peak


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return _largest([abs(left - right) for left, right in zip(one, other, strict=True)])


def _largest(differences: Sequence[float]) -> float:
    """Return the largest; nan where one is, which is within no limit."""
    return nan if any(map(isnan, differences)) else max(differences)


def _is_learning(losses: Sequence[float]) -> bool:
    return all(map(isfinite, losses)) and losses[-1] < losses[0]


def _text(losses: Sequence[float]) -> str:
    return " ".join(f"{each:.4f}" for each in losses)
