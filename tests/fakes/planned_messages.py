"""The planned messages of a small run whose step is one micro-batch, on nodes of 8."""

from typing import Any

from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Message, Plan
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

S, B, H, V, D = 256, 2, 512, 4096, 8  # sequence, micro-batch, hidden, vocabulary, data-parallel ranks
DEVICE = Device(name="A100", memory=1e18, bandwidth=2e12, peak={"bf16": 312e12, "fp16": 312e12, "fp8": 600e12}, units=108)
NVLINK, NIC = Link(bandwidth=300e9, latency=0.0), Link(bandwidth=25e9, latency=0.0)
GPT = Model(family="gpt", layers=4, hidden=H, heads=8, vocab=V, bias=True)
MOE = Model(family="moe", layers=1, hidden=H, heads=8, vocab=V, ffn=1024, experts=16, top_k=2, positions="rope", act="swiglu")


def run_of(model: Model = GPT, ranks: int = 8, **changes: Any) -> Run:
    """Return a run whose step is one micro-batch of B x S, on nodes of 8, with keys changed: parallel__tp=8."""
    gpus = min(8, ranks)
    cluster = Cluster(nodes=ranks // gpus, gpus=gpus, device=DEVICE, inside=NVLINK, between=NIC)
    run = Run(name="test", model=model, cluster=cluster, parallel=Parallel(), train=Train(batch=B, seq=S, microbatch=B, steps=1))
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    others = keys.get("parallel.tp", 1) * keys.get("parallel.pp", 1) * keys.get("parallel.cp", 1)
    steps = keys.pop("micros", 1)
    return with_changes(run, ({"train.batch": ranks // others * B * steps} | keys).items())


def plan_of(model: Model = GPT, ranks: int = 8, **changes: Any) -> Plan:
    """Return the plan of such a run."""
    plan = make_plan(run_of(model, ranks, **changes))
    assert plan.problems == ()
    return plan


def messages(plan: Plan, axis: str, verb: str | None = None) -> list[Message]:
    """Return the planned messages of an axis, and of one verb if it is given."""
    return [each for each in plan.traffic if each.axis == axis and verb in (None, each.verb)]


def bytes_of(plan: Plan, axis: str) -> int:
    """Return the bytes that the busiest rank sends on an axis in a step."""
    return sum(each.sent for each in messages(plan, axis))


def of_a_layer(axis: str, **changes: Any) -> int:
    """Return the bytes that one more layer makes a rank send on an axis for one more micro-batch."""
    (one, two), (three, four) = (
        [bytes_of(plan_of(model__layers=layers, micros=micros, **changes), axis) for layers in (1, 2)] for micros in (1, 2)
    )
    return four - three - (two - one)
