"""What a rank on another host needs to come to the run's head, and how both prove that they hold the same ticket."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

NAME = "launch/ticket"  # in RUN_DIR


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A file of mode 0600 in RUN_DIR on each host, of one start of the run. The token is 256 random bits in hex."""

    token: str = field(repr=False)
    doors: Sequence[tuple[str, int]]  # by host: address and port by which it reaches the head
    names: Sequence[str]  # by host: what it calls itself
    slots: Sequence[Sequence[int]]  # by host: the slots that are taken, one rank each
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)  # what ranks have beside their host's own

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return sum(len(slots) for slots in self.slots)

    def seat(self, rank: int) -> tuple[int, int]:
        """A rank's host and its place among that host's ranks."""
        for host, slots in enumerate(self.slots):
            if rank < len(slots):
                return host, rank
            rank -= len(slots)
        raise IndexError(rank)

    def first(self, host: int) -> int:
        """The first rank of a host."""
        return sum(map(len, self.slots[:host]))

    def written(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, file: Path) -> Ticket:
        """The ticket of a file."""
        return cls(**json.loads(file.read_bytes()))

    def proof(self, who: str, *words: object) -> str:
        """What only a holder of the ticket can answer to these words."""
        return hmac.new(self.token.encode(), json.dumps([who, *words]).encode(), hashlib.sha256).hexdigest()
