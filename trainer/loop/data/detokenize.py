"""Token ids become text, piece by piece, as they are made."""

from __future__ import annotations

import codecs
from typing import Protocol

from .tokenizer import Tokenizer, Vocabulary

BROKEN = "�"  # what stands for bytes that are no whole letter


class Speller(Protocol):
    """What gives the text of one token after the other; a letter comes when its last byte has."""

    def spell(self, token: int) -> str:
        """The text that this token completes."""

    def rest(self) -> str:
        """What is left when no token follows."""


def speller(tokenizer: Tokenizer) -> Speller:
    """The speller of a tokenizer's ids."""
    return VocabularySpeller(tokenizer) if isinstance(tokenizer, Vocabulary) else BytesSpeller()


class BytesSpeller:
    """Bytes of UTF-8; what is none is shown as the replacement letter."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def spell(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class VocabularySpeller:
    """Ids of a tokenizer.json, whose text depends on the ids before: as many are decoded again as may change it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rules = vocabulary.rules
        self._ids: list[int] = []
        self._shown = 0  # ids whose text is out
        self._before = 0  # ids from here on are decoded, so that a space between two words is seen

    def spell(self, token: int) -> str:
        self._ids.append(token)
        text = self._new()
        if not text or text.endswith(BROKEN):
            return ""
        self._before, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        return self._new()

    def _new(self) -> str:
        """The text of the ids that are not out yet."""
        shown: str = self._rules.decode(self._ids[self._before : self._shown], skip_special_tokens=False)
        every: str = self._rules.decode(self._ids[self._before :], skip_special_tokens=False)
        return every[len(shown) :]
