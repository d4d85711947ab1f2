"""Pipeline schedules as data: the actions of each stage in order, the micro-batches that it holds, the bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """Forward (F), backward (B) or weight gradient (W) of a micro-batch on a chunk; with W apart, B computes only the input's gradient."""

    kind: Literal["F", "B", "W"]
    micro: int
    chunk: int = 0


def gpipe(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """All forwards, then all backwards, last first (arXiv:1811.06965)."""
    return [Action("F", micro) for micro in range(micros)] + [Action("B", micro) for micro in reversed(range(micros))]


def one_f_one_b(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """One forward, one backward, after a warm-up of one forward for each later stage (arXiv:2104.04473 section 2.2.1)."""
    warm = min(stages - stage - 1, micros)
    actions = [Action("F", micro) for micro in range(warm)]
    for micro in range(micros - warm):
        actions += [Action("F", warm + micro), Action("B", micro)]
    return actions + [Action("B", micro) for micro in range(micros - warm, micros)]


def interleaved(stage: int, stages: int, micros: int, chunks: int) -> list[Action]:
    """1F1B over `chunks` groups of layers a stage, micro-batches in rounds of `stages` (arXiv:2104.04473 section 2.2.2)."""
    total = micros * chunks
    warm = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)

    def at(step: int, kind: Literal["F", "B"]) -> Action:
        rounds, inside = divmod(step, stages * chunks)
        chunk, micro = divmod(inside, stages)
        return Action(kind, rounds * stages + micro, chunk if kind == "F" else chunks - 1 - chunk)

    actions = [at(step, "F") for step in range(warm)]
    for step in range(total - warm):
        actions += [at(warm + step, "F"), at(step, "B")]
    return actions + [at(step, "B") for step in range(total - warm, total)]


def zero_bubble_h1(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """1F1B whose weight gradients wait one micro-batch for each earlier stage; its memory is that of 1F1B's first stage
    (arXiv:2401.10241 section 3.1)."""
    actions: list[Action] = []
    backwards = weights = 0
    for action in one_f_one_b(stage, stages, micros):
        actions.append(action)
        if action.kind == "B":
            backwards += 1
            if backwards - weights > stage:
                actions.append(Action("W", weights))
                weights += 1
    return actions + [Action("W", micro) for micro in range(weights, micros)]


def dualpipev(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """Two parts of the model a stage, chunk 0 on the way out and chunk 1 on the way back, in the order of DeepSpeed's
    DualPipeVSchedule (arXiv:2412.19437 section 3.2.1, weight gradients not apart). Needs at least 2 x stages micro-batches."""
    after = stages - stage - 1
    order = (
        "F0 " * 2 * after
        + "F0 F1 " * (stage + 1)
        + "B1 F1 " * after
        + "F0 B1 F1 B0 " * (micros - 2 * stages + stage + 1)
        + "B1 F1 B0 " * after
        + "B1 B0 " * (stage + 1)
        + "B0 " * after
    ).split()
    micro = dict.fromkeys(("F0", "F1", "B0", "B1"), -1)
    actions: list[Action] = []
    for step in order:
        micro[step] += 1
        actions.append(Action("F" if step[0] == "F" else "B", micro[step], int(step[1])))
    return actions


@dataclass(frozen=True, kw_only=True, eq=False)  # rows are compared by identity: they are keys of caches
class Schedule:
    """One row: the actions of a stage, and what a plan needs to know about them. `p` is the number of stages, `m` of micro-batches."""

    actions: Callable[[int, int, int, int], list[Action]]  # (stage, p, m, chunks)
    source: str
    in_flight_formula: Callable[[int, int, int, int], float] | None = None
    """(stage, p, m, chunks) -> the most micro-batches that a stage holds at once, a chunk being a part of one; None: count them."""
    fill: Callable[[int], float] = lambda chunks: 1.0
    """chunks -> the share of the other stages' forward and backward that a step waits while the pipeline fills and drains."""
    filled_by_weights: Callable[[int, int], float] = lambda stages, micros: 0.0
    """(p, m) -> the share of the other stages' weight gradients that is computed in that wait."""
    weight_versions: Callable[[int, int], int] = lambda stage, stages: 1
    """(stage, p) -> copies of the weights that a stage keeps."""
    chunked: bool = False  # a stage runs `parallel.chunks` parts of the model
    folded: bool = False  # stage r of p runs the parts r and 2p - 1 - r of the model
    forward_first: bool = False  # no backward before the last forward
    flushes: bool = True  # every micro-batch of a step meets the same weights

    def in_flight(self, stage: int, stages: int, micros: int, chunks: int) -> float:
        """The most micro-batches that a stage holds at once."""
        if self.in_flight_formula:
            return self.in_flight_formula(stage, stages, micros, chunks)
        return peak_in_flight(self.actions(stage, stages, micros, chunks), self.parts(chunks))

    @cached_property
    def is_plain(self) -> bool:
        """Whether each stage is one part of the model that runs whole forwards and backwards, with a flush: an engine that executes
        actions runs such a schedule without knowing it."""
        splits_backward = any(action.kind == "W" for action in self.actions(0, 2, 2, 1))
        return self.flushes and not (self.chunked or self.folded or splits_backward)

    def parts(self, chunks: int) -> int:
        """Parts of the model that a stage runs one after the other."""
        return 2 if self.folded else chunks


def _one_f_one_b_in_flight(stage: int, stages: int, micros: int, chunks: int) -> float:
    return min(stages - stage, micros)


def _interleaved_in_flight(stage: int, stages: int, micros: int, chunks: int) -> float:
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micros * chunks) / chunks


def _zero_bubble_filled(stages: int, micros: int) -> float:
    """Two weight gradients of each later stage, less the missing micro-batches where there are fewer than stages."""
    return 2.0 - max(0, stages - micros) / max(1, stages - 1)


def _dualpipev_filled(stages: int, micros: int) -> float:
    """Half a forward of each stage, which takes as long as a weight gradient.

    DeepSpeed sends a forward's result with the backward that it pairs it with, so half of what the other direction could fill stays
    open.
    """
    return 0.5 * stages / max(1, stages - 1)


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(
        actions=one_f_one_b,
        in_flight_formula=_one_f_one_b_in_flight,
        source="arXiv:2104.04473",
    ),
    "gpipe": Schedule(
        actions=gpipe,
        in_flight_formula=lambda stage, stages, micros, chunks: micros,
        forward_first=True,
        source="arXiv:1811.06965",
    ),
    "interleaved": Schedule(
        actions=interleaved,
        in_flight_formula=_interleaved_in_flight,
        fill=lambda chunks: 1.0 / chunks,
        chunked=True,
        source="arXiv:2104.04473",
    ),
    "zb_h1": Schedule(
        actions=zero_bubble_h1,
        in_flight_formula=lambda stage, stages, micros, chunks: min(stages, micros),
        filled_by_weights=_zero_bubble_filled,
        source="arXiv:2401.10241",
    ),
    "pipedream": Schedule(
        actions=one_f_one_b,
        in_flight_formula=_one_f_one_b_in_flight,
        fill=lambda chunks: 0.0,
        weight_versions=lambda stage, stages: stages - stage,
        flushes=False,
        source="arXiv:1806.03377",
    ),
    "pipedream_2bw": Schedule(
        actions=one_f_one_b,
        in_flight_formula=_one_f_one_b_in_flight,
        fill=lambda chunks: 0.0,
        weight_versions=lambda stage, stages: 2 if stages > 1 else 1,
        flushes=False,
        source="arXiv:2006.09503",
    ),
    "dualpipev": Schedule(
        actions=dualpipev,
        in_flight_formula=lambda stage, stages, micros, chunks: stages + 0.5,
        filled_by_weights=_dualpipev_filled,
        folded=True,
        source="deepspeed 0.19 DualPipeVSchedule",
    ),
}


def bubble_share(schedule: Schedule, stages: int, micros: int, chunks: int) -> float:
    """The share of a step that even stages idle: (p - 1)/(m + p - 1) for 1F1B, a backward taking as long as two forwards."""
    idle = (stages - 1) * max(0.0, schedule.fill(chunks) - schedule.filled_by_weights(stages, micros) / 3)
    return idle / (micros + idle)


def peak_in_flight(actions: Iterable[Action], chunks: int = 1) -> float:
    """The most micro-batches that a stage holds at once, counted from its actions; a chunk is a part of one."""
    actions = list(actions)
    release = "W" if any(action.kind == "W" for action in actions) else "B"
    held = most = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind == release)
        most = max(most, held)
    return most / chunks
