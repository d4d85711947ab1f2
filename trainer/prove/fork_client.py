"""Client of the fork server of ranks: starts it as a child process, sends it jobs and questions, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from ..system.child_process import end_child

COMMAND = (sys.executable, "-m", "distrain.trainer.loop.forkserver")
WIDE_COMMAND = (*COMMAND, "distrain.trainer.loop.forkserver.wide_ranks")  # of one whose ranks compute in float64
PATIENCE = 3.0  # seconds that the server has to end its ranks and itself

# A process with threads can't be forked; each job says how many threads its ranks get. NVML counts GPUs without a CUDA context.
SERVER_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYTHONSAFEPATH": "1",
}

START_AFRESH = (
    "DISTRAIN_START_AFRESH"  # "1": ranks are processes of their own, which import everything again: a CUDA driver survives no fork
)

OnMessage = Callable[[Mapping[str, Any]], None]


class ServerGone(Exception):
    """The server ended without a reply; its log says why."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A finished job: what its ranks exited with and reported."""

    codes: tuple[int, ...]  # exit statuses
    lines: tuple[str, ...]  # rank 0's lines for the user
    problems: tuple[str, ...]  # that ranks reported
    steps: tuple[int | None, ...]  # each rank's last step, from 0
    timed_out: bool  # the job was killed at its deadline
    says: str  # why it failed, in one line


class ForkServer:
    """A fork server of ranks; it runs one job at a time. What it prints goes to `log`."""

    def __init__(self, log: Path, environment: Mapping[str, str] = os.environ, *, command: Sequence[str] = COMMAND) -> None:
        self.log = log
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**environment, **SERVER_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for this process only
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_job(
        self,
        run: Path,
        ranks: int,
        *,
        threads: int = 1,
        seconds: float | None = None,
        on_message: OnMessage = lambda _: None,
    ) -> JobResult:
        """Run RUN_DIR/run.json on `ranks` ranks, killed after `seconds`; raises ServerGone.

        `on_message` is called with rank 0's messages {"step": step} and {"status": text}.
        """
        job = {"run": str(run), "ranks": ranks, "threads": threads, "seconds": seconds}
        reply = self._request(job, on_message)
        return JobResult(
            codes=tuple(reply["codes"]),
            lines=tuple(reply["lines"]),
            problems=tuple(reply["problems"]),
            steps=tuple(reply["steps"]),
            timed_out=reply["timed_out"],
            says=reply["says"],
        )

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """Return the reply to a question, {"answer": ...} or {"failed": why}; raises ServerGone."""
        return self._request({"ask": question, "arguments": arguments, "log": str(self.log)}, lambda _: None)

    def _request(self, request: Mapping[str, Any], on_message: OnMessage) -> dict[str, Any]:
        stdin, stdout = self._pipes()
        try:
            stdin.write(f"{json.dumps(request)}\n")
            stdin.flush()
        except OSError:
            raise ServerGone(self._end()) from None
        for line in stdout:
            message: dict[str, Any] = json.loads(line)
            if not message.keys() & {"step", "status"}:
                return message
            on_message(message)
        raise ServerGone(self._end())

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        return self._child.stdin, self._child.stdout

    def _end(self) -> str:
        """Wait for the server's exit and describe it in one line."""
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the process that starts the ranks {how}; its log is {self.log}"

    def close(self) -> None:
        """Close the server's stdin, which ends it and its ranks; kill it if it does not end."""
        stdin, _ = self._pipes()
        try:
            with suppress(OSError):
                stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(PATIENCE)
        finally:
            end_child(self._child)


def start_wide_server(log: Path, environment: Mapping[str, str]) -> ForkServer:
    """Start a fork server whose ranks compute in float64."""
    return ForkServer(log, environment, command=WIDE_COMMAND)
