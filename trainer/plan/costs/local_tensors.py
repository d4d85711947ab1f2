"""Sizes of a block's tensors on one rank: the op table's sizes, split by the axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

from ...models.ops.op_table import Dims, Op, OpTable, Tensor, is_frozen, round_up
from ...models.ops.shared_ops import STREAM
from ...spec.run import Parallel
from ..axes import AXES, tp
from ..axes.axis import ActivationForm, Axis
from .number_or_array import for_each, is_number

# Products whose input is a norm's output, which compiled layers gather along the sequence, and make again in backward; a layer of linear
# attention keeps it.
NORMED_INPUT = ("attention", "attention.query", "attention.key_value", "mlp", "shared")
THOUSAND = 1000  # parts of an even share in which the load of a rank of experts is counted


class BlockSplit(NamedTuple):
    """The part of a layout that decides what a block costs one rank: the key by which the costs of blocks are cached."""

    degrees: tuple[tuple[str, int], ...]  # of the axes that split a block on several ranks, innermost first
    overlapped: tuple[str, ...]  # those of them whose messages hide under computation
    sequence: bool
    recompute: str
    microbatch: int
    form: ActivationForm
    fused: bool
    hooks: int  # host time of the engine's hooks for each weight in a forward pass, in operators
    ep_load: float = 1.0  # copies that a rank of experts computes, over an even share

    def degree(self, axis: str) -> int:
        """The degree of an axis; 1 for one that does not split blocks."""
        return dict(self.degrees).get(axis, 1)


@cache
def _block_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(sorted([axis for axis in reversed(axes) if axis.messages], key=lambda axis: axis.within is not None))


def block_split(
    parallel: Parallel, microbatch: int, form: ActivationForm, *, fused: bool, hides_messages: bool = True, hooks: int = 0
) -> BlockSplit:
    """The split of a layout's blocks. Axes within another come last. `hides_messages`: as parallel.overlap says, or else
    nothing hides a block's messages."""
    splitting = [(axis, degree) for axis in _block_axes(tuple(AXES.values())) if (degree := axis.degree(parallel)) > 1]
    return BlockSplit(
        degrees=tuple([(axis.name, degree) for axis, degree in splitting]),
        overlapped=tuple([axis.name for axis, _ in splitting if hides_messages and axis.hides_messages(parallel)]),
        sequence=parallel.sequence and parallel.tp > 1,
        recompute=parallel.recompute,
        microbatch=microbatch,
        form=form,
        fused=fused,
        hooks=hooks,
        ep_load=parallel.ep_load,
    )


class LocalTensors:
    """Tensors of a model's blocks on one rank, for one micro-batch: whole sizes split by the axes, padded where they don't divide.
    Where a split's degrees and micro-batch are arrays, the sizes are arrays too."""

    def __init__(self, table: OpTable, split: BlockSplit, *, vocab_multiple: int, activation: int, form: ActivationForm) -> None:
        """`activation` is the bytes of an element of an activation."""
        self.activation, self.form, self.sequence, self.fused = activation, form, split.sequence, split.fused
        self.axes = [AXES[name] for name, _ in split.degrees]
        vocab = round_up(table.sizes["vocab"], vocab_multiple * split.degree("tp"))
        self.sizes = {**table.sizes, "batch": split.microbatch, "vocab": vocab}
        # In thousandths. All copies of a rank alone are its own; of several, one can get those of all.
        self._ep_load = for_each(lambda ranks: round(THOUSAND * min(split.ep_load, ranks)), split.degree("ep"))
        self._counts: dict[tuple[Dims, str], int] = {}
        self._shares: dict[str, tuple[int, dict[str, int]]] = {  # of each axis: its degree, and a rank's elements where shares are uneven
            axis.name: (degree, _uneven_shares(axis, table.sizes, degree, vocab_multiple))
            for axis, (_, degree) in zip(self.axes, split.degrees, strict=True)
        }

    def shape(self, dims: Dims, *, without: str = "") -> list[int]:
        """Sizes of a tensor on one rank, if the axis `without` did not split it; an axis splits one dim of it."""
        local = [self.sizes[dim] for dim in dims]
        for axis in self.axes:
            dim = axis.split_dim(dims, sequence=self.sequence)
            if dim is not None and axis.name != without:
                degree, uneven = self._shares[axis.name]
                share, whole = (uneven[dim], self.sizes[dim]) if dim in uneven else (1, degree)
                at = dims.index(dim)
                local[at] = -(-local[at] * share // whole)
        return local

    def count(self, dims: Dims, *, without: str = "") -> int:
        """Elements of a tensor on one rank."""
        found = self._counts.get((dims, without))
        if found is None:
            found = prod(self.shape(dims, without=without))
            if "ep_load" in dims:
                found = -(-found * self._ep_load // THOUSAND)
            self._counts[dims, without] = found
        return found

    def bytes(self, tensor: Tensor, *, without: str = "") -> int:
        """Bytes of a tensor on one rank."""
        return self.count(tensor.dims, without=without) * (tensor.width or self.activation)


def _uneven_shares(axis: Axis, sizes: Mapping[str, int], degree: int, vocab_multiple: int) -> dict[str, int]:
    """A rank's elements along the dims that an axis splits, where its shares are uneven."""
    rank_sizes = axis.rank_sizes
    if rank_sizes is None:
        return {}
    if is_number(degree):
        return dict(rank_sizes(sizes, degree, vocab_multiple))
    shares = cache(lambda each: rank_sizes(sizes, each, vocab_multiple))
    return {dim: for_each(lambda each, dim=dim: shares(each)[dim], degree) for dim in shares(1)}  # type: ignore[misc]


def saved_bytes(op: Op, local: LocalTensors) -> int:
    """Bytes, without logits, that an op saves for backward: in our own modules, or as Megatron's and compiled layers do."""
    return sum(map(local.bytes, _saved_tensors(op, local)))


def logits_bytes(op: Op, local: LocalTensors) -> int:
    """Bytes of logits that an op saves; as the papers' engines have them, of one chunk."""
    saves = (tensor for tensor in op.saves_torch if "vocab" in tensor.dims) if local.form == "torch" else op.logits
    return -(-sum(map(local.bytes, saves)) // op.chunks)


def _saved_tensors(op: Op, local: LocalTensors) -> Iterable[Tensor]:
    match local.form:
        case "torch":
            saves = [tensor for tensor in op.saves_torch if "vocab" not in tensor.dims]
            if op.in_fp8 and local.sequence and tp.split_style(op) == "column":  # what came, this rank's part, which backward gathers again
                kept, *others = saves  # that of shared experts is the router's
                kept = replace(kept, width=None)
                return others if op.name == "shared" else [kept, *(each for each in others if each != kept)]
            return _saves_of_graphs(op, saves, local) if local.fused else saves
        case "megatron":
            return op.saves_megatron
        case _:
            return _compiled_saves(op, local)


def _saves_of_graphs(op: Op, saves: list[Tensor], local: LocalTensors) -> Iterable[Tensor]:
    """Return what an op saves where the compiler makes kernels of parts of a layer: backward computes an activated gate again, and a
    router's input and weight are saved as its product reads them, in float32. So the experts of all tokens save that input themselves,
    which else they share with the router. Where a layer is one graph, in less than float32, masks and gathered inputs are made again as in
    a layer without experts."""
    if op.product is None and op.name.endswith(".act"):
        return op.saves_megatron if len(op.saves_megatron) < len(saves) else saves
    if local.activation >= 4:
        return saves
    if op.name == "router":
        return [*(replace(each, width=4) if each == STREAM else each for each in saves), Tensor(op.weights[0].dims, 4)]
    is_gathered = local.sequence and op.name in NORMED_INPUT and tp.split_style(op) == "column"
    if is_gathered and not is_frozen(op) and "linear_keys" not in op.weights[0].dims:
        return [each for each in saves if each != _input_of(op)]
    gate_reads_shard = local.sequence and op.name == "shared_gate"
    if (op.name == "shared" or gate_reads_shard) and STREAM not in saves and not is_frozen(op):
        return [STREAM, *saves]
    return [each for each in saves if each.width != 1 or _keeps_mask(op)]


def _input_of(op: Op) -> Tensor | None:
    return Tensor(op.product.rows + op.product.inner) if op.product else None


def _compiled_saves(op: Op, local: LocalTensors) -> Iterator[Tensor]:
    """Yield what an op of a compiled layer saves: attention's core as if it were not compiled, the rest as Megatron does, with one mask.

    The other masks of dropout are drawn again, and the output of a norm that is gathered along the sequence is computed again from its
    input. So is the input of the second half's norm where the first half has one behind it, and so are inputs that a product casts to 8
    bits, but for the result of attention.
    """
    if op.in_fp8:
        yield from op.saves_torch[:1] if op.name == "attention.out" else ()
        yield from op.saves_megatron[1:]
        return
    again = op.sums_again or (local.sequence and tp.split_style(op) == "column")
    for tensor in op.saves_torch if op.core else op.saves_megatron:
        if (tensor.width != 1 or _keeps_mask(op)) and not (again and tensor == STREAM):
            yield tensor


def _keeps_mask(op: Op) -> bool:
    """Whether the mask of an op's dropout is kept: of a compiled layer's two residual sums one's, counted here as the last one's; and that
    of the embedding, and LoRA's, which is drawn in no other way."""
    return op.name in ("mlp.residual", "embedding") or op.name.endswith(".lora_dropout")
