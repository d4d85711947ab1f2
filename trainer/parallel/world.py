"""The ranks of a run and this rank among them. RANK, WORLD_SIZE and LOCAL_RANK are read here."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a collective that takes longer has lost a rank
# One rank prepares a corpus, writes a larger part of a checkpoint or hashes more of it while the others wait on the host, for as
# long as that takes: whether a run hangs is for its watchdog to decide.
HOST_TIMEOUT = timedelta(days=7)
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}  # of torch.distributed, by kind of device


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank, the number of ranks, and the device that this one computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which logs for all."""
        return self.rank == 0


def join_ranks(kind: str) -> World:
    """Join the process group of all ranks of a kind of device, `cuda` or `cpu`, as RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* say."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise DeepSpeed uses the GPUs of the machine
    dist.init_process_group(BACKENDS[kind], rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    return World(rank=rank, size=size, device=device)


def new_host_group() -> dist.ProcessGroup:
    """Make a process group of all ranks for Python objects, all ranks together; a thread with a group of its own may use it at any time."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT, group_desc="host")
    return group


def leave_ranks() -> None:
    """Leave the process group, all ranks together: without the barrier some would close connections that others still read from."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    dist.destroy_process_group()


class StopVote:
    """Whether any rank was asked to stop, agreed on by all ranks after each step, or each part of an evaluation. One rank needs no vote.

    The answer is that of the vote `late` votes before: no rank waits for one that is no further behind.
    """

    def __init__(self, device: torch.device, *, late: int) -> None:
        self._device, self._late = device, late
        self._under_way = deque[tuple[torch.Tensor, Any]]()

    def vote(self, *, requested: bool) -> bool:
        """Vote; every rank calls it as often, and gets the same answer."""
        if dist.get_world_size() == 1:
            return requested
        if not self._late:
            return any_rank(requested, self._device)
        anywhere = _flag(requested, self._device)
        self._under_way.append((anywhere, dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, async_op=True)))
        if len(self._under_way) <= self._late:
            return False
        answer, work = self._under_way.popleft()
        work.wait()
        return bool(answer.item())

    def end(self) -> None:
        """Leave no vote under way."""
        while self._under_way:
            self._under_way.popleft()[1].wait()

    def vote_now(self, *, requested: bool) -> bool:
        """Vote as `vote` does, and never get a late answer: the ranks have waited for each other anyway."""
        return requested if dist.get_world_size() == 1 else any_rank(requested, self._device)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank; every rank calls it and gets the same answer."""
    anywhere = _flag(flag, device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return bool(anywhere.item())


def _flag(flag: bool, device: torch.device) -> torch.Tensor:
    """Return a flag on a device. A kernel writes it: the host does not wait for the device, as it does to copy a number there."""
    return torch.full((), int(flag), device=device)
