"""What the user said, as frozen data: one `Run` and its parts, in SI units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

MOST = 10**18  # of a count: products of several are still exact, and finite as floats
LEAST_FLOAT, MOST_FLOAT = 1e-30, 1e30  # of a number that is not 0: so are quotients and products of several

Count = Annotated[int, Meta(ge=1, le=MOST)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Meta(ge=LEAST_FLOAT, le=MOST_FLOAT)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Below1 = Annotated[float, Meta(ge=0, lt=1)]

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's shape; every size is a count of elements along a logical dim."""

    family: str
    layers: Count
    hidden: Count
    heads: Count
    vocab: Count
    kv_heads: Count | None = None  # None: as many as heads
    head_dim: Count | None = None  # None: hidden / heads
    ffn: Count | None = None  # None: 4 x hidden
    context: Count | None = None  # rows of a learned position table; None: train.seq
    vocab_multiple: Count = 1  # each rank's slice of the vocabulary is padded to a multiple of this
    tied: bool = False  # embedding and head are one weight
    bias: bool = False
    qkv_bias: bool | None = None  # None: as bias
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Positive = 1e-5
    act: Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"] = "gelu"
    positions: Literal["learned", "rope", "none"] = "learned"
    rope_base: Positive = 10000.0
    dropout: Below1 = 0.0
    experts: Natural = 0
    top_k: Natural = 0
    expert_ffn: Count | None = None  # None: ffn
    shared_experts: Natural = 0
    aux_loss: NotNegative = 0.0  # how much uneven routing counts beside the loss, each sequence by itself (arXiv:2101.03961 eq. 4)
    capacity: Positive | None = None  # of a sequence an expert takes this x top_k x seq / experts tokens, the first; None: all
    hf: str | None = None  # path of a Hugging Face config.json that the sizes were read from
    parameters: dict[str, tuple[Natural, ...]] | None = None  # family hf: every parameter's shape, as transformers makes it
    weights: str | None = None  # folder of Hugging Face weights that a run begins from; None: drawn from train.seed


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: memory bytes, bandwidth bytes/s, peak dense FLOP/s by precision."""

    name: str
    memory: Annotated[float, Meta(ge=1, le=MOST_FLOAT)] | Literal["auto"]  # auto: this machine's, shared among its ranks
    bandwidth: Positive | None = None
    peak: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"], Positive] = field(default_factory=dict)
    kind: Literal["cuda", "cpu"] = "cuda"
    units: Count | None = None  # streaming multiprocessors: output tiles are dealt out to them in waves
    sustained: Share = 0.75  # of `peak`, what a large matrix product keeps up for hours
    flash: Share = 0.4  # of `peak`, what a fused attention kernel reaches at head_dim 128
    streaming: Share = 0.8  # of `bandwidth`, what a kernel bound by memory reaches
    launch: NotNegative = 4e-6  # seconds that one kernel costs the device beside its work
    dispatch: NotNegative = 60e-6  # seconds that the host takes for one op of the table or message: Python, autograd, launches
    context: NotNegative = 0.0  # bytes that the driver keeps for one process


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link as one device sees it: bytes/s in one direction, seconds a hop; `efficiency` is the share that data gets."""

    bandwidth: Positive
    latency: NotNegative
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.8

    @property
    def rate(self) -> float:
        """Bytes/s that a long message reaches."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes x devices in each, and the two kinds of link: inside a node and between nodes."""

    nodes: Count
    gpus: Count  # devices in one node (processes, on a cpu)
    device: Device
    inside: Link | None = None
    between: Link | None = None
    storage: Positive | None = None  # bytes/s at which all devices together write a checkpoint
    # Seconds of one device between faults that end a run: Llama 3's 419 in 54 days of 16,384 H100 (arXiv:2407.21783 table 5).
    mtbf: Positive = 54 * 86400 * 16384 / 419


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What is kept in the host's memory."""

    optimizer: bool = False
    parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Which messages travel while the device computes: False exposes all of their time."""

    data: bool = True  # gradients during backward; ZeRO-3 gathers during both passes
    tensor: bool = False  # tensor-parallel messages under the matrix products beside them
    pipeline: bool = False  # stage to stage under the next micro-batch
    context: bool = True  # ring attention's next keys and values under this block's attention


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of the mesh and how each axis works."""

    dp: Count | Literal["auto"] = "auto"
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    ep: Count = 1  # expert ranks are taken from the data axis: ep divides dp
    zero: Literal[0, 1, 2, 3] = 0
    shard: Count | Literal["all"] = "all"
    schedule: str = "1f1b"
    chunks: Count = 1
    sequence: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    reduce: Literal["ring", "halving", "server"] = "ring"
    bucket: Count = 50_000_000  # elements that travel in one message of the data axis
    scatter: bool = False  # stages hand on 1/tp of the residual stream, gathered inside the node (arXiv:2104.04473 section 4.1)
    offload: Offload = field(default_factory=Offload)
    overlap: Overlap = field(default_factory=Overlap)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Validation: every n steps (0: never), over so many batches."""

    every: Natural = 0
    batches: Count = 8


@dataclass(frozen=True, kw_only=True)
class Train:
    """One step (sequences, tokens) and how many of them."""

    batch: Count  # sequences a step
    seq: Count  # tokens of a sequence
    microbatch: Count = 1  # sequences of a micro-batch
    steps: Count | None = None
    tokens: Positive | None = None
    precision: Precision = "bf16"
    gradients: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # what gradients add up in; auto: as precision
    attention: Literal["flash", "math"] = "flash"
    flops: Literal["attention", "parameters"] = "attention"  # model FLOPs with attention's products, or 6 a parameter and token
    compile: bool = False
    seed: Seed = 1234
    clip: NotNegative = 1.0  # global gradient norm; 0: off
    skip: Natural = 3  # steps in a row that may be left out because a loss or a gradient is not finite
    evaluate: Evaluate = field(default_factory=Evaluate)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its schedule of learning rates."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 3e-4
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Below1 = 0.0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Natural = 0  # steps
    min_lr: NotNegative = 0.0
    gradient_copy: bool = False  # a second, fp32 copy of the gradients at the step (Megatron's fp16 optimizer)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where tokens come from, what makes them of text, and the share of them that is held out."""

    name: Literal["stdlib", "text", "tokens", "synthetic"] = "synthetic"
    path: str | tuple[str, ...] | None = None  # of text and tokens: files, folders, patterns
    weights: tuple[Positive, ...] | None = None  # one a path: its share of the samples; None: all paths are one text
    tokenizer: str = "bytes"  # or the path of a Hugging Face tokenizer.json
    end: Natural | None = None  # token id that ends a document; None: 0 of bytes, the tokenizer's own, none in files of tokens
    text_key: str = "text"  # of a .jsonl line
    documents: bool = False  # attention and loss stay inside documents
    validation: Below1 = 0.01  # share of the tokens
    cache: str | None = None  # folder of tokenized text; None: the user's cache folder (XDG)


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is written, how often (steps) and where."""

    every: Count = 10
    sinks: tuple[Literal["console", "jsonl", "wandb", "tensorboard"], ...] = ("console", "jsonl")
    dir: str = "runs"
    profile: tuple[Natural, Natural] | None = None
    ledger: bool = False  # count every message of one step beside the plan's: RUN_DIR/ledger.json


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When a run is saved (steps; 0: only at the end), how many are kept, and how it resumes."""

    every: Natural = 0
    keep: Count = 2
    resume: Literal["auto", "must", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How ranks are started."""

    name: Literal["local", "deepspeed", "torchrun", "slurm"] = "local"
    hostfile: str | None = None  # None: in a job of Slurm, its nodes
    include: str | None = None  # host1@host2:0,2: these hosts and slots of the file; exclude: all others
    exclude: str | None = None
    runner: Literal["pdsh", "openmpi", "slurm"] = "pdsh"  # what DeepSpeed's launcher reaches the hosts with
    address: str | None = None  # of the first host, where ranks meet; None: where ssh reaches it
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None  # there; None: one that is free, or that the run folder's name gives
    environment: tuple[str, ...] = ()  # further variables of this shell that ranks on other hosts are told, over a file
    restarts: Natural = 0
    patience: Positive = 120.0  # seconds that a step may take at least before the run is taken to hang; ten times that what is no step
    preflight: bool = True


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recipe, resolved and checked: all that the planner and the ranks are told."""

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
    engine: str = "auto"
    reading: str | None = None  # how `cluster=6x8x64` was read, in words
