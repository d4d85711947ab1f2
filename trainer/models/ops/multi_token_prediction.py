"""Multi-token prediction (arXiv:2412.19437 section 2.2), as a change of an op table: modules behind the head, each with a layer."""

from __future__ import annotations

from dataclasses import replace

from ...spec.run import Run
from .op_table import Op, OpTable, Product, Tensor, Weight
from .shared_ops import STREAM, TOKENS, norm

JOINED = Tensor((*TOKENS, "joined"))


def with_further_tokens(table: OpTable, run: Run) -> OpTable:
    """Return a table with `model.mtp.layers` modules behind the head. A module has norms of its own; the embedding, the head's product and
    the loss are those of the model, with its weights."""
    model = run.model
    if not model.mtp.layers or not table.has_costs:
        return table
    return replace(
        table,
        sizes={**table.sizes, "joined": 2 * table.sizes["hidden"]},
        modules=model.mtp.layers,
        join=_join_ops(run),
        further=tuple(map(_as_lent, table.head)),
    )


def _join_ops(run: Run) -> tuple[Op, ...]:
    """The embedding of the token that is k further on, its norm, that of the hidden states, and the product of both side by side. The
    hidden states are the head's input, which the head saves."""
    model = run.model
    lookup = Op(
        name="embedding",
        weights=(Weight("embedding.weight", ("vocab", "hidden"), lent=True),),
        moves=(STREAM, STREAM),
        reduces=(("vocab", STREAM),),
    )
    of_hidden = norm("hidden_norm", model)
    join = Op(
        name="join",
        weights=(Weight("join.weight", ("joined", "hidden")),),
        product=Product(rows=TOKENS, inner=("joined",), outers=(("hidden",),)),
        moves=(JOINED, JOINED),
        saves_megatron=(JOINED,),
        saves_torch=(JOINED,),
        kernels=2,
    )
    own_saves = tuple(each for each in of_hidden.saves_torch if each != STREAM)
    return lookup, norm("embedding_norm", model), replace(of_hidden, saves_megatron=(), saves_torch=own_saves), join


def _as_lent(op: Op) -> Op:
    """An op of the head as a module has it: the norm is its own."""
    if op.name != "head":
        return op
    return replace(op, weights=tuple(replace(weight, lent=True) for weight in op.weights))
