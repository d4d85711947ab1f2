"""The part of `distrain doctor` that runs: a child that knows torch, then a tiny run of two ranks through the real launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...trainer.launch.rank.channel import hush
from ...trainer.spec.run import Run
from ...trainer.system.torch_child import ask_child

if TYPE_CHECKING:
    from .doctor import Finding

CLOSE = 1e-5  # nats: float32 losses of two ranks and of one process
GRACE = 2.0  # seconds that a rank has to end after the other has failed
LATE = 120.0  # seconds after which the child is not waited for
WORDS = (
    "model=tiny",
    "model.layers=2",
    "cluster=local",
    "device=cpu",
    "cluster.gpus=2",
    "data=synthetic",
    "parallel.zero=2",
    "train.batch=8",
    "train.microbatch=2",
    "train.seq=32",
    "train.steps=3",
    "train.precision=fp32",
    "train.evaluate.every=0",
    "optim.warmup=1",
    "log.every=1",
    "log.sinks=[jsonl]",
    "name=doctor",
)


def checked() -> Iterator[Finding]:
    """Devices, gloo, and the self-check of engine `zero`."""
    from msgspec import json as encoder

    from ..config.load import load

    with tempfile.TemporaryDirectory(prefix="distrain-doctor-") as top:
        folder = Path(top) / "doctor"
        folder.mkdir()
        run = load("quickstart", (*WORDS, f"log.dir={top}"))
        (folder / "run.json").write_bytes(encoder.encode(run))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        said = _asked(folder / "run.json")
        yield from said.findings
        if said.losses is not None:
            yield _engine(run, folder, environment, said.losses)


class Said:
    """What the child said: findings, and the losses of one process (None where it did not get that far)."""

    def __init__(self, findings: list[Finding], losses: list[float] | None) -> None:
        self.findings, self.losses = findings, losses


def _asked(path: Path) -> Said:
    """Run the child and read its lines."""
    from .doctor import Finding

    try:
        done = ask_child("distrain.trainer.loop.offline.doctor", [str(path)], seconds=LATE)
    except subprocess.TimeoutExpired:
        return Said([Finding("torch", "problem", f"did not answer in {LATE:.0f} s", "see whether `python -c 'import torch'` ends")], None)
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [Finding(**row) for row in rows if "name" in row]
    losses = next((row["losses"] for row in rows if "losses" in row), None)
    if losses is None:
        lines = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        found.append(Finding("torch", "problem", lines[-1], "install torch and DeepSpeed again"))
    return Said(found, losses)


def _engine(run: Run, folder: Path, environment: Mapping[str, str], alone: list[float]) -> Finding:
    """Three steps of two ranks beside the same steps of one process without DeepSpeed."""
    from ...trainer.launch.single_host import launch
    from .doctor import Finding

    command = [sys.executable, "-m", "distrain.trainer.loop.rank", str(folder / "run.json")]
    ended = launch(command, ranks=2, folder=folder, environment=environment, show=hush, grace=GRACE)
    if ended.status:
        return Finding(
            "engine zero",
            "problem",
            ended.says.partition("; its log is ")[0],
            "`distrain fit conf=quickstart` keeps the logs that say more",
        )
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return compared([row["loss"] for row in rows if "loss" in row], alone, run.parallel.zero)


def compared(losses: Sequence[float], alone: Sequence[float], stage: int) -> Finding:
    """Whether two ranks under a ZeRO stage lost what one process did, step by step."""
    from .doctor import Finding

    shown = ", ".join(f"{loss:.4f}" for loss in losses)
    if len(losses) != len(alone) or not all(abs(a - b) <= CLOSE for a, b in zip(losses, alone, strict=True)):
        says = f"2 ranks lost {shown}, one process {', '.join(f'{loss:.4f}' for loss in alone)}"
        return Finding("engine zero", "problem", says, "they should be equal: please report it")
    return Finding("engine zero", "ok", f"2 ranks, ZeRO {stage}, {len(losses)} steps: losses {shown}, as one process without DeepSpeed")
