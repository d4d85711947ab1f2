"""Tensor-parallel layers compute what whole ones do, forward and backward, in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE

# fmt: off
FACTS = (
    "f forward", "f backward", "g forward", "g backward", "products forward", "products input", "column weight", "column bias",
    "second column weight", "row weight", "row bias", "one column layer", "embedding", "logits", "loss", "table",
    "loss by kernels", "logits' gradient by kernels",
    *(f"{what} in chunks, {of}" for what in ("loss", "input", "weight") for of in ("of a table", "of a matrix", "of a table by kernels")),
)
# fmt: on


@cache
def differences(ranks: int) -> dict[str, float]:
    script = Path(__file__).parents[1] / "rank_programs" / "tensor_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(script), str(ranks)], capture_output=True, text=True, timeout=DEADLINE, env=environment)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, float] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fact", FACTS)
def test_split_layers_compute_what_whole_ones_do(fact: str, ranks: int, sequence: bool) -> None:
    assert differences(ranks)[f"{fact}, the sequence split" if sequence else fact] < 1e-12


def test_every_fact_is_measured() -> None:
    assert {what.removesuffix(", the sequence split") for what in differences(2)} == set(FACTS)
