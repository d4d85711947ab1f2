"""Benchmark of compressed gradients: what each rank of the factors sends, learns and takes beside gradients that travel whole.

Run `python -m distrain.scripts.bench_compress [KEY=VALUE ...]`. It trains quickstart on two data-parallel ranks of engine native for its
300 steps (train.steps=N for fewer), without compression and at each of RANKS, and prints the bytes that a rank sends on the data axis in a
step, counted in the run, the seconds that the sums of gradients took in a step (the median: other load lengthens it), and the validation
loss after each 50 steps. Then, planned only: a step of Llama 3.2 1B on eight nodes of eight H100s, at links from fast to slow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from ..cli.config.load import load_recipe
from ..trainer.machine.measure_machine import measure_once
from ..trainer.plan.plan import make_plan
from ..trainer.prove.fork_client import ForkServer
from .show_help import show_help

RANKS = (1, 4, 16)
DEADLINE = 3600.0
TRAINED = ("quickstart", "cluster.gpus=2", "parallel.zero=0", "engine=native", "train.evaluate.every=50", "log.every=1", "log.ledger=true")
PLANNED = ("llama3_2_1b_1node", "cluster.nodes=8", "parallel.zero=0")
LINKS = (400e9, 100e9, 25e9, 10e9, 1e9)  # bit/s between nodes


def compression(rank: int) -> tuple[str, ...]:
    """The overrides of a rank of the factors; 0: gradients travel whole."""
    return ("parallel.compress.name=powersgd", f"parallel.compress.rank={rank}") if rank else ()


def main(words: Sequence[str]) -> None:
    measure_once(lambda: "cpu", print)
    print(f"{'rank':>6}{'sent a step':>14}{'fewer':>8}{'sums':>10}  validation loss")
    with TemporaryDirectory() as folder, ForkServer(Path(folder) / "server.log") as server:
        whole = 0
        for rank in (0, *RANKS):
            run_dir = train(server, Path(folder) / f"rank{rank}", (*words, *compression(rank)))
            sent, rows = sent_bytes(run_dir), [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            whole = whole or sent
            losses = " ".join(f"{row['validation_loss']:.4f}" for row in rows if "validation_loss" in row)
            sums = median(row["seconds_sums"] for row in rows if "seconds_sums" in row)
            print(f"{rank or 'none':>6}{sent:>14,}{whole / sent:>8.1f}{1e3 * sums:>7.1f} ms  {losses}", flush=True)
    print(planned_table())


def train(server: ForkServer, folder: Path, words: Sequence[str]) -> Path:
    """Train a run and return its folder; exits if it fails."""
    run = load_recipe(TRAINED[0], [*TRAINED[1:], *words, f"log.dir={folder.parent}", f"name={folder.name}"])
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    done = server.run_job(folder / "run.json", 2, seconds=DEADLINE)
    if any(done.codes):
        sys.exit(f"{' '.join(words)}: {done.says}")
    return folder


def sent_bytes(folder: Path) -> int:
    """The bytes of the messages of rank 0 on the data axis in the step that was counted."""
    ranks = json.loads((folder / "ledger.json").read_text())["ranks"]
    return sum(row["payload"] * row["count"] for row in ranks[0] if row["axis"] == "dp")


def planned_table() -> str:
    """Planned seconds of a step at each link, without compression and at each rank of the factors."""
    lines = [f"{'between nodes':>14}" + "".join(f"{'rank ' + str(rank) if rank else 'none':>12}" for rank in (0, *RANKS))]
    for rate in LINKS:
        cells = [f"{rate / 1e9:>7.0f} Gbit/s"]
        for rank in (0, *RANKS):
            plan = make_plan(load_recipe(PLANNED[0], [*PLANNED[1:], f"cluster.between.bandwidth={rate / 8:g}", *compression(rank)]))
            cells.append(f"{plan.time.step:>10.2f} s" if plan.time else f"{'?':>12}")
        lines.append("".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    show_help(__doc__)
    main(sys.argv[1:])
