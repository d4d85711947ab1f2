"""A rank that makes no progress, as the watchdog sees it, and the stacks that it writes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from distrain.trainer.launch.rank.group_record import GroupRecord


@dataclass
class IdleRank:
    """A rank without progress for 100 s; `stack` holds the lines that it wrote."""

    rank: int
    step: int | None = None
    phase: str = "start"
    since: float = field(default_factory=lambda: time.monotonic() - 100.0)
    longest: dict[str, float] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    collectives: tuple[GroupRecord, ...] = ()

    def stack_lines(self) -> tuple[str, ...]:
        return self.stack


def written_stack(function: str) -> tuple[str, ...]:
    """Return what faulthandler writes for a waiting thread, and for the main thread in this function of the package."""
    return (
        "Thread 0x00007f (most recent call first):",
        '  File "/lib/threading.py", line 320 in wait',
        "",
        "Current thread 0x00007e (most recent call first):",
        '  File "/lib/torch/distributed_c10d.py", line 2800 in all_reduce',
        f'  File "/lib/distrain/trainer/loop/train.py", line 90 in {function}',
        '  File "/lib/distrain/trainer/loop/rank.py", line 145 in <module>',
    )
