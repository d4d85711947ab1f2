"""Costs of one block of a model on one rank for one micro-batch, from its op table and the axes that split it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

from ...models.ops.fused_attention_saves import MASK_OF_DOCUMENTS
from ...models.ops.op_table import Op, OpTable, block_weights, is_hidden_matrix
from ...models.ops.shared_ops import STREAM
from ...spec.derived.document_kernel import has_document_kernel
from ...spec.run import Run
from ..axes import tp
from ..axes.axis import ActivationForm
from ..axes.message import AxisMessage
from ..axes.weight_slices import HeadShards, has_padded_heads
from ..layout.mesh import Wires
from .attention_core import core_seconds, is_fused_core, log_sum_bytes, uneven_parts, with_core_again
from .block_messages import OpMessage, block_messages, recomputed_ops
from .block_temporary_bytes import OpBytes, block_temporary_bytes, later_backward_bytes, op_bytes
from .deferred_bytes import deferred_bytes
from .local_tensors import BlockSplit, LocalTensors, logits_bytes
from .number_or_array import for_each, larger
from .op_seconds import OpParts, OpSeconds, op_kernels, op_parts
from .pass_seconds import RankOp, block_seconds
from .precision import widths
from .roofline import DeviceRates, memory_seconds, rates

# An exchange of tokens for heads (trainer/layers/transformer/head_exchange.py) copies each tensor twice, reading and writing it: one kernel
# beside its heads, and three beside its sequence, the later half of whose chunks are turned round first.
EXCHANGE_MOVES, EXCHANGE_KERNELS = 5, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block on one rank: parameters; bytes and seconds of a micro-batch (seconds None: the device's peak is unknown).

    `frozen` and `frozen_experts` count those of `dense` and of `experts` that are not trained, `matrices` and `expert_matrices` those of
    products' weights, `replicated` trained ones that every tensor-parallel rank holds, `shared` those that several hold together. `saved`
    are the activations kept for backward, `recomputed` those that recomputation adds, `deferred` what products hold whose weights'
    gradients wait (deferred_bytes.py), `temporary` the most that the passes hold beside `saved` (block_temporary_bytes.py).
    `weight_gradients` is a part of `backward`, and `core`, of fused attention, one of both; `message_forward` and `message_backward` are
    exposed seconds of `messages`.
    """

    dense: int
    frozen: int
    experts: int
    replicated: int
    shared: int
    matrices: int
    expert_matrices: int
    frozen_experts: int
    saved: int
    recomputed: int
    deferred: int
    temporary: int
    logits: int
    forward: float | None
    backward: float | None
    weight_gradients: float
    core: float
    message_forward: float
    message_backward: float
    messages: tuple[AxisMessage, ...]


BLOCK_COST_NAMES = tuple(field.name for field in fields(BlockCost))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """The costs of a model's blocks under one split. `first` are those before the layers that all stages have: the embedding, and the
    model's dense layers (`dense_layer` each) where it has some. `head` are those after them: the head, and the modules that predict further
    tokens where the model has some."""

    embedding: BlockCost
    dense_layer: BlockCost | None
    first: BlockCost
    layer: BlockCost
    head: BlockCost
    tied: int  # elements of the weight that embedding and head, or modules behind it, share, on one rank
    module: int  # parameters of one module behind the head, on one rank
    stream: int  # bytes of the hidden states that a rank sends to the next stage
    saved_once: int  # bytes of rotary positions and masks that each part of the model saves once for all of its layers
    elements: tuple[int, ...]  # all counts of parameters: blocks with the same counts hold the same states

    @property
    def tied_gradient(self) -> int:
        """Elements of the gradient of the weight that both ends share: none of a frozen one."""
        return self.tied * (self.embedding.frozen == 0)


class BlockElements(NamedTuple):
    """A block's parameters on one rank, as `BlockCost` counts them."""

    dense: int
    frozen: int
    experts: int
    replicated: int
    shared: int
    matrices: int
    expert_matrices: int
    frozen_experts: int


class OpCosts(NamedTuple):
    """The ops of a block on one rank, with the seconds (none where the device's rates aren't known) and the bytes of each; what does not
    depend on which of them run again."""

    ops: tuple[Op, ...]
    local: LocalTensors
    parts: list[OpParts]
    seconds: list[OpSeconds]  # of all parts
    bytes: list[OpBytes]
    messages: list[OpMessage]
    elements: BlockElements
    logits: int


class SplitCosts:
    """What a split's blocks cost whatever layers recompute and whatever hooks the engine has: sizes of tensors, seconds of ops."""

    def __init__(self, run: Run, table: OpTable, split: BlockSplit, wires: Wires) -> None:
        """The costs of one split of a run's model; its recomputation and its hooks are not read."""
        self.table, self.split, self.wires = table, split, wires
        cluster, own = run.cluster, split.form != "megatron"
        self.device = rates(cluster.device, run.train.precision, fused=split.fused, own=own, alone=cluster.nodes * cluster.gpus == 1)
        self.gradient = widths(run).gradient
        self.uneven_parts = uneven_parts(run, split, self.device)
        self.kind = "cpu" if run.cluster.device.kind == "cpu" else "cuda"
        # 1 where context parallelism's core runs again in its own backward, and saves no log-sum-exp: FusedCore (core_attention.py)
        has_flash = run.train.precision != "fp32" and "bf16" in run.cluster.device.peak  # compute capability 8 or later
        has_mask = run.data.documents and not has_document_kernel(run)
        fused_core = own and self.kind == "cuda" and (has_mask or not has_flash)
        self.has_context = for_each(lambda degree: int(degree > 1), split.degree("cp"))  # 1 where ranks share a sequence
        self.core_again = int(fused_core and run.parallel.cp_comm == "all_gather") * self.has_context
        exchanges = self.has_context * (run.parallel.cp_comm == "all_to_all")  # they keep the core's values in any case
        self.has_padding = own * (1 - exchanges) * for_each(partial(has_padded_heads, table.sizes), split.degree("tp"))
        self.local = self._local_tensors(run, split.form)
        outside = self._local_tensors(run, "torch") if split.form == "compiled" else self.local
        self.stream = self.local.bytes(STREAM)
        self.layer = self._ops(table.layer, self.local)
        self.dense_layer = self._ops(table.dense_layer, self.local) if table.dense_layers else None
        self.ends = [self._ops(ops, outside) for ops in (table.embedding, table.head)]
        self._cost_of_ends: dict[int, list[BlockCost]] = {}  # by hooks
        saves = [tensor for op in table.embedding for tensor in op.saves_torch] if split.form == "torch" else []
        once = [tensor for tensor in saves if {"rotary_dim", "window", "keys"} & set(tensor.dims)]
        self.further = [self._ops(ops, outside) for ops in (table.join, table.further)] if table.modules else []
        self.tied = self.local.count(("vocab", "hidden")) if table.shares_embedding else 0
        self.saved_once = sum(map(self.local.bytes, once))
        # Separate kernels save no mask of documents; layers that run again save it as an argument, as does a core whose ranks gather keys.
        is_saved = any("keys" in tensor.dims for op in table.embedding for tensor in op.saves_torch)
        is_argument = own and has_mask and not is_saved
        rows_of = "cp" if run.parallel.cp_comm == "all_to_all" else ""  # all ranks
        self.argument_mask = self.local.bytes(MASK_OF_DOCUMENTS, without=rows_of) if is_argument else 0
        self.core_mask = self.argument_mask * (self.has_context - exchanges)
        dense = self.dense_layer.elements if self.dense_layer else ()
        self.elements = (self.tied, *self.ends[0].elements, *dense, *self.layer.elements, *self.ends[1].elements)

    def blocks(self, recompute: str, hooks: int) -> BlockCosts:
        """The costs of the blocks with a recomputation of layers, under hooks as BlockSplit counts them."""
        ends = self._cost_of_ends.get(hooks)
        if ends is None:
            ends = self._cost_of_ends[hooks] = [_block_cost(self, each, "none", hooks) for each in self.ends]
        (embedding, head), layer = ends, _block_cost(self, self.layer, recompute, hooks)
        mask = self.argument_mask if recompute != "none" else self.core_mask
        embedding = replace(embedding, saved=embedding.saved + mask)
        module = self._module_costs(layer, hooks)
        dense = _block_cost(self, self.dense_layer, recompute, hooks) if self.dense_layer else None
        return BlockCosts(
            embedding=embedding,
            dense_layer=dense,
            first=_cost_sum(embedding, dense, self.table.dense_layers) if dense else embedding,
            layer=layer,
            head=self._head_with_modules(head, module) if module else head,
            tied=self.tied,
            module=sum([each.dense + each.experts for each in module]),
            stream=self.stream,
            saved_once=self.saved_once + mask,
            elements=self.elements,
        )

    def _module_costs(self, layer: BlockCost, hooks: int) -> tuple[BlockCost, ...]:
        """The blocks of a module that predicts a further token, in their order; none where the model has no such modules."""
        if not self.further:
            return ()
        join, further = (_block_cost(self, each, "none", hooks) for each in self.further)
        return join, layer, further

    def _head_with_modules(self, head: BlockCost, module: tuple[BlockCost, ...]) -> BlockCost:
        """The costs of the head and of the modules behind it, with this part's own copy of the embedding."""
        whole, weight = head, self.local.activation * self.local.count(("vocab", "hidden"))
        for each in module:
            whole = _cost_sum(whole, each, self.table.modules)
        held = [(each.temporary, each.saved + each.logits) for each in (head, *module)]
        most = later_backward_bytes(self.table.modules, held, weight, tied=self.table.tied)
        own = 0 if self.table.tied else self.tied
        return replace(whole, dense=whole.dense + own, temporary=most, recomputed=head.recomputed)

    def _ops(self, ops: tuple[Op, ...], local: LocalTensors) -> OpCosts:
        parts = [self.op_parts(op, local, self.device) for op in ops] if self.device else []
        logits = sum([logits_bytes(op, local) for op in ops])
        sent = [
            OpMessage(op, axis.sums_results, each)
            for op in ops
            for axis in local.axes
            if axis.messages
            for each in axis.messages(op, local)
        ]
        held = [self._op_bytes(op, local) for op in ops]
        return OpCosts(ops, local, parts, [each.total for each in parts], held, sent, _elements(ops, local, self.split), logits)

    def op_parts(self, op: Op, local: LocalTensors, device: DeviceRates) -> OpParts:
        """The seconds of an op by what they consist of, with the copies before and after an exchange of tokens for heads."""
        parts = op_parts(op, local, device, self.gradient)
        if is_fused_core(op):
            return OpParts(OpSeconds(parts.own.forward * self.uneven_parts, parts.own.input_gradients * self.uneven_parts, 0.0))
        if not op.head_exchanges:
            return parts
        moved, kernels = EXCHANGE_MOVES * sum(map(local.bytes, op.head_exchanges)), EXCHANGE_KERNELS * len(op.head_exchanges)
        copies = self.has_context * memory_seconds(moved, kernels, device)
        return parts._replace(copies=OpSeconds(copies, copies, 0.0))

    def ranked_ops(self, row: OpCosts, recompute: str, hooks: int) -> list[RankOp]:
        """The ops of a block as a rank runs them; none where the device's rates aren't known."""
        again, local, device = recomputed_ops(row.ops, recompute), row.local, self.device
        if device is None:
            return []
        core_again = self.core_again if recompute != "selective" else 0  # which runs it once more in any case
        copies = self.has_context * EXCHANGE_KERNELS
        kernels = [op_kernels(op, local) + hooks * len(op.weights) + copies * len(op.head_exchanges) for op in row.ops]
        return [
            RankOp(with_core_again(op, seconds, core_again), count * device.dispatch, op in again)
            for op, seconds, count in zip(row.ops, row.seconds, kernels, strict=True)
        ]

    def _op_bytes(self, op: Op, local: LocalTensors) -> OpBytes:
        """The bytes of an op, with what it saves where ranks share a sequence, or where the tensor axis does not divide the heads."""
        held = op_bytes(op, local, self.kind)
        swapped = self.has_context * sum(map(local.bytes, op.saves_exchanged))
        padded = self.has_padding * sum(map(local.bytes, op.saves_padded))
        return held._replace(saved=held.saved + swapped + padded - self.core_again * log_sum_bytes(op, local))

    def _local_tensors(self, run: Run, form: ActivationForm) -> LocalTensors:
        multiple, activation = run.model.vocab_multiple, widths(run).activation
        return LocalTensors(self.table, self.split, vocab_multiple=multiple, activation=activation, form=form)


def _block_cost(costs: SplitCosts, row: OpCosts, recompute: str, hooks: int) -> BlockCost:
    ops, local = row.ops, row.local
    again = recomputed_ops(ops, recompute)
    repeats, stream = [op in again for op in ops], costs.stream
    every = sum([each.saved for each in row.bytes])
    # arXiv:2205.05198 table 2; of a layer that is recomputed its input is saved
    saved = stream if recompute == "full" else sum([each.saved for each, is_again in zip(row.bytes, repeats, strict=True) if not is_again])
    messages, ranked = tuple(block_messages(row.messages, again, local.form)), costs.ranked_ops(row, recompute, hooks)
    dispatch, in_turn = (costs.device.dispatch, costs.device.is_cpu) if costs.device else (0.0, False)
    seconds = block_seconds(ranked, messages, costs.split, costs.wires, dispatch, in_turn=in_turn)
    elements = row.elements
    return BlockCost(
        dense=elements.dense,
        frozen=elements.frozen,
        experts=elements.experts,
        replicated=elements.replicated,
        shared=elements.shared,
        matrices=elements.matrices,
        expert_matrices=elements.expert_matrices,
        frozen_experts=elements.frozen_experts,
        saved=saved,
        recomputed=every - saved,
        deferred=sum([deferred_bytes(op, local) for op in ops]),
        temporary=block_temporary_bytes(row.bytes, repeats, stream, residual=row not in (*costs.ends, *costs.further)),
        logits=row.logits,
        forward=seconds.forward,
        backward=seconds.backward,
        weight_gradients=seconds.weight_gradients,
        core=core_seconds(ops, ranked),
        message_forward=seconds.message_forward,
        message_backward=seconds.message_backward,
        messages=tuple([each.message for each in messages]),
    )


def _cost_sum(block: BlockCost, other: BlockCost, many: int) -> BlockCost:
    """The costs of a block and of `many` other ones behind it."""

    def both(one: float | None, each: float | None) -> float | None:
        return None if one is None or each is None else one + many * each

    repeated = [each._replace(forward=many * each.forward, backward=many * each.backward) for each in other.messages]
    apart = ("recomputed", "temporary", "forward", "backward", "messages")
    sums = {name: getattr(block, name) + many * getattr(other, name) for name in BLOCK_COST_NAMES if name not in apart}
    return BlockCost(
        recomputed=larger(block.recomputed, other.recomputed),
        temporary=larger(block.temporary, other.temporary),
        forward=both(block.forward, other.forward),
        backward=both(block.backward, other.backward),
        messages=(*block.messages, *repeated),
        **sums,
    )


def _elements(ops: tuple[Op, ...], local: LocalTensors, split: BlockSplit) -> BlockElements:
    weights = [(weight, local.count(weight.dims)) for weight in block_weights(ops)]
    trained = [(tp.AXIS.split_dim(weight.dims), count) for weight, count in weights if not weight.frozen]
    matrices = [weight for op in ops for weight in op.weights if is_hidden_matrix(op, weight) and not weight.frozen]
    heads, kv_heads = local.sizes["heads"], local.sizes["kv_heads"]
    copies = for_each(lambda degree: HeadShards(heads, kv_heads, degree).copies, split.degree("tp"))
    return BlockElements(
        dense=sum([count for weight, count in weights if "experts" not in weight.dims]),
        frozen=sum([count for weight, count in weights if weight.frozen and "experts" not in weight.dims]),
        experts=sum([count for weight, count in weights if "experts" in weight.dims]),
        replicated=sum([count for dim, count in trained if dim is None]),
        shared=sum([count for dim, count in trained if dim == "kv_heads"]) * (copies > 1),
        matrices=sum([local.count(weight.dims) for weight in matrices if "experts" not in weight.dims]),
        expert_matrices=sum([local.count(weight.dims) for weight in matrices if "experts" in weight.dims]),
        frozen_experts=sum([count for weight, count in weights if weight.frozen and "experts" in weight.dims]),
    )
