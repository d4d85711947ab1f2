"""`show --launch` prints what starts a run, and it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.launching import launching
from distrain.cli.load import load
from distrain.tests.stand_ins import SBATCH, SCONTROL, SRUN, StandIns
from distrain.trainer.launch.words import PORTS, handed, port_of

SMALL = (
    "model=tiny",
    "model.layers=2",
    "train.batch=8",
    "train.seq=16",
    "train.microbatch=2",
    "train.steps=2",
    "optim.warmup=0",
    "log.every=1",
)


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `distrain show` prints of a run."""
    assert command(["show", "conf=quickstart", *SMALL, *words]) == 0
    return capsys.readouterr().out


def passes_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A hostfile of two names of this machine."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    return tmp_path / "hosts"


# What is printed


@pytest.mark.parametrize("launch", ["local", "slurm", "torchrun", "deepspeed"])
def test_a_launch_is_a_shell_script_and_writes_nothing(launch: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = [f"launch.hostfile={here}"] if launch in ("torchrun", "deepspeed") else []
    said = shown(["cluster=2x1", f"launch={launch}", *file, f"log.dir={here.parent / 'runs'}", "--launch"], capsys)
    passes_bash(said)
    assert said.splitlines()[0] == f"# quickstart, launch={launch}: 2 nodes x 1"
    assert not (here.parent / "runs").exists()


def test_torchrun_has_a_command_for_each_host(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_text("h1 slots=8\nh2 slots=4\n")
    words = [
        "cluster=2x2",
        "launch=torchrun",
        f"launch.hostfile={here}",
        "launch.include=h1:5,6@h2:0,1",
        "log.dir=/runs",
        "launch.port=4242",
    ]
    lines = shown([*words, "device=h100_80g", "cluster.inside=null", "--launch"], capsys).splitlines()
    tail = "--nproc-per-node=2 --master-addr=h1 --master-port=4242 --module distrain.trainer.loop.rank /runs/quickstart/run.json"
    start = "PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"
    run = f"{sys.executable} -m torch.distributed.run --nnodes=2"
    assert lines[-5:] == [
        "# on h1",
        f"{start} CUDA_VISIBLE_DEVICES=5,6 {run} --node-rank=0 {tail}",
        "",
        "# on h2",
        f"{start} {run} --node-rank=1 {tail}",
    ]
    assert "# ranks meet at h1 port 4242 (torchrun's static rendezvous)" in lines


def test_slurm_has_a_file_of_one_task_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster=4x8", "train.batch=64", "device=h100_80g", "launch=slurm", "log.dir=/runs", "cluster.inside=null", "--launch"]
    said = shown(words, capsys)
    text = said.partition("quickstart.sbatch <<'END'\n")[2].partition("\nEND\n")[0]
    passes_bash(text)
    assert text.splitlines()[0] == "#!/bin/bash"
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH"))
    assert options["nodes"] == "4"
    assert options["gpus-per-node"] == options["ntasks-per-node"] == "8"
    assert "srun --nodes=4 --ntasks=32 --ntasks-per-node=8 --distribution=block --kill-on-bad-exit=1" in text
    assert said.splitlines()[-1] == "sbatch /runs/quickstart/launch/quickstart.sbatch"


def test_deepspeeds_launcher_gets_files_of_ours(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in handed(os.environ):
        monkeypatch.delenv(key)
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "canary-7f3a")
    here.write_text("h1 slots=1\nh2 slots=8\n")
    words = ["cluster=2x1", "launch=deepspeed", f"launch.hostfile={here}", "launch.include=h1@h2:3", "log.dir=/runs", "--launch"]
    said = shown(words, capsys)
    assert "canary" not in said
    assert "these variables for the ranks: MLFLOW_TRACKING_PASSWORD" in said
    assert "cat > /runs/quickstart/launch/hosts <<'END'\nh1 slots=1\nh2 slots=4\nEND\n" in said
    line = said.splitlines()[-1]
    assert line.startswith("cd /runs/quickstart/launch && env -u MLFLOW_TRACKING_PASSWORD ")
    assert " DS_ENV_FILE=/runs/quickstart/launch/exports PDSH_SSH_ARGS_APPEND='-o BatchMode=yes " in line
    assert " --launcher pdsh --force_multi --no_ssh_check --no_local_rank --include h1:0@h2:3 --master_addr h1 " in line
    assert line.endswith(" --module distrain.trainer.launch.guest /runs/quickstart/run.json")


@pytest.mark.parametrize("runner", ["openmpi", "slurm"])
def test_what_comes_with_the_ticket_is_not_in_the_environment_that_mpirun_and_srun_hand_on(
    runner: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run = load("quickstart", [*SMALL, "cluster=2x1", "launch=deepspeed", f"launch.hostfile={here}", f"launch.runner={runner}"])
    (launcher,) = launching(run).commands
    known = launcher.surroundings(os.environ)
    assert not {"WANDB_API_KEY", "NCCL_DEBUG"} & set(known)
    assert {"PATH", "HOME"} & set(os.environ) <= set(known)


def test_what_deepspeed_is_told_is_printed_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import sys
from distrain.cli.app import command
from distrain.cli.launching import launching
from distrain.cli.load import load
assert command(["show", "conf=quickstart", "parallel.zero=2", "train.precision=bf16", "--engine"]) == 0
assert not {"torch", "deepspeed"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["zero_optimization"]["stage"], told["bf16"], told["train_batch_size"]) == (2, {"enabled": True}, 16)


def test_a_run_that_cannot_be_laid_out_has_no_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", "conf=quickstart", "parallel.dp=3", "--launch"]) == 2
    assert capsys.readouterr().err.startswith("distrain: parallel.dp=3 x tp 1 x pp 1 x cp 1 = 3, but ")


def test_runs_meet_at_ports_of_their_own_below_those_that_linux_hands_out() -> None:
    ports = {port_of(Path(f"/runs/{name}")) for name in range(100)}
    assert len(ports) > 95
    assert all(port in PORTS for port in ports)
    assert PORTS.stop <= int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


# What is printed starts a run


def trained(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_is_printed_trains(tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun on two hosts that are this machine; Slurm with stand-ins for its own commands; both as plain ranks do."""
    stand_ins = StandIns(tmp_path / "stand-ins")
    for name, does in {"scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH}.items():
        stand_ins.put(name, does)
    environment = {
        **os.environ,
        "PATH": stand_ins.path(),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "h[1-2]",
        "CUDA_VISIBLE_DEVICES": "",
    }
    losses = {}
    for launch in ("local", "torchrun", "slurm"):
        file = [f"launch.hostfile={here}"] if launch == "torchrun" else []
        said = shown(["cluster=2x1", f"launch={launch}", *file, f"log.dir={tmp_path / launch}", "--launch"], capsys)
        lines = [f"{line} &" if " -m torch.distributed.run " in line or line.startswith("OMP_") else line for line in said.splitlines()]
        text = "\n".join([*lines, "wait"])
        text = re.sub(r"^\S.* plan .* --json > .*$", "", text, flags=re.MULTILINE)  # costs a second
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        losses[launch] = trained(tmp_path / launch / "quickstart")
    assert len(losses["local"]) == 2
    assert losses["torchrun"] == losses["slurm"] == losses["local"]
