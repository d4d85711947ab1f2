"""What a run's folder holds: the plan beside what was measured, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from .checkpoints import steps
from .read_files import at, natural, number, read_lines, read_mapping, read_rows

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
    lost: int = 0  # logged steps whose loss was not finite, beside those that were left out
    damaged: tuple[str, ...] = ()  # files that are not as they were written


def ran(folder: Path) -> Ran:
    """Read RUN_DIR, made by `distrain fit`; what is not there yet, or not as it was written, is None or empty."""
    damaged = list[str]()
    run, plan, counted = (_read(folder / name, damaged) for name in ("run.json", "plan.json", "measured.json"))
    written = list(read_rows(folder / "metrics.jsonl"))
    if not written and any(line.strip() for line in read_lines(folder / "metrics.jsonl")):
        damaged.append("metrics.jsonl")
    logged = [row for row in map(_figures, written) if "step" in row and "restart" not in row]
    rows = list({int(row["step"]): row for row in logged}.values())  # of a step that was done twice, the last time
    last = list({step: row for row in written if (step := natural(row.get("step"))) is not None and "restart" not in row}.values())
    steady = [row for row in rows if "seconds" in row]
    steady = steady[1:] or steady  # the first has everything warming up in it
    name, again = run.get("name"), pairwise(int(row["step"]) for row in logged)
    return Ran(
        name=name if isinstance(name, str) else folder.name,
        steps=max((int(row["step"]) for row in rows), default=0),
        whole=natural(at(plan, "run", "steps")) or 0,
        starts=sum(line.startswith(b"== rank 0 of ") for line in read_lines(folder / "ranks" / "0.log")),
        restarts=tuple(_restarts(written)),
        skipped=sum("skipped" in row for row in last),
        spikes=sum("spike" in row for row in last),
        goodput=next((each for row in reversed(written) if (each := number(row.get("goodput"))) is not None), None),
        again=tuple((one, two) for one, two in again if two <= one),
        saved=tuple(_saved(folder / "checkpoints")),
        device=str(plan.get("device", "")),
        entropy=number(counted.get("unigram_entropy")),
        memory=tuple(_memory(plan, counted)),
        time=tuple(_time(plan, run, steady)),
        speed=tuple(_speed(plan, steady)),
        resident=max((int(row["memory_peak"]) for row in steady if row.get("memory_peak")), default=None),
        losses=tuple((int(row["step"]), row["loss"]) for row in rows if "loss" in row),
        validation=tuple((int(row["step"]), row["validation_loss"]) for row in rows if "validation_loss" in row),
        lost=sum(row.get("loss", 0) is None and "skipped" not in row for row in last),
        damaged=tuple(damaged),
    )


def _saved(folder: Path) -> list[int]:
    """The steps that have a checkpoint's folder, rising; none where the folder can't be read."""
    with suppress(OSError):
        return sorted(steps(folder))
    return []


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row, its step a count."""
    found = {key: each for key, value in row.items() if (each := number(value)) is not None}
    if natural(row.get("step")) is None:
        found.pop("step", None)
    return found


def _restarts(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    for row in rows:
        step, lost = natural(row.get("step")), natural(row.get("lost_steps"))
        if "restart" in row and step is not None and lost is not None:
            yield step, lost


def _memory(plan: Mapping[str, Any], counted: Mapping[str, Any]) -> Iterator[Beside]:
    """Bytes by kind of the fullest rank. What a pass saves is counted with its logits."""
    held = at(plan, "memory", "stages", at(plan, "memory", "stage"), "bytes")
    for kind in ("weights", "gradients", "optimizer", "activations"):
        planned = number(at(held, kind))
        if planned is not None and kind == "activations":
            planned += number(at(held, "logits")) or 0
        yield Beside(name=kind, unit="bytes", planned=planned, measured=number(at(counted, "memory", kind)))


def _time(plan: Mapping[str, Any], run: Mapping[str, Any], rows: Rows) -> Iterator[Beside]:
    """Seconds of a step and of its parts. Stages 1 and 2 gather weights in the optimizer's step, all else travels in the passes."""
    yield Beside(name="step", unit="seconds", planned=number(at(plan, "time", "step")), measured=_middle(rows, "seconds"))
    gathers, messages = at(run, "parallel", "zero") in (1, 2), plan.get("traffic")
    late = sum(
        number(at(each, "exposed")) or 0.0
        for each in (messages if isinstance(messages, list) else ())
        if gathers and at(each, "verb") == "all_gather"
    )
    planned: dict[str, float | None] = {"data": 0.0, "forward and backward": None, "optimizer step": None}
    parts = [number(at(plan, "time", key)) for key in ("compute", "exposed", "bubble", "optimizer")]
    if None not in parts:
        compute, exposed, bubble, optimizer = (each or 0.0 for each in parts)
        planned["forward and backward"] = compute + exposed + bubble - late
        planned["optimizer step"] = optimizer + late
    forward, backward = _middle(rows, "seconds_forward"), _middle(rows, "seconds_backward")
    passes = forward + backward if forward is not None and backward is not None else None
    found = {"data": _middle(rows, "seconds_data"), "forward and backward": passes, "optimizer step": _middle(rows, "seconds_step")}
    if passes is not None:
        yield from (Beside(name=name, unit="seconds", planned=planned[name], measured=found[name]) for name in planned)


def _speed(plan: Mapping[str, Any], rows: Rows) -> Iterator[Beside]:
    for key, name, unit in (("tokens_per_second", "tokens/s", "rate"), ("mfu", "MFU", "share")):
        yield Beside(name=name, unit=unit, planned=number(at(plan, "throughput", key)), measured=_middle(rows, key))  # type: ignore[arg-type]


def _middle(rows: Rows, key: str) -> float | None:
    found = [row[key] for row in rows if row.get(key) is not None]
    return median(found) if found else None


def _read(file: Path, damaged: list[str]) -> dict[str, Any]:
    """A file's object, {} where there is none; a file that is there and holds none is named in `damaged`."""
    try:
        found = read_mapping(file)
    except FileNotFoundError:
        return {}
    if found is None:
        damaged.append(file.name)
    return found or {}
