"""The forward and backward passes of one rank of a run, traced on fake CUDA tensors: what they keep, hold, send and launch.

Nothing here comes from the planner's costs: the modules are those that `fit` builds, for a rank of a process group that sends nothing.
Import this after `load_device_guard`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...trainer.engines.held_bytes import tensors_in
from ...trainer.layers.dtypes import PRECISION_DTYPES
from ...trainer.loop import build
from ...trainer.loop.build import build_parts, compile_layers
from ...trainer.loop.data.samples.answer_pairs import AnswerPairs
from ...trainer.loop.data.samples.batches import Batch
from ...trainer.loop.step.model_inputs import model_inputs
from ...trainer.parallel.ledger import Ledger
from ...trainer.parallel.process_groups import Grid, make_grid
from ...trainer.parallel.rank_model import head_shards
from ...trainer.parallel.saved_bytes import SavedTensors, count_saved_tensors, storage_references
from ...trainer.parallel.world import World
from ...trainer.plan.compare_rank_messages import MessageRow
from ...trainer.plan.layout.schedule_of_run import schedule_of
from ...trainer.plan.mesh_position import mesh_position
from ...trainer.spec.run import Run
from .kernel_checks import CheckedKernels
from .live_bytes import LiveBytes, storage_bytes
from .patch_gpu_kernels import gpu_kernels

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What the passes of one rank do. Bytes.

    `kept` is what the forward pass of a micro-batch keeps for backward, `kept_by_layer` the part of each layer of the model. `peak` is the
    most that the step's passes hold at once beside the weights, with the gradients of earlier micro-batches; an only micro-batch's are
    taken as they come, as an engine takes them into memory of its own. `gradients` are those that a micro-batch leaves, `at` the operator
    that runs at the peak. `messages` are those of the passes, `kernels` those that a micro-batch launches. `checked`
    counts the kernels whose tensors were found to be as a GPU asks, by name.
    """

    rank: int
    stage: int
    parameters: int
    kept: int
    kept_by_layer: dict[int, int]
    peak: int
    gradients: int
    at: str
    messages: list[MessageRow]
    kernels: int
    checked: dict[str, int]
    kept_compiled: int | None = None  # where the run compiles its layers


def trace_rank(run: Run, rank: int) -> RankTrace:
    """Trace the passes of one step of a rank, of at most two micro-batches without a pipeline: the others repeat the second."""
    with ExitStack() as stack:
        grid = stack.enter_context(fake_grid(run, rank))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu_kernels(run.train.microbatch * run.train.seq // run.parallel.cp * run.model.top_k))
        stack.enter_context(no_values())
        return TracedPasses(run, grid, [part.module for part in build_parts(run, grid)]).trace()


def trace_compiled_bytes(run: Run, rank: int) -> int:
    """Return the bytes that the forward pass of a micro-batch keeps for backward in a rank's compiled layers, and in the rest of its stage.

    The graphs of forward and backward are those that torch's compiler makes; its backend runs them operator by operator.
    """
    with ExitStack() as stack:
        grid = stack.enter_context(fake_grid(run, rank))
        stack.enter_context(patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"))
        stack.enter_context(patch.object(torch._dynamo.config, "disable", False))
        stack.enter_context(patch.object(torch._functorch.config, "bundled_autograd_cache", False))  # it can't store fake tensors
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu_kernels(run.train.microbatch * run.train.seq // run.parallel.cp * run.model.top_k, compiled=True))
        stack.enter_context(no_values())
        parts = [part.module for part in build_parts(run, grid)]
        torch._dynamo.reset()
        for part in parts:
            compile_layers(part, "aot_eager_decomp_partition")
        passes = TracedPasses(run, grid, parts)
        for number in range(len(parts)):
            passes.forward(number, 0)
        return passes.kept


@contextmanager
def fake_grid(run: Run, rank: int) -> Iterator[Grid]:
    """The process groups of one rank of a run, whose messages go nowhere."""
    size = run.cluster.nodes * run.cluster.gpus
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    make_group = dist.new_group

    def own_group(ranks: list[int], **options: Any) -> Any:
        return make_group(ranks, **options) if rank in ranks else None  # thousands of others would take minutes

    try:
        with patch.object(dist, "new_group", own_group):
            grid = make_grid(
                World(rank=rank, size=size, device=CUDA),
                mesh_position(run, rank),
                copies=head_shards(run, run.parallel.tp).copies,
                alone=run.parallel.offload.parameters,
            )
        yield grid
    finally:
        dist.destroy_process_group()


@contextmanager
def no_values() -> Iterator[None]:
    """Have weights begin without values, which fake tensors have none of."""
    with patch.object(build, "initial_values", lambda *_, **__: None), patch.object(build, "copy_padded", lambda *_: None):
        yield


class TracedPasses:
    """The forward and backward passes of one step, on the parts of the model that a rank has."""

    def __init__(self, run: Run, grid: Grid, parts: Sequence[Any]) -> None:
        self.run, self.grid, self.parts = run, grid, parts
        self.micros = run.train.batch // (grid.size("dp") * run.train.microbatch)
        self.parameters = list({id(each): each for part in parts for each in part.parameters()}.values())
        self.live, self.ledger = LiveBytes("cuda"), Ledger(grid)
        self.outputs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # of (part, micro-batch): its input and output
        self.kept, self.kept_by_layer = 0, dict[int, int]()
        self.taken = 0  # bytes of gradients

    def trace(self) -> RankTrace:
        """Run the step and return what it did."""
        self.live.add(self.parameters)
        weights, kernels = self.live.now, 0
        trained = [each for each in self.parameters if each.requires_grad]
        for each in trained if self.micros == 1 else ():
            each.register_post_accumulate_grad_hook(self._take_gradient)
        with self.live, self.ledger, CheckedKernels() as asked:
            for kind, micro, part in self._actions():
                before = self.live.kernels
                if kind == "F":
                    self.forward(part, micro)
                else:
                    self.backward(part, micro)
                kernels += self.live.kernels - before if micro == 0 else 0
        return RankTrace(
            rank=self.grid.world.rank,
            stage=self.grid.position.coordinates["pp"],
            parameters=sum(each.numel() for each in self.parameters),
            kept=self.kept,
            kept_by_layer=self.kept_by_layer,
            peak=self.live.peak - weights,
            gradients=self.taken + storage_bytes(each.grad for each in self.parameters if each.grad is not None),
            at=self.live.peak_operator,
            messages=self.ledger.rows,
            kernels=kernels,
            checked=dict(asked.checked),
        )

    def _take_gradient(self, parameter: Tensor) -> None:
        """Take a gradient away."""
        assert parameter.grad is not None
        self.taken += storage_bytes([parameter.grad])
        parameter.grad = None

    def _actions(self) -> list[tuple[str, int, int]]:
        """(F or B, micro-batch, part) in the order in which this rank runs them."""
        stages, schedule = self.grid.position.mesh.pp, schedule_of(self.run.parallel)
        if stages == 1:
            return [(kind, micro, 0) for micro in range(min(2, self.micros)) for kind in "FB"]
        stage = self.grid.position.coordinates["pp"]
        return [(each.kind, each.micro, each.chunk) for each in schedule.actions(stage, stages, self.micros, self.run.parallel.chunks)]

    def forward(self, part: int, micro: int) -> None:
        """Run a forward pass; of the first micro-batch it counts what is kept."""
        run, module = self.run, self.parts[part]
        tokens, labels, further = model_inputs(run, self._batch(), self.grid, 0)
        stream = None if module.first else self._hidden_states(module).requires_grad_()
        if micro:
            output, _ = module(tokens, labels, stream=stream, **further)
        else:
            with count_saved_tensors(self.parameters, tensors_in([tokens, labels, further])) as saved:
                output = self._forward_by_layer(module, saved, lambda: module(tokens, labels, stream=stream, **further)[0])
            self.kept += sum(saved.storages_except(storage_references(self.parameters)).values())
        self.outputs[part, micro] = stream, output

    def _forward_by_layer(self, module: Any, saved: SavedTensors, call: Callable[[], Tensor]) -> Tensor:
        """Call a forward pass, and count what each layer keeps."""
        hooks = []
        for name, layer in module.layers.items():
            number = int(name)

            def begin(*_: Any, number: int = number) -> None:
                self.kept_by_layer[number] = -saved.bytes

            def end(*_: Any, number: int = number) -> None:
                self.kept_by_layer[number] += saved.bytes

            hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
        try:
            return call()
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, part: int, micro: int) -> None:
        """Run a backward pass; a part that is not the last receives its output's gradient first."""
        _, output = self.outputs[part, micro]
        gradient = torch.empty_like(output) if output.dim() else torch.ones_like(output)
        torch.autograd.backward([output], [gradient])
        del self.outputs[part, micro]

    def _batch(self) -> Batch:
        size = (self.run.train.microbatch, self.run.train.seq)
        tokens, labels = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
        documents = torch.zeros(size, dtype=torch.long) if self.run.data.documents else None
        pairs = _one_pair_a_row(*size) if self.run.data.has_preferences else None
        return Batch(tokens=tokens, labels=labels, samples=torch.zeros(size[0], dtype=torch.long), documents=documents, pairs=pairs)

    def _hidden_states(self, module: Any) -> Tensor:
        """Return what the stage before sends: hidden states [B, S, H], or this rank's part of the sequence."""
        run = self.run
        seq = run.train.seq // run.parallel.cp // (run.parallel.tp if run.parallel.sequence else 1)
        return torch.empty(run.train.microbatch, seq, run.model.hidden, dtype=PRECISION_DTYPES[run.train.precision], device=CUDA)


def _one_pair_a_row(rows: int, seq: int) -> AnswerPairs:
    """Return pairs of answers, one in each of so many sequences."""
    wide = torch.zeros(rows, dtype=torch.long)
    starts, columns = torch.arange(2 * rows + 1) * (seq // 2), torch.ones(rows, 2, dtype=torch.long)
    return AnswerPairs(starts=starts, source=wide, number=wide, labels=columns, reference=columns.double())
