"""What the machine code of one kernel does, read from the PTX and the binary that triton makes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WARP = 32  # threads


@dataclass(frozen=True, kw_only=True)
class KernelCode:
    """What one kernel's code does: the most bytes of a thread's loads and stores, their number in the code, and instructions for an
    element, as the compiler's first choice of a thread's elements has them. `spills` are instructions that move registers to memory and
    back, `executed` the instructions of all warps of a call, loops with their rounds."""

    name: str
    load: int
    store: int
    accesses: int
    instructions: float
    spills: int
    executed: float


def read_code(name: str, source: str, made: Any) -> KernelCode:
    """Read a kernel's PTX, and its machine code as NVIDIA's disassembler, which comes with triton, prints it."""
    ptx = made.kernel.asm["ptx"]
    accesses = re.findall(r"\b(ld|st)\.global[\w:.]*?\.(?:v(\d)\.)?b(\d+)\b", ptx)
    widths = {kind: [int(count or 1) * int(bits) // 8 for each, count, bits in accesses if each == kind] for kind in ("ld", "st")}
    widths["ld"] += [int(size, 0) for size in re.findall(r"\bcp\.async\.\w+\.shared\.global [^;]*?\], (0x\w+|\d+)", ptx)]
    chosen = made.config.kwargs
    sizes = {dim: int(size) for dim, size in re.findall(r"\b(\w+)numel = (\d+)", source)}
    row = chosen.get("R0_BLOCK") or sizes.get("r0_", 1)
    of_a_thread = chosen["XBLOCK"] * chosen.get("YBLOCK", 1) * row / (WARP * made.config.num_warps)
    code = machine_code(made.kernel.asm["cubin"])
    programs, rounds = _programs_and_rounds(sizes, chosen)
    return KernelCode(
        name=name,
        load=max(widths["ld"], default=0),
        store=max(widths["st"], default=0),
        accesses=len(accesses),
        instructions=len(code) / of_a_thread,
        spills=sum(each.name in ("LDL", "STL") for each in code),
        executed=executed_instructions(code, rounds) * programs * made.config.num_warps,
    )


def _programs_and_rounds(sizes: Mapping[str, int], chosen: Mapping[str, int]) -> tuple[int, int]:
    """Return a kernel's thread blocks, and the rounds of its loops."""
    rows = chosen.get("RSPLIT_SIZE")  # of a block that also sums over rows
    if rows:
        return ceil(sizes.get("x", 1) / rows), ceil(rows / chosen["XBLOCK"])
    programs = prod(ceil(sizes.get(dim, 1) / chosen[f"{dim.upper()}BLOCK"]) for dim in "xyz" if f"{dim.upper()}BLOCK" in chosen)
    return programs, ceil(sizes["r0_"] / chosen["R0_BLOCK"]) if "R0_BLOCK" in chosen and "r0_" in sizes else 1


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of machine code, at `address`; `target` is the address to which it jumps, None of another."""

    address: int
    name: str
    target: int | None = None


def machine_code(cubin: bytes) -> list[Instruction]:
    """Return the instructions of a kernel."""
    disassembler = Path(str(import_module("triton").__file__)).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run([str(disassembler), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    return read_instructions(said)


def read_instructions(disassembled: str) -> list[Instruction]:
    """Read what NVIDIA's disassembler prints."""
    labels, waiting = dict[str, int](), list[str]()
    lines = list[tuple[int, str, str | None]]()
    for line in disassembled.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            waiting.append(label[1])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\w+)(.*)", line):
            labels |= dict.fromkeys(waiting, int(found[1], 16))
            waiting.clear()
            jump = re.search(r"`\((\.L_\w+)\)", found[3]) if found[2] == "BRA" else None
            lines.append((int(found[1], 16), found[2], jump[1] if jump else None))
    return [Instruction(address=at, name=name, target=labels.get(to) if to else None) for at, name, to in lines if name != "NOP"]


def executed_instructions(code: Sequence[Instruction], rounds: int) -> int:
    """Return the instructions that a warp executes, if each of its loops has so many rounds; a jump to itself ends a kernel."""
    loops = [(each.target, each.address) for each in code if each.target is not None and each.target < each.address]
    return sum(rounds if any(begin <= each.address <= end for begin, end in loops) else 1 for each in code)
