"""The code of kernels for a GPU, as torch's compiler and triton make it on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distrain.cli.config.load import load_recipe
from distrain.scripts.trace_cuda.kernel_calls import ISSUED, Graph, KernelCall
from distrain.scripts.trace_cuda.layer_code import pass_lines, planned_sums
from distrain.scripts.trace_cuda.machine_code import KernelCode, executed_instructions, read_instructions
from distrain.tests.fakes.deadline import DEADLINE

# As nvdisasm prints a kernel: a loop of three instructions with a jump out of it, and the jump to itself behind the end.
DISASSEMBLED = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   MOV R2, RZ ;
.L_x_0:
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   STL [R1], R4 ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
        /*0080*/                   NOP;
"""


def test_a_loop_of_machine_code_is_executed_as_often_as_it_has_rounds() -> None:
    code = read_instructions(DISASSEMBLED)
    assert [each.name for each in code] == ["LDC", "MOV", "LDG", "BRA", "BRA", "STL", "EXIT", "BRA"]
    assert [each.target for each in code] == [None, None, None, 0x50, 0x20, None, None, 0x70]
    assert executed_instructions(code, 1) == 8
    assert executed_instructions(code, 10) == 5 + 3 * 10


def call_of(name: str, reads: dict[str, int], writes: dict[str, int], executed: float = 0.0) -> KernelCall:
    code = KernelCode(name=name, load=16, store=16, accesses=2, instructions=9.0, spills=0, executed=executed)
    return KernelCall(name=name, reads=reads, writes=writes, code=code)


def test_a_pass_counts_bytes_that_cross_memory_again_and_the_longer_of_bytes_and_instructions() -> None:
    first = call_of("triton_poi_fused_add_0", {"x": 4_000_000, "y": 1_000_000}, {"z": 5_000_000}, 3 * ISSUED)
    second = call_of("triton_red_fused_sum_1", {"x": 4_000_000, "z": 5_000_000}, {"w": 1_000_000})
    graph = Graph(calls=(first, second, second), others={"mm": 2})
    assert graph.read_again == 4_000_000 + 9_000_000
    assert first.seconds(1e6) == 10.0
    assert first.seconds(1e9) == 3.0
    planned, _, _ = planned_sums(load_recipe("llama3_8b_1node", ["train.compile=true", "engine=native", "parallel.zero=0"]))
    *_, sums, plan, others = pass_lines("forward", (graph,), planned, 1e6)
    assert "3 kernels; 30 MB, of which 13 read again; 30,000,000 us" in sums
    assert "planned 1,544 MB" in plan
    assert others.split() == ["calls", "2", "mm"]


def test_a_layers_planned_bytes_are_those_of_its_operators() -> None:
    """Two norms and two residual sums, rotated queries and keys, and an activation with its gate, in bf16; backward moves half as much
    again."""
    forward, backward, _ = planned_sums(load_recipe("llama3_8b_1node", ["train.compile=true", "engine=native", "parallel.zero=0"]))
    stream, keys, wide = (2 * 8192 * width for width in (4096, 1024, 14336))
    assert forward.bytes == pytest.approx(2 * 2 * stream + 2 * 3 * stream + 2 * (stream + keys) + 3 * wide, rel=1e-9)
    assert backward.bytes == pytest.approx(1.5 * forward.bytes, rel=1e-9)


def test_the_optimizers_kernel_reads_vectors_and_the_losss_has_few_instructions() -> None:
    """Each optimizer is one kernel, whatever a bucket's length."""
    pytest.importorskip("triton", reason="triton makes the code: pip install --no-deps triton==3.7.1")
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
