"""Checks of ways to compute that have kernels, copies or waits of their own on a GPU: their losses must be what they must be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path

import msgspec

from ...trainer.rundir.measured_run import read_measured_run
from ...trainer.rundir.timeline_files import FOLDER, RankTimeline
from .check_context import CheckContext
from .finding import CheckBroken, Finding
from .fit_runs import RECIPE, FinishedFit, FitRun, fit_each
from .loss_checks import TINY
from .loss_differences import most_apart

WORDS = (*TINY, "model=tiny_llama", "engine=native", "train.steps=6")
PLAIN, GPT, MOMENTS, TIMELINE = "plain", "GPT", "moments in bf16", "timeline"  # options
TIMED = (3, 4)  # first and last step of the timeline
BF16 = "train.precision=bf16"
COMPILED = ("train.compile=true",)
GPT_WORDS = ("model=tiny",)  # whose products have biases
SAME_CURVE: dict[str, tuple[str, ...]] = {
    "compiled layers": COMPILED,
    "compiled layers that are recomputed": (*COMPILED, "parallel.recompute=full"),
    GPT: GPT_WORDS,
    "compiled layers of GPT": (*GPT_WORDS, *COMPILED),
    "loss in chunks": ("train.loss_chunks=4",),
    "attention in separate kernels": ("train.attention=math",),
    "recomputation": ("parallel.recompute=full",),
    "zero3": ("parallel.zero=3",),
    TIMELINE: (f"log.timeline=[{TIMED[0]},{TIMED[1]}]",),
    "saves in the background": ("checkpoint.every=3", "checkpoint.background=true"),
    "checks of devices": ("launch.device_check=2",),
    MOMENTS: ("optim.moments=bf16",),
}
LIKE = {GPT: GPT, "compiled layers of GPT": GPT}  # whose curve it is, where that is not the plain one

DOCUMENTS, PAIRS = "DOCUMENTS", "PAIRS"  # paths that are written for the runs
TEXT = ("data=text", "data.path=" + DOCUMENTS)
APART = (*TEXT, "data.documents=true")
BIASES = ("model=tiny_gpt_oss",)
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
    "biases of experts": BIASES,
    "LoRA of experts": (*BIASES, "model.lora={rank: 8, alpha: 32}", "optim.lr=3e-3"),  # of a rank for which one kernel computes all experts
    "preferences": ("data=preferences", "data.path=" + PAIRS, "train.preference.nll_weight=0.2"),
}
# What an option is further from than its limit, where that is not the plain curve.
UNLIKE = {"documents": "text", "documents and windows": "text", "LoRA of experts": "biases of experts"}

OPTION_LOSS = 5e-4  # of the first loss, over six steps in bf16; on a CPU they are at most 1.5e-4 apart, those in LIMITS 6e-4
LIMITS = {"text": 1e-3, "documents": 1e-3, "documents and windows": 1e-3, "preferences": 3e-3}


def compare_same_curves(context: CheckContext) -> Finding:
    """Train ways to compute in bf16 on the device, in engine native: losses must be those of a plain run."""
    cases = {PLAIN: (), **SAME_CURVE}
    trained, departures = _train({option: option_run(option, words) for option, words in cases.items()}, context)
    if PLAIN not in trained:
        raise CheckBroken("; ".join(departures))
    losses = {option: each.losses for option, each in trained.items()}
    pairs = {option: (found, losses.get(LIKE.get(option, PLAIN))) for option, found in losses.items()}
    apart = {option: most_apart(found, expected) / expected[0] for option, (found, expected) in pairs.items() if expected}
    departures += [f"{option} is {100 * share:.2f} % from what it must be" for option, share in apart.items() if not share <= OPTION_LOSS]
    held = {option: _optimizer_bytes(trained[option]) for option in (PLAIN, MOMENTS) if option in trained}
    if MOMENTS in held and not held[MOMENTS] < 0.75 * held[PLAIN]:
        departures.append(f"{MOMENTS} take {held[MOMENTS]} bytes with the weights, where plain ones take {held[PLAIN]}")
    if TIMELINE in trained:
        departures += timeline_departures(trained[TIMELINE].folder)
    figures = {"losses": losses, "apart, of the first loss": apart, "bytes of the optimizer": held}
    return Finding(figures=figures, departures=tuple(departures))


def compare_other_curves(context: CheckContext) -> Finding:
    """Train ways to compute that train other curves in bf16 on the device, in engine native: losses must be those of the same way in
    float32 on the CPU, and further than that from a run without it."""
    paths = {DOCUMENTS: _write_documents(context.folder), PAIRS: _write_pairs(context.folder)}
    given = {option: tuple(_with_path(word, paths) for word in words) for option, words in {PLAIN: (), **OTHER_CURVES}.items()}
    on_cpu = ("train.precision=fp32", "device=cpu")
    runs = {option: option_run(option, words) for option, words in given.items()}
    exact = {f"{option}, exact": option_run(f"{option}.cpu", given[option], on_cpu) for option in OTHER_CURVES}
    trained, departures = _train({**runs, **exact}, context)
    losses = {option: trained[option].losses for option in runs if option in trained}
    apart: dict[str, float] = {}
    for option in OTHER_CURVES:
        if option not in losses or (of_cpu := trained.get(f"{option}, exact")) is None:
            continue
        expected, limit = of_cpu.losses, LIMITS.get(option, OPTION_LOSS)
        apart[option] = most_apart(losses[option], expected) / expected[0]
        if not apart[option] <= limit:
            departures.append(f"{option} is {100 * apart[option]:.2f} % from what it must be")
        other = UNLIKE.get(option, PLAIN)
        if other in losses and not most_apart(losses[option], losses[other]) / losses[other][0] > limit:
            departures.append(f"{option} trains the curve of {other}")
    return Finding(figures={"losses": losses, "apart, of the first loss": apart}, departures=tuple(departures))


def timeline_departures(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the times of the steps in RUN_DIR/timeline of one rank: the passes of both micro-batches and the optimizer's
    step must lie inside their step, and fill some of it."""
    timeline = msgspec.json.decode((folder / FOLDER / "0.json").read_bytes(), type=RankTimeline)
    steps = [each.step for each in timeline.steps]
    if steps != list(range(TIMED[0], TIMED[1] + 1)):
        yield f"the timeline has the steps {steps}"
    for each in timeline.steps:
        kinds = [span.kind for span in each.spans]
        if any(kinds.count(kind) != count for kind, count in (("F", 2), ("B", 2), ("step", 1))):
            yield f"step {each.step} of the timeline has the spans {' '.join(kinds)}"
        slack = 1e-4  # seconds: files round them
        if not all(each.start - slack <= span.start <= span.end + slack <= each.end + 2 * slack for span in each.spans):
            yield f"a span of step {each.step} of the timeline lies outside of the step"
        busy = sum(span.end - span.start for span in each.spans if span.kind in ("F", "B", "step"))
        if not busy > 0.1 * (each.end - each.start) > 0:
            yield f"passes take {busy:.6f} of the {each.end - each.start:.6f} s of step {each.step} in the timeline"


def option_run(name: str, words: Sequence[str], where: Sequence[str] = ()) -> FitRun:
    """Return the run of an option, in bf16 unless it sets a precision, without the plain run's words that its own set."""
    own = {word.partition("=")[0] for word in words}
    plain = tuple(word for word in WORDS if word.partition("=")[0] not in own)
    return FitRun(name=f"option.{name.replace(' ', '.')}", recipe=RECIPE, words=(BF16, *plain, *words, *where))


def _with_path(word: str, paths: Mapping[str, Path]) -> str:
    """Return an override with a path in the place of its name."""
    key, _, value = word.partition("=")
    return f"{key}={paths[value]}" if value in paths else word


def _train(runs: Mapping[str, FitRun], context: CheckContext) -> tuple[dict[str, FinishedFit], list[str]]:
    """Train the runs of options; return those that have trained by option, and why each of the others has not."""
    trained, failed = fit_each(list(runs.values()), context)
    return {option: trained[run.name] for option, run in runs.items() if run.name in trained}, list(failed.values())


def _optimizer_bytes(trained: FinishedFit) -> float:
    """Return the measured bytes of the optimizer; nan where they are not known."""
    return next((each.measured for each in read_measured_run(trained.folder).memory if each.name == "optimizer" and each.measured), nan)


def _write_documents(folder: Path) -> Path:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} is {number * number}, "}) + "\n" for number in range(2000)), encoding="utf-8")
    return path


def _write_pairs(folder: Path) -> Path:
    """Write questions with a right and a wrong answer, of several lengths."""
    path = folder / "pairs.jsonl"
    rows = ({"prompt": f"{at} + 7 = ", "chosen": f"{at + 7}", "rejected": f"{at + 7 + at % 5}, or more"} for at in range(5, 3000, 7))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
