"""The planned memory of a small run: its stages' bytes, on devices large enough for every run."""

from typing import Any

from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Memory, MemoryBytes
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

# Large enough for every run, so that no plan has a problem.
DEVICE = Device(name="A100", memory=1e18, bandwidth=2e12, peak={"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12}, units=108, context=7e8)
LINK = Link(bandwidth=25e9, latency=1e-5)
GIB = 2**30


def run_of(model: Model, ranks: int, **changes: Any) -> Run:
    """Return a run on nodes of 8 (fewer where there are fewer ranks), with keys changed: parallel__tp=8.

    Its costs are the papers' unless `engine` says otherwise.
    """
    gpus = min(8, ranks)
    cluster = Cluster(nodes=ranks // gpus, gpus=gpus, device=DEVICE, inside=LINK, between=LINK)
    train = Train(batch=ranks, seq=2048, steps=1, precision="fp16", attention="math")
    run = Run(name="test", engine="papers", model=model, cluster=cluster, parallel=Parallel(), train=train)
    return with_changes(run, [(key.replace("__", "."), value) for key, value in changes.items()])


def memory_of(run: Run) -> Memory:
    """Return the planned memory of a legal run."""
    plan = make_plan(run)
    assert plan.problems == ()
    assert plan.memory is not None
    return plan.memory


def first_stage(run: Run) -> MemoryBytes:
    """Return the bytes of the first stage."""
    return memory_of(run).stages[0].bytes


def states(held: MemoryBytes) -> int:
    """Return the bytes of weights, gradients and the optimizer."""
    return held.weights + held.gradients + held.optimizer


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, **sizes: Any) -> Model:
    """Return a GPT with biases; tied, and with dropout 0.1, by default."""
    sizes = {"tied": True, "dropout": 0.1} | sizes
    return Model(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=vocab, bias=True, **sizes)


# The families, without their layers and sizes.
MODELS: list[dict[str, Any]] = [
    {"family": "gpt", "bias": True, "tied": True, "dropout": 0.1},
    {"family": "llama", "norm": "rmsnorm", "act": "swiglu", "positions": "rope", "kv_heads": 2, "ffn": 96},
    {"family": "moe", "act": "swiglu", "positions": "rope", "kv_heads": 4, "ffn": 96, "experts": 8, "top_k": 2, "shared_experts": 1},
    {"family": "bert", "bias": True, "tied": True, "dropout": 0.1},
]


def stage_bytes(run: Run, key: str, value: object) -> list[MemoryBytes]:
    """Return the bytes of each stage of a run with one key changed."""
    return [stage.bytes for stage in memory_of(with_changes(run, [(key, value)])).stages]


# 32 (12 h^2 + 13 h) + (336534 + 2048 + 2) h = 7.5e9 parameters.
ZERO_7B = gpt(32, 4000, 32, vocab=336534)
