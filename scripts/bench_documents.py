"""Benchmark of attention inside documents: a step's forward and backward by a mask of every query and key, and by the documents' bounds.

Run `python -m distrain.scripts.bench_documents [ROUNDS]` on a quiet machine. One process and one core compute a sequence of a small model
in float32; the two ways take turns.
"""

from __future__ import annotations

import sys
from statistics import median
from time import process_time

import torch

from ..trainer.layers.transformer.document_bounds import document_bounds
from ..trainer.models.build import build_model
from ..trainer.parallel.saved_bytes import count_saved_tensors
from ..trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train
from .show_help import show_help

MODEL = Model(
    family="llama", layers=2, hidden=256, heads=8, kv_heads=2, ffn=512, vocab=1000, norm="rmsnorm", act="swiglu", positions="rope"
)
SEQUENCES, LENGTHS = (1024, 4096), (64, 512, 4096)  # tokens of a sequence, of each of its documents


def main() -> None:
    """Time each sequence and length of documents so many times in turn and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    print(f"two layers of 256 elements, forward and backward, medians of {rounds}; kept for backward")
    for seq in SEQUENCES:
        for length in (each for each in LENGTHS if each <= seq):
            (mask, mask_kept), (bounds, bounds_kept) = measure_attention(seq, length, rounds)
            print(
                f"{seq:>5} tokens, documents of {length:>4}   mask {1e3 * mask:>7.0f} ms {mask_kept / 2**20:>6.1f} MiB"
                f"   bounds {1e3 * bounds:>7.0f} ms {bounds_kept / 2**20:>6.1f} MiB   {mask / bounds:.2f} times as fast"
            )


def measure_attention(seq: int, length: int, rounds: int) -> list[tuple[float, int]]:
    """Return (median seconds, bytes kept for backward) by a mask and by bounds."""
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    train = Train(batch=1, microbatch=1, seq=seq, steps=1, precision="fp32")
    run = Run(name="bench", model=MODEL, cluster=cluster, parallel=Parallel(), train=train)
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    tokens, documents = torch.arange(seq)[None] * 7 % MODEL.vocab, torch.arange(seq)[None] // length
    times: list[list[float]] = [[], []]
    kept = [0, 0]
    for number in range(rounds + 1):
        for way, bounds in enumerate((None, document_bounds(documents))):
            began = process_time()
            with count_saved_tensors(module.parameters(), [tokens, documents]) as saved:
                loss, _ = module(tokens, tokens, documents=documents, bounds=bounds)
            kept[way] = saved.bytes
            loss.backward()
            if number:  # the first warms up
                times[way].append(process_time() - began)
    return list(zip(map(median, times), kept, strict=True))


if __name__ == "__main__":
    show_help(__doc__)
    main()
