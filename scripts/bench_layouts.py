"""Measures how fast each layout trains on this machine's CPU: tokens/s at 1, 2 and 4 processes, and the time that goes to messages.

Run `python -m distrain.scripts.bench_layouts [rounds=3] [KEY=VALUE ...]`, on a quiet machine. The layouts take turns, so that what
else the machine does weighs on all alike; a speed-up is the median over the rounds of one beside that round's single process. Messages
are what torch's profiler saw of them on rank 0: seconds in which at least one was under way. Each process has one thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ..cli.config.load import load
from ..trainer.machine.facts import measure
from ..trainer.plan.plan import make_plan
from ..trainer.prove.fork_client import Server

STEPS, WARM, TRACED = 12, 2, 3  # of a run; the first aren't counted, the last are profiled and aren't counted either
WORDS = (  # four layers of 256, 2048 tokens a step
    *("model=quickstart", "model.layers=4", "model.hidden=256", "model.heads=4", "data=synthetic", "train.seq=256", "train.batch=8"),
    *("train.microbatch=1", "train.precision=fp32", f"train.steps={STEPS}", "train.evaluate.every=0", "log.every=1", "log.sinks=[jsonl]"),
    *("optim.warmup=2", f"log.profile=[{STEPS - TRACED + 1},{STEPS}]"),
)
# fmt: off
LAYOUTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (  # name, processes, words
    ("one process",  1, ("train.microbatch=4",)),
    ("dp2 ZeRO-1",   2, ("parallel.zero=1", "train.microbatch=4")),
    ("dp2 ZeRO-3",   2, ("parallel.zero=3", "train.microbatch=4")),
    ("tp2",          2, ("parallel.zero=0", "parallel.tp=2", "train.microbatch=4")),
    ("tp2 sequence", 2, ("parallel.zero=0", "parallel.tp=2", "parallel.sequence=true", "train.microbatch=4")),
    ("pp2 1f1b",     2, ("parallel.zero=0", "parallel.pp=2")),
    ("pp2 gpipe",    2, ("parallel.zero=0", "parallel.pp=2", "parallel.schedule=gpipe")),
    ("dp4 ZeRO-1",   4, ("parallel.zero=1", "train.microbatch=2")),
    ("dp2 tp2",      4, ("parallel.zero=1", "parallel.tp=2", "train.microbatch=4")),
    ("dp2 pp2",      4, ("parallel.zero=1", "parallel.pp=2")),
    ("tp2 pp2",      4, ("parallel.zero=0", "parallel.tp=2", "parallel.pp=2")),
)
# fmt: on
Planned = tuple[float | None, float | None]  # seconds of a step, and of those that wait for messages
PEER = {"dp2 ZeRO-1": 1.81, "pp2 1f1b": 1.46, "tp2": 1.25}  # picotron's speed-up over its own single process, on two cores


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("rounds=")]
    rounds = next((int(word.removeprefix("rounds=")) for word in sys.argv[1:] if word.startswith("rounds=")), 3)
    measure(print)
    seconds: dict[str, list[float]] = {name: [] for name, *_ in LAYOUTS}
    messages: dict[str, list[float]] = {name: [] for name, *_ in LAYOUTS}
    planned: dict[str, Planned] = {}
    with TemporaryDirectory() as folder, Server(Path(folder) / "server.log") as server:
        for turn in range(rounds):
            for name, ranks, layout in LAYOUTS:
                given = Path(folder) / f"{name.replace(' ', '_')}.{turn}"
                each, talked, plan = ran(server, given, ranks, (*WORDS, *layout, *words))
                seconds[name].append(each)
                messages[name].append(talked)
                planned[name] = plan
                _live(f"round {turn + 1} of {rounds}: {name}")
    _live("")
    _table(seconds, messages, planned)


def ran(server: Server, folder: Path, ranks: int, words: Sequence[str]) -> tuple[float, float, Planned]:
    """(seconds of a step, of them in messages, the plan's of both) of one run."""
    run = load("quickstart", [*words, f"cluster.gpus={ranks}", f"log.dir={folder.parent}", f"name={folder.name}"])
    plan = make_plan(run)
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    crew = server.trained(folder / "run.json", ranks)
    if any(crew.codes):
        sys.exit(f"{' '.join(words)}: {crew.says}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["seconds"] for row in rows if "seconds" in row][WARM : STEPS - TRACED]
    (trace,) = (folder / "trace").glob("*.json")
    time = plan.time
    return median(steps), talked(json.loads(trace.read_text())) / TRACED, (time.step, time.exposed) if time else (None, None)


def talked(trace: dict[str, Any]) -> float:
    """Seconds of a trace in which a message was under way."""
    spans = sorted(
        (each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each.get("ph") == "X" and str(each.get("name", "")).startswith("gloo:")
    )
    total = reached = 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


def _table(seconds: dict[str, list[float]], messages: dict[str, list[float]], planned: dict[str, Planned]) -> None:
    heads = ("processes", "tokens/s", "speed-up", "picotron", "step", "planned", "messages", "planned")
    print(f"{'layout':<14}" + "".join(f"{head:>10}" for head in heads))
    run = load("quickstart", WORDS)
    tokens, alone = run.train.batch * run.train.seq, seconds[LAYOUTS[0][0]]
    for name, ranks, _ in LAYOUTS:
        gain = median(one / each for one, each in zip(alone, seconds[name], strict=True))
        step, exposed = planned[name]
        times = (median(seconds[name]), step, median(messages[name]), exposed)
        cells = (str(ranks), f"{tokens / times[0]:,.0f}", f"{gain:.2f}", str(PEER.get(name, "")), *map(_ms, times))
        print(f"{name:<14}" + "".join(f"{cell:>10}" for cell in cells))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _live(words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
