"""Warnings of a plan: each one is provoked, and each fix of a layout that no engine runs is applied."""

from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.valid_run import BASE, HF, MOE, Keys, fixed_run, gpt
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.estimate import Estimator
from distrain.trainer.plan.layout_cost import layout_cost
from distrain.trainer.plan.layout_of_run import layout_of_run
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.warnings import WARNINGS
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Data, DataStage, Offload
from distrain.trainer.spec.sections.router import Router

# Runs that are legal but slow, wasteful or not fully planned: (the warning's rule, keys, how the warning begins).

BALANCED: Keys = {"model.aux_loss": 0.01}
# fmt: off
COSTLY: list[tuple[str, Keys, str]] = [
    ("time", {"cluster.device.peak": {}},
        "no times: how fast A100 is in bf16 is not stated: "),
    ("time", {"cluster.inside": None},
        "no times: cluster.inside is not stated: set cluster.inside.bandwidth (bytes/s per GPU and direction) and .latency (seconds)"),
    ("time", {"cluster.between": None},
        "no times: cluster.between is not stated: set cluster.between.bandwidth (bytes/s per GPU and direction) and .latency (seconds)"),
    ("time", {"parallel.zero": 1, "parallel.offload.optimizer": True},
        "no times: how fast its node's host is, to which the run offloads, is not stated: set cluster.host.bandwidth (bytes/s) and .link "),
    ("time", {"parallel.zero": 1, "parallel.offload.optimizer": True, "cluster.device.kind": "cpu"},
        "no times: a CPU has no separate host: offloading copies within its memory"),
    ("routing", MOE | BALANCED | {"parallel.ep": 4},
        "expert ranks are planned for even routing, 8 experts over 4 ranks; memory suffices for any routing"),
    ("capacity", MOE | BALANCED | {"model.capacity": 1.25},
        "model.capacity=1.25: planned as if no token were dropped"),
    ("balance", MOE,
        "nothing evens out the experts' loads: model.aux_loss and model.router.bias_rate are 0: set model.aux_loss=0.01"),
    ("tp", {"cluster.gpus": 2, "cluster.nodes": 8, "parallel.tp": 4},
        "parallel.tp=4 crosses nodes of 2: every layer waits for the link between nodes: "),
    ("link", {"cluster.inside.bandwidth": 9e6},
        "cluster.inside.bandwidth=9e+06 is 9e+06 bytes/s: bytes/s per GPU and direction, write it as 300e9 or 300GB/s"),
    ("link", {"parallel.zero": 1, "parallel.offload.optimizer": True, "cluster.host.link": 9e6, "cluster.host.bandwidth": 4e11},
        "cluster.host.link=9e+06 is 9e+06 bytes/s: bytes/s per GPU and direction, write it as 25e9 or 25GB/s"),
    ("link", {"parallel.zero": 1, "parallel.offload.optimizer": True, "cluster.host.link": 25e9, "cluster.host.bandwidth": 9e6},
        "cluster.host.bandwidth=9e+06 is 9e+06 bytes/s: bytes/s, write it as 25e9 or 25GB/s"),
    ("link", {"cluster.between.latency": 5.0},
        "cluster.between.latency=5 is 5 s: write 5us for microseconds"),
    ("bubble", {"parallel.pp": 4, "train.batch": 32},
        "the pipeline idles "),
    ("delay", {"parallel.pp": 4, "parallel.schedule": "pipedream", "model.tied": False, "train.clip": 0},
        "parallel.schedule=pipedream trains another curve than 1f1b: gradients are of weights up to 3 updates old"),
    ("delay", {"parallel.pp": 4, "parallel.schedule": "pipedream_2bw", "model.tied": False, "train.clip": 0},
        "parallel.schedule=pipedream_2bw trains another curve than 1f1b: gradients are of weights up to 1 update old"),
    ("moments", {"optim.moments": "bf16", "optim.rounding": "nearest", "optim.betas": (0.9, 0.999)},
        ("optim.rounding=nearest loses what optim.betas of 0.999 takes off a bf16 moment in a step: it hardly decays: "
         "set optim.rounding=stochastic")),
    ("moments", {"optim.moments": "bf16", "optim.rounding": "nearest", "optim.name": "sgd", "optim.momentum": 0.998},
        "optim.rounding=nearest loses what optim.momentum of 0.998 takes off a bf16 moment in a step"),
    ("moments", {"optim.moments": "bf16", "optim.rounding": "nearest", "optim.name": "muon", "optim.muon.momentum": 0.999},
        "optim.rounding=nearest loses what optim.muon.momentum of 0.999 takes off a bf16 moment in a step"),
    ("uneven", {"model.layers": 13, "parallel.pp": 2, "train.attention": "math"},
        "13 layers over 2 stages: "),
    ("uneven", {"model.layers": 14, "parallel.pp": 4, "parallel.schedule": "dualpipev"},
        "14 layers over "),
    ("vocab", {"model.vocab": 50257, "parallel.tp": 2},
        "model.vocab=50257 is padded to 50258 so that tp 2 splits it: less than 1 % of the head's products are padding"),
    ("vocab", {"model.vocab": 50257, "model.vocab_multiple": 4096},
        "model.vocab=50257 is padded to 53248, a multiple of model.vocab_multiple=4096: 6 % of the head's products are padding"),
    ("heads", {"model.heads": 6, "parallel.tp": 4},
        ("model.heads=6 is padded to 8 so that tp 4 splits it: 25 % of attention's products are padding, "
         "and 1 of 4 ranks holds padding only")),
    ("ffn", {"model.heads": 16, "model.ffn": 3004, "parallel.tp": 8},
        "model.ffn=3004 is padded to 3008 so that tp 8 splits it: less than 1 % of the feed-forward's products are padding"),
    ("kv_heads", {"model.kv_heads": 2, "parallel.tp": 4},
        "parallel.tp=4 is more than model.kv_heads=2: each is held by 2 ranks"),
    ("rampup", {"train.rampup.batch": (32, 64), "train.rampup.until": (1e6, 1e9)},
        "the run ends with steps of 64 sequences: train.batch=256 is never trained: end train.rampup.until before the run"),
    ("stages", {"data": Data(name="text", path=("a", "b")), "data.stages": (
        DataStage(weights=(1.0, 0.0), until=1e6), DataStage(weights=(1.0, 2.0), until=1e15), DataStage(weights=(1.0, 1.0)))},
        "the run ends at 26.2 M tokens, in stage 2 of 3 of data.stages: later ones are never read: end the stages before the run ends"),
    ("idle", {"parallel.sequence": True},
        "parallel.sequence=true does nothing with parallel.tp=1"),
    ("recompute", {"parallel.recompute": "selective"},
        "parallel.recompute=selective with train.attention=flash: flash attention stores no scores: "),
    ("compress", {"parallel.compress.name": "powersgd"},
        "parallel.compress.name=powersgd trains another curve than none: "),
    ("mfu", {"cluster.device.name": "Z9000"},
        "no measured run of Z9000 in bf16 is known: its MFU is calculated only"),
    ("mfu", {"cluster.device.bandwidth": 1e15, "cluster.device.sustained": 1.0, "cluster.device.memory": 1e13, "train.compile": True,
             "model": gpt(2, 12288, 96)},
        "an MFU of "),
]
# fmt: on


def test_a_cpu_whose_rates_are_measured_needs_no_published_run() -> None:
    link = "{bandwidth: 1e9, latency: 1e-6}"
    words = ["device=cpu", "cluster.device.peak={fp32: 1e11}", "cluster.device.bandwidth=1e10", f"cluster.inside={link}"]
    plan = make_plan(load_recipe("quickstart", words))
    assert plan.throughput is not None
    assert "mfu" not in [each.rule for each in plan.warnings]


def test_linear_attention_wants_the_rate_in_float32() -> None:
    words = ["model=tiny_hybrid", "train.precision=bf16", "cluster=1x1", "device=h100_80g"]
    assert "time" not in [each.rule for each in make_plan(load_recipe("quickstart", words)).warnings]
    (unstated,) = [
        each for each in make_plan(load_recipe("quickstart", [*words, "~cluster.device.peak.fp32"])).warnings if each.rule == "time"
    ]
    assert unstated.says.endswith("in fp32 is not stated: linear attention is planned as if it were in bf16")


@pytest.mark.parametrize(
    "balance",
    [BALANCED, {"model.router": Router(score="sigmoid", bias=True, bias_rate=0.001)}, {"model.weights": "of_a_folder"}, {"model.top_k": 8}],
)
def test_a_mixture_that_is_balanced_or_was_trained_is_not_warned_of(balance: Keys) -> None:
    plan = make_plan(with_changes(BASE, (MOE | balance).items()))
    assert [each.rule for each in plan.warnings if each.rule == "balance"] == []


@pytest.mark.parametrize(("rule", "keys", "says"), COSTLY, ids=[f"{rule}: {says}" for rule, _, says in COSTLY])
def test_a_warning_appears_once_and_alone(rule: str, keys: Keys, says: str) -> None:
    plan = make_plan(with_changes(BASE, keys.items()))
    assert plan.ok
    found = [each for each in plan.warnings if each.rule != "export"]  # some of these models are of no class of transformers
    assert [each.rule for each in found] == [rule]
    assert str(found[0]).startswith(says)


PEAK = Estimator(BASE)(BASE.parallel, BASE.train.microbatch).peak or 0


@pytest.mark.parametrize(("share", "said"), [(0.94, []), (0.96, ["tight"]), (1.0, ["tight"])])
def test_a_nearly_full_device_is_warned_of(share: float, said: list[str]) -> None:
    plan = make_plan(with_changes(BASE, [("cluster.device.memory", PEAK / share)]))
    assert plan.fits
    assert [each.rule for each in plan.warnings] == said


LATE: Keys = {"parallel.pp": 2, "parallel.schedule": "pipedream", "model.tied": False}
STEPPED: Keys = MOE | {"model.router.bias": True, "model.router.bias_rate": 0.001}
PREFERENCES: Keys = {"data.name": "preferences", "data.path": "a", "data.documents": True}
# fmt: off
UNRUN: list[tuple[Keys, str]] = [
    ({"engine": "pipe", "parallel.pp": 2, "parallel.zero": 2},
        "pipe does not run parallel.zero=2: set parallel.zero=1 or parallel.pp=1 engine=auto"),
    ({"engine": "pipe", "parallel.pp": 2, "parallel.schedule": "zb_h1"},
        "pipe does not run parallel.schedule=zb_h1: set parallel.schedule=1f1b or parallel.pp=1 engine=auto parallel.schedule=1f1b"),
    ({"engine": "native", "parallel.pp": 2, "parallel.dp": 8, "parallel.zero": 3, "parallel.schedule": "zb_h1", "parallel.gather": "micro"},
        ("native does not run parallel.zero=3 with parallel.schedule=zb_h1 and parallel.gather=micro: "
         "set parallel.gather=step or parallel.zero=2")),
    ({"engine": "native", "parallel.pp": 2, "parallel.zero": 3, "parallel.schedule": "dualpipev", "model.tied": True},
        ("native does not run parallel.zero=3 with parallel.schedule=dualpipev and model.tied=true: "
         "set parallel.zero=2 or parallel.schedule=1f1b")),
    ({"engine": "native", "parallel.pp": 2, "parallel.schedule": "zb_h1", "train.compile": True},
        "native does not run train.compile=true with parallel.schedule=zb_h1: set train.compile=false or parallel.schedule=1f1b"),
    ({"parallel.pp": 2, "parallel.schedule": "pipedream"},
        "native does not run model.tied=true with parallel.schedule=pipedream: set model.tied=false or parallel.schedule=1f1b"),
    (LATE | {"engine": "pipe"},
        "pipe does not run parallel.schedule=pipedream: set parallel.schedule=1f1b or parallel.pp=1 engine=auto parallel.schedule=1f1b"),
    (LATE | {"parallel.zero": 2},
        "native does not run parallel.zero=2 with parallel.schedule=pipedream: set parallel.zero=1 or parallel.schedule=1f1b"),
    (LATE | {"train.compile": True},
        "native does not run train.compile=true with parallel.schedule=pipedream: set train.compile=false or parallel.schedule=1f1b"),
    (LATE | {"train.precision": "fp16", "cluster.device.peak": {"fp16": 3e14, "bf16": 3e14}},
        "native does not run train.precision=fp16 with parallel.schedule=pipedream: set train.precision=bf16 or parallel.schedule=1f1b"),
    (LATE | {"data.documents": True},
        ("native does not run data.documents=true with parallel.schedule=pipedream: "
         "set parallel.schedule=pipedream_2bw or parallel.schedule=1f1b")),
    ({"engine": "zero", "parallel.pp": 2},             "zero does not run parallel.pp=2: set engine=auto or parallel.pp=1 engine=auto"),
    ({"engine": "pipe"},                               "pipe does not run parallel.pp=1: set engine=auto or parallel.pp=2"),
    ({"engine": "zero", "parallel.zero": 1, "parallel.shard": 2},
        "zero does not run parallel.shard=2: set engine=auto or parallel.shard=all"),
    ({"engine": "zero", "parallel.sync.every": 4},
        "zero does not run parallel.sync.every=4: set engine=auto or parallel.sync.every=1"),
    ({"parallel.zero": 1, "parallel.shard": 2, "parallel.sync.every": 4},
        "native does not run parallel.sync.every=4 with parallel.shard=2: set parallel.shard=all or parallel.sync.every=1"),
    ({"data.documents": True, "parallel.sync.every": 4},
        "native does not run parallel.sync.every=4 with data.documents=true: set data.documents=false or parallel.sync.every=1"),
    (LATE | {"parallel.sync.every": 4},
        ("native does not run parallel.sync.every=4 with parallel.schedule=pipedream: "
         "set parallel.schedule=1f1b or parallel.sync.every=1")),
    ({"parallel.reduce": "tree"},
        "zero does not run parallel.reduce=tree: set parallel.reduce=auto or parallel.reduce=ring"),
    ({"engine": "zero", "parallel.reduce": "server"},
        "zero does not run parallel.reduce=server: set engine=auto or parallel.reduce=ring"),
    ({"parallel.reduce": "server", "parallel.zero": 1},
        "native does not run parallel.reduce=server with parallel.zero=1: set parallel.zero=0 or parallel.reduce=ring"),
    ({"parallel.reduce": "hierarchical", "parallel.staleness": 1},
        ("native does not run parallel.reduce=hierarchical with parallel.staleness=1: "
         "set parallel.staleness=0 or parallel.reduce=ring")),
    ({"parallel.reduce": "server", "parallel.sync.every": 4},
        ("native does not run parallel.reduce=server with parallel.sync.every=4: "
         "set parallel.sync.every=1 or parallel.reduce=ring")),
    (MOE | {"parallel.ep": 4, "parallel.reduce": "server"},
        "native does not run parallel.reduce=server with parallel.ep=4: set parallel.ep=1 or parallel.reduce=ring"),
    (PREFERENCES | {"engine": "native", "parallel.staleness": 1},
        ("native does not run data.name=preferences with parallel.staleness=1: "
         "set parallel.staleness=0")),
    (PREFERENCES | LATE | {"parallel.schedule": "pipedream_2bw"},
        ("native does not run data.name=preferences with parallel.schedule=pipedream_2bw: "
         "set parallel.schedule=1f1b")),
    (PREFERENCES | {"engine": "native", "parallel.compress.name": "powersgd"},
        ("native does not run data.name=preferences with parallel.compress.name=powersgd: "
         "set parallel.compress.name=none")),
    (PREFERENCES | {"engine": "native", "parallel.sync.every": 4},
        ("native does not run parallel.sync.every=4 with data.name=preferences: "
         "set parallel.sync.every=1")),
    ({"engine": "zero", "parallel.staleness": 1},
        "zero does not run parallel.staleness=1: set engine=auto or parallel.staleness=0"),
    ({"parallel.staleness": 1, "parallel.zero": 2},
        "native does not run parallel.staleness=1 with parallel.zero=2: set parallel.zero=1 or parallel.staleness=0"),
    ({"parallel.staleness": 1, "parallel.zero": 1, "parallel.shard": 2},
        "native does not run parallel.staleness=1 with parallel.shard=2: set parallel.shard=all or parallel.staleness=0"),
    ({"parallel.staleness": 1, "parallel.sync.every": 4},
        "native does not run parallel.staleness=1 with parallel.sync.every=4: set parallel.sync.every=1 or parallel.staleness=0"),
    ({"parallel.staleness": 1, "parallel.compress.name": "powersgd"},
        ("native does not run parallel.compress.name=powersgd with parallel.staleness=1: "
         "set parallel.staleness=0 or parallel.compress.name=none")),
    (LATE | {"parallel.staleness": 1},
        "native does not run parallel.staleness=1 with parallel.schedule=pipedream: set parallel.schedule=1f1b or parallel.staleness=0"),
    (STEPPED | {"parallel.staleness": 1},
        ("native does not run model.router.bias_rate=0.001 with parallel.staleness=1: "
         "set parallel.staleness=0 or model.router.bias_rate=0")),
    (STEPPED | {"parallel.sync.every": 4},
        ("native does not run model.router.bias_rate=0.001 with parallel.sync.every=4: "
         "set parallel.sync.every=1 or model.router.bias_rate=0")),
    (STEPPED | LATE,
        ("native does not run model.router.bias_rate=0.001 with parallel.schedule=pipedream: "
         "set parallel.schedule=1f1b or model.router.bias_rate=0")),
    (LATE | {"model.mtp.layers": 1},
        ("native does not run model.mtp.layers=1 with parallel.schedule=pipedream: "
         "set model.mtp.layers=0 or parallel.schedule=1f1b")),
    (LATE | {"engine": "native", "parallel.zero": 3, "parallel.schedule": "dualpipev", "model.mtp.layers": 1},
        ("native does not run parallel.zero=3 with parallel.schedule=dualpipev and model.mtp.layers=1: "
         "set parallel.zero=2 or parallel.schedule=1f1b")),
    ({"parallel.tp": 2, "parallel.pp": 2, "parallel.scatter": True},
        "pipe does not run parallel.scatter=true: set parallel.scatter=false or parallel.scatter=false parallel.sequence=true"),
    ({"parallel.pp": 2, "parallel.zero": 1, "parallel.offload.optimizer": True, "engine": "pipe"},
        "pipe does not run parallel.offload.optimizer=true: set parallel.offload.optimizer=false or engine=auto"),
    ({"parallel.zero": 3, "parallel.offload": Offload(parameters=True), "engine": "native"},
        ("native does not run parallel.offload.parameters=true with parallel.offload.optimizer=false: "
         "set parallel.offload.optimizer=true or parallel.offload.parameters=false")),
    ({"parallel.zero": 3, "parallel.offload": Offload(optimizer=True, parameters=True), "engine": "native", "parallel.shard": 2},
        ("native does not run parallel.offload.parameters=true with parallel.shard=2: "
         "set parallel.shard=all or parallel.offload.parameters=false")),
    ({"parallel.zero": 3, "parallel.offload": Offload(optimizer=True, parameters=True), "engine": "native", "parallel.gather": "step"},
        ("native does not run parallel.offload.parameters=true with parallel.gather=step: "
         "set parallel.gather=micro or parallel.offload.parameters=false")),
    ({"parallel.zero": 3, "parallel.offload": Offload(optimizer=True, parameters=True), "engine": "native", "parallel.pp": 2},
        ("native does not run parallel.offload.parameters=true with parallel.pp=2: "
         "set parallel.gather=micro or parallel.offload.parameters=false")),
    ({"engine": "zero", "optim.moments": "bf16"},
        "zero does not run optim.moments=bf16: set engine=auto or engine=native"),
    ({"parallel.zero": 1, "parallel.offload.optimizer": True, "engine": "native", "optim.name": "sgd"},
        ("native does not run parallel.offload.optimizer=true with optim.name=sgd: "
         "set optim.name=adamw or parallel.offload.optimizer=false")),
    (LATE | {"parallel.zero": 1, "parallel.offload.optimizer": True},
        ("native does not run parallel.offload.optimizer=true with parallel.schedule=pipedream: "
         "set parallel.schedule=1f1b or parallel.offload.optimizer=false")),
    ({"parallel.zero": 1, "parallel.offload.optimizer": True, "parallel.staleness": 1},
        ("native does not run parallel.offload.optimizer=true with parallel.staleness=1: "
         "set parallel.staleness=0 or parallel.offload.optimizer=false")),
    ({"parallel.zero": 1, "parallel.offload.optimizer": True, "parallel.sync.every": 4},
        ("native does not run parallel.offload.optimizer=true with parallel.sync.every=4: "
         "set parallel.sync.every=1 or parallel.offload.optimizer=false")),
    ({"parallel.tp": 2, "parallel.sequence": True, "parallel.zero": 1, "parallel.offload.optimizer": True, "engine": "zero"},
        ("zero does not run parallel.offload.optimizer=true with parallel.sequence=true: "
         "set parallel.sequence=false or parallel.offload.optimizer=false")),
    ({"parallel.tp": 8, "model.heads": 16, "model.kv_heads": 4, "parallel.zero": 1, "parallel.offload.optimizer": True, "engine": "zero"},
        ("zero does not run parallel.offload.optimizer=true with more tensor-parallel ranks than model.kv_heads=4: "
         "set parallel.tp=4 or parallel.offload.optimizer=false")),
    ({"cluster.device.peak": {"fp4": 6e14, "bf16": 3e14}, "train.precision": "fp4"},
        "zero does not run train.precision=fp4: set train.precision=bf16"),
    ({"cluster.device.peak": {"fp8": 6e14, "bf16": 3e14}, "train.precision": "fp8", "engine": "zero"},
        "zero does not run train.precision=fp8: set train.precision=bf16"),
    ({"cluster.device.peak": {"fp8": 6e14, "bf16": 3e14}, "train.precision": "fp8", "model.lora.rank": 16},
        "native does not run train.precision=fp8 with model.lora.rank=16: set train.precision=bf16"),
    (MOE | {"engine": "zero", "parallel.ep": 4, "parallel.zero": 3},
        "zero does not run parallel.zero=3 with parallel.ep=4: set engine=auto or parallel.zero=2"),
    ({"model.family": "bert"},                         "zero does not run model.family=bert: it runs gpt, hf, hybrid, llama, mla or moe"),
]
# fmt: on


@pytest.mark.parametrize(("keys", "says"), UNRUN, ids=[says for _, says in UNRUN])
def test_a_layout_that_no_engine_runs_is_planned_with_a_warning(keys: Keys, says: str) -> None:
    plan = make_plan(with_changes(BASE, keys.items()))
    assert (plan.ok, plan.fits, plan.runnable) == (True, True, False)
    assert [str(each) for each in plan.warnings if each.rule == "engine"] == [f"engine {says}"]


@pytest.mark.parametrize(("keys", "says"), UNRUN, ids=[says for _, says in UNRUN])
def test_every_layout_shown_instead_of_one_that_no_engine_runs_is_run(keys: Keys, says: str) -> None:
    run = with_changes(BASE, keys.items())
    (problem,) = (each for each in make_plan(run).warnings if each.rule == "engine")
    for change in problem.changes:
        after = make_plan(fixed_run(run, change))
        assert (after.problems, after.fits, after.runnable) == ((), True, True)


def test_of_two_limits_each_is_reported_with_its_fix() -> None:
    plan = make_plan(with_changes(BASE, [("parallel.pp", 2), ("parallel.zero", 2), ("parallel.reduce", "tree")]))
    told = {each.says: each.mend for each in plan.warnings if each.rule == "engine"}
    assert told == {
        "engine pipe does not run parallel.zero=2": "set parallel.zero=1 or parallel.pp=1",
        "engine pipe does not run parallel.reduce=tree": "set parallel.reduce=auto or parallel.reduce=ring",
    }


def test_a_layout_that_does_not_fit_is_not_shown_for_one_that_does() -> None:
    """39e9 parameters fit on 8 stages, and not on one, whose ranks hold all weights."""
    keys: Keys = {"model": gpt(48, 8192, 64), "engine": "pipe", "parallel.pp": 8, "parallel.zero": 2}
    keys |= {"cluster.nodes": 8, "train.microbatch": 1}
    plan = make_plan(with_changes(BASE, keys.items()))
    assert plan.fits
    assert [each.changes for each in plan.warnings if each.rule == "engine"] == [(("parallel.zero=1",),)]


@pytest.mark.parametrize("warning", WARNINGS, ids=lambda warning: warning.__name__)
def test_every_warning_is_provoked(warning: Any) -> None:
    provoked = [keys for _, keys, _ in COSTLY] + [keys for keys, _ in UNRUN] + [{"cluster.device.memory": PEAK}, HF]
    for run in (with_changes(BASE, keys.items()) for keys in provoked):
        frame = CostContext(run)
        layout = layout_of_run(frame, run.parallel, run.train.microbatch)
        if list(warning(frame, layout, layout_cost(frame, layout), make_plan(run).throughput)):
            return
    pytest.fail("no run of this file provokes this warning")
