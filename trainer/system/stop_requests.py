"""A process that can be asked to stop: a signal is noted, and what it is at is finished first."""

from __future__ import annotations

import signal

ASKS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether this process was asked to stop: SIGTERM or SIGINT, those included that were held back until now (local_agent.py)."""

    def __init__(self) -> None:
        self.asked = False
        for number in ASKS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)

    def over(self) -> None:
        """Nothing is left to be stopped: at its exit Python takes its handlers away, and a late SIGTERM would be this process's end."""
        for number in ASKS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True
