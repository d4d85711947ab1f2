"""The critical path of a step: a chain of spans and messages, as long as the step, each of which starts where the one before ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from .timeline import StepSpan, Timeline

CLOSE = 1e-9  # share of a step by which sums of the same seconds may differ


class PathPiece(NamedTuple):
    """A span of the critical path, with the seconds of the message between stages that it waited for right before it starts."""

    span: StepSpan
    sent: float


class CriticalPath(NamedTuple):
    """The pieces in order of time, and their seconds by cause and by stage; each adds up to the step, but for `sends` by stage."""

    pieces: tuple[PathPiece, ...]
    by_cause: Mapping[str, float]  # computing, messages, sends, step, host
    by_stage: Mapping[int, float]


def critical_path(timeline: Timeline) -> CriticalPath:
    """Return the critical path of a step. Where two chains are equally long, it stays on a stage as long as it can."""
    walk = _Walk(timeline)
    pieces: list[PathPiece] = []
    span = max((stage.spans[-1] for stage in timeline.stages), key=lambda each: each.end)
    while True:
        before, sent = walk.preceding(span)
        pieces.append(PathPiece(span, sent))
        if before is None:
            break
        span = before
    pieces.reverse()
    return CriticalPath(tuple(pieces), _by_cause(pieces), _by_stage(pieces))


def slowest_stage(path: CriticalPath) -> int:
    """Return the stage that has most of the path."""
    return max(path.by_stage, key=path.by_stage.__getitem__)


def _by_cause(pieces: list[PathPiece]) -> dict[str, float]:
    seconds = dict.fromkeys(("computing", "messages", "sends", "step", "host"), 0.0)
    for span, sent in pieces:
        seconds["sends"] += sent
        seconds["sends" if span.kind == "send" else "messages"] += span.messages
        seconds[span.kind if span.kind in ("step", "host") else "computing"] += span.seconds - span.messages
    return seconds


def _by_stage(pieces: list[PathPiece]) -> dict[int, float]:
    seconds: dict[int, float] = defaultdict(float)
    for span, _ in pieces:
        seconds[span.stage] += span.seconds
    return dict(sorted(seconds.items()))


def _result(before: StepSpan | None, span: StepSpan) -> tuple[bool, int, int] | None:
    """(whether of a forward, the micro-batch, the part) of the result that is there when a span ends; a send's is of the pass before."""
    source = before if span.kind == "send" else span
    return (source.kind == "F", source.micro, source.part) if source and source.kind in ("F", "B", "I") else None


class _Walk:
    """Finds what each span of a timeline waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self.close = CLOSE * timeline.seconds
        self.before = {span: before for stage in timeline.stages for before, span in zip((None, *stage.spans), stage.spans, strict=False)}
        self.results = {key: span for stage in timeline.stages for span in stage.spans if (key := _result(self.before[span], span))}
        self.by_end = sorted((span for stage in timeline.stages for span in stage.spans), key=lambda span: span.end)

    def preceding(self, span: StepSpan) -> tuple[StepSpan | None, float]:
        """(the span at whose end this one could start, seconds of the message between them); None: it starts the step."""
        before = self.before[span]
        if before is not None and before.end >= span.start - self.close:
            return before, 0.0
        if not span.is_pass:
            return self._last_ended(span), 0.0
        part = span.part - 1 if span.kind == "F" else span.part + 1
        needed = self.results.get((span.kind == "F", span.micro, part))
        if needed is None or span.start <= self.close:
            return None, 0.0
        sent = span.start - needed.end
        return needed, sent if sent > self.close else 0.0

    def _last_ended(self, span: StepSpan) -> StepSpan | None:
        """The span of any stage at whose end one that is no pass starts: all stages wait for the last."""
        ended = [each for each in self.by_end if abs(each.end - span.start) <= self.close and each.start < span.start]
        return ended[-1] if ended else None
