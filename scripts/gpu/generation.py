"""The check that a device generates the text that the CPU does."""

from __future__ import annotations

from collections.abc import Mapping

from .check_context import CheckContext
from .finding import CheckBroken, Finding
from .fit_runs import ONE_DEVICE, RECIPE, UNTIMED, FinishedFit, FitRun, fit
from .run_distrain import run_distrain


def generate_text(context: CheckContext) -> Finding:
    """Train on Python's own source, and generate from the newest checkpoint, on the device and on the CPU: the same text."""
    words = (*ONE_DEVICE, "model=tiny", "data=stdlib", "train.seq=64", "train.batch=16", "train.microbatch=16", "train.precision=fp32",
             "train.steps=60", "optim.lr=3e-3", "optim.warmup=0", "checkpoint=default")  # fmt: skip
    trained = fit(FitRun(name="text", recipe=RECIPE, words=words), context, UNTIMED)
    on_device = _generate(trained, UNTIMED)
    on_cpu = _generate(trained, {**UNTIMED, "CUDA_VISIBLE_DEVICES": ""})
    same = next((at for at, (one, other) in enumerate(zip(on_device, on_cpu, strict=False)) if one != other), len(on_cpu))
    departures = [] if same >= min(len(on_cpu), 20) else [f"the device's text is another from character {same} on"]
    return Finding(figures={"text": on_device, "same characters": same, "characters": len(on_cpu)}, departures=tuple(departures))


def _generate(trained: FinishedFit, environment: Mapping[str, str]) -> str:
    words = ("generate", str(trained.folder), "--prompt", "def ", "--tokens", "40")
    out = run_distrain(*words, environment=environment)
    if not out.startswith("def "):
        raise CheckBroken(f"generate printed {out[:40]!r}")
    return out
