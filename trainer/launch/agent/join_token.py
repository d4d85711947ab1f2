"""The join token: what an agent on another host needs to register with the controller, and the proof that both hold it."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

JOIN_TOKEN_FILE = "launch/join_token"  # in RUN_DIR


@dataclass(frozen=True, kw_only=True)
class JoinToken:
    """The content of a file of mode 0600 in RUN_DIR on each host, for one attempt of the run. `secret` is 256 random bits in hex."""

    secret: str = field(repr=False)
    controllers: Sequence[tuple[str, int]]  # by host: the address and port at which it reaches the controller
    hostnames: Sequence[str]  # by host: its own name for itself
    slots: Sequence[Sequence[int]]  # by host: the slots that are used, one rank each
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)  # variables of the ranks in addition to their host's own

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return sum(len(slots) for slots in self.slots)

    def host_and_local_rank(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's host, and the rank's number on that host; raises IndexError."""
        for host, slots in enumerate(self.slots):
            if rank < len(slots):
                return host, rank
            rank -= len(slots)
        raise IndexError(rank)

    def first_rank(self, host: int) -> int:
        """Return the first rank of a host."""
        return sum(map(len, self.slots[:host]))

    def text(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, file: Path) -> JoinToken:
        """Return the token of a file."""
        return cls(**json.loads(file.read_bytes()))

    def proof(self, prover: Literal["controller", "agent"], *content: object) -> str:
        """Return the proof that `prover` holds this token: a keyed hash of `content`."""
        return hmac.new(self.secret.encode(), json.dumps([prover, *content]).encode(), hashlib.sha256).hexdigest()
