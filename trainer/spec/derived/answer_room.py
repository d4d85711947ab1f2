"""The most answers that a sequence of preferences holds."""

from __future__ import annotations


def answer_room(seq: int) -> int:
    """Return the most answers to prompts in a window of seq + 1 tokens: an even number, for the two of a pair are in one window, and each
    has two tokens at least."""
    return (seq + 1) // 4 * 2
