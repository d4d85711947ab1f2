"""How many tokens text makes, from a sample of it, and what a tokenizer does to that sample."""

from __future__ import annotations

import io
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from . import columnar
from .compressed import unpack_start
from .data_error import refused
from .find import File
from .formats import form
from .text_files import Unfit, encode, line_start, objects
from .tokenizer import Bytes, Tokenizer, Vocabulary

_PLACES = 4  # of the files of each form, that are looked into
_BYTES = (1 << 15, 1 << 19, 1 << 23)  # there, more where a line is longer
_ENCODED = 1 << 15  # bytes of text of each of them
_UNPACKED = 1 << 24  # bytes that packed ones may hold
_LOST = 0.01  # share of the letters, or of the tokens, that is remarked on


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Tokens and documents of some files; `exact` where nothing had to be estimated."""

    tokens: float
    documents: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Texts of a file, and the bytes of the file that they stand for."""

    texts: list[bytes]
    stands_for: float


def estimate(files: Sequence[File], by: Tokenizer, key: str, remark: Callable[[str], object]) -> Estimate | None:
    """The tokens of files of text, None where a sample says nothing; raises Unreadable. What is odd in it is remarked on."""
    forms: dict[tuple[str, str], list[File]] = {}
    for file in files:
        forms.setdefault(form(file.path.name), []).append(file)
    try:
        rows = [_of_form(same, by, key, remark) for same in forms.values()]
    except Unfit as error:
        raise refused(str(error)) from None
    known = [row for row in rows if row]
    if len(known) < len(rows):
        return None
    exact = all(row.exact for row in known)
    return Estimate(tokens=sum(row.tokens for row in known), documents=sum(row.documents for row in known), exact=exact)


def _of_form(files: Sequence[File], by: Tokenizer, key: str, remark: Callable[[str], object]) -> Estimate | None:
    """The tokens of files of one form, from a few places in them that lie apart; raises Unfit."""
    rows, packing = form(files[0].path.name)
    places = _places(files, 0 if rows in ("parquet", "arrow") else _BYTES[0])
    samples = [_sample(file, key, 0 if packing else at) for file, at in places]
    texts = [text for sample in samples for text in sample.texts]
    if rows == "text":
        _remark_on_line_ends(texts, files[0], remark)
    if isinstance(by, Vocabulary):
        _remark_on_losses(texts, by, remark)
    size, ends = sum(file.size for file in files), by.end is not None
    if rows == "text" and not packing and isinstance(by, Bytes):
        return Estimate(tokens=size + ends * len(files), documents=len(files), exact=True)
    telling = [(file, sample) for (file, _), sample in zip(places, samples, strict=True) if sample.texts and sample.stands_for]
    if not telling:
        return None
    tokens = fmean(sum(len(encode(text, str(file.path), by)) for text in sample.texts) / sample.stands_for for file, sample in telling)
    documents = len(files) if rows == "text" else fmean(len(sample.texts) / sample.stands_for for _, sample in telling) * size
    return Estimate(tokens=tokens * size + ends * documents, documents=documents, exact=False)


def _places(files: Sequence[File], size: int) -> list[tuple[File, int]]:
    """(file, byte) of the places of `size` bytes that are looked into, each in the middle of an equal part of all bytes."""
    starts = np.cumsum([0, *(file.size for file in files)])
    part = max(int(starts[-1]) // _PLACES, size, 1)
    places = [at + (part - size) // 2 for at in range(0, int(starts[-1]), part)]
    found = []
    for place in places:
        at = min(place, int(starts[-1]) - 1)
        file = int(np.searchsorted(starts, at, "right")) - 1
        found.append((files[file], at - int(starts[file])))
    return found


def _sample(file: File, key: str, begin: int) -> _Sample:
    """Texts from a byte of a file on; raises Unfit."""
    rows, packing = form(file.path.name)
    if rows == "parquet" or rows == "arrow":
        try:
            found = columnar.sample(str(file.path), rows, key, begin, _ENCODED)
        except columnar.UnreadableTable as error:
            raise Unfit(f"{file.path} {error}") from None
        return _first(found.texts, file.size * found.share)
    for most in _BYTES:
        with open(file.path, "rb") as opened:
            begin = line_start(opened, begin)
            opened.seek(begin)
            start = opened.read(most)
        text = unpack_start(start, packing, _UNPACKED) if packing else start
        lines = text if begin + len(start) == file.size else text[: text.rfind(b"\n") + 1]
        if lines or rows == "text":
            break
    stands_for = len(start) * len(lines or text) / max(len(text), 1)
    if rows == "text":
        return _first([_whole_letters(lines or text).removeprefix(BOM_UTF8)], stands_for)
    return _first([each for each, _ in objects(io.BytesIO(lines), begin, None, str(file.path), key)], stands_for)


def _first(texts: list[bytes], stands_for: float) -> _Sample:
    """As many texts as are encoded, and the part of the bytes that they stand for."""
    taken, size = list[bytes](), 0
    for text in texts:
        if size >= _ENCODED:
            break
        taken.append(text)
        size += len(text)
    return _Sample(texts=taken, stands_for=stands_for * size / max(sum(map(len, texts)), 1))


def _whole_letters(text: bytes) -> bytes:
    """UTF-8 without the letter that was cut at its end."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start] if error.start >= len(text) - 3 else text
    return text


def _remark_on_line_ends(texts: Sequence[bytes], file: File, remark: Callable[[str], object]) -> None:
    ends = sum(text.count(b"\n") for text in texts)
    if ends and sum(text.count(b"\r\n") for text in texts) > ends / 2:
        remark(f"lines end with a carriage return too, as in {file.path}: it becomes tokens unless dos2unix takes it out")


def _remark_on_losses(texts: Sequence[bytes], by: Vocabulary, remark: Callable[[str], object]) -> None:
    """Say where a tokenizer does not know what the text is written in."""
    letters = lost = tokens = unknown = 0
    strange = _unknown(by.rules)
    for text in texts:
        words = text.decode()
        found = by.rules.encode(words, add_special_tokens=False)
        seen = np.array([not letter.isspace() for letter in words], bool)
        letters += int(seen.sum())
        for begin, end in found.offsets:
            seen[begin:end] = False
        lost += int(seen.sum())
        tokens += len(found.ids)
        unknown += found.ids.count(strange)
    if lost > _LOST * letters:
        remark(f"the tokenizer drops {100 * lost / letters:.0f} % of the letters of a sample of the text: it was not made for it")
    if unknown > _LOST * tokens:
        remark(f"the tokenizer does not know {100 * unknown / tokens:.0f} % of the tokens of a sample of the text: it was not made for it")


def _unknown(rules: Any) -> int | None:
    """The id of the token that stands for what a tokenizer does not know."""
    name = getattr(rules.model, "unk_token", None)
    return rules.token_to_id(name) if isinstance(name, str) else getattr(rules.model, "unk_id", None)
