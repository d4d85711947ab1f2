"""Estimates how many tokens text makes from a sample, and remarks on what a tokenizer does to the sample."""

from __future__ import annotations

import io
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from ..files import columnar
from ..files.compressed import decompress_start
from ..files.data_error import data_error
from ..files.find import DataFile
from ..files.formats import text_form
from .text_files import BadText, encode_text, json_rows, line_start, next_line
from .tokenizer import ByteTokenizer, Tokenizer, VocabularyTokenizer

LineReader = Callable[[bytes], bytes]

_PLACES = 4  # samples from the files of each form
_BYTES = (1 << 15, 1 << 19, 1 << 23)  # bytes of a sample; the larger ones for longer lines
_ENCODED = 1 << 15  # bytes of text of each sample that are tokenized
_UNPACKED = 1 << 24  # bytes at most of a decompressed sample
_LOST = 0.01  # share of lost characters or unknown tokens from which on it is remarked


@dataclass(frozen=True, kw_only=True)
class TokenEstimate:
    """Tokens and documents of some files; `exact` if nothing had to be estimated."""

    tokens: float
    documents: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Texts from a file, and the number of the file's bytes that they represent."""

    texts: list[bytes]
    represents: float


def estimate_tokens(
    files: Sequence[DataFile], by: Tokenizer, key: str, read_line: LineReader, remark: Callable[[str], object]
) -> TokenEstimate | None:
    """Estimate the tokens of text files; None if the samples are empty. Remarks on oddities of the text; raises Unreadable.

    `key` names the text's column of a table, and `read_line` returns the text of a line of JSON.
    """
    forms: dict[tuple[str, str], list[DataFile]] = {}
    for file in files:
        forms.setdefault(text_form(file.path.name), []).append(file)
    try:
        rows = [_estimate_form(same, by, key, read_line, remark) for same in forms.values()]
    except BadText as error:
        raise data_error(str(error)) from None
    known = [row for row in rows if row]
    if len(known) < len(rows):
        return None
    exact = all(row.exact for row in known)
    return TokenEstimate(tokens=sum(row.tokens for row in known), documents=sum(row.documents for row in known), exact=exact)


def _estimate_form(
    files: Sequence[DataFile], by: Tokenizer, key: str, read_line: LineReader, remark: Callable[[str], object]
) -> TokenEstimate | None:
    """Estimate the tokens of files of one form from a few samples spread over them; raises BadText."""
    rows, compression = text_form(files[0].path.name)
    places = _sample_places(files, 0 if rows in ("parquet", "arrow") else _BYTES[0])
    samples = [_read_sample(file, key, read_line, 0 if compression else at) for file, at in places]
    texts = [text for sample in samples for text in sample.texts]
    if rows == "text":
        _remark_on_line_ends(texts, files[0], remark)
    if isinstance(by, VocabularyTokenizer):
        _remark_on_losses(texts, by, remark)
    size, ends = sum(file.size for file in files), by.end is not None
    if rows == "text" and not compression and isinstance(by, ByteTokenizer):
        return TokenEstimate(tokens=size + ends * len(files), documents=len(files), exact=True)
    useful = [(file, sample) for (file, _), sample in zip(places, samples, strict=True) if sample.texts and sample.represents]
    if not useful:
        return None
    tokens = fmean(sum(len(encode_text(text, str(file.path), by)) for text in sample.texts) / sample.represents for file, sample in useful)
    documents = len(files) if rows == "text" else fmean(len(sample.texts) / sample.represents for _, sample in useful) * size
    return TokenEstimate(tokens=tokens * size + ends * documents, documents=documents, exact=False)


def _sample_places(files: Sequence[DataFile], size: int) -> list[tuple[DataFile, int]]:
    """Return (file, byte) of each sample of `size` bytes, in the middle of equal parts of all bytes."""
    starts = np.cumsum([0, *(file.size for file in files)])
    part = max(int(starts[-1]) // _PLACES, size, 1)
    places = [at + (part - size) // 2 for at in range(0, int(starts[-1]), part)]
    found = []
    for place in places:
        at = min(place, int(starts[-1]) - 1)
        file = int(np.searchsorted(starts, at, "right")) - 1
        found.append((files[file], at - int(starts[file])))
    return found


def _read_sample(file: DataFile, key: str, read_line: LineReader, begin: int) -> _Sample:
    """Return texts from a byte of a file on; raises BadText."""
    rows, compression = text_form(file.path.name)
    if rows == "parquet" or rows == "arrow":
        try:
            found = columnar.sample_rows(str(file.path), rows, key, begin, _ENCODED)
        except columnar.UnreadableTable as error:
            raise BadText(f"{file.path} {error}") from None
        return _limit_texts(found.texts, file.size * found.share)
    for most in _BYTES:
        with open(file.path, "rb") as opened:
            begin = (next_line if rows == "lines" and not compression else line_start)(opened, begin)
            opened.seek(begin)
            start = opened.read(most)
        text = decompress_start(start, compression, _UNPACKED) if compression else start
        lines = text if begin + len(start) == file.size else text[: text.rfind(b"\n") + 1]
        if lines or rows == "text":
            break
    represents = len(start) * len(lines or text) / max(len(text), 1)
    if rows == "text":
        return _limit_texts([_drop_cut_letter(lines or text).removeprefix(BOM_UTF8)], represents)
    texts = [text for text in json_rows(io.BytesIO(lines), begin, None, str(file.path), read_line) if text]
    return _limit_texts(texts, represents)


def _limit_texts(texts: list[bytes], represents: float) -> _Sample:
    """Return as many texts as are tokenized, and the number of bytes that they represent."""
    taken, size = list[bytes](), 0
    for text in texts:
        if size >= _ENCODED:
            break
        taken.append(text)
        size += len(text)
    return _Sample(texts=taken, represents=represents * size / max(sum(map(len, texts)), 1))


def _drop_cut_letter(text: bytes) -> bytes:
    """Return UTF-8 without a character that was cut at its end."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start] if error.start >= len(text) - 3 else text
    return text


def _remark_on_line_ends(texts: Sequence[bytes], file: DataFile, remark: Callable[[str], object]) -> None:
    ends = sum(text.count(b"\n") for text in texts)
    if ends and sum(text.count(b"\r\n") for text in texts) > ends / 2:
        remark(f"lines end with CR LF, as in {file.path}: the CRs become tokens; dos2unix removes them")


def _remark_on_losses(texts: Sequence[bytes], by: VocabularyTokenizer, remark: Callable[[str], object]) -> None:
    """Remark if a tokenizer drops or does not know parts of the text."""
    letters = lost = tokens = unknown = 0
    unknown_id = _unknown_token(by.rules)
    for text in texts:
        words = text.decode()
        found = by.rules.encode(words, add_special_tokens=False)
        seen = np.array([not letter.isspace() for letter in words], bool)
        letters += int(seen.sum())
        for begin, end in found.offsets:
            seen[begin:end] = False
        lost += int(seen.sum())
        tokens += len(found.ids)
        unknown += found.ids.count(unknown_id)
    if lost > _LOST * letters:
        remark(f"the tokenizer drops {100 * lost / letters:.0f} % of the characters in a sample of the text: it was made for other text")
    if unknown > _LOST * tokens:
        remark(f"the tokenizer does not know {100 * unknown / tokens:.0f} % of a sample of the text: it was made for other text")


def _unknown_token(rules: Any) -> int | None:
    """Return the id of a tokenizer's unknown token."""
    name = getattr(rules.model, "unk_token", None)
    return rules.token_to_id(name) if isinstance(name, str) else getattr(rules.model, "unk_id", None)
