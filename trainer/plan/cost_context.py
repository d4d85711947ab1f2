"""What a sweep of layouts shares: the run's facts, and the pieces and wires found so far."""

from __future__ import annotations

from typing import Any

from ..models.table import Op, Table, count, forward_flops, parameters, weights
from ..spec.run import Parallel, Run
from .axes import dp
from .block_costs import Pieces, Split, form, pieces, table_of
from .collectives import Wire
from .deepspeed.flat_tensors import Also, Flat, Lies, flat, lies, stepped
from .deepspeed.memory import MASTER, stage_of
from .engines import engine_for
from .layout import Kind, Layout, Partition, mesh_of, split_layers
from .mesh import Mesh, Wires, inner, together, wired, wires
from .precision import states, widths
from .roofline import rates
from .schedules import SCHEDULES
from .weight_slices import Heads


class Frame:
    """A run without its layout: facts worked out once, and what each split and mesh was found to cost."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.table: Table = table_of(run)
        self.form = form(run)
        self.widths = widths(run.train)
        self.states = states(run.optim)
        self.rates = rates(run.cluster.device, run.train) if self.table.computes else None
        self.world = run.cluster.nodes * run.cluster.gpus
        self.capacity = 0 if run.cluster.device.memory == "auto" else int(run.cluster.device.memory)
        self.context = int(run.cluster.device.context)
        self.parameters = parameters(self.table, run.model.layers)
        self.active_parameters = parameters(self.table, run.model.layers, active=True)
        self._flops = {
            name: sum(forward_flops(op, self.table.sizes) for op in ops) // run.train.microbatch
            for name, ops in (("embedding", self.table.embedding), ("layer", self.table.layer), ("head", self.table.head))
        }
        self._core = sum(forward_flops(op, self.table.sizes) for op in self.table.layer if op.core) // run.train.microbatch
        self._pieces: dict[tuple[Split, int, int, int], Pieces] = {}
        self._wires: dict[Mesh, Wires] = {}
        self._partitions: dict[tuple[int, bool], Partition] = {}
        self._lies: dict[tuple[Kind, int, int], Lies] = {}
        self.stages: dict[tuple[object, ...], list[Any]] = {}  # the kinds of stages that costs.py has found

    @property
    def forward_flops(self) -> int:
        """FLOPs of one sequence's forward pass, attention in full."""
        return self._flops["embedding"] + self.run.model.layers * self._flops["layer"] + self._flops["head"]

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, forward and backward, in the convention of train.flops."""
        if self.run.train.flops == "parameters" or not self.table.computes:
            return 6.0 * self.active_parameters
        return 3.0 * self.forward_flops / self.run.train.seq

    def again_flops_per_token(self, recompute: str) -> float:
        """FLOPs of a token that recomputation adds."""
        each = {"full": self._flops["layer"], "selective": self._core, "none": 0}[recompute]
        return self.run.model.layers * each / self.run.train.seq

    def pieces(self, split: Split, wires: Wires) -> Pieces:
        """The pieces of the model under a split whose axes are wired so: how a group lies on its nodes is all of a wire that varies."""
        key = (split, wires.tp.in_node, wires.cp.in_node, wires.ep.in_node)
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = pieces(self.run, self.table, split, wires)
        return found

    def wires(self, mesh: Mesh) -> Wires:
        """How the axes of a mesh are wired."""
        found = self._wires.get(mesh)
        if found is None:
            found = self._wires[mesh] = wires(mesh, self.run.cluster)
        return found

    def shards(self, mesh: Mesh, axis: str, whole: Wire, shard: int) -> tuple[Wire, Wire | None]:
        """How the ranks that ZeRO shards over are wired, the innermost of an axis's group, and how the copies of a shard."""
        size = whole.size
        if shard == size:
            return whole, None
        cluster = self.run.cluster
        near, far = (together(runs, cluster.gpus) or 1 for runs in inner(mesh.strides(axis), shard))
        links = cluster.inside, cluster.between
        return wired(shard, near, *links), wired(size // shard, far, *links)

    def partition(self, stages: int, *, folded: bool) -> Partition:
        """The layers of each part of the model: balanced by bytes and FLOPs, each as a share of the model's."""
        found = self._partitions.get((stages, folded))
        if found is None:
            table, parts = self.table, 2 * stages if folded else stages
            layer, first, last = self._load("layer", table.layer), self._load("embedding", table.embedding), self._load("head", table.head)
            found = self._partitions[stages, folded] = split_layers(self.run.model.layers, parts, layer, first, last, folded=folded)
        return found

    def lies(self, kind: Kind, tp: int, ep: int) -> Lies:
        """The parameters that a rank of a kind of stage holds."""
        found = self._lies.get((kind, tp, ep))
        if found is None:
            multiple = self.run.model.vocab_multiple
            made = lies(self.table, kind.layers, first=kind.first, last=kind.last, tp=tp, vocab_multiple=multiple, ep=ep)
            found = self._lies[kind, tp, ep] = made
        return found

    def flat(self, kind: Kind, mesh: Mesh) -> Flat:
        """How the parameters of a kind of stage lie on its data-parallel ranks, flattened."""
        return flat(self.lies(kind, mesh.tp, mesh.ep), mesh.dp * mesh.cp, mesh.ep)

    def stepped(self, kind: Kind, also: Also, stage: int, mesh: Mesh, data: int | None) -> int:
        """Elements of replicated or of shared weights that a data-parallel rank of a kind of stage steps at a ZeRO stage; None: most."""
        return stepped(self.lies(kind, mesh.tp, mesh.ep), also, stage, mesh.dp * mesh.cp, data)

    def sharing(self, mesh: Mesh) -> Wire:
        """How the ranks of the tensor axis that hold the same key and value heads are wired."""
        sizes, cluster = self.table.sizes, self.run.cluster
        copies = Heads(sizes["heads"], sizes["kv_heads"], mesh.tp).copies
        return wired(copies, together(((copies, 1),), cluster.gpus) or 1, cluster.inside, cluster.between)

    def _load(self, name: str, ops: tuple[Op, ...]) -> float:
        held = sum(count(weight.dims, self.table.sizes) for weight in weights(ops))
        return held / self.parameters + (self._flops[name] / self.forward_flops if self.table.computes else 0.0)

    def layout(self, parallel: Parallel, microbatch: int) -> Layout:
        """The layout of legal degrees."""
        mesh = mesh_of(parallel, self.world)
        data = mesh.dp * mesh.cp
        shard = data if parallel.shard == "all" else parallel.shard
        run = self.run
        micros = run.train.batch // (mesh.dp * microbatch)
        deepspeed = engine_for(run, parallel)[0] is not None
        half = self.widths.weight < MASTER and self.form == "torch"
        return Layout(
            parallel=parallel,
            mesh=mesh,
            wires=self.wires(mesh),
            micros=micros,
            microbatch=microbatch,
            partition=self.partition(mesh.pp, folded=mesh.pp > 1 and SCHEDULES[parallel.schedule].folded),
            shard=shard,
            expert_shard=max(1, shard // mesh.ep),
            way=dp.Way(
                zero=stage_of(parallel.zero, half=half) if deepspeed else parallel.zero,
                micros=micros,
                weight=self.widths.weight,
                gradient=self.widths.weight if deepspeed else self.widths.gradient,
                bucket=parallel.bucket,
                algorithm=parallel.reduce,
                deepspeed=deepspeed,
                overlap=parallel.overlap.data,
                often=parallel.zero == 3 or (parallel.zero == 2 and mesh.pp == 1),
            ),
        )


def split_of(parallel: Parallel, microbatch: int) -> Split:
    """The part of a layout that decides what a block costs one rank."""
    return Split(
        tp=parallel.tp,
        cp=parallel.cp,
        ep=parallel.ep,
        sequence=parallel.sequence and parallel.tp > 1,
        recompute=parallel.recompute,
        microbatch=microbatch,
        tensor_hidden=parallel.overlap.tensor,
        context_hidden=parallel.overlap.context,
    )
