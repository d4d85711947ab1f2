"""What a plan says: frozen data whose fields are the keys of `distrain plan --json`, all SI."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.problem import Problem


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Memory of one rank by kind, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    overhead: int
    total: int


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline stage: its layers [first, last + 1], of a folded pipeline those on the way out and `back`, parameters on one rank,
    micro-batches in flight, bytes."""

    index: int
    layers: tuple[int, int]
    parameters: int
    in_flight: float
    bytes: MemoryBytes
    back: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank, of the device, and of a rank of every stage."""

    peak: int
    capacity: int
    stage: int
    form: str  # whose kept tensors were counted: "megatron" is Korthikanti 2022's, "torch" our own modules' and DeepSpeed's
    stages: tuple[StageMemory, ...]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message of a step on the busiest rank: payload bytes, how many a step, bytes sent a step, seconds."""

    axis: str
    verb: str
    payload: int
    count: int
    sent: int
    link: str
    seconds: float | None
    exposed: float | None


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step by cause; they add up to `step`."""

    step: float
    compute: float
    exposed: float
    bubble: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates; mfu and hfu are shares of the device's peak, hfu counting recomputation."""

    tokens_per_second: float
    tokens_per_second_per_gpu: float
    model_flops_per_second_per_gpu: float
    hardware_flops_per_second_per_gpu: float
    mfu: float
    hfu: float


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """The whole run: model FLOPs, seconds at every device's peak, planned seconds, bytes of a checkpoint."""

    steps: int
    tokens: int
    flops: float
    ideal_seconds: float | None
    seconds: float | None
    days: float | None
    checkpoint_bytes: int


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Seconds between interruptions and how many are expected in the run; seconds of a save; the best interval between two, in seconds
    and steps, and the share of the time that is then kept work."""

    mtbf: float
    interruptions: float | None
    seconds: float | None
    interval: float | None
    every: int | None
    goodput: float | None


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Parameters (those that one token meets, too) and model FLOPs of one token, forward and backward."""

    parameters: int
    active_parameters: int
    flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that `distrain plan` says of one run."""

    version: int
    name: str
    ok: bool  # no problem but memory
    fits: bool | None  # None: the layout can't be laid out, so nothing was counted
    runnable: bool
    reading: str | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    world: int
    nodes: int
    gpus: int
    device: str
    mesh: dict[str, int] | None
    groups: dict[str, str]  # axis -> how its groups lie, in words
    engine: str | None
    schedule: str
    microbatches: int | None
    model: ModelFacts | None
    memory: Memory | None
    traffic: tuple[Message, ...]
    time: StepTime | None
    bubble_fraction: float | None
    throughput: Throughput | None
    run: WholeRun | None
    saving: Saving | None
