"""The chunks of the vocabulary in which the head and the loss are computed, `train.loss_chunks`."""

from __future__ import annotations

CHUNK_MULTIPLE = 8  # logits of which each chunk but the last has a multiple: matrix products of 16-bit numbers read 16 bytes at a time


def chunk_size(vocab: int, chunks: int) -> int:
    """Return the logits of a token in each chunk but the last, of `vocab` that a rank has."""
    return -(-vocab // (chunks * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


def most_chunks(vocab: int) -> int:
    """Return the most chunks into which `vocab` logits of a token are cut."""
    return -(-vocab // CHUNK_MULTIPLE)
