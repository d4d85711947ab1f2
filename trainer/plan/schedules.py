"""Pipeline schedules as plain data: what each stage does in order, what it holds meanwhile, what the fill costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """Forward (F), backward (B; with W apart: of the input alone) or weight gradient (W) of a micro-batch's chunk."""

    kind: Literal["F", "B", "W"]
    micro: int
    chunk: int = 0


def gpipe(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """All forwards, then all backwards, last first (arXiv:1811.06965)."""
    return [Action("F", micro) for micro in range(micros)] + [Action("B", micro) for micro in reversed(range(micros))]


def one_f_one_b(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """One forward, one backward after a warm-up of as many forwards as stages follow (arXiv:2104.04473 section 2.2.1)."""
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
    """1F1B whose weight gradients wait as many micro-batches as stages come before: memory of 1F1B's first stage
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
    """A stage's two parts of the model, chunk 0 on the way out and 1 on the way back, in the order of DeepSpeed's
    DualPipeVSchedule (arXiv:2412.19437 section 3.2.1, weight gradients not apart); at least 2 x stages micro-batches."""
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
    for word in order:
        micro[word] += 1
        actions.append(Action("F" if word[0] == "F" else "B", micro[word], int(word[1])))
    return actions


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One row: actions of a stage; micro-batches whose tensors it holds at once at the most (of whole stages: a chunk is
    a part of one); the part of the other stages' (forward + backward) that a step waits while the pipeline fills and
    drains, given chunks, and that of their weight gradients which fills the wait, given stages and micro-batches; copies of
    the weights a stage keeps. `folded`: stage r of p holds the parts r and 2p - 1 - r of the model."""

    actions: Callable[[int, int, int, int], list[Action]]
    in_flight: Callable[[int, int, int, int], float]
    fill: Callable[[int], float]
    hidden: Callable[[int, int], float] = lambda stages, micros: 0.0
    versions: Callable[[int, int], int] = lambda stage, stages: 1
    chunked: bool = False
    folded: bool = False
    forward_first: bool = False  # no backward before the last forward
    flushes: bool = True
    source: str

    def parts(self, chunks: int) -> int:
        """Parts of the model that a stage runs one after the other."""
        return 2 if self.folded else chunks


def _one_f_one_b_held(stage: int, stages: int, micros: int, chunks: int) -> float:
    return min(stages - stage, micros)


def _interleaved_held(stage: int, stages: int, micros: int, chunks: int) -> float:
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micros * chunks) / chunks


def _zero_bubble_hidden(stages: int, micros: int) -> float:
    """Two weight gradients a stage that follows, but for the micro-batches that are missing where they are fewer than stages."""
    return 2.0 - max(0, stages - micros) / max(1, stages - 1)


def _dualpipev_hidden(stages: int, micros: int) -> float:
    """Half a forward of each stage, which takes as long as a weight gradient: DeepSpeed sends a forward's result with the backward
    that it pairs it with, so that a half of what the other way could fill stays open."""
    return 0.5 * stages / max(1, stages - 1)


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(
        actions=one_f_one_b,
        in_flight=_one_f_one_b_held,
        fill=lambda chunks: 1.0,
        source="arXiv:2104.04473",
    ),
    "gpipe": Schedule(
        actions=gpipe,
        in_flight=lambda stage, stages, micros, chunks: micros,
        fill=lambda chunks: 1.0,
        forward_first=True,
        source="arXiv:1811.06965",
    ),
    "interleaved": Schedule(
        actions=interleaved,
        in_flight=_interleaved_held,
        fill=lambda chunks: 1.0 / chunks,
        chunked=True,
        source="arXiv:2104.04473",
    ),
    "zb_h1": Schedule(
        actions=zero_bubble_h1,
        in_flight=lambda stage, stages, micros, chunks: min(stages, micros),
        fill=lambda chunks: 1.0,
        hidden=_zero_bubble_hidden,
        source="arXiv:2401.10241",
    ),
    "pipedream": Schedule(
        actions=one_f_one_b,
        in_flight=_one_f_one_b_held,
        fill=lambda chunks: 0.0,
        versions=lambda stage, stages: stages - stage,
        flushes=False,
        source="arXiv:1806.03377",
    ),
    "pipedream_2bw": Schedule(
        actions=one_f_one_b,
        in_flight=_one_f_one_b_held,
        fill=lambda chunks: 0.0,
        versions=lambda stage, stages: 2 if stages > 1 else 1,
        flushes=False,
        source="arXiv:2006.09503",
    ),
    "dualpipev": Schedule(
        actions=dualpipev,
        in_flight=lambda stage, stages, micros, chunks: stages + 0.5,
        fill=lambda chunks: 1.0,
        hidden=_dualpipev_hidden,
        folded=True,
        source="deepspeed 0.19 DualPipeVSchedule",
    ),
}


def bubble_share(schedule: Schedule, stages: int, micros: int, chunks: int) -> float:
    """Share of a step that even stages wait: (p - 1)/(m + p - 1) for 1F1B, backward being two forwards."""
    idle = (stages - 1) * max(0.0, schedule.fill(chunks) - schedule.hidden(stages, micros) / 3)
    return idle / (micros + idle)


def held_at_once(actions: Iterable[Action], chunks: int = 1) -> float:
    """The most micro-batches whose tensors a stage holds at once, counted from its actions; a chunk is a part of one."""
    rows = list(actions)
    last = "W" if any(action.kind == "W" for action in rows) else "B"
    held = most = 0
    for action in rows:
        held += (action.kind == "F") - (action.kind == last)
        most = max(most, held)
    return most / chunks
