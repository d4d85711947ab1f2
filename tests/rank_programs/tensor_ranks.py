"""Ranks that compare tensor-parallel layers with unsplit ones, in float64.

Run by path with the number of ranks. Prints a line of JSON: {fact: the largest difference on any rank}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distrain.tests.rank_programs.forked_ranks import fork_ranks
from distrain.trainer.layers import loss_kernels
from distrain.trainer.layers.chunked_loss import chunked_token_losses
from distrain.trainer.layers.cross_entropy import IGNORED, cross_entropy
from distrain.trainer.layers.rank_group import Group
from distrain.trainer.layers.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    TensorParallel,
    column_linears,
    column_products,
    gather_inputs,
    reduce_outputs,
)
from distrain.trainer.layers.transformer.embedding_and_head import VocabEmbedding

B, S, H, F_, V = 3, 8, 6, 12, 16  # batch, sequence, hidden, feed-forward, padded vocabulary
Z_LOSS = 0.3
WORDS = 9  # the rest of the vocabulary is padding, and all of the last of four ranks' part

Measure = Callable[[Group], object]  # called on every rank of a group; returns what rank 0 prints as JSON
Comparisons = Iterator[tuple[str, Tensor, Tensor]]  # a fact, its tensor on this rank, the expected tensor


def random_tensor(*shape: int) -> Tensor:
    """Return a random tensor, the same on every rank."""
    return torch.randn(*shape, dtype=torch.float64)


def part(whole: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part of a tensor."""
    return whole.chunk(group.size, dim)[group.rank].contiguous()


def input_operator(region: TensorParallel) -> Comparisons:
    """Megatron's f: forward passes the input on (and gathers a split sequence), backward sums the gradients (and scatters them)."""
    whole, weight = random_tensor(B, S, H), random_tensor(region.group.size, B, S, H)
    x = region.shard(whole).clone().requires_grad_()
    made = gather_inputs(x, region)
    (made * weight[region.group.rank]).sum().backward()
    yield "f forward", made, whole
    yield "f backward", grad(x), region.shard(weight.sum(0))


def output_operator(region: TensorParallel) -> Comparisons:
    """Megatron's g: forward sums the outputs (and scatters a split sequence), backward passes the gradient on (and gathers it)."""
    parts, weight = random_tensor(region.group.size, B, S, H), random_tensor(B, S, H)
    x = parts[region.group.rank].clone().requires_grad_()
    made = reduce_outputs(x * 1.0, region)
    (made * region.shard(weight)).sum().backward()
    yield "g forward", made, region.shard(parts.sum(0))
    yield "g backward", grad(x), weight


def column_and_row_layers(region: TensorParallel) -> Comparisons:
    """Two column layers of one input, an activation and a row layer, compared with torch's Linear."""
    group = region.group
    up, gate, down = (
        nn.Linear(H, F_, dtype=torch.float64),
        nn.Linear(H, F_, bias=False, dtype=torch.float64),
        nn.Linear(F_, H, dtype=torch.float64),
    )
    whole = random_tensor(B, S, H).requires_grad_()
    expected = down(F.gelu(up(whole)) * gate(whole))
    weight = random_tensor(B, S, H)
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
    yield "column bias", grad(bias(ours_up)), part(grad(up.bias), 0, group)
    yield "second column weight", grad(ours_gate.weight), part(grad(gate.weight).mT, 1, group)
    yield "row weight", grad(ours_down.weight), part(grad(down.weight).mT, 0, group)
    bias_grad = grad(bias(ours_down)).clone()
    if region.sequence:  # each rank has the part of its tokens; the engine sums the parts once a step
        dist.all_reduce(bias_grad, group=group.handle)
    yield "row bias", bias_grad, grad(down.bias)
    alone = ours_gate(x.detach())
    yield "one column layer", alone, part(gate(whole), 2, group)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The z-loss of logits [B, S, V] at the labels [B, S] that count."""
    return Z_LOSS * logits.logsumexp(-1)[labels != IGNORED].square().sum()


def embedding_and_head(region: TensorParallel) -> Comparisons:
    """A tied table: embedded tokens, logits, and the loss over the words that are not padding, with ignored labels."""
    group = region.group
    table, mixed = random_tensor(V, H).requires_grad_(), random_tensor(B, S, H)
    tokens, labels = torch.randint(0, WORDS, (B, S)), torch.randint(0, WORDS, (B, S))
    labels[0, 2:4] = labels[2] = IGNORED
    looked = F.embedding(tokens, table)
    logits = (looked + mixed) @ table.mT
    expected = F.cross_entropy(logits[..., :WORDS].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (3 * (expected + z_loss(logits[..., :WORDS], labels))).backward()

    ours = nn.Parameter(part(table.detach(), 0, group))
    found = VocabEmbedding({"weight": ours}, region)(tokens)
    (made,) = column_products(found + region.shard(mixed), region, [ours], [None], transposed=True)
    loss = cross_entropy(made, labels, WORDS, region, z_loss=Z_LOSS)
    (3 * loss).backward()
    yield "embedding", found, region.shard(looked)
    yield "logits", made, part(logits, 2, group)
    yield "loss", loss, expected
    yield "table", grad(ours), part(grad(table), 0, group)


def loss_by_kernels(region: TensorParallel) -> Comparisons:
    """The loss by what a GPU's kernels compute, uncompiled: a row's largest logit is on any rank, and padding's logits are far larger."""
    whole, labels = random_tensor(B, S, V) * 20, torch.randint(0, WORDS, (B, S))
    whole[..., WORDS:] += 1000
    whole.requires_grad_()
    labels[0, 2:4] = labels[2] = IGNORED
    expected = F.cross_entropy(whole[..., :WORDS].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (3 * (expected + z_loss(whole[..., :WORDS], labels))).backward()

    ours = part(whole.detach(), 2, region.group).requires_grad_()
    with plain_kernels():
        loss = cross_entropy(ours, labels, WORDS, region, z_loss=Z_LOSS)
        (3 * loss).backward()
    yield "loss by kernels", loss, expected
    yield "logits' gradient by kernels", grad(ours), part(grad(whole), 2, region.group)


def loss_in_chunks(region: TensorParallel) -> Comparisons:
    """Head and loss in chunks of each rank's vocabulary, one of which is padding in part or in all: of a table and of a matrix, by what a
    GPU's kernels compute too; of a frozen matrix, without gradients."""
    group, words, vocab = region.group, 37, 64
    whole, table, labels = random_tensor(B, S, H), random_tensor(vocab, H), torch.randint(0, words, (B, S))
    table[words:] += 100
    labels[0, 2:4] = labels[2] = IGNORED
    for weight, kernels in ((table, False), (table.mT.contiguous(), False), (table, True)):
        transposed = weight is table
        x, expected_weight = whole.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = x @ (expected_weight.mT if transposed else expected_weight)
        expected = F.cross_entropy(logits[..., :words].flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        (3 * (expected + z_loss(logits[..., :words], labels))).backward()
        own_x, own_weight = region.shard(whole).clone().requires_grad_(), part(weight, int(not transposed), group).requires_grad_()
        with plain_kernels() if kernels else nullcontext():
            found = partial(chunked_token_losses, labels=labels, vocab=words, tp=region, chunks=4, transposed=transposed, z_loss=Z_LOSS)
            loss = found(own_x, own_weight).sum()
            (3 * loss).backward()
            frozen_x = own_x.detach().requires_grad_()
            found(frozen_x, own_weight.detach()).sum().backward()
            with torch.no_grad():
                evaluated = found(own_x, own_weight).sum()
        what = f"in chunks, {'of a table' if transposed else 'of a matrix'}{' by kernels' if kernels else ''}"
        yield f"loss {what}", torch.stack((loss, evaluated)), torch.stack((expected, expected))
        yield f"input {what}", torch.stack((grad(own_x), 3 * grad(frozen_x))), region.shard(grad(x)).expand(2, *own_x.shape)
        yield f"weight {what}", grad(own_weight), part(grad(expected_weight), int(not transposed), group)


def plain_kernels() -> ExitStack:
    """Have the loss take a GPU's passes, as they are written: the ops' first call imports torch's compiler, for 4 s."""
    stack = ExitStack()
    stack.enter_context(patch.object(loss_kernels, "has_loss_kernels", lambda device: True))
    stack.enter_context(patch.object(loss_kernels, "loss_rows", loss_kernels.row_statistics_by_parts))
    stack.enter_context(patch.object(loss_kernels, "loss_gradient", loss_kernels.write_gradient))
    return stack


def grad(x: Tensor) -> Tensor:
    """Return the gradient of a tensor, which must have one."""
    assert x.grad is not None
    return x.grad


def bias(layer: ColumnLinear | RowLinear) -> Tensor:
    """Return the bias of a layer, which must have one."""
    assert layer.bias is not None
    return layer.bias


CHECKS: tuple[Callable[[TensorParallel], Comparisons], ...] = (
    input_operator,
    output_operator,
    column_and_row_layers,
    embedding_and_head,
    loss_by_kernels,
    loss_in_chunks,
)


def differences(group: Group) -> dict[str, float]:
    """Return the largest difference of each fact on any rank."""
    found: dict[str, float] = {}
    for sequence in (False, True):
        region = TensorParallel(group=group, sequence=sequence)
        for check in CHECKS:
            torch.manual_seed(7)
            for what, ours, whole in check(region):
                assert ours.shape == whole.shape, f"{what} is {tuple(ours.shape)} for {tuple(whole.shape)}"
                most = (ours - whole).detach().abs().nan_to_num(nan=torch.inf).max()  # gloo's largest of a number and NaN is the number
                dist.all_reduce(most, dist.ReduceOp.MAX, group=group.handle)
                found[f"{what}, the sequence split" if sequence else what] = most.item()
    return found


def main(ranks: int, measure: Measure = differences, *, others: int = 1) -> int:
    """Fork the ranks, and others, so that a message to all ranks is none to the group; rank 0 prints what the group measured. Return how
    many failed."""

    def run_rank(rank: int) -> None:
        handle = dist.new_group(list(range(ranks)))
        if rank >= ranks:
            return
        found = measure(Group(name="tp", ranks=tuple(range(ranks)), rank=rank, handle=handle))
        if rank == 0:
            print(json.dumps(found), flush=True)

    return fork_ranks(ranks + others, run_rank)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
