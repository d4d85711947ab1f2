"""How many receives a stage of a pipeline of engine `native` posts ahead of the one that it waits for."""

from __future__ import annotations


def receives_ahead(chunks: int) -> int:
    """Return how many receives a stage of so many parts posts for each sending stage, beside the one that it waits for.

    A send goes out at once only if its receive was posted; else sender and receiver exchange a handshake first, and a thread that
    computes keeps the sender's reply waiting (up to 4 ms on Linux). In steps of equal parts one is enough where a stage has one part, as
    messages come in the order in which they are used; where it has several, some come two early (of 8 stages and more, three).
    """
    return min(chunks, 2)
