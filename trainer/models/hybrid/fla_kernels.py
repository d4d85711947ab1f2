"""What the kernels of package fla compute, move and hold for the gated delta rule (`train.linear_attention=fla`).

Read in fla-core 0.6.0 (fla/ops/gated_delta_rule, fla/ops/common, fla/modules/causal_conv1d, fla/modules/norm/l2norm.py) and counted in
Triton's interpreter (tests/models/test_fla_kernels.py), with the tiles that these kernels have on Hopper. No GPU has run them here.
"""

from __future__ import annotations

from typing import NamedTuple

from ...spec.run import Model
from ..ops.op_table import Dims, Product, Tensor
from .linear_dims import LINEAR_VALUE, OWN_HEADS, OWN_KEY, OWN_VALUE, WHOLE

CHUNK = 64  # tokens that fla computes at once
BLOCK = 16  # tokens of the blocks of a chunk's triangular system; 10 of 16 are not zero
SOLVED = (CHUNK + BLOCK) // 2  # elements of those blocks, for each token
VALUE_TILE = 64  # elements of a value's width in a program that runs through the chunks; others have 128
KERNELS = 24  # counted, with torch's operators: of forward


class Moved(NamedTuple):
    """How many tensors a kernel reads and writes. A program reads an element once, and another one reads it again."""

    keys: int = 0  # of a key's width for each key head
    head_keys: int = 0  # of a key's width for each value head
    values: int = 0  # of a value's width for each value head
    pairs: int = 0  # what each token of its chunk is to a token, for each value head
    solved: int = 0  # of these, the blocks that are not zero
    states: int = 0  # the state at each chunk, for each value head
    gates: int = 0  # a number in float32 for each value head
    taps: int = 0  # gradients of the taps in float32, of each chunk


class Kernel(NamedTuple):
    """A kernel, or several of torch: what it moves, and what it moves again for each further tile of a value's width."""

    name: str
    moved: Moved
    tile: Moved = Moved()


# fmt: off
WRITES = Kernel("recompute_w_u_fwd_kernel",                      Moved(head_keys=2, values=2, pairs=1, gates=2))
STATES = Kernel("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", Moved(head_keys=2, values=2, states=1, gates=1),
                Moved(head_keys=2, gates=1))
FORWARD = (
    Kernel("causal_conv1d_fwd_kernel",                           Moved(keys=4, values=2)),
    Kernel("l2norm_fwd_kernel",                                  Moved(keys=4)),
    Kernel("torch: beta and the decay",                          Moved(gates=11)),
    Kernel("chunk_local_cumsum_scalar_kernel",                   Moved(gates=2)),
    Kernel("torch: zeros",                                       Moved(pairs=1)),
    Kernel("chunk_gated_delta_rule_fwd_kkt_solve_kernel",        Moved(head_keys=1, solved=1, gates=2)),
    WRITES,
    STATES,
    Kernel("chunk_fwd_kernel_o",                                 Moved(head_keys=2, values=2, states=1, gates=1)),
)
BACKWARD = (  # behind forward, which runs again
    WRITES,
    STATES,
    Kernel("chunk_bwd_kernel_dv_local",                          Moved(head_keys=2, values=2, gates=1)),
    Kernel("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",   Moved(head_keys=3, values=3, states=1, gates=1),
           Moved(head_keys=3, gates=1)),
    Kernel("chunk_bwd_kernel_dqkwg",                             Moved(head_keys=5, values=3, states=2, gates=2)),
    Kernel("prepare_wy_repr_bwd_kernel",                         Moved(head_keys=4, values=3, pairs=1, gates=4)),
    Kernel("torch: sums over value heads, and of two gradients", Moved(keys=6, head_keys=3, gates=5)),
    Kernel("chunk_local_cumsum_scalar_kernel",                   Moved(gates=2)),
    Kernel("l2norm_bwd_kernel",                                  Moved(keys=6)),
    Kernel("causal_conv1d_fwd_kernel",                           Moved(keys=4, values=2)),
    Kernel("causal_conv1d_bwd_kernel",                           Moved(keys=8, values=4, taps=1)),
    Kernel("torch: sums of the taps' gradients",                 Moved(taps=1)),
    Kernel("torch: beta and the decay",                          Moved(gates=20)),
)
# fmt: on
_CHANNELS: tuple[Dims, ...] = (OWN_KEY, OWN_KEY, OWN_VALUE)  # of the three convolutions
_TENSORS: dict[str, tuple[Tensor, ...]] = {  # of the fields of Moved
    "keys": (Tensor(WHOLE + OWN_KEY),),
    "head_keys": (Tensor((*WHOLE, *OWN_HEADS, "linear_key_dim")),),
    "values": (Tensor(WHOLE + OWN_VALUE),),
    "pairs": (Tensor((*WHOLE, *OWN_HEADS, "chunk")),),
    "solved": (Tensor((*WHOLE, *OWN_HEADS, "solved")),),
    "states": (Tensor(("chunks", "batch", *OWN_VALUE, "linear_key_dim")),),
    "gates": (Tensor(WHOLE + OWN_HEADS, 4),),
    "taps": tuple(Tensor(("chunks", "batch", "conv_taps", *dims), 4) for dims in _CHANNELS),
}


def moved_by(kernels: tuple[Kernel, ...], model: Model) -> tuple[Tensor, ...]:
    """Return the tensors that kernels read and write, each as often as it is moved."""
    assert model.linear_value_head_dim is not None
    further = -(-model.linear_value_head_dim // VALUE_TILE) - 1
    moved = [each.moved for each in kernels] + [each.tile for each in kernels] * further
    counts = dict(zip(Moved._fields, map(sum, zip(*moved, strict=True)), strict=True))
    return tuple(tensor for name, tensors in _TENSORS.items() for tensor in tensors * counts[name])


def fla_product(model: Model) -> Product:
    """The products of fla's chunks. A token counts those with the state of each value head, 6 D V FLOPs, as our own rule does."""
    assert model.linear_key_head_dim is not None
    assert model.linear_value_head_dim is not None
    key, value, pair = model.linear_key_head_dim, model.linear_value_head_dim, 2 * CHUNK
    writes, states = pair * (key + value), 4 * key * value
    merges = 16 * 2 * BLOCK**3 // CHUNK  # 16 products of two blocks of the system
    forward = 2 * SOLVED * key + merges + writes + states + 2 * key * value + pair * (key + value)
    local, state_gradients = pair * (key + value), 6 * key * value
    input_gradients = 6 * key * value + pair * (value + 2 * key)
    system = pair * (5 * key + 2 * value + 2 * CHUNK)
    gradients = writes + states + local + state_gradients + input_gradients + system
    return Product(
        rows=WHOLE,
        inner=("linear_key_dim",),
        outers=(("linear_value_dim",),) * 3,
        groups=OWN_HEADS,
        computed=forward / (6 * key * value),
        backward=1 + gradients / forward,
        moved_apart=True,
    )


def held_by_fla() -> tuple[Tensor, ...]:
    """What backward holds at most, in the kernels of `prepare_wy_repr_bwd` and behind them: queries and keys of length 1, values, what was
    read, the solved systems, what tokens write and by which keys, the states and their gradients, and the gradients of these inputs. The
    gradients of what was read and of its gate wait."""
    many = {"keys": 5, "head_keys": 3, "values": 6, "pairs": 1, "states": 2, "gates": 8}
    held = tuple(tensor for name, count in many.items() for tensor in _TENSORS[name] * count)
    return held + (Tensor(("tokens", "batch", *LINEAR_VALUE)),) * 2
