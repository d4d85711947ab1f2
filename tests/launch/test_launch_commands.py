"""`show --launch` prints a script, and the script starts the run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import pytest

import distrain.recipes
from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.folder_state import folder_state
from distrain.tests.fakes.one_process import sample_text
from distrain.tests.fakes.path_commands import SBATCH, SCONTROL, SRUN, FakeCommands
from distrain.tests.fakes.rank_pool import RankPool
from distrain.trainer.launch.commands.command import PORTS, forwarded_variables, run_port
from distrain.trainer.launch.hosts_and_commands import launch_commands, resolve_hosts
from distrain.trainer.rundir.lock import hold_run_folder
from distrain.trainer.rundir.metric_rows import read_step_rows

RECIPES = Path(distrain.recipes.__path__[0])
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


def show(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `distrain show` prints for a run."""
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


# The printed script


def start_file_in(lines: Sequence[str]) -> str:
    """The file that a script writes for the ranks, with their run."""
    (file,) = {found[0] for line in lines if (found := re.search(r"/runs/quickstart/launch/run-[0-9a-f]{12}\.json", line))}
    return file


@pytest.mark.parametrize("launch", ["local", "slurm", "torchrun", "deepspeed"])
def test_a_launch_is_a_shell_script_and_writes_nothing(launch: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = [f"launch.hostfile={here}"] if launch in ("torchrun", "deepspeed") else []
    said = show(["cluster=2x1", f"launch={launch}", *file, f"log.dir={here.parent / 'runs'}", "--launch"], capsys)
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
    lines = show([*words, "device=h100_80g", "cluster.inside=null", "--launch"], capsys).splitlines()
    module = f"--module distrain.trainer.loop.rank /runs/quickstart/run.json {start_file_in(lines)}"
    tail = f"--nproc-per-node=2 --master-addr=h1 --master-port=4242 {module}"
    start = "PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"
    run = f"{sys.executable} -m torch.distributed.run --nnodes=2"
    assert lines[-6:] == [
        "# give the number of this host: 0 on h1, 1 on h2",
        "case ${1-} in",
        f"0) {start} CUDA_VISIBLE_DEVICES=5,6 {run} --node-rank=0 {tail} ;;",
        f"1) {start} {run} --node-rank=1 {tail} ;;",
        "*) echo 'give the number of this host: 0 on h1, 1 on h2' >&2; exit 2 ;;",
        "esac",
    ]
    assert "# ranks meet at h1 port 4242 (torchrun's static rendezvous)" in lines


def test_torchrun_on_one_host_starts_all_its_ranks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_text("localhost slots=2\n")
    said = show(["cluster=1x2", "launch=torchrun", f"launch.hostfile={here}", "log.dir=/runs", "launch.port=4242", "--launch"], capsys)
    run = (
        f"{sys.executable} -m torch.distributed.run --nnodes=1 --node-rank=0 --nproc-per-node=2 --master-addr=localhost --master-port=4242"
    )
    read = start_file_in(said.splitlines())
    assert said.splitlines()[-2:] == [
        "# on localhost",
        f"PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 {run} --module distrain.trainer.loop.rank /runs/quickstart/run.json {read}",
    ]


def test_slurm_has_a_batch_file_with_one_task_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster=4x8", "train.batch=64", "device=h100_80g", "launch=slurm", "log.dir=/runs", "cluster.inside=null", "--launch"]
    said = show(words, capsys)
    text = said.partition("quickstart.sbatch.\"$HOSTNAME.$$\" <<'END'\n")[2].partition("\nEND\n")[0]
    passes_bash(text)
    assert text.splitlines()[0] == "#!/bin/bash"
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH"))
    assert options["nodes"] == "4"
    assert options["gpus-per-node"] == options["ntasks-per-node"] == "8"
    assert "srun --nodes=4 --ntasks=32 --ntasks-per-node=8 --distribution=block --kill-on-bad-exit=1" in text
    assert "'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec " in text
    assert said.splitlines()[-1] == "sbatch /runs/quickstart/launch/quickstart.sbatch"


def test_deepspeeds_launcher_gets_its_files(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in forwarded_variables(os.environ):
        monkeypatch.delenv(key)
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "canary-7f3a")
    here.write_text("h1 slots=1\nh2 slots=8\n")
    words = ["cluster=2x1", "launch=deepspeed", f"launch.hostfile={here}", "launch.include=h1@h2:3", "log.dir=/runs", "--launch"]
    said = show(words, capsys)
    assert "canary" not in said
    assert "carries these variables to the ranks: MLFLOW_TRACKING_PASSWORD" in said
    written = '/runs/quickstart/launch/hosts."$HOSTNAME.$$"'
    assert f"cat > {written} <<'END'\nh1 slots=1\nh2 slots=4\nEND\nmv {written} " in said
    line = said.splitlines()[-1]
    assert line.startswith("cd /runs/quickstart/launch && env -u MLFLOW_TRACKING_PASSWORD ")
    assert " DS_ENV_FILE=/runs/quickstart/launch/exports PDSH_SSH_ARGS_APPEND='-o BatchMode=yes " in line
    assert " --launcher pdsh --force_multi --no_ssh_check --no_local_rank --include h1:0@h2:3 --master_addr h1 " in line
    assert line.endswith(" --module distrain.trainer.launch.agent.bootstrap /runs/quickstart/run.json")


def test_the_script_starts_no_rank_on_a_spare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_text("h1 slots=2\nh2 slots=2\nh3 slots=2\n")
    said = show(["cluster=1x2", "launch=deepspeed", f"launch.hostfile={here}", "launch.spares=2", "--launch"], capsys)
    assert "# spares, which only fit uses: h2, h3\n" in said
    assert "launch/hosts.\"$HOSTNAME.$$\" <<'END'\nh1 slots=2\nEND\n" in said


@pytest.mark.parametrize("runner", ["openmpi", "slurm"])
def test_variables_of_the_join_token_are_not_in_the_environment_of_mpirun_and_srun(
    runner: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run = load_recipe("quickstart", [*SMALL, "cluster=2x1", "launch=deepspeed", f"launch.hostfile={here}", f"launch.runner={runner}"])
    (launcher,) = launch_commands(run, resolve_hosts(run).hosts).commands
    known = launcher.full_environment(os.environ)
    assert not {"WANDB_API_KEY", "NCCL_DEBUG"} & set(known)
    assert {"PATH", "HOME"} & set(os.environ) <= set(known)


def test_the_deepspeed_config_is_printed_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import sys
from distrain.cli.app import command
from distrain.trainer.launch.hosts_and_commands import launch_commands
from distrain.cli.config.load import load_recipe
assert command(["show", "conf=quickstart", "parallel.zero=2", "train.precision=bf16", "--engine"]) == 0
assert not {"torch", "deepspeed"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["zero_optimization"]["stage"], told["bf16"], told["train_batch_size"]) == (2, {"enabled": True}, 16)


def test_ranks_of_several_nodes_are_not_started_on_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster=4x8", "train.batch=256", "device=h100_80g", "cluster.inside=null"]
    assert command(["show", "conf=quickstart", *words, "--launch"]) == 2
    says = "launch=local starts every rank on one machine, and the cluster has 4 nodes of 8 GPUs: set launch=deepspeed"
    said = capsys.readouterr()
    assert (said.out, said.err.startswith(f"distrain: {says}")) == ("", True)
    assert said.err.endswith("; or launch=slurm or launch=torchrun, to start it by hand\n")


def test_a_run_without_a_layout_has_no_launch_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", "conf=quickstart", "parallel.dp=3", "--launch"]) == 2
    assert capsys.readouterr().err.startswith("distrain: parallel.dp=3 x tp 1 x cp 1 x pp 1 = 3, but ")


def test_runs_have_different_ports_below_the_ephemeral_ones() -> None:
    ports = {run_port(Path(f"/runs/{name}")) for name in range(100)}
    assert len(ports) > 95
    assert all(port in PORTS for port in ports)
    assert PORTS.stop <= int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


# The script starts a run


def losses_of_run(folder: Path) -> list[float]:
    return [row["loss"] for row in read_step_rows(folder)]


def _state_of_ranks(run_folder: Path) -> str:
    """Return the processes of a run folder and its ranks' logs, to which they have written their stacks; end the processes, of which
    torchrun's write theirs too."""
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    commands = {pid: command for pid in pids if bytes(run_folder) in (command := _command_line(pid))}
    for pid, command in commands.items():
        if b"distrain.trainer.loop.rank" in command and b"torch.distributed.run" not in command:
            os.kill(pid, signal.SIGUSR2)
    sleep(1.0)
    logs = [f"{file}: {file.read_text()[-3000:]}" for file in run_folder.glob("ranks/*.log")]
    for ending in (signal.SIGABRT, signal.SIGKILL):
        for pid in commands:
            with suppress(ProcessLookupError):
                os.kill(pid, ending)
        sleep(1.0)
    return "\n".join([*(f"{pid}: {command!r}" for pid, command in commands.items()), *logs])


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclass(frozen=True)
class ScriptRun:
    """A script to run in another folder than the one where it was printed, once or once per host."""

    folder: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]]

    def run(self, *words: str) -> subprocess.Popen[str]:
        self.folder.joinpath("away").mkdir(exist_ok=True)
        pipe = subprocess.PIPE
        shell = ["bash", "../script", *words]
        self.started.append(subprocess.Popen(shell, cwd=self.folder / "away", env=self.environment, stdout=pipe, stderr=pipe, text=True))
        return self.started[-1]

    def outputs(self, run_folder: Path) -> str:
        """Wait for all of them; return what they printed, and where one does not end, the stacks of its ranks and the processes."""
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(each.communicate) for each in self.started]
            ended = wait(waiting, timeout=400)  # torchrun waits 300 s for an agent that does not answer
            further = [_state_of_ranks(run_folder)] if ended.not_done else []
            said = ["".join(each.result())[-3000:] for each in waiting]
        hosts = enumerate(zip(self.started, said, strict=True))
        return "\n".join([*(f"host {host}, exit {each.returncode}: {text}" for host, (each, text) in hosts), *further])

    def files_left(self) -> list[str]:
        """The files that it left in its working folder."""
        return [each.name for each in (self.folder / "away").iterdir()]


def write_text(folder: Path) -> None:
    """Write the text that the runs read."""
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text(sample_text())


@pytest.fixture(scope="module")
def plain_losses(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of plain ranks, which no script starts."""
    write_text(folder := tmp_path_factory.mktemp("plain"))
    return ranks.train(folder / "run", "quickstart", "data=text", f"data.path={folder}/texts/*.txt", *SMALL).figures("loss")


@pytest.fixture
def make_script(
    tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ScriptRun]]:
    """Make the script of a run whose recipe, text, hostfile and folders are relative paths."""
    commands = FakeCommands(tmp_path / "stand-ins")
    for name, does in {"scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH}.items():
        commands.put(name, does)
    known = {
        **os.environ,
        "PATH": commands.path(),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "h[1-2]",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",
    }
    write_text(tmp_path)
    shutil.copyfile(RECIPES / "quickstart.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)

    def make(launch: str, *words: str) -> ScriptRun:
        paths = ["conf=./mine.yaml", "data=text", "data.path=texts/*.txt", "data.cache=kept", f"log.dir={launch}"]
        file = ["launch.hostfile=hosts"] if launch == "torchrun" else []
        assert command(["show", *paths, *SMALL, f"launch={launch}", *file, *words, "--launch"]) == 0
        (tmp_path / "script").write_text(capsys.readouterr().out)  # once: bash reads it while it runs, and ends where it is cut
        return ScriptRun(tmp_path, known, started)

    started: list[subprocess.Popen[str]] = []
    yield make
    for each in started:
        with each:
            each.terminate()


@pytest.mark.parametrize("launch", ["torchrun", "slurm"])
def test_a_script_trains_in_any_folder(
    launch: str, make_script: Callable[..., ScriptRun], tmp_path: Path, plain_losses: list[float]
) -> None:
    """torchrun on two names of this machine; Slurm with fake commands; both train the same losses as plain ranks.

    A script of launch=local trains until it is terminated, below.
    """
    script = make_script(launch, "cluster=2x1")
    started = [script.run(*([str(host)] if launch == "torchrun" else [])) for host in range(2 if launch == "torchrun" else 1)]
    said = script.outputs(tmp_path / launch / "quickstart")
    assert [each.returncode for each in started] == [0] * len(started), said
    assert losses_of_run(tmp_path / launch / "quickstart") == plain_losses
    assert json.loads((tmp_path / launch / "quickstart" / "plan.json").read_text())["world"] == 2
    assert script.files_left() == []


@pytest.mark.parametrize("launch", ["local", "slurm"])
def test_a_script_changes_nothing_of_a_run_that_trains_in_the_folder(
    launch: str, make_script: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    """Other ranks may be started before rank 0 is refused."""
    folder = tmp_path / launch / "quickstart"
    (folder / "ranks").mkdir(parents=True)
    for name in ("run.json", "plan.json", "ranks/0.log", "ranks/1.log", "metrics.jsonl"):
        (folder / name).write_text("of the run that trains")
    script = make_script(launch, "cluster=2x1")
    with hold_run_folder(folder):
        before = folder_state(folder)
        started = script.run()
        said = script.outputs(folder)
        now = {name: state for name, state in folder_state(folder).items() if name.partition("/")[0] != "launch"}
    assert (started.returncode, now) == (1, before), said
    assert f"trains in {folder}: stop it, or set name= to train another run" in said


def test_a_script_for_several_hosts_needs_the_number_of_its_host(make_script: Callable[..., ScriptRun]) -> None:
    script = make_script("torchrun", "cluster=2x1")
    for words in ([], ["2"], ["h1"]):
        started = script.run(*words)
        assert started.communicate(timeout=DEADLINE)[1] == "give the number of this host: 0 on 127.0.0.1, 1 on localhost\n"
        assert started.returncode == 2


def test_torchrun_without_a_hostfile_trains_in_pods_of_either_operator(
    make_script: Callable[..., ScriptRun], tmp_path: Path, plain_losses: list[float]
) -> None:
    """A pod of PyTorchJob and one of Kubeflow's Trainer, whose endpoint of an elastic rendezvous is not used."""
    script = make_script("torchrun", "cluster=2x1", "launch.hostfile=null")
    port = str(run_port(tmp_path))  # no other process is given it
    pods: tuple[dict[str, str], ...] = (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_RDZV_ENDPOINT": "nowhere:1"},
    )
    started = []
    for pod in pods:
        script.environment.update(pod)
        started.append(script.run())
        for name in pod:
            del script.environment[name]
    said = script.outputs(tmp_path / "torchrun" / "quickstart")
    assert [each.returncode for each in started] == [0, 0], said
    assert losses_of_run(tmp_path / "torchrun" / "quickstart") == plain_losses
    assert script.files_left() == []


def test_a_script_of_torchrun_without_a_hostfile_says_what_its_environment_lacks(make_script: Callable[..., ScriptRun]) -> None:
    started = make_script("torchrun", "cluster=2x1", "launch.hostfile=null").run()
    says = "RANK: is not set: run this in a pod of a PyTorchJob, or set launch.hostfile\n"
    assert started.communicate(timeout=DEADLINE)[1].endswith(says)
    assert started.returncode != 0


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        ({"RANK": "2"}, "cluster.nodes=2, but the job has more pods: this one has number 2, from 0"),
        (
            {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_NNODES": "4"},
            "cluster.nodes=2, but the job has 4 pods: this one has number 0, from 0",
        ),
    ],
)
def test_a_script_of_torchrun_in_a_job_of_other_pods_ends_at_once(
    pod: dict[str, str], says: str, make_script: Callable[..., ScriptRun]
) -> None:
    script = make_script("torchrun", "cluster=2x1", "launch.hostfile=null")
    script.environment.update({"MASTER_ADDR": "127.0.0.1", **pod})
    started = script.run()
    assert started.communicate(timeout=DEADLINE)[1] == f"{says}\n"
    assert started.returncode == 2


@pytest.mark.parametrize(("words", "port"), [((), '"${PET_MASTER_PORT:-${MASTER_PORT:-'), (("launch.port=4242",), "4242\n")])
def test_a_given_port_stands_over_that_of_the_environment(words: tuple[str, ...], port: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = show(["cluster=2x1", "launch=torchrun", "log.dir=/runs", *words, "--launch"], capsys)
    assert f"\nport={port}" in said


def test_ranks_of_a_terminated_script_save_and_exit(make_script: Callable[..., ScriptRun], tmp_path: Path) -> None:
    script = make_script("local", "cluster=1x2", "train.steps=100000")
    started = script.run()
    assert started.stdout is not None
    assert any("/100000  loss " in line for line in started.stdout)
    started.terminate()
    started.communicate(timeout=DEADLINE)
    assert started.returncode == -signal.SIGTERM
    assert list((tmp_path / "local" / "quickstart" / "checkpoints").glob("step_*"))
    mine = bytes(tmp_path / "local")
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if mine in _read(each)]


def test_a_rank_that_fails_ends_the_script_and_the_other_ranks(make_script: Callable[..., ScriptRun], tmp_path: Path) -> None:
    script = make_script("local", "cluster=1x2", "checkpoint.resume=must")
    started = script.run()
    _, wrong = started.communicate(timeout=DEADLINE)
    assert started.returncode == 1, wrong


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
