"""One rank as the launching process sees it: its keeper, the pipes to it, what it said, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from . import lifeline, strays, talk
from .ended import RankEnd
from .log import Log, open_log
from .place import Place

KEEPER = Path(__file__).with_name("keeper.py")
CHUNK = 1 << 16  # bytes that are read of a control pipe at once


class Member:
    """A rank that was started. `end` is its record once it has ended, and nothing of it is left then."""

    def __init__(self, place: Place, keeper: subprocess.Popen[bytes], control: int, cut: int, log: Log, mark: str) -> None:
        self.rank = place.rank
        self.control = control  # where its lines are read
        self.end: RankEnd | None = None
        self.problem = ""
        self._keeper = keeper
        self._lifeline: int | None = cut  # closed: the keeper ends the rank
        self._log = log
        self._mark = mark
        self._half = b""  # a line that hasn't ended yet
        self._done = False
        self._step: int | None = None
        self._told = False
        self._cut = False

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or said that it will."""
        return bool(self.problem) or (self.end is not None and not self.end.well)

    def hear(self) -> Iterator[tuple[str, str]]:
        """Read some of what it has said, and keep it; its lines for the user as ("say" or "status", text)."""
        try:
            *lines, self._half = (self._half + os.read(self.control, CHUNK)).split(b"\n")
        except BlockingIOError:
            return
        for word, what in (pair for line in lines for pair in _words(line)):
            if word in ("say", "status"):
                yield word, str(what)
            else:
                self._note(word, what)

    def _note(self, word: str, what: Any) -> None:
        match word, what:
            case "ended", int():
                self._ends(what, "ended")
            case "beat", int():
                self._step = what
            case "problem", _:
                self.problem = self.problem or str(what)
            case "done", True:
                self._done = True

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
        os.close(self.control)

    def _ends(self, code: int, fate: Literal["ended", "keeper died", "stuck"]) -> None:
        self.end = RankEnd(
            rank=self.rank,
            code=code,
            log=self._log,
            done=self._done,
            step=self._step,
            problem=self.problem,
            told=self._told,
            cut=self._cut,
            fate=fate,
        )


def start(command: Sequence[str], place: Place, logs: Path, environment: Mapping[str, str]) -> Member:
    """Start one rank under its keeper; raises OSError where this machine can't."""
    log, file = open_log(logs, place.rank, place.ranks)
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
            env={**place.environment(environment), **handed},
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
    return Member(place, keeper, control, cut, log, mark)


def _words(line: bytes) -> Iterator[tuple[str, Any]]:
    """What a line of the control pipe says; one that is no JSON object says nothing."""
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(line)
        if isinstance(said, dict):
            yield from said.items()
