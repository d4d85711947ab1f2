"""Trains a small run on two ranks and in one process for `distrain doctor`, and compares their losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine.doctor_checks import MachineCheck
from ..machine.facts import time_limit
from ..rundir.files import run_folder
from ..spec.run import Run
from ..system.run_child import capture_child
from ..system.stop_requests import collect_stop_requests
from .rank.channel import ignore_text
from .single_host import launch_local_ranks

LOSS_TOLERANCE = 1e-5  # nats a token, between float32 losses of two ranks and of one process
GRACE = 2.0  # seconds that a rank has to end after the other has failed
TIMEOUT = 120.0  # seconds that the child process may take on an idle machine


def engine_checks(run: Run) -> Iterator[MachineCheck]:
    """Check torch's devices, gloo and engine `zero`. `run` is trained in its run folder, which must not exist yet."""
    from msgspec import json as encoder

    folder = run_folder(run)
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(encoder.encode(run))
    answer = _ask_torch(folder / "run.json")
    yield from answer.checks
    if answer.losses is not None:
        yield _two_rank_check(run, folder, answer.losses)


@dataclass(frozen=True, kw_only=True)
class TorchAnswer:
    """The answer of the child process that imports torch; `losses` are those of the run in one process, None where it failed before."""

    checks: list[MachineCheck]
    losses: list[float] | None


def _ask_torch(file: Path) -> TorchAnswer:
    """Have a child process check torch and train the run of run.json in one process."""
    limit = time_limit(TIMEOUT)
    try:
        done = capture_child("distrain.trainer.loop.offline.doctor", [str(file)], seconds=limit)
    except subprocess.TimeoutExpired:
        slow = MachineCheck("torch", "problem", f"did not answer in {limit:.0f} s", "check that `python -c 'import torch'` ends")
        return TorchAnswer(checks=[slow], losses=None)
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    checks = [MachineCheck(**row) for row in rows if "name" in row]
    losses = next((row["losses"] for row in rows if "losses" in row), None)
    if losses is None:
        lines = done.stderr.strip().splitlines() or [f"its process ended with exit status {done.returncode}"]
        checks.append(MachineCheck("torch", "problem", lines[-1], "install torch and DeepSpeed again"))
    return TorchAnswer(checks=checks, losses=losses)


def _two_rank_check(run: Run, folder: Path, one_process: Sequence[float]) -> MachineCheck:
    """Train the run on two CPU ranks and compare with the losses of one process without DeepSpeed."""
    command = [sys.executable, "-m", "distrain.trainer.loop.rank", str(folder / "run.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with collect_stop_requests() as requests:
        outcome = launch_local_ranks(
            command, ranks=2, folder=folder, environment=environment, show=ignore_text, grace=GRACE, stop_requests=requests
        )
    if requests:
        signal.raise_signal(requests[-1][0])
    if outcome.status:
        mend = "run `distrain fit conf=quickstart`, which keeps the logs of its ranks"
        return MachineCheck("engine zero", "problem", outcome.says.partition("; its log is ")[0], mend)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return loss_check([row["loss"] for row in rows if "loss" in row], one_process, run.parallel.zero)


def loss_check(two_ranks: Sequence[float], one_process: Sequence[float], stage: int) -> MachineCheck:
    """Compare the losses of two ranks under a ZeRO stage with those of one process, step by step."""
    near = len(two_ranks) == len(one_process) and all(abs(a - b) <= LOSS_TOLERANCE for a, b in zip(two_ranks, one_process, strict=True))
    if not near:
        says = f"the losses of 2 ranks are {_losses_text(two_ranks)}, those of one process {_losses_text(one_process)}"
        return MachineCheck("engine zero", "problem", says, "they should be equal: please report it")
    says = f"2 ranks, ZeRO {stage}, {len(two_ranks)} steps: losses {_losses_text(two_ranks)}, as in one process without DeepSpeed"
    return MachineCheck("engine zero", "ok", says)


def _losses_text(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)
