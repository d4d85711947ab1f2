"""Ranks that compute tensor-parallel layers in float64 beside whole ones. Run by path, with how many: a line of JSON on stdout,
{what: the largest difference on any rank}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distrain.trainer.layers.cross_entropy import IGNORED, cross_entropy
from distrain.trainer.layers.embedding_and_head import VocabEmbedding
from distrain.trainer.layers.group import Group
from distrain.trainer.layers.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    TensorParallel,
    column_linears,
    column_products,
    gather_inputs,
    reduce_outputs,
)
from distrain.trainer.system.parent_watch import die_with_parent

B, S, H, F_, V = 3, 8, 6, 12, 16  # batch, sequence, hidden, feed-forward, vocabulary: padded to that
WORDS = 9  # of the vocabulary that are no padding: of four ranks the last has none

Look = Callable[[Group], dict[str, float]]  # of the ranks together: the largest difference of each fact
Found = Iterator[tuple[str, Tensor, Tensor]]  # what, as found here, as it should be


def drawn(*shape: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, dtype=torch.float64)


def part(whole: Tensor, dim: int, group: Group) -> Tensor:
    return whole.chunk(group.size, dim)[group.rank].contiguous()


def entering(region: TensorParallel) -> Found:
    """f: in forward the whole (gathered where the sequence is split), in backward the sum (scattered)."""
    whole, weight = drawn(B, S, H), drawn(region.group.size, B, S, H)
    x = region.shard(whole).clone().requires_grad_()
    made = gather_inputs(x, region)
    (made * weight[region.group.rank]).sum().backward()
    yield "f forward", made, whole
    yield "f backward", grad(x), region.shard(weight.sum(0))


def leaving(region: TensorParallel) -> Found:
    """g: in forward the sum (scattered where the sequence is split), in backward the whole (gathered)."""
    parts, weight = drawn(region.group.size, B, S, H), drawn(B, S, H)
    x = parts[region.group.rank].clone().requires_grad_()
    made = reduce_outputs(x * 1.0, region)
    (made * region.shard(weight)).sum().backward()
    yield "g forward", made, region.shard(parts.sum(0))
    yield "g backward", grad(x), weight


def products(region: TensorParallel) -> Found:
    """Two column layers of one input, an activation and a row layer, against torch's own."""
    group = region.group
    up, gate, down = (
        nn.Linear(H, F_, dtype=torch.float64),
        nn.Linear(H, F_, bias=False, dtype=torch.float64),
        nn.Linear(F_, H, dtype=torch.float64),
    )
    whole = drawn(B, S, H).requires_grad_()
    expected = down(F.gelu(up(whole)) * gate(whole))
    weight = drawn(B, S, H)
    (expected * weight).sum().backward()

    ours_up = ColumnLinear({"weight": nn.Parameter(part(up.weight.mT, 1, group)), "bias": nn.Parameter(part(up.bias, 0, group))}, region)
    ours_gate = ColumnLinear({"weight": nn.Parameter(part(gate.weight.mT, 1, group))}, region)
    ours_down = RowLinear(
        {"weight": nn.Parameter(part(down.weight.mT, 0, group)), "bias": nn.Parameter(down.bias.detach().clone())}, region
    )
    x = region.shard(whole.detach()).clone().requires_grad_()
    one, other = column_linears(x, ours_up, ours_gate)
    made = ours_down(F.gelu(one) * other)
    (made * region.shard(weight)).sum().backward()
    yield "products forward", made, region.shard(expected)
    yield "products input", grad(x), region.shard(grad(whole))
    yield "column weight", grad(ours_up.weight), part(grad(up.weight).mT, 1, group)
    yield "column bias", grad(biased(ours_up)), part(grad(up.bias), 0, group)
    yield "second column weight", grad(ours_gate.weight), part(grad(gate.weight).mT, 1, group)
    yield "row weight", grad(ours_down.weight), part(grad(down.weight).mT, 0, group)
    of_bias = grad(biased(ours_down)).clone()
    if region.sequence:  # each rank has its tokens' part of it: the engine adds them up once a step
        dist.all_reduce(of_bias, group=group.handle)
    yield "row bias", of_bias, grad(down.bias)
    alone = ours_gate(x.detach())
    yield "one column layer", alone, part(gate(whole), 2, group)


def words(region: TensorParallel) -> Found:
    """A tied table: vectors looked up, logits, the loss of the words that are no padding, labels that don't count."""
    group = region.group
    table, mixed = drawn(V, H).requires_grad_(), drawn(B, S, H)
    tokens, labels = torch.randint(0, WORDS, (B, S)), torch.randint(0, WORDS, (B, S))
    labels[0, 2:4] = labels[2] = IGNORED
    looked = F.embedding(tokens, table)
    logits = (looked + mixed) @ table.mT
    expected = F.cross_entropy(logits[..., :WORDS].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (3 * expected).backward()

    ours = nn.Parameter(part(table.detach(), 0, group))
    found = VocabEmbedding({"weight": ours}, region)(tokens)
    (made,) = column_products(found + region.shard(mixed), region, [ours], [None], transposed=True)
    loss = cross_entropy(made, labels, WORDS, region)
    (3 * loss).backward()
    yield "embedding", found, region.shard(looked)
    yield "logits", made, part(logits, 2, group)
    yield "loss", loss, expected
    yield "table", grad(ours), part(grad(table), 0, group)


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def biased(layer: ColumnLinear | RowLinear) -> Tensor:
    assert layer.bias is not None
    return layer.bias


CHECKS: tuple[Callable[[TensorParallel], Found], ...] = (entering, leaving, products, words)


def differences(group: Group) -> dict[str, float]:
    """The largest difference of each fact, on any rank."""
    found: dict[str, float] = {}
    for sequence in (False, True):
        region = TensorParallel(group=group, sequence=sequence)
        for check in CHECKS:
            torch.manual_seed(7)
            for what, ours, whole in check(region):
                assert ours.shape == whole.shape, f"{what} is {tuple(ours.shape)} for {tuple(whole.shape)}"
                most = (ours - whole).detach().abs().max()
                dist.all_reduce(most, dist.ReduceOp.MAX)
                found[f"{what}, the sequence split" if sequence else what] = most.item()
    return found


def be(rank: int, ranks: int, meeting: str, look: Look) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    handle = dist.new_group(list(range(ranks)))
    found = look(Group(axis="any", ranks=tuple(range(ranks)), rank=rank, handle=handle))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(ranks: int, look: Look = differences) -> int:
    """Fork the ranks, which say what each of them looked at; the number that failed."""
    with tempfile.TemporaryDirectory() as folder:
        children, parent = [], os.getpid()
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    die_with_parent(parent)  # who waits for too long kills the parent alone
                    be(rank, ranks, f"{folder}/meeting", look)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
