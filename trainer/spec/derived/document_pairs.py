"""Pairs of query and key that attention computes inside documents, by the lengths of documents that a run states.

Windows of a text lie end to end, so that one begins anywhere in a document: two of its tokens `d` apart are of one document with the
probability q(d) = sum(max(0, L - d)) / sum(L) over documents of L tokens. A window of S tokens has then S + 2 sum((S - d) q(d), d < S)
ordered pairs. Windows of prompts hold whole examples.
"""

from __future__ import annotations

from typing import NamedTuple

from ..run import Data, Run


class DocumentLengths(NamedTuple):
    """Documents of so many tokens, one as likely as the other; `packed`: windows hold whole ones."""

    tokens: tuple[int, ...]
    packed: bool

    @property
    def mean(self) -> float:
        """Tokens of a document."""
        return sum(self.tokens) / len(self.tokens)


def document_lengths(run: Run) -> DocumentLengths | None:
    """Return the lengths of documents that attention keeps apart; None where they are not stated, or documents are not kept apart."""
    stated = stated_lengths(run.data)
    if not run.data.documents or not stated:
        return None
    return DocumentLengths(stated, run.data.has_prompts)


def stated_lengths(data: Data) -> tuple[int, ...]:
    """Return data.document_tokens as lengths; () where it is not set."""
    stated = data.document_tokens
    return () if stated is None else (stated,) if isinstance(stated, int) else stated


def mean_pairs(lengths: DocumentLengths, seq: int, window: int | None = None) -> float:
    """Return the ordered pairs of tokens of one document in a window of `seq` tokens, on average: seq x seq for documents that fill
    it. With an attention window of W tokens, twice those of which the query sees the key, less W on the diagonal."""
    reach = min(window or seq, seq)
    if lengths.packed:
        cut = [min(each, seq) for each in lengths.tokens]
        return seq * sum(seen_pairs(each, min(reach, each)) for each in cut) / sum(cut)
    apart = sum(_pairs_apart(seq, each, min(each, reach) - 1) for each in lengths.tokens)
    return 2 * seq - reach + 2 * apart / sum(lengths.tokens)


def seen_pairs(tokens: int, reach: int) -> int:
    """Return twice the pairs of query and key in a document of which the query sees the `reach` last tokens, less `reach`."""
    return reach * (2 * tokens - reach)


def mean_documents(lengths: DocumentLengths, seq: int) -> float:
    """Return the documents of which a window of `seq` tokens has some, on average."""
    if lengths.packed:
        return seq / (sum(min(each, seq) for each in lengths.tokens) / len(lengths.tokens))
    return 1 + (seq - 1) / lengths.mean


def _pairs_apart(seq: int, tokens: int, most: int) -> int:
    """Return the sum of (seq - d) (tokens - d) over d = 1 .. most."""
    first, squares = most * (most + 1) // 2, most * (most + 1) * (2 * most + 1) // 6
    return most * seq * tokens - (seq + tokens) * first + squares
