"""How long training waits for each save, and how long it is between two."""

from __future__ import annotations

from ...rundir.metric_rows import END_WAIT_KEY, SAVE_KEY


class SavePauses:
    """Sums the seconds that training waits for the save under way, and measures those from the end of a save to that of the next."""

    def __init__(self, now: float) -> None:
        self._paused = 0.0
        self._last_end = now  # when the last save ended, or this attempt began to train

    def add(self, seconds: float) -> None:
        """Add seconds that training has waited for the save under way."""
        self._paused += seconds

    def end(self, now: float, end_wait: float = 0.0) -> dict[str, float]:
        """Return the figures of the save that ends now, as metrics.jsonl names them, and begin anew. `end_wait`: the seconds of its pauses
        in which this attempt had nothing left to train."""
        figures = {SAVE_KEY: self._paused, "save_interval": now - self._last_end}
        figures |= {END_WAIT_KEY: end_wait} if end_wait else {}
        self._paused, self._last_end = 0.0, now
        return figures
