"""Runs in jobs of a real Slurm on two virtual hosts: as a batch job of ranks, and as `distrain fit` through srun."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.scripts.virtual_hosts import VirtualHosts
from distrain.scripts.virtual_hosts import missing_tools as no_hosts
from distrain.tests.fakes import virtual_slurm
from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.host_runs import (
    LONG,
    ONE_EACH,
    PIPELINE,
    SAVES,
    STEPS,
    STOPPED,
    TENSOR,
    RanksOnHosts,
    TrainedRun,
    controller_environment,
    one_process_losses,
    run_arguments,
    wait_for,
)
from distrain.tests.fakes.virtual_slurm import VirtualSlurm
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts.slurm_nodes import allocated_hosts, slurm_job
from distrain.trainer.spec.problem import Unreadable

real = pytest.mark.skipif(bool(no_hosts() or virtual_slurm.missing_slurm_tools()), reason=no_hosts() or virtual_slurm.missing_slurm_tools())
DAEMONS = ("slurmctld", "slurmd", "slurmscriptd")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    """Two hosts of two cores each."""
    folder = tmp_path_factory.mktemp("slurm")
    with VirtualHosts(2, folder / "hosts") as hosts, closing(VirtualSlurm(hosts, folder / "slurm", 2)) as made:
        hosts.write_hostfile(2)
        yield made


@pytest.fixture
def no_process_is_left(slurm: VirtualSlurm) -> Iterator[None]:
    """Check after a test that none of its processes is left on any host."""

    def left() -> list[str]:
        words = [each for host in slurm.hosts.hosts for each in host.processes().values()]
        return [each for each in words if not any(daemon in each for daemon in DAEMONS)]

    yield
    wait_for(lambda: not left())


class Job:
    """A batch job, submitted on the first host, that has both hosts for itself."""

    def __init__(self, slurm: VirtualSlurm, folder: Path, *words: str) -> None:
        self.slurm, self.log = slurm, folder / "job.log"
        (folder / "job").write_text(f"#!/bin/bash\nexec {shlex.join(words)}\n")
        submit = ["sbatch", "--parsable", "--nodes=2", "--exclusive", f"--output={self.log}", "--open-mode=truncate", str(folder / "job")]
        sbatch = slurm.hosts.hosts[0].start(submit, slurm.command_environment(controller_environment(slurm.hosts)))
        self.number = sbatch.communicate(timeout=DEADLINE)[0].strip()

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit status and its output."""
        return self.slurm.exit_status(self.number), self.log.read_text()


@real
@pytest.mark.usefixtures("no_process_is_left")
def test_the_printed_batch_file_trains_the_curve_of_one_process(
    slurm: VirtualSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["show", *run_arguments(tmp_path, *TENSOR, ONE_EACH), "launch=slurm", "--launch"]) == 0
    script = tmp_path / "launch.sh"
    script.write_text(f"set -e\n{capsys.readouterr().out}")
    known = slurm.command_environment(controller_environment(slurm.hosts))
    known["PATH"] = f"{Path(sys.executable).parent}:{known['PATH']}"
    shell = slurm.hosts.hosts[0].start(["bash", str(script)], known)
    said, _ = shell.communicate(timeout=DEADLINE)
    assert shell.returncode == 0, said
    status = slurm.exit_status(said.split()[-1])
    log = "".join(file.read_text() for file in tmp_path.glob("run/launch/slurm-*.log"))
    assert status == 0, log
    assert f"step {STEPS}/{STEPS}" in log
    assert TrainedRun(tmp_path).losses() == pytest.approx(one_process_losses(), abs=2e-6, rel=0)


@real
@pytest.mark.usefixtures("no_process_is_left")
def test_fit_uses_the_nodes_of_its_job_and_a_stopped_run_resumes_in_the_next_job(slurm: VirtualSlurm, tmp_path: Path) -> None:
    def fit(*words: str) -> list[str]:
        launch = ("launch=deepspeed", "launch.runner=slurm")
        return [sys.executable, "-m", "distrain", "fit", *run_arguments(tmp_path, *PIPELINE, ONE_EACH, *launch, *words)]

    first, run = Job(slurm, tmp_path, *fit("launch.preflight=false", LONG)), TrainedRun(tmp_path)
    wait_for(lambda: run.has_reached(3))
    slurm.output("scancel", "--batch", "--signal=TERM", first.number)
    status, said = first.end()
    assert (status, said.splitlines()[-1]) == (75, f"distrain: {STOPPED}")
    reached = run.rows()[-1]["step"]
    status, said = Job(slurm, tmp_path, *fit(f"train.steps={reached + 3}")).end()
    assert status == 0, said
    assert [line.split()[0] for line in said.splitlines() if line.startswith("host")] == ["host", "host0", "host1"]
    assert f"resumes from step {reached}" in said
    assert run.losses() == pytest.approx(one_process_losses(reached + 3), abs=2e-6, rel=0)


@pytest.fixture
def allocation(slurm: VirtualSlurm) -> Iterator[dict[str, str]]:
    """The environment of a process in a job of both nodes."""
    before = slurm.output("squeue", "--noheader", "--format=%A").split()
    slurm.output("salloc", "--no-shell", "--nodes=2", "--exclusive")
    (number,) = set(slurm.output("squeue", "--noheader", "--format=%A").split()) - {*before}
    yield {**slurm.environment, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "host[0-1]"}
    slurm.output("scancel", number)


@real
@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_ranks_of_an_srun_that_dies_save_and_the_run_exits_75(
    slurm: VirtualSlurm, allocation: dict[str, str], tmp_path: Path, number: int
) -> None:
    launched = RanksOnHosts(slurm.hosts, tmp_path, SAVES.replace("0.5", "1.5"), runner="slurm", environment=allocation)
    launched.send_to_processes(0, "srun -n 4 ", number)
    status, lines = launched.end()
    assert (status, lines[-1]) == (75, STOPPED)


@real
@pytest.mark.usefixtures("no_process_is_left")
def test_a_rank_that_is_killed_on_a_far_node_is_named(slurm: VirtualSlurm, allocation: dict[str, str], tmp_path: Path) -> None:
    launched = RanksOnHosts(slurm.hosts, tmp_path, SAVES, runner="slurm", environment=allocation)
    launched.send(signal.SIGKILL, 3)
    status, (*_, line) = launched.end()
    assert status == 1
    assert line.startswith("rank 3 on host1 (device 1) was killed by SIGKILL, perhaps by the kernel for want of memory, at step 7; ")


@real
def test_scontrol_names_the_nodes_of_a_job(slurm: VirtualSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    known = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[08-09,11],login-b"}
    slots = (0, 1, 2)
    assert allocated_hosts(known, 3) == tuple(Host(name=name, slots=slots) for name in ("gpu08", "gpu09", "gpu11", "login-b"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unreadable, match=r"scontrol can't expand the node list gpu7: No such file"):
        allocated_hosts({**known, "SLURM_JOB_NODELIST": "gpu7"}, 3)


def test_fit_through_srun_is_refused_outside_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    (tmp_path / "bin").mkdir()
    for name in ("srun", "sinfo"):
        (tmp_path / "bin" / name).touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = run_arguments(tmp_path / "runs", "launch=deepspeed", f"launch.hostfile={tmp_path}/hosts", "launch.runner=slurm")
    assert command(["fit", *words]) == 1
    says = "launch.runner=slurm starts ranks on the nodes of a Slurm job, and this process runs in none"
    assert f"distrain: {says}: run it under salloc or in a file for sbatch" in capsys.readouterr().err.splitlines()
    assert not (tmp_path / "runs").exists()
    assert slurm_job({"SLURM_JOB_ID": "7"}) == ""
