"""Checks that train with `distrain fit`: families, precisions, ZeRO, and the plan's memory and step time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ...trainer.rundir.measured import read_measured_run
from .finding import Finding
from .fit_runs import FitRun, Trained, fit, fit_together
from .place import Place

RECIPE, ONE_DEVICE = "tiny_2x2x2", ("parallel.tp=1", "parallel.pp=1")
TINY = (*ONE_DEVICE, "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=4", "optim.lr=1e-3", "optim.warmup=0")
FIVE = (*TINY, "parallel.zero=0", "train.steps=5")
FAMILIES = {
    "gpt": ("model=tiny",),
    "llama": ("model=tiny_llama",),
    "moe": ("model=tiny_moe",),
    "llama with LoRA": ("model=tiny_llama", "model.lora.rank=4"),
}

MEMORY_GOAL, TIME_GOAL = 0.03, 0.10  # shares of the plan
FLOAT32_LOSS = 2e-4  # nats between a GPU and a CPU, both in float32: five Adam steps, in which rounding differs
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


def train_families(place: Place) -> Finding:
    """Train five steps of each family in the precision that the device computes in; losses must be finite and begin to fall."""
    config = place.folder / "gpt_neox"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8")
    families = {**FAMILIES, "hf": (f"model.hf={config}",)}
    words = (*FIVE, f"train.precision={'bf16' if place.on_gpu else 'fp32'}")
    runs = [FitRun(name=f"family.{name.replace(' ', '.')}", recipe=RECIPE, words=(*words, *each)) for name, each in families.items()]
    trained = dict(zip(families, fit_together(runs, place).values(), strict=True))
    departures = [f"{name}: losses {_text(each.losses)}" for name, each in trained.items() if not _is_learning(each.losses)]
    return Finding(figures={"losses": {name: each.losses for name, each in trained.items()}}, departures=tuple(departures))


def compare_precisions(place: Place) -> Finding:
    """Train float32 on the device and on the CPU, and bf16 on the device, from the same values; losses must agree."""
    words = (*FIVE, "model=tiny_llama", "train.steps=10")
    runs = [FitRun(name=f"precision.{each}", recipe=RECIPE, words=(*words, f"train.precision={each}")) for each in ("fp32", "bf16")]
    on_cpu = FitRun(name="precision.cpu", recipe=RECIPE, words=(*words, "train.precision=fp32", "device=cpu"))
    trained = fit_together([*runs, on_cpu], place)
    fp32, bf16, cpu = (trained[f"precision.{each}"].losses for each in ("fp32", "bf16", "cpu"))
    apart, half_apart = _apart(fp32, cpu), max(abs(one / other - 1) for one, other in zip(bf16, fp32, strict=True))
    departures = [f"float32 is {apart:.1e} nats from the CPU's"] if not apart <= FLOAT32_LOSS else []
    departures += [f"bf16 is {100 * half_apart:.1f} % from float32"] if not half_apart <= HALF_LOSS else []
    return Finding(
        figures={"fp32 - cpu, nats": apart, "bf16 / fp32 - 1": half_apart, "losses": {"fp32": fp32, "bf16": bf16, "cpu": cpu}},
        departures=tuple(departures),
    )


def train_zero_stages(place: Place) -> Finding:
    """Train every ZeRO stage, offload, and fp16 with its loss scale; losses must agree with those of stage 0 or 1 in that precision."""
    words = (*TINY, "model=tiny_llama", "train.steps=8")
    cases = {f"fp32 zero{stage}": ("train.precision=fp32", f"parallel.zero={stage}") for stage in range(4)}
    cases |= {f"bf16 zero{stage}": ("train.precision=bf16", f"parallel.zero={stage}") for stage in (1, 2, 3)}
    if place.on_gpu:
        cases["bf16 offload"] = ("parallel=offload", "train.precision=bf16")
        cases["fp16 zero1"] = ("train.precision=fp16", "parallel.zero=1")
    runs = [FitRun(name=name.replace(" ", "."), recipe=RECIPE, words=(*words, *each)) for name, each in cases.items()]
    losses = {name: each.losses for name, each in zip(cases, fit_together(runs, place).values(), strict=True)}
    departures = []
    for name, found in losses.items():
        reference, limit = ("fp32 zero0", FLOAT32_LOSS) if name.startswith("fp32") else ("bf16 zero1", HALF_LOSS * losses["fp32 zero0"][0])
        if not (apart := _apart(found, losses[reference])) <= limit:
            departures.append(f"{name} is {apart:.1e} nats from {reference}")
    return Finding(figures={"losses": losses}, departures=tuple(departures))


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A configuration whose memory and step time are compared with the plan."""

    recipe: str
    words: tuple[str, ...]
    grouped: bool = False  # whether its attention has fewer key heads than query heads

    def overrides(self, place: Place) -> tuple[str, ...]:
        """Its overrides; tiny in a rehearsal."""
        if place.on_gpu:
            return (*self.words, *STEPS)
        return (*self.words, *STEPS, *REHEARSAL, *(("model.kv_heads=2", "model.head_dim=16") if self.grouped else ()))


STEPS = ("data=synthetic", "train.steps=10", "train.tokens=null", "optim.warmup=0")
# fmt: off
REHEARSAL = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.ffn=192", "model.vocab=256", "train.seq=64", "train.precision=fp32",
    "train.gradients=auto", "train.compile=false",
)
GPT = ("train.batch=48", "train.microbatch=12", "parallel.zero=1")
XL = ("model=gpt2_1_5b", "model.vocab_multiple=64", "model.dropout=0", "parallel.zero=1")
STACK = (  # 16 layers of Llama 3 8B
    "model=llama3_8b", "model.layers=16", "model.vocab=32768", "train.seq=4096", "train.batch=4", "train.microbatch=1", "parallel.zero=1",
)
ONE_RANK = ("parallel.tp=1", "parallel.pp=1", "parallel.ep=1", "parallel.zero=1", "parallel.sequence=false")
PLANNED = {
    "gpt2_124m": PlannedRun(recipe="gpt2_124m_1gpu", words=(*GPT, "train.compile=false")),
    "gpt2_124m compiled": PlannedRun(recipe="gpt2_124m_1gpu", words=(*GPT, "train.compile=true")),
    "llama 16 layers": PlannedRun(recipe="llama3_2_1b_1node", grouped=True, words=(*STACK, "train.compile=false")),
    "llama 16 layers compiled": PlannedRun(recipe="llama3_2_1b_1node", grouped=True, words=(*STACK, "train.compile=true")),
    "gpt2_1_5b compiled": PlannedRun(
        recipe="gpt2_124m_1gpu", words=(*XL, "train.batch=16", "train.microbatch=8", "train.compile=true")
    ),
    "mixtral 2 layers": PlannedRun(
        recipe="mixtral_8x7b",
        grouped=True,
        words=("model.layers=2", *ONE_RANK, "train.seq=4096", "train.batch=4", "train.microbatch=1", "train.compile=false"),
    ),
    "llama3_2_1b zero3": PlannedRun(
        recipe="llama3_2_1b_1node",
        grouped=True,
        words=("parallel.zero=3", "train.compile=false", "train.gradients=fp32", "train.seq=4096", "train.batch=8", "train.microbatch=2"),
    ),
    "gpt2_1_5b recomputed": PlannedRun(
        recipe="gpt2_124m_1gpu",
        words=(*XL, "train.batch=32", "train.microbatch=16", "parallel.recompute=full", "train.compile=false"),
    ),
}
# fmt: on


def compare_with_plan(place: Place, name: str) -> Finding:
    """Train a configuration, and compare its memory and step time with the plan: on a CPU its memory by kind, and no time."""
    planned = PLANNED[name]
    run = FitRun(name=f"plan.{name.replace(' ', '.')}", recipe=planned.recipe, words=planned.overrides(place))
    trained = fit(run, place)
    row = trained.rows[-1]
    figures: dict[str, Any] = {
        "recipe": planned.recipe,
        "words": [*place.words(), "parallel.dp=1", *run.words],
        "step_seconds": trained.step_seconds,
        "planned_step_seconds": row.get("planned_seconds"),
        "memory": {each.name: each.measured for each in read_measured_run(trained.folder).memory},
        "planned_memory": {each.name: each.planned for each in read_measured_run(trained.folder).memory},
        "memory_peak": trained.memory_peak if place.on_gpu else None,
        "planned_memory_peak": row.get("planned_memory_peak"),
        "mfu": row.get("mfu"),
        "tokens_per_second": trained_tokens(trained) / trained.step_seconds,
    }
    return Finding(figures=figures, departures=tuple(plan_departures(figures)))


def plan_departures(figures: Mapping[str, Any]) -> Sequence[str]:
    """Return where measured figures are further from the planned ones than the goals, in words."""
    return [
        f"{what} is {100 * (measured / planned - 1):+.1f} % of the plan's" if planned and measured is not None else f"{what}: not known"
        for what, measured, planned, goal in planned_measured(figures)
        if not planned or measured is None or abs(measured / planned - 1) > goal
    ]


def planned_measured(figures: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float | None, float]]:
    """Yield what was measured of a planned run: its name, the measured figure, the planned one, and how far apart they may be (a share).

    Peak memory and step time are those of a GPU; a rehearsal has memory by kind alone.
    """
    for kind, measured in figures["memory"].items():
        yield f"memory of {kind}", measured, figures["planned_memory"][kind], MEMORY_GOAL
    if figures["memory_peak"] is not None:
        yield "peak memory", figures["memory_peak"], figures["planned_memory_peak"], MEMORY_GOAL
        yield "step time", figures["step_seconds"], figures["planned_step_seconds"], TIME_GOAL


def trained_tokens(trained: Trained) -> float:
    """Return the tokens of a step."""
    row = trained.rows[-1]
    return float(row["tokens_per_second"] * row["seconds"])


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def _is_learning(losses: Sequence[float]) -> bool:
    return all(map(isfinite, losses)) and losses[-1] < losses[0]


def _text(losses: Sequence[float]) -> str:
    return " ".join(f"{each:.4f}" for each in losses)
