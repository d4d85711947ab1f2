"""Writes a checkpoint in a thread while training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from ...launch.rank.channel import PROGRESS_INTERVAL, OnProgress
from .host_copy import HostCopy
from .save import SaveResult, save_shards
from .slices import Shard
from .work_on_all_ranks import SaveFailed


class BackgroundWriter:
    """Writes one checkpoint at a time from the host's copy of a rank's shards. All ranks start, and wait, together."""

    def __init__(self) -> None:
        self._copy = HostCopy()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[SaveResult] | None = None
        self._progress = ""  # the part of the save in which there was progress since it was last read

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way whose result was not asked for yet."""
        return self._under_way is not None

    @property
    def is_done(self) -> bool:
        """Whether that checkpoint has come to its end."""
        return self._under_way is not None and self._under_way.done()

    def start(self, folder: Path, step: int, shards: Iterable[Shard], **rest: Any) -> None:
        """Copy the shards to the host, and begin to save them as `save_shards` does; the last result must have been asked for before.

        A rank that can't copy them, for want of memory, begins all the same, and the save fails on all ranks.
        """
        assert self._under_way is None, "the copy that a save reads would change"
        copies: Iterable[Shard]
        try:
            copies = self._copy.take(shards)
        except (RuntimeError, MemoryError) as error:
            copies = map(_raise_error, [error])
        self._under_way = self._thread.submit(save_shards, folder, step, copies, **rest, on_progress=partial(setattr, self, "_progress"))

    def result(self, on_progress: OnProgress) -> SaveResult:
        """Wait for the checkpoint under way, and return what `save_shards` does or raise what it raises. `on_progress` is called while
        there is some."""
        under_way = self._under_way
        assert under_way is not None
        while not wait([under_way], timeout=PROGRESS_INTERVAL).done:
            if self._progress:
                on_progress(self._progress)
                self._progress = ""
        self._under_way = None
        return under_way.result()


def _raise_error(error: Exception) -> Shard:
    """Raise why there is no copy, where the shards are read."""
    raise SaveFailed(f"no copy in the host's memory: {error}".splitlines()[0]) from error
