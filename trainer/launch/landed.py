"""The head's side of landing on hosts: an ssh to each, over which a run's files are written there (landing.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from .words import SSH, crosses

LANDING = Path(__file__).with_name("landing.py")
AT_ONCE = 64
PATIENCE = 60.0  # seconds for a host to write a few files
Answer = TypeVar("Answer")


class Unreachable(Exception):
    """Hosts on which nothing can be written, and why, in a line."""

    def __init__(self, hosts: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.hosts = tuple(hosts)


class Landed:
    """A host with landing.py running on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._laid = False
        words = (
            crosses(sys.executable, "the Python", "install distrain at a path of these"),
            "-I",
            "-S",
            crosses(str(LANDING), "the path", ""),
        )
        pipe = subprocess.PIPE
        self._ssh = subprocess.Popen(
            ["ssh", *SSH, "--", name, " ".join(words)], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def meet(self) -> None:
        """Learn the addresses: `head` is where the host sees this machine, `address` where it is seen. Raises OSError."""
        words = str(self._answer("connection")).split()
        if len(words) != 4:
            raise OSError("its ssh server sets no SSH_CONNECTION")
        self.head, self.address = words[0], words[2]

    def lay(self, folder: Path, files: Mapping[str, str]) -> None:
        """Have these files written into a folder. Raises OSError."""
        self._laid = True
        self._say({"folder": str(folder), "files": dict(files)})
        self._answer("written")

    def take_back(self) -> None:
        """Have those removed that were written. Raises OSError."""
        if self._laid:
            self._say("back")
            self._answer("removed")

    def _say(self, words: object) -> None:
        assert self._ssh.stdin is not None
        self._ssh.stdin.write(f"{json.dumps(words)}\n".encode())
        self._ssh.stdin.flush()

    def _answer(self, word: str) -> Any:
        """What it says under this word; what a login prints before it is passed over."""
        assert self._ssh.stdout is not None
        assert self._ssh.stderr is not None
        for line in self._ssh.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and "problem" in said:
                raise OSError(said["problem"])
            if isinstance(said, dict) and word in said:
                return said[word]
        lines = self._ssh.stderr.read().decode(errors="replace").splitlines()
        raise OSError(next((line.strip() for line in reversed(lines) if line.strip()), "ssh ended without a word"))

    def close(self) -> None:
        """Leave the host."""
        self._ssh.kill()
        self._ssh.wait()
        for pipe in (self._ssh.stdin, self._ssh.stdout, self._ssh.stderr):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@contextmanager
def land(names: Sequence[str]) -> Iterator[list[Landed]]:
    """An ssh to each host at once, for as long as the block runs; where it fails, what was written is removed again.

    Raises Unreachable with all that can't be reached.
    """
    landed = [Landed(name) for name in names]
    try:
        on_each(landed, Landed.meet)
        yield landed
    except BaseException:
        with suppress(Unreachable):
            on_each(landed, Landed.take_back)
        raise
    finally:
        for each in landed:
            each.close()


def reachable(names: Sequence[str]) -> tuple[str, ...]:
    """Those of these hosts that take an ssh."""
    try:
        with land(names):
            return tuple(names)
    except Unreachable as error:
        return tuple(name for name in names if name not in error.hosts)


def on_each(landed: Sequence[Landed], act: Callable[[Landed], object]) -> None:
    """Do it on all hosts at once. Raises Unreachable with all on which it failed."""

    def tried(each: Landed) -> str | None:
        try:
            act(each)
        except (OSError, ValueError) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        said = [(each.name, why) for each, why in zip(landed, pool.map(tried, landed), strict=True) if why]
    if said:
        more = f"; and so for {len(said) - 4} more" if len(said) > 4 else ""
        raise Unreachable([name for name, _ in said], "; ".join(f"{name} can't be used: {why}" for name, why in said[:4]) + more)
