"""A batch file for Slurm, for ranks that `fit` does not start."""

from __future__ import annotations

from .command import LOGS, RANK_ENVIRONMENT, Command, LaunchCommands, LaunchFile, LaunchRequest, check_request

LEAST_NOTICE = 60  # seconds before the time limit at which Slurm signals the ranks, at least


def sbatch_commands(request: LaunchRequest, *, name: str, nodes: int, gpus: int, cuda: bool, notice: float) -> LaunchCommands:
    """Write a file for sbatch with one task per rank; Slurm tells the ranks to save `notice` seconds before the time limit."""
    check_request(request)
    file = request.launch_folder / f"{name}.sbatch"
    command = " ".join((request.python, "-m", request.module, *request.arguments))
    rows = (
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks-per-node={gpus}",
        *([f"#SBATCH --gpus-per-node={gpus}"] if cuda else []),
        "#SBATCH --exclusive",
        f"#SBATCH --output={request.launch_folder}/slurm-%j.log",
        "# seconds before the time limit at which the ranks are asked to finish their step and save",
        f"#SBATCH --signal=TERM@{max(LEAST_NOTICE, round(notice))}",
        "set -euo pipefail",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts%%$'\\n'*}" + f" MASTER_PORT={request.port}",
        f"export WORLD_SIZE={nodes * gpus} LOCAL_WORLD_SIZE={gpus} {' '.join(f'{key}={value}' for key, value in RANK_ENVIRONMENT.items())}",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}",
        f"srun --nodes={nodes} --ntasks={nodes * gpus} --ntasks-per-node={gpus} --distribution=block --kill-on-bad-exit=1 \\",
        f"    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {command}'",
    )
    return LaunchCommands(
        commands=(Command(argv=("sbatch", str(file))),),
        files=(LaunchFile(path=file, text="\n".join(rows) + "\n"),),
        remarks=(
            "give partition, account and time on sbatch's command line",
            f"all nodes must share the run folder; {LOGS}",
            "a job that ends with 75 was asked to stop and has saved; submit it again to go on",
        ),
    )
