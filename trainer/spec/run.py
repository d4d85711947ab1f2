"""The configuration of a run as frozen data in SI units: `Run` and its sections. keys/meanings.py describes every key."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from msgspec import Meta

from .numbers.bounded import AtLeast1, Below1, Count, Natural, NotNegative, Positive, Seed
from .sections.cluster import SUSTAINED as SUSTAINED
from .sections.cluster import Cluster as Cluster
from .sections.cluster import Device as Device
from .sections.cluster import Link as Link
from .sections.cluster import NodeHost as NodeHost
from .sections.data_stage import DataStage as DataStage
from .sections.model import LayerType as LayerType
from .sections.model import Model as Model
from .sections.optimizer import Optim
from .sections.preference import Preference
from .sections.rampup import Rampup
from .sections.search_goal import SearchGoal

PAPERS_NAME = "papers"  # as a run's engine: plan what the papers describe, such as a run of another framework
Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Offloading to host memory."""

    optimizer: bool = False
    parameters: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What is offloaded, by the names of the fields."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Which messages overlap with computation; False exposes all of their time."""

    data: bool = True
    tensor: bool = False
    pipeline: bool = False
    context: bool = True


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Compression of gradients on the data axis (PowerSGD: arXiv:1905.13727): the rank of its products, the first steps without it."""

    name: Literal["none", "powersgd"] = "none"
    rank: Count = 4
    start: Natural = 0


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD with which workers step together: its gradient is the mean of what their own steps took off the weights (arXiv:2311.08105)."""

    lr: Positive = 1.0
    momentum: Below1 = 0.0
    nesterov: bool = False

    @property
    def only_averages(self) -> bool:
        """Whether its step gives the mean of the workers' weights (arXiv:1805.09767)."""
        return self.lr == 1 and not self.momentum


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How many steps workers take alone between two steps together, and which replicas make up a worker: each one, or those of a node."""

    every: Count = 1
    across: Literal["all", "node"] = "all"
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)


CpComm = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of the mesh and how each axis works."""

    dp: Count | Literal["auto"] = "auto"
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    cp_comm: CpComm = "all_gather"
    ep: Count = 1
    ep_load: AtLeast1 = 1.0
    zero: Literal[0, 1, 2, 3] = 0
    shard: Count | Literal["all"] = "all"
    gather: Literal["auto", "step", "micro"] = "auto"
    schedule: str = "1f1b"
    actions: str | None = None
    chunks: Count = 1
    stages: tuple[Count, ...] | None = None
    vertical: bool = False
    sequence: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    reduce: Literal["auto", "ring", "halving", "tree", "hierarchical", "server"] = "ring"
    servers: Count = 1
    staleness: Natural = 0
    sync: Sync = field(default_factory=Sync)
    bucket: Count = 50_000_000
    scatter: bool = False
    compress: Compress = field(default_factory=Compress)
    offload: Offload = field(default_factory=Offload)
    overlap: Overlap = field(default_factory=Overlap)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Validation: the interval in steps (0: never), and the number of global batches."""

    every: Natural = 0
    batches: Count = 8


@dataclass(frozen=True, kw_only=True)
class Train:
    """The size of one step, the number of steps, and numerics."""

    batch: Count
    seq: Count
    microbatch: Count = 1
    rampup: Rampup = field(default_factory=Rampup)
    steps: Count | None = None
    tokens: Positive | None = None
    precision: Precision = "bf16"
    gradients: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["flash", "math"] = "flash"
    linear_attention: Literal["torch", "fla"] = "torch"
    flops: Literal["attention", "parameters"] = "attention"
    compile: bool = False
    loss_chunks: Count = 1
    z_loss: NotNegative = 0.0
    preference: Preference = field(default_factory=Preference)
    deterministic: bool = False
    seed: Seed = 1234
    clip: NotNegative = 1.0
    skip: Natural = 3
    skip_spikes: NotNegative = 0.0
    evaluate: Evaluate = field(default_factory=Evaluate)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data, its tokenizer, the share held out for validation, and validation sets of files of their own, by name."""

    name: Literal["stdlib", "text", "tokens", "pairs", "preferences", "synthetic"] = "synthetic"
    path: str | tuple[str, ...] | None = None
    weights: tuple[Positive, ...] | None = None
    stages: tuple[DataStage, ...] | None = None
    tokenizer: str = "bytes"
    end: Natural | None = None
    text_key: str = "text"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    messages_key: str = "messages"
    turns: Literal["all", "last"] = "all"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    documents: bool = False
    document_tokens: Count | tuple[Count, ...] | None = None
    validation: Below1 = 0.01
    validate: dict[str, str | tuple[str, ...]] | None = None
    cache: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether the files hold text, which is tokenized."""
        return self.name in ("text", "stdlib") or self.has_prompts

    @property
    def has_prompts(self) -> bool:
        """Whether lines of files hold prompts with what follows them, of which windows hold whole ones."""
        return self.name in ("pairs", "preferences")

    @property
    def evaluated_sets(self) -> int:
        """The most sets that an evaluation reads: those of data.validate, and what data.validation holds out."""
        named = len(self.validate or {})
        return named + bool(self.validation or not named)

    @property
    def has_preferences(self) -> bool:
        """Whether a prompt has two answers, of which the loss compares the log probabilities."""
        return self.name == "preferences"


@dataclass(frozen=True, kw_only=True)
class Log:
    """Logging: the interval in steps, and where logs go."""

    every: Count = 10
    sinks: tuple[Literal["console", "jsonl", "wandb", "tensorboard"], ...] = ("console", "jsonl")
    dir: str = "runs"
    profile: tuple[Natural, Natural] | None = None
    timeline: tuple[Natural, Natural] | None = None
    ledger: bool = False


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoints: the interval in steps (0: none), whether the last step is saved, whether training goes on while one is written, the
    number to keep, and how a run resumes."""

    every: Natural = 0
    final: bool = True
    background: bool = False
    keep: Count = 2
    resume: Literal["auto", "must", "never"] = "auto"
    accept: tuple[str, ...] = ()

    @property
    def in_background(self) -> bool:
        """Whether training goes on while a checkpoint is written. It waits for those of a run that is stopped, and of the last step."""
        return self.background and self.every > 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The way to start ranks."""

    name: Literal["local", "deepspeed", "torchrun", "slurm"] = "local"
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    runner: Literal["pdsh", "openmpi", "slurm"] = "pdsh"
    address: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    environment: tuple[str, ...] = ()
    restarts: Natural = 0
    spares: Natural = 0
    patience: Positive = 120.0
    preflight: bool = True
    device_check: Natural | Literal["start"] = "start"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recipe, resolved and checked: the whole input of the planner and the ranks."""

    name: str
    model: Model
    cluster: Cluster
    parallel: Parallel
    train: Train
    optim: Optim = field(default_factory=Optim)
    data: Data = field(default_factory=Data)
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launch: Launch = field(default_factory=Launch)
    search: SearchGoal = field(default_factory=SearchGoal)
    engine: str = "auto"
    reading: str | None = None

    @property
    def reads_start_weights_again(self) -> bool:
        """Whether a resume may need the weights that the run began with: LoRA adds to them, preferences are relative to them."""
        return self.model.lora.rank > 0 or (self.data.has_preferences and self.train.preference.has_reference)
