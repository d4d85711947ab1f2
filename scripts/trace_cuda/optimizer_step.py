"""The bytes that an engine's optimizer step holds and moves: its own code on real tensors of one CPU rank, under a counter of live bytes.

A rank of N holds and moves the same for each element of its part. Activations are left out: sequences are four tokens long.

Run `python -m distrain.scripts.trace_cuda.optimizer_step ENGINE,ZERO,PRECISION,GRADIENTS,MICROS,MOMENTS ...`, the last optional; it prints
a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...cli.config.load import load_recipe
from ...trainer.engines.deepspeed.import_deepspeed import import_deepspeed
from ...trainer.loop.build import build_engine
from ...trainer.parallel.process_groups import make_grid
from ...trainer.parallel.world import World, join_ranks
from ...trainer.plan.mesh_position import mesh_position
from ...trainer.plan.plan import make_plan
from ...trainer.spec.run import Run
from ...trainer.system.garbage_collection import keep_imports
from ...trainer.system.reserved_port import reserve_port
from .live_bytes import NO_KERNEL, LiveBytes

OWN = ("aten", "distrain")  # namespaces of operators that move bytes
SEQ, LAYERS, STEPS = 4, (1, 2), 2
MODEL = ("model.hidden=256", "model.heads=4", "model.vocab=512", "parallel.bucket=100000")


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes for each parameter of one rank, but for `kernels` and `waits`.

    `after` is what it holds between two steps, weights included; `passes` the most that it holds in forward and backward; `step` the most
    in the optimizer's step, from the last gradient to the new weights; `moved` what the operators of that step read and write.
    `kernels` are those that the step launches for each tensor of parameters, `waits` is how often the host reads a number from the device.
    """

    after: float
    passes: float
    step: float
    moved: float
    kernels: float
    waits: float


class MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operators read and write, and how often the host reads a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.kernels = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        self.waits += name == "_local_scalar_dense"
        if func.namespace in OWN and name not in NO_KERNEL:
            given = list(zip(func._schema.arguments, args, strict=False))
            written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
            only_written = written if name in ("copy_", "fill_", "zero_") else []
            only_written += [value for argument, value in given if argument.name == "copy"]  # of distrain::adamw
            read = [value for _, value in given if not any(value is each for each in only_written)]
            made = [] if written else [result]
            self.kernels += 1
            self.bytes += _bytes(read) + _bytes(list((kwargs or {}).values())) + _bytes(written) + _bytes(made)
        return result


def _bytes(values: list[Any]) -> int:
    return sum(each.nbytes for each in tree_iter(values) if isinstance(each, Tensor))


def measure_step(engine: str, zero: int, precision: str, gradients: str, micros: int, moments: str = "fp32") -> StepBytes:
    """Return the bytes of a step, from two models that differ in their number of layers."""
    with reserve_port() as reserved:
        port = str(reserved.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        world = join_ranks("cpu")
    layout = (f"engine={engine}", f"parallel.zero={zero}")
    words = (
        *layout,
        f"train.precision={precision}",
        f"train.gradients={gradients}",
        f"train.batch={micros}",
        f"optim.moments={moments}",
    )
    measured = []
    for layers in LAYERS:
        fixed = ("cluster=1x1", "device=cpu", "train.microbatch=1", f"train.seq={SEQ}", f"model.layers={layers}")
        run = load_recipe("quickstart", [*fixed, *MODEL, *words])
        measured.append((make_plan(run).model.parameters, _measure(run, world)))  # type: ignore[union-attr]
    (few, small), (many, large) = measured
    tensors = large["tensors"] - small["tensors"]
    per = {"waits": 0, "kernels": tensors}
    names = [each.name for each in fields(StepBytes)]
    return StepBytes(**{key: (large[key] - small[key]) / per.get(key, many - few) if key != "waits" else large[key] for key in names})


def _measure(run: Run, world: World) -> dict[str, float]:
    """Return the counts of the last of some steps."""
    live, moved, found = LiveBytes("cpu", block=1), MovedBytes(), dict[str, float]()
    with live:
        engine: Any = build_engine(run, make_grid(world, mesh_position(run, 0)), make_plan(run).engine)
        tokens = torch.zeros(1, SEQ, dtype=torch.long)
        if run.engine == "native":  # as on a GPU; here the kernel's operators run one by one, uncounted
            engine.bucket_optimizer.steps_in_one_kernel = True
        around = around_native_step if run.engine == "native" else around_deepspeed_step
        with around(engine, live, moved, found):
            for _ in range(STEPS):
                live.restart_peak()
                engine.step(lambda index: (tokens, tokens, {}), 1e-4, engine.micros * SEQ)
        found["after"] = live.now
        found["tensors"] = len(engine.parameters)
    return found


@contextmanager
def around_native_step(engine: Any, live: LiveBytes, moved: MovedBytes, found: dict[str, float]) -> Iterator[None]:
    """Count from the end of each step's passes, when the pipeline has run all of its actions, to the end of the step."""
    train, step, counting = engine.pipeline.train, engine.step, ExitStack()

    def train_then_count(*given: Any) -> Any:
        result = train(*given)
        found["passes"] = live.peak
        live.restart_peak()
        moved.bytes = moved.kernels = moved.waits = 0
        counting.enter_context(moved)
        return result

    def take_step(*given: Any) -> Any:
        with counting:
            result = step(*given)
        found.update(step=live.peak, moved=moved.bytes, kernels=moved.kernels, waits=moved.waits)
        return result

    engine.pipeline.train, engine.step = train_then_count, take_step
    yield
    engine.pipeline.train, engine.step = train, step


@contextmanager
def around_deepspeed_step(engine: Any, live: LiveBytes, moved: MovedBytes, found: dict[str, float]) -> Iterator[None]:
    """Count from the end of each step's passes: DeepSpeed's `step` of the last micro-batch, and what our engine does before it."""
    is_finite, step = engine._is_finite, engine.engine.step

    def begin(loss: Tensor) -> bool:
        found["passes"] = live.peak
        live.restart_peak()
        moved.bytes = moved.kernels = moved.waits = 0
        with moved:
            return bool(is_finite(loss))

    def take_step(*given: Any) -> Any:
        if not engine.engine.is_gradient_accumulation_boundary():
            return step(*given)
        with moved:
            result = step(*given)
        found.update(step=live.peak, moved=moved.bytes, kernels=moved.kernels, waits=moved.waits)
        return result

    engine._is_finite, engine.engine.step = begin, take_step
    yield
    engine._is_finite, engine.engine.step = is_finite, step


def main() -> int:
    """Print what the step of each configuration holds and moves, each measured in a forked process of its own."""
    with keep_imports():
        import_deepspeed()  # and compose a recipe: once, before it forks
        load_recipe("quickstart")
    for words in sys.argv[1:]:
        if (child := os.fork()) == 0:
            engine, zero, precision, gradients, micros, *moments = words.split(",")
            print(json.dumps(asdict(measure_step(engine, int(zero), precision, gradients, int(micros), *moments))), flush=True)
            os._exit(0)  # DeepSpeed's threads and process groups need no orderly end
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
