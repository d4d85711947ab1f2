"""Plans of published runs against their measurements: step time and memory, a line for each source.

    python -m distrain.scripts.compare_published_runs CASES.json [--source NAME] [--rows]

CASES.json is a list of runs (id, source, model, cluster, parallel, batch, precision, recompute, framework, measured).
Where a source omits a setting, `_run` assumes the framework's default of that time.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from ..cli.config.load import load_recipe
from ..trainer.plan.plan import make_plan
from ..trainer.plan.result import Plan
from ..trainer.spec.run import Cluster, Link, Model, Overlap, Parallel, Run, Train

Case = Mapping[str, Any]

CLUSTERS = {
    "V100": "dgx_v100",
    "A100": "dgx_a100",
    "H100": "dgx_h100",
    "H200": "dgx_h200",
    "B200": "dgx_b200",
    "GB200": "gb200_nvl72",
    "B300": "dgx_b300",
    "GB300": "gb300_nvl72",
}
FUSED = ("Megatron", "NeMo", "MegaScale", "Pax", "MaxText", "Alpa")  # frameworks with fused kernels of their own
SIZES = {"GiB": 2**30, "GB": 1e9, "MiB": 2**20}


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A case, with planned over measured step seconds and peak bytes (None: not measured, or not planned)."""

    case: Case
    plan: Plan
    time: float | None
    memory: float | None


def compare(case: Case, clusters: dict[str, Cluster]) -> PublishedRow:
    """Plan a case and compare with its measurements."""
    plan = make_plan(_run(case, clusters))
    seconds = (case.get("derived") or {}).get("iter_time_s") or case["measured"]["iter_time_s"]
    time = plan.time.step / seconds if plan.time and seconds else None
    return PublishedRow(case=case, plan=plan, time=time, memory=_memory(case, plan))


def _memory(case: Case, plan: Plan) -> float | None:
    """Return planned over measured peak memory, of the rank that the source measured; without the CUDA context unless nvidia-smi did."""
    measured = case["measured"]
    if not measured["peak_mem"] or plan.memory is None:
        return None
    kind = measured["peak_mem_kind"] or ""
    stage = plan.memory.stages[-1 if "last rank" in kind else plan.memory.stage].bytes
    planned = stage.total if "nvidia-smi" in kind else stage.total - stage.overhead
    return planned / float(measured["peak_mem"] * SIZES[measured["peak_mem_unit"]])


def _run(case: Case, clusters: dict[str, Cluster]) -> Run:
    model, parallel, framework = case["model"], case["parallel"], case["framework"]
    modern = case["cluster"]["gpu"] not in ("V100", "A100")
    pipelined = parallel["pp"] > 1 and (parallel["vpp"] or 1) > 1
    fused = any(word in framework for word in FUSED)
    flash = modern or "flash" in (case["attention"] or "") or "FSDP" in framework
    zero: Any = parallel["zero"] if parallel["zero"] is not None else int(bool(parallel["distributed_optimizer"]))
    sequence = parallel["sequence_parallel"]
    recompute: Any = case["recompute"] if case["recompute"] in ("full", "selective") else "none"
    precision: Any = "bf16" if "/" in case["precision"] else case["precision"]
    return Run(
        name=case["id"],
        engine="papers",
        model=_model(model, dropout=0.1 if fused and not modern else 0.0),
        cluster=_cluster(case["cluster"], clusters),
        parallel=Parallel(
            tp=parallel["tp"],
            pp=parallel["pp"],
            cp=parallel["cp"],
            ep=parallel["ep"] or 1,
            zero=zero,
            shard=parallel["fsdp_shard_size"] or "all",
            schedule="interleaved" if pipelined else "1f1b",
            chunks=parallel["vpp"] if pipelined else 1,
            sequence=sequence if sequence is not None else modern and zero < 3,
            recompute=recompute,
            overlap=Overlap(tensor=bool(parallel["tp_comm_overlap"])),
            scatter="Megatron-LM" in framework and parallel["tp"] > 1,
        ),
        train=Train(
            batch=case["batch"]["global"],
            microbatch=case["batch"]["micro"] or 1,
            seq=model["seq"],
            steps=1,
            precision=precision,
            gradients="fp32" if fused and precision != "fp16" else "auto",
            attention="flash" if flash else "math",
            compile=fused or bool(case["compile"]),
        ),
    )


def _model(stated: Case, dropout: float) -> Model:
    gated, experts = stated["gated_mlp"], stated["experts"] or 0
    recent = gated or bool(experts)
    return Model(
        family="moe" if experts else "llama" if gated else "gpt",
        layers=stated["layers"],
        hidden=stated["hidden"],
        heads=stated["heads"],
        kv_heads=stated["kv_heads"],
        head_dim=stated["head_dim"],
        ffn=stated["ffn"],
        vocab=stated["vocab"] or 51200,
        tied=not recent if stated["tied_embeddings"] is None else stated["tied_embeddings"],
        bias=not recent if stated["bias"] is None else stated["bias"],
        norm="rmsnorm" if recent else "layernorm",
        act="swiglu" if recent else "gelu",
        positions="rope" if recent else "learned",
        dropout=0.0 if recent else dropout,
        experts=experts,
        top_k=stated["topk"] or 0,
        expert_ffn=stated["moe_ffn"],
        shared_experts=stated["shared_experts"] or 0,
    )


def _cluster(stated: Case, clusters: dict[str, Cluster]) -> Cluster:
    name = stated["gpu"]
    if name not in clusters:
        device = ["device=a100_40g"] if stated["gpu_mem_gb"] == 40 else []
        clusters[name] = load_recipe("gpt2_124m", [f"cluster={CLUSTERS[name]}", *device]).cluster
    cluster = clusters[name]
    gpus = stated["gpus"]
    in_node = min(gpus, stated["gpus_per_node"] or cluster.gpus)
    if gpus % in_node:
        in_node = 64  # jobs whose size is a power of two leave 8 of a rack's 72 GPUs idle
    between = cluster.between
    if stated["internode_gbps_per_gpu"] and between:
        between = Link(bandwidth=stated["internode_gbps_per_gpu"] / 8 * 1e9, latency=between.latency)
    return replace(cluster, nodes=max(1, gpus // in_node), gpus=in_node, between=between)


def _line(name: str, ratios: list[float]) -> str:
    if not ratios:
        return f"{name:>30}"
    return f"{name:>8} {median(ratios):5.2f} {mean(abs(each - 1) for each in ratios):5.0%} {min(ratios):5.2f}-{max(ratios):<5.2f}"


def main() -> None:
    """Compare every case that can be planned, and print the table."""
    parser = argparse.ArgumentParser(description="plans of published runs against their measurements")
    parser.add_argument("cases", type=Path)
    parser.add_argument("--source", default="", help="only sources whose name contains this")
    parser.add_argument("--rows", action="store_true", help="also a line for each case")
    arguments = parser.parse_args()
    clusters: dict[str, Cluster] = {}
    groups: dict[tuple[str, str, str], list[PublishedRow]] = defaultdict(list)
    skipped: dict[str, str] = {}
    for case in json.loads(arguments.cases.read_text()):
        if arguments.source not in case["source"]["name"]:
            continue
        if case["model"]["arch"] == "moe-mla":
            skipped[case["id"]] = "no model family here has multi-head latent attention"
            continue
        if not case["batch"]["global"]:
            skipped[case["id"]] = "its source does not state the batch"
            continue
        row = compare(case, clusters)
        if not row.plan.ok:
            skipped[case["id"]] = str(row.plan.problems[0])
        elif row.time or row.memory:
            groups[case["source"]["name"], case["cluster"]["gpu"], case["precision"]].append(row)
    _print(groups, skipped, rows=arguments.rows)


def _print(groups: Mapping[tuple[str, str, str], list[PublishedRow]], skipped: Mapping[str, str], *, rows: bool) -> None:
    print(f"{'planned / measured':54} {'n':>3}  {'step: median, mean error, range':34} memory")
    every = [each for group in groups.values() for each in group]
    for (source, device, precision), group in [*sorted(groups.items()), (("all", "", ""), every)]:
        times, memories = [each.time for each in group if each.time], [each.memory for each in group if each.memory]
        print(f"{source[:36]:36} {device:6} {precision:9} {len(group):4}  {_line('', times):34} {_line('', memories)}")
        for each in group if rows and source != "all" else ():
            ratios = " ".join("    -" if ratio is None else f"{ratio:5.2f}" for ratio in (each.time, each.memory))
            print(f"    {each.case['id']:60} {ratios}")
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}")


if __name__ == "__main__":
    main()
