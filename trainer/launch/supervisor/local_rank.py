"""A rank on this machine: its keeper, and the pipes to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...system import parent_watch
from ..agent import orphans
from ..agent.local_agent import held_back
from ..rank import channel
from ..rank.environment import Place
from ..rank.log import Log, open_log
from .rank_handle import CHUNK, Heard

KEEPER = Path(__file__).parents[1] / "agent" / "local_agent.py"
LOOK = 0.5  # seconds between two looks at a keeper
STILL = 2.0  # seconds that a keeper may be stopped


class Member(Heard):
    """A rank that was started here, or another process under a keeper."""

    log: Log

    def __init__(self, rank: int, keeper: subprocess.Popen[bytes], control: int, cut: int, log: Log, mark: str, where: str = "") -> None:
        super().__init__(rank, log, where)
        self._control = control
        self._keeper = keeper
        self._lifeline: int | None = cut  # closed: the keeper ends the rank
        self._mark = mark
        self._dumped: Log | None = None  # the log from where the stacks begin
        self._looked = 0.0  # when its keeper was looked at
        self._still: float | None = None  # since when its keeper is stopped

    @property
    def control(self) -> int:
        """The pipe of which its words are read."""
        return self._control

    def _read(self) -> bytes:
        try:
            return os.read(self._control, CHUNK)
        except BlockingIOError:
            return b""

    def look(self) -> str:
        """Let its keeper go on where someone has stopped it: it can't tell that the rank has ended, nor end it."""
        now = time.monotonic()
        if now < self._looked + LOOK:
            return ""
        self._looked = now
        if not _is_stopped(self._keeper.pid):
            self._still = None
        elif self._still is None:
            self._still = now
        elif now >= self._still + STILL:
            self._keeper.send_signal(signal.SIGCONT)
            return f"the process that keeps rank {self.rank} was stopped for {now - self._still:.0f} s: it goes on"
        return ""

    def is_orphan(self) -> bool:
        """Whether its keeper has exited; what was said before may be unread."""
        return self._keeper.poll() is not None

    def lose(self) -> None:
        """Its keeper died before it could say how the rank ended: the rank dies with it, and what it started dies here."""
        orphans.kill(self._mark)
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
            self._keeper.send_signal(signal.SIGCONT)  # one that is stopped would not see it

    def abandon(self) -> None:
        """Wait no longer for one that was cut and is still there; where nothing of it is left, its own words say how it ended."""
        self._keeper.kill()
        if orphans.kill(self._mark):
            self._ends(0 if self._done else -signal.SIGKILL, self._fate)
        else:
            self._ends(-signal.SIGKILL, "stuck")

    def close(self, patience: float) -> None:
        """Nothing of it is left when this returns, but for what SIGKILL does not end in `patience` seconds."""
        self.cut()
        try:
            self._keeper.wait(patience)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            orphans.kill(self._mark)
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(orphans.PATIENCE)
        os.close(self._control)


def start(command: Sequence[str], place: Place, logs: Path, environment: Mapping[str, str], where: str = "") -> Member:
    """Start one rank under its keeper; raises OSError where this machine can't."""
    log, file = open_log(logs, place.rank, place.ranks)
    return under_keeper(command, place.rank, log, file, place.environment(environment), where=where)


def under_keeper(
    command: Sequence[str],
    rank: int,
    log: Log,
    file: IO[bytes],
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    where: str = "",
) -> Member:
    """Start any command under a keeper, its output going to `file`, which is closed here; raises OSError."""
    held, cut = os.pipe()
    control, speak = os.pipe()
    os.set_blocking(control, False)
    mark = orphans.new_mark()
    handed = {parent_watch.VARIABLE: str(held), channel.VARIABLE: str(speak), orphans.VARIABLE: mark}
    try:
        with held_back():
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
    return Member(rank, keeper, control, cut, log, mark, where)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False where there is no /proc (proc(5): the state follows the name in brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
