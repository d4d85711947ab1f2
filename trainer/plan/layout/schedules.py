"""Pipeline schedules as data: the actions of each stage in order, the micro-batches that it holds, the bubble."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

from .update_delay import Delay

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """Forward (F) or backward (B) of a micro-batch on a chunk, or a backward in two: the input's gradient (I), the weights' (W)."""

    kind: Kind
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
        if action.kind == "F":
            actions.append(action)
        else:
            actions.append(Action("I", action.micro))
            backwards += 1
            if backwards - weights > stage:
                actions.append(Action("W", weights))
                weights += 1
    return actions + [Action("W", micro) for micro in range(weights, micros)]


def zero_bubble_v(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """Two parts of the model a stage, chunk 0 on the way out and chunk 1 on the way back, in the memory of 1F1B's first stage;
    where F, I and W take equally long, a stage that has begun never waits (arXiv:2401.10241 section 6)."""
    left = stages - stage
    more = max(0, micros - 2 * stages + 1)
    order = (
        "F0 " * (2 * left - 1)
        + "F1 F0 " * stage
        + "F1 I1 W1 " * left
        + "F0 I0 W0 F1 I1 W1 " * (more + stage)
        + "I0 W0 F1 I1 W1 " * (left - 1)
        + "I0 I1 " * stage
        + "I0 W0 " * left
        + "W1 " * stage
        + "W0 " * stage
    )
    return _actions_of_order(order, micros)


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
    )
    return _actions_of_order(order, micros)


def dualpipev_w(stage: int, stages: int, micros: int, chunks: int = 1) -> list[Action]:
    """DualPipeV with weight gradients apart where a stage would wait, at its two ends (arXiv:2412.19437 section 3.2.1; a forward and a
    backward that it overlaps run one after the other). Needs at least 2 x stages micro-batches."""
    after = stages - stage - 1
    last = ("1 0 " * (stage + 1)).split()  # the chunks of backwards behind the last forward
    apart = last[stage + 1 :] + ["0"] * after  # and of those with weight gradients apart
    order = (
        "F0 " * 2 * after
        + "F0 F1 " * (stage + 1)
        + "I1 W1 F1 " * after
        + "F0 B1 F1 B0 " * (micros - 2 * stages + stage + 1)
        + "B1 F1 B0 " * after
        + "".join(f"B{chunk} " for chunk in last[: stage + 1])
        + "".join(f"I{chunk} " for chunk in last[stage + 1 :])
        + "".join(f"W{chunk} I0 " for chunk in apart[:after])
        + "".join(f"W{chunk} " for chunk in apart[after:])
    )
    return _actions_of_order(order, micros)


def _actions_of_order(order: str, micros: int) -> list[Action]:
    """The actions of an order like `F0 I0 W0`: forwards and backwards of a chunk take the micro-batches in turn, its weight gradients
    those of its I in turn; those beyond the last micro-batch are left out."""
    turns: Counter[str] = Counter()
    apart: defaultdict[int, deque[int]] = defaultdict(deque)  # chunk -> the micro-batches whose weight gradients are to come
    actions: list[Action] = []
    for step in order.split():
        kind, chunk = cast(Kind, step[0]), int(step[1])
        if kind == "W":
            micro = apart[chunk].popleft()
        else:
            turn = step.replace("I", "B")
            micro = turns[turn]
            turns[turn] += 1
            if kind == "I":
                apart[chunk].append(micro)
        if micro < micros:
            actions.append(Action(kind, micro, chunk))
    return actions


def part_of(stage: int, chunk: int, stages: int, *, folded: bool) -> int:
    """The part of the model, counted along it, that is a stage's chunk: chunks go round the stages, or out and back (`folded`)."""
    return 2 * stages - 1 - stage if folded and chunk else chunk * stages + stage


def stage_and_chunk(part: int, stages: int, *, folded: bool) -> tuple[int, int]:
    """The stage that runs a part of the model, and which of its chunks the part is."""
    chunk, stage = divmod(part, stages)
    return (stages - 1 - stage if folded and chunk else stage), chunk


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
    delay: Delay | None = None
    """How late weights are updated without a flush; None: every micro-batch of a step meets the same weights, and the step flushes."""
    chunked: bool = False  # a stage runs `parallel.chunks` parts of the model
    folded: bool = False  # stage r of p runs the parts r and 2p - 1 - r of the model
    forward_first: bool = False  # no backward before the last forward
    defers_weight_gradients: bool | None = None  # weights' gradients are computed apart on some stage; None: as stage 0 does
    simulated: bool = False  # it has no closed forms: its bubble is that of a simulated step

    def in_flight(self, stage: int, stages: int, micros: int, chunks: int) -> float:
        """The most micro-batches that a stage holds at once."""
        if self.in_flight_formula:
            return self.in_flight_formula(stage, stages, micros, chunks)
        return peak_in_flight(self.actions(stage, stages, micros, chunks), self.parts(chunks))

    @property
    def flushes(self) -> bool:
        """Whether each step ends with a flush."""
        return self.delay is None

    @cached_property
    def is_plain(self) -> bool:
        """Whether each stage is one part of the model that runs whole forwards and backwards, with a flush: an engine that executes
        actions runs such a schedule without knowing it."""
        return self.flushes and not (self.chunked or self.folded or self.splits_backward)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weights' gradients are computed apart from their inputs'."""
        if self.defers_weight_gradients is not None:
            return self.defers_weight_gradients
        return any(action.kind == "W" for action in self.actions(0, 2, 4, self.parts(2)))

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


def _zero_bubble_v_in_flight(stage: int, stages: int, micros: int, chunks: int) -> float:
    """As many micro-batches as stages, of 2 x stages - 1 or more; of fewer, the halves that come before the first weight gradient."""
    return (min(micros, 2 * stages - 1 - stage) + min(micros, stage + 1)) / 2


def _zero_bubble_v_filled(stages: int, micros: int) -> float:
    """All but half a forward of each later stage, or more where there are fewer than 1.5 x stages micro-batches; a forward, an input's
    gradient and a weight gradient count alike."""
    return 3.0 - max(0.5, (2 * stages - 1 - micros) / max(1, stages - 1))


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
        delay=Delay(late=lambda stage, stages: stages - 1 - stage, each_micro_batch=True),
        source="arXiv:1806.03377",
    ),
    "pipedream_2bw": Schedule(
        actions=one_f_one_b,
        in_flight_formula=_one_f_one_b_in_flight,
        fill=lambda chunks: 0.0,
        delay=Delay(late=lambda stage, stages: min(1, stages - 1), each_micro_batch=False),
        source="arXiv:2006.09503",
    ),
    "zb_v": Schedule(
        actions=zero_bubble_v,
        in_flight_formula=_zero_bubble_v_in_flight,
        filled_by_weights=_zero_bubble_v_filled,
        folded=True,
        source="arXiv:2401.10241",
    ),
    "dualpipev": Schedule(
        actions=dualpipev,
        in_flight_formula=lambda stage, stages, micros, chunks: stages + 0.5,
        filled_by_weights=_dualpipev_filled,
        folded=True,
        source="deepspeed 0.19 DualPipeVSchedule",
    ),
    "dualpipev_w": Schedule(
        actions=dualpipev_w,
        in_flight_formula=lambda stage, stages, micros, chunks: stages + 0.5,
        filled_by_weights=lambda stages, micros: 2.5,  # all but half a forward of each later stage
        folded=True,
        source="arXiv:2412.19437",
    ),
}


def bubble_share(schedule: Schedule, stages: int, micros: int, chunks: int) -> float:
    """The share of a step that even stages idle: (p - 1)/(m + p - 1) for 1F1B, a backward taking as long as two forwards."""
    idle = (stages - 1) * max(0.0, schedule.fill(chunks) - schedule.filled_by_weights(stages, micros) / 3)
    return idle / (micros + idle)


def peak_in_flight(actions: Iterable[Action], chunks: int = 1) -> float:
    """The most micro-batches that a stage holds at once, counted from its actions; a chunk is a part of one.

    A micro-batch is held from its forward to its backward, or to its weights' gradient where the backward is in two.
    """
    held = most = 0
    for kind, _, _ in actions:
        held += (kind == "F") - (kind in "BW")
        most = max(most, held)
    return most / chunks
