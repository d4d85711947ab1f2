"""RUN_DIR/intervals.json: how long what a run does took in its starts, from which the next start knows how long to wait."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ..plan.changed_run import with_changes
from ..rundir.files import write_json
from ..spec.plain_file import read_plain
from ..spec.run import Checkpoint, Launch, Log, Run
from .supervisor.watchdog import Watchdog

FILE = "intervals.json"


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds by phase, as the watchdog learned them of the run that `of` is the fingerprint of."""

    of: str
    seen: dict[str, float]
    hung: dict[str, tuple[int, float]]


def fingerprint(run: Run) -> str:
    """The same for runs whose phases take equally long: model, batch, layout and cluster are, not how far they train."""
    from msgspec import json

    # fmt: off
    like = with_changes(run, [("name", ""), ("train.steps", None), ("train.tokens", None), ("reading", None),
                         ("log", Log()), ("checkpoint", Checkpoint()), ("launch", Launch())])
    # fmt: on
    return sha256(json.encode(like)).hexdigest()


def load_watchdog(run: Run, folder: Path) -> Watchdog:
    """One that knows what starts of the same run took; it learns anew where another run's were the last, or can't be read."""
    from msgspec import DecodeError, json

    with suppress(OSError, DecodeError):
        found = json.decode(read_plain(folder / FILE), type=PhaseTimes)
        if found.of == fingerprint(run):
            return Watchdog(patience=run.launch.patience, seen=found.seen, timed_out=found.hung)
    return Watchdog(patience=run.launch.patience)


def save_phase_times(run: Run, folder: Path, learned: Watchdog, *, resumed: bool) -> None:
    """Write what a start has taught. One that has read no checkpoint does not say how long it takes to start with one."""
    seen = {phase: seconds for phase, seconds in learned.seen.items() if resumed or phase != "start"}
    with suppress(OSError):  # where the disk is full it is learned again
        write_json(folder / FILE, PhaseTimes(of=fingerprint(run), seen=seen, hung=learned.timed_out))
