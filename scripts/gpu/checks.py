"""The table of checks, most important first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Self

import msgspec

from .check_context import CheckContext
from .finding import Finding

ROOM = "distrain.scripts.gpu"


@dataclass(frozen=True, kw_only=True)
class GpuCheck:
    """A check: its name, the seconds after which it is killed, the function that carries it out (`module:function`) and its arguments."""

    name: str
    seconds: float
    function: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    def carry_out(self, context: CheckContext) -> Finding:
        """Import the function and call it; raises CheckBroken, and whatever else stops it."""
        found: Finding = resolve_name(self.function)(context, **self.arguments)
        return found


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """A check and where it is to be carried out, for its process."""

    check: GpuCheck
    context: CheckContext

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what to_json wrote."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


def _plan(name: str) -> GpuCheck:
    return GpuCheck(name=f"plan {name}", seconds=75, function=f"{ROOM}.planned_runs:compare_with_plan", arguments={"name": name})


def _baseline(name: str) -> GpuCheck:
    return GpuCheck(
        name=f"baseline {name}", seconds=90, function=f"{ROOM}.compare_baselines:compare_with_baseline", arguments={"name": name}
    )


MACHINE = "machine"
CHECKS = (
    GpuCheck(name=MACHINE, seconds=60, function=f"{ROOM}.ceilings:measure_ceilings"),
    GpuCheck(name="kernels", seconds=60, function=f"{ROOM}.kernel_rates:compare_kernels"),
    GpuCheck(name="families", seconds=90, function=f"{ROOM}.losses:train_families"),
    GpuCheck(name="precisions", seconds=90, function=f"{ROOM}.losses:compare_precisions"),
    GpuCheck(name="zero", seconds=120, function=f"{ROOM}.losses:train_zero_stages"),
    _plan("gpt2_124m"),
    _plan("gpt2_124m compiled"),
    _plan("llama 16 layers"),
    _plan("llama 16 layers compiled"),
    _plan("gpt2_1_5b compiled"),
    _plan("mixtral 2 layers"),
    _plan("llama3_2_1b zero3"),
    _plan("gpt2_1_5b recomputed"),
    _baseline("autocast gpt2_124m"),
    _baseline("fully_shard llama 16 layers"),
    _baseline("autocast gpt2_1_5b"),
    GpuCheck(name="resume", seconds=90, function=f"{ROOM}.resume:kill_and_resume"),
    GpuCheck(name="two ranks", seconds=120, function=f"{ROOM}.two_ranks.prove_two_ranks:prove_two_ranks"),
    GpuCheck(name="generate", seconds=60, function=f"{ROOM}.generation:generate_text"),
    GpuCheck(name="trace", seconds=60, function=f"{ROOM}.profiled_steps:trace_steps"),
)
