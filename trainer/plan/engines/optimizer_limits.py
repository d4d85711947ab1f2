"""Limits of an engine on the optimizer: which one, its moments and averages, the steps that it skips, what the host holds of it."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.changed_run import Change
from ..costs.muon import MUON
from ..costs.precision import has_moments
from ..native.dim0_shards import gathers_once
from .asked_layout import AskedLayout, Conflict
from .engine_limit import EngineLimit

NATIVE: Change = (("engine", "native"),)  # which alone has what most rows here lack


def spike_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Stages of a pipeline without a flush step alone."""
    key, skip_spikes = "train.skip_spikes", asked.run.train.skip_spikes
    none: Change = ((key, 0),)
    if not skip_spikes:
        return
    if not asked.row.skips_spikes:
        yield asked.limit(key, f"{skip_spikes:g}", asked.any_engine, NATIVE, none)
    else:
        yield from asked.first_conflict(key, f"{skip_spikes:g}", (asked.late_weights,), none)


def mup_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    """muP gives weights learning rates of their own."""
    mup = asked.run.optim.mup
    if mup and not asked.row.rates_by_width:
        yield asked.limit("optim.mup", mup, asked.any_engine, NATIVE, (("optim.mup", None),))


def muon_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Muon is ours, of weights whose names say what they are, and LoRA's factors are thin. With weights or gradients that come late, that
    workers have alone, or that travel otherwise, it is not proved."""
    key, modules = "optim.name", asked.run.model.mtp.layers
    adamw: Change = ((key, "adamw"),)
    if asked.run.optim.name != MUON:
        return
    if not asked.row.steps_matrices:
        yield asked.limit(key, MUON, asked.any_engine, NATIVE, adamw)
        return
    conflicts = (
        asked.made_by_transformers,
        asked.lora,
        Conflict(modules > 0, "model.mtp.layers", modules, (("model.mtp.layers", 0),)),
        asked.late_weights,
        asked.late_sums,
        asked.workers_alone,
        asked.compressed,
        asked.routed_sums,
    )
    yield from asked.first_conflict(key, MUON, conflicts, adamw)


def moments_limit(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Moments in fewer bits than fp32."""
    optim = asked.run.optim
    if optim.moments != "fp32" and has_moments(optim) and not asked.row.rounds_moments:
        yield asked.limit("optim.moments", optim.moments, asked.any_engine, NATIVE, (("optim.moments", "fp32"),))


def average_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Weights of which a rank steps several versions, or its own, are no one's average."""
    key, ema = "optim.ema", asked.run.optim.ema
    none: Change = ((key, 0.0),)
    if not ema:
        return
    if not asked.row.averages_weights:
        yield asked.limit(key, ema, asked.any_engine, NATIVE, none)
    else:
        yield from asked.first_conflict(key, ema, (asked.late_weights, asked.workers_alone), none)


def offload_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Gradients that tensor-parallel ranks sum are not summed on the host: those of replicated weights where the sequence is split, and of
    key and value heads that ranks share. Our host steps AdamW of shards that are apart from forward's weights, once a step."""
    row, run, parallel = asked.row, asked.run, asked.parallel
    if not (moved := parallel.offload.names):
        return
    heads = run.model.kv_heads or run.model.heads
    keep: Change = tuple((f"parallel.offload.{name}", False) for name in moved)
    key = next((f"parallel.offload.{name}" for name in moved if name not in row.offload), keep[0][0])
    if not set(moved) <= set(row.offload):
        only: Change = keep[1:] if row.offload else ()
        yield asked.limit(key, True, only, keep, asked.any_engine, asked.no_stages if parallel.pp > 1 else ())
    elif not row.offloads_gradients:
        conflicts = (
            Conflict(run.optim.name != "adamw", "optim.name", run.optim.name, (("optim.name", "adamw"),)),
            asked.late_weights,
            asked.late_sums,
            asked.workers_alone,
            asked.moments_of_8_bits,
        )
        yield from asked.first_conflict(key, "true", conflicts, keep)
        if parallel.offload.parameters:
            yield from _parameter_limits(asked)
    elif parallel.tp > 1 and parallel.sequence:
        yield asked.limit(key, "true with parallel.sequence=true", (("parallel.sequence", False),), keep)
    elif parallel.tp > heads:
        fewer: Change = (("parallel.tp", heads), *asked.fill)
        yield asked.limit(key, f"true with more tensor-parallel ranks than model.kv_heads={heads}", fewer, keep)


def _parameter_limits(asked: AskedLayout) -> Iterator[EngineLimit]:
    """Rows that are gathered from the host are stepped there; they are gathered layer by layer, and their gradients summed at once."""
    parallel, key = asked.parallel, "parallel.offload.parameters"
    by_micro: Change = (("parallel.gather", "micro"),)
    conflicts = (
        Conflict(not parallel.offload.optimizer, "parallel.offload.optimizer", "false", (("parallel.offload.optimizer", True),)),
        asked.shards_of_some,
        Conflict(parallel.gather == "step", "parallel.gather", "step", by_micro),
        Conflict(gathers_once(parallel), "parallel.pp", parallel.pp, by_micro),
    )
    yield from asked.first_conflict(key, "true", conflicts, ((key, False),))
