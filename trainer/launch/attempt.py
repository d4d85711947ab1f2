"""One attempt at a run: starts its ranks once, on this machine or on hosts, and waits for their end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..plan.plan_data import Plan
from ..spec.run import Run
from ..system.stop_requests import StopRequests
from .hosts.hostfile import Host
from .supervisor.outcome import Outcome
from .supervisor.watchdog import Watchdog

GRACE = 5.0  # seconds that the other ranks have to end after one has failed; all must be over within 10

Show = Callable[[str], None]


def run_attempt(
    run: Run,
    plan: Plan,
    hosts: Sequence[Host],
    folder: Path,
    command: Sequence[str],
    *,
    show: Show,
    live: Show,
    watchdog: Watchdog,
    on_first_step: Callable[[int], None],
    stop_requests: StopRequests,
) -> Outcome:
    """Run `command` as every rank of the run in RUN_DIR until all have ended; return the outcome."""
    if run.launch.name == "local":
        from .single_host import launch_local_ranks

        return launch_local_ranks(
            command,
            ranks=plan.world,
            folder=folder,
            environment=os.environ,
            show=show,
            grace=GRACE,
            live=live,
            watchdog=watchdog,
            on_first_step=on_first_step,
            devices=_devices(plan.world, os.environ) if run.cluster.device.kind == "cuda" else (),
            stop_requests=stop_requests,
        )
    from .commands.command import forwarded_variables
    from .hosts_and_commands import launch_commands
    from .multi_host import MultiHostLaunch, launch_remote_ranks

    launcher = launch_commands(run, hosts)
    launch = MultiHostLaunch(
        hosts=hosts,
        folder=folder,
        launcher=launcher.commands[0],
        files=launcher.files,
        texts={name: (folder / name).read_text(encoding="utf-8") for name in ("run.json", "plan.json")},
        command=command,
        environment=os.environ,
        forwarded=forwarded_variables(os.environ, run.launch.environment),
        address=run.launch.address,
        port=run.launch.port,
    )
    return launch_remote_ranks(
        launch, show=show, grace=GRACE, live=live, watchdog=watchdog, on_first_step=on_first_step, stop_requests=stop_requests
    )


def _devices(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine's ranks, by the driver's numbers or names."""
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [visible[rank] if rank < len(visible) else str(rank) for rank in range(ranks)]
