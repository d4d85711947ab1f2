"""The table of checks, most important first, which is their order where none are named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Self

import msgspec

from .check_context import MACHINE, CheckContext
from .finding import Finding

ROOM = "distrain.scripts.gpu"


@dataclass(frozen=True, kw_only=True)
class GpuCheck:
    """A check: its name, the seconds after which it is killed, the function that carries it out (`module:function`) and its arguments.

    One that is timed runs `alone`, others side by side.
    """

    name: str
    seconds: float
    function: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True

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


def _baseline(name: str, seconds: float = 90) -> GpuCheck:
    return GpuCheck(
        name=f"baseline {name}", seconds=seconds, function=f"{ROOM}.compare_baselines:compare_with_baseline", arguments={"name": name}
    )


def _untimed_check(name: str, function: str, seconds: float = 300, **arguments: str) -> GpuCheck:
    return GpuCheck(name=name, seconds=seconds, function=f"{ROOM}.{function}", arguments=arguments, alone=False)


REHEARSAL = 5  # times the seconds of a GPU has a CPU, which may do other work too
CHECKS = (
    GpuCheck(name=MACHINE, seconds=60, function=f"{ROOM}.torch_rates:measure_ceilings"),
    GpuCheck(name="kernels", seconds=60, function=f"{ROOM}.kernel_rates:compare_kernels"),
    _untimed_check("families", "loss_checks:train_families"),
    _untimed_check("precisions", "loss_checks:compare_precisions"),
    _untimed_check("zero", "loss_checks:train_zero_stages"),
    _untimed_check("resume", "resume:kill_and_resume"),
    _untimed_check("two ranks", "two_ranks.prove_two_ranks:prove_two_ranks"),
    _untimed_check("two ranks bf16", "two_ranks.prove_two_ranks:prove_two_ranks", layers="bf16"),
    _untimed_check("two ranks compiled", "two_ranks.prove_two_ranks:prove_two_ranks", layers="compiled"),
    _untimed_check("two ranks windows", "two_ranks.prove_two_ranks:prove_two_ranks", layers="windows"),
    _untimed_check("several GPUs", "several_gpus:train_on_several", 600),  # on eight GPUs 22 layouts
    _untimed_check("generate", "generation:generate_text"),
    _untimed_check("trace", "profiled_steps:trace_steps"),
    _untimed_check("same curves", "options:compare_same_curves"),
    _untimed_check("other curves", "options:compare_other_curves"),
    _untimed_check("further curves", "further_curves:compare_further_ways"),
    _untimed_check("quantized folder", "quantized_folder:train_from_quantized"),
    GpuCheck(name="calibrate", seconds=60, function=f"{ROOM}.calibration:calibrate_machine"),
    GpuCheck(name="out of memory", seconds=60, function=f"{ROOM}.full_device:fill_device"),
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
    _baseline("autocast gpt2_1_5b", 150),  # the compiler takes a minute for the graph of 48 layers
)


def chosen_checks(names: Iterable[str], *, rehearsal: bool) -> list[GpuCheck]:
    """Return the machine's check and those with these names, in their order; in a rehearsal with more time. Raises KeyError."""
    times, table = REHEARSAL if rehearsal else 1, {check.name: check for check in CHECKS}
    return [replace(table[name], seconds=times * table[name].seconds) for name in dict.fromkeys((MACHINE, *names))]
