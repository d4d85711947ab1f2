"""Compares the time of attention inside documents of several lengths with its plan, on one core of this machine's CPU.

Run `python -m distrain.scripts.bench_document_plan [ROUNDS]`; it takes half a minute. The rate of attention is measured as
`distrain fit` does, of sequences of 256 tokens. In turn attention of the quickstart's layers computes sequences of 1,024 tokens, cut from
texts of documents of each kind, forward and backward. It prints the processor time of a sequence, planned and
measured, and both as shares of those of one document as long as the sequence.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from random import Random
from statistics import median
from time import process_time

import torch

from ..trainer.layers.transformer.document_attention import document_attention
from ..trainer.layers.transformer.document_bounds import document_bounds
from ..trainer.machine.layer_rates import ATTENTION_FLOPS, HEAD_DIM, SMALL_MODEL
from ..trainer.plan.costs.cost_context import CostContext
from ..trainer.plan.costs.op_seconds import head_dim_share
from ..trainer.plan.layout_cost import layout_blocks
from ..trainer.plan.layout_of_run import layout_of_run
from ..trainer.spec.run import Cluster, Data, Device, Model, Parallel, Run, Train
from .show_help import show_help

SEQ, SEQUENCES, HEADS = 1024, 16, 4
ROWS, KEYS = SMALL_MODEL.rows, SMALL_MODEL.seq
MODEL = Model(family="gpt", layers=4, hidden=HEADS * HEAD_DIM, heads=HEADS, vocab=256, bias=True, tied=True)
KINDS: tuple[tuple[int, ...], ...] = ((64 * SEQ,), (512,), (256,), (128,), (64,), (16,), (32, 32, 32, 2048))  # lengths of documents


def main() -> None:
    """Time each kind so many times in turn and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    windows = {kind: text_windows(kind) for kind in KINDS}
    times: dict[tuple[int, ...], list[float]] = {kind: [] for kind in KINDS}
    seconds = []
    for _ in range(rounds):
        seconds.append(plain_seconds())
        for kind in KINDS:
            times[kind].append(attention_seconds(windows[kind]))
    rate = ATTENTION_FLOPS / median(seconds) / head_dim_share(HEAD_DIM)
    planned = {kind: planned_seconds(kind, rate) for kind in KINDS}
    measured, whole = {kind: median(each) for kind, each in times.items()}, KINDS[0]
    print(f"{'tokens of documents':<22}{'planned':>10}{'measured':>11}   of a whole sequence, planned and measured")
    for kind in KINDS:
        shares = [f"{100 * each[kind] / each[whole]:>7.1f} %" for each in (planned, measured)]
        print(f"{list(kind)!s:<22}{1e3 * planned[kind]:>7.2f} ms{1e3 * measured[kind]:>8.2f} ms{''.join(shares)}")


def plain_seconds() -> float:
    """Return the seconds of processor time of the attention by which the machine's rate is measured, forward and backward."""
    query, key, value = (torch.randn(ROWS // KEYS, HEADS, KEYS, HEAD_DIM, requires_grad=True) for _ in range(3))
    gradient, times = torch.randn(ROWS // KEYS, HEADS, KEYS, HEAD_DIM), []
    for _ in range(5):
        began = process_time()
        torch.autograd.backward(torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True), gradient)
        times.append(process_time() - began)
    return median(times)


def planned_seconds(lengths: tuple[int, ...], rate: float) -> float:
    """Return the planned seconds of attention of one layer and sequence, forward and backward."""
    device = Device(name="cpu", memory=1e12, kind="cpu", peak={"fp32": rate}, flash=1.0, launch=0.0, dispatch=0.0, bandwidth=1e10)
    run = Run(
        name="bench",
        model=MODEL,
        cluster=Cluster(nodes=1, gpus=1, device=device),
        parallel=Parallel(),
        train=Train(batch=1, seq=SEQ, steps=1, precision="fp32"),
        data=Data(name="text", documents=True, document_tokens=lengths),
    )
    context = CostContext(run)
    return layout_blocks(context, layout_of_run(context, run.parallel, 1)).layer.core


def text_windows(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the document of each token [sequences, tokens] of sequences that begin anywhere in a text of documents of these lengths, which
    are drawn at random."""
    draw, text = Random(1), 8 * SEQ * SEQUENCES
    ends = torch.tensor(list(accumulate(draw.choices(lengths, k=2 + 2 * text * len(lengths) // sum(lengths)))))
    starts = torch.tensor([draw.randrange(text) for _ in range(SEQUENCES)])
    return torch.bucketize(starts[:, None] + torch.arange(SEQ), ends, right=True)


def attention_seconds(documents: torch.Tensor) -> float:
    """Return the seconds of processor time of attention of a sequence, forward and backward, on average."""
    query, key, value = (torch.randn(1, SEQ, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, SEQ, HEADS, HEAD_DIM)
    bounds = [document_bounds(each[None]) for each in documents]
    torch.autograd.backward(document_attention(query, key, value, bounds[0]), gradient)  # warms up
    began = process_time()
    for each in bounds:
        torch.autograd.backward(document_attention(query, key, value, each), gradient)
    return (process_time() - began) / len(bounds)


if __name__ == "__main__":
    show_help(__doc__)
    main()
