"""Launches a run's ranks on this machine, and supervises them until all have ended."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..system.reserved_port import reserve_port
from ..system.stop_requests import StopRequests, collect_stop_requests
from .rank.channel import ignore_text
from .rank.environment import RankEnvironment
from .supervisor.local_rank import start_local_rank
from .supervisor.outcome import FAILED, Outcome
from .supervisor.supervisor import Show, Supervisor
from .supervisor.watchdog import Watchdog

ADDRESS = "127.0.0.1"
ATTEMPTS = 3  # where another process takes the port


def launch_local_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str],
    show: Show,
    grace: float,
    live: Show | None = None,
    watchdog: Watchdog | None = None,
    on_first_step: Callable[[int], None] | None = None,
    devices: Sequence[str] = (),
    stop_requests: StopRequests | None = None,
) -> Outcome:
    """Run `command` as so many ranks on this machine until all have ended; return the outcome.

    `environment` is all that the ranks inherit; the variables that torch needs are added. Each rank's output goes to
    `folder`/ranks/RANK.log; rank 0's messages (rank/channel.py) go to `show`, and its live line to `live`. When a rank fails, the others
    get SIGTERM, and SIGKILL after `grace` seconds. SIGINT, SIGTERM and SIGHUP to this process are forwarded once as SIGTERM, and the
    ranks may take as long as they need; a second Ctrl-C kills them. Signals are only handled in the main thread. If this process
    dies, by any cause, its ranks die too. If no rank makes progress (watchdog.py), they write their stacks and are killed.

    `on_first_step` is called with rank 0's first step. `devices` are the names of the ranks' devices, for the line that reports a failed
    rank. `stop_requests` is the list of an enclosing `collect_stop_requests`.
    """
    logs = folder / "ranks"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Outcome(status=FAILED, ranks=(), says=f"no log can be written: {error}")
    with collect_stop_requests(stop_requests) as requests:
        for _ in range(ATTEMPTS):
            with ExitStack() as stack:
                port = stack.enter_context(reserve_port())
                supervisor = Supervisor(
                    requests,
                    stack,
                    show=show,
                    live=live or ignore_text,
                    grace=grace,
                    watchdog=watchdog or Watchdog(),
                    on_first_step=on_first_step,
                )
                outcome = _run(supervisor, command, _rank_environments(ranks, port), logs, environment, devices)
            if requests or not outcome.is_port_taken:
                break
            show(f"{outcome.says}: another process has the port")
        return outcome


def _run(
    supervisor: Supervisor,
    command: Sequence[str],
    rank_environments: Sequence[RankEnvironment],
    logs: Path,
    environment: Mapping[str, str],
    devices: Sequence[str],
) -> Outcome:
    """Start all ranks, and supervise them until all have ended."""
    for each in rank_environments:
        where = f"(device {devices[each.rank]})" if devices else ""
        try:
            supervisor.add(start_local_rank(command, each, logs, environment, where))
        except OSError as error:
            return Outcome(status=FAILED, ranks=(), rank=each.rank, says=f"rank {each.rank} can't be started: {error}")
    return supervisor.run()


def _rank_environments(ranks: int, reserved: socket.socket) -> list[RankEnvironment]:
    port = reserved.getsockname()[1]
    return [
        RankEnvironment(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address=ADDRESS, port=port) for rank in range(ranks)
    ]
