"""Forks ranks that share a gloo group, from a process that has already imported torch."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from distrain.trainer.system.parent_watch import die_with_parent


def fork_ranks(count: int, run_rank: Callable[[int], None]) -> int:
    """Call `run_rank` with each rank in its own process, where torch.distributed is initialized; return how many failed."""
    with tempfile.TemporaryDirectory() as folder:
        children, parent = [], os.getpid()
        for rank in range(count):
            child = os.fork()
            if child == 0:
                try:
                    die_with_parent(parent)  # a test that times out kills the parent only
                    warnings.simplefilter("ignore")
                    torch.set_num_threads(1)
                    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
                    run_rank(rank)
                    dist.barrier()
                    dist.destroy_process_group()
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        return sum(os.waitpid(child, 0)[1] != 0 for child in children)
