"""From a run to this rank's engine: the order in which the model is sliced, built, compiled and wrapped."""

from __future__ import annotations

import os
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from ..engines.engine import Engine, ParameterPartitioner
from ..engines.lazy_dynamo import disable_compile
from ..layers.dtypes import PRECISION_DTYPES
from ..models.build import build_module, copy_padded, initial_values, module_of_family, zero_constants
from ..models.families import is_made_by_transformers, op_table
from ..parallel.process_groups import Grid
from ..parallel.rank_model import RankPart, context_parallel_of, tensor_parallel_of
from ..plan.axes.weight_slices import WeightShard
from ..plan.engines import ENGINES
from ..plan.layout.schedule_of_run import delay_of
from ..spec.derived.compiled_layers import has_compiled_layers
from ..spec.run import Parallel, Run
from ..spec.sections.lora import Lora
from ..spec.sections.mtp import Mtp


def build_engine(run: Run, grid: Grid, name: str | None) -> Engine:
    """Build this rank's parts of the model, and around them the engine that the plan names.

    Without model.weights the initial values are drawn from train.seed; with them they are filled in later. Raises ValueError for an
    engine that has no class, and Unreadable where transformers has no such model.
    """
    if not (has_compiled_layers(run.train, run.parallel) or grid.world.device.type == "cuda"):  # a GPU's loss and optimizer are compiled
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else DeepSpeed compiles parts of itself: seconds a rank
        disable_compile()
    engine = engine_class(name, run.parallel)
    parts = build_parts(run, grid, engine.parameter_partitioner(run, grid))
    if has_compiled_layers(run.train, run.parallel):
        for part in parts:
            compile_layers(part.module, options=compile_options(run))
    return engine(run, parts, grid)  # dp (ZeRO) and the pipeline schedule


def compile_options(run: Run) -> dict[str, bool] | None:
    """Return the options by which torch's compiler makes the layers of a run; None: its defaults.

    The ranks of a tensor-parallel group compute routers each, and without sequence parallelism norms too, and must get the same bits. So
    none may choose its kernels of a reduction by timing them. (A setting of torch's for all that it compiles would not stay: each compiled
    frame restores torch.use_deterministic_algorithms, which sets it.)
    """
    alike = run.parallel.tp > 1 and (run.model.experts > 0 or not run.parallel.sequence)
    return {"deterministic": True} if alike else None


def compile_layers(module: nn.Module, backend: str = "inductor", options: dict[str, bool] | None = None) -> None:
    """Compile each layer of a part, all into one graph; a module without layers of ours as a whole.

    Embedding, head and loss stay as they are: a graph of the whole model takes minutes to compile.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # layers differ in their number alone, by which dropout is keyed
    layers = getattr(module, "layers", None)
    modules: list[Any] = list(getattr(module, "mtp", {}).values())
    for each in (*layers.values(), *(further.layer for further in modules)) if isinstance(layers, nn.ModuleDict) else [module]:
        each.compile(backend=backend, options=options)


def build_parts(run: Run, grid: Grid, partition: ParameterPartitioner | None = None) -> list[RankPart]:
    """Build this rank's parts of the model; `partition` replaces each parameter as soon as it is allocated."""
    parts = []
    for part in grid.position.parts:  # pp: the layers of this rank's stage, in several parts where the schedule has chunks
        if is_made_by_transformers(run.model):
            parts.append(_hf_part(run, grid))
            continue
        shards = {shard.name: shard for shard in grid.position.weight_shards(run, part)}  # tp and ep: this rank's block of each weight
        tied = ("embedding.weight",) if run.model.shares_embedding and part.last and not part.first else ()
        parameters: dict[str, nn.Parameter] = {}
        for shard in shards.values():
            parameters[shard.name] = _parameter(run, shard, grid, tied=shard.name in tied)
            if partition:  # ZeRO-3: frees what other data-parallel ranks keep, before the next parameter is allocated
                parameters[shard.name] = partition(parameters[shard.name], shard)
        module = build_module(
            parameters | zero_constants(op_table(run), part.layers, grid.world.device, last=part.last),
            run,
            tensor_parallel_of(run, grid),  # tp
            cp=context_parallel_of(run, grid),
            ep=grid.group("ep"),
            layers=part.layers,
            first=part.first,
            last=part.last,
        )
        parts.append(RankPart(module=module, weight_shards=shards, tied=tied))
    return parts


def engine_class(name: str | None, parallel: Parallel) -> type[Engine]:
    """Return the class that ENGINES (trainer/plan/engines/__init__.py) names for an engine: for a pipeline without a flush, for compressed
    gradients and for sums that are used late one of its own, if it has one. Raises ValueError where it names none."""
    row = ENGINES.get(name or "")
    if row is None or not row.engine_class:
        raise ValueError(f"engine {name} has no class that trains: name one in ENGINES of trainer/plan/engines/__init__.py")
    special = (
        (row.delayed_class if delay_of(parallel) else "")
        or (row.compressed_class if parallel.compress.name != "none" else "")
        or (row.stale_class if parallel.staleness else "")
    )
    named: type[Engine] = resolve_name(special or row.engine_class)
    return named


def _parameter(run: Run, shard: WeightShard, grid: Grid, *, tied: bool) -> nn.Parameter:
    """Allocate a weight shard on this rank's device and draw its initial values, the same in every layout."""
    device = grid.world.device
    tensor = torch.empty(shard.size, device=device, dtype=PRECISION_DTYPES[run.train.precision])
    is_drawn = not run.model.weights or Lora.owns(shard.name) or Mtp.owns(shard.name)  # published weights may lack these
    if is_drawn and device.type != "meta":
        values = initial_values(shard.name, shard.shape, shard.offset, shard.length, run=run, seed=run.train.seed, device=device)
        copy_padded(tensor, values)
    parameter = nn.Parameter(tensor, requires_grad=run.model.is_trained(shard.name))
    # DeepSpeed counts a parameter in the gradient norm by these marks: each element of the model is counted by one rank of a replica.
    parameter.tensor_model_parallel = shard.copy == 0 and not tied  # type: ignore[attr-defined]
    parameter.ds_pipe_replicated = tied  # type: ignore[attr-defined]
    return parameter


def _hf_part(run: Run, grid: Grid) -> RankPart:
    """Build transformers' own model, whole on every rank. Raises Unreadable."""
    seed = None if run.model.weights else run.train.seed
    module = module_of_family(run.model)(run, device=grid.world.device, dtype=PRECISION_DTYPES[run.train.precision], seed=seed)
    return RankPart(module=module, weight_shards={name: _whole_shard(name, tuple(each.shape)) for name, each in module.named_parameters()})


def _whole_shard(name: str, shape: tuple[int, ...]) -> WeightShard:
    zeros = (0,) * len(shape)
    return WeightShard(name=name, shape=shape, offset=zeros, length=shape, size=shape, copy=0, copies=1, shared=False)
