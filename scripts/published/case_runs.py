"""A published case as a run: its configuration, with its framework's defaults for what it leaves unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import ceil, gcd
from typing import Any, NamedTuple

from ...cli.config.load import load_recipe
from ...trainer.models.mla.ops import LATENT
from ...trainer.plan.estimate import Estimator
from ...trainer.plan.rules.rules import broken_rules
from ...trainer.spec.run import Cluster, Link, Model, Overlap, Parallel, Run, Train
from .frameworks import Framework, framework_of

Case = Mapping[str, Any]

# (GPU, GB of memory) -> (conf/cluster, conf/device; None: the cluster's). A case that states no memory, or another, gets the first row.
CLUSTERS = {
    ("V100", 32): ("dgx_v100", None),
    ("V100", 16): ("dgx_v100", "v100_16g"),
    ("A100", 80): ("dgx_a100", None),
    ("A100", 40): ("dgx_a100", "a100_40g"),
    ("H100", 80): ("dgx_h100", None),
    ("H100", 96): ("dgx_h100", "h100_96g"),
    ("H200", 141): ("dgx_h200", None),
    ("B200", 180): ("dgx_b200", None),
    ("GB200", 186): ("gb200_nvl72", None),
    ("B300", 270): ("dgx_b300", None),
    ("GB300", 279): ("gb300_nvl72", None),
}
RACK = 64  # GPUs of a rack of 72 that jobs use whose size is a power of two
# Of selective recomputation that leaves out some of the products: the share of a layer, or of the layers, that runs again.
RECOMPUTED_SHARE = {
    "selective-op": 0.5,  # torchtitan's: every second product is saved
    "selective-layer": 0.25,  # fms-fsdp's selective checkpointing: one layer in some
}
# (kernel, first letter of the GPU): flash attention's rate, as a share of that of the device's best kernel. Triton's of 2023 has no
# instructions of Hopper.
ATTENTION_KERNELS = {("triton", "A"): 0.88, ("triton", "H"): 0.53}
FABRICS = {"OmniPath": 0.24, "RoCE": 0.71}  # share of a network's bandwidth that messages get; others, the cluster's
GPT_VOCAB = 51200  # GPT-2's 50257, padded as Megatron-LM pads it for 8 tensor-parallel ranks


class Inexpressible(ValueError):
    """A case that can't be planned, and why."""


class WeightedRun(NamedTuple):
    """A run, and the share of the model's layers that are as it says."""

    share: float
    run: Run


def runs_of_case(case: Case) -> tuple[WeightedRun, ...]:
    """Return the run of a case; two, where only some of its layers are recomputed. Raises Inexpressible."""
    framework = framework_of(case["framework"] or "")
    if case["recompute"] is None and framework.recompute == "fit":
        return (WeightedRun(1.0, _least_recompute(case, framework)),)
    share = RECOMPUTED_SHARE.get(case["recompute"] or "")
    if share is None:
        return (WeightedRun(1.0, _run(case, framework, _recompute(case, framework))),)
    return WeightedRun(1 - share, _run(case, framework, "none")), WeightedRun(share, _run(case, framework, "full"))


def _least_recompute(case: Case, framework: Framework) -> Run:
    """The run with the least recomputation that fits."""
    candidates = [_run(case, framework, how) for how in ("none", "full")]
    return next((run for run in candidates if _fits(run)), candidates[-1])


def _fits(run: Run) -> bool:
    """Whether a run is legal and fits in memory."""
    parallel, microbatch = run.parallel, run.train.microbatch
    return not broken_rules(run, parallel, microbatch) and Estimator(run)(parallel, microbatch).fits


def _recompute(case: Case, framework: Framework) -> str:
    stated = case["recompute"]
    if stated is None:
        return "selective" if framework.recompute == "full" and case["parallel"]["sequence_parallel"] else framework.recompute
    return stated if stated in ("full", "selective") else "none"


def _run(case: Case, framework: Framework, recompute: Any) -> Run:
    model, parallel = case["model"], case["parallel"]
    modern = case["cluster"]["gpu"] not in ("V100", "A100")
    flash = modern or "flash" in (case["attention"] or "") or (not framework.dropout and framework.name != "GPT-NeoX")
    precision: Any = "bf16" if "/" in case["precision"] else case["precision"]
    shape = _model(model, dropout=0.0 if flash else framework.dropout)
    chunks = _chunks(parallel, model["layers"], framework, told=case["batch"]["micro"] is not None)
    world = _effective_cluster(cluster_of(case["cluster"]), framework, case["attention"] or "")
    micro, batch = _batch(case, framework, chunks)
    zero, shard = _zero(parallel, framework)
    sequence = parallel["sequence_parallel"]
    overlap = parallel["tp_comm_overlap"]
    return Run(
        name=case["id"],
        engine="papers",
        model=shape,
        cluster=world,
        parallel=Parallel(
            tp=parallel["tp"],
            pp=parallel["pp"],
            cp=parallel["cp"] or 1,
            ep=_experts_ranks(parallel),
            zero=zero,
            shard=shard,
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks,
            stages=stages_by_share(shape, parallel["pp"]) if framework.passes_share and chunks == 1 else None,
            sequence=framework.sequence if sequence is None else sequence,
            recompute=recompute,
            overlap=Overlap(
                data=framework.overlap_data,
                tensor=framework.overlap_tensor if overlap is None else overlap,
                pipeline=framework.overlap_pipeline and chunks > 1,
            ),
            scatter=framework.scatter and parallel["tp"] > 1,
        ),
        train=Train(
            batch=batch,
            microbatch=micro,
            seq=model["seq"],
            steps=1,
            precision=precision,
            gradients="auto" if "fp16" in case["precision"] else framework.gradients,  # type: ignore[arg-type]
            attention="flash" if flash else "math",
            compile=framework.fused if case["compile"] is None else framework.fused or case["compile"],
        ),
    )


def _effective_cluster(cluster: Cluster, framework: Framework, kernel: str) -> Cluster:
    """Return the cluster with the rates that a framework's kernels and messages reach on it."""
    slower = next(
        (share for (word, gpu), share in ATTENTION_KERNELS.items() if word in kernel and cluster.device.name.startswith(gpu)), 1.0
    )
    device = cluster.device
    device = replace(device, flash=device.attention_share * slower, sustained=device.product_share * framework.kernels)
    between = cluster.between
    if framework.one_card and between:  # a node has a card for each device
        between = replace(between, efficiency=between.efficiency / cluster.gpus)
    return replace(cluster, device=device, between=between)


def _batch(case: Case, framework: Framework, chunks: int) -> tuple[int, int]:
    """(sequences of a micro-batch, sequences of a step). A step whose micro-batches differ is one of as many full ones."""
    parallel, batch = case["parallel"], case["batch"]
    replicas = parallel["dp"] or max(1, case["cluster"]["gpus"] // (parallel["tp"] * parallel["pp"] * (parallel["cp"] or 1)))
    micro = batch["micro"]
    whole = batch["global"] or replicas * (micro or 1) * (batch["grad_accum"] or 1)
    if micro is None:
        micro = 1
        if framework.micros == "stages" and parallel["pp"] > 1:
            micro = max(1, whole // (replicas * parallel["pp"] * chunks))
    return micro, ceil(whole / (replicas * micro)) * replicas * micro


def _chunks(parallel: Case, layers: int, framework: Framework, *, told: bool) -> int:
    """Return the parts of the model on each stage: as stated; of an interleaved schedule that states none, two layers a part, or one.

    `told`: the source states the micro-batch, so that it may be expected to state virtual stages too.
    """
    pp: int = parallel["pp"]
    if pp == 1:
        return 1
    if parallel["vpp"]:
        return int(min(parallel["vpp"], max(1, layers // pp)))
    by_default = framework.interleaved == "yes" or (framework.interleaved == "tables" and not told)
    schedule = parallel["schedule"] or ("interleaved" if by_default else "")
    if "interleaved" not in schedule:
        return 1
    each: int = layers // pp
    return each // 2 if each % 2 == 0 else each


def stages_by_share(model: Model, pp: int) -> tuple[int, ...] | None:
    """The layers of each stage where a stage ends with the layer that passes its share of the products of all layers and of the head, as
    nanotron counts them; None where there are no stages, or one would have no layer."""
    layer, head = 4 * model.hidden**2 + 3 * model.hidden * (model.ffn or 4 * model.hidden), model.hidden * model.vocab
    whole, counts = model.layers * layer + head, [0]
    for many in range(1, model.layers + 1):
        counts[-1] += 1
        if many * layer > whole * len(counts) / pp:
            counts.append(0)
    return tuple(counts) if pp > 1 and len(counts) == pp and counts[-1] else None


def _zero(parallel: Case, framework: Framework) -> tuple[Any, Any]:
    """(ZeRO's stage, the ranks over which it shards), from the stage, the words for FSDP or the framework's default."""
    words = parallel["fsdp"] or ""
    zero = parallel["zero"]
    if zero is None:
        zero = framework.zero if parallel["distributed_optimizer"] is None else int(parallel["distributed_optimizer"])
        if words:
            zero = 2 if "GRAD_OP" in words or "ZeRO-2" in words else 3
    return zero, parallel["fsdp_shard_size"] or "all"


def _experts_ranks(parallel: Case) -> int:
    """Ranks that share out the experts. Where they fold in ranks of the tensor axis, those split each expert: the same bytes a rank."""
    ep, replicas = parallel["ep"] or 1, parallel["dp"] * (parallel["cp"] or 1)
    return gcd(ep, replicas) if replicas % ep else ep


def _model(stated: Case, dropout: float) -> Model:
    gated, experts = stated["gated_mlp"], stated["experts"] or 0
    recent = gated or bool(experts)
    latent = stated["arch"] == "moe-mla"
    width = stated["head_dim"]
    sizes: dict[str, Any] = {"head_dim": width}
    if latent:
        sizes = _latent_sizes() | ({"qk_nope_head_dim": width, "v_head_dim": width} if width else {})
    return Model(
        family="mla" if latent else "moe" if experts else "llama" if gated else "gpt",
        layers=stated["layers"],
        hidden=stated["hidden"],
        heads=stated["heads"],
        kv_heads=stated["kv_heads"],
        **sizes,
        ffn=stated["ffn"],
        vocab=stated["vocab"] or GPT_VOCAB,
        tied=not recent if stated["tied_embeddings"] is None else stated["tied_embeddings"],
        bias=not latent and (not recent if stated["bias"] is None else stated["bias"]),
        norm="rmsnorm" if recent else "layernorm",
        act="swiglu" if recent else "gelu",
        positions="rope" if recent else "learned",
        dropout=0.0 if recent else dropout,
        experts=experts,
        top_k=stated["topk"] or 0,
        expert_ffn=stated["moe_ffn"],
        shared_experts=stated["shared_experts"] or 0,
    )


@cache
def _latent_sizes() -> dict[str, int]:
    """The latent sizes of a case, which states none: DeepSeek-V3's."""
    model = load_recipe("gpt2_124m", ["model=deepseek_v3"]).model
    return {key: getattr(model, key) for key in LATENT}


@cache
def named_cluster(name: str, device: str | None) -> Cluster:
    """A cluster of conf/cluster, with a device of conf/device, or with its own."""
    return load_recipe("gpt2_124m", [f"cluster={name}", *([f"device={device}"] if device else [])]).cluster


def cluster_of(stated: Case) -> Cluster:
    """Return the cluster that a case states. Raises Inexpressible."""
    gpu = stated["gpu"]
    known = {memory: row for (name, memory), row in CLUSTERS.items() if name == gpu}
    if not known:
        raise Inexpressible(f"no cluster of {gpu} is described: add its row to CLUSTERS and its conf/device")
    cluster = named_cluster(*known.get(stated["gpu_mem_gb"], next(iter(known.values()))))
    gpus = stated["gpus"]
    in_node = min(gpus, cluster.gpus if cluster.gpus > 8 else stated["gpus_per_node"] or cluster.gpus)
    if gpus % in_node:
        in_node = gcd(gpus, RACK)
    between = cluster.between
    if between:
        given = stated["internode_gbps_per_gpu"]
        share = next((share for word, share in FABRICS.items() if word in (stated["internode"] or "")), between.efficiency)
        between = Link(bandwidth=given / 8 * 1e9 if given else between.bandwidth, latency=between.latency, efficiency=share)
    return replace(cluster, nodes=max(1, gpus // in_node), gpus=in_node, between=between)
