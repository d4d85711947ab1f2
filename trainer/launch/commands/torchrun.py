"""One torchrun command per host, for ranks that `fit` does not start."""

from __future__ import annotations

from collections.abc import Sequence

from ..hosts.hostfile import Host
from .command import LOGS, RANK_ENVIRONMENT, Command, LaunchCommands, LaunchRequest, check_request


def torchrun_commands(request: LaunchRequest, hosts: Sequence[Host], *, cuda: bool) -> LaunchCommands:
    """Start each host's ranks with torchrun. Its static rendezvous at the first host keeps the ranks in the order of the hosts."""
    check_request(request)
    commands = [
        Command(
            host=host.name,
            argv=(
                request.python,
                "-m",
                "torch.distributed.run",
                f"--nnodes={len(hosts)}",
                f"--node-rank={number}",
                f"--nproc-per-node={len(host.slots)}",
                f"--master-addr={request.address}",
                f"--master-port={request.port}",
                "--module",
                request.module,
                *request.arguments,
            ),
            environment=RANK_ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))} if cuda and not host.is_whole else {}),
        )
        for number, host in enumerate(hosts)
    ]
    remarks = (
        f"ranks meet at {request.address} port {request.port} (torchrun's static rendezvous)",
        f"the first host prints the run's progress; all hosts must share the run folder; {LOGS}",
        "torchrun exits with 1 also if its ranks exit with 75: they were asked to stop and have saved; the same commands go on",
    )
    return LaunchCommands(commands=tuple(commands), remarks=remarks)
