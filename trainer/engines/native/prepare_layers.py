"""Layers that are compiled: engine `native` takes each one's gradients together, and joins weights of theirs that share an input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ...layers.joined_products import JoinedWeights
from ...layers.transformer.transformer import Transformer
from ...plan.layout.schedule_of_run import delay_of, schedule_of
from ...spec.derived.compiled_layers import has_compiled_layers
from ...spec.run import Run
from .data_parallel.bucket_reducer import BucketReducer
from .data_parallel.weight_buckets import WeightBucket


def layers_taken_together(run: Run, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers of a run's parts whose gradients are taken together: those that are compiled, since their backward returns all at
    once, and the memory of one is no longer in use before the next one is computed. Layers with experts are not: their graphs may break."""
    if not has_compiled_layers(run.train, run.parallel) or run.model.experts:
        return []
    found = list[Any]()
    for module in modules:
        if isinstance(module, Transformer):
            found += [*module.layers.values(), *(each.layer for each in getattr(module, "mtp", {}).values())]
    return found


def prepare_layers(run: Run, modules: Iterable[nn.Module], buckets: Sequence[WeightBucket], reducer: BucketReducer) -> None:
    """Have the reducer watch the layers of a run's parts, and join their weights."""
    for module in modules:
        module.watch_layer = reducer.watch_layer  # type: ignore[assignment]
        for each in module.modules() if joins_weights(run) else ():
            if isinstance(each, JoinedWeights):
                join_weights(each, buckets)


def join_weights(module: JoinedWeights, buckets: Iterable[WeightBucket]) -> None:
    """Join the weights of a module's layers that share an input, if they are trained, alike, and lie one after another in a bucket."""
    if layers := module.column_layers():
        found = [bucket.joined_view([layer.weight for layer in layers]) for bucket in buckets]
        module.joined = next((each for each in found if each is not None), None)


def joins_weights(run: Run) -> bool:
    """Whether a run's weights may be joined: one rank has them whole, its forwards and backwards meet one version of them, backward
    computes their gradients, and the products are no others than these, in fp8 or beside LoRA's."""
    parallel, train = run.parallel, run.train
    is_plain = parallel.pp == 1 or not (delay_of(parallel) or schedule_of(parallel).splits_backward)
    return parallel.tp == 1 and is_plain and train.precision != "fp8" and not run.model.lora.rank
