"""The verdict on how a layout's ranks ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .fork_client import JobResult
from .judge import LayoutVerdict


def exit_verdict(job: JobResult, limit: float | None) -> tuple[LayoutVerdict, str]:
    """The verdict on how a layout's ranks ended, and the reason; `limit` is the seconds that they had."""
    if job.timed_out:
        return "hangs", f"it was killed as hung after {limit:.0f} s: {rank_positions(job.steps)}"
    return ("failed", job.says or f"its ranks ended with {job.codes}") if any(job.codes) else ("same", "")


def rank_positions(steps: Sequence[int | None]) -> str:
    """The step of each rank in words: `ranks 0, 1 in step 3; rank 2 before the first step`."""
    ranks_at: dict[int | None, list[int]] = {}
    for rank, step in enumerate(steps):
        ranks_at.setdefault(step, []).append(rank)
    return "; ".join(_positions(ranks_at))


def _positions(ranks_at: Mapping[int | None, Sequence[int]]) -> Iterator[str]:
    for step, ranks in ranks_at.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        yield f"{who} {'before the first step' if step is None else f'in step {step + 1}'}"
