"""RUN_DIR/intervals.json: how long each phase of a run took in earlier attempts. The watchdog derives its time limits from it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from ..rundir.files import write_json
from ..spec.changed_run import with_changes
from ..spec.derived.batch_levels import steps_of_levels
from ..spec.run import Checkpoint, Launch, Log, Run
from ..system.regular_file import read_plain
from .supervisor.watchdog import Watchdog

INTERVALS_FILE = "intervals.json"


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """The longest seconds of each phase, and those after which one was killed as hung, of the run with the fingerprint `of`."""

    of: str
    seen: dict[str, float]
    hung: dict[str, tuple[int, float]]


def fingerprint(run: Run) -> str:
    """Hash what decides how long a run's phases take: model, batch, layout and cluster, but not for how many steps it trains."""
    from msgspec import json

    # fmt: off
    alike = with_changes(run, [("name", ""), ("train.steps", None), ("train.tokens", None), ("reading", None),
                         ("log", Log()), ("checkpoint", Checkpoint()), ("launch", Launch())])
    # fmt: on
    return sha256(json.encode(alike)).hexdigest()


def load_watchdog(run: Run, folder: Path) -> Watchdog:
    """Return a watchdog with the times of earlier attempts of the same run, or with none if the file is unreadable or of another run."""
    from msgspec import DecodeError, json

    batches = [each.batch for each in steps_of_levels(run.train)]  # a step may pass over levels
    growth = max([later / earlier for earlier, later in pairwise(batches)], default=1.0)
    with suppress(OSError, DecodeError):
        found = json.decode(read_plain(folder / INTERVALS_FILE), type=PhaseTimes)
        if found.of == fingerprint(run):
            return Watchdog(patience=run.launch.patience, growth=growth, seen=found.seen, timed_out=found.hung)
    return Watchdog(patience=run.launch.patience, growth=growth)


def save_phase_times(run: Run, folder: Path, learned: Watchdog, *, resumed: bool) -> None:
    """Save the times of an attempt. The time of its start is saved only if it `resumed`, because loading a checkpoint takes longer."""
    seen = {phase: seconds for phase, seconds in learned.seen.items() if resumed or phase != "start"}
    with suppress(OSError):  # the disk is full; the times are learned again
        write_json(folder / INTERVALS_FILE, PhaseTimes(of=fingerprint(run), seen=seen, hung=learned.timed_out))
