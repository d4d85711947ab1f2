"""Benchmark of saves: how long one holds training up, with checkpoint.background and without.

Run `python -m distrain.scripts.bench_saves [ROUNDS] [WORD ...]` on a quiet machine; the WORDS change the recipe. Two ranks train a GPT of
25 million parameters with a save after each fourth step; both ways take turns. What a save costs is how long training waits for it, and by
how much the steps beside it are slower than those of the other way.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from .show_help import show_help

STEPS, EVERY = 24, 4
WORDS = (
    *("conf=quickstart", "model.layers=8", "model.hidden=512", "model.heads=8", "train.batch=2", "train.microbatch=1", "train.seq=128"),
    *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.final=false", "train.evaluate.every=0", "log.every=1"),
)
SAVED = re.compile(r"saved step [0-9]+ in ([0-9.]+) s \(([0-9.,]+) MiB\)(?:; training waited ([0-9.]+) s)?")


@dataclass(frozen=True, kw_only=True)
class Saves:
    """A run's saves: the medians of their seconds and of those that training waited for each; MiB of each; the seconds of all its steps."""

    seconds: float
    waited: float
    size: str
    steps: float


def train(folder: Path, *words: str) -> Saves:
    """Train the run in a new folder; exit where it fails."""
    command = [sys.executable, "-m", "distrain", "fit", *WORDS, *words, f"log.dir={folder}", "name=run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    found = [match.groups() for match in SAVED.finditer(ended.stdout)]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return Saves(
        seconds=median(float(seconds) for seconds, _, _ in found),
        waited=median(float(waited or seconds) for seconds, _, waited in found),
        size=found[0][1],
        steps=sum(row["seconds"] for row in rows if row.get("step", 0) > EVERY and "seconds" in row),  # from the first save on
    )


def main() -> None:
    """Train both ways so many times in turn and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[str, list[Saves]] = {"true": [], "false": []}
    for _ in range(rounds):
        for way, runs in found.items():
            with TemporaryDirectory() as folder:
                runs.append(train(Path(folder), f"checkpoint.background={way}", *sys.argv[2:]))
    before, after = (median(run.waited for run in found[way]) for way in ("false", "true"))
    slower = (median(run.steps for run in found["true"]) - median(run.steps for run in found["false"])) / (STEPS // EVERY)
    print(f"{found['true'][0].size} MiB a save, medians of {rounds} runs of {STEPS // EVERY} saves each")
    print(f"training waits for a save        {before:8.2f} s")
    print(f"in the background                {after:8.2f} s, {after / before:.2f} of that; it is complete after "
          f"{median(run.seconds for run in found['true']):.2f} s")  # fmt: skip
    print(f"steps beside it take longer by   {slower:8.2f} s, with the wait {(after + slower) / before:.2f} of a save that is waited for")


if __name__ == "__main__":
    show_help(__doc__)
    main()
