"""A run that breaks no rule of the planner and provokes no warning, keys that change it, and the run of a printed fix."""

import re
from typing import Any

from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Cluster, Device, Link, Model, Parallel, Run, Train

DEVICE = Device(name="A100", memory=80e9, bandwidth=2e12, peak={"bf16": 312e12, "fp32": 19.5e12}, units=108)
NVLINK, NIC = Link(bandwidth=300e9, latency=5e-6), Link(bandwidth=25e9, latency=1e-5)
GPT = Model(family="gpt", layers=12, hidden=768, heads=12, vocab=50304, bias=True, tied=True)
MIXTURE = Model(family="moe", layers=12, hidden=768, heads=12, vocab=50304, positions="rope", act="swiglu", experts=8, top_k=2)
BASE = Run(
    name="test",
    model=GPT,
    cluster=Cluster(nodes=2, gpus=8, device=DEVICE, inside=NVLINK, between=NIC),
    parallel=Parallel(),
    train=Train(batch=256, seq=1024, microbatch=2, steps=100),
)

Keys = dict[str, Any]
MOE: Keys = {"model": MIXTURE}
HF_MODEL = Model(family="hf", layers=2, hidden=64, heads=4, vocab=256, context=1024, hf="x", parameters={"a": (256, 64), "b": (64,)})
HF: Keys = {"model": HF_MODEL}
INTERLEAVED: Keys = {"parallel.schedule": "interleaved"}
FOLDED: Keys = {"parallel.schedule": "dualpipev"}


def override_value(word: str) -> object:
    """Return the value of a command-line override."""
    known: dict[str, object] = {"true": True, "false": False, "null": None}
    if word in known:
        return known[word]
    if word.startswith("["):
        return tuple(int(each) if each.isdigit() else each for each in word.strip("[]").split(","))
    if re.fullmatch(r"\d+\.\d+|[\d.]+e-\d+", word):
        return float(word)
    return int(word) if re.fullmatch(r"-?\d+", word) else word


def fixed_run(run: Run, change: tuple[str, ...]) -> Run:
    """Return the run with the overrides of a printed change."""
    return with_changes(run, [(key, override_value(word)) for key, _, word in (each.partition("=") for each in change)])


def gpt(layers: int, hidden: int, heads: int) -> Model:
    """Return a GPT of 51,200 words."""
    return Model(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, bias=True, tied=True, dropout=0.1)
