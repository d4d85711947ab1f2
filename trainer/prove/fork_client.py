"""The fork server of ranks as the command line sees it: a child that is asked, and that ends when its asker does."""

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

from ..system.end_child import end_child

COMMAND = (sys.executable, "-m", "distrain.trainer.loop.forkserver.server")
PATIENCE = 3.0  # seconds that it has to end its ranks and itself

# A process with threads can't be forked; its ranks are told how many to start. NVML counts GPUs without a CUDA context.
ALONE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYTHONSAFEPATH": "1",
}

Hear = Callable[[Mapping[str, Any]], None]


class ServerGone(Exception):
    """The server ended without an answer, for the reason that its log says."""


@dataclass(frozen=True, kw_only=True)
class Crew:
    """A job's ranks, ended: exit statuses, what rank 0 said, what went wrong in a rank's own words, and in one line."""

    codes: tuple[int, ...]
    said: tuple[str, ...]
    problems: tuple[str, ...]
    steps: tuple[int | None, ...]  # at which each rank was last, from 0
    late: bool  # the deadline came first
    says: str


class Server:
    """A fork server of ranks; jobs run one after another. Its noise goes to `log`."""

    def __init__(self, log: Path, environment: Mapping[str, str] = os.environ, *, command: Sequence[str] = COMMAND) -> None:
        self.log = log
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**environment, **ALONE},
                start_new_session=True,  # Ctrl-C is for whoever asks
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trained(
        self,
        run: Path,
        ranks: int,
        *,
        threads: int = 1,
        seconds: float | None = None,
        signals: Sequence[tuple[int, int, int]] = (),
        hear: Hear = lambda word: None,
    ) -> Crew:
        """Run RUN_DIR/run.json on so many ranks, killed after so many seconds; raises ServerGone.

        `signals` are (step, rank, signal): sent to the rank when it is at the step. `hear` is told how far rank 0 is.
        """
        job = {"run": str(run), "ranks": ranks, "threads": threads, "seconds": seconds, "signals": list(signals)}
        said = self._ask(job, hear)
        return Crew(
            codes=tuple(said["codes"]),
            said=tuple(said["said"]),
            problems=tuple(said["problems"]),
            steps=tuple(said["steps"]),
            late=said["late"],
            says=said["says"],
        )

    def asked(self, question: str, **words: Any) -> dict[str, Any]:
        """The answer to a question, {"answer": ...} or {"failed": why}; raises ServerGone."""
        return self._ask({"ask": question, "words": words, "log": str(self.log)}, lambda word: None)

    def _ask(self, job: Mapping[str, Any], hear: Hear) -> dict[str, Any]:
        stdin, stdout = self._pipes()
        try:
            stdin.write(f"{json.dumps(job)}\n")
            stdin.flush()
        except OSError:
            raise ServerGone(self._end()) from None
        for line in stdout:
            word: dict[str, Any] = json.loads(line)
            if not word.keys() & {"beat", "status"}:
                return word
            hear(word)
        raise ServerGone(self._end())

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        return self._child.stdin, self._child.stdout

    def _end(self) -> str:
        """How it ended, in a line."""
        code = self._child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the process that starts the ranks {how}; its log is {self.log}"

    def close(self) -> None:
        """The end of its jobs is the server's end, and its ranks'."""
        stdin, _ = self._pipes()
        try:
            with suppress(OSError):
                stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(PATIENCE)
        finally:
            end_child(self._child)
