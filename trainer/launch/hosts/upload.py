"""The head's side of landing on hosts: an ssh to each, over which a run's files are written there (upload_remote.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..commands.deepspeed import crosses
from ..single_host import signals
from .ssh import Ssh, Stopped, Told, at_once

LANDING = Path(__file__).with_name("upload_remote.py")
PATIENCE = 60.0  # seconds for a host to answer, and to write a few files
BACK = 5.0  # seconds to remove them


class Unreachable(Exception):
    """Hosts on which nothing can be written, and why, in a line."""

    def __init__(self, hosts: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.hosts = tuple(hosts)


class Landed:
    """A host with upload_remote.py running on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._laid = False
        words = (
            crosses(sys.executable, "the Python", "install distrain at a path of these"),
            "-I",
            "-S",
            crosses(str(LANDING), "the path", ""),
        )
        self.ssh = Ssh(name, " ".join(words))
        self._process = self.ssh.process

    def meet(self) -> None:
        """Learn what it calls itself, where it sees this machine (`head`) and where it is seen (`address`). Raises OSError."""
        said = self._answer("connection")
        words, self.calls = str(said["connection"]).split(), str(said.get("name", ""))
        if len(words) != 4:
            raise OSError("its ssh server sets no SSH_CONNECTION")
        self.head, self.address = words[0], words[2]

    def lay(self, folder: Path, files: Mapping[str, str]) -> None:
        """Have these files written into a folder. Raises OSError."""
        self._laid = True
        self._say({"folder": str(folder), "files": dict(files)})
        self._answer("written")

    def keep(self) -> None:
        """Have those stay that were written: all hosts have theirs. Raises OSError."""
        if self._laid:
            self._say("keep")
            self._answer("kept")

    def take_back(self) -> None:
        """Have those removed that were written. Raises OSError."""
        if self._laid:
            self._say("back")
            self._answer("removed")

    def _say(self, words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(words)}\n".encode())
        self._process.stdin.flush()

    def _answer(self, word: str) -> dict[str, Any]:
        """The line with this word in it; what a login prints before it is passed over."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and "problem" in said:
                raise OSError(said["problem"])
            if isinstance(said, dict) and word in said:
                return said
        lines = self._process.stderr.read().decode(errors="replace").splitlines()
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else "ended without a word"
        raise OSError(next((line.strip() for line in reversed(lines) if line.strip()), f"ssh {how}"))


@contextmanager
def land(names: Sequence[str], told: Told = ()) -> Iterator[list[Landed]]:
    """An ssh to each host at once, for as long as the block runs; where it fails, what was written is removed again.

    Raises Unreachable with all that can't be reached, Stopped once something is `told`, and OSError where ssh can't be started.
    """
    landed: list[Landed] = []
    try:
        for name in names:
            landed.append(Landed(name))
        on_each(landed, Landed.meet, told)
        yield landed
        on_each(landed, Landed.keep, told)
    except BaseException:
        with suppress(Unreachable):
            on_each(landed, Landed.take_back, seconds=BACK)
        raise
    finally:
        for each in landed:
            each.ssh.close()


def reachable(names: Sequence[str], told: list[tuple[int, float]] | None = None) -> tuple[str, ...]:
    """Those of these hosts that take an ssh and answer; none once something is `told`. Without `told` a signal does its work afterwards."""
    with signals(told) as heard:
        try:
            with land(names, heard):
                found = tuple(names)
        except Unreachable as error:
            found = tuple(name for name in names if name not in error.hosts)
        except (OSError, Stopped):
            found = ()
    if heard and told is None:
        os.kill(os.getpid(), heard[0][0])
    return found


def on_each(landed: Sequence[Landed], act: Callable[[Landed], object], told: Told = (), seconds: float | None = None) -> None:
    """Do it on all hosts at once, within PATIENCE. Raises Unreachable with all on which it failed, Stopped once something is told."""
    most = PATIENCE if seconds is None else seconds

    def tried(each: Landed) -> str:
        try:
            act(each)
        except (OSError, ValueError) as error:
            return str(error) or repr(error)
        return ""

    answers = at_once([(each.ssh, partial(tried, each)) for each in landed], most, lambda: bool(told))
    if told:
        raise Stopped(told[0][0])
    said = [(each.name, why) for each, why in zip(landed, answers, strict=True) if why != ""]
    if said:
        tell = "; ".join(f"{name} can't be used: {f'no answer in {most:.0f} s' if why is None else why}" for name, why in said[:4])
        raise Unreachable([name for name, _ in said], tell + (f"; and so for {len(said) - 4} more" if len(said) > 4 else ""))
