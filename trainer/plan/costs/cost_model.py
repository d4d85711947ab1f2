"""Memory and messages of a rank's weights, gradients and optimizer states: the part of a plan that depends on the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from ...spec.changed_run import Change
from ...spec.run import Parallel, Run
from ..axes import dp
from ..axes.collectives import ALGORITHMS, FASTEST, Wire
from ..axes.powersgd_factors import FactorElements
from ..axes.traffic_row import TrafficRow
from ..axes.weight_slices import TensorCopies, WeightShard
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh
from ..layout.schedule_of_run import delay_of
from .block_costs import BlockCosts
from .control_message import ControlMessage
from .cost_context import CostContext
from .muon import MUON, data_messages, newton_schulz_seconds, step_bytes, tensor_messages
from .number_or_array import larger
from .offload import TO_DEVICE, TO_HOST, GradientCopies, HostBytes, HostWork, copies
from .precision import MASTER_BYTES, scale_share
from .traffic_term import TrafficTerm


class StateBytes(NamedTuple):
    """Bytes of states on a rank of one kind of stage, which no micro-batch changes.

    `buffers` are ZeRO's. `passes` and `step` are held for a moment: in forward and backward in addition to activations and logits, in the
    optimizer's step without them. `host` is what the rank holds in its host's memory instead.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    passes: int = 0
    step: int = 0
    host: HostBytes = HostBytes()


class PassBytes(NamedTuple):
    """Bytes of a micro-batch's passes on a rank of one kind of stage, beside activations and logits.

    `workspace` are recomputed tensors, gathered inputs, messages between stages. `passing` is what each micro-batch in flight holds in
    addition to its activations. `passes` is held for a moment, in forward and backward.
    """

    workspace: int = 0
    passing: int = 0
    passes: int = 0


class StageElements(NamedTuple):
    """Parameters on a rank of one kind of stage: those that all data-parallel ranks hold, how many of them are frozen, and experts; how
    many of the first and of the last are those of its layers' matrices; how many of the experts' are frozen."""

    dense: int
    frozen: int
    experts: int
    matrices: int = 0
    expert_matrices: int = 0
    frozen_experts: int = 0

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense + self.experts

    @property
    def trained_parameters(self) -> int:
        """Those that have gradients."""
        return self.trained_dense + self.trained_experts

    @property
    def trained_dense(self) -> int:
        """Those of them that all data-parallel ranks hold."""
        return self.dense - self.frozen

    @property
    def trained_experts(self) -> int:
        """Those of them that are experts'."""
        return self.experts - self.frozen_experts

    @property
    def frozen_parameters(self) -> int:
        """Those that have no gradients."""
        return self.frozen + self.frozen_experts


class UnplannedSize(NamedTuple):
    """A layout that is too large to be planned: why, changes and words that mend it."""

    says: str
    change: Change
    fix: str


class CostModel:
    """Costs as the papers describe them: ZeRO (arXiv:1910.02054) and pipelines (arXiv:2104.04473).

    A plan uses them for a layout that no engine runs. An engine that differs has a subclass in its row of `ENGINES`.
    """

    defers_products = False
    """Whether it computes weights' gradients apart: until then what their products need is held, else all that a micro-batch saves."""
    simulates_uneven = False
    """Whether a step is simulated whose closed form holds only if a forward and both halves of a backward take equally long."""
    hides_messages = True
    """Whether layers compute while the messages of their axes travel, as parallel.overlap says."""

    def hooks(self, parallel: Parallel) -> int:
        """Return the host time of the engine's hooks for each weight in a forward pass, in operators; in backward it is twice that."""
        return 0

    def gradient_path(self, context: CostContext, parallel: Parallel, micros: int) -> dp.GradientSync:
        """Return how gradients and weights travel on the data axis, for `micros` micro-batches a step.

        In a pipeline, ZeRO 2 too accumulates whole gradients and scatters them once a step, as Llama 3 and MegaScale do
        (arXiv:2407.21783 section 3.3.2, 2402.15627).
        """
        return dp.GradientSync(
            zero=parallel.zero,
            micros=micros,
            weight=context.widths.weight,
            gradient=context.widths.gradient,
            stepped=MASTER_BYTES,
            bucket=parallel.bucket,
            algorithm=parallel.reduce if parallel.reduce in (*ALGORITHMS, FASTEST) else "ring",
            scatters=True,
            reused=0,
            gather_hides=True,
            overlap=parallel.overlap.data,
            copies_hide=True,
            often=parallel.zero == 3 or (parallel.zero == 2 and parallel.pp == 1),
            updates=delay.updates(micros) if (delay := delay_of(parallel)) else 1,
            every=parallel.sync.every,
        )

    def state_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements) -> StateBytes:
        """Return the bytes of the parameters that a rank of a kind of stage holds (arXiv:1910.02054 section 5).

        They depend on the elements of `blocks`, not on their activations, and on the layout's micro-batches only by whether a step has
        several: stage_cost.py keeps them for other layouts.
        """
        parallel, width = layout.parallel, context.widths
        whole, sharded = held.trained_parameters, sharded_elements(layout, held.trained_dense, held.trained_experts)
        weights = width.weight * (sharded_elements(layout, held.dense, held.experts) if parallel.zero >= 3 else held.dense + held.experts)
        optimizer = (width.master + context.states) * (sharded if parallel.zero >= 1 else elements_to_step(layout, held))
        optimizer += ceil(scale_share(context.run.optim) * elements_to_step(layout, held)) - context.spared * matrices_to_step(layout, held)
        return StateBytes(
            weights=0 if parallel.offload.parameters else weights,
            gradients=width.gradient * (sharded if layout.gradient_sync.often else whole * (1 + layout.gradient_sync.staleness)),
            optimizer=0 if parallel.offload.optimizer else optimizer,
            buffers=self._buffers(context, layout, blocks, kind, whole),
            step=step_bytes(context, layout, kind, width.gradient),
            host=HostBytes(
                weights=weights if parallel.offload.parameters else 0,
                gradients=width.gradient * sharded if parallel.offload.optimizer else 0,
                optimizer=optimizer if parallel.offload.optimizer else 0,
            ),
        )

    def pass_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> PassBytes:
        """Return the bytes of a micro-batch's passes on a rank of a kind of stage."""
        return PassBytes(
            workspace=_recomputed_bytes(blocks, kind) + gathered_input(layout, blocks) + (2 * blocks.stream if layout.mesh.pp > 1 else 0)
        )

    def step_seconds(self, context: CostContext, layout: Layout, held: StageElements, tensors: int) -> float:
        """Return the seconds of the optimizer's step over `held` parameters in so many tensors; 0 where the device's rates aren't known.

        Adam is bound by memory: it reads and writes its states and the master weight, reads the gradient, writes the weight.
        """
        if context.rates is None:
            return 0.0
        if layout.parallel.offload.optimizer:
            return self.host_seconds(context, layout, held)
        width = context.widths
        moved = 2 * ((width.master or width.weight) + context.states) + width.gradient + width.weight
        return elements_to_step(layout, held) * moved / context.rates.memory

    def optimizer_seconds(self, context: CostContext, layout: Layout, held: StageElements, tensors: int) -> float:
        """Return `step_seconds`, and on a CPU what the host does beside them; 0 where the device's rates aren't known."""
        seconds = self.step_seconds(context, layout, held, tensors)
        if context.rates is None or not context.rates.is_cpu:
            return seconds
        once, each = self.step_operators(layout)
        return seconds + (once + each * tensors) * context.rates.dispatch

    def step_operators(self, layout: Layout) -> tuple[float, float]:
        """Return what the host of a CPU does in the optimizer's step beside what it moves, in operators: once, and for each tensor.
        These figures were fitted to torch's optimizer over flat tensors, from CPU seconds of two tiny models."""
        return 25, 0.3

    def host_seconds(self, context: CostContext, layout: Layout, held: StageElements) -> float:
        """Return the seconds of the optimizer's step on the host; 0 where the host's rates aren't known."""
        return self.host_step(context, layout, held).seconds(context.host_rates) if context.host_rates else 0.0

    def host_step(self, context: CostContext, layout: Layout, held: StageElements) -> HostWork:
        """Return the optimizer's step on the host, where it is offloaded: it reads gradients, which backward has copied, and copies the
        stepped weights back (arXiv:2101.06840 section 4)."""
        width, stepped = context.widths, elements_to_step(layout, held)
        moved = 2 * ((width.master or width.weight) + context.states) + width.gradient + width.weight
        return HostWork(stepped * moved, to_device=stepped * width.weight)

    def host_copies(
        self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements
    ) -> list[dp.DataMessages]:
        """Return the copies of a step between the device of a rank of a kind of stage and its host: gradients under backward, stepped
        weights to where they are held, and offloaded weights before they are used."""
        parallel, layers, found = layout.parallel, context.layers_of(kind), list[dp.DataMessages]()
        if parallel.offload.optimizer:
            stepped = elements_to_step(layout, held)
            for each in self.gradient_copies(context, layout):
                buckets, size = -(-stepped // parallel.bucket), stepped * each.size
                found.append(copies(each.verb, size, buckets, each.passes, context.host_rates, overlap=parallel.overlap.data))
            found += self.host_step(context, layout, held).copies(context.host_rates)
        if parallel.offload.parameters:
            own, width = sharded_elements(layout, held.dense, held.experts), context.widths.weight
            again = max(0, own - layout.gradient_sync.reused // layout.shard_ranks)  # backward finds the others on the device
            for elements, forward in ((own, True), (again, False)):
                if elements:
                    rounds, size = layout.micros, elements * width
                    found.append(copies(TO_DEVICE, size, max(1, layers), rounds, context.host_rates, forward=forward, overlap=True))
            if not parallel.offload.optimizer:
                found.append(copies(TO_HOST, own * width, 1, 1, context.host_rates))
        return found

    def gradient_copies(self, context: CostContext, layout: Layout) -> Iterator[GradientCopies]:
        """Yield the copies of gradients under backward, with an offloaded optimizer: here each micro-batch's to the host."""
        yield GradientCopies(TO_HOST, context.widths.gradient, layout.micros)

    def matrix_seconds(self, context: CostContext, layout: Layout, kind: StageKind, held: StageElements) -> float:
        """Return the seconds a step that the optimizer takes for hidden matrices in addition to `step_seconds`, which moves as many bytes
        for them as for other weights; 0 where the device's rates aren't known."""
        rates = context.own_rates
        return newton_schulz_seconds(context, layout, kind, rates) if rates and context.run.optim.name == MUON else 0.0

    def matrix_messages(
        self, context: CostContext, layout: Layout, kind: StageKind, wire: Wire, sync: dp.GradientSync, *, expert: bool
    ) -> list[dp.DataMessages]:
        """Return the messages of the data axis by which an optimizer gets whole matrices, of experts that ranks share out or of other
        weights; `wire` joins the ranks over which ZeRO shards them, else those that step the same."""
        return data_messages(context, layout, kind, wire, sync, expert=expert)

    def matrix_rows(self, context: CostContext, layout: Layout, kind: StageKind, data: int | None, tensor: int) -> list[TrafficRow]:
        """Return the messages of the tensor axis by which an optimizer gets whole matrices, on a rank of the data axis (None: on the one
        that sends most) and of the tensor axis."""
        return tensor_messages(context, layout, kind, data, tensor)

    def factors(self, context: CostContext, layout: Layout, kind: StageKind, *, expert: bool) -> FactorElements:
        """Return the gradient elements of a rank of a kind of stage that travel as two factors, and those of the factors: of experts that
        ranks share out, or of other weights."""
        return FactorElements()

    def saved_error_bytes(self, context: CostContext, layout: Layout) -> int:
        """Return the bytes that a checkpoint keeps of what compression has left out of gradients."""
        return 0

    def compression_seconds(self, context: CostContext, layout: Layout, kind: StageKind) -> float:
        """Return the seconds a step in which gradients are compressed and made again; 0 where the device's rates aren't known."""
        return 0.0

    def summed_elements(
        self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, copies: TensorCopies, data: int | None
    ) -> int:
        """Return the gradient elements that the tensor axis sums on the data-parallel rank `data` of a kind of stage (None: on the one with
        most), of weights that all of its ranks hold (`replicated`) or some of them (`shared`)."""
        ends = (blocks.first,) * kind.first + (blocks.head,) * kind.last
        if copies == "shared":
            return kind.layers * blocks.layer.shared + sum(end.shared for end in ends)
        return kind.layers * blocks.layer.replicated + sum(end.replicated for end in ends)

    def summed_width(self, context: CostContext, layout: Layout) -> int:
        """Return the bytes of an element of the gradients that the tensor axis and the ends of a pipeline sum."""
        return context.widths.gradient

    def tied_elements(self, context: CostContext, layout: Layout, blocks: BlockCosts, data: int | None) -> int:
        """Return the elements of a tied weight's gradient that the first and the last stage sum on the data-parallel rank `data` (None: on
        the one with most)."""
        return blocks.tied_gradient

    def unplanned_size(self, run: Run, parallel: Parallel, layers: int, ranks: int) -> UnplannedSize | None:
        """Return why a stage of `layers` on `ranks` of the data axis is too large to be planned; None: it is planned."""
        return None

    def traffic_terms(self, run: Run, mesh: Mesh, shards: Sequence[WeightShard], data: int) -> Iterator[TrafficTerm]:
        """Yield how the engine's messages on the data axis differ from the planned ones for the weight shards of a rank, which has the
        number `data` on the data axis: here they don't."""
        return iter(())

    def control_messages(self, run: Run, mesh: Mesh, shards: Sequence[WeightShard], layers: int) -> tuple[ControlMessage, ...] | None:
        """Return the control messages of a step on a rank with these weight shards, and with experts in so many layers; None: they are not
        planned."""
        return None

    def _buffers(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, parameters: int) -> int:
        """Return the bytes of ZeRO's bucket or gathered layers.

        ZeRO-3 holds the whole weights of two layers (the one that computes, the one gathered ahead) and one layer's whole gradients.
        """
        parallel, width, layer = layout.parallel, context.widths, blocks.layer
        if parallel.zero == 3 and layout.shard_ranks > 1:
            others = (blocks.embedding, *([blocks.dense_layer] if blocks.dense_layer else []))
            largest = context.table.largest_layer or max(
                layer.dense + layer.experts, *[kind.first * each.dense for each in others], kind.last * blocks.head.dense
            )
            return largest * (2 * width.weight + width.gradient)
        return min(parallel.bucket, parameters) * width.gradient if layout.shard_ranks > 1 and parallel.zero > 0 else 0


def elements_to_step(layout: Layout, held: StageElements) -> int:
    """Return the parameters that a rank steps: those that it holds, or its ZeRO shard, or as a parameter server its part."""
    if servers := layout.gradient_sync.servers:
        return -(-held.trained_parameters // servers)
    return sharded_elements(layout, held.trained_dense, held.trained_experts) if layout.gradient_sync.zero else held.trained_parameters


def matrices_to_step(layout: Layout, held: StageElements) -> int:
    """Return how many of the parameters that a rank steps are those of layers' matrices."""
    if layout.gradient_sync.zero:
        return sharded_elements(layout, held.matrices, held.expert_matrices)
    return held.matrices + held.expert_matrices


def sharded_elements(layout: Layout, dense: int, experts: int) -> int:
    """Return the elements of a rank's ZeRO shard of `dense` parameters and of `experts`."""
    return -(-dense // layout.shard_ranks) - (-experts // layout.expert_shard_ranks)


def _recomputed_bytes(blocks: BlockCosts, kind: StageKind) -> int:
    """Return the bytes that recomputation adds while it runs in the layer of which it adds most."""
    dense = blocks.dense_layer.recomputed * kind.first if blocks.dense_layer else 0
    return larger(blocks.layer.recomputed, dense)


def gathered_input(layout: Layout, blocks: BlockCosts) -> int:
    """Return the bytes of a column layer's input, gathered along the sequence."""
    return blocks.stream * layout.parallel.tp if layout.parallel.sequence and layout.parallel.tp > 1 else 0
