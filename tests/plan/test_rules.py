"""Problems and warnings of a plan: every rule is broken, every printed fix applied, every warning provoked."""

import re
from dataclasses import fields
from typing import Any

import pytest

from distrain.trainer.plan.changed_run import with_changes
from distrain.trainer.plan.cost_context import CostContext
from distrain.trainer.plan.estimate import Estimator
from distrain.trainer.plan.layout_cost import layout_cost
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules import OF_LAYOUT, OF_RUN
from distrain.trainer.plan.run_layout import run_layout
from distrain.trainer.plan.warnings import WARNINGS
from distrain.trainer.spec.key_units import gib_text
from distrain.trainer.spec.problem import Problem
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
THEIRS = Model(family="hf", layers=2, hidden=64, heads=4, vocab=256, context=1024, hf="x", parameters={"a": (256, 64), "b": (64,)})
HF: Keys = {"model": THEIRS}
ROUNDS: Keys = {"parallel.schedule": "interleaved"}
FOLDED: Keys = {"parallel.schedule": "dualpipev"}


def value(word: str) -> object:
    """Return the value of a command-line override."""
    known: dict[str, object] = {"true": True, "false": False, "null": None}
    if word in known:
        return known[word]
    if word.startswith("["):
        return tuple(map(int, word.strip("[]").split(",")))
    if re.fullmatch(r"[\d.]+e-\d+", word):
        return float(word)
    return int(word) if re.fullmatch(r"-?\d+", word) else word


def fixed_run(run: Run, change: tuple[str, ...]) -> Run:
    """Return the run with the overrides of a printed change."""
    return with_changes(run, [(key, value(word)) for key, _, word in (each.partition("=") for each in change)])


# fmt: off
BROKEN: list[tuple[Keys, str]] = [
    ({"model.family": "gtp"},
        "model.family=gtp is not known: did you mean gpt?"),
    ({"engine": "zeor"},
        "engine=zeor is not known: did you mean zero?"),
    ({"parallel.schedule": "interleave"},
        "parallel.schedule=interleave is not known: did you mean interleaved?"),
    ({"model.heads": 13},
        "model.heads=13 does not divide model.hidden=768: set model.heads=12 or model.heads=16 or model.heads=8"),
    ({"model.kv_heads": 5},
        "model.kv_heads=5 does not divide model.heads=12: set model.kv_heads=4 or model.kv_heads=6 or model.kv_heads=3"),
    ({"model.context": 512},
        "train.seq=1024 is longer than model.context=512, the length of the position table: set train.seq=512 or model.context=1024"),
    ({"model.family": "hf"},
        "family hf has no sizes of its own: set model.hf to the path of a config.json"),
    (HF | {"train.seq": 2048},
        "train.seq=2048 is longer than the 1024 tokens of its config.json: set train.seq=1024"),
    (HF | {"model.dropout": 0.1},
        "model.dropout=0.1: dropout of family hf is not keyed by train.seed and differs between layouts: set model.dropout=0"),
    (HF | {"model.weights": "x"},
        "model.weights: a model of family hf can't start from given weights: set model.weights=null"),
    (HF | {"data.documents": True},
        "data.documents=true: attention of family hf crosses document boundaries: set data.documents=false"),
    (HF | {"parallel.tp": 2},
        "parallel.tp=2 does not apply to family hf, which trains with data parallelism and ZeRO only: set parallel.tp=1"),
    (HF | {"parallel.pp": 2, "parallel.dp": 8},
        "parallel.pp=2 does not apply to family hf, which trains with data parallelism and ZeRO only: set parallel.pp=1 parallel.dp=auto"),
    (HF | {"parallel.recompute": "full"},
        "parallel.recompute=full: family hf saves all activations: set parallel.recompute=none"),
    ({"model.experts": 8},
        "model.experts=8 is for family moe, not gpt: set model.experts=0"),
    ({"parallel.ep": 2},
        "parallel.ep=2 splits experts, and family gpt has none: set parallel.ep=1"),
    (MOE | {"model.experts": 0},
        "model.experts=0: family moe has at least one expert: set model.experts"),
    (MOE | {"model.top_k": 9},
        "model.top_k=9 is not from 1 to model.experts=8: set model.top_k=2"),
    (MOE | {"model.experts": 9, "parallel.ep": 2},
        "parallel.ep=2 does not divide model.experts=9: set parallel.ep=1"),
    (MOE | {"parallel.ep": 8, "parallel.tp": 4},
        "parallel.ep=8 does not divide parallel.dp=4, whose ranks hold the experts: set parallel.ep=4 or parallel.ep=2 or parallel.ep=1"),
    ({"parallel.tp": 3},
        "tp 3 x cp 1 x pp 1 = 3 does not divide: the cluster has 2 x 8 = 16 devices: set parallel.tp=2 or parallel.tp=1"),
    ({"parallel.tp": 4, "parallel.pp": 8},
        ("tp 4 x cp 1 x pp 8 = 32 does not divide: the cluster has 2 x 8 = 16 devices: "
         "set cluster.nodes=4 or parallel.pp=4 or parallel.pp=2")),
    ({"parallel.dp": 4},
        "parallel.dp=4 x tp 1 x cp 1 x pp 1 = 4, but the cluster has 2 x 8 = 16 devices: set parallel.dp=16 or parallel.dp=auto"),
    ({"parallel.dp": 32},
        ("parallel.dp=32 x tp 1 x cp 1 x pp 1 = 32, but the cluster has 2 x 8 = 16 devices: "
         "set parallel.dp=16 or cluster.nodes=4 or parallel.dp=auto")),
    ({"parallel.shard": 3},
        "parallel.shard=3 does not divide dp 16 x cp 1 = 16: set parallel.shard=2 or parallel.shard=4 or parallel.shard=1"),
    (MOE | {"parallel.ep": 4, "parallel.shard": 2},
        "parallel.shard=2 is not a multiple of parallel.ep=4: set parallel.shard=all"),
    ({"parallel.tp": 4, "parallel.sequence": True, "train.seq": 1022},
        "parallel.sequence does not split train.seq=1022 over tp 4 x cp 1 evenly: set parallel.sequence=false"),
    ({"parallel.cp": 4, "train.seq": 1012},
        "parallel.cp=4: train.seq=1012 is not a multiple of 2 x cp: set parallel.cp=2 or parallel.cp=1"),
    ({"parallel.pp": 16},
        "parallel.pp=16 is more than model.layers=12: set parallel.pp=4"),
    (ROUNDS | {"parallel.pp": 4, "parallel.chunks": 4},
        "parallel.pp=4 x parallel.chunks=4 is more than model.layers=12: set parallel.chunks=3 or parallel.pp=2"),
    ({"parallel.pp": 2, "parallel.chunks": 2},
        "parallel.chunks=2 is for schedule interleaved, not 1f1b: set parallel.schedule=interleaved or parallel.chunks=1"),
    (ROUNDS | {"parallel.pp": 2},
        ("parallel.schedule=interleaved needs parallel.chunks of 2 or more: "
         "set parallel.chunks=2 or parallel.schedule=1f1b parallel.chunks=1")),
    (ROUNDS | {"parallel.pp": 4, "parallel.chunks": 3, "train.batch": 40},
        ("5 micro-batches a step are not a multiple of parallel.pp=4, which schedule interleaved needs: "
         "set train.batch=64 or parallel.schedule=1f1b parallel.chunks=1")),
    (FOLDED | {"parallel.pp": 8},
        ("parallel.schedule=dualpipev needs 2 x parallel.pp=8 parts, more than model.layers=12: "
         "set parallel.schedule=1f1b or parallel.pp=4")),
    (FOLDED | {"parallel.pp": 4, "train.batch": 40},
        ("5 micro-batches a step are fewer than 2 x parallel.pp=4, which schedule dualpipev needs: "
         "set train.batch=64 or parallel.schedule=1f1b")),
    ({"parallel.pp": 2, "parallel.chunks": 2, "parallel.schedule": "dualpipev"},
        "parallel.chunks=2 is for schedule interleaved, not dualpipev: set parallel.schedule=interleaved or parallel.chunks=1"),
    ({"train.batch": 240},
        "train.batch=240 is not a multiple of dp 16 x train.microbatch=2: set train.microbatch=1 or train.batch=256"),
    ({"train.batch": 250},
        "train.batch=250 is not a multiple of dp 16 x train.microbatch=2: set train.batch=256"),
    ({"train.steps": None},
        "neither train.steps nor train.tokens is set: set one of them"),
    ({"train.tokens": 1e9},
        "train.steps=100 and train.tokens=1e+09 are both set: a run has one length: set train.tokens=null or train.steps=null"),
    ({"optim.warmup": 100},
        "optim.warmup=100 is not shorter than train.steps=100: set optim.warmup=10"),
    ({"train.precision": "fp16"},
        "train.precision=fp16: A100 does not compute in fp16: set train.precision=bf16 or train.precision=fp32"),
    ({"train.gradients": "fp16"},
        "train.gradients=fp16 is not supported with train.precision=bf16: set train.gradients=auto or train.gradients=fp32"),
    ({"parallel.offload.optimizer": True},
        "parallel.offload.optimizer=true needs parallel.zero of 1 or more: set parallel.zero=1"),
    ({"parallel.offload.parameters": True, "parallel.zero": 1},
        "parallel.offload.parameters=true needs parallel.zero=3, not 1: set parallel.zero=3"),
    ({"name": "../../zz"},
        "name=../../zz contains /, but names one folder: write one word, as name=my_run: it names the run's folder in log.dir"),
    ({"log.dir": ""},
        "log.dir= is empty: name a folder, as log.dir=runs"),
    ({"optim.min_lr": 0.1},
        "optim.min_lr=0.1 is above optim.lr=0.0003: optim.schedule=cosine would raise the rate: set optim.min_lr=3e-05"),
    ({"log.profile": (5, 2)},
        "log.profile=[5,2]: its first step is after its last: set log.profile=[2,5]"),
    ({"log.profile": (0, 0)},
        "log.profile=[0,0]: steps are counted from 1: set log.profile=[1,1]"),
    ({"parallel.pp": 20_000, "model": Model(family="gpt", layers=20_000, hidden=16, heads=2, vocab=512), "cluster.nodes": 2500},
        "parallel.pp=20000 is more than the 10,000 stages that a plan has: set parallel.pp=1 train.batch=40000"),
    ({"cluster.nodes": 1000, "parallel.tp": 2, "parallel.dp": 4000, "model.layers": 300, "parallel.zero": 1, "train.batch": 8000,
      "parallel.cp": 2, "cluster.gpus": 16},
        ("with ZeRO 1 the fullest of 8,000 ranks that shard 300 layers is not planned: set parallel.zero=3")),
    (MOE | {"cluster.nodes": 100_000, "cluster.gpus": 6, "parallel.ep": 4, "parallel.cp": 4, "train.batch": 2_400_000},
        ("parallel.ep=4 x parallel.cp=4 does not align with nodes of 6: the links of 600,000 such ranks are not planned: "
         "set parallel.cp=1")),
    ({"cluster.device.memory": "auto"},
        "cluster.device.memory=auto: the memory of A100 is not known: set it in bytes"),
]
# fmt: on


def test_a_run_that_breaks_no_rule_has_no_problem_and_no_warning() -> None:
    plan = make_plan(BASE)
    assert (plan.ok, plan.fits, plan.problems, plan.warnings) == (True, True, (), ())


@pytest.mark.parametrize("rule", OF_RUN + OF_LAYOUT, ids=lambda rule: rule.__name__)
def test_every_rule_is_broken_below(rule: Any) -> None:
    runs = [with_changes(BASE, keys.items()) for keys, _ in BROKEN]
    assert any(list(rule(run, run.parallel, run.train.microbatch)) for run in runs)


@pytest.mark.parametrize(("keys", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_a_broken_rule_is_reported_with_its_fix(keys: Keys, says: str) -> None:
    plan = make_plan(with_changes(BASE, keys.items()))
    assert says in map(str, plan.problems)
    assert (plan.ok, plan.fits, plan.runnable, plan.memory, plan.traffic, plan.time) == (False, None, False, None, (), None)


@pytest.mark.parametrize(("keys", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_every_printed_fix_works_and_breaks_nothing(keys: Keys, says: str) -> None:
    run = with_changes(BASE, keys.items())
    before = make_plan(run).problems
    (problem,) = (each for each in before if str(each) == says)
    for change in problem.changes:
        after = {each.says for each in make_plan(fixed_run(run, change)).problems}
        assert problem.says not in after
        assert after <= {each.says for each in before}


def test_a_change_is_printed_as_it_is_listed() -> None:
    for keys, _ in BROKEN:
        for problem in make_plan(with_changes(BASE, keys.items())).problems:
            if problem.changes:
                assert problem.mend == "set " + " or ".join(map(" ".join, problem.changes))


def test_shared_and_padded_heads_are_both_reported() -> None:
    plan = make_plan(with_changes(BASE, [("parallel.tp", 8), ("model.kv_heads", 4)]))
    assert [str(each) for each in plan.warnings] == [
        "model.heads=12 is padded to 16 so that tp 8 splits it: 25 % of attention's products are padding",
        "parallel.tp=8 is more than model.kv_heads=4: each is held by 2 ranks",
    ]


def test_all_problems_are_reported_at_once() -> None:
    keys: Keys = {"model.kv_heads": 5, "train.batch": 250, "parallel.shard": 3, "optim.warmup": 100, "parallel.offload.optimizer": True}
    rules = [each.rule for each in make_plan(with_changes(BASE, keys.items())).problems]
    assert sorted(rules) == ["batch", "kv_heads", "offload", "shard", "warmup"]


def test_a_fix_is_shown_though_another_problem_stays() -> None:
    plan = make_plan(with_changes(BASE, [("train.batch", 240), ("optim.warmup", 100)]))
    assert {each.rule: each.changes[0] for each in plan.problems} == {"batch": ("train.microbatch=1",), "warmup": ("optim.warmup=10",)}


def test_a_change_that_would_break_another_rule_is_not_shown() -> None:
    """Stages of 12 layers are at most 12, and 6, a divisor that is near, does not divide 16 devices."""
    keys: Keys = {"parallel.pp": 16}
    assert [each.changes for each in make_plan(with_changes(BASE, keys.items())).problems] == [(("parallel.pp=4",),)]


# Memory.


def gpt(layers: int, hidden: int, heads: int) -> Model:
    return Model(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, bias=True, tied=True, dropout=0.1)


LLAMA = Model(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, norm="rmsnorm", act="swiglu", positions="rope"
)
MIXTRAL = Model(
    family="moe", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, positions="rope", act="swiglu", experts=8, top_k=2
)
WIDE, SEVEN = gpt(96, 12288, 96), gpt(32, 4096, 32)

# Runs that don't fit, and how many keys the smallest change takes that does (None: none does).
# fmt: off
FULL: dict[str, tuple[Keys, int | None]] = {
    "nothing sharded":         ({"model": SEVEN},                                                                             1),
    "attention's scores":      ({"model": SEVEN, "train.attention": "math", "parallel.zero": 3, "train.seq": 4096},           1),
    "a large micro-batch":     ({"model": SEVEN, "parallel.zero": 3, "train.microbatch": 16},                                 1),
    "a small device":          ({"model": gpt(24, 2048, 16), "cluster.device.memory": 16e9},                                  1),
    "a long sequence":         ({"model": SEVEN, "parallel.zero": 3, "train.seq": 16384},                                     1),
    "tensor parallel's whole": ({"model": gpt(64, 8192, 64), "parallel.tp": 8, "parallel.zero": 3, "train.microbatch": 8},  1),
    "all of gpipe's forwards": ({"model": SEVEN, "parallel.pp": 2, "parallel.tp": 8, "parallel.schedule": "gpipe"},           1),
    "a data degree that is set": ({"model": SEVEN, "parallel.dp": 16, "train.seq": 4096},                                     1),
    "too few stages":          ({"model": WIDE, "cluster.nodes": 16, "parallel.tp": 8, "parallel.pp": 4},                     1),
    "a mixture":               ({"model": MIXTRAL},                                                                           1),
    "experts split":           ({"model": MIXTRAL, "parallel.ep": 8, "train.seq": 4096},                                      2),
    "a hybrid shard":          ({"model": WIDE, "parallel.zero": 3, "parallel.shard": 2, "cluster.nodes": 8},                 2),
    "a long context":          ({"model": LLAMA, "train.seq": 65536, "train.microbatch": 1, "train.batch": 16},               2),
    "an offloaded optimizer":  ({"model": WIDE, "parallel.zero": 1, "parallel.offload.optimizer": True},                      2),
    "175B on two nodes":       ({"model": WIDE, "train.microbatch": 1},                                                       3),
    "175B on one device":      ({"model": WIDE, "train.microbatch": 1, "cluster.nodes": 1, "cluster.gpus": 1},                3),
    "1T on one device that is set": ({"model": gpt(128, 25600, 160), "cluster.nodes": 1, "cluster.gpus": 1, "parallel.dp": 1}, None),
}
# fmt: on

# What is tried, smallest first: the order that trainer/plan/fixes.py states.
ORDER = (
    "parallel.recompute=selective",
    "parallel.schedule=1f1b",
    "parallel.shard=all",
    "parallel.sequence",
    "parallel.zero",
    "train.microbatch",
    "parallel.recompute=full",
    "train.attention",
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.offload",
    "cluster.nodes",
)


def full(name: str) -> tuple[Run, Problem]:
    run = with_changes(BASE, FULL[name][0].items())
    plan = make_plan(run)
    assert (plan.ok, plan.fits) == (True, False)
    (problem,) = plan.problems
    return run, problem


def steps(change: tuple[str, ...]) -> list[int]:
    """The places in the order of a change's keys, but for a data degree that follows another."""
    return [next(at for at, each in enumerate(ORDER) if word.startswith(each)) for word in change if not word.startswith("parallel.dp")]


@pytest.mark.parametrize("name", FULL)
def test_a_run_that_does_not_fit_is_reported_with_its_largest_kinds_of_memory(name: str) -> None:
    run, problem = full(name)
    memory = make_plan(run).memory
    assert memory is not None
    held = memory.stages[memory.stage].bytes
    said = re.fullmatch(rf"needs {gib_text(memory.peak)} GiB of {gib_text(memory.capacity)} on stage {memory.stage}: (.*)", problem.says)
    assert said is not None
    told = [each.split() for each in said[1].split(", ")]
    kinds = {row.name: getattr(held, row.name) for row in fields(held) if row.name != "total"}
    assert [word for _, word in told] == [gib_text(kinds[kind]) for kind, _ in told]
    assert [kinds[kind] for kind, _ in told] == sorted(kinds.values())[:-4:-1]


@pytest.mark.parametrize("name", FULL)
def test_every_fitting_change_fits_in_the_bytes_shown(name: str) -> None:
    run, problem = full(name)
    before = make_plan(run)
    told = []
    for change in problem.changes:
        after = make_plan(fixed_run(run, change))
        assert (after.problems, after.fits) == ((), True)
        assert after.memory is not None
        assert before.engine is None or after.engine is not None
        told.append(f"{' '.join(change)} ({gib_text(after.memory.peak)})")
    assert problem.mend == ("fits with " + " or ".join(told) if told else "no change of layout was found that fits on this cluster")


@pytest.mark.parametrize("name", FULL)
def test_the_smallest_changes_come_first(name: str) -> None:
    _, problem = full(name)
    places = [steps(change) for change in problem.changes]
    assert [len(each) for each in places] == [FULL[name][1]] * len(places)
    assert places == sorted(places) or ORDER.index("cluster.nodes") in places[0]
    assert (not places) == (FULL[name][1] is None)


@pytest.mark.parametrize("name", FULL)
def test_no_single_change_fits_where_several_keys_are_shown(name: str) -> None:
    keys, least = FULL[name]
    if least == 1:
        return
    run = with_changes(BASE, keys.items())
    for key, word in (("recompute", "selective"), ("recompute", "full"), ("sequence", True), ("zero", 1), ("zero", 2), ("zero", 3)):
        assert not make_plan(with_changes(run, [(f"parallel.{key}", word)])).fits


def test_one_of_the_sentences_in_full() -> None:
    _, problem = full("nothing sharded")
    assert re.fullmatch(
        r"needs 1\d\d\.\d GiB of 74\.5 on stage 0: optimizer \d+\.\d, (weights|gradients) \d+\.\d, (weights|gradients) \d+\.\d: "
        r"fits with parallel\.zero=1 \(\d+\.\d\) or parallel\.zero=2 \(\d+\.\d\) or parallel\.zero=3 \(\d+\.\d\)",
        str(problem),
    )


# Warnings: what runs but hurts.

# fmt: off
HURTS: list[tuple[str, Keys, str]] = [
    ("time", {"cluster.device.peak": {}},
        "no times: how fast A100 is in bf16 is not stated: "),
    ("time", {"cluster.inside": None},
        "no times: cluster.inside is not stated: set cluster.inside.bandwidth (bytes/s per GPU and direction) and .latency (seconds)"),
    ("time", {"cluster.between": None},
        "no times: cluster.between is not stated: set cluster.between.bandwidth (bytes/s per GPU and direction) and .latency (seconds)"),
    ("time", {"parallel.zero": 1, "parallel.offload.optimizer": True},
        "no times: the speed of an offloaded optimizer step is not known"),
    ("routing", MOE | {"parallel.ep": 4},
        "memory, messages and times of expert ranks are planned for even routing, 8 experts over 4 ranks"),
    ("capacity", MOE | {"model.capacity": 1.25},
        "model.capacity=1.25: planned as if no token were dropped"),
    ("tp", {"cluster.gpus": 2, "cluster.nodes": 8, "parallel.tp": 4},
        "parallel.tp=4 crosses nodes of 2: every layer waits for the link between nodes: "),
    ("link", {"cluster.inside.bandwidth": 9e6},
        "cluster.inside.bandwidth=9e+06 is 9e+06 bytes/s: bytes/s per GPU and direction, write it as 300e9 or 300GB/s"),
    ("link", {"cluster.between.latency": 5.0},
        "cluster.between.latency=5 is 5 s: write 5us for microseconds"),
    ("bubble", {"parallel.pp": 4, "train.batch": 32},
        "the pipeline idles "),
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
    ("idle", {"parallel.sequence": True},
        "parallel.sequence=true does nothing with parallel.tp=1"),
    ("recompute", {"parallel.recompute": "selective"},
        "parallel.recompute=selective with train.attention=flash: flash attention stores no scores: "),
    ("mfu", {"cluster.device.name": "Z9000"},
        "no measured run of Z9000 in bf16 is known: its MFU is calculated only"),
    ("mfu", {"cluster.device.bandwidth": 1e15, "cluster.device.sustained": 1.0, "cluster.device.memory": 1e13, "train.compile": True,
             "model": gpt(2, 12288, 96)},
        "an MFU of "),
]
# fmt: on


@pytest.mark.parametrize(("rule", "keys", "says"), HURTS, ids=[f"{rule}: {says}" for rule, _, says in HURTS])
def test_a_warning_appears_once_and_alone(rule: str, keys: Keys, says: str) -> None:
    plan = make_plan(with_changes(BASE, keys.items()))
    assert plan.ok
    assert [each.rule for each in plan.warnings] == [rule]
    assert str(plan.warnings[0]).startswith(says)


PEAK = Estimator(BASE)(BASE.parallel, BASE.train.microbatch).peak or 0


@pytest.mark.parametrize(("share", "said"), [(0.94, []), (0.96, ["tight"]), (1.0, ["tight"])])
def test_a_nearly_full_device_is_warned_of(share: float, said: list[str]) -> None:
    plan = make_plan(with_changes(BASE, [("cluster.device.memory", PEAK / share)]))
    assert plan.fits
    assert [each.rule for each in plan.warnings] == said


# fmt: off
UNRUN: list[tuple[Keys, str]] = [
    ({"parallel.pp": 2, "parallel.zero": 2},           "pipe does not run parallel.zero=2: set parallel.zero=1 or parallel.pp=1"),
    ({"parallel.pp": 2, "parallel.dp": 8, "parallel.zero": 3},
        "pipe does not run parallel.zero=3: set parallel.zero=1 or parallel.pp=1 parallel.dp=auto"),
    ({"parallel.pp": 2, "parallel.schedule": "zb_h1"},
        "pipe does not run parallel.schedule=zb_h1: set parallel.schedule=1f1b or parallel.pp=1 parallel.schedule=1f1b"),
    (ROUNDS | {"parallel.pp": 2, "parallel.chunks": 2},
        ("pipe does not run parallel.schedule=interleaved: "
         "set parallel.schedule=1f1b parallel.chunks=1 or parallel.pp=1 parallel.schedule=1f1b parallel.chunks=1")),
    ({"engine": "zero", "parallel.pp": 2},             "zero does not run parallel.pp=2: set engine=auto or parallel.pp=1 engine=auto"),
    ({"engine": "pipe"},                               "pipe does not run parallel.pp=1: set engine=auto or parallel.pp=2"),
    ({"parallel.zero": 1, "parallel.shard": 2},        "zero does not run parallel.shard=2: set parallel.shard=all or parallel.zero=0"),
    ({"parallel.reduce": "server"},                    "zero does not run parallel.reduce=server: set parallel.reduce=ring"),
    ({"parallel.tp": 2, "parallel.pp": 2, "parallel.scatter": True},
        "pipe does not run parallel.scatter=true: set parallel.scatter=false or parallel.scatter=false parallel.sequence=true"),
    ({"parallel.pp": 2, "parallel.zero": 1, "parallel.offload.optimizer": True},
        "pipe does not run parallel.offload=true: set parallel.offload.optimizer=false or parallel.pp=1"),
    ({"parallel.tp": 2, "parallel.sequence": True, "parallel.zero": 1, "parallel.offload.optimizer": True},
        ("zero does not run parallel.offload=true with parallel.sequence=true: "
         "set parallel.sequence=false or parallel.offload.optimizer=false")),
    ({"parallel.tp": 8, "model.heads": 16, "model.kv_heads": 4, "parallel.zero": 1, "parallel.offload.optimizer": True},
        ("zero does not run parallel.offload=true with more tensor-parallel ranks than model.kv_heads=4: "
         "set parallel.tp=4 or parallel.offload.optimizer=false")),
    ({"cluster.device.peak": {"fp8": 6e14, "bf16": 3e14}, "train.precision": "fp8"},
        "zero does not run train.precision=fp8: set train.precision=bf16"),
    (MOE | {"parallel.ep": 4, "parallel.zero": 3},
        "zero does not run parallel.zero=3 with parallel.ep=4: set parallel.zero=2 or parallel.ep=1"),
    ({"model.family": "bert"},                         "zero does not run model.family=bert: it runs gpt, hf, llama or moe"),
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
    plan = make_plan(with_changes(BASE, [("parallel.pp", 2), ("parallel.zero", 2), ("parallel.reduce", "server")]))
    told = {each.says: each.mend for each in plan.warnings if each.rule == "engine"}
    assert told == {
        "engine pipe does not run parallel.zero=2": "set parallel.zero=1 or parallel.pp=1",
        "engine pipe does not run parallel.reduce=server": "set parallel.reduce=ring",
    }


def test_a_layout_that_does_not_fit_is_not_shown_for_one_that_does() -> None:
    """39e9 parameters fit on 8 stages, and not on one, whose ranks hold all weights."""
    keys: Keys = {"model": gpt(48, 8192, 64), "parallel.pp": 8, "parallel.zero": 2, "cluster.nodes": 8, "train.microbatch": 1}
    plan = make_plan(with_changes(BASE, keys.items()))
    assert plan.fits
    assert [each.changes for each in plan.warnings if each.rule == "engine"] == [(("parallel.zero=1",),)]


@pytest.mark.parametrize("warning", WARNINGS, ids=lambda warning: warning.__name__)
def test_every_warning_is_provoked_above(warning: Any) -> None:
    provoked = [keys for _, keys, _ in HURTS] + [keys for keys, _ in UNRUN] + [{"cluster.device.memory": PEAK}, HF]
    for run in (with_changes(BASE, keys.items()) for keys in provoked):
        frame = CostContext(run)
        layout = run_layout(frame, run.parallel, run.train.microbatch)
        if list(warning(frame, layout, layout_cost(frame, layout), make_plan(run).throughput)):
            return
    pytest.fail("no run above provokes this")
