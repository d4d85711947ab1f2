"""A rank on this machine: its keeper, and the pipes to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from . import lifeline, strays, talk
from .heard import CHUNK, Heard
from .log import Log, open_log
from .place import Place

KEEPER = Path(__file__).with_name("keeper.py")


class Member(Heard):
    """A rank that was started here, or another process under a keeper."""

    log: Log

    def __init__(self, rank: int, keeper: subprocess.Popen[bytes], control: int, cut: int, log: Log, mark: str) -> None:
        super().__init__(rank, log)
        self._control = control
        self._keeper = keeper
        self._lifeline: int | None = cut  # closed: the keeper ends the rank
        self._mark = mark
        self._dumped: Log | None = None  # the log from where the stacks begin

    @property
    def control(self) -> int:
        """The pipe of which its words are read."""
        return self._control

    def _read(self) -> bytes:
        try:
            return os.read(self._control, CHUNK)
        except BlockingIOError:
            return b""

    def is_orphan(self) -> bool:
        """Whether its keeper has exited; what was said before may be unread."""
        return self._keeper.poll() is not None

    def lose(self) -> None:
        """Its keeper died before it could say how the rank ended: the rank dies with it, and what it started dies here."""
        strays.kill(self._mark)
        self._ends(self._keeper.returncode, "keeper died")

    def tell(self) -> None:
        """Ask it to stop, once: its keeper hands the SIGTERM on."""
        if self.end is None and not self._told:
            self._told = True
            self._keeper.send_signal(signal.SIGTERM)

    def dump(self) -> None:
        """Have it write its stacks: its keeper hands SIGUSR2 on."""
        if self.end is None:
            self._dumped = self.log.from_here()
            self._keeper.send_signal(signal.SIGUSR2)

    def stack(self) -> tuple[str, ...]:
        """What its log got since."""
        return self._dumped.last_lines(1000) if self._dumped else ()

    def cut(self) -> None:
        """Have it killed, with all that it started."""
        self._cut = True
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def abandon(self) -> None:
        """Wait no longer for one that was cut and is still there."""
        self._keeper.kill()
        strays.kill(self._mark)
        self._ends(-signal.SIGKILL, "stuck")

    def close(self, patience: float) -> None:
        """Nothing of it is left when this returns, but for what SIGKILL does not end in `patience` seconds."""
        self.cut()
        try:
            self._keeper.wait(patience)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        os.close(self._control)


def start(command: Sequence[str], place: Place, logs: Path, environment: Mapping[str, str]) -> Member:
    """Start one rank under its keeper; raises OSError where this machine can't."""
    log, file = open_log(logs, place.rank, place.ranks)
    return under_keeper(command, place.rank, log, file, place.environment(environment))


def under_keeper(
    command: Sequence[str], rank: int, log: Log, file: IO[bytes], environment: Mapping[str, str], *, folder: Path | None = None
) -> Member:
    """Start any command under a keeper, its output going to `file`, which is closed here; raises OSError."""
    held, cut = os.pipe()
    control, speak = os.pipe()
    os.set_blocking(control, False)
    mark = strays.new_mark()
    handed = {lifeline.VARIABLE: str(held), talk.VARIABLE: str(speak), strays.VARIABLE: mark}
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), str(held), str(speak), *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**environment, **handed},
            cwd=folder,
            pass_fds=(held, speak),
            start_new_session=True,
        )
    except OSError:
        os.close(control)
        os.close(cut)
        raise
    finally:
        os.close(held)
        os.close(speak)
        file.close()
    return Member(rank, keeper, control, cut, log, mark)
