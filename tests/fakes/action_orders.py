"""Drawn legal orders of actions: every valid topological order of a pipeline's forwards, backwards and weight gradients can be drawn."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from distrain.trainer.plan.layout.schedules import Action, Kind, part_of

Lists = list[list[Action]]

KINDS: tuple[tuple[Kind, ...], ...] = (("F", "B"), ("F", "I", "W"))  # of a micro-batch on a part of the model


class Pipeline(NamedTuple):
    """The shape of a pipeline; a stage of a `folded` one has two parts of the model, out and back."""

    stages: int
    micros: int
    chunks: int
    folded: bool


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Pipelines of at most four stages, four micro-batches and three parts a stage."""
    folded = draw(st.booleans())
    return Pipeline(draw(st.integers(1, 4)), draw(st.integers(1, 4)), 2 if folded else draw(st.integers(1, 3)), folded)


@st.composite
def action_orders(draw: st.DrawFn, pipeline: Pipeline) -> Lists:
    """Each stage's actions, taken one by one from those that can start, with whole and split backwards mixed."""
    stages, micros, chunks, folded = pipeline
    left: list[tuple[int, Action]] = []
    for stage in range(stages):
        for chunk in range(chunks):
            for micro in range(micros):
                left += [(stage, Action(kind, micro, chunk)) for kind in draw(st.sampled_from(KINDS))]
    lists: Lists = [[] for _ in range(stages)]
    ran: set[tuple[str, int, int]] = set()
    while left:
        places = [part_of(stage, action.chunk, stages, folded=folded) for stage, action in left]
        ready = [at for at, (_, action) in enumerate(left) if can_start(action, places[at], stages * chunks - 1, ran)]
        at = draw(st.sampled_from(ready))
        stage, action = left.pop(at)
        lists[stage].append(action)
        ran.add((action.kind.replace("I", "B"), action.micro, places[at]))
    return lists


def can_start(action: Action, part: int, last: int, ran: set[tuple[str, int, int]]) -> bool:
    """Whether all that an action needs has run: (kind, micro-batch, part), an I counted as a B; `last` is the model's last part."""
    kind, micro, _ = action
    match kind:
        case "F":
            return part == 0 or ("F", micro, part - 1) in ran
        case "B" | "I":
            return ("F", micro, part) in ran and (part == last or ("B", micro, part + 1) in ran)
        case _:
            return ("B", micro, part) in ran
