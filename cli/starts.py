"""The starts of a run: its ranks are started, and after a fault of a machine started again from the newest checkpoint."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..trainer.launch.ended import FAILED, Ended
from ..trainer.launch.hostfile import Host, included, read_hosts
from ..trainer.launch.watchdog import Watchdog
from ..trainer.plan.change import changed
from ..trainer.plan.plan import make_plan
from ..trainer.plan.result import Plan
from ..trainer.spec.run import Run
from .text import many, share

GRACE = 10.0  # seconds that ranks have to end after one has failed
INTERVALS = "intervals.json"  # in RUN_DIR: seconds that each phase took at the longest
GRACE_OF_HOSTS = 5.0  # on several hosts, so that all is over within 10

Show = Callable[[str], None]


def started(run: Run, plan: Plan, folder: Path, show: Show, live: Show) -> Ended:
    """Start the ranks of RUN_DIR's run and wait; after a fault again, launch.restarts times at the most; how it ended at last.

    A run that has not come to a first step is not started again: most likely it never would.
    """
    tally, intervals = Tally(folder=folder), folder / INTERVALS
    watchdog = Watchdog(patience=run.launch.patience, seen=_seen(intervals))
    while True:
        ended = _once(run, plan, folder, show, live, watchdog, tally.begins)
        tally.ends(ended)
        with suppress(OSError):  # where the disk is full they are learned again
            _put(intervals, watchdog.seen)
        if tally.restarts == run.launch.restarts or not (tally.stepped and _may_go_on(ended)):
            break
        smaller = _on_what_is_left(run, plan)
        if smaller is None:
            show("no restart: too few hosts can be reached for any layout of this run")
            break
        run, plan, how = smaller
        write(run, plan, folder)
        tally.starts_again(ended)
        show(f"{ended.says}\nrestart {tally.restarts} of {run.launch.restarts}, from the newest checkpoint{how}")
    if run.launch.restarts:
        show(tally.said())
    return ended


def write(run: Run, plan: Plan, folder: Path) -> None:
    """RUN_DIR/run.json, which ranks read, and plan.json, the plan that they are held against."""
    _put(folder / "run.json", run)
    _put(folder / "plan.json", plan)


def _put(file: Path, what: object) -> None:
    """A file of JSON, there whole or not at all."""
    from msgspec import json as encoder

    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_bytes(encoder.format(encoder.encode(what)))
    new.replace(file)


def _seen(file: Path) -> dict[str, float]:
    """How long each phase took in the starts before; nothing where that can't be read, for it is learned again."""
    from msgspec import DecodeError
    from msgspec import json as decoder

    try:
        return decoder.decode(file.read_bytes(), type=dict[str, float])
    except (OSError, DecodeError):
        return {}


def _once(run: Run, plan: Plan, folder: Path, show: Show, live: Show, watchdog: Watchdog, began: Callable[[int], None]) -> Ended:
    command = [sys.executable, "-m", "distrain.trainer.loop.rank", str(folder / "run.json")]
    if run.launch.name == "local":
        from ..trainer.launch.launch import launch

        environment = os.environ
        return launch(
            command,
            ranks=plan.world,
            folder=folder,
            environment=environment,
            show=show,
            grace=GRACE,
            live=live,
            watchdog=watchdog,
            began=began,
        )
    from ..trainer.launch.hosts import Start, launch_hosts
    from ..trainer.launch.words import handed
    from .launching import hosts, launching

    made = launching(run)
    start = Start(
        hosts=hosts(run),
        folder=folder,
        launcher=made.commands[0],
        files=made.files,
        texts={name: (folder / name).read_text(encoding="utf-8") for name in ("run.json", "plan.json")},
        command=command,
        environment=os.environ,
        handed=handed(os.environ, run.launch.environment),
        address=run.launch.address,
        port=run.launch.port,
    )
    return launch_hosts(start, show=show, grace=GRACE_OF_HOSTS, live=live, watchdog=watchdog, began=began)


def _may_go_on(ended: Ended) -> bool:
    """Whether it failed by what happens to machines, and nobody had asked it to stop."""
    return ended.status == FAILED and not ended.asked and any(end.rank == ended.rank and end.blameless for end in ended.ranks)


def _on_what_is_left(run: Run, plan: Plan) -> tuple[Run, Plan, str] | None:
    """The run for the hosts that can be reached, with their plan, and what became other, in words; None where none can be run."""
    run = changed(run, [("checkpoint.resume", "auto")])
    if run.launch.name == "local":
        return run, plan, ""
    from ..trainer.launch.landed import reachable
    from .launching import hosts

    before = hosts(run)
    there = reachable([host.name for host in before])
    left = [host for host in before if host.name in there]
    if len(left) == len(before):
        return run, plan, ""
    return _smaller(run, left)


def _smaller(run: Run, left: Sequence[Host]) -> tuple[Run, Plan, str] | None:
    """The run on as many of these hosts as it can use, with fewer replicas and the same global batch."""
    from .fit import refused

    each, made = run.parallel, make_plan(run)
    model = each.tp * each.pp * each.cp
    for nodes in range(len(left), 0, -1):
        replicas, over = divmod(nodes * run.cluster.gpus, model)
        if over or not replicas:
            continue
        taken = left[:nodes]
        fewer = changed(
            run,
            [
                ("cluster.nodes", nodes),
                ("parallel.dp", replicas),
                ("launch.include", included(taken, read_hosts(run.launch.hostfile or ""))),
                ("launch.exclude", None),
                ("reading", None),
            ],
        )
        plan = make_plan(fewer)
        if not refused(fewer, plan):
            names = ", ".join(host.name for host in taken)
            dp = (made.mesh or {}).get("dp", each.dp)
            return fewer, plan, f", on {names}: dp {dp} -> {replicas}, the same {many(run.train.batch, 'sequence')} a step"
    return None


@dataclass(kw_only=True)
class Tally:
    """What the starts of a run were good for: seconds in steps that count, of all seconds. `folder` is RUN_DIR."""

    folder: Path
    restarts: int = 0
    lost: int = 0  # steps that were done twice
    productive: float = 0.0  # seconds
    stepped: bool = False  # a start has come to its first step
    _since: float = field(default_factory=time.monotonic)
    _began: tuple[int, float] | None = None  # this start's first step, and when that was
    _spent: tuple[int, int, float] | None = None  # the last start's first step and the one that it reached, and the seconds between
    _why: str = ""

    def begins(self, step: int) -> None:
        """A start has begun its first step: what the one before did from this step on is lost."""
        if self._spent is not None:
            first, reached, seconds = self._spent
            lost = max(0, reached - step)
            self.lost += lost
            self.productive += seconds * max(0, step - first) / max(1, reached - first)
            self._write({"restart": self.restarts, "step": step, "lost_steps": lost, "says": self._why})
        self._began, self._spent = (step, time.monotonic()), None
        self.stepped = True

    def ends(self, ended: Ended) -> None:
        """A start has ended: at the step of its last beat."""
        if self._began is None:
            return
        (first, at), reached = self._began, max((end.step for end in ended.ranks if end.step is not None), default=0)
        last = max((end.beat for end in ended.ranks if end.beat is not None), default=at)
        if ended.status == FAILED:
            self._spent = (first, reached, max(0.0, last - at))
        else:
            self.productive += time.monotonic() - at
        self._began = None

    def starts_again(self, ended: Ended) -> None:
        """It is started once more."""
        self.restarts += 1
        self._why = ended.says

    def said(self) -> str:
        """The run's goodput as a line, which goes to metrics.jsonl too."""
        whole = time.monotonic() - self._since
        if self._spent is not None:  # nobody knows yet what of it counts
            self.productive += self._spent[2]
        goodput = self.productive / whole if whole else 0.0
        self._write({"restarts": self.restarts, "lost_steps": self.lost, "goodput": goodput, "seconds_in_all": whole})
        again = f"{many(self.restarts, 'restart')}, {many(self.lost, 'step')} done again" if self.restarts else "no restart"
        return f"goodput {share(goodput)}: {self.productive:,.0f} s of {whole:,.0f} s in steps that count; {again}"

    def _write(self, row: dict[str, object]) -> None:
        with (self.folder / "metrics.jsonl").open("ab", buffering=0) as file:
            file.write(f"{json.dumps(row)}\n".encode())
