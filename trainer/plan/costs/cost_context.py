"""The cost context of a run: what all of its layouts share, computed once and cached."""

from __future__ import annotations

from math import log2, prod
from typing import Any

from ...models.families import op_table
from ...models.ops.op_table import (
    Op,
    OpTable,
    block_weights,
    element_count,
    forward_flops,
    is_frozen,
    model_parameters,
    parameter_count,
)
from ...spec.run import Run
from ..axes.collectives import Wire
from ..axes.weight_slices import HeadShards
from ..layout.layout import LayerPartition, layer_partition, split_layers
from ..layout.mesh import Mesh, Wires, group_wire, mesh_wires, ranks_in_node, split_group
from .block_costs import BlockCosts, SplitCosts
from .local_tensors import BlockSplit
from .precision import spared_bytes, state_bytes, widths
from .roofline import rates

SLOWEST_RANK = 0.004  # share of a step that a doubling of the nodes adds: it ends with the slowest rank
CONSTANT_BYTES = 4  # float32
STEP_DISPATCHES = 200  # operators that the host dispatches once a step and nothing hides: the batch, the loss, the norm, the schedule


class CostContext:
    """Facts of a run that do not depend on its layout, and caches of costs and wires."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.table: OpTable = op_table(run)
        self.widths = widths(run.train)
        self.states = state_bytes(run.optim)
        self.spared = spared_bytes(run.optim)
        self.rates, self.own_rates = (
            rates(run.cluster.device, run.train.precision, fused=False, own=own) if self.table.has_costs else None for own in (False, True)
        )
        self.world = run.cluster.nodes * run.cluster.gpus
        self.capacity = 0 if run.cluster.device.memory == "auto" else int(run.cluster.device.memory)
        self.device_context = int(run.cluster.device.context)
        self.tail = SLOWEST_RANK * log2(run.cluster.nodes) if run.cluster.device.kind == "cuda" else 0.0
        self.step_overhead = STEP_DISPATCHES * run.cluster.device.dispatch
        self.parameters = parameter_count(self.table, run.model.layers)
        constants = (each for op in self.table.layer for each in op.constants)
        self.layer_constants = CONSTANT_BYTES * sum([element_count(each.dims, self.table.sizes) for each in constants])
        self.trained_parameters = parameter_count(self.table, run.model.layers, trained=True)
        self.active_parameters = parameter_count(self.table, run.model.layers, active=True)
        blocks = (("embedding", self.table.embedding), ("layer", self.table.layer), ("head", self.table.head))
        self._flops = {name: self._sum_flops(ops) for name, ops in blocks}
        self._weight_gradients = {name: self._sum_flops(tuple(op for op in ops if not is_frozen(op))) for name, ops in blocks}
        self._core = self._sum_flops(tuple(op for op in self.table.layer if op.core))
        self._block_costs: dict[tuple[BlockSplit, tuple[int, ...]], BlockCosts] = {}
        self._splits: dict[tuple[object, ...], SplitCosts] = {}
        self._wires: dict[Mesh, Wires] = {}
        self._partitions: dict[tuple[object, ...], LayerPartition] = {}
        self.held: dict[tuple[object, ...], Any] = {}  # HeldStates of a kind of stage, by stage_cost.py's keys
        self.passes: dict[tuple[object, ...], Any] = {}  # StagePasses of kinds of stage, by stage_cost.py's keys
        self.synced: dict[tuple[object, ...], Any] = {}  # SyncedStates of kinds of stage, by stage_cost.py's keys
        self.memo: dict[tuple[object, ...], Any] = {}  # a cost model's results, by keys of its own

    @property
    def forward_flops(self) -> int:
        """FLOPs of one sequence's forward pass, attention in full."""
        return self._of_model(self._flops)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, forward and backward, by the convention of train.flops; frozen weights have no gradients."""
        if self.run.train.flops == "parameters" or not self.table.has_costs:
            return 6.0 * self.active_parameters - 2.0 * (self.parameters - self.trained_parameters)
        return (2.0 * self.forward_flops + self._of_model(self._weight_gradients)) / self.run.train.seq

    @property
    def spared_bytes(self) -> int:
        """Bytes of all states that the optimizer doesn't keep of hidden matrices (precision.py)."""
        if not self.spared:
            return 0
        layer = model_parameters(self.table, range(1), first=False, last=False)
        matrices = (prod(each.shape(self.table.sizes)) for each in layer if each.hidden_matrix and not each.frozen)
        return self.spared * self.run.model.layers * sum(matrices)

    def recompute_flops_per_token(self, recompute: str) -> float:
        """FLOPs of a token that recomputation adds."""
        each = {"full": self._flops["layer"], "selective": self._core, "none": 0}[recompute]
        return self.run.model.layers * each / self.run.train.seq

    def block_costs(self, split: BlockSplit, wires: Wires) -> BlockCosts:
        """The costs of the model's blocks under a split and its wires. Wires differ only in how many ranks of a group a node has."""
        key = (split, wires.in_node)
        found = self._block_costs.get(key)
        if found is None:
            found = self._block_costs[key] = self._split_costs(split, wires, key[1]).blocks(split.recompute, split.hooks)
        return found

    def _split_costs(self, split: BlockSplit, wires: Wires, in_node: tuple[int, ...]) -> SplitCosts:
        key = (split.degrees, split.overlapped, split.sequence, split.microbatch, split.form, split.fused, in_node)
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
        links = cluster.inside, cluster.between
        return group_wire(shard, near, *links), group_wire(size // shard, far, *links)

    def single_link(self, whole: Wire) -> Wire:
        """The wire of the same ranks, where each message takes one rank's link alone."""
        cluster = self.run.cluster
        return group_wire(whole.size, whole.size if whole.link == "inside" else 1, cluster.inside, cluster.between)

    def partition(self, stages: int, *, chunks: int = 1, folded: bool, given: tuple[int, ...] | None = None) -> LayerPartition:
        """The layers of each part of the model: as `given`, else balanced by the sum of their shares of the model's bytes and FLOPs."""
        key = (stages, chunks, folded, given)
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = self._partition(stages, chunks, folded, given)
        return found

    def _partition(self, stages: int, chunks: int, folded: bool, given: tuple[int, ...] | None) -> LayerPartition:
        if given:
            return layer_partition(given, chunks=chunks, folded=folded)
        table = self.table
        layer, first, last = self._load("layer", table.layer), self._load("embedding", table.embedding), self._load("head", table.head)
        return split_layers(self.run.model.layers, stages, layer, first, last, chunks=chunks, folded=folded)

    def kv_copies_wire(self, mesh: Mesh) -> Wire:
        """The wire of the tensor-parallel ranks that hold the same key and value heads."""
        sizes, cluster = self.table.sizes, self.run.cluster
        copies = HeadShards(sizes["heads"], sizes["kv_heads"], mesh.tp).copies
        return group_wire(copies, ranks_in_node(((copies, 1),), cluster.gpus) or 1, cluster.inside, cluster.between)

    def _sum_flops(self, ops: tuple[Op, ...]) -> int:
        """FLOPs of one sequence's forward pass through ops."""
        return sum(forward_flops(op, self.table.sizes) for op in ops) // self.run.train.microbatch

    def _of_model(self, blocks: dict[str, int]) -> int:
        """The sum over the blocks of the model of a number that each kind of block has."""
        return blocks["embedding"] + self.run.model.layers * blocks["layer"] + blocks["head"]

    def _load(self, name: str, ops: tuple[Op, ...]) -> float:
        elements = sum(element_count(weight.dims, self.table.sizes) for weight in block_weights(ops))
        return elements / self.parameters + (self._flops[name] / self.forward_flops if self.table.has_costs else 0.0)
