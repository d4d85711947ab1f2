"""`distrain fit` over two hosts through DeepSpeed's launcher: its losses equal one process's, also after a stop or the loss of a host.

Through pdsh, the default; the run that resumes under mpirun where there is one.

Of ranks along tp, and along dp. A run that nothing stops is one of tests/launch/test_hosts.py, under mpirun; one along pp that loses its
hosts is in tests/launch/test_spares.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distrain.scripts.virtual_hosts import VirtualHosts
from distrain.tests.fakes.held_step import HeldStep
from distrain.tests.fakes.host_runs import LONG, ONE_EACH, QUICK_RUNNER, TENSOR, FitOnHosts, one_process_losses


def test_a_run_that_one_remote_rank_stops_resumes_with_the_same_losses(hosts: VirtualHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("host0 slots=1\nhost1 slots=1\n")
    fit = FitOnHosts(hosts, tmp_path, *TENSOR, ONE_EACH, LONG, hostfile=hostfile)
    fit.wait_for_step(3)
    rank = next(pid for pid, line in hosts.hosts[1].processes().items() if "trainer.loop.rank" in line)
    os.kill(rank, signal.SIGTERM)
    status, output = fit.end()
    assert status == 75, output
    reached = fit.rows()[-1]["step"]
    longer = ("checkpoint.resume=must", f"train.steps={reached + 3}", f"launch.runner={QUICK_RUNNER}")
    again = FitOnHosts(hosts, tmp_path, *TENSOR, ONE_EACH, *longer, hostfile=hostfile)
    status, output = again.end()
    assert status == 0, output
    assert f"resumes from step {reached}" in output
    assert again.losses() == pytest.approx(one_process_losses(reached + 3), abs=2e-6, rel=0)


def test_a_run_that_loses_a_host_continues_on_the_others_with_the_same_losses(hosts: VirtualHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("host0 slots=1\nhost1 slots=1\n")
    held = HeldStep(tmp_path / "held", 7)
    fit = FitOnHosts(
        hosts, tmp_path, ONE_EACH, "checkpoint.every=5", "launch.restarts=1", "train.steps=12",
        hostfile=hostfile, held=held,
    )  # fmt: skip
    try:
        held.wait_for(2, fit.controller)
        hosts.set_link(1, "down")
        held.release()
        status, output = fit.end()
    finally:
        hosts.set_link(1, "up")
    assert status == 0, output
    assert "restart 1 of 1, from the newest checkpoint, on host0: dp 2 -> 1, the same 8 sequences a step" in output
    assert "goodput " in output
    (restart,) = (row for row in fit.rows() if "restart" in row)
    assert (restart["restart"], restart["step"]) == (1, 5)
    assert 0 <= restart["lost_steps"] <= 2
    assert "was lost, at step " in restart["says"]
    assert restart["hosts"].startswith("on host0: dp 2 -> 1, the same 8 sequences a step; without host1 (")
    assert fit.losses() == pytest.approx(one_process_losses(12), abs=2e-6, rel=0)
