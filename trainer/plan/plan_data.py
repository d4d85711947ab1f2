"""The data of a plan, in SI units; the fields are the keys of `distrain plan --json`."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.problem import Problem


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Memory of one rank by kind, in bytes.

    `temporary` is what the fullest moment holds beside the others: in a backward pass, or in the optimizer's step, which has the
    memory of activations and logits too.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    temporary: int
    overhead: int
    total: int


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline stage: its layers (first, last + 1), the parameters of one rank, the micro-batches in flight, the bytes of one rank.

    `parts` are the layers of each of its parts of the model, of which `layers` is the first; `back` is the second in a folded pipeline.
    """

    index: int
    layers: tuple[int, int]
    parameters: int
    in_flight: float
    bytes: MemoryBytes
    parts: tuple[tuple[int, int], ...]
    back: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RankHostBytes:
    """What one rank keeps in its host's memory, by kind, in bytes: what it offloads, and of a save in the background the snapshot that is
    written."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    snapshot: int


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What ranks keep in their hosts' memory: bytes on the host of the fullest node, of a host (None: not stated), and of one rank, the
    fullest. `is_own`: a CPU has no host beside it, so it stays in the same memory and is in its peak."""

    node: int
    capacity: int | None
    rank: RankHostBytes
    is_own: bool


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank (`peak`), of the device (`capacity`) and of one rank of each stage; `stage` is the fullest.

    `unknown` are the kinds that the plan can't count for this model: their bytes are 0 here, and a step needs more.
    """

    peak: int
    capacity: int
    stage: int
    form: str  # whose saved activations are counted: "megatron" Korthikanti 2022's, "torch" our modules', "compiled" our compiled layers'
    stages: tuple[StageMemory, ...]
    unknown: tuple[str, ...] = ()
    host: HostMemory | None = None  # None: they keep nothing there
    most_ep_load: float | None = None  # the largest parallel.ep_load that fits; None: no ranks share out experts, or 1 does not fit

    @property
    def full_host(self) -> HostMemory | None:
        """The hosts, where ranks keep more than they have, and the rest fits on the devices."""
        host = self.host
        return host if host and host.capacity is not None and host.node > host.capacity and self.peak <= self.capacity else None


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message on the busiest rank: payload bytes, how many in a step that has them, which is one of `every` steps; bytes sent
    and seconds, the mean of a step."""

    axis: str
    verb: str
    payload: int
    count: int
    sent: int
    link: str
    seconds: float | None
    exposed: float | None
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step by cause; they add up to `step`. `host` is what the host does once a step while devices wait."""

    step: float
    compute: float
    exposed: float
    bubble: float
    optimizer: float
    host: float


@dataclass(frozen=True, kw_only=True)
class OperatorSeconds:
    """Seconds of a step in which a rank of the busiest stage computes one kind of operator (OPERATOR_KINDS): in forward, in backward, and
    what backward computes again. The `seconds` of all kinds add up to `StepTime.compute`.

    `peak` is the share of the device's peak that the kind's products reach (None: it has none), with the FLOPs that kernels compute;
    `unfilled` are the seconds of products that full tiles and waves would spare.
    """

    kind: str
    seconds: float
    share: float  # of the step
    forward: float
    backward: float
    recomputed: float
    peak: float | None = None
    unfilled: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Tokens and FLOP a second; mfu and hfu are shares of the device's peak, and hfu includes recomputation."""

    tokens_per_second: float
    tokens_per_second_per_gpu: float
    model_flops_per_second_per_gpu: float
    hardware_flops_per_second_per_gpu: float
    mfu: float
    hfu: float


@dataclass(frozen=True, kw_only=True)
class BatchLevel:
    """Steps of a run that ramps its batch up: how many train a batch of so many sequences, the micro-batches of a replica and the seconds
    of one of them (None: not known), and the tokens of all."""

    batch: int
    microbatches: int
    steps: int
    tokens: int
    step: float | None


@dataclass(frozen=True, kw_only=True)
class PreferencePlan:
    """The loss of a run on preferences, and the seconds of the pass before its first step that computes the reference, if the run reads no
    pair twice: at most (0: it has none; None: not known)."""

    loss: str
    beta: float
    reference_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class DocumentsPlan:
    """Documents of stated lengths: their mean tokens; the pairs of tokens inside them, as a share of a whole sequence's, which attention
    counts, and whether its kernel computes no others. `wait`: seconds a step of the mean replica for the one with the longest documents
    (None: not known). `slowest`: attention of the busiest of the ranks that share a sequence over that of the mean one."""

    tokens: float
    pairs: float
    computed: bool
    wait: float | None
    slowest: float


@dataclass(frozen=True, kw_only=True)
class StageOfRun:
    """The tokens of a run that are read in a stage of its data, and the weights of the paths in it."""

    tokens: float
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PathOfRun:
    """The tokens of a run that are read from a path of its data, and how often all of the path's (None: its size is not known here)."""

    tokens: float
    epochs: float | None = None


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """The whole run: model FLOPs, seconds if all devices ran at their peak, planned seconds, bytes of a checkpoint. `mfu` is the mean over
    the run; `levels` are those of a batch that is ramped up, () where every step has the same. `stages` are those of data.stages that the
    run begins, and `paths` what it reads from each path in them; () where the blend does not change. `preferences`: of a run on these."""

    steps: int
    tokens: int
    flops: float
    ideal_seconds: float | None
    seconds: float | None
    days: float | None
    cost: float | None  # in the currency of cluster.price; None: no price or no time
    checkpoint_bytes: int
    mfu: float | None = None  # None: no time or no peak
    levels: tuple[BatchLevel, ...] = ()
    stages: tuple[StageOfRun, ...] = ()
    paths: tuple[PathOfRun, ...] = ()
    preferences: PreferencePlan | None = None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Seconds between interruptions and how many the run should expect; seconds of a save, and for how many of them training waits; the
    best interval between two saves, in seconds and in steps; the share of time that is useful with it, and with saves in the background
    where the run has none."""

    mtbf: float
    interruptions: float | None
    seconds: float | None
    pause: float | None
    interval: float | None
    every: int | None
    goodput: float | None
    background_goodput: float | None
    missing: str = ""  # the key without which no interval is planned


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Parameters, those that are trained, those that one token uses, and the model FLOPs of one token, forward and backward."""

    parameters: int
    trained_parameters: int
    active_parameters: int
    flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """How far nine in ten runs lie from a figure: at most `low` times smaller or `high` times larger, because the run is
    of a kind, of which `runs` of `sources` sources were measured."""

    low: float
    high: float
    because: str
    runs: int
    sources: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that `distrain plan` says of one run. The ends of the error bars are in seconds and bytes; None: that end is not known."""

    version: int
    name: str
    ok: bool  # no problem except memory
    fits: bool | None  # None: the layout breaks a rule, so nothing was computed
    runnable: bool
    reading: str | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    world: int
    nodes: int
    gpus: int
    device: str
    mesh: dict[str, int] | None
    groups: dict[str, str]  # axis -> the size of its groups and how many of their ranks share a node, in words
    engine: str | None
    engine_reason: str  # why `engine: auto` takes that engine, where it is not the first choice; "": it is, or the run names it
    schedule: str
    microbatches: int | None
    model: ModelFacts | None
    memory: Memory | None
    memory_low: int | None
    memory_high: int | None
    traffic: tuple[Message, ...]
    time: StepTime | None
    operators: tuple[OperatorSeconds, ...] = ()  # the longest first; (): no time
    step_low: float | None
    step_high: float | None
    bars: dict[str, ErrorBar]  # of "step" and "memory"
    bubble_fraction: float | None
    throughput: Throughput | None
    run: WholeRun | None
    saving: Saving | None
    documents: DocumentsPlan | None = None  # None: their lengths are not stated, or documents are not kept apart
