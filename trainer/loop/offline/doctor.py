"""The torch half of `distrain doctor`: devices, a gloo rendezvous, a training run in one process.

Run it as `python -m distrain.trainer.loop.offline.doctor`.
Each check is a line of JSON on stdout, {"name", "state", "says", "mend"}; the last line is {"losses": [...]}.
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

from ...engines.torch_optimizer import torch_optimizer
from ...models.build import build_model
from ...plan.plan import make_plan
from ...spec.run import Run
from ...spec.sections.lr_schedule import learning_rate
from ...system.cpu import cpu_count
from ...system.reserved_port import reserve_port
from ...system.stop_requests import collect_stop_requests
from ..data.prepare import cache_folder, prepare_corpus
from ..data.samples.batches import Batches
from .verb_process import run_verb

RENDEZVOUS_WAIT = 15.0  # seconds in which two processes must rendezvous


def main() -> int:
    """Run the checks; the one argument is the run.json of the self-check."""
    return run_verb(lambda: run_checks(Path(sys.argv[1])))


def run_checks(path: Path) -> None:
    """Report every check, then the losses of the run in this process alone."""
    fault = gloo_fault()  # forks, so it comes before anything that starts threads or a driver
    report_devices()
    if fault:
        mend = "set GLOO_SOCKET_IFNAME=lo, and check the firewall and this machine's own name in /etc/hosts"
        _report("gloo", "problem", f"two processes did not connect: {fault}", mend)
    else:
        _report("gloo", "ok", "two processes of this machine connect and all-reduce")
    print(json.dumps({"losses": undistributed_losses(msgspec.json.decode(path.read_bytes(), type=Run))}), flush=True)


def report_devices() -> None:
    """Report the devices that torch computes on."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            _report("device", "ok", f"GPU {index}: {about.name}, {about.total_memory / 2**30:.0f} GiB")
        if not dist.is_nccl_available():
            _report("device", "problem", "this torch has no NCCL, which GPUs communicate over", "install PyTorch's own CUDA build")
        return
    cores = cpu_count()
    if shutil.which("nvidia-smi"):
        why = "is built without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} finds none"
        mend = "install the torch for this driver's CUDA version, which nvidia-smi shows"
        _report("device", "warning", f"this machine seems to have a GPU, and torch {why}", mend)
    _report("device", "ok", f"{cores} CPU cores, no GPU")


def gloo_fault() -> str:
    """Fork two processes that rendezvous over gloo and all-reduce. Return why they failed, else ""."""
    alive: list[int] = []
    with reserve_port() as port:
        try:
            pipes = [_fork_peer(rank, port.getsockname()[1], alive) for rank in range(2)]
            faults = [_peer_fault(pipe, alive) for pipe in pipes]
        finally:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return next((fault for fault in faults if fault), "")


def _fork_peer(rank: int, port: int, alive: list[int]) -> int:
    """Fork one of the two processes and add it to those alive. Return the pipe that it writes its error to."""
    reader, writer = os.pipe()
    with collect_stop_requests() as requests:  # Python ignores what a signal's handler raises within fork
        pid = os.fork()
        if pid:
            alive.append(pid)
    if pid:
        os.close(writer)
        if requests:
            signal.raise_signal(requests[0][0])
        return reader
    try:
        _join_and_add(rank, port)
    except Exception as error:
        os.write(writer, (str(error).splitlines() or [repr(error)])[0].encode())
    finally:
        os._exit(0)


def _join_and_add(rank: int, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=RENDEZVOUS_WAIT))
    total = torch.full((), rank + 1.0)
    dist.all_reduce(total)
    if total.item() != 3.0:
        raise ValueError(f"1 + 2 gave {total.item()}")
    dist.barrier()


def _peer_fault(pipe: int, alive: list[int]) -> str:
    """Wait for the first process alive, and kill it after a timeout. Return its error, else ""."""
    ready, _, _ = select.select([pipe], [], [], 2 * RENDEZVOUS_WAIT)
    error = os.read(pipe, 400).decode(errors="replace") if ready else f"no answer in {2 * RENDEZVOUS_WAIT:.0f} s"
    os.close(pipe)
    if not ready:
        os.kill(alive[0], signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(alive[0], 0)[1])
    alive.pop(0)
    return error or (f"one of them was killed by signal {-status}" if status < 0 and ready else "")


def undistributed_losses(run: Run) -> list[float]:
    """Return the loss of each step of a run in this process, without DeepSpeed: torch's optimizer over whole batches."""
    train, plan = run.train, make_plan(run)
    assert plan.run is not None
    corpus = prepare_corpus(run.data, vocab=run.model.vocab, seq=train.seq, cache=cache_folder(run.data), progress=lambda *_: None)
    batches = Batches(corpus, seed=train.seed, seq=train.seq)
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=train.seed)
    stepper, found = torch_optimizer(run, module), list[float]()
    for step in range(plan.run.steps):
        batch = batches.batch(step * train.batch, train.batch)
        total, counted = module(batch.tokens, batch.labels)
        loss = total / counted
        stepper.zero_grad()
        loss.backward()
        if train.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip)
        for group in stepper.param_groups:
            group["lr"] = learning_rate(run.optim, step, plan.run.steps)
        stepper.step()
        found.append(float(loss))
    return found


def _report(name: str, state: str, says: str, mend: str = "") -> None:
    print(json.dumps({"name": name, "state": state, "says": says, "mend": mend}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
