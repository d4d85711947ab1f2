"""The ranks of a run, and this one's place among them: the one file that reads the environment of a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

WAIT = timedelta(minutes=30)  # a collective that waits longer has lost a rank


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank, how many there are, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0


def join(kind: str) -> World:
    """Meet the other ranks: over NCCL on GPUs, over gloo on CPUs. RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* say where."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed takes GPUs where there are some, whatever the run says
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=size, timeout=WAIT)
    return World(rank=rank, size=size, device=device)


def leave() -> None:
    """Part from the other ranks together: without the barrier some are cut off while others still read from them."""
    dist.barrier()
    dist.destroy_process_group()


def agreed(flag: bool, device: torch.device) -> bool:
    """Whether any rank says so: each learns it at the same step."""
    word = torch.tensor(int(flag), device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return bool(word.item())
