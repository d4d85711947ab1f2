"""Error bars of planned figures: how far a measured run may lie from its plan, from the measured runs that are nearest to it.

A bar holds for nine in ten runs of its rule when a run's whole source is left out of the fit of the constants; docs/published.md says how
that is measured, and `python -m distrain.scripts.published.calibrate_error_bars` prints this file's factors beside those that the runs
ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..spec.run import Parallel, Run


class Planned(NamedTuple):
    """What a bar may depend on: a run, its layout, the engine that would run it (None: as the papers describe it), its peak bytes."""

    run: Run
    parallel: Parallel
    engine: str | None
    peak: int


class BarRule(NamedTuple):
    """A kind of run, and how far measurements lie from such plans: between planned / `low` and planned * `high`.

    `runs` of `sources` sources were measured of this kind.
    """

    says: str
    low: float
    high: float
    runs: int
    sources: int
    holds: Callable[[Planned], bool]


class Bar(NamedTuple):
    """The ends of a figure's bar, in its unit, and the rule that sets the upper one, with the factors of both."""

    low: float
    high: float
    rule: BarRule


OF_ENGINES = "distrain's engines on a GPU, measured on one H200 alone"  # by four runs (tests/gpu/), which changed no width
MANY_DEVICES = 1000  # devices
SHARDED = 500  # devices over which ZeRO-3 scatters most
FEW_TOKENS = 2048  # a device a step
LONG = 8192  # tokens of a sequence
SMALL_PEAK = 5 * 2**30  # bytes of a peak
MEASURED_DEVICES = frozenset(
    {"A100", "GB200", "H100", "H200", "V100"}
)  # of which runs of two sources or more were measured; a name up to its "-"
MEASURED_PRECISIONS = frozenset({"bf16", "fp16", "fp8", "fp4"})  # of which runs on GPUs were measured


def _is_any(_: Planned) -> bool:
    return True


def _has_many_devices(planned: Planned) -> bool:
    return _devices(planned) > MANY_DEVICES


def _has_few_tokens(planned: Planned) -> bool:
    return planned.run.train.batch * planned.run.train.seq < FEW_TOKENS * _devices(planned)


def _is_long(planned: Planned) -> bool:
    return planned.run.train.seq > LONG


def _is_trained_here(planned: Planned) -> bool:
    return planned.engine is not None


def _has_small_numbers(planned: Planned) -> bool:
    return planned.run.train.precision in ("fp8", "fp4")


def _has_experts(planned: Planned) -> bool:
    return planned.run.model.experts > 0


def _is_unmeasured(planned: Planned) -> bool:
    run = planned.run
    return run.cluster.device.name.partition("-")[0] not in MEASURED_DEVICES or run.train.precision not in MEASURED_PRECISIONS


def _is_not_float32(planned: Planned) -> bool:
    return planned.run.train.precision != "fp32"


def _is_sharded_widely(planned: Planned) -> bool:
    return planned.parallel.zero == 3 and _devices(planned) > SHARDED


def _is_small(planned: Planned) -> bool:
    return planned.peak < SMALL_PEAK


def _devices(planned: Planned) -> int:
    return planned.run.cluster.nodes * planned.run.cluster.gpus


# The widest rule that holds sets each end of a bar. The first rule of a table holds for every run.
# fmt: off
STEP_BARS = (
    #       a kind of run,                                         low,  high, runs, sources, whether a run is one
    BarRule("like most measured runs",                             1.30, 1.30,  322,      17, _is_any),
    BarRule("more than 1,000 devices",                             1.35, 1.35,   43,      12, _has_many_devices),
    BarRule("fewer than 2,048 tokens a device a step",             1.45, 1.45,   34,       6, _has_few_tokens),
    BarRule("sequences of more than 8,192 tokens",                 1.40, 1.40,   21,       3, _is_long),
    BarRule(OF_ENGINES,                                            1.40, 1.40,    4,       1, _is_trained_here),
    BarRule("fp8 or fp4",                                          1.60, 1.60,   85,       6, _has_small_numbers),
    BarRule("experts",                                             1.85, 1.85,   31,       2, _has_experts),
    BarRule("a device or number type that few or none measured",   1.90, 1.90,   24,       1, _is_unmeasured),
    BarRule("ZeRO-3 over more than 500 devices",                   2.05, 2.05,   14,       4, _is_sharded_widely),
)
# Of an optimizer's step on the host, by published steps (tests/plan/test_offload.py): its seconds alone may be so far from their plan.
ON_HOST = BarRule("the optimizer's part on the host within a factor of 2", 2.00, 2.00, 8,   5, _is_any)
MEMORY_BARS = (
    BarRule("like most measured runs",                             1.15, 1.30,   61,       5, _is_any),
    BarRule("peaks below 5 GiB",                                   1.15, 1.80,   14,       1, _is_small),
)
# The tensors of our own modules and optimizers are traced (docs/gpu_traces.md: within 2 %) and were measured on one H200 (within 1.1 %), so
# a run takes hardly less. What allocator and message buffers take beside them on a GPU was measured of other frameworks only, so it may
# take as much more as theirs: the factors above, and the 1.15 of the allocator's cached pieces, which plans of published runs count
# (scripts/published/predict.py).
MEMORY_OF_ENGINES = (
    BarRule(OF_ENGINES,                                            1.05, 1.45,    4,       1, _is_any),
    BarRule(OF_ENGINES,                                            1.05, 1.85,    0,       0, _is_small),
)
# A CPU's rates are measured where the plan is made. Thirteen runs on two cores took 0.74 to 1.38 times their plan in float32, 0.99 to 3.85
# in bf16 (scripts/bench_cpu_plan.py), when plans left out what the host takes; 1.04 to 1.36 and 1.09 to 2.79 since. Cores that other work
# uses may be many times slower, and no bar holds that. Bytes are those of tensors, without the interpreter and its libraries: every run
# counts them, and `report` shows that they are as planned.
STEP_ON_CPU = (
    BarRule("a CPU that does little else",                         1.40, 1.50,   13,       1, _is_any),
    BarRule("a CPU in another number type than float32",           1.40, 3.90,   13,       1, _is_not_float32),
)
MEMORY_ON_CPU = (
    BarRule("tensors of a CPU's process",                          1.02, 1.02,   12,       1, _is_any),
)
# fmt: on


def step_bar(planned: Planned, seconds: float, optimizer: float = 0.0) -> Bar:
    """The bar of a step's seconds, of which the optimizer takes some: on the host those may be ON_HOST times shorter or longer."""
    bar = _bar(STEP_ON_CPU if planned.run.cluster.device.kind == "cpu" else STEP_BARS, planned, seconds)
    if not planned.parallel.offload.optimizer:
        return bar
    rule, rest = bar.rule, seconds - optimizer
    low, high = rest / rule.low + optimizer / max(ON_HOST.low, rule.low), rest * rule.high + optimizer * max(ON_HOST.high, rule.high)
    says = f"{rule.says}; {ON_HOST.says}, by {ON_HOST.runs} steps of {ON_HOST.sources} sources"
    return Bar(low, high, rule._replace(says=says, low=seconds / low, high=high / seconds))


def memory_bar(planned: Planned) -> Bar:
    """The bar of the fullest rank's bytes."""
    if planned.run.cluster.device.kind == "cpu":
        return _bar(MEMORY_ON_CPU, planned, planned.peak)
    return _bar(MEMORY_BARS if planned.engine is None else MEMORY_OF_ENGINES, planned, planned.peak)


def _bar(rules: tuple[BarRule, ...], planned: Planned, value: float) -> Bar:
    held = [rule for rule in rules if rule.holds(planned)]
    low, widest = max(rule.low for rule in held), max(held, key=lambda rule: rule.high)
    return Bar(value / low, value * widest.high, widest._replace(low=low))
