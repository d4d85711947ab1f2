"""Bytes of text become token ids: as they are, or by a Hugging Face tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...spec.plain_file import expanded, read_plain
from .data_error import refused

Ids = NDArray[np.unsignedinteger[Any]]
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # where no tokenizer_config.json names eos_token
SLOW = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)  # of transformers' slow tokenizers
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
        try:
            pieces = [self.rules.encode(piece.decode(), add_special_tokens=False).ids for piece in _pieces(text)]
        except UnicodeDecodeError:
            raise
        except Exception as error:  # the package raises bare Exceptions
            raise refused(f"the tokenizer can't encode {text[:40]!r} ...: {error}") from None
        return np.concatenate([np.asarray(ids, self.dtype) for ids in pieces]) if pieces else np.empty(0, self.dtype)


def narrowest(size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds ids below size."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32)


def tokenizer(word: str, end: int | None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` and `data.end` name; raises Unreadable."""
    found = Bytes() if word == "bytes" else _vocabulary(word, end)
    if end is None:
        return found
    if end >= found.size:
        raise refused(f"data.end={end} is no token of data.tokenizer={word}", f"its ids end at {found.size - 1}")
    return replace(found, end=end)


def _vocabulary(word: str, end: int | None) -> Vocabulary:
    """The vocabulary of a tokenizer.json; `end` replaces the end token that the files beside it name."""
    path = _file(word)
    try:
        text = read_plain(path)
        rules = import_module("tokenizers").Tokenizer.from_str(text.decode())
    except ImportError:
        raise refused(f"data.tokenizer={word} wants the tokenizers package, which is not installed", "pip install tokenizers") from None
    except OSError as error:
        raise refused(f"data.tokenizer={word}: {error.strerror}", "say bytes, or the path of a tokenizer.json") from None
    except Exception as error:  # the package raises bare Exceptions
        raise refused(f"data.tokenizer={word} is {_kind(path, text) or f'no tokenizer.json: {error}'}", _mend(path)) from None
    ids: dict[str, int] = rules.get_vocab(with_added_tokens=True)
    if not ids:
        raise refused(f"data.tokenizer={word} has no tokens")
    _reset(rules)
    named = _end(path, ids, word) if end is None else None
    return Vocabulary(size=max(ids.values()) + 1, end=named, identity=blake2b(text).hexdigest(), rules=rules)


def _reset(rules: Any) -> None:
    """Switch off what transformers saved of its last use, and what training left on: each changes or drops a document's tokens."""
    rules.no_truncation()
    rules.no_padding()
    if getattr(rules.model, "dropout", None):  # of merges: another result at every call
        rules.model.dropout = None


def _file(word: str) -> Path:
    """The tokenizer.json that a word names, itself or by its folder; raises Unreadable."""
    path = expanded(word)
    if path.is_dir():
        if not (path / "tokenizer.json").exists():
            others = [name for name in SLOW if (path / name).exists()]
            raise refused(f"data.tokenizer={word} has no tokenizer.json" + (f" but {' and '.join(others)}" if others else ""), _mend(path))
        path = path / "tokenizer.json"
    if path.exists() and not path.is_file():
        raise refused(f"data.tokenizer={word} is no file", "say bytes, or the path of a tokenizer.json")
    return path


def _kind(path: Path, text: bytes) -> str:
    """What a file is that is no tokenizer.json, "" where that is not known."""
    if path.suffix == ".model" or (text[:1] == b"\n" and b"<unk>" in text[:64]):
        return "a SentencePiece model"
    if text.startswith(b"version https://git-lfs.github"):
        return "a pointer of Git LFS, which git lfs pull replaces"
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return "a tiktoken vocabulary" if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\n", text) else ""
    if not isinstance(words, dict):
        return ""
    if words and all(isinstance(value, int) for value in words.values()):
        return "a vocabulary without the rules that go with it"
    return "a configuration, no tokenizer.json" if words.keys() & {"tokenizer_class", "model_type", "eos_token"} else ""


def _mend(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if path != folder / "tokenizer.json" and (folder / "tokenizer.json").exists():
        return f"did you mean {folder / 'tokenizer.json'}?"
    if any((folder / name).exists() for name in SLOW):
        return f"transformers writes one: AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    return "give the path of a tokenizer.json, or say bytes"


def _end(path: Path, ids: dict[str, int], word: str) -> int | None:
    """The id of the end token that the files beside a tokenizer.json name, else of one that is usual; raises Unreadable."""
    for beside in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            named = json.loads(read_plain(path.with_name(beside))).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        name = named.get("content") if isinstance(named, dict) else named
        if isinstance(name, str) and name:
            if name not in ids:
                says = f"{path.with_name(beside)} names eos_token={name}, which data.tokenizer={word} does not have"
                raise refused(says, "set data.end to the id of the token that ends a document")
            return ids[name]
    return next((ids[name] for name in ENDS if name in ids), None)


def _pieces(text: bytes) -> Iterator[bytes]:
    """A text whole, or cut after line ends into pieces of a bounded size (a line that is longer stays whole)."""
    at = 0
    while len(text) - at > _PIECE:
        cut = text.rfind(b"\n", at, at + _PIECE) + 1 or text.find(b"\n", at + _PIECE) + 1 or len(text)
        yield text[at:cut]
        at = cut
    if at < len(text):
        yield text[at:]
