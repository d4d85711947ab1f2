"""What `distrain doctor` needs torch for: devices, a meeting over gloo, a run in one process.

Run it as `python -m distrain.trainer.loop.offline.doctor`.
Each finding is a line of JSON on stdout, {"name", "state", "says", "mend"}; the last line is {"losses": [...]}.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from ...engines.deepspeed.settings import optimizer
from ...launch.rank.environment import reserve_port
from ...models.build import build
from ...plan.plan import make_plan
from ...spec.run import Run
from ..data.batches import Batches
from ..data.prepare import cache_folder, prepare
from ..lr_schedule import rate
from .exit_status import answered

WAIT = 15.0  # seconds in which two processes have to meet


def main() -> int:
    """Say what is found; the one argument is the run.json of the self-check."""
    return answered(lambda: look(Path(sys.argv[1])))


def look(path: Path) -> None:
    """Every finding, then the losses of the run in this process alone."""
    meeting = met()  # forks, so before anything starts threads or a driver
    devices()
    if meeting:
        mend = "set GLOO_SOCKET_IFNAME=lo, and look at the firewall and at this machine's own name in /etc/hosts"
        _say("gloo", "problem", f"two processes did not meet: {meeting}", mend)
    else:
        _say("gloo", "ok", "two processes of this machine meet and add up")
    print(json.dumps({"losses": losses(msgspec.json.decode(path.read_bytes(), type=Run))}), flush=True)


def devices() -> None:
    """What torch computes on."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            _say("device", "ok", f"GPU {index}: {about.name}, {about.total_memory / 2**30:.0f} GiB")
        if not dist.is_nccl_available():
            _say("device", "problem", "this torch has no NCCL, over which GPUs talk", "install torch's own build for CUDA")
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if shutil.which("nvidia-smi"):
        why = "is built without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} reaches none"
        mend = "install the torch that fits the driver, which nvidia-smi shows"
        _say("device", "warning", f"a GPU seems to be here, and torch {why}", mend)
    _say("device", "ok", f"{cores} CPU cores, no GPU")


def met() -> str:
    """Why two processes that are forked here don't meet over gloo and add up; "" where they do."""
    left: list[int] = []
    with reserve_port() as port:
        try:
            pipes = [_forked(rank, port.getsockname()[1], left) for rank in range(2)]
            said = [_heard(pipe, left) for pipe in pipes]
        finally:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return next((each for each in said if each), "")


def _forked(rank: int, port: int, left: list[int]) -> int:
    """The pipe of a process that meets the other, to which it writes what it can't; its pid is added to those that are left."""
    hear, speak = os.pipe()
    pid = os.fork()
    if pid:
        left.append(pid)
        os.close(speak)
        return hear
    try:
        _meet(rank, port)
    except Exception as error:
        os.write(speak, (str(error).splitlines() or [repr(error)])[0].encode())
    finally:
        os._exit(0)


def _meet(rank: int, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=WAIT))
    total = torch.full((), rank + 1.0)
    dist.all_reduce(total)
    if total.item() != 3.0:
        raise ValueError(f"1 + 2 gave {total.item()}")
    dist.barrier()


def _heard(pipe: int, left: list[int]) -> str:
    """What the first of the processes that are left could not; it is killed where it says nothing in time, and left no more."""
    ready, _, _ = select.select([pipe], [], [], 2 * WAIT)
    said = os.read(pipe, 400).decode(errors="replace") if ready else f"no answer in {2 * WAIT:.0f} s"
    os.close(pipe)
    if not ready:
        os.kill(left[0], signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(left[0], 0)[1])
    left.pop(0)
    return said or (f"one of them was ended by signal {-status}" if status < 0 and ready else "")


def losses(run: Run) -> list[float]:
    """The loss of each step of a run in this process, without DeepSpeed: torch's optimizer over whole batches."""
    train, plan = run.train, make_plan(run)
    assert plan.run is not None
    corpus = prepare(run.data, vocab=run.model.vocab, seq=train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    batches = Batches(corpus, seed=train.seed, seq=train.seq)
    module = build(run, device=torch.device("cpu"), dtype=torch.float32, seed=train.seed)
    stepper, found = optimizer(run, module.parameters()), list[float]()
    for step in range(plan.run.steps):
        batch = batches.batch(step * train.batch, train.batch)
        total, counted = module(batch.tokens, batch.labels)
        loss = total / counted
        stepper.zero_grad()
        loss.backward()
        if train.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip)
        for group in stepper.param_groups:
            group["lr"] = rate(run.optim, step, plan.run.steps)
        stepper.step()
        found.append(float(loss))
    return found


def _say(name: str, state: str, says: str, mend: str = "") -> None:
    print(json.dumps({"name": name, "state": state, "says": says, "mend": mend}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
