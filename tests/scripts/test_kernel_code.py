"""The code of kernels for a GPU, as torch's compiler and triton make it on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distrain.tests.fakes.deadline import DEADLINE

pytest.importorskip("triton", reason="triton makes the code: pip install --no-deps triton==3.7.1")


def test_the_optimizers_kernel_reads_vectors_and_the_losss_has_few_instructions() -> None:
    """Each optimizer is one kernel, whatever a bucket's length."""
    command = [sys.executable, "-m", "distrain.scripts.trace_cuda.kernel_code"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = dict[str, list[tuple[int, int, float]]]()
    name = ""
    for line in done.stdout.splitlines()[1:]:
        name = line[:36].strip() or name
        load, _, store, _, _, instructions, _ = line[36:].split()
        cases.setdefault(name, []).append((int(load), int(store), float(instructions)))
    adamw = {name: rows for name, rows in cases.items() if name.startswith("AdamW")}
    assert len(adamw) == 5
    assert {(len(rows), *rows[0][:2]) for rows in adamw.values()} == {(1, 16, 16)}
    forward, backward = ({name: rows for name, rows in cases.items() if way in name} for way in ("forward", "backward"))
    assert all(rows[0][0] == 16 and rows[0][2] < 25 for rows in forward.values())
    assert all(len(rows) == 1 and rows[0][:2] == (16, 16) and rows[0][2] < 30 for rows in backward.values())
    assert len(forward) == len(backward) == 2
