"""Ranks whose device is faulty, or has a copy of a weight that departs: RUN_DIR/faults names what, {"FAULT": [RANK, first step or check]}.

Run by path with RUN_DIR/run.json it is the process of a run of one rank, whose faults are those of its first attempt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop import train
from distrain.trainer.loop.devices import device_work
from distrain.trainer.loop.rank import run_rank

SLOWER = 20  # times
CONTROLLED = __name__ == "__main__"  # a controller starts it again after a fault

# What the faults replace functions of.
loop: Any = train
work: Any = device_work


def other_bits(first: int) -> None:
    """From check `first` (from 0) on, one bit of each result of the work is wrong."""
    original, done = work.work_once, [0]

    def work_once(*given: Any) -> Any:
        x, copied = original(*given)
        if done[0] >= first * work.REPEATS:
            flip_bit(x, 7)
        done[0] += 1
        return x, copied

    work.work_once = work_once


def one_other_repeat(first: int) -> None:
    """In check `first`, the last repeat of the work has another result than those before."""
    original, done = work.work_once, [0]

    def work_once(*given: Any) -> Any:
        x, copied = original(*given)
        done[0] += 1
        if done[0] == (first + 1) * work.REPEATS:
            flip_bit(copied, 0)
        return x, copied

    work.work_once = work_once


def slow(first: int, last: int = 1 << 30) -> None:
    """In checks `first` to `last`, the work takes many times as long."""
    original, done = work.work_once, [0]

    def work_once(*given: Any) -> Any:
        began = time.thread_time()
        result = original(*given)
        until = began + SLOWER * (time.thread_time() - began)
        while first <= done[0] // work.REPEATS <= last and time.thread_time() < until:
            pass
        done[0] += 1
        return result

    work.work_once = work_once


def slow_once(first: int) -> None:
    """The work takes many times as long in one check alone."""
    slow(first, first)


def no_room(first: int) -> None:
    """The device has no memory for the work."""

    def work_once(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    work.work_once = work_once


def flipped_weight(step: int) -> None:
    """After step `step` (from 1) one bit of the third weight is another."""
    original = loop.train_step

    def train_step(run: Any, setup: Any, micro_batches: Any, at: int, *rest: Any) -> Any:
        result = original(run, setup, micro_batches, at, *rest)
        if at + 1 == step:
            flip_bit(setup.engine.parameters[2].parameter.data, 3)
        return result

    loop.train_step = train_step


def flip_bit(tensor: torch.Tensor, element: int) -> None:
    """Flip the lowest bit of an element."""
    tensor.view(-1)[element : element + 1].view(torch.int32 if tensor.element_size() == 4 else torch.int16).bitwise_xor_(1)


FAULTS = {each.__name__: each for each in (other_bits, one_other_repeat, slow, slow_once, no_room, flipped_weight)}


def run_faulty_rank(path: Path, channel: Channel) -> int:
    """Run a rank, with the faults that RUN_DIR/faults gives it."""
    file = path.with_name("faults")
    for name, (rank, at) in (json.loads(file.read_text()) if file.is_file() else {}).items():
        if rank == int(os.environ["RANK"]):
            FAULTS[name](at)
    if CONTROLLED:
        file.unlink(missing_ok=True)
    return run_rank(path, channel)


if __name__ == "__main__":
    raise SystemExit(run_faulty_rank(Path(sys.argv[1]), Channel.from_environment()))
