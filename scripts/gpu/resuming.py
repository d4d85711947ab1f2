"""Checks of a run's life on a device: it is killed and resumed, generates text, and is profiled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...trainer.rundir.read_files import read_rows
from ...trainer.system.child_process import module_arguments, start_child
from .finding import CheckBroken, Finding
from .fit_runs import FitRun, Trained, fit, started_fit
from .place import Place
from .trainings import ONE_DEVICE, PLANNED, RECIPE

SAVED, STEPS_IN_ALL = 20, 60  # a checkpoint at every so many steps
WORDS = (
    *ONE_DEVICE, "model=tiny_llama", "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=2", "train.precision=fp32",
    f"train.steps={STEPS_IN_ALL}", "optim.warmup=0", "train.deterministic=true",
)  # fmt: skip


def kill_and_resume(place: Place) -> Finding:
    """Train a run to its end; train it again, kill it between two checkpoints, and resume: losses must be the same bits."""
    words = (*WORDS, "checkpoint=default", f"checkpoint.every={SAVED}")
    whole = fit(FitRun(name="whole", recipe=RECIPE, words=words), place)
    killed = FitRun(name="killed", recipe=RECIPE, words=words)
    last = _train_until(killed, place, SAVED + SAVED // 2)
    resumed = fit(killed, place)
    again = {row["step"]: row["loss"] for row in resumed.rows}
    differing = [row["step"] for row in whole.rows if again.get(row["step"]) != row["loss"]]
    departures = [f"losses differ from step {differing[0]} on"] if differing else []
    departures += [f"it was killed at step {last}, after it had ended"] if last >= STEPS_IN_ALL else []
    first = _resumed_at(resumed)
    departures += [] if 0 < first < STEPS_IN_ALL else [f"it went on at step {first}"]
    return Finding(figures={"killed after step": last, "went on at step": first, "steps": STEPS_IN_ALL}, departures=tuple(departures))


def _train_until(run: FitRun, place: Place, step: int) -> int:
    """Start a run, kill it with its ranks once it has logged `step`; return the last step that it logged. Raises CheckBroken."""
    file = place.folder / run.name / "metrics.jsonl"
    with started_fit(run, place) as child:
        while child.poll() is None and max((row.get("step", 0) for row in read_rows(file)), default=0) < step:
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    logged = [row["step"] for row in read_rows(file) if "step" in row]
    if not logged or logged[-1] < step:
        raise CheckBroken(f"{run.name} ended before step {step}")
    return int(logged[-1])


def _resumed_at(trained: Trained) -> int:
    """Return the first step of the last attempt."""
    steps = [int(row["step"]) for row in trained.rows]
    return next((two for one, two in zip(steps[-2::-1], steps[:0:-1], strict=True) if two <= one), steps[0])


def generate_text(place: Place) -> Finding:
    """Train on Python's own source, and generate from the newest checkpoint, on the device and on the CPU: the same text."""
    words = (*ONE_DEVICE, "model=tiny", "data=stdlib", "train.seq=64", "train.batch=16", "train.microbatch=16", "train.precision=fp32",
             "train.steps=60", "optim.lr=3e-3", "optim.warmup=0", "checkpoint=default")  # fmt: skip
    trained = fit(FitRun(name="text", recipe=RECIPE, words=words), place)
    on_device = _generated(trained, {})
    on_cpu = _generated(trained, {"CUDA_VISIBLE_DEVICES": ""})
    same = next((at for at, (one, other) in enumerate(zip(on_device, on_cpu, strict=False)) if one != other), len(on_cpu))
    departures = [] if same >= min(len(on_cpu), 20) else [f"the device's text is another from character {same} on"]
    return Finding(figures={"text": on_device, "same characters": same, "characters": len(on_cpu)}, departures=tuple(departures))


def _generated(trained: Trained, environment: Mapping[str, str]) -> str:
    words = ("generate", str(trained.folder), "--prompt", "def ", "--tokens", "40")
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_child(module_arguments("distrain.__main__", *words), {**os.environ, **environment}, **streams) as child:
        out, err = child.communicate()
    if child.returncode or not out.startswith("def "):
        raise CheckBroken(f"generate ended with {child.returncode}: {err.strip()[-300:]}")
    return str(out)


# What the host calls to wait for the device, or to read from it.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
MOST_WAITS = 1  # a step
TRACED = (6, 8)  # first and last step


def trace_steps(place: Place) -> Finding:
    """Profile three steps of GPT-2 124M: the trace must hold the device's kernels, and at most one wait for the device a step."""
    planned = PLANNED["gpt2_124m"]
    words = (*planned.overrides(place), f"log.profile=[{TRACED[0]},{TRACED[1]}]")
    trained = fit(FitRun(name="traced", recipe=planned.recipe, words=words), place)
    (file,) = (trained.folder / "trace").glob("*.json")
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    steps = TRACED[1] - TRACED[0] + 1
    kinds = Counter(str(event.get("cat")) for event in events if event.get("ph") == "X")
    names = Counter(str(event.get("name")) for event in events if event.get("ph") == "X")
    waits = sum(names[each] for each in WAITS) / steps
    kernels = kinds["kernel" if place.on_gpu else "cpu_op"] / steps
    busy = sum(event["dur"] for event in events if event.get("cat") == "kernel") / 1e6 / steps
    departures = [] if kernels else ["the trace holds no kernels"]
    departures += [f"{waits:.1f} waits for the device a step"] if waits > MOST_WAITS else []
    return Finding(
        figures={
            "kernels a step": kernels,
            "seconds of kernels a step": busy,
            "waits a step": waits,
            "waits by call": {each: names[each] / steps for each in WAITS},
            "longest kernels": _longest(events),
        },
        departures=tuple(departures),
    )


def _longest(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return seconds by kernel, of the ten that took longest."""
    seconds = Counter[str]()
    for event in events:
        if event.get("cat") == "kernel":
            seconds[str(event["name"])[:80]] += event["dur"] / 1e6
    return dict(seconds.most_common(10))
