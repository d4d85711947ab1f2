"""A rank that the controller supervises, wherever it runs: its record, and the requests that its agent carries out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .rank_record import Message, RankRecord


class RankHandle(RankRecord, ABC):
    """A supervised rank. Once `outcome` is set, no process of the rank is left."""

    @property
    @abstractmethod
    def fd(self) -> int:
        """The file descriptor from which its messages are read."""

    def read_messages(self) -> list[Message]:
        """Read and record what it has sent; return the messages."""
        return self.receive(self._read())

    def wake_agent(self) -> str:
        """Let its agent continue if it was stopped; return a line about that for the user, "" if it was not."""
        return ""

    @abstractmethod
    def is_orphan(self) -> bool:
        """Return whether its agent is gone, so that nothing more will be sent; earlier messages may be unread."""

    @abstractmethod
    def record_lost_agent(self) -> None:
        """Record the end of a rank whose agent is gone."""

    @abstractmethod
    def request_stop(self) -> None:
        """Ask it to stop, once: SIGTERM."""

    @abstractmethod
    def dump_stacks(self) -> None:
        """Have it write the Python stacks of its threads to its log."""

    @abstractmethod
    def stack_lines(self) -> tuple[str, ...]:
        """Return the stacks that it has written since; empty if it can't."""

    @abstractmethod
    def kill(self) -> None:
        """Have it killed, with all processes that it started."""

    @abstractmethod
    def give_up(self) -> None:
        """Record the end of a rank that was killed and is still there."""

    @abstractmethod
    def close(self, patience: float) -> None:
        """End it: no process of it is left afterwards, except those that SIGKILL does not end in `patience` seconds."""

    @abstractmethod
    def _read(self) -> bytes:
        """Return the bytes that can be read now; empty if there are none."""

    def _record(self, kind: str, content: Any) -> None:
        match kind, content:
            case "ended", int():  # its agent's last message
                self.record_end(content)
            case _:
                super()._record(kind, content)
