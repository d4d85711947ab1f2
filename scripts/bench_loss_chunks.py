"""Benchmark of the head and the loss, in several numbers of chunks of the vocabulary (train.loss_chunks), forward and backward.

Run `python -m distrain.scripts.bench_loss_chunks [ROUNDS]` on a quiet machine. One process and one core compute 512 tokens of GPT-2's sizes
in float32; the numbers of chunks take turns.
"""

from __future__ import annotations

import sys
from statistics import median
from time import process_time

import torch
from torch import nn

from ..trainer.layers.cross_entropy import cross_entropy
from ..trainer.layers.transformer.embedding_and_head import LMHead
from .show_help import show_help

TOKENS, HIDDEN, VOCAB = 512, 768, 50257
CHUNKS = (1, 2, 4, 8, 16)


def main() -> None:
    """Time each number of chunks so many times in turn and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    torch.manual_seed(1)
    weight, x = nn.Parameter(0.02 * torch.randn(VOCAB, HIDDEN)), torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    labels = torch.randint(VOCAB, (1, TOKENS))
    found: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
    for number in range(rounds + 1):
        for chunks, times in found.items():
            head = LMHead({"weight": weight}, None, tied=True, vocab=VOCAB, loss_chunks=chunks)
            began = process_time()
            loss = head(x, labels).sum() if chunks > 1 else cross_entropy(head(x), labels, VOCAB, None)
            torch.autograd.grad(loss, (x, weight))
            if number:  # the first warms up
                times.append(process_time() - began)
    print(f"{TOKENS} tokens, {VOCAB:,} words, medians of {rounds}")
    for chunks, times in found.items():
        print(f"{chunks:>3} chunks  {1e3 * median(times):>7.1f} ms  {median(times) / median(found[1]):.2f}")


if __name__ == "__main__":
    show_help(__doc__)
    main()
