"""Bytes of text become token ids: as they are, or by a Hugging Face tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...spec.plain_file import expanded, read_plain
from .refusal import refused

Ids = NDArray[np.unsignedinteger[Any]]
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # where no tokenizer_config.json names eos_token
_PIECE = 1 << 20  # bytes of a document that are encoded at once; a longer one is cut at line ends


class Tokenizer(Protocol):
    """What turns text into ids below `size`; `end` closes a document (None: nothing does); `identity` names its content."""

    @property
    def size(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def identity(self) -> str: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def encode(self, text: bytes) -> Ids:
        """Ids [n]; raises UnicodeDecodeError where the text is not what the tokenizer reads."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Each byte is a token; byte 0, which text does not hold, ends a document."""

    end: int | None = 0
    size: int = 256

    @property
    def identity(self) -> str:
        return "bytes"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A Hugging Face tokenizer, without the special tokens that it would put around a text."""

    size: int
    end: int | None
    identity: str
    rules: Any  # tokenizers.Tokenizer

    @property
    def dtype(self) -> np.dtype[Any]:
        return narrowest(self.size)

    def encode(self, text: bytes) -> Ids:
        pieces = [self.rules.encode(piece.decode(), add_special_tokens=False).ids for piece in _pieces(text)]
        return np.concatenate([np.asarray(ids, self.dtype) for ids in pieces]) if pieces else np.empty(0, self.dtype)


def narrowest(size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds ids below size."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32)


def tokenizer(word: str, end: int | None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` and `data.end` name; raises Unreadable."""
    found = Bytes() if word == "bytes" else _vocabulary(word)
    if end is None:
        return found
    if end >= found.size:
        raise refused(f"data.end={end} is no token of data.tokenizer={word}", f"its ids end at {found.size - 1}")
    return Bytes(end=end) if isinstance(found, Bytes) else Vocabulary(size=found.size, end=end, identity=found.identity, rules=found.rules)


def _vocabulary(word: str) -> Vocabulary:
    path = expanded(word)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = read_plain(path)
        rules = import_module("tokenizers").Tokenizer.from_str(text.decode())
    except ImportError:
        raise refused(f"data.tokenizer={word} wants the tokenizers package, which is not installed", "pip install tokenizers") from None
    except OSError as error:
        raise refused(f"data.tokenizer={word}: {error.strerror}", "say bytes, or the path of a tokenizer.json") from None
    except Exception as error:  # the package raises bare Exceptions
        raise refused(f"data.tokenizer={word} is no tokenizer.json: {error}", "") from None
    ids: dict[str, int] = rules.get_vocab(with_added_tokens=True)
    if not ids:
        raise refused(f"data.tokenizer={word} has no tokens", "")
    return Vocabulary(size=max(ids.values()) + 1, end=_end(path, ids), identity=blake2b(text).hexdigest(), rules=rules)


def _end(path: Path, ids: dict[str, int]) -> int | None:
    try:
        named = json.loads(read_plain(path.with_name("tokenizer_config.json"))).get("eos_token")
    except (OSError, ValueError, AttributeError):
        named = None
    name = named.get("content") if isinstance(named, dict) else named
    return next((ids[each] for each in (name, *ENDS) if each in ids), None)


def _pieces(text: bytes) -> Iterator[bytes]:
    """A text whole, or cut after line ends into pieces of a bounded size (a line that is longer stays whole)."""
    at = 0
    while len(text) - at > _PIECE:
        cut = text.rfind(b"\n", at, at + _PIECE) + 1 or text.find(b"\n", at + _PIECE) + 1 or len(text)
        yield text[at:cut]
        at = cut
    if at < len(text):
        yield text[at:]
