"""The starts of a run: its ranks are started, and after a fault of a machine started again from the newest checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..plan.result import Plan
from ..rundir.checkpoints import newest_saved
from ..rundir.files import write
from ..spec.problem import Unreadable
from ..spec.run import Run
from . import phase_times
from .goodput import Tally
from .rank.channel import STOPPED
from .shrink import Faults, TooFew, on_what_is_left, refusal
from .single_host import signals
from .supervisor.outcome import Ended
from .supervisor.watchdog import Watchdog

GRACE = 5.0  # seconds that ranks have to end after one has failed: all is to be over within 10

Show = Callable[[str], None]


def started(
    run: Run,
    plan: Plan,
    folder: Path,
    show: Show,
    live: Show,
    *,
    command: Sequence[str] = (),
    noted: list[tuple[int, float]] | None = None,
) -> Ended:
    """Start the ranks of RUN_DIR's run and wait; after a fault again, launch.restarts times at the most; how it ended at last.

    A run that has not come to a first step is not started again: most likely it never would. Told to stop at any time, also
    between two starts, it stops. `command` is what each rank runs: the trainer, where none is given. `noted` is what a `signals`
    around this one notes.
    """
    command = command or [sys.executable, "-m", "distrain.trainer.loop.rank", str(folder / "run.json")]
    tally, faults = Tally(folder=folder), Faults()
    with signals(noted) as asked:
        while True:
            resumed = run.checkpoint.resume != "never" and any(folder.glob("checkpoints/step_*"))
            watchdog = phase_times.watchdog(run, folder)
            ended = _once(run, plan, folder, command, show, live, watchdog, tally.begins, asked)
            tally.ends(ended)
            if ended.refused:  # nothing was done, so that there is nothing to keep
                return ended
            phase_times.keep(run, folder, watchdog, resumed=resumed)
            faults.count(ended)
            why = refusal(run, ended, restarts=tally.restarts, stepped=tally.stepped, step=_newest_step(folder))
            if why is not None:
                if why:
                    show(f"no restart: {why}")
                break
            try:
                run, plan, how = on_what_is_left(run, plan, faults.shunned(ended), asked)
                write(run, plan, folder)
            except (TooFew, OSError, Unreadable) as error:
                if not asked:
                    show(f"no restart: {error}")
                    break
            else:
                tally.starts_again(ended)
                show(f"{ended.says}\nrestart {tally.restarts} of {run.launch.restarts}, from the newest checkpoint{how}")
            if asked:
                ended = _stopped(ended, folder, asked)
                break
        if run.launch.restarts:
            show(tally.said())
    return ended


def _newest_step(folder: Path) -> int | None:
    """The step of RUN_DIR's newest checkpoint; None where there is none."""
    saved, _ = newest_saved(folder / "checkpoints")
    return saved.step if saved else None


def _stopped(ended: Ended, folder: Path, asked: list[tuple[int, float]]) -> Ended:
    """The end of a run that was told to stop when a start had failed and the next was to come."""
    number, step = asked[-1][0], _newest_step(folder)
    left = "there is no checkpoint" if step is None else f"the checkpoint of step {step} stands"
    says = f"{ended.says}; {signal.Signals(number).name} came before it was started again: {left}"
    return replace(ended, status=128 + number if step is None else STOPPED, says=says, asked=True)


def _once(
    run: Run,
    plan: Plan,
    folder: Path,
    command: Sequence[str],
    show: Show,
    live: Show,
    watchdog: Watchdog,
    began: Callable[[int], None],
    asked: list[tuple[int, float]],
) -> Ended:
    if run.launch.name == "local":
        from .single_host import launch

        return launch(
            command,
            ranks=plan.world,
            folder=folder,
            environment=os.environ,
            show=show,
            grace=GRACE,
            live=live,
            watchdog=watchdog,
            began=began,
            devices=_devices(plan.world, os.environ) if run.cluster.device.kind == "cuda" else (),
            asked=asked,
        )
    from .commands.deepspeed import handed
    from .multi_host import Start, launch_hosts
    from .resolve import hosts, launching

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
    return launch_hosts(start, show=show, grace=GRACE, live=live, watchdog=watchdog, began=began, asked=asked)


def _devices(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine's ranks, as the driver numbers or names them."""
    named = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return [named[rank] if rank < len(named) else str(rank) for rank in range(ranks)]
