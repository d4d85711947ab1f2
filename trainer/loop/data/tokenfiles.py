"""Files of token ids as others write them: nanoGPT's .bin, llm.c's .bin, Megatron's .bin and .idx."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .find import File
from .order import Indices
from .refusal import refused

Ids = NDArray[np.integer[Any]]

MEGATRON = b"MMIDIDX\x00\x00"  # megatron/core/datasets/indexed_dataset.py, as the codes of types
CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
LLM_C = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}  # llm.c dev/data/data_common.py: 256 int32 (magic, version, tokens, 0 ...)
LLM_C_HEADER = 1024  # bytes
_AT_ONCE = 1 << 22  # tokens


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Where a file's tokens lie: their type, the byte of the first, how many; `bounds` [documents + 1], None where unknown."""

    file: File
    dtype: np.dtype[Any]
    offset: int
    size: int
    bounds: Indices | None

    def mapped(self) -> Ids:
        """The tokens [size], memory mapped."""
        return np.memmap(self.file.path, self.dtype, "r", self.offset, (self.size,))

    def chunks(self) -> Iterator[tuple[int, Ids]]:
        """(position, tokens) from the first on."""
        tokens = self.mapped()
        for at in range(0, self.size, _AT_ONCE):
            yield at, tokens[at : at + _AT_ONCE]


def opened(file: File) -> TokenFile:
    """What a file's header, or the index beside it, says; raises Unreadable."""
    index = file.path.with_suffix(".idx")
    if index.exists():
        return _megatron(file, index)
    with open(file.path, "rb") as head:
        start = head.read(LLM_C_HEADER)
    if len(start) == LLM_C_HEADER and (dtype := LLM_C.get(struct.unpack_from("<ii", start))):
        return _llm_c(file, np.dtype(dtype), struct.unpack_from("<i", start, 8)[0])
    if file.size % 2:
        raise refused(f"{file.path} has {file.size} bytes, an odd number", "nanoGPT's .bin is uint16; Megatron's has an .idx beside it")
    return TokenFile(file=file, dtype=np.dtype(np.uint16), offset=0, size=file.size // 2, bounds=None)


def scanned(files: Sequence[TokenFile], end: int | None, vocab: int, seen: Callable[[int], None]) -> tuple[Indices, Indices]:
    """(how often each id comes [largest + 1], bounds of the documents of all files in a row [documents + 1]).

    Where a file knows none of its documents, they end after each `end`; raises Unreadable for the first id not below vocab.
    """
    counts, bounds, before = np.zeros(vocab, np.int64), [np.zeros(1, np.int64)], 0
    for file in files:
        for at, chunk in file.chunks():
            _check(file, at, chunk, vocab)
            counts += np.bincount(chunk, minlength=vocab)
            if file.bounds is None and end is not None:
                bounds.append(before + at + 1 + np.flatnonzero(chunk == end))
            seen(chunk.nbytes)
        if file.bounds is not None:
            bounds.append(before + file.bounds)
        before += file.size
        bounds.append(np.array([before]))
    return np.trim_zeros(counts, "b"), np.unique(np.concatenate(bounds))


def check_vocabulary(files: Sequence[TokenFile], vocab: int) -> None:
    """Raises Unreadable for the first id that is not below vocab."""
    for file in files:
        for at, chunk in file.chunks():
            _check(file, at, chunk, vocab)


def _check(file: TokenFile, at: int, chunk: Ids, vocab: int) -> None:
    if chunk.max() < vocab and chunk.min() >= 0:
        return
    first = int(np.flatnonzero((chunk >= vocab) | (chunk < 0))[0])
    says = f"{file.file.path}: token {chunk[first]} at position {at + first} is not in the vocabulary, model.vocab={vocab}"
    mend = f"the largest id near it is {chunk.max()}: train a model with the vocabulary of the tokenizer that wrote the file"
    raise refused(says, mend)


def _llm_c(file: File, dtype: np.dtype[Any], size: int) -> TokenFile:
    if file.size != LLM_C_HEADER + size * dtype.itemsize:
        raise refused(f"{file.path} has {file.size} bytes where its header says {size} tokens of {dtype.itemsize}", "it was cut short")
    return TokenFile(file=file, dtype=dtype, offset=LLM_C_HEADER, size=size, bounds=None)


def _megatron(file: File, index: Path) -> TokenFile:
    """9 bytes of magic, uint64 version, uint8 type, uint64 sequences S, uint64 documents D; int32 lengths [S], int64 byte
    offsets [S], int64 index [D] of the sequence at which each document starts, and at last S."""
    head = struct.Struct("<QBQQ")
    with open(index, "rb") as opening:
        start = opening.read(len(MEGATRON) + head.size)
    if not start.startswith(MEGATRON) or len(start) < len(MEGATRON) + head.size:
        raise refused(f"{index} is no Megatron index: it does not begin with MMIDIDX", "move it away if the .bin is nanoGPT's")
    version, code, sequences, documents = head.unpack_from(start, len(MEGATRON))
    words, at = np.memmap(index, np.uint8, "r"), len(start)
    if version != 1 or code not in CODES or len(words) < at + 12 * sequences + 8 * documents:
        raise refused(f"{index} is damaged, or of a kind unknown: version {version}, type {code}, {len(words)} bytes", "write it again")
    lengths = np.frombuffer(words, "<i4", sequences, at)
    offsets = np.frombuffer(words, "<i8", sequences, at + 4 * sequences)
    starts = np.frombuffer(words, "<i8", documents, at + 12 * sequences)
    dtype = np.dtype(CODES[code])
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    in_order = np.array_equal(offsets, ends[:-1] * dtype.itemsize) and (not documents or 0 <= starts.min() <= starts.max() <= sequences)
    if not in_order or file.size != ends[-1] * dtype.itemsize:
        raise refused(f"{file.path} has {file.size} bytes where {index.name} says {ends[-1] * dtype.itemsize}", "they are not one pair")
    bounds = np.unique(np.concatenate([ends[starts], ends[[0, -1]]]))
    return TokenFile(file=file, dtype=dtype, offset=0, size=int(ends[-1]), bounds=bounds)
