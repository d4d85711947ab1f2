"""Records when a rank does what in a step: spans on the host's clock, or on a GPU between events of its stream."""

from __future__ import annotations

from time import perf_counter, process_time
from typing import Any

import torch

from ..plan.timeline.timed_spans import NONE, TimedSpan, TimedStep

Mark = Any  # seconds of perf_counter, or a CUDA event


class SpanRecorder:
    """Keeps the spans of steps.

    A GPU runs kernels later than the host launches them, so that its spans lie between events of the stream. They are read when all steps
    are done: until then no host waits for its device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[int, Mark, Mark, float]] = []
        self._spans: list[list[tuple[str, int, int, Mark, Mark]]] = []
        self._base: tuple[Mark, float] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._base = self.mark(), perf_counter()

    def mark(self) -> Mark:
        """Return this moment."""
        if self._device.type != "cuda":
            return perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin_step(self) -> None:
        """Begin a step."""
        self._spans.append([])
        self._cpu = process_time()
        self._start = self.mark()

    def end_step(self, step: int) -> None:
        """End the step with this number, counted from 1."""
        self._steps.append((step, self._start, self.mark(), process_time() - self._cpu))

    def add(self, kind: str, start: Mark, micro: int = NONE, part: int = NONE) -> None:
        """Add a span that began at a mark and ends now."""
        self._spans[-1].append((kind, micro, part, start, self.mark()))

    def read_steps(self) -> list[TimedStep]:
        """Return the steps that have ended. On a GPU the host waits for its device."""
        if self._base:
            torch.cuda.synchronize(self._device)
        return [
            TimedStep(
                step,
                self._seconds(start),
                self._seconds(end),
                cpu,
                tuple([TimedSpan(kind, micro, part, self._seconds(one), self._seconds(two)) for kind, micro, part, one, two in spans]),
            )
            for (step, start, end, cpu), spans in zip(self._steps, self._spans, strict=False)
        ]

    def _seconds(self, mark: Mark) -> float:
        """A mark in seconds of perf_counter."""
        if self._base is None:
            return float(mark)
        base, at = self._base
        return at + float(base.elapsed_time(mark)) / 1e3
