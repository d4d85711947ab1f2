"""Ranks that train with engine `pipe` on test_pipe.py's own batches.

RUN_DIR/job.json adds to run.json: {"layers": layers of each part of the model, "does": a key of JOBS}. Each rank writes its results to
RUN_DIR/RANK.pt.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from distrain.trainer.engines.deepspeed.pipe import PipeEngine
from distrain.trainer.engines.engine import StepResult
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.build import build_engine
from distrain.trainer.parallel.ledger import Ledger
from distrain.trainer.parallel.process_groups import Grid, make_grid
from distrain.trainer.parallel.rank_model import head_shards
from distrain.trainer.parallel.world import join_ranks, leave_ranks
from distrain.trainer.plan.axes.weight_slices import WeightShard
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.mesh_position import MeshPosition, ModelPart
from distrain.trainer.spec.run import Run

STEPS = 3
LR = 1e-2


def batch(run: Run, step: int) -> tuple[Tensor, Tensor, int]:
    """Tokens and labels [batch, seq] of a step, and how many of the labels count."""
    drawn = torch.Generator().manual_seed(100 + step)
    tokens, labels = torch.randint(run.model.vocab, (2, run.train.batch, run.train.seq), generator=drawn)
    labels[torch.rand(labels.shape, generator=drawn) < 0.2] = IGNORED
    return tokens, labels, int((labels != IGNORED).sum())


def work(path: Path, talk: Channel) -> int:
    """Run the job on one rank."""
    run, job = msgspec.json.decode(path.read_bytes(), type=Run), json.loads((path.parent / "job.json").read_text())
    world = join_ranks("cpu")
    mesh = Mesh(pp=run.parallel.pp, dp=world.size // (run.parallel.pp * run.parallel.tp), tp=run.parallel.tp)
    place = mesh.coordinates(world.rank)
    here = make_grid(
        world,
        MeshPosition(rank=world.rank, mesh=mesh, coordinates=place, parts=parts(job["layers"], place["pp"], mesh.pp)),
        copies=head_shards(run, mesh.tp).copies,
    )
    with Ledger(here) as ledger:
        engine = build_engine(run, here, "pipe")
    assert isinstance(engine, PipeEngine)
    torch.save({**JOBS[job["does"]](run, engine, here), "built": ledger.rows}, path.parent / f"{world.rank}.pt")
    leave_ranks()
    return 0


def parts(layers: list[int], stage: int, stages: int) -> tuple[ModelPart, ...]:
    """Return the parts of a stage: one, or two where there are twice as many parts as stages."""
    ends = [0, *accumulate(layers)]
    which = [stage] if len(layers) == stages else [stage, 2 * stages - 1 - stage]
    return tuple(ModelPart(layers=range(ends[at], ends[at + 1]), first=at == 0, last=at == len(layers) - 1) for at in which)


def take_step(run: Run, engine: PipeEngine, here: Grid, step: int, read: list[weakref.ref[Tensor]] | None = None) -> StepResult:
    """Take one step on this replica's micro-batches; append references to the tokens of each to `read`."""
    tokens, labels, counted = batch(run, step)

    def read_micro(index: int) -> Any:
        own, targets = micro(run, here, index, tokens, labels)
        own = own.clone()
        if read is not None:
            read.append(weakref.ref(own))
        return own, targets, {}

    return engine.step(read_micro, LR, counted)


def micro(run: Run, here: Grid, index: int, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return this replica's rows of a micro-batch."""
    each = run.train.microbatch
    first = (index * here.size("dp") + here.coordinate("dp")) * each
    return tokens[first : first + each], labels[first : first + each]


def train(run: Run, engine: PipeEngine, here: Grid) -> dict[str, Any]:
    """Take a few steps; return their figures, the messages of the last, and the loss of one micro-batch before and after."""
    before = evaluate(run, engine, here)
    steps = [take_step(run, engine, here, step) for step in range(STEPS - 1)]
    read: list[weakref.ref[Tensor]] = []
    with Ledger(here) as ledger:
        steps.append(take_step(run, engine, here, STEPS - 1, read))
    return {
        "coordinates": here.position.coordinates,
        "losses": [each.loss for each in steps],
        "norms": [each.grad_norm for each in steps],
        "weights": [(each.name, each.shard, each.parameter.detach().float()) for each in engine.parameters],
        "held": engine.peak_in_flight,
        "kept": sum(each() is not None for each in read),
        "rows": ledger.rows,
        "evaluations": [before, evaluate(run, engine, here)],
    }


def evaluate(run: Run, engine: PipeEngine, here: Grid) -> tuple[float, int]:
    tokens, labels, _ = batch(run, STEPS)
    loss, counted = engine.evaluate(*micro(run, here, 0, tokens, labels))
    return float(loss), int(counted)


def restore(run: Run, engine: PipeEngine, here: Grid) -> dict[str, Any]:
    """Return the losses of the steps after the first, and again after restoring the state that followed the first."""
    take_step(run, engine, here, 0)
    whole = {each.name: each.parameter.detach().float().flatten() for each in engine.parameters}
    whole = {name: tensor.clone() for name, tensor in whole.items()}
    kept: dict[tuple[str, str], Tensor] = {}
    for part in engine.optimizer_shards():
        whole[part.shard.name][part.start : part.start + part.length] = part.weight[: part.length]
        kept |= {(part.shard.name, kind): state.clone() for kind, state in part.states()}
    counters = engine.counters()

    def read(shard: WeightShard, kind: str, start: int, length: int) -> Tensor:
        return whole[shard.name][start : start + length] if kind == "weight" else kept[shard.name, kind]

    once = [take_step(run, engine, here, step).loss for step in range(1, STEPS)]
    engine.restore(read, counters, lambda name: True)
    return {"once": once, "again": [take_step(run, engine, here, step).loss for step in range(1, STEPS)]}


JOBS: dict[str, Callable[[Run, PipeEngine, Grid], dict[str, Any]]] = {"train": train, "restore": restore}
