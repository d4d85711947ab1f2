"""A rank that another launcher started, torchrun or Slurm: it dies with that launcher, and has a log of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ...system import parent_watch
from .channel import Talk
from .log import open_log

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")  # variables by which ranks of torchrun and of srun are known


def talk_of(folder: Path, environment: Mapping[str, str] = os.environ) -> Talk:
    """This rank's talk. Where another launcher started it, its parent's death is its own from now on, and what it prints goes to
    RUN_DIR/ranks/N.log but for its words, which stay where they would have been."""
    if environment.get(parent_watch.VARIABLE) or not any(environment.get(name) for name in LAUNCHERS):
        return Talk.from_environment(environment)
    parent_watch.die_with(os.getppid())
    try:
        return Talk(None, _apart(folder / "ranks", environment))
    except OSError as error:
        print(f"what rank {environment.get('RANK', '0')} prints goes to no log: {error}", file=sys.stderr)
        return Talk(None)


def _apart(logs: Path, environment: Mapping[str, str]) -> TextIO:
    """Turn both streams to this rank's log; where stdout went before."""
    logs.mkdir(parents=True, exist_ok=True)
    _, file = open_log(logs, int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    words = os.fdopen(os.dup(1), "w")
    with file:
        for each in (1, 2):
            os.dup2(file.fileno(), each)
    return words
