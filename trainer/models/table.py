"""The language that a model family is written in: a table of ops over logical dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..spec.run import Model, Train

Dims = tuple[str, ...]  # names of logical dims: hidden ffn heads vocab seq experts batch ...


@dataclass(frozen=True)
class Tensor:
    """A tensor by its logical dims; `width` is bytes an element, None for that of an activation."""

    dims: Dims
    width: int | None = None


@dataclass(frozen=True)
class Weight:
    """A parameter by its name inside its block and its logical dims."""

    name: str
    dims: Dims


@dataclass(frozen=True)
class Parameter:
    """A weight of the whole model: its logical name (`layers.3.attention.query.weight`), and for each dim of the tensor that
    holds it the logical dims that are flattened there. A matrix has its inner dims as rows, its outer ones as columns."""

    name: str
    dims: tuple[Dims, ...]

    def shape(self, size: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(count(dims, size) for dims in self.dims)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product y[rows, outer] = x[rows, inner] w[inner, outer], once for each of `groups`.

    `outers` are products of the same input done as one. `computed` is the share of it that a kernel does (a causal
    flash kernel: half), `backward` its cost in forwards (two products; flash attention computes the scores again).
    """

    rows: Dims
    inner: Dims
    outers: tuple[Dims, ...]
    groups: Dims = ()
    computed: float = 1.0
    backward: float = 2.0
    fused: bool = False  # one kernel that keeps its result on the chip: flash attention


@dataclass(frozen=True, kw_only=True)
class Op:
    """One row of a family's table: what it holds, computes, moves through memory and keeps for backward.

    `moves` are the tensors that one fused pass bound by memory reads and writes in forward, `eager` how many times that
    goes through memory where each torch operator is a kernel of its own. `core` ops are those that
    selective recomputation runs again (arXiv:2205.05198 section 5). `reduces` are results that a split dim sums up.
    `enters` is what a split region takes in whole where no column layer does. `exchanges` are tensors that travel to the experts
    and back. `kept` is what Megatron keeps, `saved` what our own torch modules do (on a CPU, not compiled), of families that have
    one: a storage that two ops save stands with one of them.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    product: Product | None = None
    moves: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()
    saved: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()
    reduces: tuple[tuple[str, Tensor], ...] = ()
    enters: tuple[Tensor, ...] = ()
    exchanges: tuple[Tensor, ...] = ()
    core: bool = False
    kernels: int = 1
    eager: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """A model as blocks of ops: what comes before the layers, one layer, what comes after."""

    sizes: Mapping[str, int]
    embedding: tuple[Op, ...]
    layer: tuple[Op, ...]
    head: tuple[Op, ...]
    tied: bool  # the head's `head.weight` is the embedding's `embedding.weight`
    computes: bool = True  # what it computes and keeps is stated, not its weights alone

    def blocks(self, layers: int) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """(how many, ops) of each kind of block in a model of so many layers."""
        yield 1, self.embedding
        yield layers, self.layer
        yield 1, self.head


def sizes(model: Model, train: Train) -> dict[str, int]:
    """Elements along each logical dim for one micro-batch of one data-parallel replica."""
    head_dim = model.head_dim or model.hidden // model.heads
    ffn = model.ffn or 4 * model.hidden
    expert_ffn = model.expert_ffn or ffn
    return {
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab": model.vocab,
        "context": model.context or train.seq,
        "seq": train.seq,
        "tokens": train.seq,  # of what the tensor axis never splits along the sequence
        "keys": train.seq,  # of what no axis does
        "batch": train.microbatch,
        "experts": model.experts,
        "choices": model.experts,
        "top_k": model.top_k,
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * model.shared_experts,
        "types": 2,
    }


def count(dims: Dims, size: Mapping[str, int]) -> int:
    """Elements of a tensor with these logical dims."""
    return prod(size[dim] for dim in dims)


def parameters(table: Table, layers: int, *, active: bool = False) -> int:
    """Parameters of the whole model; active: those that one token meets (top_k of the experts)."""
    size = table.sizes
    total = 0
    for many, ops in table.blocks(layers):
        for weight in weights(ops):
            if table.tied and weight.name == "head.weight":
                continue
            elements = count(weight.dims, size)
            if active and "experts" in weight.dims:
                elements = elements * size["top_k"] // size["experts"]
            total += many * elements
    return total


def weights(ops: tuple[Op, ...]) -> Iterator[Weight]:
    """Every parameter of a block."""
    for op in ops:
        yield from op.weights


def named(table: Table, layers: range, *, first: bool = True, last: bool = True) -> Iterator[Parameter]:
    """Every parameter of a model with these layers, `first` with the embedding and `last` with the head.

    A tied head has none of its own: with the embedding elsewhere, it is the embedding's by name.
    """
    blocks = [(f"layers.{index}.", table.layer) for index in layers]
    for prefix, ops in (("", table.embedding),) * first + (*blocks,) + (("", table.head),) * last:
        for op in ops:
            for weight in op.weights:
                if not (table.tied and weight.name == "head.weight"):
                    yield Parameter(prefix + weight.name, _flattened(op, weight))
                elif not first:
                    yield Parameter("embedding.weight", (("vocab",), ("hidden",)))


def _flattened(op: Op, weight: Weight) -> tuple[Dims, ...]:
    """A product's weight is one matrix for each of its groups, its bias a vector; every other dim stands alone."""
    if op.product is None:
        return tuple((dim,) for dim in weight.dims)
    groups, inner = op.product.groups, op.product.inner
    outer = weight.dims[len(groups) :]
    matrix = () if weight.name.endswith(".bias") else (inner,)
    return (*((dim,) for dim in groups), *matrix, outer[len(inner) if matrix else 0 :])


def padded(whole: int, multiple: int) -> int:
    """The next multiple."""
    return -(-whole // multiple) * multiple


def forward_flops(op: Op, size: Mapping[str, int]) -> int:
    """FLOPs of an op's forward pass: 2 x rows x inner x outer, attention counted in full (not halved by its mask)."""
    product = op.product
    if product is None:
        return 0
    outer = sum(count(dims, size) for dims in product.outers)
    return 2 * count(product.rows + product.inner, size) * outer * _shared(product, size)


def _shared(product: Product, size: Mapping[str, int]) -> int:
    """Products of one group each; experts share the rows out among them, so they multiply nothing."""
    return count(tuple(dim for dim in product.groups if dim != "experts"), size)
