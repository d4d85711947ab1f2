"""torchrun commands, for ranks that `fit` does not start: one per host of a hostfile, or one that reads the environment of a pod."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join, quote

from ..hosts.hostfile import Host
from .command import LOGS, RANK_ENVIRONMENT, Command, LaunchCommands, LaunchRequest, check_request

# Ranks of too many or too few pods would wait for each other until a time limit.
_COUNT_CHECK = """\
if [ "$node_rank" -ge {nodes} ] || [ "${{PET_NNODES:-{nodes}}}" != {nodes} ]; then
    echo "cluster.nodes={nodes}, but the job has ${{PET_NNODES:-more}} pods: this one has number $node_rank, from 0" >&2
    exit 2
fi"""


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


def torchrun_in_pods_commands(request: LaunchRequest, *, nodes: int, gpus: int, fixed_port: bool) -> LaunchCommands:
    """Start this node's ranks with torchrun, which meets the other nodes where the environment says, as Kubernetes' operators set it; with
    `fixed_port` at the request's port, whatever the environment says.

    Kubeflow's Trainer sets PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, its PyTorchJob RANK (of a pod), MASTER_ADDR and MASTER_PORT.
    """
    check_request(request)
    if nodes > 1:
        set_there = "is not set: run this in a pod of a PyTorchJob, or set launch.hostfile"
        rank, address = f"${{RANK:?{set_there}}}", f"${{MASTER_ADDR:?{set_there}}}"
    else:
        rank, address = "0", "127.0.0.1"
    environment = " ".join(f"{key}={quote(value)}" for key, value in RANK_ENVIRONMENT.items())
    lines = (
        f'node_rank="${{PET_NODE_RANK:-{rank}}}"',
        f'address="${{PET_MASTER_ADDR:-{address}}}"',
        f"port={request.port}" if fixed_port else f'port="${{PET_MASTER_PORT:-${{MASTER_PORT:-{request.port}}}}}"',
        *([_COUNT_CHECK.format(nodes=nodes)] if nodes > 1 else []),
        "unset PET_RDZV_ENDPOINT  # ranks in the order of nodes need torchrun's static rendezvous",
        f"{environment} exec {join((request.python, '-m', 'torch.distributed.run'))} --rdzv-backend=static --nnodes={nodes} \\",
        f'    --nproc-per-node={gpus} --node-rank="$node_rank" --master-addr="$address" --master-port="$port" \\',
        f"    --module {join((request.module, *request.arguments))}",
    )
    remarks = (
        "run this in every pod or on every node; the environment says which one it is, and where ranks meet",
        f"the first node prints the run's progress; all nodes must share the run folder; {LOGS}",
        "torchrun exits with 1 also if its ranks exit with 75: they were asked to stop and have saved; the same command goes on",
    )
    return LaunchCommands(commands=(), lines=lines, remarks=remarks)
