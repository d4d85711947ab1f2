"""Memory and messages of DeepSpeed's engines, where they differ from the papers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...spec.run import Parallel, Run
from ..axes import dp
from ..axes.weight_slices import TensorCopies, WeightShard
from ..costs.block_costs import BlockCosts
from ..costs.control_message import ControlMessage
from ..costs.cost_context import CostContext
from ..costs.cost_model import CostModel, PassBytes, StageElements, StateBytes, UnplannedSize, elements_to_step
from ..costs.offload import GradientCopies, HostWork
from ..costs.precision import MASTER_BYTES
from ..costs.stage_temporary_bytes import stage_temporary_bytes
from ..costs.traffic_term import TrafficTerm
from ..layout.layout import Layout, StageKind
from ..layout.mesh import Mesh
from .control_messages import control_messages
from .defaults import REUSED
from .ds_config import overlaps_messages
from .flat_tensors import MOST_LAYERS, MOST_RANKS, StageParameters, flat_elements, stage_parameters, stepped_elements
from .memory import FrozenElements, ZeroSetting, effective_stage, step_bytes, step_work, zero_bytes
from .messages import traffic_terms
from .offload import gradient_copies, gradients_on_device, host_bytes, host_step

# ZeRO stage -> host time of DeepSpeed's hooks for each weight in a forward pass, in operators; in backward it is twice that. Measured on
# machines with an H200 (docs/gpu_acceptance.md).
HOOKS = {0: 0, 1: 1, 2: 1, 3: 6}
# ZeRO stage -> the operators of DeepSpeed's step, once and for each tensor, and those of its messages. Measured on a CPU, as in CostModel.
_STEP_OPERATORS = {0: (15, 0.5), 1: (55, 0.8), 2: (55, 0.8), 3: (50, 2.4)}
STEP_MESSAGES = 40


class DeepSpeedCosts(CostModel):
    """Costs of DeepSpeed 0.19, as counted on live tensors and messages."""

    hides_messages = False

    def hooks(self, parallel: Parallel) -> int:
        """At ZeRO 3 they gather and free each module's weights, and reduce each gradient."""
        return HOOKS[parallel.zero]

    def gradient_path(self, context: CostContext, parallel: Parallel, micros: int) -> dp.GradientSync:
        """Gradients travel in the width of weights, also if they accumulate in another. ZeRO 1 and 2 all-reduce each bucket, at ZeRO 2
        for every micro-batch, and gather weights after the optimizer's step: about 3 Psi a step, where the papers' ZeRO sends 2 Psi.
        At ZeRO 3 backward reuses the last 500 M parameters that forward gathered (counted on live runs)."""
        half = context.widths.weight < MASTER_BYTES
        path = super().gradient_path(context, parallel, micros)
        return path._replace(
            zero=effective_stage(parallel.zero, half=half, ep=parallel.ep),
            gradient=context.widths.weight,
            scatters=False,
            reused=REUSED // 2,
            gather_hides=False,
        )

    def state_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, held: StageElements) -> StateBytes:
        """As counted on live tensors (memory.py)."""
        width, parallel, mesh = context.widths, layout.parallel, layout.mesh
        setting = ZeroSetting(
            stage=effective_stage(parallel.zero, half=width.weight < MASTER_BYTES, ep=mesh.ep),
            ranks=mesh.size("data"),
            micros=layout.micros,
            weight=width.weight,
            gradient=width.gradient,
            states=context.states,
            bucket=min(parallel.bucket, held.dense + held.experts if mesh.pp > 1 else context.parameters),
            buckets=2 if overlaps_messages(context.run.cluster.device, parallel) else 1,
            pipeline=mesh.pp > 1,
        )
        parameters = _stage_parameters(context, kind, mesh)
        flat = flat_elements(parameters, mesh.size("data"), mesh.ep)
        largest = max([each.elements for part in (parameters.before, parameters.layer, parameters.after) for each in part], default=0)
        part = _stage3_frozen(context, kind, mesh) if held.frozen_parameters else 0
        states = zero_bytes(setting, held.trained_parameters, flat, FrozenElements(held.frozen_parameters, part))
        offload = parallel.offload
        return StateBytes(
            weights=0 if offload.parameters else states.weights,
            gradients=gradients_on_device(setting, states.gradients) if offload.optimizer else states.gradients,
            optimizer=0 if offload.optimizer else states.optimizer,
            buffers=states.buffers + (largest * width.weight if offload.optimizer and setting.stage < 3 else 0),
            step=0 if offload.optimizer else step_bytes(setting, held.trained_parameters, flat),
            host=host_bytes(setting, flat, largest, states, offload, pins=context.run.cluster.device.kind == "cuda"),
        )

    def pass_bytes(self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind) -> PassBytes:
        """As counted on live tensors."""
        streams = _hidden_states(layout, kind)
        return PassBytes(
            workspace=min(streams, 2) * blocks.stream,
            passing=streams * blocks.stream,
            passes=stage_temporary_bytes(context, blocks, kind),
        )

    def step_seconds(self, context: CostContext, layout: Layout, held: StageElements, tensors: int) -> float:
        """As counted on DeepSpeed's step, which is some kernels for each tensor."""
        if context.own_rates is None:
            return 0.0
        if layout.parallel.offload.optimizer:
            return self.host_seconds(context, layout, held)
        width = context.widths
        work = step_work(layout.gradient_sync.zero, weight=width.weight, gradient=width.gradient)
        return elements_to_step(layout, held) * work.moved / context.own_rates.memory + tensors * work.kernels * context.own_rates.launch

    def step_operators(self, layout: Layout) -> tuple[float, float]:
        """The norm, flat copies and the new weights are taken tensor by tensor, in Python; ranks agree on the norm and on overflows."""
        zero = layout.gradient_sync.zero
        once, each = _STEP_OPERATORS[zero]
        return once + STEP_MESSAGES * (zero > 0 and layout.shard_ranks > 1), each

    def host_step(self, context: CostContext, layout: Layout, held: StageElements) -> HostWork:
        """As DeepSpeed does it (offload.py)."""
        return host_step(
            layout.gradient_sync.zero,
            elements_to_step(layout, held),
            weight=context.widths.weight,
            states=context.states,
            weights_on_host=layout.parallel.offload.parameters,
        )

    def gradient_copies(self, context: CostContext, layout: Layout) -> Iterator[GradientCopies]:
        """As DeepSpeed does them (offload.py)."""
        width = context.widths
        return gradient_copies(layout.gradient_sync.zero, layout.micros, weight=width.weight, gradient=width.gradient)

    def summed_elements(
        self, context: CostContext, layout: Layout, blocks: BlockCosts, kind: StageKind, copies: TensorCopies, data: int | None
    ) -> int:
        """ZeRO 1 to 3 without a pipeline sum what a rank steps; other layouts, and bf16 with float32 gradients at ZeRO 1, which keeps
        all gradients, sum all that the stage holds."""
        width, mesh = context.widths, layout.mesh
        stage = effective_stage(layout.parallel.zero, half=width.weight < MASTER_BYTES, ep=mesh.ep)
        if stage and mesh.pp == 1 and not (stage == 1 and width.gradient > width.weight):
            return stepped_elements(_stage_parameters(context, kind, mesh), copies, stage, mesh.size("data"), data, mesh.ep)
        return super().summed_elements(context, layout, blocks, kind, copies, data)

    def unplanned_size(self, run: Run, parallel: Parallel, layers: int, ranks: int) -> UnplannedSize | None:
        """The fullest of very many ranks that shard very many layers is not computed; at ZeRO 3 all hold the same."""
        if layers <= MOST_LAYERS or ranks <= MOST_RANKS:
            return None
        stage = effective_stage(parallel.zero, half=run.train.precision != "fp32", ep=parallel.ep)
        if stage not in (1, 2):
            return None
        return UnplannedSize(
            says=f"with ZeRO {stage} the fullest of {ranks:,} ranks that shard {layers:,} layers is not planned",
            change=(("parallel.zero", 3),),
            fix=f"use at most {MOST_LAYERS} layers a stage, or at most {MOST_RANKS:,} ranks of dp x cp",
        )

    def traffic_terms(self, run: Run, mesh: Mesh, shards: Sequence[WeightShard], data: int) -> Iterator[TrafficTerm]:
        return traffic_terms(run, mesh, shards)

    def control_messages(self, run: Run, mesh: Mesh, shards: Sequence[WeightShard], layers: int) -> tuple[ControlMessage, ...] | None:
        return control_messages(run, mesh, shards, layers)


def _stage_parameters(context: CostContext, kind: StageKind, mesh: Mesh, *, frozen: bool = False) -> StageParameters:
    """Return the parameters that a rank of a kind of stage trains, or those that it holds frozen."""
    key = ("deepspeed", kind, mesh.tp, mesh.ep, frozen)
    if key not in context.memo:
        multiple = context.run.model.vocab_multiple
        context.memo[key] = stage_parameters(
            context.table, kind.layers, first=kind.first, last=kind.last, tp=mesh.tp, vocab_multiple=multiple, ep=mesh.ep, frozen=frozen
        )
    found: StageParameters = context.memo[key]
    return found


def _stage3_frozen(context: CostContext, kind: StageKind, mesh: Mesh) -> int:
    """Return the elements of a rank's parts of frozen parameters at ZeRO 3."""
    return flat_elements(_stage_parameters(context, kind, mesh, frozen=True), mesh.size("data")).stage3


def _hidden_states(layout: Layout, kind: StageKind) -> int:
    """Return how many hidden states the pipeline engine holds of each micro-batch in flight in addition to saved activations: each part's
    input, of which the layers get a copy, and its output until its gradient arrives. Receive and gradient buffers hold as many again, at
    most one of each."""
    if layout.mesh.pp == 1:
        return 0
    return 2 * (1 + layout.is_folded) - kind.first - kind.last
