"""From token ids to text, piece by piece as they are generated."""

from __future__ import annotations

import codecs
from typing import Protocol

from .tokenizer import Tokenizer, VocabularyTokenizer

REPLACEMENT = "�"  # what decoders return for bytes that are not a whole character


class Detokenizer(Protocol):
    """An incremental decoder of tokens; a character is returned with its last byte."""

    def decode(self, token: int) -> str:
        """Return the text that this token completes."""

    def flush(self) -> str:
        """Return the remaining text after the last token."""


def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """Return the detokenizer of a tokenizer's ids."""
    return VocabularyDetokenizer(tokenizer) if isinstance(tokenizer, VocabularyTokenizer) else ByteDetokenizer()


class ByteDetokenizer:
    """Decodes UTF-8 bytes; invalid bytes become the replacement character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class VocabularyDetokenizer:
    """Decodes ids of a tokenizer.json; their text depends on earlier ids, so these are decoded again."""

    def __init__(self, vocabulary: VocabularyTokenizer) -> None:
        self._rules = vocabulary.rules
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was returned
        self._before = 0  # ids from here on are decoded, to see a space between two words

    def decode(self, token: int) -> str:
        self._ids.append(token)
        text = self._pending_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._before, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        return self._pending_text()

    def _pending_text(self) -> str:
        """Return the text of the ids that were not returned yet."""
        shown: str = self._rules.decode(self._ids[self._before : self._shown], skip_special_tokens=False)
        every: str = self._rules.decode(self._ids[self._before :], skip_special_tokens=False)
        return every[len(shown) :]
