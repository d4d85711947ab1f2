"""Ranks of engine native that take each layer's gradients together, as those whose layers are compiled do, though theirs are not.

Each writes RUN_DIR/together.RANK: of a step's calls for several gradients at once, how many stored them and how many added them. One
writes RUN_DIR/joined: the modules whose weights are joined, which layers that are not compiled don't use. After each step no view of
gradients that have travelled may be left.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from distrain.trainer.engines.native import engine as engine_module
from distrain.trainer.engines.native.data_parallel import fused_gradient_sums as gradients_module
from distrain.trainer.engines.native.data_parallel.weight_buckets import WeightBucket
from distrain.trainer.engines.native.engine import NativeEngine
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.layers.joined_products import JoinedWeights
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.spec.run import Run

CALLS = {"_foreach_copy_": "stored", "_foreach_add_": "added"}


def run_rank_together(path: Path, channel: Channel) -> int:
    """Run a rank of RUN_DIR/run.json."""
    module: Any = engine_module
    taken: Any = gradients_module
    native, calls = NativeEngine, Counter[str]()
    step = native.step
    module.layers_taken_together = _every_layer
    counted = {name: _counted(getattr(torch, name), what, calls) for name, what in CALLS.items()}
    taken.torch = SimpleNamespace(**counted)

    joined, prepare = list[str](), module.prepare_layers

    def prepare_layers(run: Run, modules: Sequence[nn.Module], *given: Any) -> None:
        prepare(run, modules, *given)
        joined.extend(_joined_modules(modules))
        (path.parent / "joined").write_text(json.dumps(joined))

    module.prepare_layers = prepare_layers

    def count_step(engine: NativeEngine, *given: Any) -> Any:
        calls.clear()
        result = step(engine, *given)
        assert _joined_modules(engine.modules) == joined
        assert not (left := _gradients_left(engine)), left
        (path.parent / f"together.{engine.grid.world.rank}").write_text(json.dumps({what: calls[what] for what in calls if calls[what]}))
        return result

    native.step = count_step  # type: ignore[method-assign, assignment]
    return run_rank(path, channel)


def _every_layer(run: Run, modules: Iterable[Any]) -> list[nn.Module]:
    return [
        layer for module in modules for layer in (*module.layers.values(), *(each.layer for each in getattr(module, "mtp", {}).values()))
    ]


def _gradients_left(engine: NativeEngine) -> list[tuple[int, ...]]:
    """Return the shapes of views in memory of a bucket's size that is none of its weights: of buckets that travel at each micro-batch."""
    buckets = [bucket for bucket in engine.buckets if isinstance(bucket, WeightBucket) and bucket.often]
    kept = {each.untyped_storage().data_ptr() for bucket in buckets for each in (bucket.weights, bucket.master)}
    sizes = {bucket.weights.untyped_storage().nbytes() for bucket in buckets}
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each._is_view()]
    storages = [(each, each.untyped_storage()) for each in tensors if not each.is_meta]
    return [tuple(each.shape) for each, storage in storages if storage.nbytes() in sizes and storage.data_ptr() not in kept]


def _joined_modules(parts: Iterable[nn.Module]) -> list[str]:
    """Return the names of modules with joined weights; these must be the memory of the weights, before and after a step."""
    found = list[str]()
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, JoinedWeights) and module.joined is not None:
                weights = [layer.weight for layer in module.column_layers()]
                pairs = zip(module.joined, weights[::-1], strict=True)
                assert all(view.data_ptr() == each.data_ptr() and view.stride() == each.stride() for view, each in pairs)
                found.append(name)
    return found


def _counted(call: Any, what: str, calls: Counter[str]) -> Any:
    def counted(places: list[Any], gradients: list[Any]) -> None:
        calls[what] += len(places) > 1
        call(places, gradients)

    return counted
