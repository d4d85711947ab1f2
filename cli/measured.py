"""What a run's folder holds: the plan beside what was measured, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

Unit = Literal["bytes", "seconds", "rate", "share"]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One figure: as planned and as measured, in SI; None where it is not known."""

    name: str
    unit: Unit
    planned: float | None
    measured: float | None

    @property
    def drift(self) -> float | None:
        """How far the measured figure lies above the planned one, as a share of it."""
        return self.measured / self.planned - 1 if self.planned and self.measured is not None else None


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A run, as far as its folder tells."""

    name: str
    steps: int  # done
    whole: int  # asked for
    starts: int
    restarts: tuple[tuple[int, int], ...]  # after faults: (steps that were done when it went on, steps that were lost)
    skipped: int  # steps that were left out, because a loss or gradient was not finite
    spikes: int  # losses that stood out
    goodput: float | None  # the share of its time that the last of its launches spent in steps that count
    again: tuple[tuple[int, int], ...]  # (step that was reached, step that the next start logged first), where steps were done twice
    saved: tuple[int, ...]
    device: str
    entropy: float | None  # of the training text by single tokens, nats
    memory: tuple[Beside, ...]
    time: tuple[Beside, ...]
    speed: tuple[Beside, ...]
    resident: int | None  # bytes of the process at the most, with all that is no tensor; of a GPU: what its allocator gave out
    losses: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]


def ran(folder: Path) -> Ran:
    """Read RUN_DIR, made by `distrain fit`; what is not there yet is None or empty."""
    run, plan, counted = (_read(folder / name) for name in ("run.json", "plan.json", "measured.json"))
    written = list(_lines(folder / "metrics.jsonl"))
    logged = [row for row in written if isinstance(row.get("step"), int) and "restart" not in row]
    rows = list({row["step"]: row for row in logged}.values())  # of a step that was done twice, the last time
    steady = [row for row in rows if "seconds" in row]
    steady = steady[1:] or steady  # the first has everything warming up in it
    return Ran(
        name=run.get("name", folder.name),
        steps=max((row["step"] for row in rows), default=0),
        whole=(plan.get("run") or {}).get("steps") or 0,
        starts=_starts(folder / "ranks" / "0.log"),
        restarts=tuple((row["step"], row["lost_steps"]) for row in written if "restart" in row),
        skipped=sum("skipped" in row for row in rows),
        spikes=sum("spike" in row for row in rows),
        goodput=next((row["goodput"] for row in reversed(written) if "goodput" in row), None),
        again=tuple((one["step"], two["step"]) for one, two in pairwise(logged) if two["step"] <= one["step"]),
        saved=tuple(sorted(int(each.name[5:]) for each in folder.glob("checkpoints/step_*") if each.name[5:].isdigit())),
        device=plan.get("device", ""),
        entropy=counted.get("unigram_entropy"),
        memory=tuple(_memory(plan, counted.get("memory") or {})),
        time=tuple(_time(plan, run, steady)),
        speed=tuple(_speed(plan, steady)),
        resident=max((row["memory_peak"] for row in steady if row.get("memory_peak")), default=None),
        losses=tuple((row["step"], row["loss"]) for row in rows if row.get("loss") is not None),
        validation=tuple((row["step"], row["validation_loss"]) for row in rows if row.get("validation_loss") is not None),
    )


def _memory(plan: Mapping[str, Any], counted: Mapping[str, int]) -> Iterator[Beside]:
    """Bytes by kind of the fullest rank. What a pass saves is counted with its logits."""
    memory = plan.get("memory")
    held: Mapping[str, int] = memory["stages"][memory["stage"]]["bytes"] if memory else {}
    for kind in ("weights", "gradients", "optimizer", "activations"):
        planned = held.get(kind, 0) + (held.get("logits", 0) if kind == "activations" else 0) if held else None
        yield Beside(name=kind, unit="bytes", planned=planned, measured=counted.get(kind))


def _time(plan: Mapping[str, Any], run: Mapping[str, Any], rows: Rows) -> Iterator[Beside]:
    """Seconds of a step and of its parts. Stages 1 and 2 gather weights in the optimizer's step, all else travels in the passes."""
    time = plan.get("time")
    yield Beside(name="step", unit="seconds", planned=time["step"] if time else None, measured=_middle(rows, "seconds"))
    gathers = (run.get("parallel") or {}).get("zero") in (1, 2)
    late = sum(each["exposed"] or 0.0 for each in plan.get("traffic", ()) if gathers and each["verb"] == "all_gather")
    planned: dict[str, float | None] = {"data": 0.0, "forward and backward": None, "optimizer step": None}
    if time:
        planned["forward and backward"] = time["compute"] + time["exposed"] + time["bubble"] - late
        planned["optimizer step"] = time["optimizer"] + late
    forward, backward = _middle(rows, "seconds_forward"), _middle(rows, "seconds_backward")
    passes = forward + backward if forward is not None and backward is not None else None
    found = {"data": _middle(rows, "seconds_data"), "forward and backward": passes, "optimizer step": _middle(rows, "seconds_step")}
    if passes is not None:
        yield from (Beside(name=name, unit="seconds", planned=planned[name], measured=found[name]) for name in planned)


def _speed(plan: Mapping[str, Any], rows: Rows) -> Iterator[Beside]:
    speed = plan.get("throughput") or {}
    for key, name, unit in (("tokens_per_second", "tokens/s", "rate"), ("mfu", "MFU", "share")):
        yield Beside(name=name, unit=unit, planned=speed.get(key), measured=_middle(rows, key))  # type: ignore[arg-type]


def _middle(rows: Rows, key: str) -> float | None:
    found = [row[key] for row in rows if row.get(key) is not None]
    return median(found) if found else None


def _starts(log: Path) -> int:
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return sum(line.startswith("== rank 0 of ") for line in lines)
    except OSError:
        return 0


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl; one that a crash cut short is left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
