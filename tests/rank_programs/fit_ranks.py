"""The fork server of the product, run by path: what RUN_DIR/spoiler says goes wrong on one rank, {"how", "rank"}, does."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import nan
from pathlib import Path
from typing import Any

from distrain.trainer.launch.rank.channel import Talk
from distrain.trainer.loop import setup, train
from distrain.trainer.loop.checkpoint import LoadFailed, Reader
from distrain.trainer.loop.forkserver.server import QUESTIONS, serve
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.parallel import world

SMALL = 60_000  # bytes of a file at the most
SHORT, LONG = 6.0, 8.0  # seconds of a collective at the most, and of what a corpus takes

loop: Any = train
begin: Any = setup
ranks: Any = world
reader: Any = Reader


def told() -> None:
    """Asked to stop while it is being loaded, under a keeper that holds that back."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)


def stuck() -> None:
    """Raises in its second step, while a thread of its own reads what never comes."""
    right = loop.rate

    def rate(optim: Any, step: int, steps: int) -> float:
        if step == 1:
            ThreadPoolExecutor(1).submit(threading.Event().wait)
            raise ArithmeticError("what a rank may raise\nand explain")
        return float(right(optim, step, steps))

    loop.rate = rate


def unread() -> None:
    """Can't read its part of a checkpoint."""

    def read(self: Any, part: Any) -> None:
        raise LoadFailed("a shard is on no disk of this host")

    reader.read = read


def slow() -> None:
    """Takes longer for the corpus than the others would wait for it in a step."""
    right = begin.prepare

    def prepare(*of: Any, **further: Any) -> Any:
        begin.prepare = right
        time.sleep(LONG)
        return right(*of, **further)

    begin.prepare = prepare


def limited() -> None:
    """May write small files only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))


def unsure() -> None:
    """Its validation loss is no number."""
    right = loop.evaluated
    loop.evaluated = lambda *of: nan * right(*of)


SPOILERS = {each.__name__: each for each in (told, stuck, unread, slow, limited, unsure)}


def spoiled(path: Path, talk: Talk) -> int:
    """What a rank does, spoiled first where that is asked for."""
    asked = path.with_name("spoiler")
    said = json.loads(asked.read_text()) if asked.is_file() else {}
    if said.get("how") == "slow":
        ranks.WAIT = timedelta(seconds=SHORT)
    if said.get("rank") == int(os.environ["RANK"]):
        SPOILERS[said["how"]]()
    return run_rank(path, talk)


if __name__ == "__main__":
    serve(spoiled, QUESTIONS)
