"""The cost context of a run: what all of its layouts share, computed once and cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import log2, prod
from typing import Any

from ...models.families import op_table
from ...models.ops.op_table import (
    Op,
    OpTable,
    Parameter,
    block_weights,
    element_count,
    forward_flops,
    is_frozen,
    model_parameters,
    parameter_count,
)
from ...spec.problem import Problem
from ...spec.run import Run
from ..axes.collectives import Wire
from ..axes.weight_slices import HeadShards
from ..layout.layout import LayerPartition, Layout, StageKind, layer_partition, split_layers
from ..layout.mesh import Mesh, Wires, group_wire, mesh_wires, ranks_in_node, split_group
from .block_costs import BlockCosts, SplitCosts
from .local_tensors import BlockSplit
from .offload import host_rates
from .precision import spared_bytes, state_bytes, widths
from .roofline import rates

SLOWEST_RANK = 0.004  # share of a step that a doubling of the nodes adds: it ends with the slowest rank
CONSTANT_BYTES = 4  # float32
# Operators that the host dispatches once a step and nothing hides: the batch, the loss, the norm, the schedule; on a CPU without those of
# the optimizer's step, which its engine counts (cost_model.py).
STEP_DISPATCHES, CPU_STEP_DISPATCHES = 200, 30


class CostContext:
    """Facts of a run that do not depend on its layout, and caches of costs and wires."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.table: OpTable = op_table(run)
        self.widths = widths(run)
        self.states = state_bytes(run.optim)
        self.spared = spared_bytes(run.optim)
        self.rates, self.own_rates = (
            rates(run.cluster.device, run.train.precision, fused=False, own=own) if self.table.has_costs else None for own in (False, True)
        )
        self.host_rates = host_rates(run)
        self.world = run.cluster.nodes * run.cluster.gpus
        self.capacity = 0 if run.cluster.device.memory == "auto" else int(run.cluster.device.memory)
        self.device_context = int(run.cluster.device.context)
        self.tail = SLOWEST_RANK * log2(run.cluster.nodes) if run.cluster.device.kind == "cuda" else 0.0
        once = CPU_STEP_DISPATCHES if run.cluster.device.kind == "cpu" else STEP_DISPATCHES
        self.step_overhead = once * run.cluster.device.dispatch_seconds
        self.parameters = parameter_count(self.table, run.model.layer_groups)
        constants = (each for op in self.table.layer for each in op.constants)
        self.layer_constants = CONSTANT_BYTES * sum([element_count(each.dims, self.table.sizes) for each in constants])
        self.trained_parameters = parameter_count(self.table, run.model.layer_groups, trained=True)
        self.active_parameters = parameter_count(self.table, run.model.layer_groups, active=True)
        self.dense_layers = self.table.dense_layers
        self.layers = run.model.repeated_layers  # layers that are alike
        self._block_costs: dict[tuple[BlockSplit, tuple[int, ...]], BlockCosts] = {}
        self._splits: dict[tuple[object, ...], SplitCosts] = {}
        self._wires: dict[Mesh, Wires] = {}
        self._partitions: dict[tuple[object, ...], LayerPartition] = {}
        self.held: dict[tuple[object, ...], Any] = {}  # HeldStates of a kind of stage, by stage_cost.py's keys
        self.passes: dict[tuple[object, ...], Any] = {}  # StagePasses of kinds of stage, by stage_cost.py's keys
        self.synced: dict[tuple[object, ...], Any] = {}  # SyncedStates of kinds of stage, by stage_cost.py's keys
        self.memo: dict[tuple[object, ...], Any] = {}  # a cost model's results, by keys of its own

    def unstated_float32(self) -> Iterator[Problem]:
        """Warn where our modules compute products in float32 on a GPU whose rate in it is not stated: they are planned at another one."""
        device, ops, given = self.run.cluster.device, (*self.table.layer, *self.table.dense_layer), self.run.train.precision
        if device.kind == "cuda" and "fp32" not in device.peak and any(each.product and each.product.in_float32 for each in ops):
            says = f"how fast {device.name} is in fp32 is not stated: linear attention is planned as if it were in {given}"
            yield Problem(rule="time", says=says, mend="set cluster.device.peak.fp32 (FLOP/s)")

    @cached_property
    def forward_flops(self) -> int:
        """FLOPs of one sequence's forward pass, attention in full."""
        return self._flops(lambda op: True)

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, forward and backward, by the convention of train.flops; frozen weights have no gradients."""
        if self.run.train.flops == "parameters" or not self.table.has_costs:
            return 6.0 * self.active_parameters - 2.0 * (self.parameters - self.trained_parameters)
        return (2.0 * self.forward_flops + self._flops(lambda op: not is_frozen(op))) / self.run.train.seq

    @property
    def spared_elements(self) -> int:
        """The elements of hidden matrices, of which the optimizer keeps fewer states (precision.py); 0 where it keeps all."""
        if not self.spared:
            return 0
        kinds = ((StageKind(0, True, False), 1), (StageKind(1, False, False), self.layers))
        return sum(
            many * prod(each.shape(self.table.sizes))
            for kind, many in kinds
            for each in self.stage_parameters(kind)
            if each.hidden_matrix and not each.frozen
        )

    def layers_of(self, kind: StageKind) -> int:
        """The layers of a kind of stage, dense ones included."""
        return kind.layers + kind.first * self.dense_layers

    def constants_of(self, kind: StageKind) -> int:
        """Bytes of the constants of a kind of stage: of its layers, and of the modules behind the head."""
        return (kind.layers + kind.last * self.table.modules) * self.layer_constants

    def stage_parameters(self, kind: StageKind) -> Iterator[Parameter]:
        """Yield the parameters of a kind of stage."""
        layers = range(0 if kind.first else self.dense_layers, self.dense_layers + kind.layers)
        return model_parameters(self.table, layers, first=kind.first, last=kind.last)

    def recompute_flops_per_token(self, recompute: str) -> float:
        """FLOPs of a token that recomputation adds, of layers and of logits in chunks."""
        chunked = self._flops(lambda op: op.chunks > 1)
        if recompute == "none":
            return chunked / self.run.train.seq
        return (chunked + self._flops(lambda op: op.core or recompute == "full", ends=False)) / self.run.train.seq

    def block_costs(self, split: BlockSplit, wires: Wires) -> BlockCosts:
        """The costs of the model's blocks under a split and its wires. Wires differ only in how many ranks of a group a node has."""
        key = (split, wires.in_node)
        found = self._block_costs.get(key)
        if found is None:
            found = self._block_costs[key] = self.split_costs(split, wires).blocks(split.recompute, split.hooks)
        return found

    def split_costs(self, split: BlockSplit, wires: Wires) -> SplitCosts:
        """What a split's blocks cost whatever layers recompute and whatever hooks the engine has."""
        key = (split.degrees, split.overlapped, split.sequence, split.microbatch, split.form, split.fused, split.ep_load, wires.in_node)
        found = self._splits.get(key)
        if found is None:
            found = self._splits[key] = SplitCosts(self.run, self.table, split, wires)
        return found

    def wires(self, mesh: Mesh) -> Wires:
        """The wires of a mesh."""
        found = self._wires.get(mesh)
        if found is None:
            found = self._wires[mesh] = mesh_wires(mesh, self.run.cluster)
        return found

    def shard_wires(self, mesh: Mesh, group: str, whole: Wire, shard: int) -> tuple[Wire, Wire | None]:
        """The wires of the ranks that ZeRO shards over, the innermost of a group, and of those that own the same shard (None: one)."""
        size = whole.size
        if shard == size:
            return whole, None
        cluster = self.run.cluster
        near, far = (ranks_in_node(strides, cluster.gpus) or 1 for strides in split_group(mesh.strides(group), shard))
        return group_wire(shard, near, cluster), group_wire(size // shard, far, cluster)

    def single_link(self, whole: Wire) -> Wire:
        """The wire of the same ranks, where each message takes one rank's link alone."""
        cluster = self.run.cluster
        return group_wire(whole.size, whole.size if whole.link == "inside" else 1, cluster)

    def layers_of_stage(self, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) of the layers of each part of a stage."""
        group = self.run.model.layers_in_group
        return tuple((first * group, end * group) for first, end in map(layout.layers, layout.parts(stage)))

    def partition(self, stages: int, *, chunks: int = 1, folded: bool, given: tuple[int, ...] | None = None) -> LayerPartition:
        """The layers of each part of the model: as `given`, else balanced by the sum of their shares of the model's bytes and FLOPs."""
        key = (stages, chunks, folded, given)
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = self._partition(stages, chunks, folded, given)
        return found

    def _partition(self, stages: int, chunks: int, folded: bool, given: tuple[int, ...] | None) -> LayerPartition:
        if given:
            parts = (given[0] - self.dense_layers, *given[1:])
            return layer_partition(parts, chunks=chunks, folded=folded, dense_layers=self.dense_layers)
        table, dense = self.table, self.dense_layers
        layer, first, last = (self._load(ops) for ops in (table.layer, table.embedding, table.head))
        last += table.modules * (layer + self._load(table.join) + self._load(table.further))
        if dense:
            first += dense * self._load(table.dense_layer)
        return split_layers(self.layers, stages, layer, first, last, chunks=chunks, folded=folded, dense_layers=dense)

    def kv_copies_wire(self, mesh: Mesh) -> Wire:
        """The wire of the tensor-parallel ranks that hold the same key and value heads."""
        sizes, cluster = self.table.sizes, self.run.cluster
        copies = HeadShards(sizes["heads"], sizes["kv_heads"], mesh.tp).copies
        return group_wire(copies, ranks_in_node(((copies, 1),), cluster.gpus) or 1, cluster)

    def _flops(self, counts: Callable[[Op], bool], *, ends: bool = True) -> int:
        """FLOPs of one sequence's forward pass through those ops of the model that count, of its layers alone without its ends."""
        return sum(
            many * self._sum_flops(tuple(op for op in ops if counts(op)))
            for many, ops in self.table.blocks(self.run.model.layer_groups)
            if ends or ops in (self.table.layer, self.table.dense_layer)
        )

    def _sum_flops(self, ops: tuple[Op, ...]) -> int:
        """FLOPs of one sequence's forward pass through ops."""
        return sum(forward_flops(op, self.table.sizes) for op in ops) // self.run.train.microbatch

    def _load(self, ops: tuple[Op, ...]) -> float:
        elements = sum(element_count(weight.dims, self.table.sizes) for weight in block_weights(ops))
        return elements / self.parameters + (self._sum_flops(ops) / self.forward_flops if self.table.has_costs else 0.0)
