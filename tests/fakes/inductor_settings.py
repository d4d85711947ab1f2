"""Environment variables with which torch compiles kernels in less CPU time."""

from __future__ import annotations

# Without these torch first compiles a program for each of the CPU's vector instructions, to see that it has them, and starts processes that
# compile, each of which imports torch: half of the CPU time of a small model where nothing is cached.
INDUCTOR = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
