"""From bytes of text to token ids: the bytes themselves, or by a Hugging Face tokenizer.json."""

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

from ....system.regular_file import expand_home, read_plain
from ..files.data_error import data_error

Ids = NDArray[np.unsignedinteger[Any]]
Indices = NDArray[np.int64]
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # used if no tokenizer_config.json names eos_token
SENTENCEPIECE_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)  # of transformers' slow tokenizers
_PIECE = 1 << 20  # bytes of a document that are encoded at once; longer documents are cut at line ends


class Tokenizer(Protocol):
    """Encodes text as ids below `size`; `end` ends a document (None: nothing does); `identity` identifies the tokenizer."""

    @property
    def size(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def identity(self) -> str: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def encode(self, text: bytes) -> Ids:
        """Return ids [n]; raises UnicodeDecodeError if the text is not UTF-8 and the tokenizer needs it."""


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """Each byte is a token; byte 0, which does not occur in text, ends a document."""

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
class VocabularyTokenizer:
    """A Hugging Face tokenizer; it adds no special tokens around a text."""

    size: int
    end: int | None
    identity: str
    rules: Any  # tokenizers.Tokenizer

    @property
    def dtype(self) -> np.dtype[Any]:
        return smallest_id_type(self.size)

    def encode_with_places(self, text: str) -> tuple[Ids, Indices, Indices]:
        """Return the ids [n] of a text, and the character at which each begins and ends [n]; raises Unreadable."""
        try:
            found = self.rules.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises bare Exceptions
            raise data_error(f"the tokenizer can't encode {text[:40]!r} ...: {error}") from None
        places = np.array(found.offsets, np.int64).reshape(-1, 2)
        return np.asarray(found.ids, self.dtype), places[:, 0], places[:, 1]

    def encode(self, text: bytes) -> Ids:
        try:
            pieces = [self.rules.encode(piece.decode(), add_special_tokens=False).ids for piece in _split_lines(text)]
        except UnicodeDecodeError:
            raise
        except Exception as error:  # the package raises bare Exceptions
            raise data_error(f"the tokenizer can't encode {text[:40]!r} ...: {error}") from None
        return np.concatenate([np.asarray(ids, self.dtype) for ids in pieces]) if pieces else np.empty(0, self.dtype)


def smallest_id_type(size: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that holds ids below size."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32)


def load_tokenizer(name: str, end: int | None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` and `data.end` name; raises Unreadable."""
    found = ByteTokenizer() if name == "bytes" else _load_vocabulary(name, end)
    if end is None:
        return found
    if end >= found.size:
        raise data_error(f"data.end={end} is not a token of data.tokenizer={name}", f"its ids end at {found.size - 1}")
    return replace(found, end=end)


def _load_vocabulary(name: str, end: int | None) -> VocabularyTokenizer:
    """Load a tokenizer.json; `end` overrides the end token of its tokenizer_config.json."""
    path = tokenizer_path(name)
    try:
        text = read_plain(path)
        rules = import_module("tokenizers").Tokenizer.from_str(text.decode())
    except ImportError:
        raise data_error(f"data.tokenizer={name} needs the tokenizers package, which is not installed", "pip install tokenizers") from None
    except OSError as error:
        raise data_error(f"data.tokenizer={name}: {error.strerror}", "set it to bytes or to the path of a tokenizer.json") from None
    except Exception as error:  # the package raises bare Exceptions
        raise data_error(f"data.tokenizer={name} is {_wrong_kind(path, text) or f'not a tokenizer.json: {error}'}", _fix(path)) from None
    ids: dict[str, int] = rules.get_vocab(with_added_tokens=True)
    if not ids:
        raise data_error(f"data.tokenizer={name} has no tokens")
    _reset(rules)
    named = _end_token(path, ids, name) if end is None else None
    return VocabularyTokenizer(size=max(ids.values()) + 1, end=named, identity=blake2b(text).hexdigest(), rules=rules)


def _reset(rules: Any) -> None:
    """Switch off saved truncation and padding, and dropout of merges: each changes or drops a document's tokens. Without the
    post-processor, which adds special tokens, tokens keep the places of their white space."""
    rules.no_truncation()
    rules.no_padding()
    rules.post_processor = None
    if getattr(rules.model, "dropout", None):  # of BPE merges: it makes encoding random
        rules.model.dropout = None


def tokenizer_path(name: str) -> Path:
    """Return the path of a tokenizer.json, given as a file or a folder; raises Unreadable."""
    path = expand_home(name)
    if path.is_dir():
        if not (path / "tokenizer.json").exists():
            others = [name for name in SENTENCEPIECE_FILES if (path / name).exists()]
            raise data_error(
                f"data.tokenizer={name} has no tokenizer.json" + (f", only {' and '.join(others)}" if others else ""), _fix(path)
            )
        path = path / "tokenizer.json"
    if path.exists() and not path.is_file():
        raise data_error(f"data.tokenizer={name} is not a file", "set it to bytes or to the path of a tokenizer.json")
    return path


def _wrong_kind(path: Path, text: bytes) -> str:
    """Return what a file is that is not a tokenizer.json; "" if unknown."""
    if path.suffix == ".model" or (text[:1] == b"\n" and b"<unk>" in text[:64]):
        return "a SentencePiece model"
    if text.startswith(b"version https://git-lfs.github"):
        return "a Git LFS pointer: git lfs pull fetches the file"
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return "a tiktoken vocabulary" if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\n", text) else ""
    if not isinstance(words, dict):
        return ""
    if words and all(isinstance(value, int) for value in words.values()):
        return "a vocabulary without its rules"
    return "a configuration, not a tokenizer.json" if words.keys() & {"tokenizer_class", "model_type", "eos_token"} else ""


def _fix(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if path != folder / "tokenizer.json" and (folder / "tokenizer.json").exists():
        return f"did you mean {folder / 'tokenizer.json'}?"
    if any((folder / name).exists() for name in SENTENCEPIECE_FILES):
        return f"transformers writes one: AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    return "set it to bytes or to the path of a tokenizer.json"


def _end_token(path: Path, ids: dict[str, int], name: str) -> int | None:
    """Return the id of the end token: that of tokenizer_config.json, or a usual one; None if there is none. Raises Unreadable."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            named = json.loads(read_plain(path.with_name(file))).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        token = named.get("content") if isinstance(named, dict) else named
        if isinstance(token, str) and token:
            if token not in ids:
                says = f"{path.with_name(file)} names eos_token={token}, which data.tokenizer={name} does not have"
                raise data_error(says, "set data.end to the id of the token that ends a document")
            return ids[token]
    return next((ids[token] for token in ENDS if token in ids), None)


def _split_lines(text: bytes) -> Iterator[bytes]:
    """Yield a text in pieces of bounded size, cut after line ends (a longer line stays whole)."""
    at = 0
    while len(text) - at > _PIECE:
        cut = text.rfind(b"\n", at, at + _PIECE) + 1 or text.find(b"\n", at + _PIECE) + 1 or len(text)
        yield text[at:cut]
        at = cut
    if at < len(text):
        yield text[at:]
