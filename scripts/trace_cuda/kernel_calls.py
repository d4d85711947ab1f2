"""The kernels of a compiled layer's passes, as they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .machine_code import KernelCode

ISSUED = 132 * 4 * 1.98e9  # instructions of a warp a second: of an H100's or H200's multiprocessors, each with four schedulers


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of a kernel that the compiler made: bytes that it reads and writes, by tensor, and its code. Its name says
    whether it is pointwise (poi), or a reduction that holds its rows (per) or loops over them (red)."""

    name: str
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    code: KernelCode

    @property
    def bytes(self) -> int:
        """All bytes that it moves."""
        return sum(self.reads.values()) + sum(self.writes.values())

    def seconds(self, bandwidth: float) -> float:
        """Return the longer of the seconds of its bytes and of its instructions."""
        return max(self.bytes / bandwidth, self.code.executed / ISSUED)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One compiled graph: its kernels in the order of calls, and how often it calls others, by name."""

    calls: tuple[KernelCall, ...]
    others: Mapping[str, int]

    @property
    def read_again(self) -> int:
        """Bytes that kernels read of tensors which an earlier kernel of the graph had read already."""
        seen, again = set[str](), 0
        for call in self.calls:
            again += sum(size for tensor, size in call.reads.items() if tensor in seen)
            seen |= call.reads.keys()
        return again


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """The graphs of one layer's forward and backward."""

    forward: tuple[Graph, ...]
    backward: tuple[Graph, ...]
