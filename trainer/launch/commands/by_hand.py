"""Ranks that `fit` does not start: by a shell on this machine, by torchrun, a command a host, and by Slurm, one file for sbatch."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join, quote

from ..hosts.hostfile import Host
from ..rank.environment import Place
from .deepspeed import RANKS, Command, File, Launching, Start, checked

LEAST_NOTICE = 60  # seconds before its time is up that Slurm tells a job so
LOGS = "what a rank prints is in ranks/N.log of the run folder"


def local(start: Start, ranks: int) -> Launching:
    """A shell's loop over the ranks of this machine; when one fails, or the shell is told to end, the others are told to stop."""
    place = Place(rank=0, ranks=ranks, local_rank=0, local_ranks=ranks, address="127.0.0.1", port=start.port)
    own = ("RANK", "LOCAL_RANK")
    told = {key: value for key, value in place.environment({}).items() if key not in own}
    threads = told.pop("OMP_NUM_THREADS")
    lines = (
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}} {' '.join(f'{key}={quote(value)}' for key, value in told.items())}",
        "trap 'kill $(jobs -p) 2> /dev/null || :; wait' EXIT",
        f"for rank in $(seq 0 {ranks - 1}); do",
        f"    {' '.join(f'{key}=$rank' for key in own)} {join((start.python, '-m', start.module, *start.arguments))} &",
        "done",
        'for rank in $(jobs -p); do wait "$rank"; done',
    )
    remarks = ("fit starts them together, each beside a process that ends it, at a port that is free",)
    return Launching(commands=(), lines=lines, remarks=remarks)


def torchrun(start: Start, hosts: Sequence[Host], *, cuda: bool) -> Launching:
    """A command of torchrun's for each host; their ranks meet at the first (static rendezvous, so that ranks keep to its order)."""
    checked(start)
    commands = [
        Command(
            where=host.name,
            words=(
                start.python,
                "-m",
                "torch.distributed.run",
                f"--nnodes={len(hosts)}",
                f"--node-rank={number}",
                f"--nproc-per-node={len(host.slots)}",
                f"--master-addr={start.address}",
                f"--master-port={start.port}",
                "--module",
                start.module,
                *start.arguments,
            ),
            environment=RANKS | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))} if cuda and not host.whole else {}),
        )
        for number, host in enumerate(hosts)
    ]
    remarks = (
        f"ranks meet at {start.address} port {start.port} (torchrun's static rendezvous)",
        f"the run's lines come out at the first host; all hosts see the run folder; {LOGS}",
        "torchrun exits with 1 where its ranks exit with 75 too: they were told to stop and have saved, and the same commands go on",
    )
    return Launching(commands=tuple(commands), remarks=remarks)


def slurm(start: Start, *, name: str, nodes: int, gpus: int, cuda: bool, notice: float) -> Launching:
    """A file for sbatch, of one task a rank; it tells ranks to save `notice` seconds before its time is up."""
    checked(start)
    file = start.own / f"{name}.sbatch"
    command = " ".join((start.python, "-m", start.module, *start.arguments))
    rows = (
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks-per-node={gpus}",
        *([f"#SBATCH --gpus-per-node={gpus}"] if cuda else []),
        "#SBATCH --exclusive",
        f"#SBATCH --output={start.own}/slurm-%j.log",
        "# so many seconds before the end ranks are told to finish their step and save",
        f"#SBATCH --signal=TERM@{max(LEAST_NOTICE, round(notice))}",
        "set -euo pipefail",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts%%$'\\n'*}" + f" MASTER_PORT={start.port}",
        f"export WORLD_SIZE={nodes * gpus} LOCAL_WORLD_SIZE={gpus} {' '.join(f'{key}={value}' for key, value in RANKS.items())}",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}",
        f"srun --nodes={nodes} --ntasks={nodes * gpus} --ntasks-per-node={gpus} --distribution=block --kill-on-bad-exit=1 \\",
        f"    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {command}'",
    )
    return Launching(
        commands=(Command(words=("sbatch", str(file))),),
        files=(File(path=file, text="\n".join(rows) + "\n"),),
        remarks=(
            "partition, account and time go on sbatch's command line",
            f"all nodes see the run folder; {LOGS}",
            "a job that ends with 75 was told to stop and has saved: submitted again it goes on",
        ),
    )
