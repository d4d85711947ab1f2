"""What a trained run left in its folder, read for comparisons with its plan and with a simulation of its curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.json import decode

from distrain.trainer.plan.compare_rank_messages import ComparedMessages, compare_rank_messages
from distrain.trainer.spec.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from distrain.tests.fakes.rank_pool import PoolJob


def read_run(folder: Path) -> Run:
    """Return the run of a run folder."""
    return decode((folder / "run.json").read_bytes(), type=Run)


def differing_messages(folder: Path, *, averages: bool = True) -> list[ComparedMessages]:
    """Return the lines of all ranks whose messages in the recorded step are not the plan's."""
    run, ranks = read_run(folder), json.loads((folder / "ledger.json").read_text())["ranks"]
    compared = (line for rank, rows in enumerate(ranks) for line in compare_rank_messages(run, rank, rows, averages=averages))
    return [line for line in compared if line.verdict == "differs"]


def assert_same_bits(job: PoolJob, other: PoolJob) -> None:
    """Hold a run to another to the bit: in losses, validations, and what the newest checkpoints hold. Norms are sums in float64, whose
    order follows the alignment of memory on some CPUs."""
    for key in ("loss", "validation_loss", "validation_ema_loss"):
        assert job.figures(key) == other.figures(key)
    assert job.figures("grad_norm") == pytest.approx(other.figures("grad_norm"), abs=0, rel=1e-14)
    mine, theirs = _saved_tensors(job.folder), _saved_tensors(other.folder)
    assert mine.keys() == theirs.keys()
    assert not [key for key, tensor in mine.items() if tensor.dtype != theirs[key].dtype or not tensor.equal(theirs[key])]


def _saved_tensors(folder: Path) -> dict[tuple[str, str], Tensor]:
    from distrain.trainer.loop.checkpoint import CheckpointReader, find_newest, whole_slice

    found = find_newest(folder / "checkpoints").checkpoint
    assert found
    reader = CheckpointReader(found)
    return {(row.name, row.kind): reader.read(whole_slice(row.name, row.kind, row.shape)) for row in found.manifest.tensors}


def check_simulated(job: PoolJob, expected: dict[str, Any], apart: float) -> None:
    """Hold a run to the simulation of its curve: losses within `apart`, norms and weights within what rounding explains in fp32, or in bf16
    where `apart` is wider than 1e-5."""
    is_half = apart > 1e-5
    assert job.figures("loss") == pytest.approx(expected["losses"], abs=apart, rel=0)
    assert job.figures("grad_norm") == pytest.approx(expected["norms"], abs=0, rel=2e-2 if is_half else 5e-5)
    assert expected["weights"] < (2e-2 if is_half else 3e-4)
    for key, loss in expected["evaluations"].items():
        assert job.figures(key)[-1] == pytest.approx(loss, abs=apart)
