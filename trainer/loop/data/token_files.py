"""Files of token ids: raw ids, NumPy's .npy, llm.c's .bin, Megatron's .bin and .idx, datatrove's .ds."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files.data_error import data_error
from .files.find import DataFile
from .files.formats import check_token_bytes, read_first_bytes
from .files.id_width import raw_id_type
from .samples.order import Indices

Ids = NDArray[np.integer[Any]]

MEGATRON = b"MMIDIDX\x00\x00"  # megatron/core/datasets/indexed_dataset.py, also for CODES
DTYPE_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
LLM_C = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}  # llm.c dev/data/data_common.py: 256 int32 (magic, version, tokens, 0 ...)
LLM_C_MAGIC = (20240326, 20240327, 20240328, 20240520, 20240522, 20240801)  # models, states, tokenizers, tokens, questions, tokens
LLM_C_HEADER = 1024  # bytes
NUMPY = b"\x93NUMPY"
DATATROVE = ".ds"
_AT_ONCE = 1 << 22  # tokens


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A file of tokens: their type, the offset of the first, their number; `bounds` [documents + 1], None if unknown."""

    file: DataFile
    dtype: np.dtype[Any]
    offset: int
    size: int
    bounds: Indices | None
    says_type: bool = True  # False: inferred from the bytes of the ids

    def memory_map(self) -> Ids:
        """Return the tokens [size], memory-mapped."""
        return np.memmap(self.file.path, self.dtype, "r", self.offset, (self.size,))

    def chunks(self) -> Iterator[tuple[int, Ids]]:
        """Yield (position, tokens) from the first on."""
        tokens = self.memory_map()
        for at in range(0, self.size, _AT_ONCE):
            yield at, tokens[at : at + _AT_ONCE]


def open_token_file(file: DataFile, vocab: int) -> TokenFile:
    """Read a file's header or its index; without one, infer the type from its bytes. Raises Unreadable, OSError."""
    if file.path.suffix == ".bin" and (index := file.path.with_suffix(".idx")).exists():
        return _open_megatron(file, index)
    if (owner := file.path.with_suffix("")).suffix == DATATROVE and owner.exists():
        raise data_error(f"{file.path} belongs to {owner.name}", "name that file")
    head = read_first_bytes(file)
    start = head.start
    if start.startswith(NUMPY):
        return _open_numpy(file)
    if len(start) >= LLM_C_HEADER and (kind := struct.unpack_from("<iii", start))[0] in LLM_C_MAGIC:
        return _open_llm_c(file, *kind)
    if file.path.suffix == DATATROVE and (companions := companion_files(file)):
        return _open_datatrove(file, companions)
    if fault := check_token_bytes(head):
        raise data_error(f"{file.path} is {fault.what}", fault.mend)
    dtype = raw_id_type(file.path, file.size, vocab)
    if file.size % dtype.itemsize:
        says = f"{file.path} has {file.size} bytes, but its ids seem to take {dtype.itemsize} bytes each"
        raise data_error(says, "it may be truncated; or write it with numpy.save, which records the width")
    return TokenFile(file=file, dtype=dtype, offset=0, size=file.size // dtype.itemsize, bounds=None, says_type=False)


def companion_files(file: DataFile) -> list[DataFile]:
    """Return the files that hold a token file's document ends or the width of its ids."""
    names = [f"{file.path.name}.index", f"{file.path.name}.metadata"] if file.path.suffix == DATATROVE else []
    paths = [file.path.with_name(name) for name in names] + ([file.path.with_suffix(".idx")] if file.path.suffix == ".bin" else [])
    return [DataFile(f"{file.name}{path.suffix}", path, path.stat().st_size) for path in paths if path.exists()]


def scan_token_files(files: Sequence[TokenFile], end: int | None, vocab: int, report: Callable[[int], None]) -> tuple[Indices, Indices]:
    """Return (count of each id [largest + 1], document bounds over all files [documents + 1]).

    In a file without document bounds, documents end after each `end`. Raises Unreadable at the first id not below vocab.
    """
    counts, bounds, before = np.zeros(vocab, np.int64), [np.zeros(1, np.int64)], 0
    for file in files:
        for at, chunk in file.chunks():
            _check_ids(file, at, chunk, vocab)
            counts += np.bincount(chunk.astype(np.int64, copy=False), minlength=vocab)
            if file.bounds is None and end is not None:
                bounds.append(before + at + 1 + np.flatnonzero(chunk == end))
            report(chunk.nbytes)
        if file.bounds is not None:
            bounds.append(before + file.bounds)
        before += file.size
        bounds.append(np.array([before]))
    return np.trim_zeros(counts, "b"), np.unique(np.concatenate(bounds))


def check_vocabulary(files: Sequence[TokenFile], vocab: int) -> None:
    """Raises Unreadable at the first id that is not below vocab."""
    for file in files:
        for at, chunk in file.chunks():
            _check_ids(file, at, chunk, vocab)


def _check_ids(file: TokenFile, at: int, chunk: Ids, vocab: int) -> None:
    if chunk.max() < vocab and chunk.min() >= 0:
        return
    first = int(np.flatnonzero((chunk >= vocab) | (chunk < 0))[0])
    says = f"{file.file.path}: token {chunk[first]} at position {at + first} is not in the vocabulary, model.vocab={vocab}"
    mend = f"the largest id near it is {chunk.max()}: train a model with the vocabulary of the tokenizer that wrote the file"
    doubt = (
        ""
        if file.says_type or file.dtype.itemsize == 2
        else f", or its ids may not take {file.dtype.itemsize} bytes, as they seem to: numpy.save records the width"
    )
    raise data_error(says, mend + doubt)


def _open_numpy(file: DataFile) -> TokenFile:
    """Open an array of integers as numpy.save writes it (numpy/lib/format.py)."""
    try:
        found = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, SyntaxError, EOFError) as error:
        raise data_error(
            f"{file.path} is a NumPy array that can't be read: {' '.join(str(error).split())[:200]}", "write it again"
        ) from None
    if found.dtype.kind not in "iu":
        raise data_error(f"{file.path} is an array of {found.dtype}, but token ids are integers", "numpy.save(FILE, ids.astype('uint32'))")
    if found.ndim != 1:
        shape = " x ".join(map(str, found.shape))
        raise data_error(
            f"{file.path} is an array of {shape or 'no dimensions'}", "token ids need one dimension: numpy.save(FILE, ids.reshape(-1))"
        )
    if not len(found):
        raise data_error(f"{file.path} has no tokens", "leave it out of data.path")
    if after := file.size - found.offset - found.nbytes:
        raise data_error(f"{file.path} has {after} bytes after its array", "write a file for each array")
    return TokenFile(file=file, dtype=found.dtype, offset=found.offset, size=len(found), bounds=None)


def _open_datatrove(file: DataFile, companions: Sequence[DataFile]) -> TokenFile:
    """Ids of 2 or 4 bytes; FILE.index is uint64 [documents], the tokens before each end; FILE.metadata begins with a line
    TOKENIZER|WIDTH and a line of the tokens (datatrove/pipeline/tokens/tokenizer.py; in old versions no |WIDTH, and it is 2)."""
    sizes, widths, bounds = set[int](), set[float](), None
    for each in companions:
        if each.path.suffix == ".index":
            ends = np.fromfile(each.path, "<u8").astype(np.int64)
            bounds = np.concatenate([np.zeros(1, np.int64), ends])
            sizes.add(int(bounds[-1]))
            widths.add(file.size / max(int(bounds[-1]), 1))
        else:
            first, _, rest = each.path.read_text(errors="replace").partition("\n")
            count = rest.partition("\n")[0].strip()
            sizes |= {int(count)} if count.isdecimal() else set()
            widths.add({"4": 4}.get(first.rpartition("|")[2], 2))
    (width, *more), size = widths, min(sizes, default=0)
    if more or len(sizes) != 1 or width not in (2, 4) or size * width != file.size or (bounds is not None and (np.diff(bounds) < 0).any()):
        names = " and ".join(each.path.name for each in companions)
        raise data_error(
            f"{file.path} has {file.size} bytes, which does not match {names}: {size} tokens", "write the files again together"
        )
    known = None if bounds is None else np.unique(bounds)
    return TokenFile(file=file, dtype=np.dtype(f"<u{int(width)}"), offset=0, size=size, bounds=known)


def _open_llm_c(file: DataFile, magic: int, version: int, size: int) -> TokenFile:
    if (magic, version) not in LLM_C:
        raise data_error(f"{file.path} is an llm.c file without tokens or of an unknown kind: {magic}, version {version}")
    dtype = np.dtype(LLM_C[magic, version])
    if file.size != LLM_C_HEADER + size * dtype.itemsize:
        raise data_error(
            f"{file.path} has {file.size} bytes, but its header says {size} tokens of {dtype.itemsize}", "it is truncated: write it again"
        )
    return TokenFile(file=file, dtype=dtype, offset=LLM_C_HEADER, size=size, bounds=None)


def _open_megatron(file: DataFile, index: Path) -> TokenFile:
    """9 bytes of magic, uint64 version, uint8 type, uint64 sequences S, uint64 documents D; int32 lengths [S], int64 byte
    offsets [S], int64 index [D] of the sequence at which each document starts, and at last S."""
    head = struct.Struct("<QBQQ")
    with open(index, "rb") as opening:
        start = opening.read(len(MEGATRON) + head.size)
    if not start.startswith(MEGATRON) or len(start) < len(MEGATRON) + head.size:
        raise data_error(f"{index} is not a Megatron index: it does not begin with MMIDIDX", "move it away if the .bin is nanoGPT's")
    version, code, sequences, documents = head.unpack_from(start, len(MEGATRON))
    words, at = np.memmap(index, np.uint8, "r"), len(start)
    if version != 1 or code not in DTYPE_CODES or len(words) < at + 12 * sequences + 8 * documents:
        raise data_error(f"{index} is damaged or of an unknown kind: version {version}, type {code}, {len(words)} bytes", "write it again")
    lengths = np.frombuffer(words, "<i4", sequences, at)
    offsets = np.frombuffer(words, "<i8", sequences, at + 4 * sequences)
    starts = np.frombuffer(words, "<i8", documents, at + 12 * sequences)
    dtype = np.dtype(DTYPE_CODES[code])
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    in_order = np.array_equal(offsets, ends[:-1] * dtype.itemsize) and (not documents or 0 <= starts.min() <= starts.max() <= sequences)
    if not in_order or file.size != ends[-1] * dtype.itemsize:
        raise data_error(
            f"{file.path} has {file.size} bytes, but {index.name} says {ends[-1] * dtype.itemsize}", "they do not belong together"
        )
    bounds = np.unique(np.concatenate([ends[starts], ends[[0, -1]]]))
    return TokenFile(file=file, dtype=dtype, offset=0, size=int(ends[-1]), bounds=bounds)
